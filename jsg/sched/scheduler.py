"""What runs next: the waiting queue, the running requests and the pages they share become one batch per step.

A step is planned before the results of the step before it are known (overlap), so a plan only uses what is certain:
how many tokens each request will have, not which. Everything decided here is a function of requests and their order;
there is no clock in any comparison, so a recorded trace replays exactly.

Prefixes are put into the radix tree when their chunk is planned, not when it has run: a layer writes the keys and
values of all tokens of a step before any of them attends, so even a request in the same step may read them. Requests
that share an uncached prefix therefore share one computation without waiting for each other.
"""

import dataclasses
import logging
from collections.abc import Mapping

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.errors import QueueFullError, RequestError, check_length
from jsg.sched.admission import AdmissionEstimate
from jsg.sched.buckets import Buckets, Phase
from jsg.sched.bypass import BypassLedger
from jsg.sched.groups import PrefixGrouping
from jsg.sched.policy import make_policy
from jsg.sched.records import (
    Batch,
    BatchEntry,
    Placement,
    Proposal,
    RunningRequest,
    SchedulerTotals,
    new_running_request,
)
from jsg.sched.table import RequestTable
from jsg.sched.waiting import WaitingQueue
from jsg.types import ConstraintReport, FinishReason, FinishType, Request, RequestOutput, TokenLogprob

logger = logging.getLogger(__name__)

FAILED = "the engine failed this request; its log has the cause"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler must know of the model and the knobs. Units are tokens unless said."""

    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    buckets: Buckets
    max_running: int
    policy: str = "lpm"
    seed: int = 0
    conservativeness: float = 1.0
    max_prefill_tokens: int = 16_384
    max_bypass_tokens: int = 16_384
    max_queued: int = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, on the host.

    Attributes:
        token_ids: The sampled token of each row of logits (see `Batch.first_rows`): -1 where the logits were not
            finite, meaningless where the entry does not sample.
        logprobs: By row, of entries that asked for them.
        prompt_logprobs: Per entry, by its index in the batch: one per prompt token that its chunk predicts.
        failed: Requests for which the work of the host, before or after the step, raised: they end with an error.
        reasons: What the error says, by rid, where that is the client's to know.
        kept_mass: By row, where a request reports what its grammar did.
        constraints: What grammars did, by entry; of requests that report it. One report for each of its tokens, of all
            tokens up to it.
        ended: By entry, after how many of its tokens its grammar lets nothing follow, not even an EOS token.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = dataclasses.field(default_factory=dict)
    failed: list[RunningRequest] = dataclasses.field(default_factory=list)
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    kept_mass: dict[int, float] = dataclasses.field(default_factory=dict)
    constraints: dict[int, list[ConstraintReport]] = dataclasses.field(default_factory=dict)
    ended: dict[int, int] = dataclasses.field(default_factory=dict)


class Scheduler:
    """Owns every request between arrival and last token.

    Invariants: a request waits (has a watch) or runs (has a placement), never both; `table.check_integrity` holds
    between calls; a request with a step in flight is not retracted.
    """

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator, cache: RadixCache):
        self.table = RequestTable(config.max_running, config.context_length, allocator, cache)
        self.waiting = WaitingQueue(make_policy(config.policy, config.seed), cache)
        self.running: list[RunningRequest] = []
        self.totals = SchedulerTotals()
        self._config = config
        self._capacity = allocator.num_total * cache.page_size
        self._live: dict[str, RunningRequest] = {}
        self._num_arrived = 0
        self._ledger = BypassLedger(config.max_bypass_tokens)
        self._estimate = AdmissionEstimate(config.conservativeness)
        self._grouping = PrefixGrouping(cache.page_size)
        self._finished: list[RequestOutput] = []
        self._admitted: list[RunningRequest] = []
        self._num_in_flight = 0
        self._promised_pages: int | None = None

    # Requests in and out.

    def add(self, request: Request, now_s: float = 0.0) -> None:
        """Queues a request.

        Raises:
            RequestError: It can never run, or its rid is in use.
            QueueFullError: Too many wait.
        """
        if request.rid in self._live:
            raise RequestError(f"rid must be unique among live requests, but {request.rid!r} is in use", param="rid")
        if len(self.waiting) >= self._config.max_queued:
            raise QueueFullError(f"{len(self.waiting)} requests wait already, the most --max-queued-requests allows")
        limit = min(self._config.context_length, self._capacity)
        check_length(len(request.input_ids), request.sampling.max_new_tokens, limit)
        named_ids = {
            "input_ids": request.input_ids,
            "token_ids_logprob": request.token_ids_logprob,
            "stop_token_ids": request.sampling.stop_token_ids,
            "logit_bias": [token for token, _ in request.sampling.logit_bias],
        }
        for name, ids in named_ids.items():
            if ids and not 0 <= min(ids) <= max(ids) < self._config.vocab_size:
                raise RequestError(
                    f"{name}: token ids must be in [0, {self._config.vocab_size}), but got {min(ids)} to {max(ids)}",
                    param=name,
                )
        running = new_running_request(request, self._num_arrived, now_s)
        self.waiting.add(running)  # the last thing that can fail: nothing is kept of a request for which it does
        self._num_arrived += 1
        self._live[request.rid] = running

    def abort(self, rid: str) -> None:
        """Ends a request wherever it is and frees what it holds. Unknown rids are ignored: it may just have ended."""
        running = self._live.get(rid)
        if running is not None:
            self.totals.num_aborted += 1
            self._finish(running, FinishReason(FinishType.ABORT, message="aborted"))

    def expire(self, arrived_before_s: float) -> list[str]:
        """Takes out the requests that arrived before that time and were never admitted; returns their rids.

        No output is made of them. Takes time for those only. Times are those of `add`, which must not go backwards.
        """
        expired = []
        while (oldest := self.waiting.oldest_unadmitted()) is not None and oldest.arrived_s < arrived_before_s:
            self._leave(oldest)
            expired.append(oldest.request.rid)
        self.totals.num_expired += len(expired)
        return expired

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs, or has an output that was not taken."""
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
        if not self.running and not len(self.waiting):
            self._estimate.on_idle()
            return None
        self._estimate.step()
        if not self._make_room_to_decode():
            return None
        decoding = self._plan_decode()
        budget = self._config.buckets.chunk - len(decoding)
        if proposals:
            budget -= self._add_drafts(decoding, proposals, max_rows)
        chunks = self._plan_prefill(budget, now_s)
        while not decoding and not chunks and self.running:
            if self._num_in_flight:
                return None
            self._retract_latest()
            chunks = self._plan_prefill(budget, now_s)
        return self._make_batch(decoding, chunks) if decoding or chunks else None

    def take_finished(self) -> list[RequestOutput]:
        """Outputs of requests that ended without a step: aborted, or prefill-only and wholly cached."""
        finished, self._finished = self._finished, []
        return finished

    def _make_room_to_decode(self) -> bool:
        """Retracts the latest arrivals until every request that decodes has room for a token.

        False when a request must be retracted while a step is in flight: it has to be committed first.
        """
        while len(self.running) > self.table.num_available_pages:  # else there is one for each
            needed = sum(self.table.needs_page(r.place) for r in self.running if r.place and _decodes(r))
            if needed <= self.table.num_available_pages:
                return True
            if self._num_in_flight:
                return False
            self._retract_latest()
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

    def _add_drafts(self, decoding: list[BatchEntry], proposals: Mapping[str, Proposal], max_rows: int) -> int:
        """Puts proposed tokens behind the last ones, as far as rows, budget and memory allow; returns how many."""
        most_entries = min(self._config.max_running, len(self.running) + len(self.waiting))
        if len(decoding) < most_entries:  # there may be chunks, and shapes for many tokens have no rows for many drafts
            max_rows = self._config.buckets.max_rows
        spare = min(max_rows - most_entries, (self._config.buckets.chunk - len(decoding)) // 2)
        num_drafts = 0
        for entry in decoding:
            running, place = entry.running, entry.place
            proposal = proposals.get(running.request.rid)
            if proposal is None:
                continue
            assert entry.output_index == running.num_output, "a token is proposed after one that is not known"
            count = min(len(proposal.tokens), spare - num_drafts, running.num_to_come, self.table.room(place))
            if count <= 0:
                continue
            running.tokens[running.num_known : running.num_known + count] = proposal.tokens[:count]
            self.table.grow(place, count)
            entry.num_new, entry.num_drafts, entry.is_forced = 1 + count, count, proposal.is_forced
            entry.from_device = place.device_has_last = False
            num_drafts += count
        return num_drafts

    def _plan_prefill(self, budget: int, now_s: float) -> list[BatchEntry]:
        """Chunks of at most `budget` tokens: begun prompts, oldest first, then waiting ones in policy order.

        A waiting request that was passed by more than the bound comes before everything that arrived after it, and
        while it cannot be admitted nothing that arrived after it gets a chunk: memory is left for it.
        """
        self._promised_pages = None
        chunks: list[BatchEntry] = []
        begun = [r for r in self.running if r.place and r.place.is_prefilling]
        begun.sort(key=lambda r: r.arrival)
        while (overdue := self._overdue()) is not None:
            while begun and begun[0].arrival < overdue.arrival:
                budget -= self._plan_chunk(begun.pop(0), budget, chunks)
            if budget <= 0 or not self._admit(overdue, now_s):
                return chunks
            budget -= self._plan_chunk(overdue, budget, chunks)
        for running in begun:
            budget -= self._plan_chunk(running, budget, chunks)
        self.waiting.reorder()
        to_admit = self._config.max_prefill_tokens
        while budget > 0 and to_admit > 0 and (first := self.waiting.first()) is not None:
            if not self._admit(first, now_s):
                break
            to_admit -= first.num_known - _place(first).num_dispatched if first.place else 0
            budget -= self._plan_chunk(first, budget, chunks)
        return chunks

    def _overdue(self) -> RunningRequest | None:
        oldest = self.waiting.oldest()
        if self._live:  # in order of arrival
            self._ledger.forget_before(next(iter(self._live.values())).arrival)
        return oldest if oldest is not None and self._ledger.is_overdue(oldest.arrival) else None

    def _admit(self, running: RunningRequest, now_s: float) -> bool:
        """Gives a waiting request a row and its cached prefix, if memory for it can be expected; else False."""
        if not self.table.num_free_rows:
            return False
        place = self.table.admit(running)
        if self._promised_pages is None:
            self._promised_pages = sum(self._expected_pages(r, _place(r)) for r in self.running)
        expected = self._expected_pages(running, place)
        if self.running and expected + self._promised_pages > self.table.num_available_pages:
            self.table.release(place)
            return False
        self._promised_pages += expected
        self.waiting.remove(running)
        running.place = place
        if running.cached_tokens is None:
            self._note_first_admission(running, place, now_s)
        running.prompt_logprobs.clear()
        self.running.append(running)
        self._admitted.append(running)
        if place.num_dispatched == running.num_known:
            self._finish(running, FinishReason(FinishType.LENGTH))
        return True

    def _note_first_admission(self, running: RunningRequest, place: Placement, now_s: float) -> None:
        running.cached_tokens = place.num_dispatched
        running.queue_s = now_s - running.arrived_s
        self.totals.prompt_tokens += running.num_prompt
        self.totals.cached_tokens += place.num_dispatched
        if running.request.return_cache_info:
            running.cache_report = self.table.explain(running, place)

    def _expected_pages(self, running: RunningRequest, place: Placement) -> int:
        """Pages a request is expected to need beyond those it holds."""
        remaining = max(running.num_known - place.num_dispatched, 0)
        return self.table.pages_for(remaining + int(running.num_to_come * self._estimate.fraction))

    def _plan_chunk(self, running: RunningRequest, budget: int, chunks: list[BatchEntry]) -> int:
        """Appends the next chunk of a prompt, as long as budget and memory allow; returns its tokens."""
        place = running.place
        if place is None:
            return 0
        start = place.num_dispatched
        num_new = min(running.num_known - start, budget, self.table.room(place))
        if num_new <= 0:
            return 0
        if self._promised_pages is not None:
            self._promised_pages -= self.table.pages_for(num_new)
        self.table.grow(place, num_new)
        write_start = max(start, self.table.share(running, place, start + num_new))
        place.is_prefilling = place.num_dispatched < running.num_known
        samples = not place.is_prefilling and running.request.sampling.max_new_tokens > 0
        place.num_in_flight += samples
        self._ledger.record(running.arrival, num_new)
        ends_prefill = not place.is_prefilling
        chunks.append(
            BatchEntry(
                running,
                place,
                start,
                num_new,
                write_start,
                output_index=running.num_output,
                samples=samples,
                ends_prefill=ends_prefill,
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
        is_decode = not long and not any(chunk.scores_prompt for chunk in short)
        num_tokens = num_singles + sum(chunk.num_new for chunk in long)
        if num_drafts:
            num_rows = num_singles + len(long) + num_drafts
            key = self._config.buckets.pick_drafts(num_tokens, num_rows)
        else:
            key = self._config.buckets.pick(Phase.DECODE if is_decode else Phase.EXTEND, num_tokens)
        if not self._config.buckets.decode:
            num_singles = 0
        may_share = is_decode and bool(self._config.buckets.grouped)
        groups = self._grouping.update([entry.place for entry in decoding]) if may_share else ()
        admitted, self._admitted = tuple(self._admitted), []
        dirty = tuple(sorted(self.table.dirty_rows))
        self.table.dirty_rows.clear()
        self._num_in_flight += 1
        return Batch(key, (*decoding, *short, *long), num_singles, admitted, dirty, groups, num_drafts > 0)

    def _retract_latest(self) -> None:
        """Sends the running request that arrived last back to the queue; what it computed stays in the tree for now."""
        victim = max(self.running, key=lambda r: r.arrival)
        self._release(victim)
        self.running.remove(victim)
        self._admitted = [r for r in self._admitted if r is not victim]
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
                self._finish(running, FinishReason(FinishType.LENGTH))
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
            running.tokens[running.num_known] = token
            running.num_known += 1
            count += 1
            reason = self._stop_reason(running, token)
            if reason is None and result.ended.get(index) == count:
                reason = FinishReason(FinishType.STOP)
            if reason is not None:
                break
        logprobs = tuple(result.logprobs[i] for i in range(row, row + count) if i in result.logprobs)
        reports = result.constraints.get(index)
        constraint = reports[count - 1] if reports else None
        return _output(running, tuple(tokens[:count]), logprobs, reason, constraint)

    def _stop_reason(self, running: RunningRequest, token: int) -> FinishReason | None:
        sampling = running.request.sampling
        if running.num_output >= sampling.min_new_tokens:
            is_eos = token in self._config.eos_token_ids and not sampling.ignore_eos
            if is_eos or token in sampling.stop_token_ids:
                return FinishReason(FinishType.STOP, matched=token)
        if running.num_output >= sampling.max_new_tokens:
            return FinishReason(FinishType.LENGTH)
        return None

    def _finish(self, running: RunningRequest, reason: FinishReason, *, forgets: bool = False) -> None:
        """Ends a request outside `commit`'s own outputs."""
        self._finished.append(_output(running, finish=reason))
        self._leave(running, forgets=forgets)

    def _fail(self, running: RunningRequest, message: str, *, forgets: bool = False) -> None:
        """Ends a live request with an error; nothing to do for one that has ended since.

        With `forgets` nothing that only this request computed stays in the tree: it is not to be trusted.
        """
        if self._live.get(running.request.rid) is running:
            self.totals.num_failed += 1
            self._finish(running, FinishReason(FinishType.ERROR, message=message), forgets=forgets)

    def _leave(self, running: RunningRequest, *, forgets: bool = False) -> None:
        del self._live[running.request.rid]
        if running.place is not None:
            self._release(running, forgets=forgets)
            self.running.remove(running)
            self._admitted = [r for r in self._admitted if r is not running]
        else:
            self.waiting.remove(running)

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        self.table.check_integrity()
        self.waiting.check_integrity()
        assert len(self._live) == len(self.running) + len(self.waiting)
        assert all(r.place is not None and r.watch is None for r in self.running)
        rows = [_place(r).row for r in self.running]
        assert len(set(rows)) == len(rows), "two requests share a row"


def _place(running: RunningRequest) -> Placement:
    assert running.place is not None, "only a running request has a placement"
    return running.place


def _decodes(running: RunningRequest) -> bool:
    return not _place(running).is_prefilling and running.num_to_come > 0


def _output(
    running: RunningRequest,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprob, ...] = (),
    finish: FinishReason | None = None,
    constraint: ConstraintReport | None = None,
) -> RequestOutput:
    """What a step added to a request. Prompt logprobs go with its first token, or with its end if it has none."""
    has_reported, running.has_reported = running.has_reported, True
    prompt_logprobs = None if has_reported else _complete_prompt_logprobs(running)
    return RequestOutput(
        rid=running.request.rid,
        token_ids=token_ids,
        finish=finish,
        prompt_tokens=running.num_prompt,
        cached_tokens=running.cached_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        queue_s=running.queue_s,
        cache_report=None if has_reported else running.cache_report,
        constraint=constraint,
    )


def _complete_prompt_logprobs(running: RunningRequest) -> tuple[TokenLogprob, ...] | None:
    """Those that were asked for; None when none were, or the request ends before all are there."""
    num_wanted = running.num_prompt - running.request.logprob_start_len
    if running.request.wants_prompt_logprobs and len(running.prompt_logprobs) == num_wanted:
        return tuple(running.prompt_logprobs)
    return None
