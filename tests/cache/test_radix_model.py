"""Random traffic on the cache, against a model that is a dict from every cached prefix to its page."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jsg.cache.allocator import PageAllocator
from jsg.cache.block_events import BlockRecorder, BlocksCleared, BlocksRemoved, BlocksStored
from jsg.cache.kinds import PrefixMatch
from jsg.cache.radix import PrefixLock, RadixCache
from jsg.cache.watch import Watch
from tests.cache.integrity import changed_watches, check_allocator, check_cache

NUM_PAGES = 24
NAMESPACES = ("", "tenant")

Prefix = tuple[str, bytes]


@dataclasses.dataclass
class Cached:
    """One page of the model."""

    page: int
    last_used: int


def prefixes(tokens: np.ndarray, namespace: str, page_size: int) -> list[Prefix]:
    """The prompt's prefixes of one page, two pages, and so on."""
    return [(namespace, tokens[:end].tobytes()) for end in range(page_size, len(tokens) + 1, page_size)]


class CacheMachine(RuleBasedStateMachine):
    """Does what a scheduler may do, in any order."""

    @initialize(page_size=st.sampled_from([1, 2, 16]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(NUM_PAGES + 1)
        self.cache = RadixCache(page_size, self.allocator)
        self.recorder = BlockRecorder(2 * page_size)
        self.cache.observe(self.recorder)
        self.blocks: dict[int, Prefix] = {}
        self.model: dict[Prefix, Cached] = {}
        self.time = 0
        self.matches: list[tuple[PrefixMatch, list[Prefix]]] = []
        self.locks: list[tuple[PrefixLock, list[Prefix]]] = []
        self.watches: list[tuple[Watch, np.ndarray, str]] = []
        self.reported: dict[Watch, int] = {}

    def prompt(self, pages: list[int], tail: int) -> np.ndarray:
        """A prompt whose pages are told apart by their last token only, and a part of a page behind them."""
        page_rows = np.zeros((len(pages), self.page_size), np.int32)
        page_rows[:, -1] = pages
        return np.concatenate([page_rows.ravel(), np.zeros(tail % self.page_size, np.int32)])

    def cached(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        """The prefixes of the prompt that the model has; a prefix-closed model has no gaps."""
        wanted = prefixes(tokens, namespace, self.page_size)
        return [prefix for prefix in wanted if prefix in self.model]

    def use(self, path: list[Prefix]) -> None:
        self.time += 1
        for prefix in path:
            self.model[prefix].last_used = self.time

    def locked(self) -> set[Prefix]:
        return {prefix for _, path in self.locks for prefix in path}

    prompts = st.lists(st.integers(0, 2), max_size=8)
    tails = st.integers(0, 15)
    namespaces = st.sampled_from(NAMESPACES)
    picks = st.integers(0, 100)

    @rule(pages=prompts, tail=tails, namespace=namespaces)
    def match(self, pages: list[int], tail: int, namespace: str) -> None:
        tokens = self.prompt(pages, tail)
        path = self.cached(tokens, namespace)
        match = self.cache.match(tokens, namespace)
        assert match.num_tokens == len(path) * self.page_size
        assert match.pages.tolist() == [self.model[prefix].page for prefix in path]
        self.use(path)
        self.matches.append((match, path))

    @rule(pages=prompts, namespace=namespaces)
    def insert(self, pages: list[int], namespace: str) -> None:
        tokens = self.prompt(pages, 0)
        if len(pages) > self.allocator.num_free:
            self.evict(len(pages) - self.allocator.num_free)
        own = self.allocator.allocate(len(pages))
        if own is None:
            return
        path = prefixes(tokens, namespace, self.page_size)
        num_existing = len(self.cached(tokens, namespace))
        result = self.cache.insert(tokens, own, namespace)
        assert result.num_existing == num_existing
        for prefix, page in zip(path[num_existing:], own[num_existing:].tolist(), strict=True):
            self.model[prefix] = Cached(page, 0)
        assert result.pages.tolist() == [self.model[prefix].page for prefix in path]
        self.allocator.free(own[:num_existing])
        self.use(path)
        self.matches.append((PrefixMatch(result.pages, result.node, len(tokens)), path))

    @precondition(lambda self: self.matches)
    @rule(pick=picks, yields=st.booleans())
    def lock(self, pick: int, yields: bool) -> None:
        """Locks any match since which its pages were not evicted, however old."""
        match, path = self.matches[pick % len(self.matches)]
        self.locks.append((self.cache.lock(match, yields=yields), path))

    @precondition(lambda self: self.locks)
    @rule(pick=picks)
    def unlock(self, pick: int) -> None:
        lock, _ = self.locks.pop(pick % len(self.locks))
        self.cache.unlock(lock)

    @rule(num_pages=st.integers(0, 10))
    def evict(self, num_pages: int) -> None:
        locked = self.locked()
        evictable = {prefix: cached for prefix, cached in self.model.items() if prefix not in locked}
        num_freed = self.cache.evict(num_pages)
        gone = self.forget_freed_pages()
        assert num_freed == len(gone) and num_freed >= min(num_pages, len(evictable))
        assert gone.keys() <= evictable.keys()
        kept = [cached.last_used for prefix, cached in evictable.items() if prefix not in gone]
        assert max((cached.last_used for cached in gone.values()), default=0) <= min(kept, default=self.time)

    @rule()
    def reset(self) -> None:
        before = self.allocator.num_free
        if self.cache.num_protected:
            assert not self.cache.reset() and self.allocator.num_free == before
        else:
            assert self.cache.reset()
            self.forget_freed_pages()
            assert not self.model

    def forget_freed_pages(self) -> dict[Prefix, Cached]:
        """Takes out of the model what the cache has given back, and returns it."""
        gone = {prefix: cached for prefix, cached in self.model.items() if self.allocator.is_free(cached.page)}
        self.model = {prefix: cached for prefix, cached in self.model.items() if prefix not in gone}
        self.matches = [(match, path) for match, path in self.matches if not gone.keys() & set(path)]
        return gone

    @rule(pages=prompts, tail=tails, namespace=namespaces, limit=st.none() | st.integers(0, 140))
    def watch(self, pages: list[int], tail: int, namespace: str, limit: int | None) -> None:
        tokens = self.prompt(pages, tail)
        watch = self.cache.watch(tokens, namespace, limit)
        self.watches.append((watch, tokens[:limit], namespace))
        self.reported[watch] = watch.matched

    @precondition(lambda self: self.watches)
    @rule(pick=picks)
    def unwatch(self, pick: int) -> None:
        watch, _, _ = self.watches.pop(pick % len(self.watches))
        self.cache.unwatch(watch)
        del self.reported[watch]

    @rule()
    def drain(self) -> None:
        changed = changed_watches(self.cache)
        assert changed == sorted(changed, key=lambda watch: watch.serial)
        assert set(changed) <= set(self.reported)
        for watch in changed:
            self.reported[watch] = watch.matched
        assert all(watch.matched == matched for watch, matched in self.reported.items())

    @rule()
    def events_give_the_blocks(self) -> None:
        for event in self.recorder.take():
            match event:
                case BlocksStored(hashes, parent, tokens, namespace):
                    before = b"" if parent is None else self.blocks[parent][1]
                    length = len(tokens) // len(hashes)
                    for number, name in enumerate(hashes, 1):
                        assert name not in self.blocks
                        self.blocks[name] = namespace, before + tokens[: number * length]
                case BlocksRemoved(hashes):
                    for name in hashes:
                        del self.blocks[name]
                case BlocksCleared():
                    self.blocks.clear()
        num_bytes = self.recorder.block_tokens * 4
        assert set(self.blocks.values()) == {prefix for prefix in self.model if len(prefix[1]) % num_bytes == 0}

    @invariant()
    def everything_agrees(self) -> None:
        check_allocator(self.allocator)
        check_cache(self.cache)
        assert self.cache.num_evictable + self.cache.num_protected == len(self.model)
        assert self.cache.num_protected == len(self.locked())
        firm = {prefix for lock, path in self.locks if not lock.yields for prefix in path}
        assert self.cache.num_yielding == len(self.locked() - firm)
        assert self.allocator.num_free + len(self.model) == NUM_PAGES
        for watch, tokens, namespace in self.watches:
            assert watch.matched == self.cache.matched_len(tokens, namespace)
            assert watch.matched == len(self.cached(tokens, namespace)) * self.page_size

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for lock, _ in self.locks:
            self.cache.unlock(lock)
        for watch, _, _ in self.watches:
            self.cache.unwatch(watch)
        assert self.cache.reset() and self.allocator.num_free == NUM_PAGES
        assert self.cache.stats().num_namespaces == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.slow
class TestCacheMachineAtLength(CacheMachine.TestCase):
    settings = settings(TestCacheMachine.settings, max_examples=600)


def run_traffic(seed: int, page_size: int, num_steps: int) -> list[object]:
    """What a caller sees of one run of random traffic."""
    rng = random.Random(seed)
    allocator = PageAllocator(201)
    cache = RadixCache(page_size, allocator)
    watches: list[Watch] = []
    seen: list[object] = []
    for _ in range(num_steps):
        tokens = np.repeat(np.array(rng.choices(range(3), k=rng.randrange(1, 12)), np.int32), page_size)
        namespace = rng.choice(NAMESPACES)
        match rng.randrange(5):
            case 0 | 1:
                num_pages = len(tokens) // page_size
                if allocator.num_free < num_pages:
                    seen.append(cache.evict(num_pages))
                pages = allocator.allocate(num_pages)
                result = cache.insert(tokens, pages, namespace)
                allocator.free(pages[: result.num_existing])
                seen.append((result.pages.tolist(), result.num_existing))
            case 2:
                seen.append(cache.match(tokens, namespace).pages.tolist())
            case 3:
                watches.append(cache.watch(tokens, namespace))
            case _:
                seen.append([(watches.index(watch), watch.matched) for watch in changed_watches(cache)])
    check_cache(cache)
    return seen


@pytest.mark.parametrize("page_size", [1, 16])
def test_equal_calls_give_equal_pages(page_size: int):
    first = run_traffic(1, page_size, 500)
    assert first == run_traffic(1, page_size, 500) and first != run_traffic(2, page_size, 500)
