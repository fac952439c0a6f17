"""Turns batches into calls of programs: chooses the programs and packs their arguments from the host.

Only `InFlight.read` waits for the device, and the engine calls it one step late.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence

import jax
import numpy as np

from jsg.engine.device import packing, step
from jsg.engine.device.mask_pool import MaskPool, num_words
from jsg.engine.device.programs import (
    BIAS_CHUNK,
    COPY_CHUNK,
    COUNT_CHUNK,
    EVERYTHING,
    GREEDY,
    ROWS_AT_A_TIME,
    VARIANTS,
    DeviceState,
    EncodeName,
    Programs,
    Variant,
)
from jsg.engine.device.replica import Calls, Replica
from jsg.engine.device.results import InFlight
from jsg.engine.device.sampling import Logprobs
from jsg.engine.device.step import StepOutput
from jsg.sched.batch import Batch, Encoding
from jsg.sched.buckets import BucketKey, Phase
from jsg.sched.request import RunningRequest
from jsg.sched.table import RequestTable
from jsg.sched.vision_store import DUMP_ROW
from jsg.types import MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)


Sampling = Callable[[np.ndarray | None], InFlight]
"""Starts the sampling of a step. Takes the row of `ModelRunner.masks` for each row of logits; None where no request of
the step has a grammar."""

TIMED_RUNS, LONG_S = 4, 0.3
"""How often a step is timed where nothing waits for it, and after how many seconds no more."""


class ModelRunner:
    """Makes calls of programs from batches, and pads them.

    Attributes:
        programs: Everything that it can run.
        masks: Which token masks the device holds. A new mask is sent with the next step that has masks.
        num_encoder_calls: How often the vision encoder ran for requests.
        replica: Parameters and state of this process.
        calls: Takes the calls: the replica, or what passes them on to the replicas of all hosts.
    """

    def __init__(self, programs: Programs, state: DeviceState):
        config = programs.config
        self.programs = programs
        self.masks = MaskPool(num_words(config.vocab_size))
        self.num_encoder_calls = 0
        self.replica = Replica(programs, state)
        self.calls: Calls = self.replica
        self._config = config
        self._buckets = programs.buckets
        self._executables = programs.executables
        self._constants = np.zeros((config.num_rows, step.SAMPLING_COLUMNS - 2), np.int32)
        self._needs = np.zeros((config.num_rows, len(GREEDY)), bool)  # the variant that each request row needs
        self._min_new_tokens = np.zeros(config.num_rows, np.int32)

    @property
    def has_drafts(self) -> bool:
        """Whether the model drafts tokens itself."""
        return self._config.has_drafts

    # Steps.

    def dispatch(self, batch: Batch, table: RequestTable) -> InFlight:
        """Starts a step: device tables of admitted requests, forward pass, sampling. Does not wait.

        A request whose settings raise runs with plain settings, and `InFlight.failed` names it.
        """
        return self.begin(batch, table)(None)

    def begin(self, batch: Batch, table: RequestTable) -> Sampling:
        """Starts a step up to its sampling; returns what starts the sampling, which must be the next call."""
        failed = [running for running in batch.admitted if not self._admit(running)]
        rows = np.array([entry.place.row for entry in batch.entries])
        failed += self._end_minimum(batch, rows)
        self.write_pages(batch.dirty_rows, table.pages, table.maps)
        for source, target in batch.copies:
            self._copy_slots(source, target)
        self._encode(batch.encodings)
        scores_prompt = any(entry.scores_prompt for entry in batch.entries)
        needed = Variant(*np.any(self._needs[rows], axis=0).tolist())
        key, variant = self._ready(batch, needed, scores_prompt)
        kinds = {"has_states": table.slots is not None, "has_drafts": self._config.has_drafts}
        packed = packing.pack_forward(batch, key, table.pages, self._config.page_size, table.maps, **kinds)
        self.calls.call(("forward", key), packed)
        scores = self._prompt_logprobs(batch, key) if scores_prompt else None
        vectors = self._vectors(batch, key) if self._config.embeds else None
        rest = scores, tuple(failed), vectors
        return functools.partial(self._sample, batch, key, variant, needed.has_logprobs, *rest)

    def _sample(
        self,
        batch: Batch,
        key: BucketKey,
        variant: Variant,
        needs_logprobs: bool,
        prompt_scores: Logprobs | None,
        failed: tuple[RunningRequest, ...],
        vectors: jax.Array | None,
        mask_rows: np.ndarray | None,
    ) -> InFlight:
        arrays = [packing.pack_sampling(batch, key, self._constants)]
        if variant.has_logprobs:
            arrays.append(_chosen_ids(batch, key.num_rows, is_needed=needs_logprobs))
        if variant.has_masks:
            arrays += self._token_masks(batch, key, mask_rows)
        output = self.calls.call(("sample", key.num_rows, variant), *arrays)
        output = output if needs_logprobs else StepOutput(output.tokens, None)
        for array in jax.tree.leaves((output, vectors)):
            array.copy_to_host_async()
        return InFlight(batch, output, prompt_scores, failed, vectors)

    @property
    def vision_row_bytes(self) -> int:
        """Bytes of one row of the vision pool; 0 where the model takes text only."""
        vision = self.replica.state.vision
        return 0 if vision is None else vision.shape[1] * vision.dtype.itemsize

    @property
    def max_draft_rows(self) -> int:
        """Rows of logits that a step with drafts may have. It grows when the shapes for drafts are compiled."""
        buckets = self._buckets
        if buckets.drafts and self.programs.are_ready(buckets.drafts[-1]):
            return buckets.drafts[-1].num_rows
        ready = [key.num_rows for key in buckets.drafts if self.programs.are_ready(key)]
        return max(buckets.max_rows, *ready) if ready else buckets.max_rows

    def _ready(self, batch: Batch, needed: Variant, scores_prompt: bool) -> tuple[BucketKey, Variant]:
        """The smallest compiled shape and the cheapest compiled variant that can run the batch.

        Where requests of the batch share prefixes, a compiled shape that reads these prefixes once comes first.
        """
        key, buckets, is_ready = batch.key, self._buckets, self._executables.is_ready
        if not buckets.decode and needed.has_logprobs:
            needed = EVERYTHING  # deterministic: the sums of two programs may differ in their last bits
        keys = buckets.decode if key.phase is Phase.DECODE else buckets.extend
        if batch.has_drafts:
            keys = buckets.with_room(batch.num_tokens, batch.num_rows)
        if batch.groups and (grouped := buckets.pick_grouped(key.num_tokens)):
            keys = (grouped, *keys)
        for larger in keys:
            if larger < key or not is_ready(("forward", larger)):
                continue
            if scores_prompt and not is_ready(("prompt_logprobs", larger.num_tokens)):
                continue
            if self._config.embeds and not is_ready(("embed", larger)):
                continue
            for variant in VARIANTS:
                if variant.covers(needed) and is_ready(("sample", larger.num_rows, variant)):
                    return larger, variant
        raise AssertionError(f"no program can run {key} with {needed}")

    def _token_masks(self, batch: Batch, key: BucketKey, mask_rows: np.ndarray | None) -> list[np.ndarray]:
        """Sends new masks; returns the rows of the mask pool and the forced tokens."""
        for upload in self.masks.take_uploads():
            self.calls.call(("write_masks", len(upload.rows)), upload.rows, upload.masks)
        rows = np.zeros(key.num_rows, np.int32)
        if mask_rows is not None:
            rows[: len(mask_rows)] = mask_rows
        return [rows, packing.pack_forced(batch, key)]

    def _encode(self, encodings: Sequence[Encoding]) -> None:
        """Encodes the tiles, then the frames, of all requests, each time with the largest program that they fill.

        Fewer calls with padding would be slower: a tile is hundreds of rows, so padding costs as much as tiles do.
        """
        for is_video in (False, True):
            left = [encoding for encoding in encodings if encoding.is_video == is_video]
            while left:
                name = self._encode_program(len(left), is_video=is_video)
                part, left = left[: name[1]], left[name[1] :]
                self.calls.call(name, *packing.pack_encodings(part, name[1]))
                self.num_encoder_calls += 1

    def _encode_program(self, count: int, *, is_video: bool) -> EncodeName:
        """The largest compiled program that `count` tiles fill, or else the smallest compiled one."""
        encoders = [name for name in self.programs.encoders if name[2] == is_video]  # the largest first
        ready = [name for name in encoders if self._executables.is_ready(name)]
        return next((name for name in ready if name[1] <= count), ready[-1])

    def _prompt_logprobs(self, batch: Batch, key: BucketKey) -> Logprobs:
        targets = np.zeros(key.num_tokens, np.int32)
        chosen = np.zeros((key.num_tokens, MAX_TOP_LOGPROBS), np.int32)
        offset = 0
        for entry in batch.entries:
            if entry.scores_prompt:
                following = entry.running.tokens[entry.start + 1 : entry.start + entry.num_new + 1]
                targets[offset : offset + len(following)] = following
                ids = entry.running.request.token_ids_logprob
                chosen[offset : offset + entry.num_new, : len(ids)] = ids
            offset += entry.num_new
        return self.calls.call(("prompt_logprobs", key.num_tokens), targets, chosen)

    def _vectors(self, batch: Batch, key: BucketKey) -> jax.Array:
        """The hidden state of the last new token of each entry."""
        rows = np.zeros(key.num_rows, np.int32)
        rows[: len(batch.entries)] = np.cumsum([entry.num_new for entry in batch.entries]) - 1
        return self.calls.call(("embed", key), rows)

    # Runs on padding, which make programs ready. They read and write the dump row and the dump page only.

    @property
    def is_warm(self) -> bool:
        """Whether every compiled program is ready."""
        return not self._executables.cold()

    def warm_up(self) -> None:
        """Runs compiled programs until all are ready, and waits for the device."""
        while not self.is_warm:
            self.warm_one()
        jax.block_until_ready(self.replica.state)

    def rehearse(self) -> None:
        """Runs a forward pass and waits for it, because hosts connect when they first compute together."""
        keys = self._buckets.decode or self._buckets.extend
        self._run_on_padding(("forward", keys[-1]))  # it is always compiled
        jax.block_until_ready(self.replica.state)

    def warm_one(self) -> None:
        """Runs one program that is not ready yet, if there is one. Does not wait."""
        for name in self._executables.cold()[:1]:
            self._run_on_padding(name)

    def prepare_idle_steps(self, key: BucketKey) -> None:
        """Compiles the programs of `run_idle_step`, unless they are compiled, and makes their first runs."""
        self._executables.compile([("forward", key), ("sample", key.num_rows, GREEDY)])
        self.warm_up()

    def run_idle_step(self, key: BucketKey, packed: np.ndarray) -> jax.Array:
        """Runs a forward pass and a greedy sampling whose tokens no request gets. Does not wait for the tokens.

        Args:
            key: The shape.
            packed: `step.PackedInputs` that name slot 0 for every token. They read the pages of the page table.
        """
        self.calls.call(("forward", key), packed)
        sampling = np.zeros((key.num_rows, step.SAMPLING_COLUMNS), np.int32)
        return self.calls.call(("sample", key.num_rows, GREEDY), sampling).tokens

    def can_draft(self, num_rows: int) -> bool:
        """Whether the model can draft tokens of so many requests now."""
        return self._drafting(num_rows) is not None

    def _drafting(self, num_rows: int) -> tuple[Hashable, int] | None:
        """The smallest program that is ready and drafts a token of so many requests, and its rows."""
        names = ((("draft", size), size) for size in self._buckets.repeats if size >= num_rows)
        return next((each for each in names if self._executables.is_ready(each[0])), None)

    def draft(self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], count: int) -> np.ndarray:
        """Tokens that may follow by the model's own layer for them, int[requests, count]. Waits for the device.

        Args:
            rows: The row of each request.
            tokens: Its last token, which no step has run.
            positions: The index of that token.
            count: Tokens of each request, at most `MOST_REPEATS`.
        """
        found = self._drafting(len(rows))
        assert found is not None, "it can draft so many"
        name, size = found
        packed = np.zeros((size, step.DRAFT_COLUMNS), np.int32)
        packed[: len(rows)] = np.stack([rows, tokens, positions], axis=1)
        drafted = [self.calls.call(name, packed, np.array(index, np.int32)) for index in range(count)]
        return np.stack([np.asarray(each) for each in drafted], axis=1)[: len(rows)]

    def can_time(self, key: BucketKey | int) -> bool:
        """Whether a step of this shape can be timed, or a draft of so many rows: its programs are ready."""
        if isinstance(key, int):
            return self._executables.is_ready(("draft", key))
        return self._executables.is_ready(("forward", key)) and self._sampling(key.num_rows) is not None

    def _sampling(self, num_rows: int) -> Hashable | None:
        """The cheapest sampling program for so many rows that is ready."""
        names = (("sample", num_rows, variant) for variant in VARIANTS)
        return next((name for name in names if self._executables.is_ready(name)), None)

    def time_step(self, key: BucketKey | int, *, is_idle: bool) -> float:
        """The seconds that a step of this shape, or a draft of so many rows, takes on padding.

        Of decode steps two are started before the first ends, as where steps overlap; others run alone. While requests
        wait for it, it is timed once, and else several times, of which the least counts, unless it takes long.
        """
        if isinstance(key, int):
            names, count = [("draft", key)], 2
        else:
            names, count = [("forward", key), self._sampling(key.num_rows)], 1 + (key.phase is Phase.DECODE)
        seconds, begun = math.inf, time.perf_counter()
        for _ in range(TIMED_RUNS if is_idle else 1):
            jax.block_until_ready(self.replica.state)
            begin = time.perf_counter()
            for _ in range(count):
                for name in names:
                    self._run_on_padding(name)
            jax.block_until_ready(self.replica.state)
            seconds = min(seconds, (time.perf_counter() - begin) / count)
            if time.perf_counter() - begun > LONG_S:
                break
        return seconds

    def _run_on_padding(self, name: Hashable) -> None:
        self.calls.call(name, *self._padding(name))

    def _padding(self, name: Hashable) -> Iterable[np.ndarray]:
        """Arrays for a call that changes only the dump row and the dump page, which are never read."""
        zeros: list[np.ndarray] = [np.zeros(shape.shape, shape.dtype) for shape in self._executables.host_shapes(name)]
        match name:
            case ("forward", BucketKey() as key):
                return [packing.pack_padding(key, **self._config.kinds)]
            case ("encode", *_):
                return [zeros[0], zeros[1] + DUMP_ROW]
            case ("sample", _, Variant(has_masks=True)):
                return [*zeros[:-1], zeros[-1] - 1]  # no token is forced
            case ("write_masks", _):
                return [zeros[0], np.invert(zeros[1])]  # row 0 allows everything
            case ("write_counts",):
                row, _, ids, is_output = zeros
                return [row, np.ones_like(row), ids - 1, is_output]  # id -1 is padding
            case ("write_bias",):
                return [zeros[0], zeros[1] - 1, zeros[2]]
            case _:
                return zeros

    # Device tables.

    def _admit(self, running: RunningRequest) -> bool:
        """Sets up the row of a request; returns False, and sets up a plain row, if its settings raise."""
        place, minimum = running.place, running.request.sampling.min_new_tokens
        assert place is not None, "only a running request is admitted"
        try:
            constants, needs = self._settings(running)
            bias = self._bias(running, running.num_output) if needs.has_tables else None
        except Exception:
            logger.exception("the sampling of a request could not be set up")
            self._constants[place.row], self._needs[place.row], self._min_new_tokens[place.row] = 0, GREEDY, 0
            return False
        self._constants[place.row], self._needs[place.row], self._min_new_tokens[place.row] = constants, needs, minimum
        if bias is not None:
            self._write_counts(running, place.row)
            self._write_bias(place.row, bias)
        return True

    def _settings(self, running: RunningRequest) -> tuple[np.ndarray, Variant]:
        request, sampling = running.request, running.request.sampling
        vocab_size, is_sampled = self._config.vocab_size, sampling.temperature > 0
        needs = Variant(
            is_sampled=is_sampled,
            has_thresholds=is_sampled and packing.has_thresholds(sampling, vocab_size),
            has_tables=packing.needs_tables(sampling),
            has_logprobs=request.return_logprob or (sampling.return_constraint and sampling.grammar is not None),
            has_masks=sampling.grammar is not None,
        )
        return packing.sampling_row(sampling, sampling.sampling_seed or 0, vocab_size), needs

    def _end_minimum(self, batch: Batch, rows: np.ndarray) -> list[RunningRequest]:
        """Allows requests to end that have reached their `min_new_tokens`; returns those for which that raises."""
        failed = []
        for index in np.flatnonzero(self._min_new_tokens[rows]):
            entry, minimum = batch.entries[index], int(self._min_new_tokens[rows[index]])
            if not entry.samples or entry.output_index != minimum:
                continue
            try:
                bias = self._bias(entry.running, minimum)
            except Exception:
                logger.exception("the bias of a request could not be worked out")
                failed.append(entry.running)
                continue
            self._write_bias(entry.place.row, bias)
        return failed

    def _bias(self, running: RunningRequest, output_index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and values of a request's bias, padded to the shape of `step.write_bias`."""
        bias = packing.bias_of(running, self._config.eos_token_ids, output_index)
        inside = {token: value for token, value in bias.items() if token < self._config.vocab_size}  # all but odd EOS
        ids = np.full(BIAS_CHUNK, -1, np.int32)
        values = np.zeros(BIAS_CHUNK, np.float32)
        ids[: len(inside)] = list(inside)
        values[: len(inside)] = list(inside.values())
        return ids, values

    def _write_counts(self, running: RunningRequest, row: int) -> None:
        known, num_prompt = running.tokens[: running.num_known], running.num_prompt
        prompt = np.flatnonzero(np.bincount(known[:num_prompt]))  # how often a token is in the prompt does not matter
        ids_to_count = np.concatenate([prompt, known[num_prompt:]])
        for start in range(0, len(ids_to_count), COUNT_CHUNK):
            part = ids_to_count[start : start + COUNT_CHUNK]
            ids = np.full(COUNT_CHUNK, -1, np.int32)
            ids[: len(part)] = part
            is_output = (np.arange(start, start + COUNT_CHUNK) >= len(prompt)).astype(np.int32)
            row_and_reset = np.array(row, np.int32), np.array(start == 0, np.int32)
            self.calls.call(("write_counts",), *row_and_reset, ids, is_output)

    def _write_bias(self, row: int, bias: tuple[np.ndarray, np.ndarray]) -> None:
        self.calls.call(("write_bias",), np.array(row, np.int32), *bias)

    def write_pages(self, dirty: Sequence[int], pages: np.ndarray, maps: Sequence[np.ndarray | None]) -> None:
        """Brings rows of the device's page table up to date, in all page groups.

        Args:
            dirty: The rows.
            pages: The host's page table, [rows, pages of a row].
            maps: See `RequestTable.maps`.
        """
        largest = ROWS_AT_A_TIME[-1]
        for start in range(0, len(dirty), largest):
            part = dirty[start : start + largest]
            k = next(k for k in ROWS_AT_A_TIME if k >= len(part))
            rows = np.zeros(k, np.int32)
            rows[: len(part)] = part
            for index, numbers in enumerate(maps):
                written = rows + index * self._config.num_rows if index else rows
                self.calls.call(("write_rows", k), written, pages[rows] if numbers is None else numbers[pages[rows]])

    def _copy_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        for start in range(0, len(source), COPY_CHUNK):
            slots = np.zeros((2, COPY_CHUNK), np.int32)
            for padded, part in zip(slots, (source, target), strict=True):
                padded[: len(part) - start] = part[start : start + COPY_CHUNK]
            self.calls.call(("copy_slots",), *slots)


def _chosen_ids(batch: Batch, num_rows: int, *, is_needed: bool) -> np.ndarray:
    """int32[rows, chosen]: the ids that each row scores, or -1 everywhere if the step needs no log-probabilities."""
    chosen = np.full((num_rows, MAX_TOP_LOGPROBS), 0 if is_needed else -1, np.int32)
    for row, entry in zip(batch.first_rows, batch.entries, strict=True):
        ids = entry.running.request.token_ids_logprob
        if ids:
            chosen[row : row + entry.num_rows, : len(ids)] = ids
    return chosen
