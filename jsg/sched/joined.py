"""Joined requests: their branches are computed first, each by a request of its own.

    row:  [ prefix ][ branch 1 ][ branch 2 ][ suffix, output ... ]
            tree      tree        tree        the request's own

The tokens of a branch see the prefix and the branch, which is a path of the radix tree like any other. So a request
that no client knows computes what is not cached of that path, generates nothing and keeps its pages. It is called a
branch too.
When all branches are computed, the joined request gets a row in which their pages stand one after another, and only its
suffix is left to compute. The suffix sees several paths at once, so it is never put into the tree. A retract gives
branches and suffix up; then it all begins anew.

Each branch has a copy of the prefix while it waits or runs. So few are made at first, and another one whenever one is
admitted.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterator

from jsg.errors import RequestError
from jsg.sched.positions import cut, spans
from jsg.sched.request import FirstAdmission, KeptPrefix, Placement, RequestState, RunningRequest
from jsg.sched.table import RequestTable
from jsg.sched.totals import SchedulerTotals
from jsg.types import CacheReport, Request, SamplingParams

MAX_COPIED_TOKENS = 2**25
"""Tokens of the prefix times branches that have tokens: what all branches of one request copy and look up."""

COPIED_AT_ONCE = 2**18
"""Tokens of the prefix times the branches that are made at first."""

MIN_AT_ONCE = 8
"""Branches that are made at first, however long the prefix is."""


def check_joined(request: Request, table: RequestTable, *, has_windows: bool) -> None:
    """Raises RequestError for a joined request that can never run."""
    if has_windows:
        raise RequestError(
            "a joined prompt needs a model whose layers see all tokens, but this one has layers with a sliding window, "
            "in which branches would push each other out; put the branches one after another as text",
            param="joined",
        )
    num_branches, num_prefix = len(spans(request)), request.joined[0]
    if num_branches * num_prefix > MAX_COPIED_TOKENS:
        raise RequestError(
            "the tokens of a joined prompt's prefix times its branches may be at most "
            f"{MAX_COPIED_TOKENS}, but this one has {num_prefix} times {num_branches}; use fewer branches or a shorter "
            "prefix",
            param="joined",
        )
    num_behind = len(request.input_ids) + request.sampling.max_new_tokens - request.joined[-1]
    needed = table.num_branch_pages(request) + table.num_copied_pages(request) + table.pages_for(num_behind)
    if needed > table.num_pages:
        raise RequestError(
            f"a joined prompt must fit in the {table.num_pages} pages of the KV pool, but with its branches this one "
            f"needs {needed}; shorten it or lower max_new_tokens",
            param="joined",
        )


@dataclasses.dataclass(slots=True, eq=False)
class Join:
    """A joined request without a row, and its branches.

    A branch is numbered by its index in `spans`. Its arrival number is just before that of the whole.

    Attributes:
        whole: The joined request.
        template: What each branch asks for, except its tokens.
        spans: Begin and end of each branch that has tokens; of an empty one behind the prefix where none has any.
        pending: By number, the branches that wait or run.
        computed: By number, the branches whose pages are kept.
        num_made: How many branches were made, in order of their numbers.
        cached: By number, tokens of prefix and branch that were cached when it was first admitted, in that order.
        report: Where the first branch that was not wholly cached ended, when the client asked for that.
    """

    whole: RunningRequest
    template: Request
    spans: list[tuple[int, int]]
    pending: dict[int, RunningRequest] = dataclasses.field(default_factory=dict)
    computed: dict[int, RunningRequest] = dataclasses.field(default_factory=dict)
    num_made: int = 0
    cached: dict[int, int] = dataclasses.field(default_factory=dict)
    report: CacheReport | None = None

    @property
    def is_ready(self) -> bool:
        """Whether all branches are computed."""
        return len(self.computed) == len(self.spans)

    @property
    def num_prefix(self) -> int:
        """Tokens before the first branch."""
        return self.whole.request.joined[0]

    @property
    def num_at_once(self) -> int:
        """Branches that are made before one of them is admitted."""
        return max(MIN_AT_ONCE, COPIED_AT_ONCE // (self.num_prefix + 1))

    @property
    def branches(self) -> list[RunningRequest]:
        """All that were made, the computed ones first."""
        return [*self.computed.values(), *self.pending.values()]

    def take_pages(self) -> list[KeptPrefix]:
        """The pages of all branches, in order of their numbers. They are the caller's now, and the branches end."""
        pages = []
        for number in range(len(self.spans)):
            branch = self.computed[number]
            assert branch.kept is not None, "a computed branch has its pages"
            pages.append(branch.kept)
            branch.kept = None
            branch.enter(RequestState.ENDED)
        return pages

    def number_of(self, branch: RunningRequest) -> int:
        """The number of a branch."""
        return branch.arrival - self.whole.first_arrival

    def note_admission(self, branch: RunningRequest, cached: int, totals: SchedulerTotals) -> bool:
        """Counts what was cached of a branch. False, and nothing is counted, where it was admitted before."""
        number = self.number_of(branch)
        if number in self.cached or self.whole.admission is not None:
            return False
        self.cached[number] = cached
        totals.branch_tokens += branch.num_known - self.num_prefix
        totals.branch_tokens_computed += branch.num_known - max(cached, self.num_prefix)
        return True

    def note_report(self, branch: RunningRequest, report: CacheReport) -> None:
        """Keeps the report of the first branch with a miss, in terms of the whole prompt."""
        if self.report is not None or report.first_difference is None:
            return
        start, _ = self.spans[self.number_of(branch)]
        behind = report.first_difference - self.num_prefix
        index = report.first_difference if behind < 0 else start + behind
        self.report = dataclasses.replace(report, first_difference=index)

    def first_admission(self, queue_s: float) -> FirstAdmission:
        """What the whole is told, which is admitted now."""
        cached, report = list(self.cached.values()), None
        num_cached = min(cached[0], self.num_prefix) + sum(max(num - self.num_prefix, 0) for num in cached)
        if self.whole.request.return_cache_info:
            report = self.report or CacheReport(matched_tokens=0, matchable_tokens=0)
            matchable = self.whole.request.joined[-1]
            report = dataclasses.replace(report, matched_tokens=num_cached, matchable_tokens=matchable)
        return FirstAdmission(num_cached, queue_s, report)


class JoinedRequests:
    """The joined requests without a row: what the scheduler asks about them and what it tells them.

    It asks `first_ready` what to admit, and `latest_computed` what to give up. It tells when a step begins, and when a
    branch is admitted or computed.

    Invariants: of a request that is not parked, each branch that was made waits, runs or is computed, and one waits
    while some are not made. A request whose branches are all computed has an entry in `_ready`, where old ones may be
    left, or is in `_fresh`.
    """

    def __init__(
        self, table: RequestTable, queue: Callable[[RunningRequest], None], totals: SchedulerTotals, *, makes_all: bool
    ):
        """None yet.

        Args:
            table: Where pages and rows come from.
            queue: Lets a branch wait for admission.
            totals: Where branch tokens are counted.
            makes_all: All branches of a request are made at first, since one that is made within a round of
                admissions would have no turn in it.
        """
        self._table = table
        self._queue = queue
        self._totals = totals
        self._makes_all = makes_all
        self._joins: dict[RunningRequest, Join] = {}
        self._parked: list[Join] = []
        self._ready: list[tuple[int, RunningRequest]] = []
        self._fresh: list[Join] = []

    def __len__(self) -> int:
        return len(self._joins)

    def __iter__(self) -> Iterator[Join]:
        return iter(self._joins.values())

    # What the scheduler asks.

    @property
    def num_kept(self) -> int:
        """Branches whose pages are kept."""
        return sum(len(join.computed) for join in self)

    @property
    def has_fresh(self) -> bool:
        """Whether some request can be admitted in the next step, and not in this one."""
        return any(join.is_ready for join in self._fresh)

    def first_ready(self) -> RunningRequest | None:
        """The earliest arrival whose branches are all computed."""
        while self._ready:
            join = self._joins.get(self._ready[0][1])
            if join is not None and join.is_ready and join not in self._fresh:
                return join.whole
            heapq.heappop(self._ready)
        return None

    def latest_computed(self) -> RunningRequest | None:
        """The latest arrival some of whose branches are computed."""
        return max((j.whole for j in self if j.computed), key=lambda whole: whole.arrival, default=None)

    # A joined request comes and goes.

    def add(self, whole: RunningRequest) -> None:
        """Takes a joined request; `begin_step` makes its first branches."""
        request = whole.request
        template = Request(
            rid=request.rid,
            input_ids=request.input_ids[:1],
            sampling=SamplingParams(max_new_tokens=0),
            namespace=request.namespace,
            priority=request.priority,
            return_cache_info=request.return_cache_info,
        )
        join = self._joins[whole] = Join(whole, template, spans(request))
        self._parked.append(join)

    def remove(self, whole: RunningRequest) -> Join:
        """Forgets a joined request, whose branches are the caller's now."""
        join = self._joins.pop(whole)
        self._parked = [parked for parked in self._parked if parked is not join]
        return join

    def park(self, whole: RunningRequest) -> list[RunningRequest]:
        """Gives a request's branches up until `begin_step`; returns them, and the caller ends them."""
        join = self._joins[whole]
        branches = join.branches
        join.pending.clear()
        join.computed.clear()
        join.num_made = 0
        self._parked.append(join)
        return branches

    # What the scheduler tells.

    def begin_step(self) -> None:
        """Makes the first branches of requests that have none, by arrival.

        What an earlier step has computed can be copied from now on.
        """
        for join in self._fresh:
            heapq.heappush(self._ready, (join.whole.arrival, join.whole))
        self._fresh.clear()
        parked, self._parked = self._parked, []
        for join in sorted(parked, key=lambda join: join.whole.arrival):
            self._make_branches(join, len(join.spans) if self._makes_all else join.num_at_once)

    def note_admission(self, branch: RunningRequest, place: Placement) -> None:
        """A branch was admitted: it counts if that is the first time, and the next branch is made."""
        join = self._join_of(branch)
        if branch.admission is None:  # it is the first, and from now on all count as admitted
            for pending in join.pending.values():
                pending.admission = FirstAdmission()
        if join.note_admission(branch, place.num_dispatched, self._totals) and branch.request.return_cache_info:
            join.note_report(branch, self._table.explain(branch, place))
        self._make_branches(join, 1)

    def keep(self, branch: RunningRequest, place: Placement) -> None:
        """A branch is computed: takes its row back and keeps its pages. Only the first branch lists the prefix."""
        join = self._join_of(branch)
        number, size = join.number_of(branch), self._table.page_size
        first_page = join.num_prefix // size if number else 0
        branch.kept = self._table.keep(place, keeps_own=True, first_page=first_page)
        join.computed[number] = join.pending.pop(number)
        if join.is_ready and size > 1:
            self._fresh.append(join)  # pages are copied, so the step that writes them must come before
        elif join.is_ready:
            heapq.heappush(self._ready, (join.whole.arrival, join.whole))

    def _join_of(self, branch: RunningRequest) -> Join:
        assert branch.branch_of is not None, "only a branch belongs to a joined request"
        return self._joins[branch.branch_of]

    def _make_branches(self, join: Join, count: int) -> None:
        """Lets the next branches of a request wait, at most `count`."""
        whole, first = join.whole, join.num_made
        assert whole.layout is not None, "a joined request has positions of its own"
        for number in range(first, min(first + count, len(join.spans))):
            start, end = join.spans[number]
            tokens = cut(whole.tokens, join.num_prefix, start, end)
            branch = RunningRequest(
                join.template,
                whole.first_arrival + number,
                tokens,
                len(tokens),
                len(tokens),
                arrived_s=whole.arrived_s,
                layout=self._table.words.branch_layout(whole.layout, tokens, join.num_prefix, start, end),
                branch_of=whole,
            )
            if join.cached or whole.admission is not None:
                branch.admission = FirstAdmission()
            self._queue(branch)
            join.pending[number] = branch
            join.num_made += 1

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        for join in self:
            assert join.whole.state is RequestState.JOINING
            assert {*join.pending, *join.computed} == set(range(join.num_made)), "a branch is lost"
            assert len(join.pending) + len(join.computed) == join.num_made
            assert all(b.state in (RequestState.WAITING, RequestState.RUNNING) for b in join.pending.values())
            assert all(b.state is RequestState.KEPT and b.kept is not None for b in join.computed.values())
            is_parked = any(parked is join for parked in self._parked)
            assert bool(join.num_made) != is_parked
            has_all = join.num_made == len(join.spans)
            assert is_parked or has_all or any(b.state is RequestState.WAITING for b in join.pending.values())
