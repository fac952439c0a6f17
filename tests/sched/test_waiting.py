"""The waiting queue in every policy: against a sort from scratch, and in cases that can be said beforehand."""

import random

import numpy as np
import pytest

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import PAGES_PER_NODE, RadixCache
from jsg.config import POLICIES
from jsg.sched import key_heap, longest, scheduler
from jsg.sched.policy import ByArrival, make_order
from jsg.sched.request import RunningRequest, new_running_request
from jsg.sched.waiting import WaitingQueue
from jsg.types import Request, SamplingParams
from tests.sched.integrity import check_waiting, keys_of
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.token_model import VOCAB, TokenModel


def make_request(
    tokens: tuple[int, ...], arrival: int, namespace: str = "", max_new: int = 4, priority: int = 0
) -> RunningRequest:
    sampling = SamplingParams(max_new_tokens=max_new)
    request = Request(rid=str(arrival), input_ids=tokens, sampling=sampling, namespace=namespace, priority=priority)
    return new_running_request(request, arrival, 0)


class Queue:
    """A waiting queue over a cache of its own that changes at random."""

    def __init__(self, policy: str, page_size: int, seed: int, priorities: tuple[int, ...] = (0,)):
        self.priorities = priorities
        self.rng = random.Random(seed)
        self.allocator = PageAllocator(60)
        self.cache = RadixCache(page_size, self.allocator)
        self.order = make_order(policy, self.cache)
        self.queue = WaitingQueue(self.order, self.cache)
        self.members: list[RunningRequest] = []
        self.num_arrived = 0

    def tokens(self) -> tuple[int, ...]:
        pages = self.rng.choices(range(3), k=self.rng.randrange(1, 6))
        return tuple(token for token in pages for _ in range(self.cache.page_size))

    def act(self) -> None:
        match self.rng.randrange(6):
            case 0 | 1:
                namespace, priority = self.rng.choice(["", "", "tenant"]), self.rng.choice(self.priorities)
                running = make_request(self.tokens(), self.num_arrived, namespace, priority=priority)
                self.num_arrived += 1
                self.queue.add(running)
                self.members.append(running)
            case 2 if self.members:
                running = self.members.pop(self.rng.randrange(len(self.members)))
                self.queue.remove(running)
                assert running.watch is None
            case 3:
                self.cache.evict(self.rng.randrange(1, 5))
            case _:
                self.insert(self.tokens(), self.rng.choice(["", "tenant"]))

    def insert(self, tokens: tuple[int, ...], namespace: str = "") -> None:
        num_pages = len(tokens) // self.cache.page_size
        self.cache.evict(num_pages - self.allocator.num_free)
        pages = self.allocator.allocate(num_pages)
        assert pages is not None
        result = self.cache.insert(np.array(tokens, np.int32), pages, namespace)
        self.allocator.free(pages[: result.num_existing])

    def drain(self) -> list[RunningRequest]:
        """Everybody, as one round of admissions would take them."""
        order = []
        while (first := self.queue.first()) is not None:
            self.queue.remove(first)
            order.append(first)
        for running in order:
            self.queue.add(running)
        return order


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_queue_is_in_the_order_of_a_sort_from_scratch(policy: str, page_size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(key_heap, "SPARE_KEYS", 4)
    monkeypatch.setattr(longest, "SPARE_CHANGES", 4)
    queue = Queue(policy, page_size, seed=1, priorities=(0, 0, 0, 1, -1))
    most = 0
    for step in range(400):
        queue.act()
        check_waiting(queue.queue)
        if isinstance(queue.order, ByArrival):
            assert len(queue.order._heap._heap) <= 2 * len(queue.members) + 5, "stale keys pile up"
        assert queue.queue.oldest() is min(queue.members, key=lambda r: r.arrival, default=None)
        if step % 20 == 0:
            keys = keys_of(queue.order, queue.members)
            order = queue.drain()
            assert order == sorted(queue.members, key=lambda r: keys[r])
            priorities = [r.request.priority for r in order]
            assert priorities == sorted(priorities, reverse=True)
            most = max(most, len(queue.members))
    assert most > 20


def test_lpm_is_by_cached_prefix_then_arrival():
    queue = Queue("lpm", 1, seed=0)
    for tokens in ((9, 9), (1, 2, 3, 4), (1, 2, 7), (1, 2, 8)):
        queue.queue.add(make_request(tokens, queue.num_arrived))
        queue.num_arrived += 1
    assert [r.arrival for r in queue.drain()] == [0, 1, 2, 3]
    queue.insert((1, 2))
    assert [r.arrival for r in queue.drain()] == [1, 2, 3, 0]
    queue.insert((1, 2, 8))
    queue.insert((9, 9))
    assert [r.arrival for r in queue.drain()] == [1, 2, 3, 0], (
        "the last token of a prompt is never taken from the cache"
    )
    queue.insert((1, 2, 3, 4))
    assert [r.arrival for r in queue.drain()] == [1, 2, 3, 0]
    queue.cache.reset()
    assert [r.arrival for r in queue.drain()] == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_orders_those_of_one_priority_as_if_they_were_alone(policy: str):
    queue = Queue(policy, 1, seed=0)
    for tokens in ((1, 2, 3), (1, 2, 4), (2, 2)):
        queue.insert(tokens)
    rng = random.Random(0)
    for number in range(60):
        queue.queue.add(make_request(queue.tokens(), number, priority=rng.choice([-5, 0, 2**31 - 1])))
    order = queue.drain()
    for priority in (-5, 0, 2**31 - 1):
        alike = [r for r in order if r.request.priority == priority]
        assert len(alike) > 10
        keys = keys_of(queue.order, alike)
        assert alike == sorted(alike, key=lambda r: keys[r])
        if policy == "fcfs":
            assert [r.arrival for r in alike] == sorted(r.arrival for r in alike)


def test_a_step_admits_fewer_if_the_tree_is_much_work(monkeypatch: pytest.MonkeyPatch):
    """Growing contexts, whose paths have a node for each of them that has run."""
    monkeypatch.setattr(scheduler, "MAX_TREE_WORK", 60)
    document = tuple(number * 7 % VOCAB for number in range(40))
    engine = SimulatedEngine(EngineShape(num_pages=400, max_running=20, chunk=200), TokenModel(broken_every=10**9))
    for length in range(2, 40):
        engine.add(Request(rid=str(length), input_ids=document[:length], sampling=SamplingParams(max_new_tokens=2)))
    engine.step()
    assert 1 < len(engine.scheduler.running) < 10
    most = len(engine.scheduler.running)
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most < 20
    engine.check_answers()


def test_a_step_admits_fewer_if_each_has_many_cached_pages(monkeypatch: pytest.MonkeyPatch):
    """As many answers to one long prompt do: each row gets a copy of the page numbers."""
    monkeypatch.setattr(scheduler, "MAX_TREE_WORK", 60)
    prompt = tuple(number * 7 % VOCAB for number in range(20 * PAGES_PER_NODE))
    shape = EngineShape(num_pages=2000, max_running=20, chunk=2000, context_length=1000)
    engine = SimulatedEngine(shape, TokenModel(broken_every=10**9))
    most_new, num_before = 0, 0
    for number in range(20):
        sampling = SamplingParams(max_new_tokens=3 if number else 1)
        engine.add(Request(rid=str(number), input_ids=prompt, sampling=sampling))
        if not number:
            engine.step()  # the prompt is cached
    while engine.has_work:
        engine.step()
        num_now = engine.scheduler.totals.prompt_tokens // len(prompt)
        most_new, num_before = max(most_new, num_now - num_before), num_now
    assert 1 < most_new <= 4
    engine.check_answers()


def test_watches_that_part_after_most_have_ended_leave_no_key():
    """Clients leave, and then a prompt that runs goes on along the prefix of the others."""
    cache = RadixCache(1, PageAllocator(100))
    queue = WaitingQueue(make_order("lpm", cache), cache)
    prompts = [(1, 1, 0, 6), *((1, 2, i, 6) for i in range(1, 6)), (1, 3, 0), (6, 6)]
    waiting = [make_request(tokens, arrival) for arrival, tokens in enumerate(prompts)]
    for running in waiting:
        queue.add(running)
    queue.first()
    for running in waiting[1:6]:
        queue.remove(running)
    assert queue.first() is waiting[0]
    cache.insert(np.array([1, 1, 0], np.int32), np.arange(1, 4, dtype=np.int32))
    for running in (waiting[0], waiting[6], waiting[7]):
        assert queue.first() is running
        queue.remove(running)
    assert queue.first() is None
