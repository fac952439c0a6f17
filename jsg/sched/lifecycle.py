"""Where every request is, and each move from one state to another. The scheduler decides which request moves when."""

import dataclasses
from collections import OrderedDict

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.sched.bypass import BypassLedger
from jsg.sched.config import SchedulerConfig
from jsg.sched.joined import JoinedRequests
from jsg.sched.outputs import make_output
from jsg.sched.policy import make_order
from jsg.sched.positions import cached_shifts
from jsg.sched.request import FirstAdmission, Placement, RequestState, RunningRequest, new_running_request
from jsg.sched.rounds import Rounds
from jsg.sched.table import RequestTable
from jsg.sched.totals import SchedulerTotals
from jsg.sched.waiting import WaitingQueue
from jsg.sched.waits import Waits
from jsg.token_scores import TokenScores
from jsg.types import FinishReason, Request, RequestOutput
from jsg.waits import sum_of


class Lifecycle:
    """Owns every request between arrival and end. `RequestState` draws the states.

    Invariants: a request is in the place that its state names (`waiting`, `joins`, `running`, or kept by `holds` or by
    its joined request), and has only what that state allows. A branch exists only while its joined request is JOINING.

    Attributes:
        table: Rows and pages.
        waiting: The WAITING requests, in policy order.
        joins: The JOINING requests.
        running: The RUNNING requests, in order of admission.
        holds: By rid, the KEPT requests that are holds, the oldest first.
        num_holds: How many requests are holds, whether their prompt is computed yet or not.
        live: By rid, the requests that wait, join or run, without branches, in order of arrival.
        unadmitted: The requests of `live` that were never admitted and have no admitted branch, in order of arrival.
        admitted: Requests that run since the last batch was made.
        finished: Outputs that no step made.
        totals: The counters since the start.
        ledger: By how many tokens each request without branches was passed, until it ends.
        waits: What the requests of `live` that do not run wait for.
    """

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator, cache: RadixCache):
        sizes = (config.max_running, config.context_length, config.vocab_size)
        order = make_order(config.policy, cache)
        self.table = RequestTable(*sizes, allocator, cache, config.vision)
        self.totals = SchedulerTotals()
        self.waiting = WaitingQueue(order, cache)
        self.joins = JoinedRequests(self.table, self._queue, self.totals)
        self.running: list[RunningRequest] = []
        self.holds: dict[str, RunningRequest] = {}
        self.num_holds = 0
        self.live: dict[str, RunningRequest] = {}
        self.unadmitted: OrderedDict[RunningRequest, None] = OrderedDict()
        self.admitted: list[RunningRequest] = []
        self.finished: list[RequestOutput] = []
        self.ledger = BypassLedger(config.max_bypass_tokens)
        self.waits = Waits()
        self._rounds = Rounds(config.buckets.chunk)

    def add(self, request: Request, positions: np.ndarray | None, now_s: float) -> None:
        """Takes a new request. `positions` are those of its tokens, or None if they are the indices.

        Raises:
            RequestError: It has images that the engine can never run.
            QueueFullError: Live requests have all position words, or too many pixels. Nothing of the request is kept.
        """
        self.waits.advance(now_s)
        shifts = cached_shifts(request, positions)
        self.table.words.acquire(shifts)
        first = self.waiting.oldest()
        arrival = self._rounds.enter(request, None if first is None else first.arrival)
        try:
            request = self.table.vision.acquire(request)
            running = new_running_request(request, arrival, now_s)
            if positions is not None or request.media:
                running.make_room()
                running.layout = self.table.words.layout(request, running.tokens, positions)
            self._queue(running)
        except BaseException:
            self.table.forget(request, shifts)
            self._rounds.leave(request.post)
            raise
        self.ledger.add(running.arrival)
        self.live[request.rid] = running
        self.unadmitted[running] = None
        self.num_holds += request.hold

    def _queue(self, running: RunningRequest) -> None:
        """Lets a request wait for its turn, or for its branches."""
        if running.request.joined:
            running.enter(RequestState.JOINING)
            self.joins.add(running)
        else:
            running.enter(RequestState.WAITING)
            self.waiting.add(running)
        if running.branch_of is None:
            self.waits.begin(running)

    def admit(self, running: RunningRequest, place: Placement, now_s: float) -> None:
        """Lets a waiting request run at this placement."""
        self.waiting.remove(running)
        self._run(running, place)
        if running.branch_of is not None:
            self.joins.note_admission(running, place)
            self.waits.join(running.branch_of, begins=True)
        elif running.admission is None:
            report = self.table.explain(running, place) if running.request.return_cache_info else None
            num_cached = min(place.num_dispatched, running.match_limit)  # beyond it a token runs again
            self._note_first(running, FirstAdmission(num_cached, now_s - running.arrived_s, report))
        self._take_wait(running)

    def admit_joined(self, whole: RunningRequest, now_s: float) -> Placement:
        """Lets a joined request with computed branches run, in a row with their pages. The branches end.

        There must be a free row, and pages for the copies.
        """
        join = self.joins.remove(whole)
        place = self.table.admit_joined(whole, join.take_pages())
        self._run(whole, place)
        if whole.admission is None:
            report = self.table.explain(whole, place) if whole.request.return_cache_info else None
            self._note_first(whole, join.first_admission(place.num_dispatched, now_s - whole.arrived_s, report))
        self._take_wait(whole)
        return place

    def _run(self, running: RunningRequest, place: Placement) -> None:
        self.unadmitted.pop(running.whole, None)
        running.enter(RequestState.RUNNING)
        running.place = place
        running.prompt_logprobs = TokenScores()
        self.running.append(running)
        self.admitted.append(running)

    def _note_first(self, running: RunningRequest, admission: FirstAdmission) -> None:
        running.admission = admission
        self.totals.prompt_tokens += running.num_prompt
        self.totals.cached_tokens += admission.cached_tokens

    def _take_wait(self, running: RunningRequest) -> None:
        """Ends the wait of a request. Its next output reports it."""
        if waited := self.waits.end(running):
            before = running.admission or FirstAdmission()
            running.admission = dataclasses.replace(before, waited=sum_of((before.waited, waited)))

    def retract(self, running: RunningRequest) -> None:
        """Sends a running request back to wait. Its computed prefix stays in the tree while there is room for it."""
        self._give_back(running, is_retract=True)
        self._stop(running)
        self._queue(running)
        self.totals.num_retracts += 1

    def keep(self, running: RunningRequest) -> None:
        """Takes back the row of a hold or branch whose prompt is computed, but keeps its pages."""
        place = placement(running)
        self._stop(running)
        running.enter(RequestState.KEPT)
        if running.branch_of is not None:
            self.joins.keep(running, place)
            if running.branch_of in self.joins.ready or running.branch_of in self.joins.fresh:
                self.waits.join(running.branch_of, begins=False)
            return
        running.kept = self.table.keep(place, yields=True)
        if running.request.media:  # its pixels are not needed any more
            self.table.vision.release(running.request.rid)
            running.request = dataclasses.replace(running.request, media=())
        del self.live[running.request.rid]
        self.holds[running.request.rid] = running
        self.finished.append(make_output(running))

    def end_branches(self, whole: RunningRequest) -> None:
        """Gives up the branches of a joined request, which begins anew in the next step."""
        self.waits.join(whole, begins=False)
        for branch in self.joins.park(whole):
            self.end(branch)

    def end(self, running: RunningRequest, reason: FinishReason | None = None, *, distrusts: bool = False) -> None:
        """Ends a request in any state and gives back all that it has. No other code ends requests.

        Args:
            running: The request.
            reason: The reason that its last output gives. If it is None, no output is made, since a step has made it or
                nobody wants one.
            distrusts: Whether the keys and values that only this request computed may be wrong. They are evicted then.
        """
        self._take_wait(running)
        if reason is not None:
            self.finished.append(make_output(running, finish=reason))
        match running.state:
            case RequestState.WAITING:
                self.waiting.remove(running)
            case RequestState.JOINING:
                for branch in self.joins.remove(running).branches:
                    self.end(branch)
            case RequestState.RUNNING:
                self._give_back(running, distrusts=distrusts)
                self._stop(running)
            case RequestState.KEPT:
                self._drop(running)
            case state:
                raise AssertionError(f"a request that is {state.value} has nothing to give back")
        running.enter(RequestState.ENDED)
        if running.branch_of is None:
            self.live.pop(running.request.rid, None)  # a hold has left it when it was kept
            self.unadmitted.pop(running, None)
            self.num_holds -= running.request.hold
            self.ledger.end(running.arrival)
            self._rounds.leave(running.request.post)
            self.table.forget(running.request, running.shifts, distrusts=distrusts)

    def _drop(self, running: RunningRequest) -> None:
        """Gives back the pages of a KEPT request."""
        assert running.kept is not None, "a request without a row keeps its pages"
        self.table.drop(running.kept)
        running.kept = None
        if running.branch_of is None:
            del self.holds[running.request.rid]

    def _give_back(self, running: RunningRequest, *, distrusts: bool = False, is_retract: bool = False) -> None:
        """Takes back the row and pages of a running request, and shares its computed prefix unless it distrusts it.

        A row that still waits for copies has nothing else to share.
        """
        place = placement(running)
        if not distrusts and place.row not in self.table.copies:
            most = running.num_known - (self.table.slots is None)
            self.table.share(running, place, min(place.num_dispatched, most))
            is_repeated = running.request.turn_end in (0, running.num_prompt)
            if is_retract or is_repeated or not running.num_output:
                self.table.snapshot(place, is_last=True)
        self.table.release(place, distrusts=distrusts)

    def _stop(self, running: RunningRequest) -> None:
        """Forgets where a request runs. Its row and pages have another owner now."""
        running.place = None
        self.running.remove(running)
        self.admitted = [other for other in self.admitted if other is not running]


def placement(running: RunningRequest) -> Placement:
    """Where a running request lives."""
    assert running.place is not None, "only a running request has a placement"
    return running.place
