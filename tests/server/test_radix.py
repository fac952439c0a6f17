"""Looking at the prefix cache: snapshots, and events as it changes."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.cache.tree_log import TreeLog
from jsg.engine.front import tree_feed
from jsg.engine.front.tree_feed import TreeFeed
from jsg.server.native import radix
from jsg.server.native.radix import _Reader
from jsg.server.native.radix_view import View
from tests.server.running import RunningServer, key, wait_until

ONE = {"max_new_tokens": 1}


def generate(server: RunningServer, ids: list[int], headers: dict[str, str] | None = None, **fields: Any) -> None:
    body = {"input_ids": ids, "sampling_params": ONE, **fields}
    assert server.http.post("/generate", json=body, headers=headers).status_code == 200


def look(server: RunningServer, query: str = "", headers: dict[str, str] | None = None) -> dict[str, Any]:
    response = server.http.get(f"/debug/radix{query}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def lengths(shown: dict[str, Any]) -> list[int]:
    return [node[2] for node in shown["nodes"]]


@contextlib.contextmanager
def watching(server: RunningServer, query: str = "", headers: dict[str, str] | None = None) -> Iterator[Iterator[dict]]:
    """The events, one after another."""
    with (
        httpx.Client(base_url=server.http.base_url, timeout=120) as http,
        http.stream("GET", f"/debug/radix/events{query}", headers=headers) as response,
    ):
        assert response.status_code == 200, response.read()
        lines = (line for line in response.iter_lines() if line and not line.startswith(":"))

        def events() -> Iterator[dict]:
            for name, data in zip(lines, lines, strict=True):
                event = json.loads(data.removeprefix("data: "))
                assert name == f"event: {event['type']}"
                yield event

        yield events()


def changes(events: Iterator[dict], last: str) -> list[list]:
    """The changes of the next deltas, up to one of the kind `last`."""
    found: list[list] = []
    while last not in [change[0] for change in found]:
        event = next(events)
        assert event["type"] == "delta"
        pool = event.get("pool", {"terms": [], "total": 0})  # only admins see it
        assert pool["total"] == sum(pool[term] for term in pool["terms"])
        found += event["changes"]
    return found


def test_a_snapshot(server: RunningServer):
    generate(server, [64, 65, 66, 67])
    generate(server, [64, 65, 68])
    generate(server, [64, 65], cache_salt="a secret")
    shown = look(server)
    assert (shown["type"], shown["engine"], shown["page_size"], shown["num_nodes"]) == ("snapshot", 0, 1, 4)
    assert sorted(lengths(shown)) == [1, 2, 2, 2]
    assert shown["pool"]["total"] == sum(shown["pool"][term] for term in shown["pool"]["terms"])
    assert "texts" not in shown
    upper = next(node for node in shown["nodes"] if node[0] in {other[1] for other in shown["nodes"]})
    below = look(server, f"?root={upper[0]}&text=true")
    assert sorted(below["texts"].values()) == ["ab", "cd", "e"]
    folded = look(server, "?limit=2")
    assert (len(folded["nodes"]), folded["num_nodes"]) == (2, 4)
    assert sum(lengths(folded)) + sum(each["tokens"] for each in folded["aggregates"].values()) == 7


def test_events_tell_how_the_tree_changes(server: RunningServer):
    generate(server, [64, 65, 66])
    with watching(server, "?text=true") as events:
        first = next(events)
        ((top, *_),) = first["nodes"]
        assert first["texts"] == {str(top): "abc"}
        generate(server, [64, 65, 66, 67])
        assert [change[:3] for change in changes(events, "insert")] == [["insert", top + 1, top], ["hit", top, 1]]
        generate(server, [64, 68])
        split, insert, *hits = changes(events, "insert")
        assert split[:1] + split[2:] == ["split", top, 1]
        assert insert[2] == split[1]
        assert ["hit", split[1], 2] in hits
        server.http.post("/flush_cache")
        evicted = [change[1] for change in changes(events, "evict")]
        assert sorted(evicted) == sorted([top, top + 1, split[1], insert[1]])


def test_a_folded_tree_is_told_by_snapshots(server: RunningServer):
    with watching(server, "?limit=1") as events:
        assert next(events)["nodes"] == []
        generate(server, [64, 65])
        generate(server, [66, 67, 68])
        while (event := next(events)).get("num_nodes") != 2:
            assert event["type"] == "delta"
        assert lengths(event) == [3]
        assert event["aggregates"] == {"0": {"nodes": 1, "tokens": 2, "evictable": 2}}


def test_a_key_sees_its_own_namespace(two_keys: RunningServer):
    generate(two_keys, [64, 65, 66], key("alice"))
    generate(two_keys, [64, 65], key("bob"))
    admin = look(two_keys, headers=key("root"))
    assert sorted(lengths(admin)) == [2, 3]
    alice = look(two_keys, headers=key("alice"))
    assert (lengths(alice), alice["num_nodes"], alice["aggregates"]) == ([3], 1, {})
    assert look(two_keys, f"?root={alice['nodes'][0][0]}", headers=key("alice"))["nodes"] == alice["nodes"]
    of_bob = look(two_keys, headers=key("bob"))["nodes"][0][0]
    for path in ("/debug/radix", "/debug/radix/events"):
        for number in (of_bob, *(node[0] for node in admin["nodes"])):
            assert two_keys.http.get(f"{path}?root={number}", headers=key("alice")).status_code == 404
        refused = two_keys.http.get(f"{path}?text=true", headers=key("alice"))
        assert refused.status_code == 403 and "--admin-api-key" in refused.json()["error"]["message"]
    with watching(two_keys, headers=key("alice")) as events:
        next(events)
        generate(two_keys, [67, 68], key("bob"))
        generate(two_keys, [69, 70, 71], key("alice"))
        (insert,) = changes(events, "insert")
        assert insert[2:] == [0, 3]


@pytest.mark.parametrize("query", ["", "?limit=1"])
def test_a_key_learns_nothing_of_what_others_do(two_keys: RunningServer, query: str):
    def seen(num_of_bob: int) -> list[dict[str, Any]]:
        assert two_keys.http.post("/flush_cache", headers=key("root")).status_code == 200
        generate(two_keys, [64, 65, 66], key("alice"))
        with watching(two_keys, query, headers=key("alice")) as events:
            told = [next(events)]
            for number in range(num_of_bob):
                generate(two_keys, [70 + number, *range(64, 70 + 3 * number)], key("bob"))
                look(two_keys, headers=key("root"))
            generate(two_keys, [67, 68], key("alice"))
            while told[-1]["num_nodes"] != 2:
                told.append(next(events))
        return [*told, look(two_keys, query, headers=key("alice"))]

    def shape(event: dict[str, Any]) -> list[Any]:
        assert event.keys() <= {*"type engine page_size cursor time nodes num_nodes aggregates changes".split()}
        return [lengths(event), event["num_nodes"], sorted(map(repr, event["aggregates"].values()))]

    alone, beside = seen(0), seen(4)
    assert [shape(alone[end]) for end in (0, -1)] == [shape(beside[end]) for end in (0, -1)]
    assert [event["cursor"] for event in beside[:-1]] == list(range(1, len(beside)))
    assert sum(event["num_nodes"] == 1 for event in beside[:-1]) == 1, "nothing was sent of what another key did"
    assert beside[-1]["cursor"] == 1


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=20001", "root=0", "root=x", "engine=-1", "engine=1", "text=2", "deep=3"]
)
def test_what_is_wrong_is_named(http: httpx.Client, query: str):
    for path in ("/debug/radix", "/debug/radix/events"):
        response = http.get(f"{path}?{query}")
        assert response.status_code == 400
        assert query.split("=")[0] in response.json()["error"]["message"]


def test_readers_are_bounded(server: RunningServer, monkeypatch):
    monkeypatch.setattr(tree_feed, "MAX_LISTENERS", 1)
    with watching(server) as events:
        next(events)
        refused = server.http.get("/debug/radix")
        assert refused.status_code == 503 and "at most 1 readers" in refused.json()["error"]["message"]
    wait_until(lambda: server.http.get("/debug/radix").status_code == 200)


def test_a_key_leaves_room_for_others(two_keys: RunningServer, monkeypatch):
    monkeypatch.setattr(tree_feed, "MAX_OF_ONE", 1)
    with watching(two_keys, headers=key("alice")) as events:
        next(events)
        refused = two_keys.http.get("/debug/radix", headers=key("alice"))
        assert refused.status_code == 503
        assert "at most 1 readers with one key" in refused.json()["error"]["message"]
        for other in ("bob", "root"):
            assert two_keys.http.get("/debug/radix", headers=key(other)).status_code == 200


class Direct:
    """A tree, and a feed of it without an engine."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(50_000)
        self.cache = RadixCache(1, self.allocator)
        self.log = TreeLog(self.cache)
        self.feed = TreeFeed(self.ask)

    async def ask(self, cursor: int, *, with_tokens: bool = False) -> dict[str, Any]:
        await asyncio.sleep(0)
        return self.log.look(cursor, with_tokens=with_tokens) | {"pool": {"total": 50_000}}

    def put(self, *tokens: int) -> None:
        pages = self.allocator.allocate(len(tokens))
        assert pages is not None
        self.cache.insert(np.array(tokens, np.int32), pages)

    def reader(self) -> _Reader:
        return _Reader(self.feed, View(20_000, None, None), {"engine": 0, "page_size": 1}, None, None)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tree_feed, "LOOK_S", 0.001)
    monkeypatch.setattr(radix, "LOOK_S", 0.001)
    monkeypatch.setattr(tree_feed, "KEEP_S", 0.001)


async def test_nobody_is_told_when_nobody_looks(quick):
    direct = Direct()
    assert not direct.cache._observers._each
    reader = direct.reader()
    with direct.feed.listening(reader):
        await reader.snapshot()
        assert len(direct.cache._observers._each) == 1
    while direct.cache._observers._each:
        await asyncio.sleep(0.001)
    assert direct.feed._asking is not None
    await direct.feed._asking
    direct.put(1, 2)
    with direct.feed.listening(reader := direct.reader()):
        assert len((await reader.snapshot())["nodes"]) == 1


async def test_a_slow_reader_gets_a_snapshot_for_what_it_missed(quick, monkeypatch):
    monkeypatch.setattr(radix, "MAX_CHANGES", 10)

    class front:
        class server_config:
            health_timeout = 20

    direct = Direct()
    reader = direct.reader()
    async with contextlib.aclosing(reader.events(front)) as events:  # pyright: ignore[reportArgumentType]
        assert (await anext(events))["type"] == "snapshot"
        direct.put(1, 2)
        assert len((await anext(events))["changes"]) == 1
        for i in range(12):
            direct.put(3 + i)
            await asyncio.sleep(0.005)
        while not reader._is_stale:
            await asyncio.sleep(0.001)
        assert not reader._changes or len(reader._changes) <= 12, "what waits is bounded"
        event = await anext(events)
        assert (event["type"], event["num_nodes"]) == ("snapshot", 13)
        direct.put(50)
        assert [change[0] for change in (await anext(events))["changes"]] == ["insert"]


async def test_an_engine_that_fails_ends_the_reading(quick):
    direct = Direct()

    async def ask(cursor: int, *, with_tokens: bool = False) -> dict[str, Any]:
        raise tree_feed.JsgError("the engine ended")

    direct.feed = TreeFeed(ask)
    reader = direct.reader()
    with direct.feed.listening(reader), pytest.raises(tree_feed.JsgError, match="the engine ended"):
        await reader.snapshot()


async def test_a_copy_that_was_begun_anew_is_not_shown_before_it_is_whole():
    reader = (direct := Direct()).reader()
    assert not direct.feed.copy.is_whole
    reader._woken.set()  # by a look before the copy was begun anew
    waiting = asyncio.create_task(reader.snapshot())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    direct.feed.copy.take(await direct.ask(0))
    assert direct.feed.copy.is_whole
    reader.on_look(None)
    assert (await asyncio.wait_for(waiting, 10))["type"] == "snapshot"
