"""Sends bad input of every kind to a server, and checks that no other request notices.

While the tests of a file run, streams go on beside them; at the end each must have every token. If the server has
processes, they must be the same ones then, with memory flat.
"""

import contextlib
import dataclasses
import functools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from jsg.config import ServerConfig
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from jsg.server.native.health import GRAMMAR
from tests.server.running import RunningServer, ServerProcess, events_of

JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
RAW = "\0raw"  # stands for text that goes into the body as it is, and not as a JSON string

PROGRAM: dict[str, Any] = {
    "jsg_graph": 1,
    "name": "ask",
    "arguments": [{"name": "q", "kind": "text"}],
    "nodes": [
        {"kind": "open", "id": 0, "stream": 0, "line": "ask:1", "program": "ask"},
        {"kind": "append", "id": 1, "stream": 0, "line": "ask:2", "pieces": [{"argument": "q"}, ": "]},
        {"kind": "generate", "id": 2, "stream": 0, "line": "ask:3", "name": "a", "args": {"max_tokens": 2}},
    ],
    "outputs": {"a": {"text": [{"node": 2, "name": "a"}]}},
    "returns": {"constant": None},
}
"""A program of one gen, as `POST /v1/programs` takes it."""

VALID: dict[str, dict[str, Any]] = {
    "/abort_request": {"rid": "nobody"},
    "/detokenize": {"tokens": [1, 2]},
    "/generate": {"text": "ab"},
    "/select": {"prompt": "ab", "choices": ["c", "d"]},
    "/tokenize": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/completions/render": {"prompt": "ab"},
    "/v1/decisions": {"input": "ab", "questions": [{"type": "predicate", "instructions": "c"}]},
    "/v1/detokenize": {"tokens": [1, 2]},
    "/v1/grammars": {"regex": GRAMMAR.text},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/programs": {"graph": PROGRAM, "arguments": {"q": "ab"}},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "ab"},
    "/v1/score": {"query": "ab", "items": ["c"], "label_token_ids": [1]},
    "/v1/systemone": {"state": "ab", "questions": {"q": {"type": "noul", "instructions": "c"}}},
    "/v1/tokenize": {"prompt": "ab"},
}
"""A small body for every endpoint that takes one and that the model can serve."""

FOR_OTHER_MODELS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "ab"},
    "/v1/rerank": {"query": "ab", "documents": ["c"]},
    "/v2/rerank": {"query": "ab", "documents": ["c"]},
    "/rerank": {"query": "ab", "documents": ["c"], "max_tokens_per_doc": 3},
}
"""A small body for the other endpoints that take one."""

TEXT_FIELD = {
    "/abort_request": "rid",
    "/generate": "text",
    "/select": "prompt",
    "/tokenize": "prompt",
    "/v1/completions": "prompt",
    "/v1/completions/render": "prompt",
    "/v1/decisions": "input",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
    "/v1/score": "query",
    "/v1/systemone": "state",
    "/v1/tokenize": "prompt",
}
"""The field that is a text at the top level."""

BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"[]", "JSON object"),
    (b"5", "JSON object"),
    (b'"x"', "JSON object"),
    (b"null", "JSON object"),
    (b"{", "at character 1"),
    (b'{"a": 1,}', "must be JSON"),
    (b"{} {}", "Extra data at character 3"),
    (b"{'a': 1}", "must be JSON"),
    (b'{"a": 01}', "must be JSON"),
    (b'{"a": "\x00"}', "must be JSON"),
    (b"\xef\xbb\xbf{}", "byte order mark"),
    ("{}".encode("utf-16"), "UTF-8"),
    (b'{"a": "\xff"}', "byte 7"),
    (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
    (b'{"a": "\xc0\x80"}', "UTF-8"),
    (b"[" * 100_000, "at most"),
    (b"[" * 60_000, "at most 64"),
    (b'{"a":' * 100_000, "at most"),
    (b'{"a":' + b"[" * 65 + b"]" * 65 + b"}", "at most 64"),
    (b'{"a":' * 9_999 + b"1" + b"}" * 9_999, "at most 64"),
    (b'{"a": {"b": 1, "c": 2, "b": 3}}', "a.b must be given once"),
    (b'{"a": NaN}', "a must be a finite number, but got NaN"),
    (b'{"a": [1, {"b": -Infinity}]}', "a[1].b must be a finite number, but got -Infinity"),
    (b'{"a": 1e999}', "a must be a finite number, but got 1e999"),
    (b'{"a": ' + b"9" * 1_000_000 + b"}", "a must be a number of at most 4300 digits"),
    (b'{"a": ["x\\ud800"]}', "a[0] must be text, but has half of a surrogate pair at character 1"),
    (b'{"a\\udfff": 1}', "half of a surrogate pair at character 1"),
    (b'{"x": ["a"' + b',"a"' * 10 + b"]}", "unknown field 'x'"),
]
"""What is no JSON, or no JSON that any endpoint takes, and what is said of it."""

GENERATING = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")

Place = tuple[str | int, ...]
Typed = tuple[Place, str]


@functools.cache  # it takes half a second
def interface() -> dict[str, Any]:
    """The description of the server's interface; to be read only."""
    return create_app(FrontDoor(), ServerConfig()).openapi()


def body_schemas() -> dict[str, dict[str, Any]]:
    operations = {path: methods.get("post", {}) for path, methods in interface()["paths"].items()}
    return {
        path: operation["requestBody"]["content"]["application/json"]["schema"]
        for path, operation in operations.items()
        if "requestBody" in operation
    }


def typed_places(schema: dict[str, Any], known: dict[str, Any], *types: str, place: Place = ()) -> Iterator[Typed]:
    """Where the schema has values of one of these types, and of which."""
    if "$ref" in schema:
        yield from typed_places(known[schema["$ref"].rsplit("/", 1)[1]], known, *types, place=place)
    for kind in schema.get("anyOf", []) + schema.get("oneOf", []):
        yield from typed_places(kind, known, *types, place=place)
    if schema.get("type") in types:
        yield place, schema["type"]
    if "items" in schema:
        yield from typed_places(schema["items"], known, *types, place=(*place, 0))
    for name, inner in schema.get("properties", {}).items():
        yield from typed_places(inner, known, *types, place=(*place, name))
    if isinstance(inner := schema.get("additionalProperties"), dict):
        yield from typed_places(inner, known, *types, place=(*place, "5"))


def with_value(body: Any, place: Place, value: Any) -> Any:
    """The body with a value at a place that may not exist yet."""
    if not place:
        return value
    key, *rest = place
    if isinstance(key, int):
        inner = body[0] if isinstance(body, list) and body else None
        return [with_value(inner, tuple(rest), value)]
    body = body if isinstance(body, dict) else {}
    return {**body, key: with_value(body.get(key), tuple(rest), value)}


def encode(body: Any, raw: str) -> bytes:
    return json.dumps(body).replace(json.dumps(RAW), raw).encode()


@dataclasses.dataclass
class Battery:
    """Sends what is wrong and keeps what was answered."""

    server: RunningServer
    bodies: list[str] = dataclasses.field(default_factory=list)

    def post(self, path: str, content: bytes | dict[str, Any], **headers: str) -> httpx.Response:
        content = json.dumps(content).encode() if isinstance(content, dict) else content
        response = self.server.http.post(path, content=content, headers=JSON | headers)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            self.bodies.append(response.text)
        return response

    def refused(
        self, path: str, content: bytes | dict[str, Any], *said: str, status: int = 400, **headers: str
    ) -> dict[str, Any]:
        """The error; it must be in the form of its API, say what was wrong and what to do."""
        response = self.post(path, content, **headers)
        assert response.status_code == status, f"{response.status_code} {response.text}"
        assert response.headers["x-request-id"]
        error = error_of(path, response)
        for words in said:
            assert words in error["message"]
        assert len(error["message"]) < 1100
        assert re.search(
            "must|is required|needs|are one|unknown|is not supported|may |cannot|is refused|differ", error["message"]
        )
        assert re.search("[;:,]|must be given|must be below", error["message"]), f"no remedy: {error['message']}"
        return error


def error_of(path: str, response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    if path.startswith("/v1/messages"):
        assert set(body) <= {"type", "error", "request_id"} and body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    elif path.startswith("/v1/"):
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    else:
        assert body == {"error": body["error"], "object": "error", **body["error"], "code": response.status_code}
        assert "message" in body["error"]
    return body["error"]


@contextlib.contextmanager
def firing(server: RunningServer, tokenizer_dir: Path) -> Iterator[Battery]:
    """A battery against a server with the scripted engine. At its end it checks that no other request noticed."""
    made = Battery(server)
    for path, body in VALID.items():
        made.post(path, body)
    made.post("/generate", encode({"input_ids": RAW}, "[" + "1," * 10**6 + "1]"))
    with unnoticed(made, tokenizer_dir, {"input_ids": [97, 98, 99]}, [97, 98, 99] * 50):
        yield made


@contextlib.contextmanager
def unnoticed(battery: Battery, directory: Path, prompt: dict[str, Any], tokens: list[int]) -> Iterator[None]:
    """Checks at its end that no other request noticed what the battery sent meanwhile.

    Args:
        battery: At a server that has answered once whatever takes memory for good.
        directory: What the server reads; no answer may name it.
        prompt: What streams ask beside the battery.
        tokens: The answer to it.
    """
    server = battery.server
    with (
        flat(server) if isinstance(server, ServerProcess) else contextlib.nullcontext(),
        Stream(server, prompt, tokens) as stream,
    ):
        yield
    assert stream.num_whole > 0
    assert stream.failures == [], "a stream beside the battery lost something"
    assert server.http.get("/health").json() == {"status": "ok"}
    secrets = [str(Path(__file__).parents[2]), str(directory), str(Path.home()), str(server.http.base_url)]
    for said in battery.bodies:
        assert not any(secret in said for secret in secrets if len(secret) > 1)
        assert not re.search(r"Traceback|\.py\b|site-packages|line \d+|0x[0-9a-f]{6}|/(usr|home|tmp|etc)/", said)


@contextlib.contextmanager
def flat(server: ServerProcess) -> Iterator[None]:
    """Checks at its end that the processes of a server are the same and have not grown."""
    pids = [server.process.pid, engine_pid(server)]
    before = [rss_bytes(pid) for pid in pids]
    yield
    assert server.process.poll() is None
    assert engine_pid(server) == pids[1], "the engine process was lost"
    server.wait_for_stats(num_running=0)
    grown = [rss_bytes(pid) - start for pid, start in zip(pids, before, strict=True)]
    assert max(grown) < 64 * 2**20, f"the front and the engine have grown by {grown} bytes"


class Stream:
    """Streams of one answer one after the other, each checked to the last token.

    Between two of them is a pause, because a scripted engine is so fast that they would take a core for themselves.
    """

    PAUSE_S = 0.5

    def __init__(self, server: RunningServer, prompt: dict[str, Any], tokens: list[int]) -> None:
        self._url = server.http.base_url
        self._body = prompt | {"stream": True, "sampling_params": GREEDY | {"max_new_tokens": len(tokens)}}
        self._tokens = tokens
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_whole = 0
        self.failures: list[str] = []

    def __enter__(self) -> "Stream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._ending.is_set() or not self.num_whole:
                with client.stream("POST", "/generate", json=self._body) as response:
                    last = events_of(response)[-1]
                if last.get("output_ids") != self._tokens:
                    self.failures.append(str(last)[:200])
                self.num_whole += 1
                self._ending.wait(self.PAUSE_S)


def engine_pid(server: ServerProcess) -> int:
    """The process id of the front's child that runs the step loop."""
    front = server.process.pid
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    [pid] = [
        pid for pid in children if b"jsg.engine.child.process" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    return int(pid)


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
