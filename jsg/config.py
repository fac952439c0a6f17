"""Every option with its unit and its help text. The command line is built from these fields; names are SGLang's.

`EngineConfig` is what the engine process needs, `ServerConfig` what the HTTP front needs. jsg reads no environment
variables of its own.
"""

import dataclasses
import math
import typing
from typing import Any

from jsg.errors import ConfigError

POLICIES = ("lpm", "dfs-weight", "fcfs", "random")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "fp8")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")
JUMP_FORWARD = ("draft", "retokenize", "off")
LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
METRICS_ALIASES = ("sglang", "vllm")
TOOL_CALL_PARSERS = ("auto", "llama3_json", "hermes", "mistral")


def _knob(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of the engine."""

    model_path: str = _knob(
        "tiny", "The model: a directory, a hub name, or 'tiny' or 'tiny-vision', which are inside the package."
    )
    tokenizer_path: str | None = _knob(None, "The directory or hub name of the tokenizer. Default: that of the model.")
    load_format: str = _knob(
        "auto",
        "Which weights are loaded. 'auto' takes the kind that the model has, 'dummy' makes seeded random weights.",
        LOAD_FORMATS,
    )
    dtype: str = _knob(
        "auto", "The type of weights and of computing. 'auto' is float32 on a CPU and bfloat16 elsewhere.", DTYPES
    )
    quantization: str = _knob(
        "none",
        "Rounds the kernels of projections to 8 bits when they are loaded, with one scale for each output "
        "channel; 'fp8' is e4m3. It is slow on a CPU, which converts them in every step.",
        QUANTIZATIONS,
    )
    kv_cache_dtype: str = _knob(
        "auto",
        "The type of cached keys and values. 'auto' is that of --dtype. 8 bits are slow on a CPU, which "
        "converts the pool.",
        KV_CACHE_DTYPES,
    )
    tp_size: int = _knob(
        1, "The number of devices that share the model; each holds a slice of every layer. On a CPU they are made up."
    )
    ep_size: int = _knob(
        1,
        "The number of groups into which the devices of --tp-size are divided, for a model with experts. Each "
        "group holds experts of its own, and its devices share the columns of these. 1 means one group that "
        "holds all experts; --tp-size means that each device holds whole experts.",
    )
    nnodes: int = _knob(
        1,
        "The number of hosts that share the model, each with equally many of the devices. Run 'jsg serve' on "
        "each host.",
    )
    node_rank: int = _knob(
        0, "The number of this host. Host 0 leads and serves over HTTP; the others ignore the options of the server."
    )
    dist_init_addr: str | None = _knob(
        None, "HOST:PORT of the leader, where the other hosts reach it. It listens there and at the next port."
    )
    dist_timeout: float = _knob(
        8.0, "Seconds that a step of several hosts may take, or that a host may be silent. Then the engine ends."
    )
    context_length: int | None = _knob(
        None, "The largest number of tokens of a prompt and its output together. Default: that of the model."
    )
    mem_fraction_static: float = _knob(0.85, "The fraction of the device's whole memory that the engine may use.")
    max_running_requests: int | None = _knob(
        None, "The largest number of requests in one batch. Default: 32 on a CPU, 256 elsewhere."
    )
    max_total_tokens: int | None = _knob(
        None, "The size of the KV pool in tokens. Default: what --mem-fraction-static leaves for it."
    )
    vision_cache_size: int | None = _knob(
        None,
        "MiB of device memory for encoded images. Default: eight of the largest, and at least 1024 unless on a CPU.",
    )
    max_queued_requests: int = _knob(10_000, "The number of requests that may wait. Further ones are refused.")
    queue_timeout: float | None = _knob(None, "Seconds that a request may wait for its first step. Default: no limit.")
    watchdog_timeout: float = _knob(300.0, "Seconds without a turn of the step loop after which the engine is ended.")
    chunked_prefill_size: int | None = _knob(
        None, "The largest number of new tokens in one step. Default: 512 on a CPU, 8192 elsewhere."
    )
    max_prefill_tokens: int = _knob(16_384, "The largest number of prompt tokens that are admitted in one step.")
    schedule_policy: str = _knob(
        "lpm", "The order of the waiting queue. 'lpm' takes the longest cached prefix first.", POLICIES
    )
    schedule_conservativeness: float = _knob(1.0, "A number above 1 admits fewer requests and retracts fewer.")
    max_bypass_tokens: int = _knob(
        16_384,
        "The number of prefill tokens of later arrivals that may pass a waiting request. Then it goes to the head.",
    )
    page_size: int | None = _knob(
        None, "Tokens in one page of the KV pool; prefixes are shared in whole pages. Default: 1, on a TPU 16 or more."
    )
    jump_forward: str = _knob(
        "draft",
        "What happens to text that a grammar forces, unless a request says otherwise: 'draft' proposes its "
        "tokens and lets the model verify them, 'retokenize' appends them, 'off' generates them one by one.",
        JUMP_FORWARD,
    )
    disable_radix_cache: bool = _knob(False, "Shares no prefixes.")
    disable_overlap_schedule: bool = _knob(False, "Waits for the tokens of each step before the next one is planned.")
    random_seed: int = _knob(0, "The seed of dummy weights, and of requests that name none.")
    deterministic: bool = _knob(False, "Gives bitwise equal answers whatever the batch, the chunks and the cache are.")
    forbid_compile: bool = _knob(False, "Makes a compile after warm-up an error.")
    compilation_cache_dir: str | None = _knob(
        None,
        "The owner-only directory of compiled programs. Default: ~/.cache/jsg/xla; none on several hosts, "
        "which must share the one that they name.",
    )
    disable_compilation_cache: bool = _knob(False, "Keeps no compiled programs on disk.")
    profile_dir: str | None = _knob(
        None, "An owner-only directory for a trace of 20 steps, after the first 10. TensorBoard and Perfetto read it."
    )

    def __post_init__(self) -> None:
        _check_types(self)
        _one_of("schedule_policy", self.schedule_policy, POLICIES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("jump_forward", self.jump_forward, JUMP_FORWARD)
        _between("tp_size", self.tp_size, 1, 64)
        _between("ep_size", self.ep_size, 1, 64)
        if self.tp_size % self.ep_size:
            raise ConfigError(
                f"--ep-size must divide --tp-size, which is {self.tp_size}, for groups of devices are of one size, but "
                f"got {self.ep_size}; choose another"
            )
        self._check_hosts()
        _between("mem_fraction_static", self.mem_fraction_static, 0.01, 1.0)
        _between("schedule_conservativeness", self.schedule_conservativeness, 0.01, 100.0)
        if self.page_size is not None:
            _between("page_size", self.page_size, 1, 1024)
        _between("max_queued_requests", self.max_queued_requests, 1, 10_000_000)
        _between("max_prefill_tokens", self.max_prefill_tokens, 1, 2**31 - 1)
        _between("max_bypass_tokens", self.max_bypass_tokens, 0, 2**31 - 1)
        _between("watchdog_timeout", self.watchdog_timeout, 1, 1e6)
        if self.queue_timeout is not None:
            _between("queue_timeout", self.queue_timeout, 0.001, 1e6)
        for name in ("context_length", "max_running_requests", "max_total_tokens", "chunked_prefill_size"):
            if getattr(self, name) is not None:
                _between(name, getattr(self, name), 1, 2**31 - 1)
        if self.vision_cache_size is not None:
            _between("vision_cache_size", self.vision_cache_size, 1, 2**20)

    @property
    def shared_cache_dir(self) -> str | None:
        """The directory of compiled programs that several hosts share; None where they keep none."""
        return None if self.nnodes == 1 or self.disable_compilation_cache else self.compilation_cache_dir

    def _check_hosts(self) -> None:
        _between("nnodes", self.nnodes, 1, 64)
        _between("node_rank", self.node_rank, 0, self.nnodes - 1)
        _between("dist_timeout", self.dist_timeout, 2, 1e6)
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ConfigError("--nnodes above 1 needs --dist-init-addr; name HOST:PORT of the leader, on every host")
        if self.nnodes == 1 and self.dist_init_addr is not None:
            raise ConfigError(
                "--dist-init-addr is for several hosts, but --nnodes is 1; leave it out or raise --nnodes"
            )
        if self.tp_size % self.nnodes:
            raise ConfigError(
                f"--tp-size counts the devices of all hosts, so --nnodes must divide it, but {self.nnodes} does not "
                f"divide {self.tp_size}"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP front."""

    dp_size: int = _knob(
        1,
        "The number of engines on this machine. Each has --tp-size devices and a KV pool of its own; on a CPU "
        "they share the cores.",
    )
    host: str = _knob("127.0.0.1", "The address to listen on.")
    port: int = _knob(30000, "The port to listen on.")
    api_key: tuple[str, ...] = _knob(
        (),
        "A bearer token that requests must carry. Repeat it for several keys, which see nothing of each "
        "other. The list of processes shows it to others on this machine; --api-key-file hides it.",
    )
    api_key_file: str | None = _knob(None, "A file with one key on each line, in addition to --api-key.")
    admin_api_key: str | None = _knob(
        None, "The key for calls that touch others: /flush_cache, /debug/radix and aborting all requests."
    )
    cors_allow_origin: tuple[str, ...] = _knob(
        (), "An origin whose web pages may call this server. Repeat it for several."
    )
    served_model_name: str | None = _knob(None, "The name in /v1/models. Default: the model path.")
    tool_call_parser: str = _knob(
        "auto", "The form in which the model calls tools. 'auto' finds it in the chat template.", TOOL_CALL_PARSERS
    )
    max_request_bytes: int = _knob(
        4 * 2**20, "The largest body of a request in bytes, without the pictures and videos in it."
    )
    max_images_per_request: int = _knob(64, "The number of pictures that one request may bring.")
    max_videos_per_request: int = _knob(4, "The number of videos that one request may bring.")
    max_frames_per_request: int = _knob(
        128, "The number of frames that the model is shown of all videos of a request together."
    )
    max_media_bytes: int = _knob(
        24 * 2**20, "The largest number of bytes of all files of pictures and videos of a request together."
    )
    max_image_pixels: int = _knob(
        2**25, "The number of pixels that one picture or frame may have. All of a request may have four times that."
    )
    allowed_media_host: tuple[str, ...] = _knob(
        (),
        "A host from which pictures and videos are fetched by http URL, as host or host:port; .host stands "
        "for all names below it. Repeat it for several. Default: none is fetched.",
    )
    media_fetch_timeout: float = _knob(20.0, "Seconds that fetching the pictures and videos of one request may take.")
    max_requests_per_key: int | None = _knob(
        None,
        "The number of answers that one key may have under way, or all clients where there are no keys. "
        "Default: no limit.",
    )
    first_token_timeout: float | None = _knob(None, "Seconds until the first token of an answer. Default: no limit.")
    request_timeout: float | None = _knob(None, "Seconds that a request may take in all. Default: no limit.")
    hold_timeout: float = _knob(600.0, "Seconds for which one request may hold a prefix in the cache.")
    program_timeout: float = _knob(600.0, "Seconds that a program may take which was sent whole.")
    health_timeout: float = _knob(20.0, "Seconds that /health_generate waits for its token.")
    shutdown_timeout: float = _knob(20.0, "Seconds that running requests get to finish after a SIGTERM.")
    metrics_alias: str | None = _knob(None, "Also names the metrics as this server does.", METRICS_ALIASES)
    log_requests: bool = _knob(
        False, "Writes one line of JSON to stderr for each request. The line holds no text of it."
    )
    otlp_traces_endpoint: str | None = _knob(
        None, "The URL to which OpenTelemetry spans are sent. It needs the extra 'otel'."
    )

    def __post_init__(self) -> None:
        for name in ("api_key", "cors_allow_origin", "allowed_media_host"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        _check_types(self)
        _between("dp_size", self.dp_size, 1, 64)
        _between("port", self.port, 0, 65535)
        _between("max_request_bytes", self.max_request_bytes, 1024, 2**31)
        _between("max_media_bytes", self.max_media_bytes, 1024, 2**30)
        for name in ("max_images_per_request", "max_videos_per_request", "max_frames_per_request"):
            _between(name, getattr(self, name), 1, 4096)
        _between("max_image_pixels", self.max_image_pixels, 1, 2**26)  # above it Pillow itself suspects a bomb
        if self.metrics_alias is not None:
            _one_of("metrics_alias", self.metrics_alias, METRICS_ALIASES)
        _one_of("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        for name in (
            *("first_token_timeout", "request_timeout", "hold_timeout", "program_timeout"),
            *("health_timeout", "shutdown_timeout", "media_fetch_timeout"),
        ):
            if getattr(self, name) is not None:
                _between(name, getattr(self, name), 0.001, 1e6)
        if self.max_requests_per_key is not None:
            _between("max_requests_per_key", self.max_requests_per_key, 1, 10_000_000)


def _check_types(config: "EngineConfig | ServerConfig") -> None:
    """Each value is of the type its field is annotated with; an integer is a float too, a bool is no integer."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value, allowed = getattr(config, name), typing.get_args(hint) or (hint,)
        if typing.get_origin(hint) is tuple:  # an option that may be given several times
            ok, allowed = all(type(item) is str for item in value), (str,)
        else:
            ok = type(value) in allowed or (float in allowed and type(value) is int)
        if not ok:
            kinds = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
            raise ConfigError(f"{option(name)} must be of type {kinds}, but got {value!r}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option(name)} must be one of {', '.join(allowed)}, but got {value!r}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{option(name)} must be in [{low}, {high}], but got {value!r}")


def option(name: str) -> str:
    """The command-line spelling of a field: `page_size` is `--page-size`."""
    return "--" + name.replace("_", "-")
