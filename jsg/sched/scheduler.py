"""What runs next: the waiting queue, the running requests and the pages they share become one batch per step.

A step is planned before the results of the step before it are known (overlap), so a plan only uses what is certain:
how many tokens each request will have, not which. Everything decided here is a function of requests and their order;
there is no clock in any comparison, so a recorded trace replays exactly.

Prefixes are put into the radix tree when their chunk is planned, not when it has run: a layer writes the keys and
values of all tokens of a step before any of them attends, so even a request in the same step may read them. Requests
that share an uncached prefix therefore share one computation without waiting for each other.
"""

import logging
from collections.abc import Mapping

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.errors import QueueFullError, RequestError
from jsg.sched.admission import AdmissionEstimate
from jsg.sched.buckets import Phase
from jsg.sched.bypass import BypassLedger
from jsg.sched.config import SchedulerConfig, check_positions, check_request
from jsg.sched.drafts import add_drafts
from jsg.sched.groups import PrefixGrouping
from jsg.sched.holds import Holds
from jsg.sched.joined import Join, Joins
from jsg.sched.outputs import make_output, stop_reason
from jsg.sched.policy import make_policy
from jsg.sched.positions import cached_shifts, media_layout
from jsg.sched.records import (
    Batch,
    BatchEntry,
    Placement,
    Proposal,
    RunningRequest,
    SchedulerTotals,
    StepResult,
    new_running_request,
)
from jsg.sched.table import RequestTable
from jsg.sched.waiting import WaitingQueue
from jsg.types import FinishReason, FinishType, Request, RequestOutput

logger = logging.getLogger(__name__)

FAILED = "the engine failed this request; its log has the cause"


class Scheduler:
    """Owns every request between arrival and last token.

    Invariants: a request waits (has a watch), runs (has a placement), is held, or is in `joins` while its parts do one
    of these; `table.check_integrity` holds between calls; a request with a step in flight is not retracted.
    """

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator, cache: RadixCache):
        sizes = (config.max_running, config.context_length, config.vocab_size)
        self.table = RequestTable(*sizes, allocator, cache, config.vision)
        self.waiting = WaitingQueue(policy := make_policy(config.policy, config.seed), cache)
        self.running: list[RunningRequest] = []
        self.holds = Holds(self.table, config.max_holds)
        self.totals = SchedulerTotals()
        self.joins = Joins(self.table.words, self.waiting.add, cache.page_size, makes_all=policy.depends_on_others)
        self._config = config
        self._live: dict[str, RunningRequest] = {}
        self._num_arrived = 0
        self._ledger = BypassLedger(config.max_bypass_tokens)
        self._estimate = AdmissionEstimate(config.conservativeness)
        self._grouping = PrefixGrouping(cache.page_size)
        self._finished: list[RequestOutput] = []
        self._admitted: list[RunningRequest] = []
        self._num_in_flight = 0

    # Requests in and out.

    def add(self, request: Request, now_s: float = 0.0) -> None:
        """Queues a request.

        Raises:
            RequestError: It can never run, or its rid is in use.
            QueueFullError: Too many wait, or are held.
        """
        if request.rid in self._live or request.rid in self.holds:
            raise RequestError(f"rid must be unique among live requests, but {request.rid!r} is in use", param="rid")
        if self.num_waiting >= self._config.max_queued:
            raise QueueFullError(f"{self.num_waiting} requests wait already, the most --max-queued-requests allows")
        if request.hold:
            self.holds.check_room()
        check_request(request, self._config, self.table)
        positions = check_positions(request, self._config.context_length)
        shifts = cached_shifts(request, positions)
        self.table.words.acquire(shifts)
        try:
            request = self.table.vision.hold(request)
            running = new_running_request(request, self._num_arrived + len(request.joined), now_s)
            if positions is not None:
                num_keyed = request.joined[0] if request.joined else running.num_prompt
                running.layout = self.table.words.layout(running.tokens, positions, num_keyed)
            elif request.media:
                running.layout = media_layout(running.tokens, request.media)
            if request.joined:
                self.joins.add(running)
            else:
                self.waiting.add(running)
        except BaseException:  # nothing is kept of a request that could not be added
            self.table.forget(request, shifts)
            raise
        self._num_arrived = running.arrival + 1
        self._live[request.rid] = running
        self.holds.num_to_come += request.hold

    def abort(self, rid: str) -> None:
        """Ends a request wherever it is and frees what it holds. Unknown rids are ignored: it may just have ended."""
        running = self._live.get(rid)
        if running is not None:
            self.totals.num_aborted += 1
            self._finish(running, FinishReason(FinishType.ABORT, message="aborted"))
        elif rid in self.holds:
            self._end_hold(rid, FinishReason(FinishType.ABORT, message="aborted"))

    def expire(self, arrived_before_s: float) -> list[str]:
        """Takes out the requests that arrived before that time and were never admitted; returns their rids.

        No output is made of them. Takes time for those only. Times are those of `add`, which must not go backwards.
        """
        expired = []
        while (oldest := self.waiting.oldest_unadmitted()) is not None and oldest.arrived_s < arrived_before_s:
            self._leave(oldest.part_of or oldest)
            expired.append(oldest.request.rid)
        self.totals.num_expired += len(expired)
        return expired

    @property
    def num_waiting(self) -> int:
        """Requests that wait. A joined one does while its parts wait or run, and they are none of their own."""
        return len(self._live) - sum(running.part_of is None for running in self.running)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs, or has an output that was not taken. What is held needs no steps."""
        return not self._live and not self._finished

    # Planning.

    def plan(
        self, now_s: float = 0.0, proposals: Mapping[str, Proposal] | None = None, max_rows: int = 0
    ) -> Batch | None:
        """The next step; None when nothing can run, or nothing before the step in flight is committed.

        Args:
            now_s: For the report of how long a request has waited.
            proposals: By rid, tokens that may follow; of requests with nothing in flight. As many of them are taken as
                there is room for.
            max_rows: Rows of logits that a step with proposals may have; a full batch always has room.
        """
        if not self.running and not len(self.waiting) and not len(self.joins):
            self._estimate.on_idle()
            return None
        self.joins.begin_step()
        self._estimate.step()
        if not self._make_room_to_decode():
            return None
        decoding = self._plan_decode()
        budget = self._config.buckets.chunk - len(decoding)
        if proposals:
            to_come = self._config.max_running if len(self.joins) else len(self.waiting)  # parts are made meanwhile
            most_entries = min(self._config.max_running, len(self.running) + to_come)
            budget -= add_drafts(decoding, proposals, self.table, self._config.buckets, most_entries, max_rows)
        chunks = self._plan_prefill(budget, now_s)
        while not decoding and not chunks and (self.running or len(self.joins)):
            if self._num_in_flight or self.joins.has_fresh or not self._give_way():
                return None
            chunks = self._plan_prefill(budget, now_s)
        return self._make_batch(decoding, chunks) if decoding or chunks else None

    def take_finished(self) -> list[RequestOutput]:
        """Outputs that no step made: of requests that were aborted, or are wholly cached and generate nothing."""
        finished, self._finished = self._finished, []
        return finished

    def _make_room_to_decode(self) -> bool:
        """Takes memory away from others until every request that decodes has room for a token.

        False when a request must be retracted while a step is in flight: it has to be committed first.
        """
        while len(self.running) > self.table.num_available_pages:  # else there is one for each
            needed = sum(self.table.needs_page(r.place) for r in self.running if r.place and _decodes(r))
            if needed <= self.table.num_available_pages:
                return True
            if not self._give_way():
                return False
        return True

    def _give_way(self) -> bool:
        """Ends holds until that frees a page; else takes memory from the latest arrival: held parts, or what runs.

        False where that is a request that may have a step in flight.
        """
        if count := self.holds.num_to_end(1):
            self.break_holds(count)
            return True
        join = self.joins.latest_holder()
        victim = max(self.running, key=lambda r: r.arrival, default=None)
        if join is not None and (victim is None or join.whole.arrival > victim.arrival):
            self._end_parts(join)
            self.joins.park(join)
            return True
        if self._num_in_flight or victim is None:
            return False
        self._retract(victim)
        return True

    def _plan_decode(self) -> list[BatchEntry]:
        """One token for every request that decodes."""
        entries = []
        for running in self.running:
            place = _place(running)
            if place.is_prefilling or running.num_to_come <= 0:
                continue
            start, index = place.num_dispatched, running.num_output + place.num_in_flight
            place.num_in_flight += 1
            entry = BatchEntry(
                running,
                place,
                start,
                num_new=1,
                write_start=start,
                output_index=index,
                from_device=place.device_has_last,
                samples=True,
            )
            place.device_has_last = True
            entries.append(entry)
        self.table.grow_by_one([entry.place for entry in entries])
        return entries

    def _plan_prefill(self, budget: int, now_s: float) -> list[BatchEntry]:
        """Chunks of at most `budget` tokens: who was put off, begun prompts by age, then waiting ones in policy order.

        Joined requests whose parts are there go before those that wait: they need little more. But what was passed by
        more than the bound comes before everything that arrived after it, and while it cannot be admitted nothing that
        arrived after it gets a chunk: memory is left for it. Who was put off needs none.
        """
        self._estimate.promised_pages = None
        self.table.vision.begin_round()
        chunks: list[BatchEntry] = []
        begun = [r for r in self.running if r.place and r.place.is_prefilling]
        begun.sort(key=lambda r: (not r.is_put_off, r.arrival))
        while (overdue := self._overdue()) is not None:
            while begun and (begun[0].is_put_off or begun[0].arrival < overdue.arrival):
                budget -= self._plan_chunk(begun.pop(0), budget, chunks)
            if budget <= 0 or not self._admit(overdue, now_s):
                return chunks
            budget -= self._plan_chunk(overdue, budget, chunks)
        for running in begun:
            budget -= self._plan_chunk(running, budget, chunks)
        self.waiting.reorder()
        to_admit = self._config.max_prefill_tokens
        while budget > 0 and to_admit > 0:
            ready = self.joins.first_ready()
            first = self.waiting.first() if ready is None else ready.whole
            if first is None or not self._admit(first, now_s):
                break
            to_admit -= first.num_known - _place(first).num_dispatched if first.place else 0
            budget -= self._plan_chunk(first, budget, chunks)
        return chunks

    def _overdue(self) -> RunningRequest | None:
        oldest, ready = self.waiting.oldest(), self.joins.first_ready()
        if ready is not None and (oldest is None or ready.whole.arrival < oldest.arrival):
            oldest = ready.whole
        if self._live:  # in order of arrival
            first = next(iter(self._live.values()))
            self._ledger.forget_before(first.arrival - len(first.request.joined))
        return oldest if oldest is not None and self._ledger.is_overdue(oldest.arrival) else None

    def _admit(self, running: RunningRequest, now_s: float) -> bool:
        """Gives a request a row and what is cached of it, if memory for the rest can be expected; else False."""
        if not self.table.num_free_rows:
            return False
        if running in self.joins:
            num_copied = self.table.num_joined_pages(running.request)[1]
            if not self._have_room(num_copied + self._expected_pages(running, running.request.joined[-1])):
                return False
            join = self.joins.remove(running)
            running.place = place = self.table.admit_joined(running, join.prefixes)
            if running.cached_tokens is None:
                self._note_first_admission(running, join.num_cached, now_s)
                running.cache_report = join.cache_report() if running.request.return_cache_info else None
        else:
            place = self.table.admit(running)
            must_wait = self.table.vision.must_wait(running.request, place.num_dispatched)
            if must_wait or not self._have_room(self._expected_pages(running, place.num_dispatched)):
                self.table.release(place)
                return False
            self.waiting.remove(running)
            running.place = place
            if running.part_of is not None:
                self._note_part(self.joins[running.part_of], running, place)
            elif running.cached_tokens is None:
                self._note_first_admission(running, place.num_dispatched, now_s)
                if running.request.return_cache_info:
                    running.cache_report = self.table.explain(running, place)
        assert self._estimate.promised_pages is not None, "room was looked for"
        self._estimate.promised_pages += self._expected_pages(running, place.num_dispatched)
        running.prompt_logprobs.clear()
        self.running.append(running)
        self._admitted.append(running)
        if place.num_dispatched == running.num_known:
            self._end_prompt(running)
        return True

    def _have_room(self, num_pages: int) -> bool:
        """Whether so many pages can be had beside those that running requests will need; ends holds for it."""
        if self._estimate.promised_pages is None:
            expected = (self._expected_pages(r, _place(r).num_dispatched) for r in self.running)
            self._estimate.promised_pages = sum(expected)
        missing = num_pages + self._estimate.promised_pages - self.table.num_available_pages
        if missing <= 0 or not (self.running or self.joins.num_held):
            return True
        count = self.holds.num_to_end(missing)
        self.break_holds(count)
        return count > 0

    def _note_first_admission(self, running: RunningRequest, num_cached: int, now_s: float) -> None:
        running.cached_tokens = num_cached
        running.queue_s = now_s - running.arrived_s
        self.totals.prompt_tokens += running.num_prompt
        self.totals.cached_tokens += num_cached

    def _note_part(self, join: Join, part: RunningRequest, place: Placement) -> None:
        """A part was admitted: its branch counts if that is the first time, and the next part is made."""
        if join.prefix_cached is None:
            for other in join.parts.values():
                self.waiting.note_admitted(other)
        if join.note_admission(part, place.num_dispatched, self.totals) and part.request.return_cache_info:
            join.note_report(part, self.table.explain(part, place))
        self.joins.make_parts(join, 1)

    def _expected_pages(self, running: RunningRequest, num_held: int) -> int:
        """Pages a request is expected to need beyond those that hold its first tokens."""
        remaining = max(running.num_known - num_held, 0)
        return self.table.pages_for(remaining + int(running.num_to_come * self._estimate.fraction))

    def _plan_chunk(self, running: RunningRequest, budget: int, chunks: list[BatchEntry]) -> int:
        """Appends the next chunk of a prompt, as far as budget and memory allow; returns its tokens."""
        place = running.place
        if place is None:
            return 0
        start = min(place.num_dispatched, running.num_known - 1)
        num_again = place.num_dispatched - start  # of a request that was put off; its pages are there
        wanted = min(running.num_known - start, budget)
        if (lacking := wanted - num_again - self.table.room(place)) > 0:
            self.break_holds(self.holds.num_to_end(self.table.pages_for(lacking)))
        num_new = self.table.vision.reserve(running, place, start, min(wanted, num_again + self.table.room(place)))
        if num_new <= 0:
            return 0
        if self._estimate.promised_pages is not None:
            self._estimate.promised_pages -= self.table.pages_for(num_new - num_again)
        self.table.grow(place, num_new - num_again)
        write_start = max(start + num_again, self.table.share(running, place, start + num_new))
        place.is_prefilling = place.num_dispatched < running.num_known
        samples = not place.is_prefilling and running.request.sampling.max_new_tokens > 0
        place.num_in_flight += samples
        self._ledger.record(running.arrival, num_new)
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
                vision_ids=self.table.vision.ids(running, start, num_new),
            )
        )
        return num_new

    def _make_batch(self, decoding: list[BatchEntry], chunks: list[BatchEntry]) -> Batch:
        """One step of all of them, those with one token first."""
        short = [chunk for chunk in chunks if chunk.num_new == 1]
        long = [chunk for chunk in chunks if chunk.num_new > 1]
        num_drafts = sum(entry.num_drafts for entry in decoding)
        if num_drafts:
            long = [entry for entry in decoding if entry.num_drafts] + long
            decoding = [entry for entry in decoding if not entry.num_drafts]
        num_singles = len(decoding) + len(short)
        is_decode = not long and not any(chunk.scores_prompt or chunk.vision_ids is not None for chunk in short)
        num_tokens = num_singles + sum(chunk.num_new for chunk in long)
        if num_drafts:
            num_rows = num_singles + len(long) + num_drafts
            key = self._config.buckets.pick_drafts(num_tokens, num_rows)
        else:
            key = self._config.buckets.pick(Phase.DECODE if is_decode else Phase.EXTEND, num_tokens)
        is_deterministic = not self._config.buckets.decode
        if is_deterministic:
            num_singles = 0
        may_share = is_decode and bool(self._config.buckets.grouped)
        groups = self._grouping.update([entry.place for entry in decoding]) if may_share else ()
        admitted, self._admitted = tuple(self._admitted), []
        dirty = tuple(sorted(self.table.dirty_rows))
        self.table.dirty_rows.clear()
        self._num_in_flight += 1
        return Batch(
            key,
            (*decoding, *short, *long),
            num_singles,
            admitted,
            dirty,
            groups,
            num_drafts > 0,
            is_deterministic,
            self.table.take_copies(),
            self.table.vision.take_encodings(),
        )

    def _retract(self, victim: RunningRequest) -> None:
        """Sends a running request back to wait; what it computed stays in the tree for now, as far as it is there."""
        self._release(victim)
        self.running.remove(victim)
        self._admitted = [r for r in self._admitted if r is not victim]
        if victim.request.joined:
            self.joins.add(victim)
        else:
            self.waiting.add(victim)
        self._estimate.on_retract(self.running)
        self.totals.num_retracts += 1

    def _release(self, running: RunningRequest, *, forgets: bool = False) -> None:
        """Shares what a request has computed, or forgets it, and takes its place away."""
        place = _place(running)
        if not forgets:
            self.table.share(running, place, min(place.num_dispatched, running.num_known - 1))
        self.table.release(place, forgets=forgets)
        running.place = None

    # Results.

    def commit(self, batch: Batch, result: StepResult) -> list[RequestOutput]:
        """Takes a step's tokens: advances its requests and ends those that are done.

        What raises while one request's output is made ends that request only. A broken invariant ends the engine.

        Returns:
            One output per request that has something new.
        """
        self._num_in_flight -= 1
        for running in result.failed:
            self._fail(running, result.reasons.get(running.request.rid, FAILED))
        outputs: list[RequestOutput] = []
        for index, (entry, row) in enumerate(zip(batch.entries, batch.first_rows, strict=True)):
            if entry.is_stale:
                continue
            running = entry.running
            if result.prompt_logprobs:
                running.prompt_logprobs.extend(result.prompt_logprobs.get(index, ()))
            if entry.samples:
                self._take_tokens(entry, index, row, result, outputs)
            elif entry.ends_prefill:
                self._end_prompt(running)
        return outputs + self.take_finished()

    def _take_tokens(
        self, entry: BatchEntry, index: int, row: int, result: StepResult, outputs: list[RequestOutput]
    ) -> None:
        """Advances an entry's request by what was sampled in its rows, and takes back the drafts that were wrong."""
        running, place = entry.running, entry.place
        tokens = [result.token_ids[row]]
        if entry.num_drafts:
            tokens = entry.taken(result.token_ids[row : row + entry.num_rows])
        is_broken = tokens[-1] < 0
        if is_broken:
            tokens.pop()
        if entry.num_drafts:
            self.table.shrink(place, entry.num_drafts - max(len(tokens) - (not is_broken), 0))
        place.num_in_flight -= 1
        try:
            output = self._append(running, tokens, index, row, result) if tokens else None
        except AssertionError:
            raise
        except Exception:
            logger.exception("the output of a request could not be made")
            self._fail(running, FAILED)
            return
        if output is not None:
            outputs.append(output)
            if output.finish is not None:
                self._leave(running)
        if is_broken:
            self._fail(running, "the model's logits were not finite", forgets=True)

    def _append(
        self, running: RunningRequest, tokens: list[int], index: int, row: int, result: StepResult
    ) -> RequestOutput:
        """Adds output tokens to their request, up to one that ends it, and touches nothing else."""
        reason, count = None, 0
        for token in tokens:
            running.append(token)
            count += 1
            reason = stop_reason(running, token, self._config.eos_token_ids)
            if reason is None and result.ended.get(index) == count:
                reason = FinishReason(FinishType.STOP)
            if reason is not None:
                break
        logprobs = tuple(result.logprobs[i] for i in range(row, row + count) if i in result.logprobs)
        reports = result.constraints.get(index)
        constraint = reports[count - 1] if reports else None
        return make_output(running, tuple(tokens[:count]), logprobs, reason, constraint)

    def _end_prompt(self, running: RunningRequest) -> None:
        """The prompt of a request that generates nothing is cached: it ends, or is held."""
        place, whole = _place(running), running.part_of
        if whole is not None:
            self._take_out(running)
            held = self.table.keep(place, keeps_own=True, first_page=self.joins.first_page(running, whole))
            self.joins.hold(running, held)
        elif running.request.hold:
            self._take_out(running)
            self.holds.keep(running, self.table.keep(place))
            self._finished.append(make_output(running))
        else:
            self._finish(running, FinishReason(FinishType.LENGTH))

    def break_holds(self, count: int) -> None:
        """Ends so many holds, the oldest first."""
        for rid in self.holds.oldest(count):
            self.totals.num_holds_broken += 1
            self._end_hold(rid, FinishReason(FinishType.STOP))

    def _end_hold(self, rid: str, reason: FinishReason) -> None:
        running = self.holds.end(rid)
        self.table.forget(running.request, running.shifts)
        self._finished.append(make_output(running, finish=reason))

    def _end_parts(self, join: Join) -> None:
        """Takes back what the parts of a joined request have."""
        for prefix in join.held.values():
            self.table.drop(prefix)
        for part in join.parts.values():
            self._leave(part)

    def _finish(self, running: RunningRequest, reason: FinishReason, *, forgets: bool = False) -> None:
        """Ends a request outside `commit`'s own outputs."""
        self._finished.append(make_output(running, finish=reason))
        self._leave(running, forgets=forgets)

    def _fail(self, running: RunningRequest, message: str, *, forgets: bool = False) -> None:
        """Ends a live request with an error; nothing to do for one that has ended since.

        With `forgets` nothing that only this request computed stays in the tree: it is not to be trusted.
        """
        running = running.part_of or running
        if self._live.get(running.request.rid) is running:
            self.totals.num_failed += 1
            self._finish(running, FinishReason(FinishType.ERROR, message=message), forgets=forgets)

    def _leave(self, running: RunningRequest, *, forgets: bool = False) -> None:
        if running.place is not None:
            self._release(running, forgets=forgets)
        self._take_out(running)
        self.table.forget(running.request, running.shifts, distrusts=forgets)

    def _take_out(self, running: RunningRequest) -> None:
        """Forgets a request, whose place is somebody else's now."""
        if running.part_of is None:
            del self._live[running.request.rid]
            self.holds.num_to_come -= running.request.hold
        if running in self.joins:
            self._end_parts(self.joins.remove(running))
        elif running.watch is not None:
            self.waiting.remove(running)
        else:
            running.place = None
            self.running.remove(running)
            self._admitted = [r for r in self._admitted if r is not running]

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        self.table.check_integrity()
        self.waiting.check_integrity()
        self.joins.check_integrity()
        self.table.vision.check_integrity(_place(running) for running in self.running)
        parts = [part for join in self.joins for part in join.parts.values()]
        assert len(self._live) + len(parts) == len(self.running) + len(self.waiting) + len(self.joins)
        assert self.holds.num_to_come == sum(r.request.hold for r in self._live.values())
        num_placed = sum(len(_place(r).parts) for r in self.running)
        assert self.table.num_held == len(self.holds) + self.joins.num_held + num_placed
        assert all(r.place is not None and r.watch is None for r in self.running)
        rows = [_place(r).row for r in self.running]
        assert len(set(rows)) == len(rows), "two requests share a row"


def _place(running: RunningRequest) -> Placement:
    assert running.place is not None, "only a running request has a placement"
    return running.place


def _decodes(running: RunningRequest) -> bool:
    return not _place(running).is_prefilling and running.num_to_come > 0
