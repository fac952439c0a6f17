"""Pickles that a stranger writes into every socket, pipe and field: none is unpickled, and the server answers on."""

import base64
import contextlib
import os
import pickle
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
import zmq

from jsg.config import EngineConfig
from jsg.constrained.tables import StaticTables
from jsg.engine.child.grammar_process import frame
from jsg.engine.child.protocol import Failure, FromEngine, ToEngine
from jsg.engine.child.wire import MessageDecoder, MessageEncoder
from jsg.engine.front.children import EngineChild
from jsg.engine.front.client import EngineClient
from jsg.engine.hosts.wire import CallCodec, receive_message
from jsg.errors import EngineDeadError, RequestError
from jsg.media import MIN_DIGEST_BYTES, MIN_TOKENS, MediaInput
from jsg.processing.media.decode import decode_image
from jsg.processing.media.limits import MediaBudget, MediaLimits
from jsg.types import Request
from tests.server.battery import FOR_OTHER_MODELS, PROGRAM, VALID, body_schemas, interface, typed_places, with_value
from tests.server.running import END_DEADLINE_S, ProcessMaker, RunningServer, ServerProcess, is_running, wait_until
from tests.server.vision_server import IMAGE_WAYS, VIDEO_WAYS, path_of

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
FAKE_CORE = "tests.engine.fake_core:FakeCore"
SHORT = {"/generate": {"sampling_params": {"max_new_tokens": 2}}}
BUSY_S = 600  # the first server of a version compiles the kernels of grammars, at the lowest priority


class Bomb:
    """An object whose unpickling makes a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """The directory that an unpickled bomb makes. It must not be there at the end."""
    made = tmp_path / "unpickled"
    yield made
    assert not made.exists(), "a pickle was unpickled"


@pytest.fixture
def bombs(marker: Path) -> list[bytes]:
    """A pickle of each protocol. Protocol 0 is text of one byte for each character."""
    return [pickle.dumps(Bomb(marker), protocol) for protocol in PROTOCOLS]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_bomb_goes_off_where_it_is_unpickled(tmp_path: Path, protocol: int):
    made = tmp_path / "unpickled"
    pickle.loads(pickle.dumps(Bomb(made), protocol))
    assert made.is_dir()


def message_with(field: str, value: object) -> bytes:
    return msgspec.msgpack.encode({field: value})


class TestDecoders:
    """Whatever reads a socket or a pipe takes a pickle for what it is not, as a whole and within a message."""

    def test_messages_between_front_and_engine(self, bombs: list[bytes]):
        for bomb in bombs:
            for sent in (bomb, message_with("answers", bomb), message_with("answers", msgspec.msgpack.Ext(1, bomb))):
                with pytest.raises(msgspec.MsgspecError):
                    MessageDecoder().decode([memoryview(sent), memoryview(bomb)])
            for sent in (bomb, message_with("outputs", bomb), message_with("outputs", msgspec.msgpack.Ext(1, bomb))):
                with pytest.raises(msgspec.MsgspecError):
                    msgspec.msgpack.decode(sent, type=FromEngine)

    def test_an_array_of_objects(self, bombs: list[bytes]):
        """NumPy unpickles what it reads as objects. The type of an array is one of two names, neither of which is."""
        media = MediaInput(
            start=0,
            words=np.arange(MIN_TOKENS, dtype=np.int32) + 512,
            rows=np.arange(MIN_TOKENS, dtype=np.int32),
            pixels=np.zeros((1, 3, 1, 1), np.float32),
            digest=bytes(MIN_DIGEST_BYTES),
        )
        request = Request(rid="a", input_ids=(0,) * MIN_TOKENS, media=(media,))
        first, *arrays = (memoryview(bytes(part)) for part in MessageEncoder().encode(ToEngine(requests=[request])))
        assert MessageDecoder().decode([first, *arrays]).requests[0].make().media[0].digest == media.digest
        assert b"float32" in first.tobytes()
        changed = memoryview(first.tobytes().replace(b"float32", b"object_"))
        for bomb in bombs:
            with pytest.raises(KeyError, match="object_"):
                MessageDecoder().decode([changed, *arrays[:-1], memoryview(bomb)]).requests[0].make()

    def test_answers_and_tables_of_the_grammar_process(self, bombs: list[bytes]):
        for bomb in bombs:
            with pytest.raises(msgspec.MsgspecError):
                msgspec.msgpack.decode(bomb, type=bytes | Failure)
            with pytest.raises(ValueError, match="begins with"):
                StaticTables.from_bytes(bomb)

    def test_messages_and_calls_between_hosts(self, bombs: list[bytes]):
        numbers = CallCodec({"run": (jax.ShapeDtypeStruct((2,), np.int32),)})
        for bomb in bombs:
            for data in (bomb, len(bomb).to_bytes(4, "big") + bomb, len(bomb).to_bytes(4, "little") + bomb):
                for receive in (receive_message, numbers.receive):
                    left, right = socket.socketpair()
                    with left, right:
                        left.sendall(data)
                        left.shutdown(socket.SHUT_WR)
                        with pytest.raises(ConnectionError):
                            receive(right)

    def test_files(self, bombs: list[bytes]):
        for bomb in bombs:
            with pytest.raises(RequestError):
                decode_image(bomb, MediaBudget(MediaLimits()))


def texts_of(bomb: bytes) -> list[str]:
    """A pickle as the texts in which a client could send it."""
    encoded = base64.b64encode(bomb).decode()
    return [bomb.decode("latin-1"), encoded, f"data:application/octet-stream;base64,{encoded}"]


def files_programs_and_tokens(text: str) -> Iterator[tuple[str, Any]]:
    """Paths, and bodies that have this text where a file, a program, its argument or tokens belong."""
    for way, body in (*IMAGE_WAYS.items(), *VIDEO_WAYS.items()):
        yield path_of(way), body(text)
    yield "/v1/programs", {"graph": text, "arguments": {"q": "ab"}}
    yield "/v1/programs", {"graph": PROGRAM | {"nodes": text}, "arguments": {"q": "ab"}}
    yield "/v1/programs", {"graph": PROGRAM, "arguments": {"q": text}}
    yield "/generate", {"input_ids": text}
    yield "/detokenize", {"tokens": text}


def texts_and_grammars(text: str) -> Iterator[tuple[str, Any]]:
    """Every path, and a body for each of its fields that takes a text, with this text in the field."""
    known = interface()["components"]["schemas"]
    for path, schema in body_schemas().items():
        for place, _ in dict.fromkeys(typed_places(schema, known, "string")):
            yield path, with_value(SHORT.get(path, {}) | (VALID | FOR_OTHER_MODELS)[path], place, text)
    for field in ("stop", "regex", "json_schema", "ebnf", "stop_regex"):
        yield "/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 2, field: text}}


def check_answers(server: RunningServer, count: int) -> None:
    """The server answers, with a grammar too, which no earlier request had if the count is new."""
    regex = f"[ab]{{{count}}}"
    sampling = {"max_new_tokens": count + 1, "regex": regex}
    answer = server.http.post("/generate", json={"text": "ab", "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(regex, answer.json()["text"])


def post_all(server: RunningServer, bodies: Iterator[tuple[str, Any]]) -> None:
    """Sends what holds a pickle in a field; each is refused, or taken for the text that it is."""
    for path, body in bodies:
        response = server.http.post(path, json=body)
        assert response.status_code in (200, 400, 404), f"{path} {response.status_code} {response.text}"


def post_whole(server: RunningServer, bomb: bytes) -> None:
    """Sends a pickle as the whole body, of the type that it says it is."""
    for path in VALID:
        for kind in ("application/json", "application/octet-stream", "application/python-pickle"):
            response = server.http.post(path, content=bomb, headers={"Content-Type": kind})
            assert response.status_code in (400, 415), f"{path} {response.status_code} {response.text}"


class TestScriptedServer:
    def test_files_programs_and_tokens(self, server: RunningServer, bombs: list[bytes]):
        for text in texts_of(bombs[0])[:1] + texts_of(bombs[-1])[1:]:
            post_all(server, files_programs_and_tokens(text))
        assert server.http.post("/generate", json={"text": "ab"}).status_code == 200

    def test_whole_bodies_and_headers(self, server: RunningServer, bombs: list[bytes]):
        post_whole(server, bombs[-1])
        for text in texts_of(bombs[-1])[1:]:
            for header in ("Authorization", "X-Request-Id", "Cookie", "traceparent"):
                assert server.http.get("/get_model_info", headers={header: text}).status_code == 200


@pytest.mark.slow
class TestProcesses:
    """The sockets and pipes of real processes. Only their own user can write into them at all."""

    async def test_the_socket_of_an_engine_that_starts(self, bombs: list[bytes]):
        """Bytes that are no ZeroMQ are dropped. The socket is gone as soon as the engine is ready."""
        child = EngineChild.spawn(EngineConfig(), core=FAKE_CORE)
        client = EngineClient(child, EngineConfig())
        path = Path(child.address.removeprefix("ipc://"))
        assert path.parent.stat().st_mode & 0o777 == 0o700
        try:
            for data in (message_of_zmtp_1(b"\x07"), *bombs):
                write_to_unix(str(path), data)
            await client.ready()
            assert not path.parent.exists()
            assert await client.flush_cache()
        finally:
            await client.close()

    @pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
    async def test_a_stranger_in_place_of_the_engine(self, marker: Path, protocol: int):
        """A message that the front cannot read ends the start, with nothing unpickled."""
        child = EngineChild.spawn(EngineConfig(), core=FAKE_CORE)
        client = EngineClient(child, EngineConfig())
        with zmq.Context() as context, context.socket(zmq.PAIR) as stranger:
            stranger.connect(child.address)
            stranger.send(pickle.dumps(Bomb(marker), protocol))
            with pytest.raises(EngineDeadError):
                await client.ready()
        await client.close()

    def test_everything_that_a_running_server_listens_at(self, make_real_server: ProcessMaker, bombs: list[bytes]):
        with make_real_server() as server:
            server.http.timeout = BUSY_S
            check_answers(server, 1)
            pids = family_of(server.process.pid)
            names = {name for pid in pids for name in unix_names(pid)}
            addresses = {address for pid in pids for address in tcp_addresses(pid)}
            assert addresses == {("0100007F", server.http.base_url.port)}, "it listens at 127.0.0.1 for HTTP only"
            for count, bomb in enumerate((bombs[0], bombs[-1]), 2):
                assert not any(write_to_unix(name, bomb) for name in names)
                assert write_to_tcp(server.http.base_url.port, bomb).startswith(b"HTTP/1.1 400")
                assert write_to_grammar_processes(server, bomb) == 1
                check_answers(server, count)
            for text in texts_of(bombs[0])[:1] + texts_of(bombs[-1])[1:]:
                post_all(server, files_programs_and_tokens(text))
                post_all(server, texts_and_grammars(text))
            post_whole(server, bombs[-1])
            check_answers(server, 99)


def family_of(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def sockets_of(pid: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found |= set(re.findall(r"socket:\[(\d+)\]", str(entry.readlink())))
    return found


def rows_of(pid: int, table: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]


def unix_names(pid: int) -> list[str]:
    """The paths of the process's Unix sockets, of which a name in the abstract begins with @."""
    mine = sockets_of(pid)
    return [row[7] for row in rows_of(pid, "unix") if len(row) > 7 and row[6] in mine]


def tcp_addresses(pid: int) -> list[tuple[str, int]]:
    """The address, in the kernel's hexadecimal form, and the port of each TCP socket at which the process listens."""
    mine = sockets_of(pid)
    listening = [
        row[1] for table in ("tcp", "tcp6") for row in rows_of(pid, table) if row[3] == "0A" and row[9] in mine
    ]
    return [(address, int(port, 16)) for address, _, port in (each.partition(":") for each in listening)]


def write_to_unix(name: str, data: bytes) -> bool:
    """Whether the data could be written: nobody can, if the socket has no name in the file system any more."""
    with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(FileNotFoundError):
        stranger.settimeout(END_DEADLINE_S)
        stranger.connect("\0" + name[1:] if name.startswith("@") else name)
        with contextlib.suppress(ConnectionError):  # it was dropped already
            stranger.sendall(data)
        return True
    return False


def message_of_zmtp_1(body: bytes) -> bytes:
    """What a peer of ZeroMQ 2 sends, which greets nobody: a frame of no identity, then one with the body."""
    return b"\x01\x00" + bytes((len(body) + 1, 0)) + body


def write_to_tcp(port: int, data: bytes) -> bytes:
    """What is answered to the data."""
    with socket.create_connection(("127.0.0.1", port), END_DEADLINE_S) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        return stranger.makefile("rb").read()


def write_to_grammar_processes(server: ServerProcess, bomb: bytes) -> int:
    """Writes a frame into the standard input of each; returns their number."""
    count = 0
    for pid in family_of(server.process.pid):
        if b"jsg.engine.child.grammar_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            count += 1
            with open(f"/proc/{pid}/fd/0", "wb") as pipe:
                pipe.write(frame(bomb))
            wait_until(lambda pid=pid: not is_running(pid))
    return count
