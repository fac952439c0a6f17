"""Runs batches on the device: packs their arrays, calls the executables, keeps the device's state.

Nothing here waits for the device but `InFlight.read`; the engine calls it one step late.
"""

import dataclasses
import logging
from collections.abc import Hashable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jsg.cache.pool import KVPool
from jsg.engine import packing, step
from jsg.engine.executables import Executables
from jsg.engine.results import InFlight
from jsg.engine.sampling import Logprobs, PenaltyTables
from jsg.models.model import Model
from jsg.sched.buckets import BucketKey, Buckets, Phase
from jsg.sched.records import Batch, BatchEntry, RunningRequest
from jsg.sched.table import RequestTable
from jsg.types import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)

COUNT_CHUNK = 1024
BIAS_CHUNK = MAX_LOGIT_BIAS + MAX_STOP_TOKENS + 2048  # the last for the model's own EOS tokens: at most that many
ROWS_AT_A_TIME = (1, 8)


class Variant(NamedTuple):
    """What a sampling executable can do; a batch that needs less may use it."""

    is_sampled: bool
    has_tables: bool
    has_logprobs: bool

    def covers(self, other: "Variant") -> bool:
        """Whether a batch that needs `other` may use this one."""
        return all(mine or not theirs for mine, theirs in zip(self, other, strict=True))


GREEDY = Variant(is_sampled=False, has_tables=False, has_logprobs=False)
SAMPLED = Variant(is_sampled=True, has_tables=False, has_logprobs=False)
SCORED = Variant(is_sampled=False, has_tables=False, has_logprobs=True)
PENALISED = Variant(is_sampled=True, has_tables=True, has_logprobs=False)
EVERYTHING = Variant(is_sampled=True, has_tables=True, has_logprobs=True)
VARIANTS = (GREEDY, SAMPLED, SCORED, PENALISED, EVERYTHING)
"""The cheapest first."""


class DeviceState(NamedTuple):
    """Everything on the device that one step hands to the next. Donated, except `last_token` to the forward pass."""

    pool: KVPool
    page_table: jax.Array
    last_token: jax.Array
    penalties: PenaltyTables


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Shapes, and the tokens that end an answer. `num_rows` includes the dump row, `columns` are pages of one row."""

    vocab_size: int
    num_rows: int
    columns: int
    page_size: int
    eos_token_ids: frozenset[int]

    @property
    def num_top(self) -> int:
        """Alternatives that every log-probability comes with."""
        return min(MAX_TOP_LOGPROBS, self.vocab_size)


def make_state(config: RunnerConfig, pool: KVPool) -> DeviceState:
    """The state before the first step."""
    shape = (config.num_rows, config.vocab_size)
    return DeviceState(
        pool=pool,
        page_table=jnp.zeros((config.num_rows, config.columns), jnp.int32),
        last_token=jnp.zeros(config.num_rows, jnp.int32),
        penalties=PenaltyTables(
            output_counts=jnp.zeros(shape, jnp.int32), in_prompt=jnp.zeros(shape, bool), bias=jnp.zeros(shape)
        ),
    )


class ModelRunner:
    """The device side of the engine: model, state and executables.

    Invariant: `_state` holds the result of the last dispatch; every array that was donated to it is gone.
    """

    def __init__(
        self, model: nnx.Module, config: RunnerConfig, state: DeviceState, buckets: Buckets, executables: Executables
    ):
        graph, leaves = nnx.split(model)
        flat, structure = jax.tree.flatten(leaves)
        self._leaves = tuple(flat)
        self._merge: step.Merge = lambda leaves: cast(Model, nnx.merge(graph, jax.tree.unflatten(structure, leaves)))
        self._config = config
        self._state = state
        self._buckets = buckets
        self._executables = executables
        self._constants = np.zeros((config.num_rows, step.SAMPLING_COLUMNS - 2), np.int32)
        self._needs = np.zeros((config.num_rows, len(GREEDY)), bool)  # the variant that each request row needs
        self._min_new_tokens = np.zeros(config.num_rows, np.int32)

    # Programs.

    def lower(self) -> None:
        """Lowers every program. Largest shapes first: they stand in for the others until those are compiled."""
        for key in sorted(self._buckets.all, key=lambda key: -key.num_tokens):
            self._lower_forward(key)
        for num_rows in sorted({key.num_rows for key in self._buckets.all}, reverse=True):
            for variant in VARIANTS:
                self._lower_sample(num_rows, variant)
        self._lower_tables()

    def lower_largest(self) -> list[Hashable]:
        """Lowers the largest program of each kind only, for their memory analyses; returns their names."""
        key = self._buckets.extend[-1]
        self._lower_forward(key)
        self._lower_sample(key.num_rows, EVERYTHING)
        return [("forward", key), ("sample", key.num_rows, EVERYTHING), ("prompt_logprobs", key.num_tokens)]

    def all_names(self) -> list[Hashable]:
        """Every program, once lowered."""
        return self._executables.names()

    def essential(self) -> list[Hashable]:
        """Programs that must be compiled before the first request.

        They are those that nothing larger can stand in for, and the shapes that a first request meets. For a shape that
        reads shared prefixes once, one that does not can always stand in.
        """
        buckets = self._buckets
        keys = {buckets.extend[-1], buckets.extend[0], *buckets.decode[-1:], *buckets.decode[:1]}
        names: list[Hashable] = [("forward", key) for key in sorted(keys, reverse=True)]
        for num_rows in sorted({key.num_rows for key in keys}):
            names += [("sample", num_rows, variant) for variant in (GREEDY, SAMPLED)]
        names += [("sample", buckets.max_rows, EVERYTHING), ("prompt_logprobs", buckets.max_tokens)]
        return names + [("write_rows", k) for k in ROWS_AT_A_TIME] + [("write_counts",), ("write_bias",)]

    def _lower_forward(self, key: BucketKey) -> None:
        packed = jax.ShapeDtypeStruct((sum(step.packed_sizes(key)),), jnp.int32)

        def forward(leaves, pool, page_table, last_token, packed):  # noqa: ANN001, ANN202
            return step.forward(self._merge, key, leaves, pool, page_table, last_token, packed)

        state = self._state
        self._executables.lower(
            ("forward", key),
            forward,
            self._leaves,
            state.pool,
            state.page_table,
            state.last_token,
            packed,
            donate=(1, 2),
        )
        if key.phase is Phase.EXTEND:
            self._lower_prompt_logprobs(key)

    def _lower_prompt_logprobs(self, key: BucketKey) -> None:
        def prompt_logprobs(leaves, hidden, targets, chosen):  # noqa: ANN001, ANN202
            return step.prompt_logprobs(self._merge, leaves, hidden, targets, chosen, num_top=self._config.num_top)

        hidden = self._executables.output_shape(("forward", key))[1]
        targets = jax.ShapeDtypeStruct((key.num_tokens,), jnp.int32)
        chosen = jax.ShapeDtypeStruct((key.num_tokens, MAX_TOP_LOGPROBS), jnp.int32)
        self._executables.lower(
            ("prompt_logprobs", key.num_tokens), prompt_logprobs, self._leaves, hidden, targets, chosen
        )

    def _lower_sample(self, num_rows: int, variant: Variant) -> None:
        def sample(logits, packed, last_token, tables, chosen):  # noqa: ANN001, ANN202
            return step.sample(
                logits, packed, last_token, tables, chosen, is_sampled=variant.is_sampled, num_top=self._config.num_top
            )

        self._executables.lower(
            ("sample", num_rows, variant),
            sample,
            jax.ShapeDtypeStruct((num_rows, self._config.vocab_size), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, step.SAMPLING_COLUMNS), jnp.int32),
            self._state.last_token,
            self._state.penalties if variant.has_tables else None,
            jax.ShapeDtypeStruct((num_rows, MAX_TOP_LOGPROBS), jnp.int32) if variant.has_logprobs else None,
            donate=(2, 3),
        )

    def _lower_tables(self) -> None:
        def shape(*dims: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, dtype)

        state, columns = self._state, self._config.columns
        for k in ROWS_AT_A_TIME:
            self._executables.lower(
                ("write_rows", k), step.write_rows, state.page_table, shape(k), shape(k, columns), donate=(0,)
            )
        ids = shape(COUNT_CHUNK)
        self._executables.lower(
            ("write_counts",), step.write_counts, state.penalties, shape(), shape(), ids, ids, donate=(0,)
        )
        values = shape(BIAS_CHUNK, dtype=jnp.float32)
        self._executables.lower(
            ("write_bias",), step.write_bias, state.penalties, shape(), shape(BIAS_CHUNK), values, donate=(0,)
        )

    # Steps.

    def dispatch(self, batch: Batch, table: RequestTable) -> InFlight:
        """Starts a step: device tables of what was admitted, forward pass, sampling. Does not wait.

        A request whose settings raise runs with plain ones and is named in `InFlight.failed`.
        """
        failed = [running for running in batch.admitted if not self._admit(running)]
        rows = np.array([entry.place.row for entry in batch.entries])
        failed += self._end_minimum(batch, rows)
        self._write_rows(batch.dirty_rows, table.pages)
        scores_prompt = any(entry.scores_prompt for entry in batch.entries)
        needed = Variant(*np.any(self._needs[rows], axis=0).tolist())
        key, variant = self._ready(batch, needed, scores_prompt)
        packed = packing.pack_forward(batch, key, table.pages, self._config.page_size)
        logits, hidden = self._run_forward(key, packed)
        scores = self._prompt_logprobs(batch, key, hidden) if scores_prompt else None
        return InFlight(batch, self._sample(batch, key, variant, logits), scores, tuple(failed))

    def _ready(self, batch: Batch, needed: Variant, scores_prompt: bool) -> tuple[BucketKey, Variant]:
        """The smallest compiled shape and the cheapest compiled variant that can run the batch.

        Where requests of the batch share prefixes, one that reads those once is taken first, if it is compiled.
        """
        key, buckets, is_ready = batch.key, self._buckets, self._executables.is_ready
        keys = buckets.decode if key.phase is Phase.DECODE else buckets.extend
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

    def _sample(self, batch: Batch, key: BucketKey, variant: Variant, logits: jax.Array) -> step.StepOutput:
        chosen = _chosen_ids(batch.entries, key.num_rows) if variant.has_logprobs else None
        output = self._run_sample(variant, logits, packing.pack_sampling(batch, key, self._constants), chosen)
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        return output

    def _run_forward(self, key: BucketKey, packed: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Logits and hidden states of a packed step; its keys and values are in the pool."""
        state = self._state
        logits, hidden, pool, page_table = self._executables(
            ("forward", key), self._leaves, state.pool, state.page_table, state.last_token, packed
        )
        self._state = state._replace(pool=pool, page_table=page_table)
        return logits, hidden

    def _run_sample(
        self, variant: Variant, logits: jax.Array | np.ndarray, packed: np.ndarray, chosen: np.ndarray | None
    ) -> step.StepOutput:
        state = self._state
        output, last_token, penalties = self._executables(
            ("sample", len(packed), variant),
            logits,
            packed,
            state.last_token,
            state.penalties if variant.has_tables else None,
            chosen,
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
            case ("sample", int(num_rows), Variant() as variant):
                chosen = np.zeros((num_rows, MAX_TOP_LOGPROBS), np.int32) if variant.has_logprobs else None
                logits = np.zeros((num_rows, vocab_size), np.float32)
                self._run_sample(variant, logits, np.zeros((num_rows, step.SAMPLING_COLUMNS), np.int32), chosen)
            case ("prompt_logprobs", int(num_tokens)):
                key = next(key for key in self._buckets.extend if key.num_tokens == num_tokens)
                hidden = self._executables.output_shape(("forward", key))[1]
                targets, chosen = np.zeros(num_tokens, np.int32), np.zeros((num_tokens, MAX_TOP_LOGPROBS), np.int32)
                self._executables(name, self._leaves, np.zeros(hidden.shape, hidden.dtype), targets, chosen)
            case ("write_rows", int(k)):
                self._write_rows([0] * k, np.zeros((1, columns), np.int32))
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
        needs = Variant(
            is_sampled=sampling.temperature > 0,
            has_tables=packing.needs_tables(sampling),
            has_logprobs=request.return_logprob,
        )
        return packing.sampling_row(sampling, sampling.sampling_seed or 0, self._config.vocab_size), needs

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


def _chosen_ids(entries: Sequence[BatchEntry], num_rows: int) -> np.ndarray:
    chosen = np.zeros((num_rows, MAX_TOP_LOGPROBS), np.int32)
    for row, entry in enumerate(entries):
        ids = entry.running.request.token_ids_logprob
        chosen[row, : len(ids)] = ids
    return chosen
