"""The parts of the scheduler, each against something simpler."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.cache.allocator import PageAllocator
from jsg.cache.node import Node
from jsg.cache.radix import RadixCache
from jsg.config import POLICIES
from jsg.errors import ConfigError
from jsg.sched import waiting as waiting_module
from jsg.sched.admission import DECAY_STEPS, FLOOR, START, AdmissionEstimate
from jsg.sched.buckets import Phase, make_buckets, make_deterministic_buckets
from jsg.sched.bypass import BypassLedger
from jsg.sched.policy import make_policy
from jsg.sched.request import RunningRequest, new_running_request
from jsg.sched.waiting import WaitingQueue
from jsg.types import Request, SamplingParams


def make_request(
    tokens: tuple[int, ...], arrival: int, namespace: str = "", max_new: int = 4, priority: int = 0
) -> RunningRequest:
    sampling = SamplingParams(max_new_tokens=max_new)
    request = Request(rid=str(arrival), input_ids=tokens, sampling=sampling, namespace=namespace, priority=priority)
    return new_running_request(request, arrival, 0)


# The ledger.


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("record"), st.integers(0, 5000), st.integers(1, 100)),
            st.tuples(st.just("forget"), st.integers(0, 3000), st.just(0)),
        ),
        max_size=60,
    ),
    st.integers(0, 500),
)
def test_ledger_counts_the_tokens_of_later_arrivals(events: list[tuple[str, int, int]], bound: int):
    ledger = BypassLedger(bound)
    recorded: list[tuple[int, int]] = []
    oldest = 0
    for kind, number, num_tokens in events:
        if kind == "forget":
            oldest = max(oldest, number)
            ledger.forget_before(oldest)
        else:
            ledger.record(oldest + number, num_tokens)
            recorded.append((oldest + number, num_tokens))
        edges = [arrival + side for arrival, _ in recorded for side in (-1, 0)]
        for asked in {oldest, *(edge for edge in edges if edge >= oldest)}:
            later = sum(tokens for arrival, tokens in recorded if arrival > asked)
            assert ledger.bypassed(asked) == later
            assert ledger.is_overdue(asked) == (later > bound)


def test_ledger_stays_small():
    ledger = BypassLedger(0)
    for arrival in range(20_000):
        ledger.record(arrival, 1)
        ledger.forget_before(max(0, arrival - 100))
    assert len(ledger._tokens) <= 2048 and ledger.bypassed(19_950) == 49


# Buckets.


@given(st.integers(1, 300), st.integers(0, 10_000), st.booleans())
def test_buckets_hold_every_step_with_little_padding(max_running: int, more: int, is_deterministic: bool):
    chunk = max_running + more
    buckets = (
        make_deterministic_buckets(max_running, chunk, chunk) if is_deterministic else make_buckets(max_running, chunk)
    )
    assert len(buckets.all) <= 24, "design: at most 24 forward executables"
    assert buckets.max_rows >= max_running and buckets.max_tokens >= chunk and buckets.chunk == chunk
    for phase, most in ((Phase.DECODE, max_running), (Phase.EXTEND, chunk)):
        for num_tokens in {1, min(2, most), most // 3 + 1, most - 1 or 1, most}:
            key = buckets.pick(phase, num_tokens)
            keys = buckets.decode if phase is Phase.DECODE and buckets.decode else buckets.extend
            assert key == min((k for k in keys if k.num_tokens >= num_tokens), key=lambda k: k.num_tokens)
            if not is_deterministic:
                assert key.num_tokens <= max(64, 2 * num_tokens) and key.phase is phase
    assert is_deterministic == (not buckets.decode)


@pytest.mark.parametrize("max_running", [1, 8, 10, 250, 256])
def test_every_number_of_rows_can_be_a_multiple_of_something(max_running: int):
    buckets = make_buckets(max_running, max_running, row_multiple=8, shares_prefixes=True)
    assert all(key.num_rows % 8 == key.num_tokens % 8 == 0 for key in buckets.all)
    assert max_running <= buckets.decode[-1].num_rows == buckets.max_rows < max_running + 8
    assert buckets.pick(Phase.DECODE, max_running).num_tokens == buckets.max_rows
    assert buckets.decode[0].num_rows == 8


def test_a_shape_for_drafts_must_be_worth_it():
    buckets = make_buckets(32, 512)
    sizes = [key.num_rows for key in buckets.drafts]
    assert sizes == [16, 32, 64, 128]
    for least, wanted, most, expected in (
        (4, 10, 128, 16),
        (4, 23, 128, 16),  # three quarters of 32 are 24
        (4, 24, 128, 32),
        (16, 20, 128, 32),  # a full batch has no room for drafts in 16 rows
        (31, 40, 128, 64),  # nor in 32 for enough of them
        (16, 95, 128, 64),
        (16, 96, 128, 128),
        (16, 300, 128, 128),
        (16, 300, 64, 64),  # the largest is not compiled yet
        (32, 40, 32, 32),
    ):
        assert buckets.rows_worth(least, wanted, most) == expected


@pytest.mark.parametrize("make", [make_buckets, lambda rows, chunk: make_deterministic_buckets(rows, chunk, 512)])
def test_a_chunk_must_hold_a_token_of_everybody(make):
    with pytest.raises(ConfigError, match="--chunked-prefill-size must be at least --max-running-requests"):
        make(64, 63)


def test_deterministic_chunk_must_fit_its_one_shape():
    with pytest.raises(ConfigError, match="at most 256"):
        make_deterministic_buckets(4, 257, 256)


# The admission estimate.


def test_estimate_sinks_to_its_floor_and_starts_afresh():
    estimate = AdmissionEstimate(1.0)
    assert estimate.fraction == START
    for _ in range(DECAY_STEPS // 2):
        estimate.step()
    assert estimate.fraction == pytest.approx((START + FLOOR) / 2)
    for _ in range(DECAY_STEPS):
        estimate.step()
    assert estimate.fraction == pytest.approx(FLOOR)
    estimate.on_idle()
    assert estimate.fraction == START


def test_estimate_learns_from_a_retract_and_forgets_in_time():
    estimate = AdmissionEstimate(0.01)
    request = make_request((1,), 0, max_new=100)
    request.num_known += 40
    estimate.on_retract([request])
    assert estimate.fraction == pytest.approx(0.6)
    for _ in range(2 * DECAY_STEPS):
        estimate.step()
    assert estimate.fraction == pytest.approx(FLOOR * 0.01)
    estimate.on_retract([])
    assert 0 <= estimate.fraction <= 1


def test_estimate_is_a_fraction_whatever_the_knob():
    assert AdmissionEstimate(100.0).fraction == 1.0
    assert AdmissionEstimate(0.01).fraction == pytest.approx(START * 0.01)


# The waiting queue.


class Queue:
    """A waiting queue over a cache of its own that changes at random."""

    def __init__(self, policy: str, page_size: int, seed: int, priorities: tuple[int, ...] = (0,)):
        self.priorities = priorities
        self.rng = random.Random(seed)
        self.allocator = PageAllocator(60)
        self.cache = RadixCache(page_size, self.allocator)
        self.policy = make_policy(policy, seed)
        self.queue = WaitingQueue(self.policy, self.cache)
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
        self.queue.reorder()
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
    monkeypatch.setattr(waiting_module, "SPARE_KEYS", 4)
    queue = Queue(policy, page_size, seed=1, priorities=(0, 0, 0, 1, -1))
    longest = 0
    for step in range(400):
        queue.act()
        queue.queue.check_integrity()
        if not queue.policy.depends_on_others:
            assert len(queue.queue._heap) <= 2 * len(queue.members) + 4, "stale keys pile up"
        assert queue.queue.oldest() is min(queue.members, key=lambda r: r.arrival, default=None)
        if step % 20 == 0:
            queue.queue._num_changes += 1000  # a round in which nothing may be put off
            queue.queue.reorder()
            keys = queue.policy.keys(queue.members)
            order = queue.drain()
            assert order == sorted(queue.members, key=lambda r: keys[r])
            priorities = [r.request.priority for r in order]
            assert priorities == sorted(priorities, reverse=True)
            longest = max(longest, len(queue.members))
    assert longest > 20


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
        if policy != "dfs-weight":  # there the others count for the weight of a branch
            keys = queue.policy.keys(alike)
            assert alike == sorted(alike, key=lambda r: keys[r])
        if policy == "fcfs":
            assert [r.arrival for r in alike] == sorted(r.arrival for r in alike)


def test_random_is_a_shuffle_of_its_seed():
    def order(seed: int) -> list[int]:
        requests = [make_request((1,), arrival) for arrival in range(50)]
        keys = make_policy("random", seed).keys(requests)
        return [r.arrival for r in sorted(requests, key=lambda r: keys[r])]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(50)) != order(1)


# Depth first.


def path_from_root(node: Node) -> list[Node]:
    path = [node]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    return path[::-1]


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_dfs_weight_walks_the_tree_depth_first(seed: int, num_actions: int):
    queue = Queue("dfs-weight", 1, seed)
    for _ in range(num_actions):
        queue.act()
    keys = queue.policy.keys(queue.members)
    order = sorted(queue.members, key=lambda r: keys[r])
    paths = {r: path_from_root(r.watch.node) for r in order if r.watch}
    below: dict[Node, list[int]] = {}
    for place, running in enumerate(order):
        for node in paths[running]:
            below.setdefault(node, []).append(place)
    for node, places in below.items():
        assert places == list(range(places[0], places[-1] + 1)), "the walk leaves a subtree and comes back"
        own = [place for place in places if paths[order[place]][-1] is node]
        assert own == places[len(places) - len(own) :], "a node's own requests come last"
        children = [child for child in below if child.parent is node]
        children.sort(key=lambda child: below[child][0])
        sizes = [len(below[child]) for child in children]
        assert sizes == sorted(sizes, reverse=True), "the heaviest child comes first"


def test_a_round_of_dfs_weight_does_not_change_its_mind():
    """Two equal branches: admitting one request of the first must not make the second the heavier one."""
    queue = Queue("dfs-weight", 1, seed=0)
    for branch in (1, 2):
        queue.insert((0, branch))
    for number in range(6):
        queue.queue.add(make_request((0, 1 + number % 2, 5, number), number))
    assert [r.arrival for r in queue.drain()] == [0, 2, 4, 1, 3, 5]


def test_a_long_queue_of_dfs_weight_is_not_sorted_for_every_change():
    queue = Queue("dfs-weight", 1, seed=0)
    calls = []
    original = queue.policy.keys
    queue.policy.keys = lambda waiting: calls.append(1) or original(waiting)
    for number in range(640):
        queue.queue.add(make_request((number,), number))
    for number in range(640, 1040):
        queue.queue.add(make_request((number,), number))
        queue.queue.reorder()
        first = queue.queue.first()
        assert first is not None
        queue.queue.remove(first)
        queue.queue.check_integrity()
    assert 20 < len(calls) < 60
    assert len(queue.drain()) < 640, "the newest wait for the next time"
    queue.queue.reorder()
