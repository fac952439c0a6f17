"""Every option with its unit and its help text. The command line is built from these fields; names are SGLang's.

`EngineConfig` is what the engine process needs, `ServerConfig` what the HTTP front needs. The only environment
variables of jsg's own are those of `KEY_VARIABLES`.
"""

import argparse
import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

from jsg.errors import ConfigError

POLICIES = ("lpm", "fcfs")
LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
LOG_FORMATS = ("text", "json")
LOG_FORMAT_HELP = "The form of each line on stderr: time, level, process and message as text, or as an object of JSON."
TOOL_CALL_PARSERS = (
    *("auto", "kimi_k2", "deepseek_v3", "deepseekv3", "deepseek_v31", "deepseekv31", "harmony", "gpt-oss", "openai"),
    *("mistral_args", "mistral", "nemotron_json", "nemotron", "qwen3_coder", "qwen3_xml", "glm45", "glm", "glm47"),
    *("minimax_m2", "minimax-m2", "minimax", "gemma4", "functiongemma", "lfm2", "pythonic", "llama4_pythonic"),
    *("llama4", "hermes", "qwen25", "qwen", "llama3_json", "llama3", "llama4_json"),
)
"""The names of `jsg.speech.dialects` and their aliases."""
_REASONING_PARSERS = (
    *("cohere-command-a", "deepseek-r1", "deepseek-v3", "ernie45", "gemma4", "glm45", "gpt-oss", "hunyuan"),
    *("kimi", "kimi-k2", "minimax", "minimax-append-think", "mistral", "nemotron", "olmo3", "qwen3"),
    *("qwen3-thinking", "seed-oss", "step3"),
    *("cohere-command3", "harmony", "hunyuan-a13b", "magistral", "minimax-m2", "minimax-m2-append-think"),
    *("nemotron-3", "nemotron-v3", "openai-gptoss"),
)
REASONING_PARSERS = tuple(
    dict.fromkeys(("auto", "none", *_REASONING_PARSERS, *(name.replace("-", "_") for name in _REASONING_PARSERS)))
)
"""The names of `jsg.speech.answers.thoughts` and their aliases, also as vLLM writes them."""
COUNT = (1, 2**31 - 1)
SECONDS = (0.001, 1e6)
KEY_VARIABLES = {"api_key": "JSG_API_KEY", "admin_api_key": "JSG_ADMIN_API_KEY"}
"""Options whose values are keys → the environment variables that give them to `jsg serve` too."""


DECIDED_BY_THE_GATE = frozenset(
    {"num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size"}
    | {
        f"suffix_decoding_{name}"
        for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    }
)
"""What vLLM lets its user choose of drafts without a model."""


def speculative_method(text: str) -> str:
    """The value of `--speculative` that a JSON object of vLLM's `--speculative-config` means; else the text itself.

    How many tokens are proposed is decided by what they are worth, so that vLLM's numbers for it have no effect.

    Raises:
        argparse.ArgumentTypeError: It is no such object, or has fields for a model of its own.
    """
    if not text.lstrip().startswith("{"):
        return text
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, but {error}; or say auto") from None
    method, others = fields.pop("method", None), fields.keys() - DECIDED_BY_THE_GATE
    if others or method is None:
        has = f"has {', '.join(sorted(others))}" if others else "has none"
        raise argparse.ArgumentTypeError(f"must name a method without a model of its own, but {has}; or say auto")
    return str(method)


def _knob(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    read: Callable[[str], Any] | None = None,
) -> Any:
    """An option.

    Args:
        default: Its value if it is not given.
        text: What it does.
        choices: The values that it may have; empty for any of its type.
        aliases: The names that other servers have for it.
        read: Makes a value of a text, or raises argparse.ArgumentTypeError; None for what the type says.
    """
    metadata = {"help": text, "choices": choices, "aliases": aliases, "read": read}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of the engine."""

    model_path: str = _knob(
        "tiny",
        "The model: a directory, a GGUF file, a name on the Hugging Face hub, or the embedded 'tiny' or 'tiny-vision'.",
    )
    tokenizer_path: str | None = _knob(
        None, "The directory or hub name of the tokenizer. Default: the tokenizer of the model."
    )
    load_format: str = _knob(
        "auto",
        "The kind of weight files to load. 'auto' loads the kind that the model has; 'dummy' makes random weights.",
        LOAD_FORMATS,
    )
    task: str = _knob(
        "auto",
        "What the model does. 'auto' means 'embed' for a directory of sentence-transformers, which has a modules.json, "
        "and 'generate' otherwise. With 'embed' any other model gives the normed hidden state of the last token.",
        ("auto", "generate", "embed"),
    )
    dtype: str = _knob(
        "auto",
        "The number type of weights and computations. 'auto' means float32 on a CPU and bfloat16 elsewhere.",
        ("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = _knob(
        "none",
        "Stores the weight matrices of projections and experts in 8 bits, with one scale for each output channel, or "
        "with 'int4' in 4 bits, with one scale for each 32 inputs of a channel. 'fp8' means the type e4m3. On a CPU "
        "products read them as they are.",
        ("none", "int8", "fp8", "int4"),
    )
    fp8_products: str = _knob(
        "auto",
        "Whether the inputs of kernels in e4m3, by '--quantization fp8' or of the checkpoint, are rounded to e4m3 too, "
        "each token by itself. 'auto' does so on cards that multiply e4m3: NVIDIA's of compute capability 8.9 or more. "
        "'on' computes the same on a CPU, slowly, to measure what it changes. 'off' rounds weights only.",
        ("auto", "on", "off"),
    )
    kv_cache_dtype: str = _knob(
        "auto",
        "The number type of cached keys and values. 'auto' means the type of --dtype. The types of 8 bits save memory, "
        "but they are slow on a CPU, which converts the pool.",
        ("auto", "fp8_e4m3", "fp8_e5m2"),
    )
    tp_size: Annotated[int, (1, 64)] = _knob(
        1, "The number of devices that share the model. Each holds a slice of every layer. A CPU simulates the devices."
    )
    ep_size: Annotated[int, (1, 64)] = _knob(
        1,
        "The number of groups into which the devices of --tp-size are divided, for a model with experts. Each group "
        "holds its own experts, and the devices of a group share the columns of each expert. With 1, one group holds "
        "all experts. With the value of --tp-size, each device holds whole experts.",
    )
    nnodes: Annotated[int, (1, 64)] = _knob(
        1, "The number of hosts that share the model, each with equally many devices. Run 'jsg serve' on each host."
    )
    node_rank: int = _knob(
        0, "The number of this host. Host 0 leads and serves HTTP; the other hosts ignore the options of the server."
    )
    dist_init_addr: str | None = _knob(
        None,
        "HOST:PORT at which the other hosts reach host 0, which listens at this port and the next. Default: one host.",
    )
    dist_timeout: Annotated[float, (2, 1e6)] = _knob(
        8.0, "The seconds after which the engine ends if a step of several hosts is not done, or if a host is silent."
    )
    context_length: Annotated[int, COUNT] | None = _knob(
        None, "The largest number of tokens in a prompt and its output together. Default: the limit of the model."
    )
    mem_fraction_static: Annotated[float, (0.01, 1.0)] = _knob(
        0.85, "The fraction of the device's memory that the engine may use."
    )
    max_running_requests: Annotated[int, COUNT] | None = _knob(
        None, "The largest number of requests in one batch. Default: 32 on a CPU, 256 elsewhere."
    )
    max_total_tokens: Annotated[int, COUNT] | None = _knob(
        None, "The size of the KV pool in tokens. Default: all memory that --mem-fraction-static leaves for it."
    )
    max_states: Annotated[int, (0, 1_000_000)] | None = _knob(
        None,
        "The number of cached prefixes of a hybrid model that keep a state, without which nothing goes on from them. "
        "Default: two for each running request, in at most a quarter of the memory beside the weights.",
    )
    vision_cache_size: Annotated[int, (1, 2**20)] | None = _knob(
        None,
        "The MiB of device memory for encoded pictures. Default: room for eight large ones; 1024 or more on a GPU.",
    )
    max_queued_requests: Annotated[int, (1, 10_000_000)] = _knob(
        10_000, "The number of requests that may wait. The server refuses further requests."
    )
    queue_timeout: Annotated[float, SECONDS] | None = _knob(
        None, "The seconds after which a request ends with an error if it had no step yet. Default: no limit."
    )
    watchdog_timeout: Annotated[float, (1, 1e6)] = _knob(
        300.0, "The seconds without a turn of the step loop after which the engine is ended."
    )
    chunked_prefill_size: Annotated[int, COUNT] | None = _knob(
        None,
        "The number of new tokens in a step; a longer prompt is cut into chunks. Default: 512 on a CPU, else 8192.",
    )
    max_prefill_tokens: Annotated[int, COUNT] = _knob(
        16_384, "The largest number of prompt tokens of the requests that are admitted in one step."
    )
    schedule_policy: str = _knob(
        "lpm",
        "The order of the waiting queue. 'lpm' takes the longest cached prefix first, and 'fcfs' the first arrival.",
        POLICIES,
    )
    schedule_conservativeness: Annotated[float, (0.01, 100.0)] = _knob(
        1.0,
        "How much memory is kept for the output of running requests. A value above 1 admits requests later, so fewer "
        "of them are sent back to the queue for lack of memory.",
    )
    max_bypass_tokens: Annotated[int, (0, 2**31 - 1)] = _knob(
        16_384,
        "The prompt tokens of later requests that may pass a waiting request before it goes to the queue's head.",
    )
    page_size: Annotated[int, (1, 1024)] | None = _knob(
        None,
        "The tokens in a page of the KV pool. Requests share whole pages of a prefix. Default: 1; 64 on a TPU.",
    )
    jump_forward: str = _knob(
        "draft",
        "What happens where a grammar allows only one text, unless a request says otherwise: 'draft' proposes its "
        "tokens and lets the model verify them, 'retokenize' appends them, 'off' generates them one by one.",
        ("draft", "retokenize", "off"),
    )
    speculative: str = _knob(
        "auto",
        "Where drafts come from, unless a request says otherwise: 'auto' also copies what prompt, prefix and namespace "
        "had before, and asks the model's own layer for drafts (MTP), where that saves time; 'off' leaves it at what a "
        "grammar forces. Drafts change no answer. What SGLang and vLLM call such drafts means 'auto', also as the "
        "method in vLLM's JSON.",
        ("auto", "off", "ngram", "NGRAM", "suffix", "mtp", "NEXTN"),
        aliases=("speculative_algorithm", "speculative_config"),
        read=speculative_method,
    )
    disable_radix_cache: bool = _knob(False, "Turns off the cache of prefixes, so that requests share no prefix.")
    disable_overlap_schedule: bool = _knob(
        False, "Plans each step after the tokens of the step before it are known. Default: while that step still runs."
    )
    random_seed: int = _knob(0, "The seed of dummy weights, and of requests that give no seed.")
    deterministic: bool = _knob(
        False, "Makes answers equal to the last bit, whatever runs beside them and whatever is cached. This is slower."
    )
    forbid_compile: bool = _knob(False, "Makes it an error if a program is compiled after the start.")
    compilation_cache_dir: str | None = _knob(
        None,
        "The owner-only directory of compiled programs. Several hosts must share it. Default: ~/.cache/jsg/xla for one "
        "host, and no directory for several.",
    )
    disable_compilation_cache: bool = _knob(False, "Keeps no compiled programs on disk, so that each start is slow.")
    programs: str | None = _knob(
        None,
        "The folder of programs that 'jsg compile' has written, so that nothing is compiled. It must have been written "
        "with the options of this start. Default: programs are compiled.",
    )
    profile_dir: str | None = _knob(
        None, "An owner-only directory for a trace of steps 11 to 30, for TensorBoard or Perfetto. Default: no trace."
    )

    def __post_init__(self) -> None:
        _check(self)
        if self.tp_size % self.ep_size:
            raise ConfigError(
                f"--ep-size must divide --tp-size, which is {self.tp_size}, so that all groups have one size, but "
                f"got {self.ep_size}; choose another"
            )
        _between(option("node_rank"), self.node_rank, 0, self.nnodes - 1)
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ConfigError(
                "--nnodes above 1 needs --dist-init-addr, but it is missing; give HOST:PORT of host 0 on each host"
            )
        if self.nnodes == 1 and self.dist_init_addr is not None:
            raise ConfigError(
                "--dist-init-addr is for several hosts, but --nnodes is 1; leave it out or raise --nnodes"
            )
        if self.nnodes > 1 and self.programs is not None:
            raise ConfigError("--programs is for one host, but --nnodes is above 1; leave it out")
        if self.tp_size % self.nnodes:
            raise ConfigError(
                f"--tp-size counts the devices of all hosts, so --nnodes must divide it, but {self.nnodes} does not "
                f"divide {self.tp_size}; change one of them"
            )

    @property
    def shared_cache_dir(self) -> str | None:
        """The directory of compiled programs that several hosts share; None where they keep none."""
        return None if self.nnodes == 1 or self.disable_compilation_cache else self.compilation_cache_dir


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP front."""

    dp_size: Annotated[int, (1, 64)] = _knob(
        1,
        "The number of engines on this machine (data parallelism). Each engine has --tp-size devices and its own KV "
        "pool. On a CPU the engines share the cores.",
    )
    front_processes: Annotated[int, (1, 64)] | None = _knob(
        None,
        "The number of processes that read requests and write answers. Above 1 a further process, the hub, has the "
        "limits, the engines and what is stored. 'auto' means one for each two engines of --dp-size, as far as there "
        "are eight cores for each. --api-server-count and --tokenizer-worker-num are other names of this option. "
        "Default: auto.",
        aliases=("api_server_count", "tokenizer_worker_num"),
    )
    host: str = _knob("127.0.0.1", "The address to listen on.")
    port: Annotated[int, (0, 65535)] = _knob(30000, "The port to listen on. With 0 the system chooses one.")
    api_key: tuple[str, ...] = _knob(
        (),
        "A bearer token that requests must carry. Repeat the option for several keys; their requests share no cache. "
        "Others on this machine see it in the list of processes; --api-key-file, --config and the environment variable "
        "JSG_API_KEY hide it. Default: no key is needed.",
    )
    api_key_file: str | None = _knob(
        None,
        "A file with one key on each line, in addition to those of --api-key. 'NAME: KEY' names a key for the log.",
    )
    admin_api_key: str | None = _knob(
        None,
        "The key for what concerns all clients: /flush_cache, all of /debug/radix, and the abort of all requests. "
        "The environment variable JSG_ADMIN_API_KEY gives it too.",
    )
    cors_allow_origin: tuple[str, ...] = _knob(
        (),
        "An origin whose web pages may call this server. On a loopback address requests may also name its host. Repeat "
        "the option for several. Default: none.",
    )
    no_page: bool = _knob(False, "Leaves out the web page at /, which otherwise anybody may load without a key.")
    root_path: str = _knob(
        "",
        "The path prefix, such as /models/chat, below which a proxy shows this server. Requests may come with or "
        "without the prefix.",
    )
    served_model_name: str | None = _knob(None, "The name of the model in /v1/models. Default: the model path.")
    tool_call_parser: str = _knob(
        "auto",
        "The form in which the model writes calls of tools. 'auto' finds the form in the chat template.",
        TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = _knob(
        "auto",
        "The kind of markers around the thoughts of the model, which tell them from its answers. 'auto' finds them in "
        "the chat template, 'none' leaves thoughts in the text. The names of vLLM and SGLang are taken.",
        REASONING_PARSERS,
    )
    max_request_bytes: Annotated[int, (1024, 2**31)] = _knob(
        4 * 2**20, "The most bytes in the body of a request, without its pictures and videos."
    )
    decision_temperature: Annotated[float, (0.01, 100.0)] = _knob(
        1.0,
        "Calibrates decisions: the log-probabilities of their labels are divided by it. Above 1 the answers are less "
        "certain.",
    )
    strict_fields: bool = _knob(
        False, "Refuses fields that have no effect, which otherwise are taken with a warning in the response."
    )
    max_images_per_request: Annotated[int, (1, 4096)] = _knob(64, "The number of pictures that a request may have.")
    max_videos_per_request: Annotated[int, (1, 4096)] = _knob(4, "The number of videos that a request may have.")
    max_frames_per_request: Annotated[int, (1, 4096)] = _knob(
        128, "The number of frames that the model sees of all videos of a request together."
    )
    max_media_bytes: Annotated[int, (1024, 2**30)] = _knob(
        24 * 2**20, "The most bytes in the files of all pictures and videos of a request together."
    )
    max_image_pixels: Annotated[int, (1, 2**26)] = _knob(
        2**25,
        "The most pixels of one picture or frame. All pictures of a request together may have four times as many.",
    )
    allowed_media_host: tuple[str, ...] = _knob(
        (),
        "A host from which pictures and videos are fetched by http URL: HOST, HOST:PORT, or .HOST for all names below "
        "HOST. Repeat the option for several. Default: nothing is fetched.",
    )
    media_fetch_timeout: Annotated[float, SECONDS] = _knob(
        20.0, "The seconds in which all pictures and videos of a request must be fetched."
    )
    max_requests_per_key: Annotated[int, (1, 10_000_000)] | None = _knob(
        None, "The answers that one key may have under way, or all clients if there are no keys. Default: no limit."
    )
    first_token_timeout: Annotated[float, SECONDS] | None = _knob(
        None, "The seconds in which the first token of an answer must come. Default: no limit."
    )
    request_timeout: Annotated[float, SECONDS] | None = _knob(
        None, "The seconds that a request may take from its arrival to its end. Default: no limit."
    )
    hold_timeout: Annotated[float, SECONDS] = _knob(
        600.0, "The seconds for which a client may hold a prefix in the cache."
    )
    program_timeout: Annotated[float, SECONDS] = _knob(
        600.0, "The seconds that a program may take which a client has sent as a whole."
    )
    health_timeout: Annotated[float, SECONDS] = _knob(
        20.0, "The seconds for which /health_generate waits for its token."
    )
    drain_delay: Annotated[float, (0, 1e6)] = _knob(
        0.0,
        "The seconds after a SIGTERM in which /ready answers 503 already and requests are still taken, so that none is "
        "lost until proxies have noticed. --shutdown-timeout begins afterwards. A second SIGTERM ends the delay.",
    )
    shutdown_timeout: Annotated[float, SECONDS] = _knob(
        20.0, "The seconds that running requests have to end after a SIGTERM."
    )
    metrics_alias: str | None = _knob(
        None,
        "Shows each metric also under the name that this other server gives it. Default: jsg's names only.",
        ("sglang", "vllm"),
    )
    open_metrics: bool = _knob(
        False, "Answers /metrics without a key, for scrapers that have none. It has no text of any request."
    )
    kv_events_endpoint: str | None = _knob(
        None,
        "The address, as tcp://ADDR:PORT, at which the engine publishes which blocks of tokens its prefix cache gains "
        "and loses, in vLLM's wire format. Engine N of --dp-size publishes N ports higher; past events are --dp-size "
        "ports above. Without ADDR it is 127.0.0.1, and '*' means every address. Default: nothing is published.",
    )
    kv_events_topic: str = _knob("", "The topic of --kv-events-endpoint, such as 'kv@ADDR@MODEL' for llm-d.")
    exit_with_parent: bool = _knob(
        False,
        "Ends the server, as a SIGTERM does, when the process that started it has ended, so that none is left behind "
        "where a supervisor is killed. It works on each of several hosts.",
    )
    log_format: str = _knob("text", LOG_FORMAT_HELP, LOG_FORMATS)
    log_requests: bool = _knob(
        False,
        "Writes one line to stderr for each request that generates or is refused. The line has no text of the request.",
    )
    otlp_traces_endpoint: str | None = _knob(
        None,
        "The URL to which OpenTelemetry spans are sent. It needs packages of OpenTelemetry. Default: none are sent.",
    )

    def __post_init__(self) -> None:
        for name in ("api_key", "cors_allow_origin", "allowed_media_host"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        _check(self)


def _check(config: "EngineConfig | ServerConfig") -> None:
    """Checks that each value has the type of its field and is one of its choices or within its bounds.

    A float field takes an integer, but an integer field takes no bool. Raises ConfigError.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        allowed = _alternatives(hint)
        if typing.get_origin(hint) is tuple:  # an option that may be given several times
            ok, allowed = all(type(item) is str for item in value), [str]
        else:
            ok = type(value) in allowed or (float in allowed and type(value) is int)
        if not ok:
            kinds = " or ".join(kind.__name__ for kind in allowed if kind is not types.NoneType)
            raise ConfigError(f"{option(field.name)} must be of type {kinds}, but got {value!r}; correct it")
        check_value(option(field.name), value, field, hint)


def check_value(shown: str, value: Any, field: "dataclasses.Field[Any]", hint: Any) -> None:
    """Checks that a value of the right type is one of its field's choices or within its bounds.

    Args:
        shown: The name of the option, for the message.
        value: The value.
        field: The field.
        hint: The annotation of the field, with its bounds.

    Raises:
        ConfigError: It is not.
    """
    if value is None:
        return
    if (choices := field.metadata["choices"]) and value not in choices:
        raise ConfigError(f"{shown} must be one of {', '.join(choices)}, but got {value!r}; choose one")
    for part in _parts(hint):
        if typing.get_origin(part) is Annotated:
            _between(shown, value, *part.__metadata__[0])


def value_type(hint: Any) -> type:
    """The type of an option's value: T of `T | None`; `tuple` if the option may be given several times."""
    if typing.get_origin(hint) is tuple:
        return tuple
    return next(kind for kind in _alternatives(hint) if kind is not types.NoneType)


def number_or_auto(text: str) -> int | None:
    """The value of an option without a fixed default, which `auto` stands for. Raises ValueError for other words."""
    return None if text == "auto" else int(text)


def _parts(hint: Any) -> "tuple[Any, ...] | list[Any]":
    """The members of a union with their bounds; the annotation itself if it is none."""
    return [hint] if typing.get_origin(hint) is Annotated else typing.get_args(hint) or [hint]


def _alternatives(hint: Any) -> list[Any]:
    """The types that a value may have, without their bounds."""
    return [part.__origin__ if typing.get_origin(part) is Annotated else part for part in _parts(hint)]


def _between(shown: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{shown} must be in [{low}, {high}], but got {value!r}; correct it")


def option(name: str) -> str:
    """The command-line spelling of a field: `page_size` is `--page-size`."""
    return "--" + name.replace("_", "-")
