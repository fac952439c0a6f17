"""Servers around the scripted engine of `tests/engine/fake_core.py`, and a tokenizer of bytes."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tokenizers

START_DEADLINE_S = 30
END_DEADLINE_S = 20

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<s>"]


def write_byte_tokenizer(directory: Path, chat_template: str | None) -> None:
    """One token for each byte, and special tokens behind them (256 to 258)."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
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

    def stats(self) -> dict:
        return self.http.get("/get_server_info").json()["internal_states"][0]

    def wait_for_stats(self, **wanted: int) -> None:
        """Waits until the engine's counters are the wanted ones."""
        deadline = time.monotonic() + 5
        while not wanted.items() <= (stats := self.stats()).items():
            assert time.monotonic() < deadline, f"wanted {wanted}, got {stats}"
            time.sleep(0.02)


ServerMaker = Callable[..., contextlib.AbstractContextManager[RunningServer]]


@pytest.fixture(scope="session")
def make_server(tokenizer_dir: Path) -> ServerMaker:
    @contextlib.contextmanager
    def make(
        *,
        engine: dict | None = None,
        server: dict | None = None,
        tokenizer: Path = tokenizer_dir,
        drain_s: float = 0.5,
        wait: bool = True,
    ) -> Iterator[RunningServer]:
        knobs = {
            "engine": {"model_path": "fake", **(engine or {})},
            "server": {"port": 0, **(server or {})},
            "tokenizer_dir": str(tokenizer),
            "drain_s": drain_s,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.fake_server", json.dumps(knobs)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        running = RunningServer(process)
        with process, running.http:
            try:
                if wait:
                    running.wait_until_ready()
                yield running
            finally:
                process.kill()

    return make


@pytest.fixture(scope="module")
def server(make_server: ServerMaker) -> Iterator[RunningServer]:
    """One server for all tests of a file."""
    with make_server() as running:
        yield running


@pytest.fixture
def http(server: RunningServer) -> httpx.Client:
    return server.http


def events_of(response: httpx.Response) -> list[dict]:
    """The events of a stream; it must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]
