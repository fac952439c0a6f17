"""Pictures of programs on a jsg server: what is sent, and what the model sees."""

import asyncio
import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import jsg as sgl
from jsg.errors import NotFoundError
from jsg.lang.http import client, sent_files
from jsg.lang.tokens.model import TokenCall, TokenDelta
from jsg.processing.parts import MediaPart, Part, TextPart
from jsg.server import kept_files
from tests.lang.fake_server import LAST, TEMPLATE, FakeServer, Reply, answer, failure, fake_server
from tests.lang.wire_servers import serving
from tests.server.scripted import ScriptedServer
from tests.server.vision_model import base64_of, png


@pytest.fixture
def made(model_dir: Path) -> ScriptedServer:
    return ScriptedServer(model_dir, model_dir=model_dir)


class Wire:
    """The application, and how often the base64 of each file went to it.

    Attributes:
        bodies: Of all requests, in order.
    """

    def __init__(self, app: Any) -> None:
        self.bodies: list[bytes] = []
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        chunks: list[bytes] = []

        async def heard() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                chunks.append(message.get("body", b""))
                if not message.get("more_body", False):
                    self.bodies.append(b"".join(chunks))
            return message

        await self._app(scope, heard, send)

    def count(self, text: str) -> int:
        return sum(body.count(text.encode()) for body in self.bodies)


@pytest.fixture
def wire(made: ScriptedServer) -> Iterator[tuple[Wire, sgl.RuntimeEndpoint]]:
    wire = Wire(made.http.app)
    with serving(wire) as url, sgl.RuntimeEndpoint(url) as endpoint:
        yield wire, endpoint


@sgl.function
def describe(s, picture):
    s += sgl.user(sgl.image(picture) + "what?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=4))
    branches = s.fork(3)
    branches += sgl.user("more?")
    branches += sgl.assistant(sgl.gen("more", max_tokens=4))
    branches.join()
    s += sgl.user("sure?")
    s += sgl.assistant(sgl.select("sure", choices=["yes", "no"]))


def test_f7_a_program_sends_its_picture_once(made, wire):
    sockets, endpoint = wire
    for number in range(2):
        state = describe.run(png(), backend=endpoint)
        assert state["sure"] in ("yes", "no") and state["more"] == ["hell"] * 3
        assert sockets.count(base64_of(png())) == 1, f"in run {number}"
    name = hashlib.sha256(png()).hexdigest()
    num_calls = 2 * (1 + 1 + 3 + 1)  # the gen, the hint of the fork, its branches and the choice
    assert sockets.count(name) == num_calls - 1
    assert len({request.media[0].digest for request in made.engine.requests if request.media}) == 1
    assert all(request.media for request in made.engine.requests[:5])


def test_a_server_that_keeps_nothing_is_sent_the_picture_with_each_call(made, wire, monkeypatch):
    monkeypatch.setattr(kept_files, "KEPT_BYTES", 0)
    sockets, endpoint = wire
    state = describe.run(png(), backend=endpoint)
    assert state.error() is None and state["more"] == ["hell"] * 3
    assert sockets.count(base64_of(png())) == 6


def run(server: FakeServer, work: Any) -> None:
    """Runs `work(endpoint)` on a loop of its own."""

    async def main() -> None:
        endpoint = sgl.RuntimeEndpoint(server.url, timeout_s=30)
        try:
            await work(endpoint)
        finally:
            await endpoint.close()

    asyncio.run(main())


class TestAgainstWrittenAnswers:
    """A server that keeps files is sent each once, and its SHA-256 from then on."""

    PROMPT = (TextPart("a"), MediaPart("image", b"png", "image/png"), TextPart("b"))
    WHOLE: ClassVar[dict[str, str]] = {"image": "cG5n", "media_type": "image/png"}
    NAMED: ClassVar[dict[str, str]] = {"image_sha256": hashlib.sha256(b"png").hexdigest()}

    @pytest.fixture
    def server(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
        monkeypatch.setattr(client, "FIRST_DELAY_S", 0.001)
        with fake_server() as server:
            yield server

    @pytest.fixture
    def keeper(self, server: FakeServer) -> FakeServer:
        server.replies["/get_chat_template"] = [Reply(TEMPLATE | {"keeps_files": True})]
        return server

    async def generate(self, endpoint: sgl.RuntimeEndpoint, prompt: tuple[Part, ...] = PROMPT) -> list[TokenDelta]:
        return [delta async for delta in endpoint._model.generate(TokenCall(prompt=prompt, sampling={}))]

    def pictures(self, server: FakeServer, path: str = "/generate") -> list[Any]:
        return [part for body in server.bodies(path) for part in body["prompt"] if isinstance(part, dict)]

    def test_f7_a_picture_is_sent_once_and_named_in_all_further_calls(self, keeper, monkeypatch):
        encoded: list[bytes] = []
        real = base64.b64encode
        monkeypatch.setattr(base64, "b64encode", lambda data: encoded.append(data) or real(data))
        scores = {"part_ids": [], "common_ids": [], "choices": [], "meta_info": {}}
        keeper.replies["/select"] = [Reply(scores)]
        held = Reply(events=[answer("", finish=None, part_ids=[[4]])], waits=True)
        keeper.replies["/generate"] = [held, Reply(events=[answer("a", **LAST)])]

        async def calls(endpoint):
            hold = await endpoint._model.hold(self.PROMPT)
            await asyncio.gather(*(self.generate(endpoint) for _ in range(3)))
            await endpoint._model.score(self.PROMPT, ["x"])
            await self.generate(endpoint, (MediaPart("image", b"png", "image/png"), MediaPart("image", b"two", "x")))
            await hold.release()

        run(keeper, calls)
        second = {"image": "dHdv", "media_type": "x"}
        assert self.pictures(keeper) == [self.WHOLE, *[self.NAMED] * 4, second]
        assert self.pictures(keeper, "/select") == [self.NAMED]
        assert encoded == [b"png", b"two"]

    def test_choices_show_a_picture_too(self, keeper):
        keeper.replies["/select"] = [Reply({"part_ids": [], "common_ids": [], "choices": [], "meta_info": {}})]
        keeper.replies["/generate"] = [Reply(events=[answer("a", **LAST)])]

        async def calls(endpoint):
            await endpoint._model.score(self.PROMPT, ["x"])
            await self.generate(endpoint)

        run(keeper, calls)
        assert self.pictures(keeper, "/select") == [self.WHOLE] and self.pictures(keeper) == [self.NAMED]

    def test_frames_are_named_one_by_one(self, keeper):
        frames = (MediaPart("video", (b"a", b"b"), "video/jpeg", 2),)
        fewer = (MediaPart("video", (b"b", b"c"), "video/jpeg"), MediaPart("video", (b"b",), "video/jpeg"))
        keeper.replies["/generate"] = [Reply(events=[answer("a", **LAST)])]

        async def calls(endpoint):
            for prompt in (frames, frames, fewer):
                await self.generate(endpoint, prompt)

        run(keeper, calls)
        a, b = (hashlib.sha256(frame).hexdigest() for frame in (b"a", b"b"))
        assert self.pictures(keeper) == [
            {"video": "YQ==,Yg==", "media_type": "video/jpeg", "num_frames": 2},
            {"video_sha256": f"{a},{b}", "num_frames": 2},
            {"video": "Yg==,Yw==", "media_type": "video/jpeg"},
            {"video_sha256": b},
        ]

    def test_what_a_server_has_forgotten_is_sent_again(self, keeper):
        unknown = failure(404, "not kept here", type="NotFoundError")
        good = Reply(events=[answer("a", **LAST)])
        scores = Reply({"part_ids": [], "common_ids": [], "choices": [], "meta_info": {}})
        keeper.replies["/generate"] = [good, unknown, good]
        keeper.replies["/select"] = [unknown, scores]

        async def calls(endpoint):
            for _ in range(3):
                assert (await self.generate(endpoint))[0].text == "a"
            await endpoint._model.score(self.PROMPT, ["x"])
            await self.generate(endpoint)

        run(keeper, calls)
        assert self.pictures(keeper) == [self.WHOLE, self.NAMED, self.WHOLE, self.NAMED, self.NAMED]
        assert self.pictures(keeper, "/select") == [self.NAMED, self.WHOLE]

    def test_what_a_server_forgets_twice_in_a_row_is_sent_each_time(self, keeper):
        unknown = failure(404, "not kept here", type="NotFoundError")
        good = Reply(events=[answer("a", **LAST)])
        keeper.replies["/generate"] = [good, unknown, good, unknown, good]

        async def calls(endpoint):
            for _ in range(5):
                await self.generate(endpoint)

        run(keeper, calls)
        assert self.pictures(keeper) == [self.WHOLE, *[self.NAMED, self.WHOLE] * 2, self.WHOLE, self.WHOLE]

    def test_calls_that_are_refused_for_one_loss_are_one_miss(self):
        """As when a server was started anew while branches ran."""
        files = sent_files.SentFiles()

        def attempts() -> Iterator[sent_files.WrittenPrompt]:
            return files.attempts(self.PROMPT, may_name=True)

        files.taken(next(attempts()))
        calls = [attempts() for _ in range(5)]
        named = [next(call) for call in calls]
        assert all(written.named for written in named)
        for written in named:
            files.refused(written)
        assert not next(attempts()).named  # it is known to be lost
        for call in calls:
            again = next(call)
            assert again.sent and not again.named
            files.taken(again)
        assert next(attempts()).named

    def test_a_refusal_that_no_name_is_the_reason_of_is_raised(self, keeper):
        good, missing = Reply(events=[answer("a", **LAST)]), failure(404, "something else", type="NotFoundError")
        keeper.replies["/generate"] = [missing, good, missing]

        async def calls(endpoint):
            with pytest.raises(NotFoundError, match="something else"):
                await self.generate(endpoint)
            await self.generate(endpoint)
            with pytest.raises(NotFoundError, match="something else"):
                await self.generate(endpoint)

        run(keeper, calls)
        assert self.pictures(keeper) == [self.WHOLE, self.WHOLE, self.NAMED, self.WHOLE]

    def test_a_server_that_does_not_say_that_it_keeps_files_is_sent_them_each_time(self, server):
        server.replies["/generate"] = [Reply(events=[answer("a", **LAST)])]

        async def calls(endpoint):
            await self.generate(endpoint)
            await self.generate(endpoint)

        run(server, calls)
        assert self.pictures(server) == [self.WHOLE] * 2

    def test_what_is_remembered_is_bounded(self, monkeypatch):
        monkeypatch.setattr(sent_files, "MAX_FILES", 2)
        files = sent_files.SentFiles()
        for data in (b"a", b"b", b"a", b"c"):
            files.taken(next(files.attempts((MediaPart("image", data, "x"),), may_name=True)))
        named = [
            bool(next(files.attempts((MediaPart("image", data, "x"),), may_name=True)).named) for data in (b"a", b"b")
        ]
        assert named == [True, False]
