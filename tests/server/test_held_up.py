"""Nothing that clients send holds the front up: between two answers of `/health` little happens, and few turns pass.

What happens is counted in calls of functions in the thread of the event loop, and in characters that it reads, so the
bounds depend on no clock. `python -m bench.gaps` measures turns in seconds, and `python -m bench.posts` the answers.
"""

import asyncio
import json
import random
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import FrameType
from typing import Any

import pytest

import jsg as sgl
from jsg.processing.tokenizer import Tokenizer
from jsg.server.http.json_body import parse_json
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.running import wait_until
from tests.server.scripted import TOOL_TEMPLATE
from tests.server.threads import ServerMaker, ServerThread

pytestmark = pytest.mark.slow

AT_ONCE = 2  # posts of a kind
NUM_CONNECTIONS = 100
MOST_EVENTS = 300_000  # take about 0.1 s; up to 160 000 were seen, of as many outputs as come at once
MOST_TURNS = 8  # it takes 4
READERS = {Tokenizer.encode.__code__: "text", parse_json.__code__: "raw"}
"""What is one call in Python, whatever its length, and the argument that it reads."""
ONE = {"max_new_tokens": 1}
LETTERS = random.Random(0)

Post = tuple[str, dict[str, Any]]


def words(num_chars: int) -> str:
    return "".join(LETTERS.choices("abcdefgh     ", k=num_chars))


def chat(**fields: Any) -> Post:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": words(20)}], "max_tokens": 2, **fields}


def deep_schema() -> Post:
    shape: dict[str, Any] = {"type": "string"}
    for depth in range(28):  # each has two levels, and a body 64
        shape = {"type": "object", "properties": {f"{words(4)}{depth}": shape}}
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": shape}})


def wide_schema() -> Post:
    properties = {f"{words(8)}{number}": {"type": "string", "description": words(100)} for number in range(1000)}
    shape = {"type": "object", "properties": properties}
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": shape}})


def many_tools() -> Post:
    properties = {f"field{number}": {"type": "string", "description": words(50)} for number in range(30)}
    parameters = {"type": "object", "properties": properties}
    names = [f"tool{number}" for number in range(128)]
    return chat(tools=[{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names])


@sgl.function
def branches(s: sgl.ProgramState) -> None:
    s += words(200)
    for _ in range(2):
        forks = s.fork(256)
        for number in range(256):
            forks[number] += f" {number}" + sgl.gen("said", max_tokens=1)
        forks.join()


def prompts(**params: Any) -> Post:
    return "/generate", {"text": [words(200) for _ in range(1024)], "sampling_params": ONE | params}


POSTS = {
    "many prompts": lambda: ("/v1/completions", {"prompt": [[65] * 200] * 1024, "max_tokens": 1}),
    "many texts": lambda: prompts(stop=[words(250) for _ in range(16)]),
    "many answers": lambda: ("/generate", {"text": ["hello"] * 8, "sampling_params": {"max_new_tokens": 8, "n": 128}}),
    "many events": lambda: chat(n=128, max_tokens=20, stream=True),
    "many items": lambda: ("/v1/score", {"query": words(500), "items": ["you"] * 1000, "label_token_ids": [65]}),
    "many choices": lambda: ("/select", {"prompt": words(500), "choices": [f"choice {n}" for n in range(512)]}),
    "program": lambda: ("/v1/programs", {"graph": json.loads(branches.compile().to_json())}),
    "long texts": lambda: ("/tokenize", {"prompt": [words(3500) for _ in range(128)]}),
    "long text": lambda: ("/tokenize", {"prompt": words(400_000)}),
    "long chat": lambda: chat(messages=[{"role": "user", "content": words(2_000_000)}]),
    "long body": lambda: ("/generate", {"input_ids": [65] * 700_000, "sampling_params": ONE}),
    "deep schema": deep_schema,
    "wide schema": wide_schema,
    "many tools": many_tools,
}
TOO_LONG = ("long chat", "long body", "many tools")


class Pulse:
    """Asks a server for `/health` again and again, on the server's own event loop.

    Attributes:
        most_events, most_turns: The most calls of functions and characters that are read, and turns of the loop,
            between two answers.
        num_answers: Its answers.
    """

    def __init__(self, server: ServerThread) -> None:
        self.most_events = self.most_turns = self.num_answers = 0
        self._events = self._turns = 0
        self._loop, self._port, self._turn = server._loop, server.http.base_url.port, server._loop._run_once
        self._loop._run_once = self._take_turn
        self._asking: Future[None] = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)

    def stop(self) -> None:
        self._asking.cancel()
        self._loop._run_once = self._turn

    def _take_turn(self) -> None:
        self._turns += 1
        self._turn()

    def _count(self, frame: FrameType, event: str, _argument: object) -> None:
        self._events += event in ("call", "c_call")
        if event == "call" and (name := READERS.get(frame.f_code)) is not None:
            self._events += len(frame.f_locals[name])

    async def _ask(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        sys.setprofile(self._count)
        try:
            while True:
                self._events = self._turns = 0
                writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert b" 200 " in await reader.readline()
                await reader.readuntil(b"}")
                self.num_answers += 1
                if self.num_answers > 1:
                    self.most_events = max(self.most_events, self._events)
                    self.most_turns = max(self.most_turns, self._turns)
        finally:
            sys.setprofile(None)
            writer.close()


@pytest.fixture(scope="module")
def held(make_server: ServerMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    directory = tmp_path_factory.mktemp("tools")
    write_byte_tokenizer(directory, TOOL_TEMPLATE)
    with make_server(engine={"max_queued_requests": 10_000}, tokenizer=directory) as server:
        yield server


@pytest.fixture
def pulse(held: ServerThread) -> Iterator[Pulse]:
    made = Pulse(held)
    yield made
    wait_until(lambda: made.num_answers > 5)
    made.stop()
    assert made.most_events < MOST_EVENTS
    assert made.most_turns <= MOST_TURNS


@pytest.mark.parametrize("kind", POSTS)
def test_posts(kind: str, held: ServerThread, pulse: Pulse):
    path, bodies = POSTS[kind]()[0], [POSTS[kind]()[1] for _ in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [*pool.map(lambda body: held.http.post(path, json=body, timeout=200), bodies)]
    assert {answer.status_code for answer in answers} == {400 if kind in TOO_LONG else 200}


def test_connections(held: ServerThread, pulse: Pulse):
    with ExitStack() as stack:
        some = [
            stack.enter_context(socket.create_connection(("127.0.0.1", held.http.base_url.port)))
            for _ in range(NUM_CONNECTIONS)
        ]
        for number in range(3):
            for connection in some:
                connection.send((b"GET /health HTTP/1.1\r\n", b"host: localhost\r\n", b"\r\n")[number])
        for connection in some:
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
