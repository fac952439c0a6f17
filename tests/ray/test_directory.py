"""The router that all fronts share, without Ray."""

import heapq
import itertools
import random
from collections.abc import Coroutine
from typing import Any

from bench.scale.replicas import BLOCK_TOKENS, BlockCache, Live, Replica, cached_len
from bench.scale.traces import Call
from jsg.ray.directory import MAX_REPLICAS, MAX_SILENCE_S, Directory, Known, Pool, Report, by_hash
from jsg.ray.prompt import PromptUnits

POOL = Pool(4096, 1, 4)


def done[T](call: Coroutine[Any, Any, T]) -> T:
    """What a call returns, which never waits, so calls run one after another."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a call has waited")


class Fleet:
    """A directory, the calls to it, and a time that tests set."""

    def __init__(self, *replicas: str) -> None:
        self.now = 0.0
        self.directory = Directory(lambda: self.now)
        for name in replicas:
            self.join(name)

    def join(self, name: str) -> None:
        done(self.directory.join(name, f"http://{name}", POOL))

    def leave(self, name: str) -> None:
        done(self.directory.leave(name))

    def route(self, key: str, first: int, *avoid: str, front: str = "front") -> str | None:
        prompt = PromptUnits(tuple(range(first, first + 320)), max_new_tokens=8)
        found = done(self.directory.route(front, key, prompt, frozenset(avoid)))
        assert found is None or found[1] == f"http://{found[0]}"
        return found and found[0]

    def note(self, *reports: Report, front: str = "front") -> Known:
        return done(self.directory.note(front, reports))

    def answer(self, key: str, first: int, *avoid: str, front: str = "front") -> str | None:
        chosen = self.route(key, first, *avoid, front=front)
        self.note(Report(key, "begin"), Report(key, "end"), front=front)
        return chosen


def test_a_prefix_goes_to_the_replica_that_holds_it_whichever_front_asks():
    fleet = Fleet("a", "b")
    homes = {first: fleet.answer(f"cold {first}", first) for first in (0, 1000, 2000, 3000)}
    assert set(homes.values()) == {"a", "b"}  # new prefixes are spread
    assert {first: fleet.answer(f"warm {first}", first, front="other") for first in homes} == homes


def test_a_replica_that_failed_a_request_gets_no_other_before_it_joins_again():
    fleet = Fleet("a", "b")
    failed = fleet.answer("one", 0)
    assert failed is not None
    other = "b" if failed == "a" else "a"
    assert fleet.answer("one again", 0, failed) == other
    assert fleet.answer("two", 1000) == fleet.answer("three", 2000) == other
    assert fleet.answer("two again", 1000, other) is None
    fleet.join(failed)
    fleet.join(other)
    assert {fleet.answer(f"later {first}", first) for first in range(3000, 9000, 1000)} == {"a", "b"}


def test_the_requests_of_a_front_that_was_killed_end():
    fleet = Fleet("a", "b")
    assert {fleet.route(f"lost {number}", 1000 * number, front="killed") for number in range(6)} == {"a", "b"}
    assert fleet.directory.num_live == 6
    fleet.now = MAX_SILENCE_S + 1
    fleet.note()
    assert fleet.directory.num_live == 0


def test_replicas_that_leave_or_say_nothing_get_nothing():
    fleet = Fleet("a", "b", "c")
    fleet.leave("a")
    fleet.join("a")  # a call that was under way
    assert {fleet.answer(f"request {first}", first) for first in (0, 1000, 2000, 3000)} == {"b", "c"}
    fleet.now = MAX_SILENCE_S + 1
    fleet.join("c")
    assert fleet.note() == Known({"c": "http://c"}, POOL)
    fleet.leave("c")
    assert fleet.route("last", 0) is None


def test_new_replicas_get_the_places_of_those_that_have_gone_but_not_while_these_have_requests():
    fleet = Fleet("busy")
    assert fleet.route("long", 0) == "busy"
    fleet.leave("busy")
    for number in range(2 * MAX_REPLICAS):
        name = f"replica {number}"
        fleet.join(name)
        assert fleet.answer(f"request {number}", 0) == name
        fleet.leave(name)
    for number in range(MAX_REPLICAS):
        fleet.join(f"many {number}")
    assert len(fleet.note().urls) == MAX_REPLICAS - 1
    fleet.note(Report("long", "end"))
    fleet.join("last")
    assert len(fleet.note().urls) == MAX_REPLICAS


def test_a_hash_moves_only_the_conversations_of_a_replica_that_has_gone():
    names = ["a", "b", "c", "d"]
    conversations = [str(number).encode() for number in range(200)]
    before = {each: by_hash(each, names) for each in conversations}
    after = {each: by_hash(each, ["a", "b", "d"]) for each in conversations}
    assert set(before.values()) == set(names)
    assert all(after[each] == before[each] for each in conversations if before[each] != "c")


def calls(num_prefixes: int, count: int) -> list[tuple[Call, PromptUnits]]:
    """Calls with a prefix of 16 blocks each, and their prompts as a front sees them, in 4 % fewer units than tokens."""
    rng, made = random.Random(0), []
    for number in range(count):
        prefix = rng.randrange(num_prefixes)
        chain = (*(b"%d %d" % (prefix, index) for index in range(16)), b"own %d" % number)
        units = (*range(1000 * prefix, 1000 * prefix + 493), *range(10**6 + 100 * number, 10**6 + 100 * number + 31))
        made.append((Call(prefix, number, None, chain, (b"answer %d" % number,)), PromptUnits(units)))
    return made


def cached_by_two(asked: list[tuple[Call, PromptUnits]], pool_blocks: int) -> int:
    """Sends the calls, 16 at a time, to two replicas of one speed. What a step does is reported with the next one."""
    replicas, directory, cached = [Replica(pool_blocks), Replica(pool_blocks)], Directory(), 0
    for name in "01":
        done(directory.join(name, "", Pool(pool_blocks * BLOCK_TOKENS, 1, 2)))
    left, steps, late = iter(asked), [(0.0, 0), (0.0, 1)], list[Report]()

    def send(now: float) -> None:
        for call, prompt in itertools.islice(left, 1):
            chosen = done(directory.route("front", str(call.at), prompt, frozenset()))
            assert chosen is not None
            replicas[int(chosen[0])].add(Live(call, 0, now))

    for _ in range(16):
        send(0.0)
    while not all(replica.is_idle for replica in replicas):
        now, number = heapq.heappop(steps)
        seconds, begun, ended = replicas[number].step()
        heapq.heappush(steps, (now + seconds, number))
        done(directory.note("front", late))
        late = [Report(str(live.call.at), "begin") for live in begun]
        late += [Report(str(live.call.at), "end", live.call.output_len) for live in ended]
        cached += sum(live.cached for live in begun)
        for _ in ended:
            send(now)
    return cached


def test_two_replicas_reuse_nearly_as_much_as_one_cache_of_both_where_prefixes_fill_three_quarters():
    asked, pool, cached_by_one = calls(48, 600), BlockCache(1024), 0
    for call, _ in asked:
        cached_by_one += cached_len(call, pool.match(call.prompt))
        pool.use(call.kept)
    assert cached_by_two(asked, 512) >= 0.95 * cached_by_one
