"""What is told of a tree, against the tree: a copy, and a reader that knows only the changes."""

import random
from typing import Any

import numpy as np

from jsg.cache import tree_log
from jsg.cache.allocator import PageAllocator
from jsg.cache.node import Node, Root
from jsg.cache.radix import PrefixLock, RadixCache
from jsg.cache.tree_log import STOP, TreeLog
from jsg.cache.windows import WindowGroup, make_allocator
from jsg.engine.front.tree_copy import Change, TreeCopy
from jsg.window import Window

NUM_PAGES = 400
NAMESPACES = ("", "tenant")


class Reader:
    """[parent, tokens, holders, hits, use] of each node, as a page that shows the tree would keep them."""

    def __init__(self, copy: TreeCopy) -> None:
        self.nodes: dict[Any, list[Any]] = {
            node.id: [node.parent, node.length, node.holders, node.hits, node.is_usable] for node in copy.nodes.values()
        }

    def apply(self, change: Change) -> None:
        told: tuple[Any, ...] = change
        match told:
            case ("split", upper, lower, length):
                old = self.nodes[lower]
                self.nodes[upper] = [old[0], length, *old[2:]]
                old[0], old[1] = upper, old[1] - length
            case ("insert", new, parent, length):
                assert parent == 0 or parent in self.nodes
                self.nodes[new] = [parent, length, 0, 0, True]
            case ("evict", gone):
                del self.nodes[gone]
                assert gone not in {node[0] for node in self.nodes.values()}, "leaves go first"
            case ("hit", number, hits):
                assert hits > self.nodes[number][3]
                self.nodes[number][3] = hits
            case ("hold", number, holders):
                self.nodes[number][2] = holders
            case ("use", number, is_usable):
                assert is_usable != self.nodes[number][4]
                self.nodes[number][4] = bool(is_usable)
            case _:
                raise AssertionError(change)


class Traffic:
    """A tree, and somebody who uses it in any way. With `num_parts`, so many pages have parts in a window."""

    def __init__(self, seed: int, page_size: int = 1, num_pages: int = NUM_PAGES, num_parts: int = 0) -> None:
        self.random = random.Random(seed)
        sizes = {None: num_pages + 1} | ({Window(4): num_parts + 1} if num_parts else {})
        self.allocator = make_allocator(sizes, page_size, has_layers=True)
        self.windows = [kind for kind in self.allocator.kinds if isinstance(kind, WindowGroup)]
        self.cache = RadixCache(page_size, self.allocator)
        self.locks: list[PrefixLock] = []
        self.hits: dict[int, int] = {}

    def prompt(self) -> np.ndarray:
        num_tokens = self.random.randrange(1, 20)
        return np.array([self.random.randrange(2) for _ in range(num_tokens)], np.int32)

    def insert(self) -> None:
        tokens = self.prompt()
        tokens = tokens[: len(tokens) // self.cache.page_size * self.cache.page_size]
        pages = self.allocator.allocate(len(tokens) // self.cache.page_size)
        if pages is None:
            self.cache.evict(30)
            return
        for group in self.windows:
            group.leave(pages)
        result = self.cache.insert(tokens, pages, self.random.choice(NAMESPACES))
        self.allocator.free(pages[: result.num_existing])

    def match(self) -> None:
        match = self.cache.match(self.prompt(), self.random.choice(NAMESPACES))
        if self.random.random() < 0.5:
            self.locks.append(self.cache.lock(match))

    def unlock(self) -> None:
        if self.locks:
            self.cache.unlock(self.locks.pop(self.random.randrange(len(self.locks))))

    def forget(self) -> None:
        if self.locks:
            lock = self.locks.pop()
            self.cache.unlock(lock)
            self.cache.forget(lock)

    def flush(self) -> None:
        while self.locks:
            self.unlock()
        assert self.cache.reset()

    def act(self) -> None:
        acts = [self.insert] * 6 + [self.match] * 6 + [self.unlock] * 4 + [self.forget]
        acts += [lambda: self.cache.evict(self.random.randrange(1, 8)) and None]
        (self.flush if self.random.random() < 0.004 else self.random.choice(acts))()


def tree_of(cache: RadixCache) -> dict[int, tuple[int, int, int, str | None, bool]]:
    """Parent, tokens, holders, at the top the namespace, and the use of each node."""

    def facts(node: Node) -> tuple[int, int, int, str | None, bool]:
        above = node.parent
        assert above is not None
        namespace = above.namespace if isinstance(above, Root) else None
        return above.serial, node.num_tokens, node.num_locks, namespace, cache.is_usable(node)

    return {node.serial: facts(node) for node in cache._nodes()}


def told(copy: TreeCopy) -> dict[int, tuple[int, int, int, str | None, bool]]:
    return {
        node.id: (node.parent, node.length, node.holders, node.namespace, node.is_usable)
        for node in copy.nodes.values()
    }


def take(log: TreeLog, copy: TreeCopy) -> list[Change] | None:
    return copy.take(log.look(copy.cursor, with_tokens=False) | {"pool": {}})


def test_a_copy_and_a_reader_of_changes_have_the_tree(monkeypatch):
    """With changes of any number between two looks, walks of a few nodes that the tree changes behind, and overruns."""
    monkeypatch.setattr(tree_log, "WALK_NODES", 7)
    monkeypatch.setattr(tree_log, "MAX_CHANGES", 60)
    kinds: set[Any] = set()
    for seed in range(12):
        traffic = Traffic(seed, page_size=seed % 2 + 1, num_parts=60 if seed % 3 == 0 else 0)
        for _ in range(60):
            traffic.act()
        log, copy, reader = TreeLog(traffic.cache), TreeCopy(), None
        for _ in range(120):
            for _ in range(traffic.random.choice((0, 1, 3, 10, 80))):
                traffic.act()
            changes = take(log, copy)
            if not copy.is_whole:
                kinds.add("part")
                continue
            assert told(copy) == tree_of(traffic.cache)
            if changes is None or reader is None:
                kinds.add("anew")
                reader = Reader(copy)
            for change in changes or ():
                kinds.add(change[0])
                reader.apply(change)
            assert reader.nodes == Reader(copy).nodes
    assert kinds == {"part", "anew", "split", "insert", "evict", "hit", "hold", "use"}


def test_hits_are_counted_for_the_whole_path_from_the_first_look_on():
    traffic = Traffic(0)
    cache = traffic.cache

    def put(*tokens: int) -> None:
        pages = traffic.allocator.allocate(len(tokens))
        assert pages is not None
        cache.insert(np.array(tokens, np.int32), pages)

    put(1, 2, 3)
    cache.match(np.array([1, 2, 3], np.int32))
    log, copy = TreeLog(cache), TreeCopy()
    take(log, copy)
    cache.match(np.array([1, 2, 3], np.int32))
    cache.match(np.array([1, 2], np.int32))  # it splits the edge, whose lower half has one hit
    take(log, copy)
    assert sorted((node.length, node.hits) for node in copy.nodes.values()) == [(1, 1), (2, 2)]


def test_nobody_is_told_after_the_end_or_who_does_not_look(monkeypatch):
    monkeypatch.setattr(tree_log, "MAX_CHANGES", 50)
    traffic = Traffic(3)
    log, copy = TreeLog(traffic.cache), TreeCopy()
    assert not traffic.cache._observers._each
    take(log, copy)
    assert traffic.cache._observers._each == (log,)
    log.look(STOP, with_tokens=False)
    assert not traffic.cache._observers._each
    take(log, copy)
    while traffic.cache._observers._each:  # until too much has changed
        traffic.act()
    assert take(log, copy) is None
    assert told(copy) == tree_of(traffic.cache)


def test_the_first_tokens_come_on_demand():
    traffic = Traffic(4)
    for _ in range(50):
        traffic.act()
    log, copy = TreeLog(traffic.cache), TreeCopy()
    take(log, copy)
    assert not any(node.tokens for node in copy.nodes.values())
    copy.take(log.look(copy.cursor, with_tokens=True) | {"pool": {}})
    for node in traffic.cache._nodes():
        assert copy.nodes[node.serial].tokens == node.tokens[: 4 * tree_log.SHOWN_TOKENS]


def test_an_age_is_known_to_a_second():
    now = [1000.0]
    allocator = PageAllocator(200)
    cache = RadixCache(1, allocator, clock=lambda: now[0])
    used: dict[int, float] = {}
    for i in range(100):
        pages = allocator.allocate(1)
        assert pages is not None
        used[cache.insert(np.array([i], np.int32), pages).node.serial] = now[0]
        now[0] += 0.3 if i % 10 else 60.0
    for node in cache._nodes():
        assert used[node.serial] - 1 <= cache.used_at(node) <= used[node.serial]
