"""Which programs an engine has: their names, what they take, and which of them the first request needs."""

import dataclasses
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jsg.cache.pool import HEADS_AXIS, KVPool, copy_slots
from jsg.engine.device import step
from jsg.engine.device.executables import Executables, HostArray
from jsg.engine.device.mask_pool import NUM_MASKS, UPLOAD_SIZES, num_words
from jsg.engine.device.sampling import PenaltyTables, TokenMasks
from jsg.models.model import Model
from jsg.models.tensor_parallel import along, sharding_of
from jsg.parameters import MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from jsg.sched.buckets import BucketKey, Buckets, Phase
from jsg.sched.vision_store import VisionShape
from jsg.types import MAX_TOP_LOGPROBS

COUNT_CHUNK = 1024
BIAS_CHUNK = MAX_LOGIT_BIAS + MAX_STOP_TOKENS + 2048  # the last for the model's own EOS tokens: at most that many
ROWS_AT_A_TIME = (1, 8)
COPY_CHUNK = 256

COLUMNS, HEADS, WHOLE = along(1, 2), along(HEADS_AXIS, 4), PartitionSpec()
"""How devices share results: logits by columns, the KV pool by heads; what is whole is equal on all of them."""

EncodeName = tuple[Literal["encode"], int, bool]
"""Of a program that encodes so many tiles of images, or frames of videos."""


class Variant(NamedTuple):
    """What a sampling executable can do; a batch that needs less may use it. Thresholds are top-k, top-p and min-p."""

    is_sampled: bool
    has_thresholds: bool
    has_tables: bool
    has_logprobs: bool
    has_masks: bool = False

    def covers(self, other: "Variant") -> bool:
        """Whether a batch that needs `other` may use this one."""
        return all(mine or not theirs for mine, theirs in zip(self, other, strict=True))


GREEDY = Variant(is_sampled=False, has_thresholds=False, has_tables=False, has_logprobs=False)
DRAWN = GREEDY._replace(is_sampled=True)
SAMPLED = DRAWN._replace(has_thresholds=True)
SCORED = GREEDY._replace(has_logprobs=True)
PENALISED = SAMPLED._replace(has_tables=True)
EVERYTHING = PENALISED._replace(has_logprobs=True)
MASKED_GREEDY = GREEDY._replace(has_masks=True)
MASKED_SAMPLED = SAMPLED._replace(has_masks=True)
MASKED_EVERYTHING = EVERYTHING._replace(has_masks=True)
PLAIN_VARIANTS = (GREEDY, DRAWN, SAMPLED, SCORED, PENALISED, EVERYTHING)
MASKED_VARIANTS = (MASKED_GREEDY, MASKED_SAMPLED, MASKED_EVERYTHING)
VARIANTS = PLAIN_VARIANTS + MASKED_VARIANTS
"""The cheapest first, those with masks last: a batch without a grammar takes one only where it is all there is yet."""


class DeviceState(NamedTuple):
    """Everything on the device that one step hands to the next.

    Donated, except `last_token` and `vision` to the forward pass and `masks` to the sampling. `vision` is the vision
    pool, [rows, D]; None where the model takes text only.
    """

    pool: KVPool
    page_table: jax.Array
    last_token: jax.Array
    penalties: PenaltyTables
    masks: jax.Array
    vision: jax.Array | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Shapes, and the tokens that end an answer.

    `num_rows` includes the dump row, `columns` are pages of one row, `vision` is None where the model takes text only.
    """

    vocab_size: int
    num_rows: int
    columns: int
    page_size: int
    eos_token_ids: frozenset[int]
    vision: VisionShape | None = None

    @property
    def num_top(self) -> int:
        """Alternatives that every log-probability comes with."""
        return min(MAX_TOP_LOGPROBS, self.vocab_size)


def make_state(
    config: RunnerConfig, pool: KVPool, vision: jax.Array | None = None, mesh: Mesh | None = None
) -> DeviceState:
    """The state before the first step, around an empty KV pool and a vision pool; all else whole on every device."""

    def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        return jnp.zeros(shape, dtype, device=sharding_of(mesh, None, len(shape)))

    shape = (config.num_rows, config.vocab_size)
    masks = zeros((NUM_MASKS, num_words(config.vocab_size)), jnp.uint32)
    return DeviceState(
        pool=pool,
        page_table=zeros((config.num_rows, config.columns), jnp.int32),
        last_token=zeros((config.num_rows,), jnp.int32),
        penalties=PenaltyTables(
            output_counts=zeros(shape, jnp.int32), in_prompt=zeros(shape, bool), bias=zeros(shape, jnp.float32)
        ),
        masks=masks.at[0].set(jnp.uint32(0xFFFFFFFF)),
        vision=vision,
    )


def over_devices(state: DeviceState, mesh: Mesh | None) -> DeviceState:
    """A state of shapes that say how devices share it; those that `jax.eval_shape` gives do not."""

    def shared(x: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(mesh, axis, len(x.shape)))

    pool = jax.tree.map(lambda x: shared(x, HEADS_AXIS), state.pool)
    return jax.tree.map(lambda x: shared(x, None), state._replace(pool=None))._replace(pool=pool)


def seen(state: DeviceState, key: BucketKey) -> tuple[Any, ...]:
    """What a forward pass of this shape takes besides: the vision pool, where a step may have tokens of images."""
    return () if state.vision is None or key.phase is Phase.DECODE else (state.vision,)


def _shape_of(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = array.sharding if isinstance(array.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


class Programs:
    """Declares every program of an engine to its executables.

    Attributes:
        leaves: The model's parameters, the first argument of every program that runs the model.
    """

    def __init__(
        self, model: nnx.Module, config: RunnerConfig, state: DeviceState, buckets: Buckets, executables: Executables
    ):
        graph, leaves = nnx.split(model)
        flat, structure = jax.tree.flatten(leaves)
        self.leaves = tuple(flat)
        self._leaf_shapes = tuple(map(_shape_of, flat))
        self._merge: step.Merge = lambda leaves: cast(Model, nnx.merge(graph, jax.tree.unflatten(structure, leaves)))
        self._config = config
        self._shapes: DeviceState = jax.tree.map(_shape_of, state)
        self._buckets = buckets
        self._executables = executables

    def declare(self) -> None:
        """Declares every program, in the order in which those that are not compiled at once are compiled.

        What a first request meets comes first, then the largest shapes: they stand in for the others. The largest
        forward pass is lowered here, see `_hidden`.
        """
        buckets = self._buckets
        self._declare_tables()
        for name in (*self.essential(), *self.usual()):
            self._declare_step(name)
        for key in sorted(buckets.all, key=lambda key: -key.num_tokens):
            self._declare_forward(key)
        draft_rows = {key.num_rows for key in buckets.drafts}
        other_rows = {key.num_rows for key in buckets.all if key not in buckets.drafts}
        for num_rows in sorted(draft_rows | other_rows, reverse=True):
            for variant in VARIANTS if num_rows in other_rows else MASKED_VARIANTS:
                self._declare_sample(num_rows, variant)
        for name in self.encoders:
            self._declare_encode(name)

    @property
    def encoders(self) -> list[EncodeName]:
        """Names of the programs that encode images, and of those for videos, the largest first; none for text."""
        vision = self._config.vision
        kinds = [] if vision is None else [False, True] if vision.frame_rows else [False]
        return [("encode", size, is_video) for is_video in kinds for size in reversed(self._buckets.encode)]

    def declare_largest(self) -> list[Hashable]:
        """Declares the largest program of each kind only, for their memory analyses; returns their names."""
        key, most_rows = self._buckets.extend[-1], max(key.num_rows for key in self._buckets.all)
        self._declare_forward(key)
        self._declare_sample(most_rows, MASKED_EVERYTHING)
        encoders = [name for name in self.encoders if name[1] == self._buckets.encode[-1]]
        for name in encoders:
            self._declare_encode(name)
        names = [("forward", key), ("sample", most_rows, MASKED_EVERYTHING), ("prompt_logprobs", key.num_tokens)]
        return [*names, *encoders]

    def all_names(self) -> list[Hashable]:
        """Every program, once lowered."""
        return self._executables.names()

    def essential(self) -> list[Hashable]:
        """Programs that must be compiled before the first request: those that nothing larger can stand in for.

        For a shape that reads shared prefixes once, one that does not can always stand in; without those for drafts
        there are fewer. For sampling two are here for which another could stand in: that one does far more work.
        """
        buckets = self._buckets
        names: list[Hashable] = [("forward", key) for key in (buckets.extend[-1], *buckets.decode[-1:])]
        names += [("sample", buckets.max_rows, variant) for variant in (GREEDY, SAMPLED, MASKED_EVERYTHING)]
        names += [("prompt_logprobs", buckets.max_tokens)]
        names += [("write_rows", k) for k in ROWS_AT_A_TIME] + [("write_counts",), ("write_bias",)]
        names += [("copy_slots",)] if self._config.page_size > 1 else []
        names += [name for name in self.encoders if name[1] == buckets.encode[-1]]
        return names + [("write_masks", k) for k in UPLOAD_SIZES]

    def usual(self) -> list[Hashable]:
        """Programs that a first request meets where they are compiled. None of them is essential."""
        buckets = self._buckets
        keys = [*buckets.extend[:1], *buckets.decode[:1]]
        names: list[Hashable] = [("forward", key) for key in keys]
        for num_rows in sorted({key.num_rows for key in keys}):
            names += [("sample", num_rows, variant) for variant in (GREEDY, SAMPLED)]
        names += [name for name in self.encoders if name[1] == buckets.encode[0]]
        essential = set(self.essential())
        return [name for name in names if name not in essential]

    def are_ready(self, key: BucketKey) -> bool:
        """Whether any batch of this shape can run."""
        names = [("forward", key), ("sample", key.num_rows, MASKED_EVERYTHING), ("prompt_logprobs", key.num_tokens)]
        return all(map(self._executables.is_ready, names))

    def _declare_step(self, name: Hashable) -> None:
        match name:
            case ("forward", BucketKey() as key):
                self._declare_forward(key)
            case ("sample", int() as num_rows, Variant() as variant):
                self._declare_sample(num_rows, variant)
            case ("encode", int(), bool()):
                self._declare_encode(cast(EncodeName, name))
            case _:
                pass  # it comes with another one

    def _declare_forward(self, key: BucketKey) -> None:
        packed = HostArray((sum(step.packed_sizes(key)),), jnp.int32)

        def forward(leaves, pool, page_table, last_token, packed, vision=None):  # noqa: ANN001, ANN202
            return step.forward(self._merge, key, leaves, pool, page_table, last_token, packed, vision)

        state = self._shapes
        self._executables.declare(
            ("forward", key),
            forward,
            self._leaf_shapes,
            state.pool,
            state.page_table,
            state.last_token,
            packed,
            *seen(state, key),
            donate=(1, 2),
            out_specs=(COLUMNS, WHOLE, HEADS, WHOLE),
        )
        if key.phase is Phase.EXTEND:
            self._declare_prompt_logprobs(key)

    def _declare_encode(self, name: EncodeName) -> None:
        _, num_tiles, is_video = name
        shape = self._config.vision
        assert shape is not None, "a text model encodes nothing"

        def encode(leaves, vision, pixels, rows):  # noqa: ANN001, ANN202
            return step.encode(self._merge, leaves, vision, pixels, rows, is_video=is_video)

        size = shape.image_size
        pixels = HostArray((num_tiles, 3, size, size), jnp.float32)
        rows = HostArray((num_tiles, shape.rows_of(is_video=is_video)), jnp.int32)
        self._executables.declare(name, encode, self._leaf_shapes, self._shapes.vision, pixels, rows, donate=(1,))

    def _declare_prompt_logprobs(self, key: BucketKey) -> None:
        def prompt_logprobs(leaves, hidden, targets, chosen):  # noqa: ANN001, ANN202
            return step.prompt_logprobs(self._merge, leaves, hidden, targets, chosen, num_top=self._config.num_top)

        hidden = self._hidden(key)
        targets = HostArray((key.num_tokens,), jnp.int32)
        chosen = HostArray((key.num_tokens, MAX_TOP_LOGPROBS), jnp.int32)
        self._executables.declare(
            ("prompt_logprobs", key.num_tokens), prompt_logprobs, self._leaf_shapes, hidden, targets, chosen
        )

    def _hidden(self, key: BucketKey) -> jax.ShapeDtypeStruct:
        """The hidden states that a pass gives. They differ in their number only, so one pass is lowered for all."""
        _, hidden, *_ = self._executables.output_shape(("forward", self._buckets.extend[-1]))
        sharding = sharding_of(self._executables.mesh, None, 2)
        return jax.ShapeDtypeStruct((key.num_tokens, hidden.shape[1]), hidden.dtype, sharding=sharding)

    def _logits(self, num_rows: int) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(self._executables.mesh, 1, 2)
        return jax.ShapeDtypeStruct((num_rows, self._config.vocab_size), jnp.float32, sharding=sharding)

    def _declare_sample(self, num_rows: int, variant: Variant) -> None:
        def sample(logits, packed, last_token, tables, chosen, masks):  # noqa: ANN001, ANN202
            return step.sample(
                logits,
                packed,
                last_token,
                tables,
                chosen,
                masks,
                is_sampled=variant.is_sampled,
                has_thresholds=variant.has_thresholds,
                num_top=self._config.num_top,
            )

        def column(dtype: jax.typing.DTypeLike = jnp.int32, *dims: int) -> HostArray:
            return HostArray((num_rows, *dims), dtype)

        shapes_of_rows: Any = (column(), column())
        self._executables.declare(
            ("sample", num_rows, variant),
            sample,
            self._logits(num_rows),
            column(jnp.int32, step.SAMPLING_COLUMNS),
            self._shapes.last_token,
            self._shapes.penalties if variant.has_tables else None,
            column(jnp.int32, MAX_TOP_LOGPROBS) if variant.has_logprobs else None,
            TokenMasks(self._shapes.masks, *shapes_of_rows) if variant.has_masks else None,
            donate=(2, 3),
        )

    def _declare_tables(self) -> None:
        def shape(*dims: int, dtype: jax.typing.DTypeLike = jnp.int32) -> HostArray:
            return HostArray(dims, dtype)

        state, columns = self._shapes, self._config.columns
        for k in ROWS_AT_A_TIME:
            self._executables.declare(
                ("write_rows", k), step.write_rows, state.page_table, shape(k), shape(k, columns), donate=(0,)
            )
        for k in UPLOAD_SIZES:
            words = shape(k, state.masks.shape[1], dtype=jnp.uint32)
            write_masks = step.write_masks
            self._executables.declare(("write_masks", k), write_masks, state.masks, shape(k), words, donate=(0,))
        if self._config.page_size > 1:
            slots = shape(COPY_CHUNK)
            self._executables.declare(
                ("copy_slots",), copy_slots, state.pool, slots, slots, donate=(0,), out_specs=HEADS
            )
        ids = shape(COUNT_CHUNK)
        self._executables.declare(
            ("write_counts",), step.write_counts, state.penalties, shape(), shape(), ids, ids, donate=(0,)
        )
        values = shape(BIAS_CHUNK, dtype=jnp.float32)
        self._executables.declare(
            ("write_bias",), step.write_bias, state.penalties, shape(), shape(BIAS_CHUNK), values, donate=(0,)
        )
