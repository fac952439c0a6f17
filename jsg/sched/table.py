"""The request table on the host: which pages each running request's positions are in."""

import dataclasses
import math
import mmap
from collections.abc import Sequence
from typing import final

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.cache.kinds import PrefixMatch
from jsg.cache.radix import RadixCache
from jsg.cache.states import StateSlots
from jsg.cache.windows import WindowGroup
from jsg.cache_report import CacheReport, EvictionCause, MissReason
from jsg.sched.positions import PositionWords, spans
from jsg.sched.request import KeptPrefix, Placement, RunningRequest
from jsg.sched.row_states import StateRows, WindowRows
from jsg.sched.vision_store import VisionShape, VisionStore
from jsg.types import Request

POOL_TERMS = ("free", "evictable", "protected", "uncached")
"""What the pages of the pool are, each exactly one of these."""
LEAST_AGAIN = 32
"""A prefix that is cached so many tokens beyond its last state gets one at its end when a second request has it."""
COLUMNS_PER_NODE = 128
"""How many columns of a row are copied for the device in the time that a visit to a node takes."""


@final
class TreePages:
    """The pages of the pool without their parts in windows. A prompt takes all its pages, but few parts at a time."""

    def __init__(self, allocator: PageAllocator, cache: RadixCache):
        self._allocator = allocator
        self._cache = cache

    @property
    def num_available(self) -> int:
        """Pages that are free, or that an eviction frees."""
        return self._allocator.num_free + self._cache.num_evictable

    @property
    def num_yielding(self) -> int:
        """Pages that would become available if all holds ended."""
        return self._cache.num_yielding


class RequestTable:
    """Rows of pages. No other code moves pages between allocator, rows and radix tree.

    The leading `num_tree_pages` of a row belong to the tree or to branches and are locked. The other pages, up to the
    last dispatched position, are the row's own. The device has a copy of the table.

    Invariants: free + evictable + protected + uncached == total, in pages. Each further kind of state has such an
    equation of its own (`StateKind`).

    Attributes:
        words: The words by which the tree finds tokens whose positions are not their indices.
        vision: The rows of images in the vision pool.
        pages: int32 [rows, pages of a row], the page numbers.
        dirty_rows: Rows whose copy on the device lacks something that no forward pass writes.
        copies: By row, the KV slots to copy before the row is read: sources and targets.
        lacking: By row, see `Batch.lacking`.
        windows: The groups of layers with a window, with the parts that pages have in them.
        slots: The slots of states; None if no layer keeps a state of each request.
        states: What rows have of these.
        num_uncached_pages: How many pages in use the tree does not own.
        num_kept: How many kept prefixes were not dropped yet.
    """

    def __init__(
        self,
        max_running: int,
        max_context: int,
        vocab_size: int,
        allocator: PageAllocator,
        cache: RadixCache,
        vision: VisionShape | None = None,
    ):
        self.words = PositionWords(vocab_size, cache)
        self.vision = VisionStore(vision, vocab_size)
        self.pages = _zeros(max_running + 1, -(-max_context // cache.page_size))
        self.dirty_rows: set[int] = set()
        self.copies: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.lacking: dict[int, Sequence[np.ndarray]] = {}
        self.windows = [kind for kind in allocator.kinds if isinstance(kind, WindowGroup)]
        self.slots = next((kind for kind in allocator.kinds if isinstance(kind, StateSlots)), None)
        self.states: list[WindowRows | StateRows] = [WindowRows(self.windows, self.pages)]
        if self.slots is not None:
            self.states.append(StateRows(self.slots, self.pages, cache.page_size))
        self.num_uncached_pages = 0
        self.num_kept = self._num_set_rows = 0
        self._allocator = allocator
        self._cache = cache
        self._free_rows = list(range(max_running, 0, -1))

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._cache.page_size

    @property
    def maps(self) -> tuple[np.ndarray | None, ...]:
        """See `PageAllocator`."""
        return self._allocator.maps

    @property
    def num_pages(self) -> int:
        """How many pages the pool has, without page 0."""
        return self._allocator.num_total

    @property
    def num_free_rows(self) -> int:
        """How many requests can be admitted before one ends."""
        return len(self._free_rows)

    @property
    def tree_pages(self) -> TreePages:
        """The pages by themselves, whatever parts of windows they need."""
        return TreePages(self._allocator, self._cache)

    @property
    def num_available(self) -> int:
        """Pages that rows can get now: those that are free or that an eviction frees, if they can get their parts."""
        return min([self.tree_pages.num_available, *(group.num_available for group in self.windows)])

    @property
    def tree_work(self) -> int:
        """The work of the radix tree so far (see `RadixCache.work`), and of rows that it has set for the device."""
        return self._cache.work + self._num_set_rows * self.pages.shape[1] // COLUMNS_PER_NODE

    @property
    def num_yielding(self) -> int:
        """Pages that would become available if all holds ended."""
        pools = (self.tree_pages, *self.windows)
        return min(pool.num_available + pool.num_yielding for pool in pools) - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """How many pages so many tokens take."""
        return -(-num_tokens // self.page_size)

    def needs_page(self, place: Placement) -> bool:
        """Whether the row's next token needs a page of its own."""
        return place.num_dispatched % self.page_size == 0

    def room(self, place: Placement) -> int:
        """How many new tokens the row's last page and the available pages have room for."""
        return self.num_available * self.page_size + -place.num_dispatched % self.page_size

    def admit(self, running: RunningRequest) -> Placement | None:
        """Gives a request a row and locks its longest cached prefix. There must be a free row.

        Returns:
            Where it runs; None if the planned step makes a state with which more of that prefix can be used later.
        """
        match = self._match(running)
        num_cached, num_usable = match.num_tokens, self._num_usable(running, match)
        if self.slots is not None and self.slots.awaits(match, num_usable + 1):
            return None
        if num_usable < num_cached:
            match = self._cache.match(running.key[:num_usable], running.request.namespace)
        row = self._free_rows.pop()
        self.pages[row, : len(match.pages)] = match.pages
        if len(match.pages):
            self.dirty_rows.add(row)
            self._num_set_rows += 1
        place = Placement(row, self._cache.lock(match), len(match.pages), match.num_tokens)
        for states in self.states:
            states.admit(place, match)
        if self.slots is not None:
            place.state.points = self._points(running, num_usable, num_cached)
        return place

    def _match(self, running: RunningRequest) -> PrefixMatch:
        """The longest cached prefix of a waiting request.

        Where all that it may take is cached, and a state that includes the last token too, it takes that state: the
        last token runs again only for what is sampled after it.
        """
        assert running.watch is not None, "a request waits until it is admitted"
        match = self._cache.match_watched(running.watch)
        is_whole = match.num_tokens == running.match_limit == running.num_known - 1
        if self._reads_again and is_whole:
            whole = self._cache.match(running.key[: running.num_known], running.request.namespace)
            return whole if whole.num_tokens == running.num_known else match
        return match

    @property
    def _reads_again(self) -> bool:
        """Whether the last token can run although the state includes it. Windows would see one token more then."""
        return self.slots is not None and self.page_size == 1 and not self.windows

    def _points(self, running: RunningRequest, num_usable: int, num_cached: int) -> dict[int, int]:
        """See `RowState.points`. Those that no client names are where it parts from the cache or a waiting request."""
        request = running.request
        points = {request.turn_end: 1} | dict.fromkeys(request.snapshot_at, 2)
        if request.hold:
            points[running.num_known] = 2
        assert running.watch is not None and running.watch.group is not None, "it is still in the queue"
        if running.num_known - num_usable >= LEAST_AGAIN:
            common = min(running.watch.group.common(running.watch, self.page_size), running.num_known)
            points |= {end: 2 for end in (num_cached, common) if end - num_usable >= LEAST_AGAIN}
        most = running.num_known if self._reads_again else max(running.match_limit, running.num_prompt - 1)
        rounded = sorted((min(end, most) // self.page_size * self.page_size, count) for end, count in points.items())
        return {end: count for end, count in rounded if end > num_usable}  # of equal ends the largest count

    def snapshot(self, place: Placement, *, is_last: bool = False) -> None:
        """Keeps the state after the last dispatched token of a row for other requests, if the model has states."""
        num_pages, odd = divmod(place.num_applied, self.page_size)
        if 0 < num_pages <= place.num_tree_pages and not odd:
            for states in self.states:
                if isinstance(states, StateRows):
                    states.snapshot(place, is_last=is_last)

    def _num_usable(self, running: RunningRequest, match: PrefixMatch) -> int:
        """How many tokens of a cached prefix a request can use."""
        usable = match.num_tokens
        while (fewer := self._cache.usable_len(match, running.trusted(usable, self.page_size))) < usable:
            usable = fewer
        return usable

    def begin_step(self, places: Sequence[Placement], chunk: int) -> None:
        """Gives up states that rows no longer read, before a step is planned with so many new tokens at most."""
        num_next = self.pages_for(chunk) + len(self.pages)
        for states in self.states:
            states.move(places, num_next)
        for group in self.windows:
            group.keep_longest(self._cache.awaited(), num_next)

    def num_branch_pages(self, request: Request) -> int:
        """Pages that the branches of a joined request need until it has its row."""
        num_prefix = request.joined[0]
        shared = num_prefix // self.page_size if self._cache.enabled else 0
        return shared + sum(self.pages_for(num_prefix + end - start) - shared for start, end in spans(request))

    def num_copied_pages(self, request: Request) -> int:
        """Pages of a joined request's row, before its suffix, that are copied from those of its branches.

        If a page has one token, nothing is copied. Otherwise the tokens of a branch are at other places inside their
        pages than in the row. So everything is copied but the prefix and the whole pages of the first branch.
        """
        if self.page_size == 1:
            return 0
        start, end = spans(request)[0]
        return self.pages_for(request.joined[-1]) - (request.joined[0] + end - start) // self.page_size

    def admit_joined(self, running: RunningRequest, branches: Sequence[KeptPrefix]) -> Placement:
        """Gives a joined request a row with the pages of its branches one after another, and takes over these pages.

        After them come the pages that the tree has of its own path, which begins with the first page that belongs to no
        branch. So pages that are copied from branches are shared too, and only the missing ones are copied.

        There must be a free row, and pages for the copies. The first branch must list all its pages, and the others
        list their pages from the end of the prefix on.
        """
        request, size = running.request, self.page_size
        num_prefix, num_joined = request.joined[0], request.joined[-1]
        row = self._free_rows.pop()
        slots = [kept.pages.repeat(size) * size + np.arange(len(kept.pages) * size) % size for kept in branches]
        lengths = [end - start for start, end in spans(request)]
        firsts = [num_prefix - kept.first_page * size for kept in branches]
        behind = [branch[first : first + n] for branch, first, n in zip(slots, firsts, lengths, strict=True)]
        source = np.concatenate([slots[0][:num_prefix], *behind])
        num_whole = self.pages_for(num_joined) - self.num_copied_pages(request)
        self.pages[row, :num_whole] = source[: num_whole * size : size] // size
        self.dirty_rows.add(row)
        stem = self._cache.match(running.key[:num_prefix], request.namespace)
        before = (KeptPrefix(self._cache.lock(stem), stem.pages, np.empty(0, np.int32)), *branches)
        self.num_kept += 1
        key = running.key[num_whole * size : running.match_limit]
        match = self._cache.match(key, running.namespace)
        if (num_usable := self._cache.usable_len(match)) < match.num_tokens:
            match = self._cache.match(key[:num_usable], running.namespace)
        lock, num_there = self._cache.lock(match), num_whole + len(match.pages)
        self.pages[row, num_whole:num_there] = match.pages
        if (num_copied := self.pages_for(num_joined) - num_there) > 0:
            self.pages[row, num_there : num_there + num_copied] = self._allocate(num_copied, request.namespace)
            self.num_uncached_pages += num_copied
            target = np.arange(num_there * size, num_joined)
            target = self.pages[row, target // size] * size + target % size
            self.copies[row] = source[num_there * size :].astype(np.int32), target.astype(np.int32)
        place = Placement(row, lock, num_there, max(num_there * size, num_joined), before=before, first_page=num_whole)
        for states in self.states:
            states.admit(place, match)
        return place

    def explain(self, running: RunningRequest, place: Placement) -> CacheReport:
        """Says why the cached prefix of a request that was just admitted ends where it does; in tokens of its row."""
        start = place.first_page * self.page_size
        limit = max(running.match_limit, place.num_dispatched)  # a token that a state has may run again
        tokens = running.key[start:limit]
        report = self.words.readable(self._cache.explain(place.lock.node, tokens, running.namespace))
        matched, matchable = report.matched_tokens, report.matchable_tokens
        if self._cache.kinds and (more := self._cache.matched_len(tokens, running.namespace) - matched):
            why = MissReason.WINDOW if self.slots is None else MissReason.STATE
            report = CacheReport(matched_tokens=matched, matchable_tokens=matchable, unusable_tokens=more, why=why)
        elif report.why is MissReason.NEW and report.first_difference is not None:
            why = self._why_new(running, tokens, start + report.first_difference, matched)
            report = dataclasses.replace(report, why=why)
        behind = None if report.first_difference is None else start + report.first_difference
        matched, matchable = (min(start + count, running.match_limit) for count in (matched, matchable))
        return dataclasses.replace(report, matched_tokens=matched, matchable_tokens=matchable, first_difference=behind)

    def _why_new(self, running: RunningRequest, tokens: np.ndarray, position: int, matched: int) -> MissReason:
        """Why these tokens differ from what is cached, at a position of the row and after `matched` of them."""
        request = running.request
        if any(item.start <= position < item.end for item in request.media):
            return MissReason.PICTURE
        page = tokens[: matched + self.page_size]
        if request.sees_all and not request.joined and self._cache.has_elsewhere(page, running.namespace):
            return MissReason.NAMESPACE
        return MissReason.NEW

    def forget(self, request: Request, shifts: Sequence[int], *, distrusts: bool = False) -> None:
        """Gives back what a request that has ended or could not be added has acquired: its shifts and its images.

        With `distrusts` the features of its images may be wrong, so they are computed anew.
        """
        self.words.release(shifts)
        self.vision.release(request.rid, distrusts=distrusts)

    def keep(
        self, place: Placement, *, keeps_own: bool = False, yields: bool = False, first_page: int = 0
    ) -> KeptPrefix:
        """Takes a request's row back, but keeps its cached prefix until `drop`.

        Args:
            place: Where the request lived.
            keeps_own: Keep the pages too that are not in the tree. Otherwise they are freed.
            yields: Count the pages that nobody else needs in `num_yielding`.
            first_page: The first page that the result lists. The pages before it are kept, but not listed.
        """
        lock = self._cache.lock(place.lock.node, yields=yields)
        num_pages = self.pages_for(place.num_dispatched) if keeps_own else place.num_tree_pages
        row = self.pages[place.row]
        pages, own = row[first_page:num_pages].copy(), row[place.num_tree_pages : num_pages].copy()
        states = [states.keep(place, yields=yields) for states in self.states]
        if keeps_own:
            place.num_dispatched = place.num_tree_pages * self.page_size
        self.release(place)
        self.num_kept += 1
        return KeptPrefix(lock, pages, own, first_page, states)

    def drop(self, kept: KeptPrefix) -> None:
        """Gives back a prefix that `keep` has kept. It must be called once."""
        self._allocator.free(kept.own)
        self.num_uncached_pages -= len(kept.own)
        for drop in kept.states:
            drop()
        self._cache.unlock(kept.lock)
        self.num_kept -= 1

    def release(self, place: Placement, *, distrusts: bool = False) -> None:
        """Takes a request's row, lock and own pages back.

        Args:
            place: Where the request lived.
            distrusts: Evict its cached prefix too, as far as no other request has it.
        """
        own = self.pages[place.row, place.num_tree_pages : self.pages_for(place.num_dispatched)]
        self._allocator.free(own)
        self.num_uncached_pages -= len(own)
        for states in self.states:
            states.release(place, distrusts=distrusts)
        for kept in place.before:
            self.drop(kept)
        self._cache.unlock(place.lock)
        if distrusts:
            for lock in (*(kept.lock for kept in place.before), place.lock):
                self._cache.forget(lock)
        self.vision.unpin(place)
        self._free_rows.append(place.row)
        self.dirty_rows.discard(place.row)
        self.copies.pop(place.row, None)
        self.lacking.pop(place.row, None)

    def grow(self, place: Placement, num_tokens: int, namespace: str | None = None) -> None:
        """Gives a row pages for new tokens, of which there may be `room`. Evicts other pages if it must.

        They are for a prompt of this namespace, or with None for an answer.
        """
        begin, end = self.pages_for(place.num_dispatched), self.pages_for(place.num_dispatched + num_tokens)
        self.pages[place.row, begin:end] = self._allocate(end - begin, namespace)
        self.num_uncached_pages += end - begin
        place.num_dispatched += num_tokens

    def grow_by_one(self, places: list[Placement]) -> None:
        """Makes room for one new token in each row. The pages must be available."""
        needing = [place for place in places if self.needs_page(place)]
        pages = self._allocate(len(needing))
        rows = [place.row for place in needing]
        self.pages[rows, [place.num_dispatched // self.page_size for place in needing]] = pages
        self.num_uncached_pages += len(pages)
        for place in places:
            place.num_dispatched += 1

    def shrink(self, place: Placement, num_tokens: int) -> None:
        """Takes back the last tokens of a row, and the pages that have only such tokens and are not the tree's."""
        left = place.num_dispatched - num_tokens
        begin, end = self.pages_for(left), self.pages_for(place.num_dispatched)
        assert begin >= place.num_tree_pages, "tokens that are taken back lie in the radix tree"
        self._allocator.free(self.pages[place.row, begin:end])
        self.num_uncached_pages -= end - begin
        place.num_dispatched = left
        place.num_again = max(place.num_again - num_tokens, 0)

    def may_draft(self, place: Placement, start: int) -> bool:
        """Whether a step that begins at `start` may have drafts. What it reads is kept until these are verified."""
        return all(states.double(place, start) for states in self.states if isinstance(states, StateRows))

    def _allocate(self, num_pages: int, namespace: str | None = None) -> np.ndarray:
        """Pages for a prompt of this namespace, or with None for answers."""
        if num_pages > self._allocator.num_free:
            cause = EvictionCause.ANSWERS if namespace is None else EvictionCause.PROMPT
            self._cache.evict(num_pages - self._allocator.num_free, cause, namespace)
        pages = self._allocator.allocate(num_pages)
        assert pages is not None, "the plan asks only for pages that are available"
        return pages

    def share(self, running: RunningRequest, place: Placement, num_tokens: int) -> int:
        """Puts the first `num_tokens` of a row into the radix tree, as far as they fill pages.

        If the tree had some of these tokens, the row's duplicates are freed, and the row gets the pages of the tree.

        Returns:
            How many tokens the tree had before. The row must not write them.
        """
        count = self._num_shared(running, num_tokens) // self.page_size
        if not self._cache.enabled or count <= place.num_tree_pages:
            return place.num_tree_pages * self.page_size
        begin = place.num_tree_pages
        own = self.pages[place.row, begin:count].copy()
        key = running.key[begin * self.page_size : count * self.page_size]
        result = self._cache.extend(place.lock, key, own, (begin - place.first_page) * self.page_size)
        if result.num_existing:  # if copies to these pages are still to be made, they come before any step that writes
            self._hand_over(place.row, begin, own[: result.num_existing], result.pages[: result.num_existing])
            self._allocator.free(own[: result.num_existing])
            self.pages[place.row, begin:count] = result.pages
            self.dirty_rows.add(place.row)
        self.num_uncached_pages -= count - begin
        place.num_tree_pages = count
        return (begin + result.num_existing) * self.page_size

    def _hand_over(self, row: int, begin: int, own: np.ndarray, others: np.ndarray) -> None:
        """Lets pages of the tree, some of which may lack parts, take the place of a row's pages from `begin` on."""
        lacking = [begin + np.flatnonzero(group.hand_over(own, others)) for group in self.windows]
        if any(map(len, lacking)):
            self.lacking[row] = [np.empty(0, np.int64), *lacking][-len(self.maps) :]
            self._cache.note_gain()

    def _num_shared(self, running: RunningRequest, num_tokens: int) -> int:
        """How many of the first tokens of a row may go into the tree. All tokens of a text may.

        An image that begins with the words of another image in the tree stays out: these words would lead to the keys
        and values of the other image. That image may be in the tree since this request was admitted, so it is looked up
        anew.
        """
        if not running.request.media:
            return num_tokens
        count = running.trusted(num_tokens, self.page_size)
        existing = self._cache.matched_len(running.key[:count], running.request.namespace)
        num_trusted = running.trusted(existing, self.page_size)
        return count if num_trusted == existing else num_trusted

    @property
    def page_counts(self) -> tuple[int, ...]:
        """The pages of each of `POOL_TERMS`, which together are all."""
        return (self.num_free_pages, self._cache.num_evictable, self._cache.num_protected, self.num_uncached_pages)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._allocator.num_free

    def check_integrity(self) -> None:
        """Asserts the equation of pages, and that nothing is locked when nothing runs. It takes under a microsecond."""
        counts = self.page_counts
        assert sum(counts) == self.num_pages, (
            f"{' + '.join(POOL_TERMS)} = {counts} must add up to {self.num_pages} pages"
        )
        is_idle = self.num_free_rows == len(self.pages) - 1
        for kind in self._cache.kinds:
            kind.check(is_idle=is_idle and not self.num_kept)
        if is_idle:
            assert self.num_kept or not self._cache.num_protected, "a prefix is locked, but no request runs"
            assert self.num_kept or not self.num_uncached_pages, "a row has pages, but no request runs"


def _zeros(*shape: int) -> np.ndarray:
    """int32 zeros, which take memory only where they are written.

    NumPy would ask for pages of 2 MiB. The first request in a row of a table for long contexts would wait for several
    of them, and a short one would keep that much.
    """
    return np.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), np.int32).reshape(shape)
