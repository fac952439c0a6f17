"""What runs next: waiting and running requests become one batch for each step.

A step is planned before the results of the step before it are known (overlap). So a plan uses only what is certain: the
number of tokens that each request will have, but not the tokens. All decisions are functions of the requests and their
order, and no comparison reads a clock, so a recorded trace replays exactly.

A chunk enters the radix tree when it is planned, and not when it has run. A layer writes the keys and values of all
tokens of a step before any of them attends, so even a request in the same step may read them. Requests that share an
uncached prefix therefore compute it once, without waiting for each other.
"""

import itertools
import logging
from collections.abc import Mapping

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.cache.windows import WindowGroup
from jsg.errors import GrammarError, QueueFullError, RequestError
from jsg.sched.admission import AdmissionEstimate
from jsg.sched.batch import Batch, BatchEntry, Proposal, StepResult
from jsg.sched.batching import Batcher
from jsg.sched.config import SchedulerConfig, check_positions, check_request
from jsg.sched.drafts.adding import add_drafts
from jsg.sched.drafts.gate import Gate
from jsg.sched.lifecycle import Lifecycle, placement
from jsg.sched.outputs import append_tokens
from jsg.sched.request import Placement, RequestState, RunningRequest
from jsg.sched.table import RequestTable, TreePages
from jsg.types import FinishReason, FinishType, Request, RequestOutput
from jsg.waits import WaitReason

logger = logging.getLogger(__name__)

MAX_TREE_WORK = 30_000
"""The work on the radix tree, in visited nodes, after which a step admits nobody any more: some 10 ms."""
FAILED = "the engine failed this request; its log has the cause"


class Scheduler:
    """Decides which requests wait, run and end. `Lifecycle` carries out the decisions and has the invariants.

    Invariant: a request with a step in flight is not retracted.

    Attributes:
        table: Rows and pages.
        running: The requests that run, in order of admission.
        waiting: The queue of waiting requests.
        joins: The joined requests that have no row yet.
        holds: By rid, the requests whose prompt is held, the oldest first.
        totals: The counters since the start.
        gate: Decides which drafts are worth it.
    """

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator, cache: RadixCache):
        self._requests = requests = Lifecycle(config, allocator, cache)
        self.table = requests.table
        self.running = requests.running
        self.waiting = requests.waiting
        self.joins = requests.joins
        self.holds = requests.holds
        self.totals = requests.totals
        self.gate = Gate(config.buckets)
        self._config = config
        self._estimate = AdmissionEstimate(config.conservativeness)
        self._batcher = Batcher(config.buckets, self.table)
        self._num_in_flight = 0

    # Requests in and out.

    def add(self, request: Request, now_s: float = 0.0) -> None:
        """Queues a request.

        Raises:
            RequestError: It can never run, or its rid is in use.
            QueueFullError: Too many requests wait, or are held.
        """
        if request.rid in self._requests.live or request.rid in self.holds:
            raise RequestError(f"rid must be unique among live requests, but {request.rid!r} is in use", param="rid")
        if self.num_waiting >= self._config.max_queued:
            raise QueueFullError(f"{self.num_waiting} requests wait already, the most --max-queued-requests allows")
        if request.hold and self._requests.num_holds >= (limit := self._config.max_holds):
            raise QueueFullError(f"at most {limit} prompts may be held, and so many are; end some of them")
        check_request(request, self._config, self.table)
        self._requests.add(request, check_positions(request, self._config.context_length), now_s)

    def abort(self, rid: str) -> None:
        """Ends a request in any state and frees what it has. Ignores an unknown rid: that request may have ended."""
        reason = FinishReason(FinishType.ABORT, message="aborted")
        running = self._requests.live.get(rid)
        if running is not None:
            self.totals.num_aborted += 1
            self._requests.end(running, reason)
        elif rid in self.holds:  # this is the normal end of a hold
            self._requests.end(self.holds[rid], reason)

    def expire(self, arrived_before_s: float) -> list[str]:
        """Ends the requests that arrived before that time and were never admitted, without output; returns their rids.

        A joined request counts as admitted when its first branch is. The call takes time for the ended requests only.
        Times are those of `add`, which must not go backwards.
        """
        expired = []
        unadmitted = self._requests.unadmitted
        while unadmitted and (oldest := next(iter(unadmitted))).arrived_s < arrived_before_s:
            self._requests.end(oldest)
            expired.append(oldest.request.rid)
        self.totals.num_expired += len(expired)
        return expired

    def _end_holds(self, num_units: int, pool: RequestTable | TreePages | WindowGroup | None = None) -> bool:
        """Ends holds, the oldest first, until so many pages, or parts of a window, are available.

        If even all are not enough, it ends none.
        """
        pool = pool or self.table
        if num_units > pool.num_yielding:
            return False
        wanted = pool.num_available + num_units
        while pool.num_available < wanted:
            self.break_holds(1)
        return True

    def break_holds(self, count: int) -> None:
        """Ends the `count` oldest holds."""
        for running in [*itertools.islice(self.holds.values(), count)]:
            self.totals.num_holds_broken += 1
            self._requests.end(running, FinishReason(FinishType.STOP))

    @property
    def num_waiting(self) -> int:
        """How many requests wait. A joined request waits until it has a row, and its branches do not count."""
        return len(self._requests.waits)

    @property
    def waits(self) -> Mapping[WaitReason, int]:
        """How many of them wait for each reason, as the last step has found."""
        return self._requests.waits.counts

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, runs, or has an output that was not taken. A held prompt needs no steps."""
        return not self._requests.live and not self._requests.finished

    # Planning.

    def plan(
        self, now_s: float = 0.0, proposals: Mapping[str, Proposal] | None = None, max_rows: int = 0
    ) -> Batch | None:
        """The next step; None if nothing can run now, or before the step in flight is committed.

        Args:
            now_s: The time, from which the waiting time of a request is computed.
            proposals: By rid, tokens that may follow, for requests with nothing in flight. The step takes as many of
                them as it has room for.
            max_rows: The most rows of logits of a step with proposals. A full batch always has room.
        """
        waits = self._requests.waits
        waits.advance(now_s)
        if not self.running and not len(self.waiting) and not len(self.joins):
            waits.note(WaitReason.NEXT_STEP, {})
            self._estimate.on_idle()
            return None
        self.joins.begin_step()
        self._estimate.step()
        self.table.begin_step([placement(running) for running in self.running], self._config.buckets.chunk)
        if not self._make_room_to_decode():
            waits.note(WaitReason.PAGES, {})
            return None
        decoding = self._plan_decode()
        budget = self._config.buckets.chunk - sum(entry.num_new for entry in decoding)
        if proposals:
            # Within the round, branches are made of the joined requests that wait.
            to_come = self._config.max_running if len(self.joins) else len(self.waiting)
            most_entries = min(self._config.max_running, len(self.running) + to_come)
            budget -= add_drafts(
                decoding, proposals, self.table, self._config.buckets, self.gate, most_entries, max_rows
            )
        chunks = self._plan_prefill(budget, now_s)
        while not decoding and not chunks and (self.running or len(self.joins)):
            if self._num_in_flight or self.joins.fresh or not self._give_way():
                return None
            chunks = self._plan_prefill(budget, now_s)
        if not decoding and not chunks:
            return None
        batch = self._batcher.make(decoding, chunks, self._requests.admitted)
        self._requests.admitted.clear()
        self._num_in_flight += 1
        return batch

    def take_finished(self) -> list[RequestOutput]:
        """Takes the outputs that no step made: of aborted requests, and of wholly cached ones that generate nothing."""
        finished = self._requests.finished.copy()
        self._requests.finished.clear()
        return finished

    def _make_room_to_decode(self) -> bool:
        """Takes memory from other requests until every request that decodes has room for a token.

        False if a request must be retracted while a step is in flight, which has to be committed first.
        """
        while len(self.running) > self.table.num_available:  # otherwise there is a page for each request
            needed = sum(self.table.needs_page(r.place) for r in self.running if r.place and _decodes(r))
            if needed <= self.table.num_available:
                return True
            if not self._give_way():
                return False
        return True

    def _give_way(self) -> bool:
        """Ends holds until a page is free, or else takes memory from the latest arrival that has some.

        That is a joined request with computed branches or a running request. False if it may have a step in flight.
        """
        if self._end_holds(1):
            return True
        whole = self.joins.latest_computed()
        victim = max(self.running, key=lambda r: r.arrival, default=None)
        if whole is not None and (victim is None or whole.arrival > victim.arrival):
            self._requests.end_branches(whole)
            return True
        if self._num_in_flight or victim is None:
            return False
        self._requests.retract(victim)
        self._estimate.on_retract(self.running)
        return True

    def _plan_decode(self) -> list[BatchEntry]:
        """One token for every request that decodes, after those that its state lacks."""
        entries = []
        for running in self.running:
            place = placement(running)
            if place.is_prefilling or running.num_to_come <= 0:
                continue
            start, index = place.num_applied, running.num_output + place.num_in_flight
            place.num_in_flight += 1
            entry = BatchEntry(
                running,
                place,
                start,
                num_new=place.num_again + 1,
                write_start=place.num_dispatched,
                output_index=index,
                from_device=place.device_has_last,
                samples=True,
                state_source=place.state.source,
                state_slot=place.state.slot,
            )
            place.device_has_last = True
            place.num_again = 0
            entries.append(entry)
        self.table.grow_by_one([entry.place for entry in entries])
        return entries

    def _plan_prefill(self, budget: int, now_s: float) -> list[BatchEntry]:
        """Plans chunks of at most `budget` tokens: first of requests that were put off, then of begun prompts by age.

        Then requests are admitted: first joined requests whose branches are computed, since they need little more, and
        then others in policy order. But a request that was passed by more than the bound comes before all later
        arrivals. While it cannot be admitted, no later arrival gets a chunk, so that memory is left for it. Only
        requests that were put off still do, since they need no memory.

        If the radix tree is much work, because its paths have many nodes or many requests wait on them, fewer are
        admitted in a step, so that no step waits long for its plan.
        """
        self._estimate.promised_pages = None
        most_work = self.table.tree_work + MAX_TREE_WORK
        self.table.vision.begin_round()
        chunks: list[BatchEntry] = []
        begun = [r for r in self.running if r.place and r.place.is_prefilling]
        begun.sort(key=lambda r: (not r.is_put_off, r.arrival))
        while (overdue := self._overdue()) is not None:
            while begun and (begun[0].is_put_off or begun[0].arrival < overdue.arrival):
                budget -= self._plan_chunk(begun.pop(0), budget, chunks)
            why = self._step_is_full(budget, most_work) or self._admit(overdue, now_s)
            if why is not None:
                self._requests.waits.note(WaitReason.OVERDUE, {overdue: why})
                return chunks
            budget -= self._plan_chunk(overdue, budget, chunks)
        for running in begun:
            budget -= self._plan_chunk(running, budget, chunks)
        self._admit_others(budget, most_work, now_s, chunks)
        return chunks

    def _admit_others(self, budget: int, most_work: int, now_s: float, chunks: list[BatchEntry]) -> None:
        """Admits requests and plans their first chunks, and notes for what the rest waits."""
        to_admit, passed = self._config.max_prefill_tokens, list[RunningRequest]()
        why: WaitReason | None = None
        while self.joins.ready or len(self.waiting):
            if (why := self._step_is_full(budget, most_work, to_admit)) is not None:
                break
            first = self.joins.first_ready() or self.waiting.first()
            if first is None:
                break
            why = self._admit(first, now_s)
            if why is WaitReason.STATE:  # later arrivals need not wait with it
                self.waiting.remove(first)
                passed.append(first)
                why = None
            elif why is not None:
                break
            to_admit -= first.num_known - placement(first).num_dispatched if first.place else 0
            budget -= self._plan_chunk(first, budget, chunks)
        for running in passed:
            self.waiting.add(running)
        self._requests.waits.note(why or WaitReason.NEXT_STEP, dict.fromkeys(passed, WaitReason.STATE))

    def _step_is_full(self, budget: int, most_work: int, to_admit: int = 1) -> WaitReason | None:
        """Why the step that is planned can admit nobody any more; None if it can."""
        if budget <= 0:
            return WaitReason.STEP_TOKENS
        if to_admit <= 0:
            return WaitReason.PREFILL_TOKENS
        return WaitReason.TREE_WORK if self.table.tree_work > most_work else None

    def _overdue(self) -> RunningRequest | None:
        """The earliest arrival without a row, if more tokens than the bound have passed it."""
        under_way = self.joins.first_under_way(self.running) if len(self.joins) else None
        candidates = [r for r in (self.waiting.oldest(), under_way) if r is not None]
        oldest = min(candidates, key=lambda r: r.arrival, default=None)
        return oldest if oldest is not None and self._requests.ledger.is_overdue(oldest.whole.arrival) else None

    def _admit(self, running: RunningRequest, now_s: float) -> WaitReason | None:
        """Gives a request a row with its cached prefix, if there should be memory for the rest; or says what it lacks.

        It lacks a STATE if this step makes one with which the next step can admit it.
        """
        if not self.table.num_free_rows:
            return WaitReason.ROWS
        if running.state is RequestState.JOINING:
            if running not in self.joins.ready:
                return WaitReason.BRANCHES
            num_copied = self.table.num_copied_pages(running.request)
            if not self._have_room(num_copied + self._expected_pages(running, running.request.joined[-1])):
                return WaitReason.PAGES
            place = self._requests.admit_joined(running, now_s)
        else:
            place = self.table.admit(running)
            if place is None:
                return WaitReason.STATE
            if (why := self._lacks(running, place)) is not None:
                self.table.release(place)
                return why
            self._requests.admit(running, place, now_s)
        assert self._estimate.promised_pages is not None, "room was looked for"
        self._estimate.promised_pages += self._expected_pages(running, place.num_dispatched)
        if place.num_dispatched == running.num_known == running.match_limit:
            self._end_prompt(running)
        return None

    def _lacks(self, running: RunningRequest, place: Placement) -> WaitReason | None:
        """What a request lacks beside its row and its cached prefix."""
        if self.table.vision.must_wait(running.request, min(place.num_dispatched, running.num_known - 1)):
            return WaitReason.PICTURES
        if not self._have_room(self._expected_pages(running, place.num_dispatched)):
            return WaitReason.PAGES
        return None if self._have_parts(running, place) else WaitReason.WINDOWS

    def _have_room(self, num_pages: int) -> bool:
        """Whether there are so many pages beside those that running requests will need. Ends holds to free pages.

        A request needs the parts in windows of few of its pages at a time: see `_have_parts`.
        """
        if self._estimate.promised_pages is None:
            expected = (self._expected_pages(r, placement(r).num_dispatched) for r in self.running)
            self._estimate.promised_pages = sum(expected)
        pages = self.table.tree_pages
        missing = num_pages + self._estimate.promised_pages - pages.num_available
        if missing <= 0 or not (self.running or self.joins.num_kept):
            return True
        return self._end_holds(missing, pages)

    def _have_parts(self, running: RunningRequest, place: Placement) -> bool:
        """Whether each window has parts enough for a request beside those that run. Ends holds to free some.

        The request needs them for a chunk of its prompt at least, and all of them for the tokens that are expected.
        """
        if not self.running:
            return True
        chunk = min(self._config.buckets.chunk, max(running.num_known - place.num_dispatched, 0))
        rows = [(running, place, chunk), *((other, placement(other), 0) for other in self.running)]
        for group in self.table.windows:
            growth = (group.growth(p.num_dispatched, self._expected_tokens(r, p.num_dispatched), n) for r, p, n in rows)
            missing = sum(growth) - group.num_available
            if missing > 0 and not self._end_holds(missing, group):
                return False
        return True

    def _expected_pages(self, running: RunningRequest, num_there: int) -> int:
        """How many pages a request is expected to need after its first `num_there` tokens."""
        return self.table.pages_for(self._expected_tokens(running, num_there))

    def _expected_tokens(self, running: RunningRequest, num_there: int) -> int:
        return max(running.num_known - num_there, 0) + int(running.num_to_come * self._estimate.fraction)

    def _plan_chunk(self, running: RunningRequest, budget: int, chunks: list[BatchEntry]) -> int:
        """Appends the next chunk of a prompt, as far as budget and memory allow; returns its number of tokens."""
        place = running.place
        if place is None:
            return 0
        start = min(place.num_applied, running.num_known - 1)
        num_again = place.num_dispatched - start  # a request that was put off has its pages already
        is_known = num_again > place.num_again
        point = next((end for end in place.state.points if end > place.num_dispatched), running.num_known)
        if budget < num_again:
            return 0
        wanted = min(max(point - start, num_again), budget)
        if (lacking := wanted - num_again - self.table.room(place)) > 0:
            self._end_holds(self.table.pages_for(lacking))
        num_new = self.table.vision.reserve(running, place, start, min(wanted, num_again + self.table.room(place)))
        if num_new <= 0:
            return 0
        if self._estimate.promised_pages is not None:
            self._estimate.promised_pages -= self.table.pages_for(num_new - num_again)
        self.table.grow(place, num_new - num_again, running.request.namespace)
        write_start = max(start + num_again, self.table.share(running, place, start + num_new))
        place.is_prefilling = place.num_dispatched < running.num_known
        samples = not place.is_prefilling and running.request.sampling.max_new_tokens > 0
        place.num_in_flight += samples
        self._requests.ledger.record(running.whole.arrival, num_new)
        states, place.num_again = (place.state.source, place.state.slot), 0
        self.table.snapshot(place)
        chunks.append(
            BatchEntry(
                running,
                place,
                start,
                num_new,
                write_start,
                output_index=running.num_output,
                samples=samples,
                ends_prefill=not place.is_prefilling,
                is_known=is_known,
                state_source=states[0],
                state_slot=states[1],
                vision_ids=self.table.vision.ids(running, start, num_new),
            )
        )
        return num_new

    # Results.

    def commit(self, batch: Batch, result: StepResult) -> list[RequestOutput]:
        """Takes the tokens of a step: advances its requests and ends those that are done.

        An error while the output of one request is made ends that request only. A broken invariant ends the engine.

        Returns:
            One output for each request that has something new.
        """
        self._num_in_flight -= 1
        for running in result.failed:
            error = result.reasons.get(running.request.rid)
            self._fail(running, str(error or FAILED), blames_grammar=isinstance(error, GrammarError))
        outputs: list[RequestOutput] = []
        for index, (entry, row) in enumerate(zip(batch.entries, batch.first_rows, strict=True)):
            if entry.is_stale:
                continue
            running = entry.running
            if result.prompt_logprobs:
                running.prompt_logprobs.parts += result.prompt_logprobs.get(index, ())
            if entry.samples:
                self._take_tokens(entry, index, row, result, outputs)
            elif entry.ends_prefill:
                self._end_prompt(running)
        return outputs + self.take_finished()

    def _take_tokens(
        self, entry: BatchEntry, index: int, row: int, result: StepResult, outputs: list[RequestOutput]
    ) -> None:
        """Adds the tokens that were sampled in the rows of an entry to its request, and takes back wrong drafts."""
        running, place = entry.running, entry.place
        tokens = [result.token_ids[row]]
        if entry.num_drafts:
            tokens = entry.taken(result.token_ids[row : row + entry.num_rows])
        is_broken = tokens[-1] < 0
        if is_broken:
            tokens.pop()
        if entry.num_drafts:
            num_wrong = entry.num_drafts - max(len(tokens) - (not is_broken), 0)
            self.table.shrink(place, num_wrong)
            place.num_again *= num_wrong > 0
        place.num_in_flight -= 1
        try:
            output = append_tokens(running, tokens, index, row, result, self._config.eos_token_ids) if tokens else None
        except AssertionError:
            raise
        except Exception:
            logger.exception("the output of a request could not be made")
            self._fail(running, FAILED)
            return
        if output is not None:
            outputs.append(output)
            if output.finish is not None:
                self._requests.end(running)
        if is_broken:
            self._fail(running, "the model's logits were not finite", distrusts=True)

    def _end_prompt(self, running: RunningRequest) -> None:
        """Keeps the pages of a request that generates nothing and whose prompt is computed, or ends it."""
        if running.request.hold or running.branch_of is not None:
            self._requests.keep(running)
        else:
            self._requests.end(running, FinishReason(FinishType.LENGTH))

    def _fail(
        self, running: RunningRequest, message: str, *, blames_grammar: bool = False, distrusts: bool = False
    ) -> None:
        """Ends a request with an error, unless it has ended since. The error of a branch ends its joined request.

        With `distrusts`, keys and values that only this request computed do not stay cached.
        """
        whole = running.whole
        if whole.state not in (RequestState.KEPT, RequestState.ENDED):
            self.totals.num_failed += 1
            reason = FinishReason(FinishType.ERROR, message=message, blames_grammar=blames_grammar)
            self._requests.end(whole, reason, distrusts=distrusts)


def _decodes(running: RunningRequest) -> bool:
    return not placement(running).is_prefilling and running.num_to_come > 0
