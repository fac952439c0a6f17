"""How each engine is started and stopped. All of them stay up for the whole run, and take turns."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx

from bench.peers import clients
from bench.peers.clients import Client, HttpClient, WorkerClient
from bench.served import served
from bench.settled import wait_until_compiled
from jsg.free_ports import free_ports
from jsg.models.config import read_spec

HERE = Path(__file__).parent
MAX_ROWS = 32
CONTEXT_LENGTH = 2048
POOL_TOKENS = 43_008
START_LIMIT_S = 600
END_LIMIT_S = 30
HUGGING_FACE_BLOCK = 32
ITEMSIZES = {"float32": 4, "bfloat16": 2}
GGUF_KINDS = {"float32": "f32", "bfloat16": "bf16"}
BYTES_OF_JSG = {"int8": 1.0, "int4": 0.5 + 2 / 32}  # int4: 32 numbers of 4 bits have a scale in bfloat16
BYTES_OF_GGUF = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "q8_0": 34 / 32}  # q8_0: 32 numbers of 8 bits and a scale


class CannotStartError(Exception):
    """An engine did not start. The others go on without it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that runs.

    Attributes:
        name: Its name in the report.
        pid: The process whose tree it is.
        client: Runs loads on it.
        weight_itemsize: Bytes of one weight of the layers.
        head_itemsize: Bytes of one weight of the head.
        kv_itemsize: Bytes of one number in its keys and values.
        url: Its address; None where it is no server.
        model: The name by which a server knows the model; None for the first one that it lists.
        facts: Its versions.
        settle: Waits until nothing is left to compile.
    """

    name: str
    pid: int
    client: Client
    weight_itemsize: float
    head_itemsize: float
    kv_itemsize: int
    url: str | None = None
    model: str | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settle: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all engines have in common.

    Attributes:
        model: The directory of the checkpoint.
        dtype: `float32` or `bfloat16`.
        quantization: `none`, `int8` or `int4`, of jsg only.
        logs: A folder for what the engines write.
        num_threads: The cores for this process, which all engines use.
        context_length: The most tokens of a prompt and its answer.
        options: Further options of `jsg serve`.
    """

    model: Path
    dtype: str
    quantization: str
    logs: Path
    num_threads: int
    context_length: int = CONTEXT_LENGTH
    options: Sequence[str] = ()

    def pool_gib(self, itemsize: int) -> int:
        """Whole GiB that hold the keys and values of `POOL_TOKENS`."""
        per_token = read_spec(self.model).kv_bytes_per_token(itemsize)
        return math.ceil(POOL_TOKENS * per_token / 2**30)


Start = Callable[[Setting], contextlib.AbstractContextManager[Engine]]


@contextlib.contextmanager
def jsg(setting: Setting) -> Iterator[Engine]:
    """This jsg, with the interpreter that runs the bench."""
    itemsize = ITEMSIZES[setting.dtype]
    options = ["--dtype", setting.dtype, "--quantization", setting.quantization, "--port", "0"]
    options += ["--max-running-requests", str(MAX_ROWS), "--max-total-tokens", str(POOL_TOKENS), *setting.options]
    log = setting.logs / f"jsg{''.join(setting.options)}.log"
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(served(["serve", str(setting.model), *options], log=log))
        except RuntimeError as error:
            raise CannotStartError(str(error)) from error

        def settle() -> None:
            with httpx.Client(base_url=server.url, timeout=START_LIMIT_S) as http:
                wait_until_compiled(lambda: http.get("/get_server_info").json()["internal_states"][0])

        settle()
        yield Engine(
            name="jsg" if setting.quantization == "none" else f"jsg {setting.quantization}",
            pid=server.pids["front"],
            client=HttpClient(server.url, model_at(server.url), _response_format, clients.select),
            weight_itemsize=BYTES_OF_JSG.get(setting.quantization, itemsize),
            head_itemsize=itemsize,
            kv_itemsize=itemsize,
            url=server.url,
            settle=settle,
        )


def vllm(python: str, more: Sequence[str] = ()) -> Start:
    """vLLM, as `docs/benchmarking.md` says how to install it for a CPU. `more` are further options of its server."""

    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Engine]:
        itemsize, port = ITEMSIZES[setting.dtype], free_ports()
        options = [
            "--dtype",
            setting.dtype,
            "--max-model-len",
            str(setting.context_length),
            "--max-num-seqs",
            str(MAX_ROWS),
        ]
        options += ["--host", "127.0.0.1", "--port", str(port)]
        options += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *more]
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(setting.model), *options]
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        env = {
            "VLLM_CPU_KVCACHE_SPACE": str(setting.pool_gib(itemsize)),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with _process("vllm", command, setting, env) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(process, url)
            model = model_at(url)
            yield Engine(
                name="vllm",
                pid=process.pid,
                client=HttpClient(url, model, _structured_outputs, clients.by_prompt_logprobs(model)),
                weight_itemsize=itemsize,
                head_itemsize=itemsize,
                kv_itemsize=itemsize,
                url=url,
                facts={"vllm": httpx.get(f"{url}/version").json()["version"]},
            )

    return start


def llama_cpp(python: str, kind: str | None, drafts: str = "none") -> Start:
    """llama.cpp. `kind` is that of its weights, such as `q8_0`; None for that of the dtype. `drafts`: `--spec-type`."""

    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Engine]:
        weights = kind or GGUF_KINDS[setting.dtype]
        port = free_ports()
        shape = [str(setting.num_threads), str(POOL_TOKENS), str(MAX_ROWS)]
        file = gguf_file(python, setting.model, weights)
        command = [python, str(HERE / "llama_server.py"), str(file), str(port), *shape, drafts]
        with _process("llama.cpp", command, setting) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(process, url)
            yield Engine(
                name=f"llama.cpp {weights}",
                pid=process.pid,
                client=HttpClient(url, model_at(url), lambda schema: {"json_schema": schema}, usage_is_of_one=True),
                weight_itemsize=BYTES_OF_GGUF[weights],
                head_itemsize=BYTES_OF_GGUF[weights],
                kv_itemsize=2,
                url=url,
                facts=versions(python, "xllamacpp"),
            )

    return start


def openvino(python: str, kind: str | None) -> Start:
    """OpenVINO GenAI, in a worker process. It reads GGUF, of kind f16 unless another one is named."""

    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Engine]:
        weights = kind or "f16"
        file = gguf_file(python, setting.model, weights)
        shape = [str(setting.num_threads), str(setting.pool_gib(2)), str(MAX_ROWS)]
        command = [python, str(HERE / "openvino_worker.py"), str(file), *shape]
        with _worker("openvino", command, setting) as (process, facts):
            yield Engine(
                name=f"openvino {weights}",
                pid=process.pid,
                client=WorkerClient(process, POOL_TOKENS),
                weight_itemsize=BYTES_OF_GGUF[weights],
                head_itemsize=BYTES_OF_GGUF[weights],
                kv_itemsize=1,  # its cache has 8 bits on CPUs unless told otherwise
                facts=facts,
            )

    return start


def hugging_face(python: str, way: Literal["static", "continuous"]) -> Start:
    """Hugging Face transformers in a worker process: `generate` with static batches, or its continuous batching."""

    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Engine]:
        itemsize = ITEMSIZES[setting.dtype]
        script = HERE.parent / "pytorch" / "generate_worker.py"
        options = [str(setting.model), setting.dtype, str(setting.num_threads), way, str(POOL_TOKENS)]
        with _worker(f"hugging-face-{way}", [python, str(script), *options], setting) as (process, facts):
            yield Engine(
                name=f"hugging face, {way}",
                pid=process.pid,
                client=WorkerClient(process, MAX_ROWS if way == "static" else POOL_TOKENS),
                weight_itemsize=itemsize,
                head_itemsize=itemsize,
                kv_itemsize=itemsize,
                facts=facts,
            )

    return start


def hugging_face_server(python: str) -> Start:
    """Continuous batching of `transformers serve`. No answer ends before it is as long as was asked."""

    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Engine]:
        itemsize, port = ITEMSIZES[setting.dtype], free_ports()
        model, hub = endless(setting.model, setting.logs / "hugging-face-model"), setting.logs / "hub"
        hub.mkdir(exist_ok=True)  # it looks for models there before it answers
        options = ["--continuous-batching", "--device", "cpu", "--dtype", setting.dtype]
        options += [
            "--cb-block-size",
            str(HUGGING_FACE_BLOCK),
            "--cb-num-blocks",
            str(POOL_TOKENS // HUGGING_FACE_BLOCK),
        ]
        options += ["--host", "127.0.0.1", "--port", str(port)]
        command = [python, "-m", "transformers.cli.transformers", "serve", str(model), *options]
        env = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "OMP_NUM_THREADS": str(setting.num_threads)}
        with _process("hugging-face-server", command, setting, env) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(process, url)
            yield Engine(
                name="hugging face",
                pid=process.pid,
                client=HttpClient(url, str(model), lambda schema: {}),
                weight_itemsize=itemsize,
                head_itemsize=itemsize,
                kv_itemsize=itemsize,
                url=url,
                model=str(model),
                facts=versions(python, "transformers"),
            )

    return start


def endless(model: Path, directory: Path) -> Path:
    """Makes a directory with the files of a checkpoint by which Hugging Face's server knows no token that ends."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((model / name).read_text()) if (model / name).exists() else {}
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_text(json.dumps(fields | {"eos_token_id": None}))
    return directory


def gguf_file(python: str, model: Path, kind: str) -> Path:
    """The checkpoint as GGUF of this kind, which is made once. The interpreter needs `gguf` and `safetensors`."""
    if kind not in BYTES_OF_GGUF:
        raise CannotStartError(f"the kind of GGUF must be one of {', '.join(BYTES_OF_GGUF)}, but is {kind}")
    file = model / f"{kind}.gguf"
    if not file.exists():
        try:
            subprocess.run([python, str(HERE / "gguf_writer.py"), str(model), kind], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CannotStartError(f"no GGUF file could be made: {error}") from error
    return file


def versions(python: str, package: str) -> dict[str, str]:
    """The version of a package in another environment."""
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return {package: done.stdout.strip()}


def model_at(url: str) -> str:
    """The name of the first model of a server."""
    return httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


def wait_until_healthy(process: subprocess.Popen[str], url: str) -> None:
    """Returns when `/health` answers 200. Raises CannotStartError if the process ends or the time is over."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CannotStartError(f"it ended with status {process.returncode}; its log says why")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise CannotStartError(f"it was not ready after {START_LIMIT_S} s")


def _response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": "it", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _structured_outputs(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}


@contextlib.contextmanager
def _worker(
    name: str, command: Sequence[str], setting: Setting
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A worker that has said its versions, which is when its model is loaded."""
    with _process(name, command, setting, pipes=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise CannotStartError(f"it ended with status {process.wait(END_LIMIT_S)}; its log says why")
        yield process, json.loads(line)


@contextlib.contextmanager
def _process(
    name: str,
    command: Sequence[str],
    setting: Setting,
    env: Mapping[str, str] | None = None,
    *,
    pipes: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which ends with the block. Without pipes its output goes to its log too."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with (setting.logs / f"{name}.log").open("w") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                text=True,
                env=clean | dict(env or {}),
                start_new_session=True,
            )
        except OSError as error:
            raise CannotStartError(f"its interpreter does not run: {error.strerror}") from error
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the group: with SIGTERM, and with SIGKILL what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
