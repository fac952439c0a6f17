"""Which requests are in an engine that several owners share."""

import asyncio
import random
import time

import pytest

from jsg.engine.front.client import EngineClient
from jsg.engine.front.places import ROUND_TOKENS, Places
from jsg.errors import QueueTimeoutError
from jsg.types import Request
from jsg.waits import WaitReason, stat_of
from tests.engine.front.background import outputs_of, until
from tests.engine.front.test_client import endless, fake_engine, request, tokens_of


def named(name: str) -> Request:
    return Request(rid=name, input_ids=(1,))


def names(taken: list[tuple[Request, float]]) -> list[str]:
    return [request.rid for request, _ in taken]


def test_an_owner_alone_leaves_a_row_for_another():
    places = Places(32)
    for number in range(4608):
        places.add("a", named(f"a{number}"))
    assert len(places.take()) == 30
    places.add("b", named("b0"))
    assert names(places.take()) == ["b0"], "it need not wait until anything of the other has ended"
    assert places.take() == [] and [places.leave("a", f"a{number}") for number in range(15)] == [False] * 15
    assert places.take() == [], "the share of each is 15 now"
    places.leave("a", "a15")
    assert names(places.take()) == ["a30"]
    assert places.leave("a", "a4000"), "it had no place"
    assert len(places) == 4608 - 31 - 1


def test_owners_take_turns():
    places = Places(4)
    for owner in "ab":
        for number in range(3):
            places.add(owner, named(f"{owner}{number}"))
    assert names(places.take()) == ["a0", "b0"]
    places.leave("a", "a0")
    places.leave("b", "b0")
    assert names(places.take()) == ["a1", "b1"]


def test_posts_of_an_owner_take_turns():
    """One with many prompts does not keep the next one waiting."""
    places = Places(2)
    for number in range(1000):
        places.add("a", Request(rid=f"many{number}", input_ids=(number,) * 100, post="many"))
    assert names(places.take()) == ["many0"]
    places.add("a", Request(rid="late", input_ids=(1,), post="late"))
    for number in range(200):
        places.leave("a", f"many{number}")
        if (taken := names(places.take())) == ["late"]:
            break
        assert taken == [f"many{number + 1}"]
    assert number <= 2 * -(-ROUND_TOKENS // 100), "two rounds: the present one and the next"
    places.leave("a", "late")
    assert names(places.take()) == [f"many{number + 1}"]


def test_all_that_waits_comes_in_the_end_and_nothing_twice():
    draw = random.Random(0)
    places = Places(8)
    waiting, running, seen = set[str](), list[str](), list[str]()
    for number in range(500):
        owner = draw.choice("aaaaaabc")
        places.add(owner, named(f"{owner}{number}"))
        waiting.add(f"{owner}{number}")
        for name in names(places.take()):
            waiting.remove(name)
            running.append(name)
            seen.append(name)
        for _ in range(draw.randrange(3)):
            if running:
                name = running.pop(draw.randrange(len(running)))
                assert not places.leave(name[0], name)
        if waiting and draw.random() < 0.1:
            name = draw.choice(sorted(waiting))
            waiting.remove(name)
            assert places.leave(name[0], name)
        assert len(places) == len(waiting)
    while waiting:
        name = running.pop()
        places.leave(name[0], name)
        for name in names(places.take()):
            waiting.remove(name)
            running.append(name)
            seen.append(name)
    assert len(seen) == len(set(seen))


def test_how_long_they_wait_is_known():
    now = 100.0
    places = Places(2, lambda: now)
    for name in "abc":
        places.add("o", named(name))
    assert places.take() == [(named("a"), 0.0)]
    now += 5
    places.add("o", named("d"))
    assert places.overdue(4) == ["b", "c"]
    places.leave("o", "a")
    assert places.take() == [(named("b"), 5.0)]


async def test_a_clients_owners_take_turns_and_what_waits_can_be_aborted():
    async def outputs(client: EngineClient, wanted: Request, owner: str):
        return [output async for output in outputs_of(client, wanted, owner)]

    async with fake_engine(queue_timeout=1000) as client:
        before = (await client.stats())["num_waiting"]
        client.take_turns()
        places = client._streams.places
        assert places is not None
        tasks = [asyncio.create_task(outputs(client, endless(f"r{i}"), "a")) for i in range(places._num + 3)]
        await until(lambda: len(places) == 3)
        assert tokens_of(await outputs(client, request("mine"), "b")) == [1, 2, 3, 1, 2]
        stats = await client.stats()
        assert (stats["num_waiting"], stats[stat_of(WaitReason.KEY_SHARE)]) == (before + 3, 3)
        assert client.abort(f"r{places._num}", "a")
        assert (await tasks[places._num])[-1].finish is not None
        places._now = lambda: time.monotonic() + 1001
        client._refuse_overdue()
        for late in tasks[-2:]:
            with pytest.raises(QueueTimeoutError, match="--queue-timeout"):
                await late
        assert client.abort_all("a") == places._num
        assert len(places) == 0
