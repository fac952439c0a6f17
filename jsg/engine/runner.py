"""Runs batches on the device: packs their arrays, calls the executables, keeps the device's state.

Nothing here waits for the device but `InFlight.read`; the engine calls it one step late.
"""

import dataclasses
import logging
from collections.abc import Hashable, Sequence

import jax
import numpy as np
from flax import nnx

from jsg.engine import packing, step
from jsg.engine.executables import Executables
from jsg.engine.mask_pool import MaskPool, Upload, num_words
from jsg.engine.programs import (
    BIAS_CHUNK,
    COPY_CHUNK,
    COUNT_CHUNK,
    GREEDY,
    MASKED_EVERYTHING,
    ROWS_AT_A_TIME,
    VARIANTS,
    DeviceState,
    EncodeName,
    Programs,
    RunnerConfig,
    Variant,
    seen,
)
from jsg.engine.results import InFlight
from jsg.engine.sampling import Logprobs, TokenMasks
from jsg.sched.buckets import BucketKey, Buckets, Phase
from jsg.sched.records import Batch, Encoding, RunningRequest
from jsg.sched.table import RequestTable
from jsg.sched.vision_store import DUMP_ROW
from jsg.types import MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Started:
    """A step whose forward pass was dispatched; what its sampling needs.

    Attributes:
        batch: The step.
        key: The shape that it runs in.
        variant: What its sampling must do.
        logits: Of the forward pass.
        prompt_scores: Log-probabilities of prompt tokens where any request wants them.
        failed: Requests that could not be set up for it.
    """

    batch: Batch
    key: BucketKey
    variant: Variant
    logits: jax.Array
    prompt_scores: Logprobs | None
    failed: list[RunningRequest]


class ModelRunner:
    """The device side of the engine: model, state and executables.

    Attributes:
        programs: Everything that it can run.
        masks: What the device's pool of token masks holds; what is put there is sent with the next step that has masks.
        num_encoder_calls: Times that the vision encoder ran for requests.

    Invariant: `_state` holds the result of the last dispatch; every array that was donated to it is gone.
    """

    def __init__(
        self, model: nnx.Module, config: RunnerConfig, state: DeviceState, buckets: Buckets, executables: Executables
    ):
        self.programs = Programs(model, config, state, buckets, executables)
        self.masks = MaskPool(num_words(config.vocab_size))
        self.num_encoder_calls = 0
        self._leaves = self.programs.leaves
        self._config = config
        self._state = state
        self._buckets = buckets
        self._executables = executables
        self._constants = np.zeros((config.num_rows, step.SAMPLING_COLUMNS - 2), np.int32)
        self._needs = np.zeros((config.num_rows, len(GREEDY)), bool)  # the variant that each request row needs
        self._min_new_tokens = np.zeros(config.num_rows, np.int32)

    # Steps.

    def dispatch(self, batch: Batch, table: RequestTable) -> InFlight:
        """Starts a step: device tables of what was admitted, forward pass, sampling. Does not wait.

        A request whose settings raise runs with plain ones and is named in `InFlight.failed`.
        """
        return self.sample(self.begin(batch, table), None)

    def begin(self, batch: Batch, table: RequestTable) -> Started:
        """The first part of `dispatch`: all but the sampling, which must follow before anything else begins."""
        failed = [running for running in batch.admitted if not self._admit(running)]
        rows = np.array([entry.place.row for entry in batch.entries])
        failed += self._end_minimum(batch, rows)
        self._write_rows(batch.dirty_rows, table.pages)
        for source, target in batch.copies:
            self._copy_slots(source, target)
        self._encode(batch.encodings)
        scores_prompt = any(entry.scores_prompt for entry in batch.entries)
        needed = Variant(*np.any(self._needs[rows], axis=0).tolist())
        key, variant = self._ready(batch, needed, scores_prompt)
        packed = packing.pack_forward(batch, key, table.pages, self._config.page_size)
        logits, hidden = self._run_forward(key, packed)
        scores = self._prompt_logprobs(batch, key, hidden) if scores_prompt else None
        return Started(batch, key, variant, logits, scores, failed)

    def sample(self, started: Started, mask_rows: np.ndarray | None) -> InFlight:
        """The second part of `dispatch`.

        Args:
            started: What `begin` gave.
            mask_rows: Row of `masks` for each row of logits of the batch; None where no request of it has a grammar.
        """
        batch, key, variant = started.batch, started.key, started.variant
        chosen = _chosen_ids(batch, key.num_rows) if variant.has_logprobs else None
        masks = self._token_masks(batch, key, mask_rows) if variant.has_masks else None
        packed = packing.pack_sampling(batch, key, self._constants)
        output = self._run_sample(variant, started.logits, packed, chosen, masks)
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        return InFlight(batch, output, started.prompt_scores, tuple(started.failed))

    @property
    def vision_row_bytes(self) -> int:
        """Bytes of one row of the vision pool; 0 where the model takes text only."""
        vision = self._state.vision
        return 0 if vision is None else vision.shape[1] * vision.dtype.itemsize

    @property
    def max_draft_rows(self) -> int:
        """Rows of logits that a step with drafts may have now: it grows when the shapes for drafts are compiled."""
        buckets = self._buckets
        ready = [key.num_rows for key in buckets.drafts if self.programs.are_ready(key)]
        return max(buckets.max_rows, *ready) if ready else buckets.max_rows

    def _ready(self, batch: Batch, needed: Variant, scores_prompt: bool) -> tuple[BucketKey, Variant]:
        """The smallest compiled shape and the cheapest compiled variant that can run the batch.

        Where requests of the batch share prefixes, one that reads those once is taken first, if it is compiled.
        """
        key, buckets, is_ready = batch.key, self._buckets, self._executables.is_ready
        if not buckets.decode and needed.has_logprobs:
            needed = MASKED_EVERYTHING  # deterministic: the sums of two programs may differ in their last bits
        keys = buckets.decode if key.phase is Phase.DECODE else buckets.extend
        if batch.has_drafts:
            keys = buckets.holding(batch.num_tokens, batch.num_rows)
        if batch.groups and (grouped := buckets.pick_grouped(key.num_tokens)):
            keys = (grouped, *keys)
        for larger in keys:
            if larger < key or not is_ready(("forward", larger)):
                continue
            if scores_prompt and not is_ready(("prompt_logprobs", larger.num_tokens)):
                continue
            for variant in VARIANTS:
                if variant.covers(needed) and is_ready(("sample", larger.num_rows, variant)):
                    return larger, variant
        raise AssertionError(f"no program can run {key} with {needed}")

    def _token_masks(self, batch: Batch, key: BucketKey, mask_rows: np.ndarray | None) -> TokenMasks:
        for upload in self.masks.take_uploads():
            self._write_masks(upload)
        rows = np.zeros(key.num_rows, np.int32)
        if mask_rows is not None:
            rows[: len(mask_rows)] = mask_rows
        return TokenMasks(self._state.masks, rows, packing.pack_forced(batch, key))  # pyright: ignore[reportArgumentType]

    def _write_masks(self, upload: Upload) -> None:
        masks = self._executables(("write_masks", len(upload.rows)), self._state.masks, upload.rows, upload.masks)
        self._state = self._state._replace(masks=masks)

    def _run_forward(self, key: BucketKey, packed: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Logits and hidden states of a packed step; its keys and values are in the pool."""
        state = self._state
        logits, hidden, pool, page_table = self._executables(
            ("forward", key), self._leaves, state.pool, state.page_table, state.last_token, packed, *seen(state, key)
        )
        self._state = state._replace(pool=pool, page_table=page_table)
        return logits, hidden

    def _encode(self, encodings: Sequence[Encoding]) -> None:
        """Encodes tiles, then frames, whosever they are, each time with the largest program that they fill.

        Fewer calls with padding would be slower: a tile is hundreds of rows, so padding computes as much as tiles do.
        """
        for is_video in (False, True):
            left = [encoding for encoding in encodings if encoding.is_video == is_video]
            while left:
                name = self._encode_program(len(left), is_video=is_video)
                part, left = left[: name[1]], left[name[1] :]
                self._run_encode(name, *packing.pack_encodings(part, name[1]))
                self.num_encoder_calls += 1

    def _encode_program(self, count: int, *, is_video: bool) -> EncodeName:
        """The largest program that is filled by so many tiles, else the smallest, of those that are compiled."""
        encoders = [name for name in self.programs.encoders if name[2] == is_video]  # the largest first
        ready = [name for name in encoders if self._executables.is_ready(name)]
        return next((name for name in ready if name[1] <= count), ready[-1])

    def _run_encode(self, name: Hashable, pixels: np.ndarray, rows: np.ndarray) -> None:
        vision = self._executables(name, self._leaves, self._state.vision, pixels, rows)
        self._state = self._state._replace(vision=vision)

    def _run_sample(
        self,
        variant: Variant,
        logits: jax.Array | np.ndarray,
        packed: np.ndarray,
        chosen: np.ndarray | None,
        masks: TokenMasks | None = None,
    ) -> step.StepOutput:
        state = self._state
        output, last_token, penalties = self._executables(
            ("sample", len(packed), variant),
            logits,
            packed,
            state.last_token,
            state.penalties if variant.has_tables else None,
            chosen,
            masks,
        )
        self._state = state._replace(last_token=last_token, penalties=penalties or state.penalties)
        return output

    def _prompt_logprobs(self, batch: Batch, key: BucketKey, hidden: jax.Array) -> Logprobs:
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
        return self._executables(("prompt_logprobs", key.num_tokens), self._leaves, hidden, targets, chosen)

    def close(self) -> None:
        """Frees the weights and the state at once: an engine lies in reference cycles, so Python would do it later."""
        for array in jax.tree.leaves((self._leaves, self._state)):
            array.delete()

    # Runs for the sake of the programs. They read and write the dump row and the dump page only.

    @property
    def is_warm(self) -> bool:
        """Whether every compiled program is ready."""
        return not self._executables.cold()

    def warm_up(self) -> None:
        """Runs compiled programs until all are ready, and waits for the device."""
        while not self.is_warm:
            self.warm_one()
        jax.block_until_ready(self._state)

    def warm_one(self) -> None:
        """Runs one program that is not ready yet, once; does not wait. Nothing happens where all are."""
        for name in self._executables.cold()[:1]:
            self._run_on_padding(name)

    @property
    def num_table_rows(self) -> int:
        """Rows of the page table, the dump row included."""
        return self._config.num_rows

    @property
    def num_table_columns(self) -> int:
        """Pages of one row of the page table."""
        return self._config.columns

    def prepare_idle_steps(self, key: BucketKey) -> None:
        """Compiles what `run_idle_step` needs, if it is not yet, and makes its first runs."""
        self._executables.compile([("forward", key), ("sample", key.num_rows, GREEDY)])
        self.warm_up()

    def run_idle_step(self, key: BucketKey, packed: np.ndarray) -> jax.Array:
        """A forward pass and a greedy sampling whose tokens nobody gets; they may not be there yet.

        Args:
            key: The shape.
            packed: `step.PackedInputs` that name slot 0 for every token. They read what the page table names.
        """
        logits, _ = self._run_forward(key, packed)
        return self._run_sample(GREEDY, logits, np.zeros((key.num_rows, step.SAMPLING_COLUMNS), np.int32), None).tokens

    def write_pages(self, pages: np.ndarray) -> None:
        """Fills the device's page table, [rows, pages of a row]; only while no request runs."""
        self._write_rows(range(1, self._config.num_rows), pages)

    def _run_on_padding(self, name: Hashable) -> None:
        vocab_size, columns = self._config.vocab_size, self._config.columns
        match name:
            case ("forward", BucketKey() as key):
                self._run_forward(key, packing.pack_padding(key))
            case ("encode", int(num_tiles), bool(is_video)):
                shape = self._config.vision
                assert shape is not None, "a text model encodes nothing"
                pixels = np.zeros((num_tiles, 3, shape.image_size, shape.image_size), np.float32)
                rows = np.full((num_tiles, shape.rows_of(is_video=is_video)), DUMP_ROW, np.int32)
                self._run_encode(name, pixels, rows)
            case ("sample", int(num_rows), Variant() as variant):
                chosen = np.zeros((num_rows, MAX_TOP_LOGPROBS), np.int32) if variant.has_logprobs else None
                logits = np.zeros((num_rows, vocab_size), np.float32)
                packed, zeros = np.zeros((num_rows, step.SAMPLING_COLUMNS), np.int32), np.zeros(num_rows, np.int32)
                masks = TokenMasks(self._state.masks, zeros, zeros - 1) if variant.has_masks else None  # pyright: ignore[reportArgumentType]
                self._run_sample(variant, logits, packed, chosen, masks)
            case ("prompt_logprobs", int(num_tokens)):
                keys = self._buckets.extend + self._buckets.drafts
                key = next(key for key in keys if key.num_tokens == num_tokens)
                hidden = self._executables.output_shape(("forward", key))[1]
                targets, chosen = np.zeros(num_tokens, np.int32), np.zeros((num_tokens, MAX_TOP_LOGPROBS), np.int32)
                self._executables(name, self._leaves, np.zeros(hidden.shape, hidden.dtype), targets, chosen)
            case ("write_rows", int(k)):
                self._write_rows([0] * k, np.zeros((1, columns), np.int32))
            case ("copy_slots",):
                self._copy_slots(np.zeros(1, np.int32), np.zeros(1, np.int32))
            case ("write_masks", int(k)):
                words = np.full((k, num_words(vocab_size)), 0xFFFFFFFF, np.uint32)
                self._write_masks(Upload(np.zeros(k, np.int32), words))
            case ("write_counts",):
                self._call_write_counts(0, True, np.full(COUNT_CHUNK, -1, np.int32), np.zeros(COUNT_CHUNK, np.int32))
            case ("write_bias",):
                self._write_bias(0, (np.full(BIAS_CHUNK, -1, np.int32), np.zeros(BIAS_CHUNK, np.float32)))
            case _:
                raise AssertionError(f"nobody knows how to run {name}")

    # Device tables.

    def _admit(self, running: RunningRequest) -> bool:
        """Sets up a request's row; False, and a plain row, when the work for it on the host raises."""
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
        """Lets requests end that have just reached their `min_new_tokens`; returns those for which that raises."""
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
        known = running.tokens[: running.num_known]
        for start in range(0, len(known), COUNT_CHUNK):
            part = known[start : start + COUNT_CHUNK]
            ids = np.full(COUNT_CHUNK, -1, np.int32)
            ids[: len(part)] = part
            is_output = (np.arange(start, start + COUNT_CHUNK) >= running.num_prompt).astype(np.int32)
            self._call_write_counts(row, start == 0, ids, is_output)

    def _call_write_counts(self, row: int, resets: bool, ids: np.ndarray, is_output: np.ndarray) -> None:
        penalties = self._executables(
            ("write_counts",), self._state.penalties, np.int32(row), np.int32(resets), ids, is_output
        )
        self._state = self._state._replace(penalties=penalties)

    def _write_bias(self, row: int, bias: tuple[np.ndarray, np.ndarray]) -> None:
        penalties = self._executables(("write_bias",), self._state.penalties, np.int32(row), *bias)
        self._state = self._state._replace(penalties=penalties)

    def _write_rows(self, dirty: Sequence[int], pages: np.ndarray) -> None:
        largest = ROWS_AT_A_TIME[-1]
        for start in range(0, len(dirty), largest):
            part = dirty[start : start + largest]
            k = next(k for k in ROWS_AT_A_TIME if k >= len(part))
            rows = np.zeros(k, np.int32)
            rows[: len(part)] = part
            table = self._executables(("write_rows", k), self._state.page_table, rows, pages[rows])
            self._state = self._state._replace(page_table=table)

    def _copy_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        for start in range(0, len(source), COPY_CHUNK):
            slots = np.zeros((2, COPY_CHUNK), np.int32)
            for padded, part in zip(slots, (source, target), strict=True):
                padded[: len(part) - start] = part[start : start + COPY_CHUNK]
            self._state = self._state._replace(pool=self._executables(("copy_slots",), self._state.pool, *slots))


def _chosen_ids(batch: Batch, num_rows: int) -> np.ndarray:
    chosen = np.zeros((num_rows, MAX_TOP_LOGPROBS), np.int32)
    for row, entry in zip(batch.first_rows, batch.entries, strict=True):
        ids = entry.running.request.token_ids_logprob
        if ids:
            chosen[row : row + entry.num_rows, : len(ids)] = ids
    return chosen
