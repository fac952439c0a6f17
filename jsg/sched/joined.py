"""Joined prompts: branches side by side behind a common prefix, and a suffix that sees them all.

    row:  [ prefix ][ branch 1 ][ branch 2 ][ suffix, output ... ]
            tree      tree        tree        the request's own

What a branch's tokens see is the prefix and the branch, which is a path of the radix tree like any other. So each
branch is first computed as far as it is not cached, by a part: a request of the prefix and that branch which generates
nothing and stays locked. Parts have copies of the prefix while they wait or run, so they are made a few at a time: the
next when one is admitted. When all are there the whole gets its row, in which their pages stand one after another, and
only its suffix is left to compute. That has seen several paths at once, so it is never put into the tree. A retract
gives parts and suffix up; then it all begins anew.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterator

from jsg.sched.positions import PositionWords, cut, spans
from jsg.sched.records import HeldPrefix, RunningRequest, SchedulerTotals
from jsg.types import CacheReport, Request, SamplingParams

MAX_COPIED_TOKENS = 2**25
"""Tokens of the prefix times branches that have some: what all parts of one request copy, and look up in the tree."""

COPIED_AT_ONCE = 2**18
"""Tokens of the prefix times parts that are made at first."""

MIN_AT_ONCE = 8
"""Parts that are made at first, however long the prefix is."""


@dataclasses.dataclass(slots=True, eq=False)
class Join:
    """One joined request that has no row yet.

    A part has the number of its branch among `spans`.

    Attributes:
        whole: The request.
        asks: What each part asks for, but for the tokens.
        spans: Of each branch that has tokens, or of the prefix where none has: one part each.
        parts: By number, those that wait or run.
        held: By number, pages of the parts that are computed.
        num_made: Parts made so far, in order of numbers.
        counted: Parts that were admitted before.
        prefix_cached: Tokens of the prefix that were cached when the first part was admitted; None before that.
        branch_cached: Tokens of branches that were cached when their parts were first admitted.
        report: Where the first part that was not wholly cached ended, when that was asked for.
    """

    whole: RunningRequest
    asks: Request
    spans: list[tuple[int, int]]
    parts: dict[int, RunningRequest] = dataclasses.field(default_factory=dict)
    held: dict[int, HeldPrefix] = dataclasses.field(default_factory=dict)
    num_made: int = 0
    counted: set[int] = dataclasses.field(default_factory=set)
    prefix_cached: int | None = None
    branch_cached: int = 0
    report: CacheReport | None = None

    @property
    def is_ready(self) -> bool:
        """All its parts are computed."""
        return len(self.held) == len(self.spans)

    @property
    def num_prefix(self) -> int:
        """Tokens before the first branch."""
        return self.whole.request.joined[0]

    @property
    def num_cached(self) -> int:
        """Tokens of the whole that were cached when its parts were first admitted."""
        return (self.prefix_cached or 0) + self.branch_cached

    @property
    def num_at_once(self) -> int:
        """Parts that are made before one of them is admitted."""
        return max(MIN_AT_ONCE, COPIED_AT_ONCE // (self.num_prefix + 1))

    @property
    def prefixes(self) -> list[HeldPrefix]:
        """What is held, in the order of the branches."""
        return [self.held[number] for number in range(len(self.spans))]

    @property
    def first_arrival(self) -> int:
        """Of part 0; the others follow it, and the whole them."""
        return self.whole.arrival - len(self.whole.request.joined)

    def number_of(self, part: RunningRequest) -> int:
        """Which of the parts it is."""
        return part.arrival - self.first_arrival

    def note_admission(self, part: RunningRequest, cached: int, totals: SchedulerTotals) -> bool:
        """Counts what was cached of a part. False, and nothing is counted, where it was admitted before."""
        number = self.number_of(part)
        if self.prefix_cached is None:
            self.prefix_cached = min(cached, self.num_prefix)
        if number in self.counted or self.whole.cached_tokens is not None:
            return False
        self.counted.add(number)
        num_branch, num_cached = part.num_known - self.num_prefix, max(cached - self.num_prefix, 0)
        self.branch_cached += num_cached
        totals.branch_tokens += num_branch
        totals.branch_tokens_computed += num_branch - num_cached
        return True

    def note_report(self, part: RunningRequest, report: CacheReport) -> None:
        """Keeps the report of the first part with a miss, in terms of the whole prompt."""
        if self.report is not None or report.first_difference is None:
            return
        start, _ = self.spans[self.number_of(part)]
        behind = report.first_difference - self.num_prefix
        index = report.first_difference if behind < 0 else start + behind
        self.report = dataclasses.replace(report, first_difference=index)

    def cache_report(self) -> CacheReport:
        """Of the whole prompt."""
        report = self.report or CacheReport(matched_tokens=0, matchable_tokens=0)
        matchable = self.whole.request.joined[-1]
        return dataclasses.replace(report, matched_tokens=self.num_cached, matchable_tokens=matchable)


class Joins:
    """The joined requests that have no row.

    Invariants: of those that are not parked each part that was made waits, runs, or is held, and one waits while some
    are not made; `num_held` counts those that are held; each whose parts are all held has an entry in `_ready`, where
    there may be old ones besides, or is in `_fresh`.

    Attributes:
        num_held: Parts that are computed and wait for others.
    """

    def __init__(self, words: PositionWords, add: Callable[[RunningRequest], None], page_size: int, *, makes_all: bool):
        """None yet.

        Args:
            words: What tokens are found by.
            add: Makes a part wait.
            page_size: Tokens in a page. With several, pages are copied, so a request must wait for the step after the
                one that its parts are computed in.
            makes_all: All parts of a request are made at first: one that is made within a round of admissions would
                have no turn in it.
        """
        self.num_held = 0
        self._add = add
        self._words = words
        self._page_size = page_size
        self._makes_all = makes_all
        self._joins: dict[RunningRequest, Join] = {}
        self._parked: list[Join] = []
        self._ready: list[tuple[int, RunningRequest]] = []
        self._fresh: list[Join] = []

    def __len__(self) -> int:
        return len(self._joins)

    def __getitem__(self, whole: RunningRequest) -> Join:
        return self._joins[whole]

    def __contains__(self, whole: RunningRequest) -> bool:
        return whole in self._joins

    def __iter__(self) -> Iterator[Join]:
        return iter(self._joins.values())

    @property
    def has_fresh(self) -> bool:
        """Whether requests will be ready in the next step."""
        return any(join.is_ready for join in self._fresh)

    def add(self, whole: RunningRequest) -> None:
        """Takes a joined request; `begin_step` makes its first parts."""
        request = whole.request
        asks = Request(
            rid=request.rid,
            input_ids=request.input_ids[:1],
            sampling=SamplingParams(max_new_tokens=0),
            namespace=request.namespace,
            priority=request.priority,
            return_cache_info=request.return_cache_info,
        )
        join = self._joins[whole] = Join(whole, asks, spans(request))
        self._parked.append(join)

    def remove(self, whole: RunningRequest) -> Join:
        """Takes a request out; what its parts hold is the caller's now."""
        join = self._joins.pop(whole)
        self.num_held -= len(join.held)
        self._parked = [parked for parked in self._parked if parked is not join]
        return join

    def park(self, join: Join) -> None:
        """Forgets the parts of a request, which the caller has ended, until `begin_step`."""
        self.num_held -= len(join.held)
        join.parts.clear()
        join.held.clear()
        join.num_made = 0
        self._parked.append(join)

    def hold(self, part: RunningRequest, prefix: HeldPrefix) -> None:
        """Takes over what a part has computed."""
        assert part.part_of is not None, "only a part is held for its whole"
        join = self._joins[part.part_of]
        number = join.number_of(part)
        del join.parts[number]
        join.held[number] = prefix
        self.num_held += 1
        if join.is_ready and self._page_size > 1:
            self._fresh.append(join)
        elif join.is_ready:
            heapq.heappush(self._ready, (join.whole.arrival, join.whole))

    def first_page(self, part: RunningRequest, whole: RunningRequest) -> int:
        """From which on the pages of a part are listed when it is held: only the first part lists the prefix."""
        join = self._joins[whole]
        return join.num_prefix // self._page_size if join.number_of(part) else 0

    def begin_step(self) -> None:
        """Makes the first parts of requests that have none, by arrival. What was computed before can be copied now."""
        for join in self._fresh:
            heapq.heappush(self._ready, (join.whole.arrival, join.whole))
        self._fresh.clear()
        parked, self._parked = self._parked, []
        for join in sorted(parked, key=lambda join: join.whole.arrival):
            self.make_parts(join, len(join.spans) if self._makes_all else join.num_at_once)

    def first_ready(self) -> Join | None:
        """The earliest arrival whose parts are all computed."""
        while self._ready:
            join = self._joins.get(self._ready[0][1])
            if join is not None and join.is_ready and join not in self._fresh:
                return join
            heapq.heappop(self._ready)
        return None

    def latest_holder(self) -> Join | None:
        """The latest arrival some of whose parts are computed."""
        return max((j for j in self._joins.values() if j.held), key=lambda j: j.whole.arrival, default=None)

    def make_parts(self, join: Join, count: int) -> None:
        """Makes the next parts of a request wait, at most `count`. Their arrival numbers are just before its own."""
        whole, first = join.whole, join.num_made
        assert whole.layout is not None, "a joined request has positions of its own"
        for number in range(first, min(first + count, len(join.spans))):
            start, end = join.spans[number]
            tokens = cut(whole.tokens, join.num_prefix, start, end)
            part = RunningRequest(
                join.asks,
                join.first_arrival + number,
                tokens,
                len(tokens),
                len(tokens),
                arrived_s=whole.arrived_s,
                layout=self._words.branch_layout(whole.layout, tokens, join.num_prefix, start, end),
                part_of=whole,
            )
            part.cached_tokens = None if join.prefix_cached is None and whole.cached_tokens is None else 0
            self._add(part)
            join.parts[number] = part
            join.num_made += 1

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        assert self.num_held == sum(len(join.held) for join in self)
        for join in self:
            assert {*join.parts, *join.held} == set(range(join.num_made)), "a part is lost"
            assert len(join.parts) + len(join.held) == join.num_made
            assert all((part.watch is None) == (part.place is not None) for part in join.parts.values())
            is_parked = any(parked is join for parked in self._parked)
            assert bool(join.num_made) != is_parked
            has_all = join.num_made == len(join.spans)
            assert is_parked or has_all or any(part.watch is not None for part in join.parts.values())
