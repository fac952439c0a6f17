"""What pictures cost, and which tenant pays: each file is read once, outside the event loop, for one tenant."""

import asyncio
import base64
import functools
import hashlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jsg.config import ServerConfig
from jsg.engine import media_reader
from jsg.engine.media_reader import ModelMediaReader
from jsg.errors import QueueFullError, RequestError
from jsg.processing.media_prompt import PromptMedia
from jsg.processing.parts import MediaPart
from jsg.processing.tokenizer import load_tokenizer
from jsg.server import media_sources
from jsg.server.http.json_body import _num_media_chars
from jsg.server.media_sources import MediaSource, MediaSources, joined_content, media_limits
from jsg.server.shared.messages import Message
from jsg.server.text_threads import INLINE_BYTES, MAX_MEDIA, TextThreads
from tests.server.scripted import ScriptedServer
from tests.server.vision_model import base64_of, data_url, png

MIB = 2**20


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that were decoded."""
    files: list[bytes] = []
    decode = media_reader.decode_image

    def counted(data: bytes, budget: Any) -> Any:
        files.append(data)
        return decode(data, budget)

    monkeypatch.setattr(media_reader, "decode_image", counted)
    return files


def picture_message(url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    return {"role": "user", "content": content}


class TestOnce:
    @pytest.mark.parametrize("is_shared", [True, False], ids=["one for all", "one each"])
    def test_a_picture_of_many_prompts_is_read_once(self, model_dir, monkeypatch, is_shared):
        server = ScriptedServer(model_dir, model_dir=model_dir)
        calls: list[str] = []
        read = media_sources.read_base64
        monkeypatch.setattr(media_sources, "read_base64", lambda *given: calls.append(given[0]) or read(*given))
        url = base64_of(png())
        body = {"text": ["hi"] * 50, "image_data": url if is_shared else [url] * 50}
        response = server.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        assert [len(request.media) for request in server.engine.requests] == [1] * 50
        assert calls == [url]
        assert len({id(request.media[0].pixels) for request in server.engine.requests}) == 1

    def test_a_file_is_hashed_once_however_often_it_stands_there(self, model_dir, monkeypatch):
        reader = ModelMediaReader.of_model(model_dir, load_tokenizer(model_dir))
        assert reader is not None
        part, keys = MediaPart("image", png(), ""), []
        key_of = media_reader._file_key
        monkeypatch.setattr(media_reader, "_file_key", lambda *given: keys.append(1) or key_of(*given))
        assert len({id(item) for item in reader.read([part] * 100)}) == 1
        assert len(keys) == 1

    def test_a_file_that_many_parts_name_is_hashed_once(self, model_dir, monkeypatch):
        reader = ModelMediaReader.of_model(model_dir, load_tokenizer(model_dir))
        assert reader is not None
        file, sizes = png(), []

        def sha256(data: bytes = b""):
            sizes.append(len(data))
            return hashlib.sha256(data)

        monkeypatch.setattr(media_reader, "hashlib", SimpleNamespace(sha256=sha256))
        read = reader.read([MediaPart("image", file, "") for _ in range(100)])
        assert len(read) == 100 and sizes.count(len(file)) == 1

    def test_no_more_is_decoded_than_all_files_may_have(self, model_dir, monkeypatch):
        """Stored responses can bring back more than a body may have."""
        config = ServerConfig(max_media_bytes=1024)
        tokenizer, threads = load_tokenizer(model_dir), TextThreads()
        sources = MediaSources(ModelMediaReader.of_model(model_dir, tokenizer, media_limits(config)), threads, config)
        sizes: list[int] = []
        read = media_sources.read_base64
        monkeypatch.setattr(media_sources, "read_base64", lambda *given: sizes.append(1) or read(*given))
        many = [MediaSource("image", base64.b64encode(bytes([i]) * 400).decode()) for i in range(10)]
        with pytest.raises(RequestError, match="at most 1024 bytes") as caught:
            asyncio.run(sources.read(many, "input", namespace=""))
        threads.close()
        assert (caught.value.param, len(sizes)) == ("input", 3)


def test_no_tenant_sees_from_the_time_what_another_has_shown(model_dir, decoded):
    server = ScriptedServer(model_dir, model_dir=model_dir, api_key=("one-key", "another-key"))

    def ask(key: str, path: str = "/v1/chat/completions", **fields: Any) -> None:
        body = {"messages": [picture_message(data_url(png()))], **fields}
        if path == "/generate":
            body = {"text": "<image>", "image_data": data_url(png()), **fields}
        response = server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text

    counts = []
    for key in ("one-key", "one-key", "another-key", "another-key", "one-key"):
        ask(key)
        ask(key, "/generate")
        ask(key, "/tokenize")
        counts.append(len(decoded))
    assert counts == [1, 1, 2, 2, 2]
    for _ in range(2):
        ask("one-key", cache_salt="pepper")
        ask("one-key", "/generate", cache_salt="pepper")
    assert len(decoded) == 3


class TestKept:
    """What was read last is kept, up to a number of bytes: here those of three pictures."""

    @pytest.fixture
    def reader(self, model_dir, monkeypatch) -> ModelMediaReader:
        reader = ModelMediaReader.of_model(model_dir, load_tokenizer(model_dir))
        assert reader is not None
        [seen] = reader.within("only to learn its size").read([PICTURES[0]])
        monkeypatch.setattr(media_reader, "KEPT_BYTES", 3 * size_of(seen))
        made = ModelMediaReader.of_model(model_dir, load_tokenizer(model_dir))
        assert made is not None
        return made

    def test_what_was_not_used_for_longest_gives_way(self, reader, decoded):
        reader.read(PICTURES[:3])
        reader.read(PICTURES[:1])
        assert len(decoded) == 3
        reader.read(PICTURES[3:4])
        assert kept_bytes(reader) == media_reader.KEPT_BYTES
        reader.read([PICTURES[i] for i in (0, 2, 3)])
        assert len(decoded) == 4, "the second picture gave way, and no other"
        reader.read(PICTURES[1:2])
        assert len(decoded) == 5
        reader.read([PICTURES[i] for i in (2, 3, 1)])
        assert len(decoded) == 5, "then the first"

    def test_namespaces_share_one_bound(self, reader, decoded):
        first, second = reader.within("a"), reader.within("b")
        [seen] = first.read(PICTURES[:1])
        assert first.read(PICTURES[:1]) == [seen] and len(decoded) == 1
        [other] = second.read(PICTURES[:1])
        assert other is not seen and other.digest == seen.digest and len(decoded) == 2
        second.read(PICTURES[1:3])
        assert kept_bytes(first) == kept_bytes(second) == media_reader.KEPT_BYTES
        second.read(PICTURES[:3])
        assert len(decoded) == 4
        assert first.read(PICTURES[:1]) != [seen] and len(decoded) == 5, "that of the other namespace gave way"

    def test_one_that_is_too_large_alone_drops_nothing(self, reader, decoded, monkeypatch):
        reader.read(PICTURES[:2])
        monkeypatch.setattr(media_reader, "KEPT_BYTES", kept_bytes(reader) // 2 - 1)
        for count in (3, 4):
            reader.read(PICTURES[2:3])
            assert len(decoded) == count
        reader.read(PICTURES[:2])
        assert len(decoded) == 4


PICTURES = [MediaPart("image", png(seed), "") for seed in range(4)]


def size_of(seen: PromptMedia) -> int:
    return seen.pixels.nbytes + seen.words.nbytes + seen.rows.nbytes


def kept_bytes(reader: ModelMediaReader) -> int:
    """What all that is kept takes, which must be what the reader believes."""
    num_bytes = sum(size_of(seen.media) for seen in reader._kept._values.values())
    assert num_bytes == reader._kept.num_bytes
    return num_bytes


class TestFetching:
    """What the URLs of one request may take together."""

    @pytest.fixture
    def fetched(self) -> list[str]:
        return []

    @pytest.fixture
    def read(self, model_dir, fetched, monkeypatch) -> Callable[..., list[PromptMedia]]:
        """Reads pictures at so many URLs; each is fetched by `fetch(seconds_pass)` on a clock of its own."""
        tokenizer = load_tokenizer(model_dir)

        def run(count: int, fetch: Callable[..., Any], **knobs: Any) -> list[PromptMedia]:
            config = ServerConfig(allowed_media_host=("pictures.test",), media_fetch_timeout=LIMIT_S, **knobs)
            threads = TextThreads()
            reader = ModelMediaReader.of_model(model_dir, tokenizer, media_limits(config))
            sources = MediaSources(reader, threads, config)

            async def main() -> list[PromptMedia]:
                loop, passed = asyncio.get_running_loop(), [0.0]
                clock = loop.time
                monkeypatch.setattr(loop, "time", lambda: clock() + passed[0])

                async def noted(url: str) -> bytes:
                    fetched.append(url)
                    return await fetch(lambda seconds: passed.__setitem__(0, passed[0] + seconds))

                assert sources._fetcher is not None
                monkeypatch.setattr(type(sources._fetcher), "fetch", staticmethod(noted))
                urls = [MediaSource("image", f"http://pictures.test/{i}.png") for i in range(count)]
                return await sources.read(urls, "messages", namespace="")

            try:
                return asyncio.run(main())
            finally:
                threads.close()

        return run

    def test_of_time(self, read, fetched):
        async def fetch(passes: Callable[[float], None]) -> bytes:
            passes(0.4 * LIMIT_S)
            await asyncio.sleep(0 if len(fetched) < 3 else LIMIT_S)
            return png()

        assert len(read(2, fetch)) == 2, "each takes less than the limit, and so do both"
        fetched.clear()
        with pytest.raises(RequestError, match=f"must be fetched within {LIMIT_S} s, but were not") as caught:
            read(4, fetch)
        assert caught.value.param == "messages"
        assert [url[-5] for url in fetched] == ["0", "1", "2"]

    def test_of_bytes(self, read, fetched):
        async def fetch(_: Callable[[float], None]) -> bytes:
            return png(len(fetched)) + bytes(FILE_BYTES - len(png(len(fetched))))

        assert len(read(2, fetch, max_media_bytes=2 * FILE_BYTES)) == 2
        fetched.clear()
        with pytest.raises(RequestError, match=f"at most {2 * FILE_BYTES} bytes, but these have more") as caught:
            read(9, fetch, max_media_bytes=2 * FILE_BYTES)
        assert (caught.value.param, len(fetched)) == ("messages", 3)


LIMIT_S = 20
FILE_BYTES = 10_000


class TestEventLoop:
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
    def test_messages_are_made_beside_it(self, model_dir, monkeypatch, path):
        server = ScriptedServer(model_dir)
        names: list[str] = []
        made = Message.to_template

        def noted(self: Message, *given: Any) -> dict[str, Any]:
            names.append(threading.current_thread().name)
            return made(self, *given)

        monkeypatch.setattr(Message, "to_template", noted)
        said = {"role": "user", "content": "h" * (INLINE_BYTES + 1)}
        assert server.http.post(path, json={"messages": [said]}).status_code == 200
        assert [name.rpartition("_")[0] for name in names] == ["jsg-text"]

    async def test_what_waits_for_pictures_is_bounded(self):
        may_end, threads = threading.Event(), TextThreads()

        waiting = [asyncio.create_task(threads.decode(may_end.wait)) for _ in range(MAX_MEDIA)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="try again later"):
            await threads.decode(may_end.wait)
        waiting[-1].cancel()
        await asyncio.wait(waiting[-1:])
        waiting[-1] = asyncio.create_task(threads.decode(may_end.wait))
        await asyncio.sleep(0)
        may_end.set()
        assert await asyncio.gather(*waiting) == [True] * MAX_MEDIA
        threads.close()

    async def test_so_many_requests_fetch_at_a_time(self, model_dir, monkeypatch):
        config = ServerConfig(allowed_media_host=("pictures.test",))
        threads = TextThreads()
        reader = ModelMediaReader.of_model(model_dir, load_tokenizer(model_dir))
        sources = MediaSources(reader, threads, config)
        under_way, most = 0, 0

        async def fetch(url: str) -> bytes:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            under_way -= 1
            return png()

        assert sources._fetcher is not None
        monkeypatch.setattr(type(sources._fetcher), "fetch", staticmethod(fetch))

        urls = [[f"http://pictures.test/{i}.png"] for i in range(3 * media_sources.MAX_FETCHING)]
        await asyncio.gather(*map(sources._fetch, urls))
        threads.close()
        assert most == media_sources.MAX_FETCHING


class TestBodySize:
    @pytest.mark.parametrize(
        ("num_text", "num_media", "status"),
        [(1, 0, 200), (MIB, 0, 413), (1, 2 * MIB, 400), (MIB, 2 * MIB, 413)],
        ids=["short", "text", "picture", "both"],
    )
    def test_pictures_leave_texts_no_more_room(self, model_dir, num_text, num_media, status):
        server = ScriptedServer(model_dir, model_dir=model_dir, max_request_bytes=MIB)
        message = {"role": "user", "content": [{"type": "text", "text": "a" * num_text}]}
        if num_media:
            message["content"].append({"type": "image_url", "image_url": {"url": "A" * num_media}})
        response = server.http.post("/tokenize", json={"messages": [message]})
        assert response.status_code == status, response.text[:300]
        if status == 413:
            assert "without its pictures" in response.text

    @pytest.mark.parametrize(
        "holder",
        [
            lambda url: {"image_data": [url, [url]]},
            lambda url: {"messages": [{"content": [{"source": {"type": "base64", "media_type": "i", "data": url}}]}]},
            lambda url: {"input": [{"content": [{"type": "input_image", "image_url": url}]}]},
            lambda url: {"prompt": ["a", {"image": url, "media_type": "image/png"}]},
        ],
    )
    def test_files_are_known_by_their_names_in_every_api(self, holder):
        count = functools.partial(json_chars, holder)
        assert count(1000) - count(0) == (2000 if "image_data" in holder("") else 1000)

    def test_a_text_of_such_a_name_is_no_file(self):
        assert json_chars(lambda url: {"arguments": {"image": url, "data": url}}, 1000) == 0


def json_chars(holder: Any, size: int) -> int:
    return _num_media_chars(holder("A" * size))


def test_texts_are_joined_between_pictures():
    first, second = MediaSource("image", "a"), MediaSource("video", "b")
    assert joined_content(["a", "", "b"]) == "ab" and joined_content([]) == joined_content([""]) == ""
    shown = joined_content(["", first, "a", "", "b", second, first, "", "c"])
    texts = [{"type": "text", "text": text} for text in ("ab", "c")]
    assert shown == [first, texts[0], second, first, texts[1]]


def test_joining_looks_at_each_text_once():
    """Adding text after text copies what is there already: a megabyte of letters took a terabyte of copies."""

    class Counted(str):
        added = 0

        def __radd__(self, other: str) -> str:
            Counted.added += len(other)
            return str(other) + str(self)

    joined = joined_content([MediaSource("image", "a"), *[Counted("a")] * 1000])
    assert joined[1] == {"type": "text", "text": "a" * 1000}
    assert Counted.added == 0
