"""Servers around the scripted engine of `tests/engine/fake_core.py`, and a tokenizer of bytes."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import tokenizers

if TYPE_CHECKING:
    from tests.server.battery import Battery

ROOT = Path(__file__).parents[2]
END_DEADLINE_S = 20
POLL_DEADLINE_S = 20  # a busy machine is no failure

REAL_OPTIONS = (  # few shapes, so that little compiles; chunks that are short, so that a prefill takes many steps
    *("--max-running-requests", "8", "--chunked-prefill-size", "128", "--max-total-tokens", "65536"),
    "--forbid-compile",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONG = {"text": "ab", "stream": True, "sampling_params": {"max_new_tokens": 1000}}  # takes the scripted engine seconds
CHAT = [{"role": "user", "content": "ab"}]
LONG_STREAMS = {  # the same in every API that generates
    "/generate": LONG,
    "/v1/completions": {"prompt": "ab", "max_tokens": 1000, "stream": True},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 900, "stream": True},
    "/v1/responses": {"input": "ab", "max_output_tokens": 900, "stream": True},
    "/v1/messages": {"model": "fake", "messages": CHAT, "max_tokens": 900, "stream": True},
}
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<s>"]


def write_byte_tokenizer(
    directory: Path, chat_template: str | None, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> None:
    """One token for each byte, and special tokens behind them (from 256 on)."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "add_bos_token": False}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory, CHAT_TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def plain_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain_tokenizer")
    write_byte_tokenizer(directory, None)
    return directory


class RunningServer:
    """A front process; `http` talks to it once it listens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.http = httpx.Client(timeout=20)
        self.greeting = ""

    def wait_until_ready(self) -> None:
        """Reads the greeting and takes the address from it."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("curl "):
                break
        self.greeting = "".join(lines)
        match = re.search(r"ready at (http://\S+)", self.greeting)
        assert match, f"no greeting; exit status {self.process.wait(END_DEADLINE_S)}"
        self.http.base_url = match[1]

    def end(self) -> tuple[int, str]:
        """Exit status and the rest of stdout."""
        assert self.process.stdout is not None
        rest = self.process.stdout.read()
        return self.process.wait(END_DEADLINE_S), rest

    def stats(self, headers: dict[str, str] | None = None) -> dict:
        return self.http.get("/get_server_info", headers=headers).json()["internal_states"][0]

    def wait_for_stats(self, headers: dict[str, str] | None = None, **wanted: int) -> None:
        """Waits until the engine's counters are the wanted ones."""
        deadline = time.monotonic() + POLL_DEADLINE_S
        while not wanted.items() <= (stats := self.stats(headers)).items():
            assert time.monotonic() < deadline, f"wanted {wanted}, got {stats}"
            time.sleep(0.02)

    def send(self, path: str, body: dict, headers: dict[str, str] | None = None) -> HTTPConnection:
        """Sends a request and waits for nothing; closing what this gives is the client's leaving."""
        url = self.http.base_url
        connection = HTTPConnection(url.host, url.port or 80, timeout=20)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        return connection

    @contextlib.contextmanager
    def holding(self, count: int, headers: dict[str, str] | None = None) -> Iterator[None]:
        """So many requests that do not end soon; they have reached the engine, and their clients leave at the end."""
        with contextlib.ExitStack() as clients:
            before = self.stats(headers)["num_added"]
            for number in range(1, count + 1):
                clients.enter_context(contextlib.closing(self.send("/generate", LONG, headers)))
                self.wait_for_stats(headers, num_added=before + number)
            yield


ServerMaker = Callable[..., contextlib.AbstractContextManager[RunningServer]]


@contextlib.contextmanager
def running(command: list[str], *, wait: bool = True, stderr: Path | None = None) -> Iterator[RunningServer]:
    """A front process of this Python; it is killed at the end, if it is still there, and its engine dies with it."""
    with stderr.open("wb") if stderr else contextlib.nullcontext() as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    server = RunningServer(process)
    with process, server.http:
        try:
            if wait:
                server.wait_until_ready()
            yield server
        finally:
            process.kill()


@pytest.fixture(scope="session")
def make_server(tokenizer_dir: Path) -> ServerMaker:
    """Makes servers around the scripted engine, with these knobs."""

    def make(
        *,
        engine: dict | None = None,
        server: dict | None = None,
        tokenizer: Path = tokenizer_dir,
        wait: bool = True,
        stderr: Path | None = None,
    ) -> contextlib.AbstractContextManager[RunningServer]:
        knobs = {
            "engine": {"model_path": "fake", **(engine or {})},
            "server": {"port": 0, "shutdown_timeout": 0.5, **(server or {})},
            "tokenizer_dir": str(tokenizer),
        }
        return running(["-m", "tests.server.fake_server", json.dumps(knobs)], wait=wait, stderr=stderr)

    return make


@pytest.fixture(scope="session")
def make_real_server(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> ServerMaker:
    """Makes servers by `jsg serve` of a small random model, with these options; see `real_model.py`."""
    from tests.server.real_model import write_real_model

    directory = write_real_model(tmp_path_factory.mktemp("real") / "model")

    def make(*options: str) -> contextlib.AbstractContextManager[RunningServer]:
        command = ["-m", "jsg.cli", "serve", str(directory), "--port", "0", "--compilation-cache-dir"]
        return running([*command, compile_cache_dir, *REAL_OPTIONS, *options])

    return make


@pytest.fixture(scope="module")
def server(make_server: ServerMaker) -> Iterator[RunningServer]:
    """One server for all tests of a file."""
    with make_server() as made:
        yield made


@pytest.fixture
def http(server: RunningServer) -> httpx.Client:
    return server.http


@pytest.fixture(scope="module")
def battery(make_server: ServerMaker, tokenizer_dir: Path) -> Iterator["Battery"]:
    """One for all tests of a file."""
    from tests.server.battery import firing

    with firing(make_server, tokenizer_dir) as made:
        yield made


def events_of(response: httpx.Response) -> list[dict]:
    """The events of a stream; it must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def data_of(lines: Iterable[str]) -> list[dict]:
    """The events of a stream of any API, with or without [DONE] at its end."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]


def check_discreet(text: str) -> None:
    """Nothing that a client reads tells where the server lies or what its code was doing."""
    for secret in ("Traceback", 'File \\"', "ipc:", str(ROOT), sys.prefix, tempfile.gettempdir()):
        assert secret not in text


def wait_until(condition: Callable[[], bool], deadline_s: float = POLL_DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
