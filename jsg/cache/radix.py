"""The radix tree of cached prefixes: which pages have the keys and values of a prompt's first tokens.

    namespace "" ─ root ──[system prompt]──▶ ● ──[question A]──▶ ●
                                             └───[question B]──▶ ●

Tokens and pages are int32 arrays. The tree knows only whole pages of `page_size` tokens: an edge has whole pages, only
whole pages match, and the tokens of a prompt after its last whole page are ignored.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.cache.eviction import EvictionQueue
from jsg.cache.eviction_log import EvictionLog
from jsg.cache.kinds import PrefixMatch, StateKind
from jsg.cache.node import INT_BYTES, Node, Root, common_len, path_up
from jsg.cache.observer import Observers, TreeObserver
from jsg.cache.use_clock import UseClock
from jsg.cache.watch import Place, Watch, WatchGroup
from jsg.cache.watch_index import WatchIndex
from jsg.cache_report import CacheReport, EvictionCause, MissReason

NODES_PER_GROUP = 8
"""In the time that it takes to move a group of watches, so many nodes are visited."""
PAGES_PER_NODE = 32
"""In the time that it takes to visit a node, so many pages of a match are copied into the row of a request."""
MOST_AWAITED = 64
"""Of so many cached prefixes that waiting prompts match, what layers with a window need is kept longer."""
MAX_CONTINUATIONS = 8
"""The most tokens that the explanation of a miss shows."""
MOST_NAMESPACES = 64
"""The other namespaces, at most, in which the explanation of a miss looks."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class InsertResult:
    """Who owns which pages after an insert.

    Attributes:
        pages: int32, the tree's page numbers along the whole path; those of the caller if the cache is off.
        num_existing: How many leading pages the tree had before. The caller's pages at these places are duplicates if
            they differ from `pages`; the caller owns them and should free them. The tree owns the pages after them.
        node: The node at which the path ends. `RadixCache.lock` takes it.
    """

    pages: np.ndarray
    num_existing: int
    node: Node


@dataclasses.dataclass(slots=True, eq=False)
class PrefixLock:
    """Protects the path to a node from eviction until `RadixCache.unlock`.

    Attributes:
        node: The node.
        yields: Whether whoever has the lock gives it up when others need the pages.
        is_held: Whether it was not unlocked yet.
        last_used: The count of matches and inserts when it was last extended.
    """

    node: Node
    yields: bool = False
    is_held: bool = True
    last_used: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Sizes now, and totals since the cache was made."""

    num_nodes: int
    num_cached_tokens: int
    num_namespaces: int
    inserted_tokens: int
    evicted_tokens: int


class RadixCache:
    """A compressed prefix tree for each namespace, over pages that it owns.

    Its time is a count of matches and inserts, so equal calls give equal trees. Only the log of evictions and the marks
    of `UseClock` read a clock, and no decision depends on either.

    Invariants:
        - Each page of the tree is in one node, and the allocator knows it as used.
        - A node is locked while one below it is. Its last use is never earlier than theirs, unless it is locked: what a
          lock has lengthened counts as used below its former end, and above when it is unlocked.
        - `num_protected` pages are in locked nodes and `num_evictable` in the others. So, with the pages that callers
          own, free + evictable + protected + uncached == the allocator's total.
        - `num_yielding` of the protected pages are in nodes with yielding locks only.
        - A root is kept while it has children or watches.
    """

    def __init__(
        self,
        page_size: int,
        allocator: PageAllocator,
        *,
        enabled: bool = True,
        clock: Callable[[], float] = time.time,
    ):
        """Makes an empty cache.

        Args:
            page_size: Tokens in a page.
            allocator: It gets the pages that are evicted, and knows what is kept of prefixes beside them.
            enabled: If it is False, the cache stays empty and nothing matches.
            clock: It returns seconds since the epoch, for the log of evictions and the age of nodes.
        """
        assert page_size >= 1, f"a page must have at least 1 token, but got page_size={page_size}"
        self.page_size = page_size
        self.kinds = allocator.kinds
        self.enabled = enabled
        self.num_evictable = 0
        self.num_protected = 0
        self.num_yielding = 0
        self.num_nodes = 0
        self._allocator = allocator
        self._observers = Observers(self.kinds, allocator.num_total + 1)
        self._roots: dict[str, Root] = {}
        self._leaves = EvictionQueue()
        self._evictions = EvictionLog(page_size * INT_BYTES, clock)
        self._watches = WatchIndex(page_size)
        self._uses = UseClock(clock)
        self._serials = itertools.count(1)

    @property
    def _page_bytes(self) -> int:
        return self.page_size * INT_BYTES

    # Prefixes.

    def match(self, tokens: np.ndarray, namespace: str = "") -> PrefixMatch:
        """Finds the longest cached prefix of `tokens`. Marks it as used now, and splits the edge in which it ends."""
        return self._matched(self._reach(self._root(namespace), self._key(tokens)))

    def _matched(self, path: Sequence[Node]) -> PrefixMatch:
        """The match that ends where this path does."""
        self._use(path)
        self._observers.hit(path[-1])
        pages = _join_pages(path)
        self._uses.num_pages += len(pages)
        return PrefixMatch(pages=pages, node=path[-1], num_tokens=len(pages) * self.page_size)

    def match_watched(self, watch: Watch) -> PrefixMatch:
        """Does for the tokens of a watch what `match` does, without the way from the root."""
        assert watch.group is not None, "an ended watch follows nothing"
        place = watch.group.place
        node, depth = place.edge.node, place.matched - place.edge.start
        if depth < node.num_tokens:
            node = self._split(node, depth // self.page_size)
        return self._matched(_path_to_root(node)[::-1])

    def matched_len(self, tokens: np.ndarray, namespace: str = "") -> int:
        """How many tokens the longest cached prefix has. Changes nothing."""
        key = self._key(tokens)
        path, end = self._descend(self._root(namespace), key)
        _, overlap = self._overlap(path[-1], key, end)
        return end // INT_BYTES + overlap * self.page_size

    def usable_len(self, match: PrefixMatch, num_tokens: int | None = None) -> int:
        """How many of the first `num_tokens` that match, or of all, a request can use: every kind of state is there."""
        return self._usable_len(self.kinds, match, match.num_tokens if num_tokens is None else num_tokens)

    @staticmethod
    def _usable_len(kinds: Sequence[StateKind], match: PrefixMatch, usable: int) -> int:
        while kinds and (fewer := min(kind.num_usable(match, usable) for kind in kinds)) < usable:
            usable = fewer
        return usable

    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "") -> InsertResult:
        """Caches `tokens`, whose keys and values are in `pages`, and takes the pages that the tree does not have yet.

        Marks the path as used now, but locks nothing. A cache that is off takes nothing.
        """
        assert len(tokens) == len(pages) * self.page_size, (
            f"{len(pages)} pages of {self.page_size} tokens cannot hold {len(tokens)} tokens"
        )
        if not self.enabled:
            return InsertResult(pages=pages.copy(), num_existing=0, node=Root(namespace))
        key = self._key(tokens)
        path = self._reach(self._root(namespace), key)
        self._use(path)
        return self._complete(path, key, pages, 0)

    def _complete(self, path: Sequence[Node], key: bytes, pages: np.ndarray, start: int) -> InsertResult:
        """Adds the leaf that `path` lacks, which goes from `start` tokens below the root along `key`."""
        there, node = _join_pages(path[1:]), path[-1]
        new = np.asarray(pages[len(there) :], np.int32)
        if len(new):
            start += len(there) * self.page_size
            node = self._add_leaf(node, key[len(there) * self._page_bytes :], new.tobytes(), start)
        return InsertResult(pages=np.concatenate([there, new]), num_existing=len(there), node=node)

    def extend(self, lock: PrefixLock, tokens: np.ndarray, pages: np.ndarray, start: int) -> InsertResult:
        """Inserts a path that is longer than a locked one, from the end of its lock on, and moves the lock to its end.

        Args:
            lock: A lock of a path.
            tokens: int32, whole pages after that path.
            pages: int32, their pages.
            start: How many tokens the path has.

        Returns:
            As `insert`, but for the given tokens only.
        """
        node = lock.node
        if isinstance(node, Root):  # it may have been idle, and another one have come since
            node = self._root(node.namespace)
        key = self._key(tokens)
        path = self._reach(node, key)
        self._use(path)
        lock.last_used = self._uses.count
        result = self._complete(path, key, pages, start)
        below = itertools.takewhile(lambda other: other is not node, path_up(result.node))
        lock.node = result.node
        self._count_lock(lock, below, 1)
        return result

    def evict(self, num_pages: int, cause: EvictionCause = EvictionCause.PROMPT, namespace: str | None = None) -> int:
        """Frees whole leaves, the least recently used first, until `num_pages` are freed or nothing is left to evict.

        Of the last leaf it leaves what some watch matches, if the rest is enough. Cause and namespace, of the request
        for which it is, are noted for `explain`.

        Returns:
            The number of pages freed: at least `num_pages`, unless all that remains is locked.
        """
        freed: list[Node] = []
        num_freed = 0
        while num_freed < num_pages and (leaf := self._leaves.pop()) is not None:
            if kept := self._watches.num_kept(leaf, (num_pages - num_freed) * self.page_size):
                self._split(leaf, kept // self.page_size)
            self._remove_leaf(leaf)
            freed.append(leaf)
            num_freed += leaf.num_pages
        self._evictions.record(freed, cause, namespace)
        self._free(freed)
        return num_freed

    def forget(self, lock: PrefixLock) -> None:
        """Evicts the end of an unlocked path, whose keys and values may be wrong.

        Nodes stay that are locked or that another prefix goes on from, and so do all above them.
        """
        assert not lock.is_held, "a path is forgotten after it was unlocked"
        node, freed = lock.node, []
        while node.is_evictable_leaf and node.parent is not None:
            parent = node.parent
            self._remove_leaf(node)
            freed.append(node)
            node = parent
        self._evictions.record(freed, EvictionCause.FAILURE)
        self._free(freed)

    def _free(self, leaves: Sequence[Node]) -> None:
        """Frees and counts the pages of leaves that were taken out of the tree, and forgets where they were."""
        for leaf in leaves:
            leaf.parent = None
        pages = _join_pages(leaves)
        self.num_nodes -= len(leaves)
        self.num_evictable -= len(pages)
        self._allocator.free(pages)
        self._evictions.num_pages += len(pages)

    def reset(self) -> bool:
        """Evicts everything. Where anything is locked, returns False and changes nothing."""
        if self.num_protected:
            return False
        self._observers.cleared()
        self.evict(self.num_evictable, EvictionCause.FLUSH)
        return True

    # Locks.

    def lock(self, at: PrefixMatch | InsertResult | Node, *, yields: bool = False) -> PrefixLock:
        """Protects the path to `at` from eviction. It must not have been evicted since it was matched or inserted.

        Args:
            at: The end of the path.
            yields: Count the pages that no other lock protects in `num_yielding`.
        """
        lock = PrefixLock(at if isinstance(at, Node) else at.node, yields)
        assert lock.node.parent or isinstance(lock.node, Root), "a prefix must be locked before it is evicted"
        self._count_lock(lock, path_up(lock.node), 1)
        return lock

    def unlock(self, lock: PrefixLock) -> None:
        """Ends `lock`; once."""
        assert lock.is_held, "a lock must be unlocked only once"
        lock.is_held = False
        if lock.last_used:
            for node in _path_to_root(lock.node):
                if node.last_used < lock.last_used:
                    node.last_used = lock.last_used
        self._count_lock(lock, path_up(lock.node), -1)
        self._leaves.offer(lock.node)

    def _count_lock(self, lock: PrefixLock, path: Iterable[Node], change: int) -> None:
        """Counts a lock that begins or ends to protect nodes, and the pages of those that no other one protects."""
        decisive = 0 if change > 0 else 1  # with so many locks of its strength, a node changes its account
        for node in path:
            is_decisive = (node.num_locks if lock.yields else node.num_locks - node.num_yielding) == decisive
            if is_decisive:
                self._account(node, -node.num_pages)
            node.num_locks += change
            if lock.yields:
                node.num_yielding += change
            if is_decisive:
                self._account(node, node.num_pages)
        self._observers.changed(lock.node)

    def _account(self, node: Node, num_pages: int) -> None:
        """Adds pages to the counts to which the locks of a node assign them."""
        if not node.num_locks:
            self.num_evictable += num_pages
            return
        self.num_protected += num_pages
        if node.num_locks == node.num_yielding:
            self.num_yielding += num_pages

    # Watches.

    def watch(
        self, tokens: np.ndarray, namespace: str = "", limit: int | None = None, *, tier: int = 0, turn: int = 0
    ) -> Watch:
        """Keeps `Watch.matched` equal to `matched_len(tokens[:limit], namespace)` until `unwatch`.

        Args:
            tokens: The prompt. It is not copied, so it must not change.
            namespace: The namespace whose prefixes may match.
            limit: The most tokens that may match; None for no limit.
            tier: See `Watch`, as for `turn`.
            turn: See `Watch`.
        """
        tokens = tokens[:limit]
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        root, key = self._root(namespace), self._key(tokens)
        path, end = self._descend(root, key)
        child, overlap = self._overlap(path[-1], key, end)
        node, end = child or path[-1], end // INT_BYTES
        watch = Watch(tokens, namespace, next(self._serials), tier, turn)
        matched = end + overlap * self.page_size
        self._watches.add(watch, node, matched, end + (child.num_tokens if child else 0))
        self._roots[namespace] = root
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Ends `watch`; once."""
        self._watches.end(watch)
        if (root := self._roots.get(watch.namespace)) is not None:
            self._drop_root_if_idle(root)

    def drain_changed(self) -> list[WatchGroup]:
        """The groups of watches that changed since the last call: new ones, and those that match more or less.

        A group that has lost its watches to others, or all of them at once, is given too; its size is 0.
        """
        return self._watches.drain_changed()

    def awaited(self) -> Iterator[PrefixMatch]:
        """Cached prefixes that waiting prompts match, at most `MOST_AWAITED`."""
        return map(self._match_at, itertools.islice(self._watches.places(), MOST_AWAITED))

    def note_gain(self) -> None:
        """Notes that more of what is cached can be used than before, so that waiting prompts get new keys."""
        self._watches.change_all()

    def usable_at(self, node: Node) -> int:
        """How many tokens of the path to the end of `node` a prompt can use that goes on there."""
        pages = _join_pages(_path_to_root(node)[::-1])
        return self.usable_len(PrefixMatch(pages, node, len(pages) * self.page_size))

    def is_usable(self, node: Node) -> bool:
        """Whether it can use all of them. Looks at the last pages only."""
        most, num_pages, last = max([0, *(kind.num_needed for kind in self.kinds)]), 0, []
        for above in path_up(node):
            if num_pages < most:
                last.append(above)
            num_pages += above.num_pages
        pages = _join_pages(last[::-1])
        return all(kind.is_whole(pages, num_pages) for kind in self.kinds)

    def usable_of(self, group: WatchGroup) -> int:
        """How many tokens of the cached prefix of its watches count in the order of waiting requests."""
        ordering = [kind for kind in self.kinds if kind.orders]
        return self._usable_len(ordering, self._match_at(group.place), group.matched) if ordering else group.matched

    def _match_at(self, place: Place) -> PrefixMatch:
        """What watches match that end at a place, without a split."""
        pages = _join_pages(_path_to_root(place.edge.node)[::-1])[: place.matched // self.page_size]
        self._uses.num_pages += len(pages)
        return PrefixMatch(pages, place.edge.node, place.matched)

    def observe(self, observer: TreeObserver) -> None:
        """Tells `observer` of each change from now on."""
        self._observers.add(observer)

    def unobserve(self, observer: TreeObserver) -> None:
        """Tells `observer` no more."""
        self._observers.remove(observer)

    @property
    def roots(self) -> list[Node]:
        """The roots of the namespaces that have nodes or watches."""
        return [*self._roots.values()]

    def used_at(self, node: Node) -> float:
        """When a match or an insert last ended at the node or below, to a second."""
        return self._uses.when(node.last_used)

    @property
    def work(self) -> int:
        """How much work matches, inserts and evictions have been so far: in visited nodes, each a fraction of 1 µs."""
        nodes = self._uses.num_nodes + self._uses.num_pages // PAGES_PER_NODE
        return nodes + NODES_PER_GROUP * self._watches.num_moved

    # Accounts.

    def explain(self, node: Node, tokens: np.ndarray, namespace: str = "") -> CacheReport:
        """Why the longest cached prefix of `tokens` ends at `node`, as `match` has just found. Changes nothing.

        If pages have several tokens, a page that misses may begin like a cached page. The first difference is the token
        after the longest such beginning, although nothing of that page is used.
        """
        key = self._key(tokens) if self.enabled else b""
        end = sum(len(above.tokens) for above in path_up(node))
        matched, matchable = end // INT_BYTES, len(key) // INT_BYTES
        if matched == matchable:
            why = None if self.enabled else MissReason.OFF
            return CacheReport(matched_tokens=matched, matchable_tokens=matchable, why=why)
        shared, continuations = self._nearest(node, key[end : end + self._page_bytes])
        eviction = self._evictions.find(namespace, key[: end + self._page_bytes])
        return CacheReport(
            matched_tokens=matched,
            matchable_tokens=matchable,
            first_difference=matched + shared,
            cached_continuations=continuations,
            evicted_at=eviction.at_s if eviction else None,
            evicted_tokens=eviction.num_tokens if eviction else 0,
            evicted_for=eviction.cause if eviction else None,
            evicted_for_own=eviction.is_for(namespace) if eviction else None,
            why=MissReason.EVICTED if eviction else MissReason.NEW,
        )

    def has_elsewhere(self, tokens: np.ndarray, namespace: str) -> bool:
        """Whether one of the first `MOST_NAMESPACES` other namespaces begins with all the whole pages of `tokens`."""
        key = self._key(tokens)
        others = (root for root in self._roots.values() if root.namespace != namespace)
        return any(self._begins_with(root, key) for root in itertools.islice(others, MOST_NAMESPACES))

    def _begins_with(self, root: Root, key: bytes) -> bool:
        path, end = self._descend(root, key)
        return end + self._overlap(path[-1], key, end)[1] * self._page_bytes >= len(key)

    def _nearest(self, node: Node, page: bytes) -> tuple[int, tuple[int, ...]]:
        """How many leading tokens `page` has in common with a child of `node`, and what these children have next."""
        # If a page has one token, all children differ in it, and any of them will do.
        first_pages = list(itertools.islice(node.children, MAX_CONTINUATIONS if self.page_size == 1 else None))
        if not first_pages:
            return 0, ()
        cached = np.frombuffer(b"".join(first_pages), np.int32).reshape(len(first_pages), self.page_size)
        shared = np.argmin(cached == np.frombuffer(page, np.int32), axis=1)
        longest = int(shared.max())
        following = dict.fromkeys(cached[shared == longest, longest].tolist())
        return longest, tuple(itertools.islice(following, MAX_CONTINUATIONS))

    def stats(self) -> CacheStats:
        """Sizes and totals, in tokens."""
        num_cached = self.num_evictable + self.num_protected
        return CacheStats(
            num_nodes=self.num_nodes,
            num_cached_tokens=num_cached * self.page_size,
            num_namespaces=len(self._roots),
            inserted_tokens=(num_cached + self._evictions.num_pages) * self.page_size,
            evicted_tokens=self._evictions.num_pages * self.page_size,
        )

    # Finding the way.

    def _key(self, tokens: np.ndarray) -> bytes:
        """The whole pages of `tokens` as bytes."""
        assert tokens.dtype == np.int32 and tokens.ndim == 1, (
            f"tokens must be one row of int32, but got {tokens.dtype} of shape {tokens.shape}"
        )
        return tokens[: len(tokens) // self.page_size * self.page_size].tobytes()

    def _root(self, namespace: str) -> Root:
        """The root of a namespace: a new one, which is not kept yet, if there is none."""
        return self._roots.get(namespace) or Root(namespace)

    def _descend(self, start: Node, key: bytes) -> tuple[list[Node], int]:
        """Follows whole edges from `start` along `key`. Returns the nodes and the bytes of `key` that were used."""
        path, page_bytes = [start], self._page_bytes
        end = 0
        while (child := path[-1].children.get(key[end : end + page_bytes])) and key.startswith(child.tokens, end):
            path.append(child)
            end += len(child.tokens)
        return path, end

    def _overlap(self, node: Node, key: bytes, end: int) -> tuple[Node | None, int]:
        """The child of `node` whose edge begins like `key` does from byte `end` on, and how many pages are common."""
        child = node.children.get(key[end : end + self._page_bytes])
        if child is None:
            return None, 0
        return child, common_len(child.tokens, key, end) // self.page_size

    def _reach(self, start: Node, key: bytes) -> list[Node]:
        """The nodes from `start` along `key`, as far as it is cached. Splits the edge in which the cached part ends."""
        path, end = self._descend(start, key)
        child, overlap = self._overlap(path[-1], key, end)
        if child is not None:
            path.append(self._split(child, overlap))
        return path

    def _split(self, node: Node, num_pages: int) -> Node:
        """Splits the edge of a node after so many pages, and returns the new node there."""
        upper = node.split(num_pages, self.page_size, next(self._serials))
        self.num_nodes += 1
        self._watches.split(upper, node)
        self._observers.split(upper, node)
        return upper

    def _nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    # Changing the tree.

    def _use(self, path: Sequence[Node]) -> None:
        """Marks the nodes as used now."""
        now = self._uses.tick(len(path))
        for node in path:
            node.last_used = now

    def _add_leaf(self, parent: Node, tokens: bytes, pages: bytes, start: int) -> Node:
        """Adds a leaf, used now, below `parent`, whose path has `start` tokens, and lengthens watches."""
        leaf = Node(parent, tokens, pages, serial=next(self._serials), last_used=self._uses.count)
        parent.children[tokens[: self._page_bytes]] = leaf
        if isinstance(parent, Root):
            self._roots[parent.namespace] = parent
        self.num_nodes += 1
        self.num_evictable += leaf.num_pages
        self._observers.added(leaf)
        self._leaves.offer(leaf)
        self._watches.added(leaf, start)
        return leaf

    def _remove_leaf(self, leaf: Node) -> None:
        """Takes an evictable leaf out of the tree. Its watches go to its parent, which may be a leaf now.

        The caller gives it to `_free`. Until then it knows its parent.
        """
        parent = leaf.parent
        assert parent is not None and leaf.is_evictable_leaf
        self._observers.removed(leaf)
        del parent.children[leaf.tokens[: self._page_bytes]]
        self._watches.removed(leaf, parent)
        if not parent.children:
            self._leaves.offer(parent)
            self._drop_root_if_idle(parent)

    def _drop_root_if_idle(self, node: Node) -> None:
        """Forgets a root without children and watches, so that namespaces that come and go cost nothing."""
        if isinstance(node, Root) and not node.children and node not in self._watches:
            self._roots.pop(node.namespace, None)


def _path_to_root(node: Node) -> list[Node]:
    """`node` and all nodes above it, the root included."""
    path = [node]
    while (above := path[-1].parent) is not None:
        path.append(above)
    return path


def _join_pages(path: Sequence[Node]) -> np.ndarray:
    """int32, read-only: the pages of the nodes, one after another."""
    return np.frombuffer(b"".join([node.pages for node in path]), np.int32)
