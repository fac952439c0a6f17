"""A device without JAX, and an engine around it, so that the scheduler is tested with what it would do to real memory.

The keys and values of a position are stood in for by a hash of every token up to it (`token_model.py`). The device
writes them where a batch says, then reads every position of every row back: a page that was shared too early, freed too
early, handed out twice or not told to the device holds a wrong hash.
"""

import dataclasses
from collections import Counter

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.cache.states import StateSlots
from jsg.cache.windows import GroupedAllocator, WindowGroup
from jsg.cache_report import CacheReport
from jsg.engine.device import packing
from jsg.engine.device.step import SAMPLING_COLUMNS, PackedInputs, packed_sizes
from jsg.kernels_pallas.inputs import Pieces
from jsg.kernels_pallas.tile import GROUP_TILE, MIN_GROUP, QUERY_TILE, SHORT_TILE
from jsg.sched import groups
from jsg.sched.batch import Batch, BatchEntry, Proposal, StepResult
from jsg.sched.buckets import BucketKey, Buckets, Phase
from jsg.sched.config import SchedulerConfig
from jsg.sched.request import Placement
from jsg.sched.rounds import ROUND
from jsg.sched.scheduler import Scheduler
from jsg.sched.table import RequestTable
from jsg.sched.vision_store import DUMP_ROW, NEWLINE_ROW, VisionShape
from jsg.token_scores import TokenScores
from jsg.types import FinishReason, FinishType, Request, RequestOutput, TokenLogprob
from jsg.waits import WaitReason
from jsg.window import Window
from tests.cache.integrity import check_allocator, check_cache
from tests.sched.integrity import check_scheduler
from tests.sched.token_model import (
    EOS,
    FRAME_ROWS,
    NEWLINE,
    TILE_ROWS,
    VOCAB,
    TokenModel,
    advance,
    features,
    looks,
    own_request,
    positions,
    prefix_hashes,
)
from tests.scored import scores_of


def make_test_buckets(
    max_running: int, chunk: int, *, has_decode: bool = True, shares_prefixes: bool = False
) -> Buckets:
    """Shapes far smaller than those of `make_buckets`, so that short prompts are cut into chunks."""
    sizes = sorted({-(-chunk // 2), chunk})
    grouped = BucketKey(Phase.DECODE, max_running, max_running, max_running // MIN_GROUP)
    return Buckets(
        decode=tuple(BucketKey(Phase.DECODE, n, n) for n in sorted({1, max_running})) if has_decode else (),
        extend=tuple(BucketKey(Phase.EXTEND, n, max_running) for n in sizes),
        chunk=chunk,
        grouped=(grouped,) if has_decode and shares_prefixes and grouped.num_groups else (),
        drafts=(BucketKey(Phase.EXTEND, 3 * max_running, 3 * max_running),) if has_decode else (),
    )


class SimulatedDevice:
    """Does with packed arrays what `step.forward` and `step.sample` do, at once, and checks all that it reads."""

    def __init__(self, model: TokenModel, buckets: Buckets, allocator: PageAllocator, table: RequestTable):
        self._model = model
        self._buckets = buckets
        self._page_size = table.page_size
        rows, columns = table.pages.shape
        full: list[WindowGroup | None] = [None] * (table.maps[0] is None)
        self._windows = full + table.windows
        sizes = [(group or allocator).num_total + 1 for group in self._windows]
        self._kvs = [np.zeros(size * table.page_size, np.int64) for size in sizes]
        self._page_tables = [np.zeros((rows, columns), np.int32) for _ in sizes]
        self._slots = table.slots
        self._states = np.zeros(0 if table.slots is None else table.slots.num_total + 1, np.int64)
        self._last_token = np.zeros(rows, np.int32)
        self._vision = np.zeros(1000, np.int64)
        self._vision[NEWLINE_ROW] = NEWLINE
        self._hashes: list[list[int]] = [[] for _ in range(rows)]
        self._owners: list[Placement | None] = [None] * rows
        self._num_steps = 0

    def run(self, batch: Batch, table: RequestTable) -> StepResult:
        """One step, in the order of `ModelRunner.dispatch`."""
        for running in batch.admitted:
            assert running.place is not None, "a request that does not run is to be admitted"
            self._owners[running.place.row] = running.place
        assert all(self._owners[entry.place.row] is entry.place for entry in batch.entries), "a row was not prepared"
        for page_table, numbers in zip(self._page_tables, table.maps, strict=True):
            for row in batch.dirty_rows:
                page_table[row] = table.pages[row] if numbers is None else numbers[table.pages[row]]
        for source, target in batch.copies:
            assert self._page_size > 1, "slots are copied that could be shared"
            for kv in self._kvs:
                kv[target] = kv[source]
        written = [row for encoding in batch.encodings for row in encoding.rows.tolist()]
        assert len(written) == len(set(written)) and not {DUMP_ROW, NEWLINE_ROW} & set(written)
        for encoding in batch.encodings:
            self._vision[encoding.rows] = features(encoding.pixels, is_video=encoding.is_video)
        key = self._program(batch)
        packed = packing.pack_forward(batch, key, table.pages, self._page_size, table.maps)
        sizes = packed_sizes(key, len(table.maps))
        assert packed.dtype == np.int32 and len(packed) == sum(sizes)
        parts = PackedInputs(*np.split(packed, np.cumsum(sizes)[:-1]))  # pyright: ignore[reportArgumentType]
        parts = parts._replace(slots=np.asarray(parts.slots).reshape(len(table.maps), -1))  # pyright: ignore[reportArgumentType]
        check_packing(batch, key, parts)
        assert key.phase is Phase.EXTEND or (np.asarray(parts.token_ids) < VOCAB).all(), "a decode step has an image"
        self._write(batch, parts)
        for entry in batch.entries:
            self._check_row(entry)
        if self._slots is not None:
            self._run_states(batch, key, table)
        check_groups(batch, table)
        if key.num_groups:
            self._check_group_tiles(batch, parts)
        return self._sample(batch, key)

    def forget_free_pages(self, allocator: PageAllocator) -> None:
        """Overwrites every free page: nothing may be read from it, not even by luck what was there before."""
        for kv, group in zip(self._kvs, self._windows, strict=True):
            numbers = allocator if group is None else group._numbers
            free = np.flatnonzero(numbers.is_free(np.arange(len(kv) // self._page_size)))
            kv.reshape(-1, self._page_size)[free] = 0
        if self._slots is not None:
            self._states[self._slots._numbers.is_free(np.arange(len(self._states)))] = 0

    def _program(self, batch: Batch) -> BucketKey:
        """Every other step runs in the largest shape, as if the right one were not compiled yet."""
        self._num_steps += 1
        key = batch.key
        if batch.groups and (grouped := self._buckets.pick_grouped(key.num_tokens)) and self._num_steps % 3:
            return grouped
        keys = self._buckets.decode if key.phase is Phase.DECODE else self._buckets.extend
        if batch.has_drafts:
            keys = self._buckets.with_room(batch.num_tokens, batch.num_rows)
        return keys[-1] if self._num_steps % 2 else key

    def _write(self, batch: Batch, parts: PackedInputs) -> None:
        """Tells the page table of the new tokens and writes their hashes, of all entries before anything is read."""
        rows, places = np.asarray(parts.rows), np.asarray(parts.positions)
        for slots, page_table in zip(parts.slots, self._page_tables, strict=True):
            written = slots[slots > 0]
            assert len(np.unique(written)) == len(written), "two tokens of a step are written to one slot"
            page_table[np.where(slots > 0, rows, 0), places // self._page_size] = slots // self._page_size
        offset = 0
        for entry in batch.entries:
            row, end = entry.place.row, entry.start + entry.num_new
            request = own_request(entry.running)
            told = parts.model_positions[offset : offset + entry.num_new].tolist()
            assert told == positions(request, end)[entry.start :], "the model is told a wrong position"
            if entry.from_device:
                assert parts.token_ids[offset] == packing.FROM_DEVICE
                hashes = self._hashes[row]
                assert len(hashes) == entry.start, "a token is decoded before the one ahead of it"
                hashes.append(advance(hashes[-1], int(self._last_token[row]), entry.start, told[0]))
            else:
                num_known = entry.running.num_known
                assert not entry.num_drafts or end == num_known + entry.num_drafts, "drafts of what is not known"
                ids = np.asarray(parts.token_ids[offset : offset + entry.num_new])
                shown = np.where(ids < VOCAB, ids, self._vision[np.maximum(ids - VOCAB, 0)])
                expected = looks(entry.running.tokens[:end], request)[entry.start :]
                assert (shown == expected).all(), "the model is shown another token, or another image"
                hashes = prefix_hashes(entry.running.tokens[:end], request)
                self._hashes[row] = hashes
            for group, (kv, slots) in enumerate(zip(self._kvs, parts.slots, strict=True)):
                lacking = batch.lacking[row][group].tolist() if row in batch.lacking else []
                for index, slot in enumerate(slots[offset : offset + entry.num_new].tolist(), entry.start):
                    is_written = index >= entry.write_start or index // self._page_size in lacking
                    assert (slot > 0) == is_written
                    if slot:
                        kv[slot] = hashes[index]
            offset += entry.num_new

    def _check_row(self, entry: BatchEntry) -> None:
        """Every position that the entry attends to holds its own hash."""
        hashes = np.array(self._hashes[entry.place.row])
        for kv, page_table, group in zip(self._kvs, self._page_tables, self._windows, strict=True):
            first = 0 if group is None else max(group.window.first(entry.start), 0)
            positions = np.arange(first, entry.start + entry.num_new)
            pages = page_table[entry.place.row, positions // self._page_size]
            found = kv[pages * self._page_size + positions % self._page_size]
            wrong = positions[found != hashes[positions]]
            assert not len(wrong), f"{entry.running.request.rid} reads something else's keys at positions {wrong}"

    def _run_states(self, batch: Batch, key: BucketKey, table: RequestTable) -> None:
        """Applies each new token to the state of its request, which must be that of exactly the tokens before it.

        Pieces run in any order, so none may read what another one writes.
        """
        packed = packing.pack_forward(batch, key, table.pages, self._page_size, table.maps, has_states=True)
        fields = packed[-len(Pieces._fields) * key.num_rows :].reshape(-1, key.num_rows)[:, : len(batch.entries)]
        pieces = Pieces(*fields.tolist())
        others = [source for source, target in zip(pieces.sources, pieces.targets, strict=True) if source != target]
        assert len({*pieces.targets}) == len(pieces.targets) and not {*others} & {*pieces.targets}, "a slot is shared"
        assert min(*pieces.targets, *pieces.sources) > 0, "a request has the slot of padding"
        after = {}
        for entry, source, target, start, length, is_known in zip(
            batch.entries, pieces.sources, pieces.targets, pieces.positions, pieces.lens, pieces.is_known, strict=True
        ):
            hashes, end = self._hashes[entry.place.row], start + length
            num_there = start + is_known
            assert not num_there or self._states[source] == hashes[num_there - 1], (
                f"{entry.running.request.rid} goes on from another state behind {num_there} tokens"
            )
            after[target] = hashes[end - 1]
        for slot, state in after.items():
            self._states[slot] = state

    def _check_group_tiles(self, batch: Batch, parts: PackedInputs) -> None:
        """Every member of a tile has its own hashes in the pages that the tile reads, and is in no other tile."""
        shared_lens = np.zeros(len(parts.shared_lens), int)
        members_of = np.asarray(parts.group_members).reshape(-1, GROUP_TILE)
        for row, length, members in zip(parts.group_rows, parts.group_lens, members_of, strict=True):
            positions, real = np.arange(int(length)), members[members >= 0]
            assert (members[: len(real)] == real).all() and len(real) > 1 if length else not len(real)
            pages = self._page_tables[0][int(row), positions // self._page_size]
            found = self._kvs[0][pages * self._page_size + positions % self._page_size]
            for member in real.tolist():
                hashes = self._hashes[batch.entries[member].place.row]
                assert length < len(hashes) and (found == hashes[: int(length)]).all(), "a group reads something else"
                assert not shared_lens[member], "a token is in two tiles"
                shared_lens[member] = int(length)
        assert (parts.shared_lens == shared_lens).all()

    def _sample(self, batch: Batch, key: BucketKey) -> StepResult:
        constants = np.zeros((len(self._last_token), SAMPLING_COLUMNS - 2), np.int32)
        packed = packing.pack_sampling(batch, key, constants)
        num_rows = sum(entry.num_rows for entry in batch.entries)
        assert packed.shape == (key.num_rows, SAMPLING_COLUMNS) and not packed[num_rows:].any()
        result = StepResult([0] * key.num_rows)
        for index, (entry, first_row) in enumerate(zip(batch.entries, batch.first_rows, strict=True)):
            request, hashes = entry.running.request, self._hashes[entry.place.row]
            for row, state in enumerate(hashes[len(hashes) - entry.num_rows :], first_row):
                assert packed[row, 1] == entry.output_index + row - first_row
                token = self._model.next_token(state, int(packed[row, 1]))
                result.token_ids[row] = token
                assert packed[row, 0] == (entry.place.row if entry.samples and not entry.num_drafts else 0)
                self._last_token[packed[row, 0]] = max(token, 0)
                if entry.samples and token >= 0 and request.return_logprob:
                    result.logprobs[row] = self._model.logprob(state, token)
            if entry.scores_prompt:
                scores = self._model.prompt_scores(request, hashes, entry.start, entry.start + entry.num_new)
                result.prompt_logprobs[index] = scores_of(scores).parts
        return result


def check_packing(batch: Batch, key: BucketKey, parts: PackedInputs) -> None:
    """Asserts that every new token is in exactly one place, that padding is harmless, and that shapes suffice."""
    lens = [entry.num_new for entry in batch.entries]
    num_tokens, (num_tiles, num_short, num_singles) = sum(lens), (int(count) for count in parts.counts)
    assert num_tokens <= key.num_tokens and sum(entry.num_rows for entry in batch.entries) <= key.num_rows
    assert num_singles == batch.num_singles <= key.num_singles and num_tiles <= key.num_tiles
    assert lens[:num_singles] == [1] * num_singles
    for part in (parts.token_ids, parts.positions, parts.model_positions, *parts.slots, parts.rows):
        assert not np.asarray(part)[num_tokens:].any(), "padding is not all zero"
    rows = np.repeat([entry.place.row for entry in batch.entries], lens)
    positions = np.concatenate([np.arange(e.start, e.start + e.num_new) for e in batch.entries])
    assert (parts.rows[:num_tokens] == rows).all() and (parts.positions[:num_tokens] == positions).all()
    ends = zip(np.cumsum(lens).tolist(), batch.entries, strict=True)
    wanted = [index for end, entry in ends for index in range(end - entry.num_rows, end)]
    assert np.asarray(parts.logit_index)[: len(wanted)].tolist() == wanted
    times_covered = np.zeros(key.num_tokens, int)
    times_covered[:num_singles] += 1
    assert num_short <= num_tiles and not (num_short and batch.is_deterministic)
    for tile in range(num_tiles):
        start, length = int(parts.tile_starts[tile]), int(parts.tile_lens[tile])
        assert 0 < length <= (SHORT_TILE if tile < num_short else QUERY_TILE)
        times_covered[start : start + length] += 1
        assert (rows[start : start + length] == parts.tile_rows[tile]).all()
        assert (positions[start : start + length] == parts.tile_positions[tile] + np.arange(length)).all()
    assert (times_covered == (np.arange(key.num_tokens) < num_tokens)).all(), "tiles miss or repeat a token"


def check_groups(batch: Batch, table: RequestTable) -> None:
    """Asserts that members of a group have the very same pages, more tokens than they share, and no other group."""
    members = [member for group in batch.groups for member in group.members]
    assert len(set(members)) == len(members), "a request is in two groups"
    for group in batch.groups:
        assert len(group.members) >= MIN_GROUP and list(group.members) == sorted(group.members)
        assert group.num_tokens % table.page_size == 0 and group.num_tokens >= groups.MIN_SHARED_TOKENS
        entries = [batch.entries[member] for member in group.members]
        pages = table.pages[[entry.place.row for entry in entries], : group.num_tokens // table.page_size]
        assert (pages == pages[0]).all() and pages.all(), "members of a group have different pages"
        assert all(entry.num_new == 1 and entry.start >= group.num_tokens for entry in entries)


@dataclasses.dataclass
class Answer:
    """The part of a request's answer that its client has seen."""

    request: Request
    arrival: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: TokenScores | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    cache_report: CacheReport | None = None
    num_bypassed: int = 0
    is_aborted: bool = False
    is_held: bool = False
    waited: Counter[WaitReason] = dataclasses.field(default_factory=Counter)
    expected_wait: Counter[WaitReason] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The knobs of a simulated engine. Units are tokens, of the pool pages.

    With `draft_len` so many tokens at most are proposed for every request, and of them that part is right. There may be
    images where there are `vision_rows`. Layers have these `windows`, or see all tokens if `has_full_layers`. A hybrid
    keeps `num_states` states of prefixes.
    """

    num_pages: int = 32
    page_size: int = 1
    max_running: int = 4
    chunk: int = 8
    context_length: int = 64
    policy: str = "lpm"
    overlaps: bool = True
    has_decode: bool = True
    has_cache: bool = True
    shares_prefixes: bool = False
    max_bypass_tokens: int = 64
    max_prefill_tokens: int = 1000
    max_queued: int = 1000
    max_holds: int = 1000
    conservativeness: float = 1.0
    draft_len: int = 0
    right_drafts: float = 0.8
    vision_rows: int = 0
    windows: tuple[Window, ...] = ()
    part_rate: float = 1.0
    has_full_layers: bool = True
    num_states: int | None = None

    def allocator(self) -> PageAllocator:
        """With windows there are parts for that share of the pages, and at least for a window and a chunk."""
        if not self.windows and self.num_states is None:
            return PageAllocator(self.num_pages + 1)
        kinds: list[WindowGroup | StateSlots] = []
        for window in self.windows:
            least = -(-(window.length - 1) // self.page_size) + 1 + -(-self.chunk // self.page_size)
            num_parts = min(max(int(self.num_pages * self.part_rate), least), self.num_pages)
            kinds.append(WindowGroup(window, self.num_pages + 1, num_parts + 1, self.page_size))
        if self.num_states is not None:
            kinds.append(StateSlots(self.num_pages + 1, self.max_running, self.num_states, self.page_size))
        return GroupedAllocator(self.num_pages + 1, kinds, has_layers=self.has_full_layers)

    @property
    def vision(self) -> VisionShape | None:
        return (
            VisionShape(
                num_rows=self.vision_rows, tile_rows=TILE_ROWS, frame_rows=FRAME_ROWS, image_size=1, has_newline=True
            )
            if self.vision_rows
            else None
        )


class SimulatedEngine:
    """`EngineCore` with a simulated device; checks everything after every step."""

    def __init__(self, shape: EngineShape, model: TokenModel | None = None):
        self.shape = shape
        self.model = model or TokenModel()
        self.allocator = shape.allocator()
        self.cache = RadixCache(shape.page_size, self.allocator, enabled=shape.has_cache)
        buckets = make_test_buckets(
            shape.max_running, shape.chunk, has_decode=shape.has_decode, shares_prefixes=shape.shares_prefixes
        )
        config = SchedulerConfig(
            context_length=shape.context_length,
            vocab_size=VOCAB,
            eos_token_ids=EOS,
            buckets=buckets,
            max_running=shape.max_running,
            policy=shape.policy,
            conservativeness=shape.conservativeness,
            max_prefill_tokens=shape.max_prefill_tokens,
            max_bypass_tokens=shape.max_bypass_tokens,
            max_queued=shape.max_queued,
            max_holds=shape.max_holds,
            vision=shape.vision,
        )
        self.scheduler = Scheduler(config, self.allocator, self.cache)
        self.device = SimulatedDevice(self.model, buckets, self.allocator, self.scheduler.table)
        self.answers: dict[str, Answer] = {}
        self.batches: list[Batch] = []
        self._in_flight: tuple[Batch, StepResult] | None = None
        self._random = np.random.default_rng(shape.num_pages)
        self.num_drafts = 0
        self.now_s = 0

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or not self.scheduler.is_idle

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now_s)
        self.answers[request.rid] = Answer(request, arrival=self.scheduler._requests.live[request.rid].arrival)

    def abort(self, rid: str) -> None:
        self.answers[rid].is_aborted |= self.answers[rid].finish is None
        self.scheduler.abort(rid)

    def step(self) -> None:
        """As `EngineCore.step`."""
        waiting, num_retracts = self._waiting(), self.scheduler.totals.num_retracts
        outputs = []
        if self.shape.draft_len and self._in_flight:
            now, self._in_flight = self._in_flight, None
            outputs += self.scheduler.commit(*now)
        proposals = self._proposals()
        max_rows = max(key.num_rows for key in self.device._buckets.all) if proposals else 0
        self._pass_a_second()
        batch = self.scheduler.plan(self.now_s, proposals, max_rows)
        assert self._in_flight is None or self.scheduler.totals.num_retracts == num_retracts, (
            "retracted while in flight"
        )
        before, self._in_flight = self._in_flight, None
        if batch is not None:
            self._in_flight = batch, self.device.run(batch, self.scheduler.table)
            self.batches.append(batch)
            self.num_drafts += sum(entry.num_drafts for entry in batch.entries)
            self._count_bypassed(batch, waiting)
        outputs += self.scheduler.commit(*before) if before else []
        if not self.shape.overlaps and self._in_flight:
            now, self._in_flight = self._in_flight, None
            outputs += self.scheduler.commit(*now)
        for output in outputs + self.scheduler.take_finished():
            self._take(output)
        self.check_integrity()
        self.device.forget_free_pages(self.allocator)

    def _pass_a_second(self) -> None:
        """Everybody who waits has waited for a second more for what the last step has found."""
        self.now_s += 1
        waits = self.scheduler._requests.waits
        for running, wait in waits._waits.items():
            self.answers[running.request.rid].expected_wait[wait.own or waits._reason] += 1

    def _proposals(self) -> dict[str, Proposal]:
        """For every request that decodes a few of the tokens that the model will choose, and now and then another."""
        proposals = {}
        for running in self.scheduler.running if self.shape.draft_len else ():
            count = int(self._random.integers(0, self.shape.draft_len + 1))
            if running.place is None or running.place.is_prefilling or not count:
                continue
            state = prefix_hashes(running.tokens[: running.num_known], running.request)[-1]
            told, tokens = positions(running.request, running.num_known + count), []
            for index in range(count):
                token = max(self.model.next_token(state, running.num_output + index), 0)
                token = token if self._random.random() < self.shape.right_drafts else (token + 1) % VOCAB
                where = running.num_known + index
                state = advance(state, token, where, told[where])
                tokens.append(token)
            proposals[running.request.rid] = Proposal(tuple(tokens), False, len(tokens))
        return proposals

    def run_until_idle(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def check_integrity(self) -> None:
        check_scheduler(self.scheduler)
        check_cache(self.cache)
        check_allocator(self.allocator)

    def check_answers(self) -> None:
        """Asserts that everybody got what the model says, and that nothing is left behind."""
        for answer in self.answers.values():
            self._check_answer(answer)
        assert self.scheduler.table.num_uncached_pages == 0 and self.cache.num_protected == 0
        assert self.scheduler.table.num_free_rows == self.shape.max_running
        assert self.cache.reset() and self.allocator.num_free == self.shape.num_pages
        assert self.cache.stats().num_namespaces == 0, "a watch was left behind"

    def _check_answer(self, answer: Answer) -> None:
        request, expected = answer.request, self.model.expected(answer.request)
        assert answer.finish is not None
        if answer.is_aborted:
            assert answer.finish.type is FinishType.ABORT
            assert answer.tokens == expected.tokens[: len(answer.tokens)]
        elif request.hold:
            assert answer.is_held and answer.finish == FinishReason(FinishType.STOP)
        else:
            assert answer.tokens == expected.tokens
            assert (answer.finish.type, answer.finish.matched) == (expected.finish.type, expected.finish.matched)
            assert answer.prompt_logprobs == expected.prompt_logprobs
        assert len(answer.logprobs) == (len(answer.tokens) if request.return_logprob else 0)
        assert answer.cached_tokens <= self._most_cached(request)
        self._check_report(answer)
        assert answer.waited == answer.expected_wait
        assert answer.num_bypassed <= self.shape.max_bypass_tokens + self.shape.chunk

    def _check_report(self, answer: Answer) -> None:
        report = answer.cache_report
        if not answer.request.return_cache_info or (answer.is_aborted and report is None):
            assert report is None
        else:
            assert report is not None and report.matched_tokens == answer.cached_tokens
            if not answer.request.joined:
                assert report.matchable_tokens == self._most_cached(answer.request)

    def _most_cached(self, request: Request) -> int:
        """Tokens that may come from the cache: whole pages, never those whose results are wanted."""
        limit = len(request.input_ids) - (request.sampling.max_new_tokens > 0)
        if request.joined:
            return limit if self.shape.has_cache else 0
        if request.return_logprob and 0 <= request.logprob_start_len < len(request.input_ids):
            limit = max(request.logprob_start_len - 1, 0)
        return limit // self.shape.page_size * self.shape.page_size if self.shape.has_cache else 0

    def _waiting(self) -> list[Answer]:
        return [self.answers[rid] for rid, r in self.scheduler._requests.live.items() if r.place is None]

    def _count_bypassed(self, batch: Batch, waited: list[Answer]) -> None:
        """Charges the chunks of a step to the requests of earlier places that waited before and after it.

        The prompts that a post has beyond its part of the next round are not charged before that comes.
        """
        last = (self.scheduler._requests._rounds.now + 2) * ROUND
        still_waiting = {answer.request.rid for answer in self._waiting() if answer.arrival < last}
        for answer in waited:
            if answer.request.rid in still_waiting:
                later = [
                    e for e in batch.entries if (e.ends_prefill or not e.samples) and e.running.arrival > answer.arrival
                ]
                answer.num_bypassed += sum(entry.num_new for entry in later)

    def _take(self, output: RequestOutput) -> None:
        answer = self.answers[output.rid]
        assert answer.finish is None, "a request has an output after its last"
        assert output.prompt_tokens == len(answer.request.input_ids)
        if output.prompt_logprobs is not None:
            assert answer.prompt_logprobs is None and not answer.tokens, "prompt logprobs come once, and first"
            answer.prompt_logprobs = output.prompt_logprobs
        if output.cache_report is not None:
            assert answer.cache_report is None and not answer.tokens, "a cache report comes once, and first"
            answer.cache_report = output.cache_report
        answer.waited.update(output.waited or {})
        answer.tokens.extend(output.token_ids)
        answer.logprobs.extend(output.logprobs)
        if output.finish is None and not output.token_ids:
            assert answer.request.hold and not answer.is_held, "an output says nothing"
            answer.is_held = True
        answer.finish = output.finish
        answer.cached_tokens = output.cached_tokens
