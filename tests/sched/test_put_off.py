"""Steps that leave out the sampling of some requests: on a simulated device, every answer stays the same."""

import dataclasses
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jsg.sched import admission
from jsg.sched.batch import Batch, StepResult
from jsg.sched.buckets import BucketKey
from jsg.sched.put_off import put_off
from jsg.sched.vision_store import NUM_FIXED_ROWS
from jsg.types import RequestOutput
from jsg.window import Window
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.test_image_keys import SHAPE, image, request
from tests.sched.test_traffic import Traffic, abort_somebody, check_wild, random_request, shapes, traffics
from tests.sched.token_model import TILE_ROWS


class PuttingOff(SimulatedEngine):
    """As `EngineCore` where every mask takes long: each step puts off some of its requests, whichever.

    As there the step before is committed first.
    """

    def __init__(self, shape: EngineShape, rate: float = 0.4):
        super().__init__(shape)
        self.happened: Counter[str] = Counter()
        self.rate = rate
        self.only: str | None = None  # who is put off; None for anybody
        self._before: tuple[Batch, StepResult] | None = None
        self._outputs: list[RequestOutput] = []
        self._sampled = self.device._sample
        self.device._sample = self._sample

    def step(self) -> None:
        if self.shape.draft_len:
            self._commit()
        proposals = self._proposals()
        max_rows = max(key.num_rows for key in self.device._buckets.all) if proposals else 0
        batch = self.scheduler.plan(proposals=proposals, max_rows=max_rows)
        if batch is None:
            self._commit()
        else:
            self._before = batch, self.device.run(batch, self.scheduler.table)
            self.batches.append(batch)
            self.num_drafts += sum(entry.num_drafts for entry in batch.entries)
        if not self.shape.overlaps:
            self._commit()
        outputs, self._outputs = self._outputs, []
        for output in outputs + self.scheduler.take_finished():
            self._take(output)
        self.check_integrity()
        self.device.forget_free_pages(self.allocator)

    @property
    def has_work(self) -> bool:
        return self._before is not None or not self.scheduler.is_idle

    def _commit(self) -> None:
        before, self._before = self._before, None
        self._outputs += self.scheduler.commit(*before) if before else []

    def _sample(self, batch: Batch, key: BucketKey) -> StepResult:
        self._commit()
        for entry in batch.entries:
            if not entry.samples or entry.is_stale or self._random.random() >= self.rate:
                continue
            if self.only not in (None, entry.running.request.rid):
                continue
            kind = "drafts" if entry.num_drafts else "chunk" if entry.ends_prefill else "token"
            self.happened[kind] += 1
            last = entry.running.num_known - 1
            self.happened["images"] += any(item.start <= last < item.end for item in entry.running.request.media)
            self.happened["scored"] += entry.scores_prompt
            self.happened["again"] += entry.write_start > entry.start
            put_off(entry, self.scheduler.table)
        return self._sampled(batch, key)


def play(engine: PuttingOff, traffic: Traffic) -> None:
    rng, num_sent = random.Random(traffic.seed), 0
    while num_sent < traffic.num_requests:
        for _ in range(min(rng.randint(0, traffic.burst), traffic.num_requests - num_sent)):
            engine.add(random_request(rng, f"r{num_sent}", engine.shape))
            num_sent += 1
        abort_somebody(engine, rng, traffic.abort_rate)
        engine.step()
    engine.run_until_idle(5_000)
    engine.check_answers()
    engine.happened["retracts"] += engine.scheduler.totals.num_retracts


@pytest.mark.parametrize(
    "num_examples",
    [
        16,
        pytest.param(240, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_what_is_put_off_changes_no_answer(num_examples: int, monkeypatch: pytest.MonkeyPatch):
    """Hundreds of examples are long."""
    monkeypatch.setattr(admission, "DECAY_STEPS", 5)
    happened: Counter[str] = Counter()

    @settings(max_examples=num_examples, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=shapes,
        traffic=traffics,
        mode=st.sampled_from([(5, False), (0, True), (5, False), (0, False)]),
        windows=st.sampled_from([(), (Window(1),), (Window(4),), (Window(5, is_aligned=True),)]),
        num_states=st.sampled_from([None, 0, 4]),
    )
    def play_all(shape: EngineShape, traffic: Traffic, mode: tuple[int, bool], **kinds: Any) -> None:
        draft_len, overlaps = mode
        changes = {"draft_len": draft_len, "overlaps": overlaps, "part_rate": 0.3, **kinds}
        engine = PuttingOff(dataclasses.replace(shape, **changes))
        play(engine, traffic)
        happened.update(engine.happened)

    play_all()
    check_wild(happened, ("token", "chunk", "scored", "again", "retracts", "drafts"), 10)


def test_a_prompt_that_ends_in_an_image_may_be_put_off(monkeypatch: pytest.MonkeyPatch):
    """Its features may have been evicted when its last token runs again."""
    monkeypatch.setattr(admission, "DECAY_STEPS", 5)
    happened: Counter[str] = Counter()
    for seed in range(10):
        vision_rows = 3 * TILE_ROWS + NUM_FIXED_ROWS
        engine = PuttingOff(dataclasses.replace(SHAPE, num_pages=60, chunk=12, vision_rows=vision_rows), rate=0.7)
        rng = np.random.default_rng(seed)
        for number in range(12):
            parts = [(1, 2), image(0, int(rng.integers(4)), int(rng.integers(4)))]
            engine.add(request(f"r{number}", *parts, max_new_tokens=4))
        engine.run_until_idle()
        engine.check_answers()
        happened.update(engine.happened)
        happened["evictions"] += engine.scheduler.table.vision.num_evicted
    assert happened["images"] >= 20 and happened["evictions"] >= 20


def test_pages_that_are_there_already_need_no_room():
    """Where the pool is full, what is put off runs again all the same."""
    engine = PuttingOff(EngineShape(num_pages=6, page_size=2, max_running=2, context_length=12), rate=0.8)
    num_full = 0
    for number in range(5):
        engine.add(request(f"r{number}", (2, 3, 4, number), max_new_tokens=8))
        while engine.has_work:
            before = sum(engine.happened.values())
            engine.step()
            is_full = not engine.scheduler.table.num_available
            num_full += is_full and sum(engine.happened.values()) > before
    engine.check_answers()
    assert num_full > 3 and engine.scheduler.totals.num_retracts == 0


def test_who_is_put_off_goes_on_beside_one_that_waits_for_a_row():
    """What was passed too often comes before all that arrived after it, but only where these need memory."""
    engine = PuttingOff(EngineShape(num_pages=100, max_running=2, max_bypass_tokens=1), rate=0)
    shared = (2, 3, 4, 5, 6, 7, 2, 3)
    engine.add(request("first", shared, max_new_tokens=40))
    engine.add(request("short", (6, 6), max_new_tokens=3))
    engine.step()
    engine.add(request("passed", (5, 4, 3, 2, 7, 7)))
    engine.add(request("passing", (*shared, 7, 7, 7), max_new_tokens=30))
    while not engine.answers["passing"].tokens:
        engine.step()
    assert not engine.answers["passed"].tokens and engine.scheduler._overdue() is not None
    engine.only, engine.rate = "passing", 1.0
    engine.step()
    num_before = len(engine.answers["passing"].tokens)
    engine.rate = 0
    for _ in range(4):
        engine.step()
    assert len(engine.answers["passing"].tokens) >= num_before + 2
    assert engine.happened["token"] and not engine.answers["passed"].tokens, "it still waits for a row"
    engine.run_until_idle(500)
    engine.check_answers()
