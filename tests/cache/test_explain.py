"""Why a prefix was not cached: every explanation against brute force over everything that was ever cached."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.cache import eviction_log
from jsg.cache.allocator import PageAllocator
from jsg.cache.eviction_log import Eviction, EvictionLog
from jsg.cache.node import INT_BYTES, Node, Root
from jsg.cache.radix import RadixCache
from jsg.cache_report import CacheReport, EvictionCause, MissReason
from tests.cache.integrity import check_cache

NAMESPACES = ("", "tenant")
NUM_PAGES = 12

Prefix = tuple[str, tuple[int, ...]]


def array(tokens: tuple[int, ...]) -> np.ndarray:
    return np.array(tokens, np.int32)


class Traffic:
    """A cache under random use, and beside it all that it holds and all that it evicted, as plain tuples."""

    def __init__(self, page_size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.page_size = page_size
        self.allocator = PageAllocator(NUM_PAGES + 1)
        self.now = 0.0
        self.cache = RadixCache(page_size, self.allocator, clock=lambda: self.now)
        self.cached: set[Prefix] = set()  # every cached prefix of whole pages
        self.evicted: dict[Prefix, Eviction] = {}

    def prompt(self) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(3), k=self.rng.randrange(1, 5 * self.page_size + 1)))

    def whole_pages(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tokens[: len(tokens) // self.page_size * self.page_size]

    def edges(self) -> dict[Prefix, tuple[Node, int]]:
        """Each node and its size, by the tokens up to the first page of its edge."""
        found = {}
        for node in self.cache._nodes():
            tokens = node.tokens[: self.page_size * INT_BYTES]
            above = node.parent
            while not isinstance(above, Root):
                assert above is not None
                tokens = above.tokens + tokens
                above = above.parent
            prefix = tuple(np.frombuffer(tokens, np.int32).tolist())
            found[above.namespace, prefix] = node, node.num_tokens
        return found

    def evict(self, num_pages: int) -> None:
        before = self.edges()
        cause, evictor = self.rng.choice([*EvictionCause]), self.rng.choice([None, *NAMESPACES])
        self.cache.evict(num_pages, cause, evictor)
        left = {node for node, _ in self.edges().values()}
        for prefix, (node, size) in before.items():
            if node not in left:
                self.evicted[prefix] = Eviction(self.now, size, cause, evictor)
                namespace, tokens = prefix
                self.cached = {p for p in self.cached if p[0] != namespace or p[1][: len(tokens)] != tokens}

    def insert(self, tokens: tuple[int, ...], namespace: str) -> None:
        tokens = self.whole_pages(tokens)
        num_pages = len(tokens) // self.page_size
        if num_pages > self.allocator.num_free:
            self.evict(num_pages - self.allocator.num_free)
        pages = self.allocator.allocate(num_pages)
        assert pages is not None
        result = self.cache.insert(array(tokens), pages, namespace)
        self.allocator.free(pages[: result.num_existing])
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            self.cached.add((namespace, tokens[:end]))

    def act(self) -> None:
        self.now += 1
        namespace = self.rng.choice(NAMESPACES)
        match self.rng.randrange(4):
            case 0 | 1:
                self.insert(self.prompt(), namespace)
            case 2:
                self.evict(self.rng.randrange(1, 4))
            case _:
                self.cache.match(array(self.prompt()), namespace)

    def explain(self, tokens: tuple[int, ...], namespace: str) -> CacheReport:
        """As a scheduler does at admission."""
        match = self.cache.match(array(tokens), namespace)
        report = self.cache.explain(match.node, array(tokens), namespace)
        assert report.matched_tokens == match.num_tokens
        return report

    def expected(self, tokens: tuple[int, ...], namespace: str) -> CacheReport:
        tokens = self.whole_pages(tokens)
        shared = {
            prefix: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prefix, tokens)))  # noqa: B905
            for name, prefix in self.cached
            if name == namespace
        }
        first = max(shared.values(), default=0)
        matched = first // self.page_size * self.page_size
        if matched == len(tokens):
            return CacheReport(matched_tokens=matched, matchable_tokens=matched)
        others = {prefix[first] for prefix, length in shared.items() if length == first < len(prefix)}
        eviction = self.evicted.get((namespace, tokens[: matched + self.page_size]))
        return CacheReport(
            matched_tokens=matched,
            matchable_tokens=len(tokens),
            first_difference=first,
            cached_continuations=tuple(sorted(others)),
            evicted_at=eviction.at_s if eviction else None,
            evicted_tokens=eviction.num_tokens if eviction else 0,
            evicted_for=eviction.cause if eviction else None,
            evicted_for_own=eviction.namespace == namespace if eviction and eviction.namespace is not None else None,
            why=MissReason.EVICTED if eviction else MissReason.NEW,
        )

    def check(self) -> CacheReport:
        tokens, namespace = self.prompt(), self.rng.choice(NAMESPACES)
        expected = self.expected(tokens, namespace)
        report = self.explain(tokens, namespace)
        continuations = tuple(sorted(report.cached_continuations))
        assert len(continuations) == len(set(continuations))
        assert dataclasses.replace(report, cached_continuations=continuations) == expected
        return report


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_explanation_is_that_of_brute_force(page_size: int):
    reports: list[CacheReport] = []

    @settings(max_examples=60)
    @given(seed=st.integers(0, 2**32))
    def play(seed: int) -> None:
        traffic = Traffic(page_size, seed)
        for _ in range(40):
            traffic.act()
            reports.append(traffic.check())
            check_cache(traffic.cache)

    play()
    assert sum(report.evicted_at is not None for report in reports) > 50
    assert sum(report.first_difference is None for report in reports) > 50
    assert sum(len(report.cached_continuations) > 1 for report in reports) > 50
    if page_size > 1:
        assert sum((report.first_difference or 0) % page_size > 0 for report in reports) > 50


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_more_than_eight_continuations_are_told(page_size: int):
    traffic = Traffic(page_size, 0)
    traffic.allocator = PageAllocator(1000)
    traffic.cache = RadixCache(page_size, traffic.allocator)
    for token in range(20):
        traffic.insert((7,) * page_size + (7,) * (page_size - 1) + (100 + token,), "")
    report = traffic.explain((7,) * (2 * page_size - 1) + (99,), "")
    assert report.first_difference == 2 * page_size - 1 and len(report.cached_continuations) == 8
    assert set(report.cached_continuations) <= set(range(100, 120))


def test_a_cache_that_is_off_explains_that_nothing_may_match():
    cache = RadixCache(1, PageAllocator(10), enabled=False)
    match = cache.match(array((1, 2, 3)))
    assert cache.explain(match.node, array((1, 2, 3))) == CacheReport(
        matched_tokens=0, matchable_tokens=0, why=MissReason.OFF
    )


def test_an_eviction_is_remembered_although_what_is_above_it_was_evicted_and_came_back():
    """The case it is for: the conversation was evicted, then its system prompt; somebody else brought that back."""
    traffic = Traffic(1, 0)
    system, mine, theirs = (0, 0, 0), (1, 1), (2, 2)
    traffic.insert(system + theirs, "")
    traffic.insert(system + mine, "")
    traffic.now = 5.0
    traffic.cache.reset()
    traffic.now = 6.0
    traffic.insert(system + theirs, "")
    report = traffic.explain(system + mine, "")
    assert (report.matched_tokens, report.first_difference) == (3, 3)
    assert (report.evicted_at, report.evicted_tokens, report.evicted_for) == (5.0, 2, EvictionCause.FLUSH)
    assert report.cached_continuations == (2,)
    assert traffic.explain(system + mine, "tenant").evicted_at is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_another_namespace_has_is_found(page_size: int):
    traffic = Traffic(page_size, 0)
    whole, part = (1, 2) * page_size, (1,) * page_size
    traffic.insert(whole, "theirs")
    assert traffic.cache.has_elsewhere(array(whole), "mine") and traffic.cache.has_elsewhere(
        array(whole[:page_size]), ""
    )
    assert not traffic.cache.has_elsewhere(array(whole), "theirs"), "that is no other namespace"
    assert traffic.cache.has_elsewhere(array(part), "mine") == (page_size == 1)
    assert not traffic.cache.has_elsewhere(array((*whole, *part)), "mine")


def test_what_a_failure_has_taken_is_remembered():
    traffic = Traffic(1, 0)
    traffic.insert((1, 2), "")
    lock = traffic.cache.lock(traffic.cache.match(array((1, 2))))
    traffic.cache.unlock(lock)
    traffic.cache.forget(lock)
    report = traffic.explain((1, 2), "")
    assert (report.why, report.evicted_for, report.evicted_for_own) == (MissReason.EVICTED, EvictionCause.FAILURE, None)


def test_what_follows_joined_branches_is_of_their_namespace():
    evictions = [Eviction(1.0, 1, EvictionCause.PROMPT, namespace) for namespace in ("a", "a/branches", "ab", None)]
    assert [eviction.is_for("a/branches") for eviction in evictions] == [True, True, False, None]


# The log.


def chain(namespace: str, *edges: tuple[int, ...]) -> list[Node]:
    """A root and a path of nodes below it."""
    nodes: list[Node] = [Root(namespace)]
    for serial, edge in enumerate(edges, 1):
        nodes.append(Node(nodes[-1], array(edge).tobytes(), b"", serial=serial, last_used=0))
    return nodes


def test_the_log_is_bounded_and_forgets_the_oldest():
    log = EvictionLog(INT_BYTES, clock=lambda: 1.0, capacity=3)
    root = Root("")
    for token in (1, 2, 3, 1, 4):
        log.record([Node(root, array((token, 9)).tobytes(), b"", serial=token, last_used=0)])
    assert len(log) == 3
    found = [token for token in range(1, 5) if log.find("", array((token,)).tobytes())]
    assert found == [1, 3, 4], "what was evicted again is young again"


def test_of_very_many_leaves_at_once_only_those_are_hashed_that_the_log_can_hold(monkeypatch: pytest.MonkeyPatch):
    log = EvictionLog(INT_BYTES, clock=lambda: 1.0, capacity=3)
    begun: list[str] = []
    begin = eviction_log._begin
    monkeypatch.setattr(eviction_log, "_begin", lambda namespace: begun.append(namespace) or begin(namespace))
    roots = [Root(str(number)) for number in range(10)]
    log.record([Node(root, array((1, 9)).tobytes(), b"", serial=1, last_used=0) for root in roots])
    assert begun == ["7", "8", "9"] and len(log) == 3


def test_namespaces_and_tokens_never_run_into_each_other():
    log = EvictionLog(INT_BYTES, clock=lambda: 1.0)
    log.record([chain("ab", (1, 2))[1]])
    assert log.find("ab", array((1,)).tobytes()) == Eviction(1.0, 2)
    assert log.find("a", b"b" + array((1,)).tobytes()) is None and log.find("", array((1,)).tobytes()) is None
    log.record([chain("\ud800", (1,))[1]])
    assert log.find("\ud800", array((1,)).tobytes()) == Eviction(1.0, 1)


def test_a_deep_path_is_hashed_once_and_the_memory_for_it_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eviction_log, "MAX_STATES", 10)
    log = EvictionLog(INT_BYTES, clock=lambda: 1.0)
    nodes = chain("", *((token,) for token in range(100)))
    for depth in range(100, 0, -1):
        log.record([nodes[depth]])
        assert len(log._states) <= 10
    for depth in range(1, 101):
        assert log.find("", array(tuple(range(depth))).tobytes())
    hashed = []
    monkeypatch.setattr(eviction_log, "_begin", lambda namespace: hashed.append(namespace))
    log.record([nodes[3]])  # the path to its parent is known
    assert not hashed
