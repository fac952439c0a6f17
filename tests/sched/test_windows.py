"""Layers with a window: which cached prefixes can still be used, and what is decided by that."""

import random
from typing import Any

import numpy as np
import pytest

from jsg.cache.block_events import BlockRecorder, BlocksCleared, BlocksRemoved, BlocksStored
from jsg.cache.node import Node
from jsg.types import Request
from jsg.window import Window
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.test_scheduler import make_request

WINDOW = Window(4)
BLOCK = 2
"""Pages of a block of events."""


def make_engine(num_parts: int, **knobs: Any) -> SimulatedEngine:
    """An engine that runs one request after another, and has parts for some of its pages."""
    knobs = {"num_pages": 100, "max_running": 1, "windows": (WINDOW,), "part_rate": num_parts / 100} | knobs
    engine = SimulatedEngine(EngineShape(**knobs))
    (group,) = engine.scheduler.table.windows
    assert group.num_total == num_parts
    return engine


def prompt(rid: str, first: int, length: int, *more: int, **fields: Any) -> Request:
    """A prompt that begins like no other with another `first`, and has `length` tokens and then more."""
    tokens = np.random.default_rng(first).integers(2, 7, length - 1)
    return make_request(rid, (first, *tokens.tolist(), *more), **fields)


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_waiting_request_needs_goes_last(waits: bool):
    engine = make_engine(30)
    engine.add(prompt("first", 2, 12, max_new=1))
    engine.run_until_idle()
    later = prompt("later", 2, 12, 3, max_new=1)
    for index in range(4):
        engine.add(prompt(f"other {index}", 3 + index, 12, max_new=1, priority=1))
    if waits:
        engine.add(later)
    engine.run_until_idle()
    if not waits:
        engine.add(later)
    engine.run_until_idle()
    assert engine.answers["later"].cached_tokens == (12 if waits else 0)
    engine.check_answers()


def with_a_gone_beginning() -> SimulatedEngine:
    """The cache has 20 tokens of a prompt that begins with 2, whose first 14 have no parts, and 18 of one with 3."""
    engine = make_engine(24)
    for first, length in ((2, 20), (3, 18)):
        engine.add(prompt(f"cached {first}", first, length, max_new=0))
        engine.run_until_idle()
    (group,) = engine.scheduler.table.windows
    assert (engine.cache.stats().num_cached_tokens, group.counts) == (38, (0, 24, 0))
    return engine


def test_the_order_of_the_queue_goes_by_what_can_be_used():
    engine = with_a_gone_beginning()
    for first, length in ((2, 10), (3, 8)):
        engine.add(prompt(f"{first}", first, length, 6, max_new=1))
    engine.run_until_idle()
    order = dict.fromkeys(entry.running.request.rid for batch in engine.batches for entry in batch.entries)
    assert [*order][-2:] == ["3", "2"], "the longer prefix cannot be used"
    assert engine.answers["3"].cached_tokens == 8
    engine.check_answers()


def test_a_report_says_how_much_is_cached_in_vain():
    engine = with_a_gone_beginning()
    engine.add(prompt("asked", 2, 4, 6, 6, max_new=1, return_cache_info=True))
    engine.run_until_idle()
    report = engine.answers["asked"].cache_report
    assert report is not None and report.first_difference is None
    assert (report.matched_tokens, report.unusable_tokens, report.matchable_tokens) == (0, 4, 5)
    engine.check_answers()


def test_a_prompt_that_is_longer_than_all_windows_together_does_not_wait_for_others():
    engine = make_engine(24, num_pages=200, max_running=2, part_rate=24 / 200, context_length=120)
    engine.add(prompt("long answer", 2, 4, max_new=100))
    engine.step()
    engine.add(prompt("long prompt", 3, 60, max_new=1))
    for _ in range(15):  # 8 chunks, and what overlaps
        engine.step()
    assert engine.answers["long prompt"].finish is not None and engine.answers["long answer"].finish is None
    engine.run_until_idle()
    engine.check_answers()


class Router:
    """Who knows of the cache what block events say: by name of a block the name before it."""

    def __init__(self, engine: SimulatedEngine):
        self._cache = engine.cache
        self._recorder = BlockRecorder(BLOCK * engine.shape.page_size, engine.cache.usable_at)
        engine.cache.observe(self._recorder)
        self.blocks: dict[int, int | None] = {}
        self.num_back = 0

    def take(self) -> None:
        """Takes the events since the last time, and compares what they leave with the tree."""
        for event in self._recorder.take():
            match event:
                case BlocksStored(hashes, parent):
                    assert parent is None or parent in self.blocks, "a block comes before the one that it follows"
                    assert not self.blocks.keys() & set(hashes), "a block is told twice"
                    self.blocks |= zip(hashes, (parent, *hashes), strict=False)
                case BlocksRemoved(hashes):
                    for name in reversed(hashes):
                        del self.blocks[name]
                    self.num_back += 1
                    assert not set(self.blocks.values()) & set(hashes), "a block goes before one that follows it"
                case BlocksCleared():
                    self.blocks.clear()
        expected = [
            name for root in self._cache.roots for child in root.children.values() for name in self._told(child)[0]
        ]
        assert sorted(expected) == sorted(self.blocks)

    def _told(self, node: Node) -> tuple[list[int], list[int]]:
        """The blocks at and below a node behind or at whose end some prompt can go on.

        The second are the lengths that can be used at its end and at the ends of all below.
        """
        ending, below, ends = self._recorder._endings[node.serial], [], [self._cache.usable_at(node)]
        for child in node.children.values():
            names, further = self._told(child)
            below += names
            ends += (end for end in further if end > ending.depth)
        start = (ending.depth - node.num_tokens) // self._recorder.block_tokens
        usable = min(max(ends), ending.depth) // self._recorder.block_tokens
        return [*ending.hashes[: max(usable - start, 0)], *below], ends


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param({"windows": (Window(3), Window(6), Window(5, is_aligned=True)), "part_rate": 0.4}, id="windows"),
        pytest.param({"num_states": 6}, id="states"),
    ],
)
def test_routers_are_told_of_blocks_that_are_of_use(kinds: dict[str, Any], page_size: int):
    num_back = 0
    for seed in range(3):
        rng = random.Random(seed)
        engine = SimulatedEngine(EngineShape(num_pages=80, page_size=page_size, max_running=3, **kinds))
        router = Router(engine)
        for index in range(30):
            tokens = [
                *([2, 3, 4, 5] * 4)[: rng.randrange(1, 16)],
                *(rng.randrange(2, 7) for _ in range(rng.randrange(1, 20))),
            ]
            engine.add(make_request(f"{index}", tuple(tokens), max_new=rng.randrange(1, 12)))
            for _ in range(rng.randrange(6)):
                engine.step()
                router.take()
        engine.run_until_idle()
        router.take()
        num_back += router.num_back
        engine.check_answers()
        router.take()
        assert not router.blocks
    assert num_back > 20
