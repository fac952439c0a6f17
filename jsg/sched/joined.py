"""Joined requests: their branches are computed first, each one by a request of its own.

    row:  [ prefix ][ branch 1 ][ branch 2 ][ suffix, output ... ]
            tree      tree        tree        tree, in a namespace of these branches; then the request's own

The tokens of a branch see the prefix and the branch itself. Together these are a path of the radix tree like any
other. A request that no client knows computes what is not cached of that path, generates nothing and keeps its pages.
This request is called a branch too.

When all branches are computed, the joined request gets a row in which their pages follow one another. Then only its
suffix has to be computed. The suffix sees several paths at once, so in the tree it is a path of its own, in a namespace
that names prefix, branches and positions (`positions.py`). There the next request with these branches finds it. A
retract gives up branches and suffix. Whatever the tree has lost of them by the next admission is computed again.

Each branch has a copy of the prefix while it waits or runs. So only some branches are made at first, and another one is
made whenever one is admitted.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from jsg.cache_report import CacheReport
from jsg.errors import RequestError
from jsg.prompt_ids import PromptIds
from jsg.sched.positions import branch_layout, cut, spans
from jsg.sched.request import FirstAdmission, KeptPrefix, Placement, RequestState, RunningRequest
from jsg.sched.table import RequestTable
from jsg.sched.totals import SchedulerTotals
from jsg.types import Request, SamplingParams

MAX_COPIED_TOKENS = 2**25
"""The largest product of the tokens of the prefix and the branches with tokens, which is how many tokens are copied."""

COPIED_AT_ONCE = 2**18
"""The product of the prefix's tokens and the branches that are made at first."""

MIN_AT_ONCE = 8
"""How many branches are made at first, at least, however long the prefix is."""


def check_joined(request: Request, table: RequestTable) -> None:
    """Raises RequestError for a joined request that can never run."""
    if table.slots is not None:
        raise RequestError(
            "a joined prompt needs a model that keeps keys and values of each token, but this one has layers with a "
            "state of each request, and branches have no state in common; put them one after another as text",
            param="joined",
        )
    if table.windows:
        _check_windows(request, min(group.window.length for group in table.windows), table.page_size)
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
    if needed > (most := min([table.num_pages, *(group.num_total for group in table.windows)])):
        raise RequestError(
            f"a joined prompt must fit in the {most} pages of the KV pool, but with its branches this one "
            f"needs {needed}; shorten it or lower max_new_tokens",
            param="joined",
        )


def _check_windows(request: Request, window: int, page_size: int) -> None:
    """Raises RequestError if a joined request would leave the smallest window of a layer.

    Branches have the same positions but follow one another in the row. So the last positions before a token are not
    side by side in its row, and layers with a window read tokens that are side by side.
    """
    num_tokens = len(request.input_ids) + max(request.sampling.max_new_tokens - 1, 0)  # the last one is never read
    if num_tokens > window:
        raise RequestError(
            f"this model has layers with a sliding window of {window} tokens, in which the branches of a joined prompt "
            f"would push each other out; so prompt and output must fit in the window, but have {num_tokens} tokens; "
            "shorten them, or put the branches one after another as text",
            param="joined",
        )
    if page_size > 1:
        raise RequestError(
            f"joined prompts of a model with sliding windows need pages of one token, but --page-size is {page_size}; "
            "put the branches one after another as text, or start the server with --page-size 1",
            param="joined",
        )


@dataclasses.dataclass(slots=True, eq=False)
class Join:
    """A joined request without a row, and its branches.

    The number of a branch is its index in `spans`. The arrival numbers of branches come just before that of `whole`.

    Attributes:
        whole: The joined request.
        template: The request of every branch, but for its tokens.
        spans: The begin and the end of each branch that has tokens, or of one empty branch where none has tokens.
        pending: The branches that wait or run, by number.
        computed: The branches whose pages are kept, by number.
        cached: How many tokens of prefix and branch were cached at the first admission of a branch, by number. The
            branch that was admitted first comes first.
        report: Where the cached part of the first branch with a miss ended, if the client asked for a report.
    """

    whole: RunningRequest
    template: Request
    spans: list[tuple[int, int]]
    pending: dict[int, RunningRequest] = dataclasses.field(default_factory=dict)
    computed: dict[int, RunningRequest] = dataclasses.field(default_factory=dict)
    cached: dict[int, int] = dataclasses.field(default_factory=dict)
    report: CacheReport | None = None

    @property
    def num_made(self) -> int:
        """How many branches were made, in order of their numbers."""
        return len(self.pending) + len(self.computed)

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
        """All branches that were made, the computed ones first."""
        return [*self.computed.values(), *self.pending.values()]

    def take_pages(self) -> list[KeptPrefix]:
        """Ends the branches and gives their pages to the caller, in order of their numbers."""
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

    def note_report(self, branch: RunningRequest, report: CacheReport) -> None:
        """Keeps the report of the first branch with a miss. Its index becomes one of the whole prompt."""
        if self.report is not None or report.first_difference is None:
            return
        start, _ = self.spans[self.number_of(branch)]
        behind = report.first_difference - self.num_prefix
        index = report.first_difference if behind < 0 else start + behind
        self.report = dataclasses.replace(report, first_difference=index)

    def first_admission(self, num_there: int, queue_s: float, report: CacheReport | None) -> FirstAdmission:
        """What the joined request, which is admitted now, reports of its admission to its client.

        Args:
            num_there: How many tokens need not be computed any more.
            queue_s: Seconds from arrival to admission.
            report: Why the cached part of what follows the branches ends where it does, if the client asked.
        """
        cached, end = list(self.cached.values()), self.whole.request.joined[-1]
        num_cached = min(cached[0], self.num_prefix) + sum(max(num - self.num_prefix, 0) for num in cached)
        num_cached += num_there - end
        if report is not None:
            if report.first_difference is not None:  # a page that misses may begin with the end of a branch
                report = dataclasses.replace(report, first_difference=max(report.first_difference, end))
            matchable = max(report.matchable_tokens, end)
            report = dataclasses.replace(self.report or report, matched_tokens=num_cached, matchable_tokens=matchable)
        return FirstAdmission(num_cached, queue_s, report)


class JoinedRequests:
    """The joined requests without a row.

    The scheduler asks `first_ready` which request to admit, and `latest_computed` which one to give up. It reports when
    a step begins, and when a branch is admitted or computed.

    Invariants: each branch that was made waits, runs or is computed. A request in `_parked` has no branches. Of any
    other request a branch waits until all are made. `ready` and `fresh` have the requests whose branches are all
    computed.

    Attributes:
        ready: The requests that can be admitted in this step.
        fresh: The requests that can be admitted in the next step, but not in this one.
    """

    def __init__(self, table: RequestTable, queue: Callable[[RunningRequest], None], totals: SchedulerTotals):
        """Starts without requests.

        Args:
            table: Has the pages and the rows.
            queue: Lets a branch wait for admission.
            totals: Counts the tokens of branches.
        """
        self._table = table
        self._queue = queue
        self._totals = totals
        self._joins: dict[RunningRequest, Join] = {}
        self._parked: set[RunningRequest] = set()
        self.ready: set[RunningRequest] = set()
        self.fresh: set[RunningRequest] = set()

    def __len__(self) -> int:
        return len(self._joins)

    def __iter__(self) -> Iterator[Join]:
        return iter(self._joins.values())

    # What the scheduler asks.

    @property
    def num_kept(self) -> int:
        """Branches whose pages are kept."""
        return sum(len(join.computed) for join in self)

    def first_ready(self) -> RunningRequest | None:
        """The earliest arrival that can be admitted in this step."""
        return _earliest(self.ready)

    def first_under_way(self, running: Iterable[RunningRequest]) -> RunningRequest | None:
        """The earliest joined request, except those of which a branch waits in the queue; `running` have rows."""
        branches_run = (r.branch_of for r in running if r.branch_of is not None)
        return _earliest({*self.ready, *self.fresh, *self._parked, *branches_run})

    def latest_computed(self) -> RunningRequest | None:
        """The latest arrival that has computed branches."""
        return max((j.whole for j in self if j.computed), key=lambda whole: whole.arrival, default=None)

    # A joined request comes and goes.

    def add(self, whole: RunningRequest) -> None:
        """Takes a joined request; `begin_step` makes its first branches."""
        request = whole.request
        template = Request(
            rid=request.rid,
            input_ids=PromptIds(request.input_ids.array[:1]),
            sampling=SamplingParams(max_new_tokens=0),
            namespace=request.namespace,
            priority=request.priority,
            return_cache_info=request.return_cache_info,
        )
        self._joins[whole] = Join(whole, template, spans(request))
        self._parked.add(whole)

    def remove(self, whole: RunningRequest) -> Join:
        """Forgets a joined request. Its branches belong to the caller now."""
        for place in (self._parked, self.ready, self.fresh):
            place.discard(whole)
        return self._joins.pop(whole)

    def park(self, whole: RunningRequest) -> list[RunningRequest]:
        """Gives up the branches of a request until `begin_step`, and returns them for the caller to end."""
        join = self._joins[whole]
        branches = join.branches
        join.pending.clear()
        join.computed.clear()
        self.ready.discard(whole)
        self.fresh.discard(whole)
        self._parked.add(whole)
        return branches

    # What the scheduler reports.

    def begin_step(self) -> None:
        """Makes the first branches of the requests that have none, in order of arrival.

        The branches that an earlier step has computed can be copied from now on.
        """
        self.ready |= self.fresh
        self.fresh.clear()
        for whole in sorted(self._parked, key=lambda whole: whole.arrival):
            join = self._joins[whole]
            self._make_branches(join, join.num_at_once)
        self._parked.clear()

    def note_admission(self, branch: RunningRequest, place: Placement) -> None:
        """A branch was admitted. Its first admission is counted, and the next branch is made."""
        join, cached = self._join_of(branch), place.num_dispatched
        number = join.number_of(branch)
        if number not in join.cached and join.whole.admission is None:
            join.cached[number] = cached
            self._totals.branch_tokens += branch.num_known - join.num_prefix
            self._totals.branch_tokens_computed += branch.num_known - max(cached, join.num_prefix)
            if branch.request.return_cache_info:
                join.note_report(branch, self._table.explain(branch, place))
        self._make_branches(join, 1)

    def keep(self, branch: RunningRequest, place: Placement) -> None:
        """A branch is computed: takes its row back and keeps its pages. Only the first branch lists the prefix."""
        join = self._join_of(branch)
        number, size = join.number_of(branch), self._table.page_size
        first_page = join.num_prefix // size if number else 0
        branch.kept = self._table.keep(place, keeps_own=True, first_page=first_page)
        join.computed[number] = join.pending.pop(number)
        if len(join.computed) == len(join.spans):
            # Larger pages are copied, so the step that writes them must come before the copies.
            (self.ready if size == 1 else self.fresh).add(join.whole)

    def _join_of(self, branch: RunningRequest) -> Join:
        assert branch.branch_of is not None, "only a branch belongs to a joined request"
        return self._joins[branch.branch_of]

    def _make_branches(self, join: Join, count: int) -> None:
        """Makes the next branches of a request, `count` at most, and lets them wait."""
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
                layout=branch_layout(whole.layout, join.num_prefix, start, end),
                branch_of=whole,
            )
            self._queue(branch)
            join.pending[number] = branch


def _earliest(requests: Iterable[RunningRequest]) -> RunningRequest | None:
    return min(requests, key=lambda running: running.arrival, default=None)
