"""Every knob, its unit and its help text. The command line is built from these fields; names are SGLang's.

`EngineConfig` is what the engine process needs, `ServerConfig` what the HTTP front needs. No environment variables.
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
    """Knobs of the engine."""

    model_path: str = _knob("tiny", "model directory or hub name; 'tiny' and 'tiny-vision' are inside the package")
    tokenizer_path: str | None = _knob(None, "tokenizer directory or hub name; default: the model's")
    load_format: str = _knob(
        "auto", "'auto' is whichever the model has; 'dummy' makes seeded random weights", LOAD_FORMATS
    )
    dtype: str = _knob("auto", "compute and weight type; auto is float32 on CPU, bfloat16 elsewhere", DTYPES)
    quantization: str = _knob(
        "none",
        "round the kernels of projections to 8 bits (fp8 is e4m3) when they are loaded; one scale for each output "
        "channel. Slow on a CPU, which converts them at every step",
        QUANTIZATIONS,
    )
    kv_cache_dtype: str = _knob(
        "auto",
        "type of cached keys and values; auto is that of --dtype. 8 bits are slow on a CPU, which converts the pool",
        KV_CACHE_DTYPES,
    )
    tp_size: int = _knob(1, "devices that share the model, each with a slice of every layer; CPU devices are made up")
    ep_size: int = _knob(
        1,
        "groups of these devices that have experts of their own, for a model with experts; its devices share "
        "the columns of each. With 1 all share all experts so, with as many as --tp-size each has whole ones",
    )
    nnodes: int = _knob(1, "hosts that share the model, each with as many of the devices; 'jsg serve' runs on each")
    node_rank: int = _knob(
        0, "which of the hosts this is; 0 leads and serves over HTTP, on the others the server's options mean nothing"
    )
    dist_init_addr: str | None = _knob(
        None, "HOST:PORT of the leader that the other hosts reach; it listens there and at the port behind it"
    )
    dist_timeout: float = _knob(
        8.0, "seconds that a step of several hosts may take, or a host be silent, before the engine is ended"
    )
    context_length: int | None = _knob(None, "tokens of prompt and output together; default: the model's")
    mem_fraction_static: float = _knob(0.85, "fraction of the device's whole memory that the engine may use")
    max_running_requests: int | None = _knob(None, "requests in one batch at most; default 32 on CPU, 256 elsewhere")
    max_total_tokens: int | None = _knob(None, "KV pool size in tokens; default: what the memory fraction leaves")
    vision_cache_size: int | None = _knob(
        None, "MiB of the device for encoded images; default: eight of the largest, and at least 1024 unless on CPU"
    )
    max_queued_requests: int = _knob(10_000, "requests that may wait; more are refused")
    queue_timeout: float | None = _knob(None, "seconds a request may wait for its first step; default: no limit")
    watchdog_timeout: float = _knob(300.0, "seconds without a turn of the step loop after which the engine is ended")
    chunked_prefill_size: int | None = _knob(None, "new tokens in one step at most; default 512 on CPU, 8192 elsewhere")
    max_prefill_tokens: int = _knob(16_384, "prompt tokens admitted per step at most")
    schedule_policy: str = _knob("lpm", "order of the waiting queue", POLICIES)
    schedule_conservativeness: float = _knob(1.0, "above 1 admits fewer requests and retracts less")
    max_bypass_tokens: int = _knob(
        16_384, "prefill tokens of later arrivals that may pass a waiting request before it goes to the head"
    )
    page_size: int | None = _knob(None, "KV slots in one page, what prefixes are shared in; default 1, more on a TPU")
    jump_forward: str = _knob(
        "draft",
        "what to do where a grammar leaves one way on, where a request does not say: propose its tokens and let the "
        "model verify them, append them, or generate them one by one",
        JUMP_FORWARD,
    )
    disable_radix_cache: bool = _knob(False, "share no prefixes")
    disable_overlap_schedule: bool = _knob(False, "wait for each step's tokens before planning the next")
    random_seed: int = _knob(0, "seed of dummy weights and of requests that name none")
    deterministic: bool = _knob(False, "bitwise equal answers whatever the batch, the chunks and the cache")
    forbid_compile: bool = _knob(False, "after warm-up an unplanned compile is an error")
    compilation_cache_dir: str | None = _knob(
        None,
        "owner-only directory of compiled programs; default ~/.cache/jsg/xla, but none on several hosts, which have to "
        "share what they name here",
    )
    disable_compilation_cache: bool = _knob(False, "keep no compiled programs on disk")
    profile_dir: str | None = _knob(
        None, "owner-only directory for a trace of 20 steps, after the first 10; TensorBoard and Perfetto read it"
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
    """Knobs of the HTTP front."""

    dp_size: int = _knob(
        1, "engines on this machine, each with --tp-size devices and a KV pool of its own; CPU engines share the cores"
    )
    host: str = _knob("127.0.0.1", "address to listen on")
    port: int = _knob(30000, "port to listen on")
    api_key: tuple[str, ...] = _knob(
        (),
        "bearer token that requests must carry; repeat it for several, which see nothing of each other. Others on this "
        "machine can see it in the list of processes: --api-key-file hides it",
    )
    api_key_file: str | None = _knob(None, "file with one key on each line, in addition to --api-key")
    admin_api_key: str | None = _knob(None, "key for what touches others: /flush_cache, /debug/radix, aborting all")
    cors_allow_origin: tuple[str, ...] = _knob((), "origin whose web pages may call this server; repeat it for several")
    served_model_name: str | None = _knob(None, "name in /v1/models; default: the model path")
    tool_call_parser: str = _knob(
        "auto", "the form in which the model calls tools; auto sees it in the chat template", TOOL_CALL_PARSERS
    )
    max_request_bytes: int = _knob(4 * 2**20, "largest request body, pictures and videos in it not counted")
    max_images_per_request: int = _knob(64, "pictures that one request may bring, for a model that sees")
    max_videos_per_request: int = _knob(4, "videos that one request may bring")
    max_frames_per_request: int = _knob(128, "frames of all its videos together that the model is shown")
    max_media_bytes: int = _knob(24 * 2**20, "bytes of the files of its pictures and videos, all together")
    max_image_pixels: int = _knob(2**25, "pixels of one picture or frame; all of a request may have four times that")
    allowed_media_host: tuple[str, ...] = _knob(
        (),
        "host from which http URLs of pictures and videos are fetched, as host or host:port; .host for all names below "
        "it; repeat it for several; default: none is fetched",
    )
    media_fetch_timeout: float = _knob(20.0, "seconds that fetching those of one request may take")
    max_requests_per_key: int | None = _knob(
        None, "answers that one key, or all clients where there are no keys, may have under way; default: no limit"
    )
    first_token_timeout: float | None = _knob(None, "seconds until the first token of an answer; default: no limit")
    request_timeout: float | None = _knob(None, "seconds a request may take in all; default: no limit")
    hold_timeout: float = _knob(600.0, "seconds for which one request may hold a prefix in the cache")
    program_timeout: float = _knob(600.0, "seconds a program sent whole may take")
    health_timeout: float = _knob(20.0, "seconds that /health_generate waits for its token")
    shutdown_timeout: float = _knob(20.0, "seconds that running requests get to finish after a SIGTERM")
    metrics_alias: str | None = _knob(None, "name the metrics also as this server does", METRICS_ALIASES)
    log_requests: bool = _knob(False, "one line of JSON on stderr for each request; it holds no text")
    otlp_traces_endpoint: str | None = _knob(None, "URL that OpenTelemetry spans are sent to (needs the extra 'otel')")

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
