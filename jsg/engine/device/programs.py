"""Which programs an engine has: their names and arguments, and which of them the first request needs."""

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jsg.cache.pool import KVPool, copy_slots, heads_axis
from jsg.engine.device import step
from jsg.engine.device.executables import Executables, HostArray
from jsg.engine.device.mask_pool import NUM_MASKS, UPLOAD_SIZES, num_words
from jsg.engine.device.sampling import PenaltyTables, TokenMasks
from jsg.models.model import Model
from jsg.models.tensor_parallel import along, sharding_of, spec_of
from jsg.parameters import MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from jsg.sched.buckets import BucketKey, Buckets, Phase
from jsg.sched.vision_store import VisionShape
from jsg.types import MAX_TOP_LOGPROBS

COUNT_CHUNK = 1024
BIAS_CHUNK = MAX_LOGIT_BIAS + MAX_STOP_TOKENS + 2048  # a model has at most 2048 EOS tokens
ROWS_AT_A_TIME = (1, 8)
COPY_CHUNK = 256

COLUMNS, WHOLE = along(1, 2), PartitionSpec()
"""How devices share results: logits by columns, and the pool as it was. Whole results are equal on all devices."""

POOL_KINDS = frozenset({"forward", "copy_slots"})
"""Kinds of programs that take the KV pool."""

EncodeName = tuple[Literal["encode"], int, bool]
"""The name of a program that encodes that many tiles of images, or frames of videos if the last part is True."""


class Variant(NamedTuple):
    """What a sampling program can do. A batch that needs less may use it. Thresholds are top-k, top-p and min-p."""

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
MASKED_GREEDY = GREEDY._replace(has_masks=True)
MASKED_SAMPLED = SAMPLED._replace(has_masks=True)
EVERYTHING = Variant(*(True for _ in Variant._fields))
COMMON = (GREEDY, DRAWN, SAMPLED)
"""What most batches need: every number of rows has them."""
RARE = (SCORED, PENALISED, MASKED_GREEDY, MASKED_SAMPLED, EVERYTHING)
"""The others: the largest number of rows and powers of two have them, and other batches are padded to these."""
SWITCHED = (MASKED_GREEDY, EVERYTHING)
"""Those of `RARE` that there are if `EVERYTHING` leaves out what no row of a batch needs (`RunnerConfig.has_switches`).
Without a grammar's mask for greedy rows, devices that share the logits would gather them."""
VARIANTS = COMMON + RARE
"""The cheapest first."""


class DeviceState(NamedTuple):
    """Everything on the device that one step hands to the next.

    All arrays are donated, except `last_token` and `vision` to the forward pass and `masks` to the sampling. `vision`
    is the vision pool, [rows, D]; None where the model takes text only.
    """

    pool: KVPool
    page_table: jax.Array
    last_token: jax.Array
    penalties: PenaltyTables
    masks: jax.Array
    vision: jax.Array | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Shapes of the programs, and the tokens that end an answer.

    `num_rows` includes the dump row, `columns` are the pages of one row, `vision` is None for a text model, `embeds`
    says that the engine gives the vector of each prompt, `num_groups` are the page groups of the model, and
    `has_states` says that it keeps a state of each request. With `has_switches` programs have branches: on a GPU the
    host would wait for the step before to learn which one to start.
    """

    vocab_size: int
    num_rows: int
    columns: int
    page_size: int
    eos_token_ids: frozenset[int]
    vision: VisionShape | None = None
    embeds: bool = False
    num_groups: int = 1
    has_states: bool = False
    has_switches: bool = True

    @property
    def num_top(self) -> int:
        """How many alternatives come with every log-probability."""
        return min(MAX_TOP_LOGPROBS, self.vocab_size)


def make_state(
    config: RunnerConfig, pool: KVPool, vision: jax.Array | None = None, mesh: Mesh | None = None
) -> DeviceState:
    """The state before the first step, with these pools. All other arrays are whole on every device."""

    def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        return jnp.zeros(shape, dtype, device=sharding_of(mesh, None, len(shape)))

    shape = (config.num_rows, config.vocab_size)
    masks = zeros((NUM_MASKS, num_words(config.vocab_size)), jnp.uint32)
    return DeviceState(
        pool=pool,
        page_table=zeros((config.num_groups * config.num_rows, config.columns), jnp.int32),
        last_token=zeros((config.num_rows,), jnp.int32),
        penalties=PenaltyTables(counts=zeros(shape, jnp.int32), bias=zeros(shape, jnp.float32)),
        masks=masks.at[0].set(jnp.uint32(0xFFFFFFFF)),
        vision=vision,
    )


def over_devices(state: DeviceState, mesh: Mesh | None, axes: Sequence[Sequence[int]] = ()) -> DeviceState:
    """Adds to a state of shapes, as `jax.eval_shape` gives it, how devices share each array.

    `axes` are those of heads in the arrays of `KVPool.states`.
    """

    def shared(x: Any, axis: int | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(mesh, axis, len(x.shape)))

    layers = jax.tree.map(lambda x: shared(x, heads_axis(len(x.shape))), state.pool.layers)
    states: Any = tuple(tuple(map(shared, arrays, each)) for arrays, each in zip(state.pool.states, axes, strict=True))
    pool = KVPool(layers, states)
    return jax.tree.map(lambda x: shared(x, None), state._replace(pool=None))._replace(pool=pool)


def seen(state: DeviceState, key: BucketKey) -> tuple[Any, ...]:
    """Further arguments of a forward pass: the vision pool, where the step may have tokens of images."""
    return () if state.vision is None or key.phase is Phase.DECODE else (state.vision,)


def _shape_of(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = array.sharding if isinstance(array.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


class Programs:
    """Declares every program of an engine to its executables.

    Attributes:
        config: The shapes of the programs.
        buckets: The shapes of all steps.
        executables: What compiles and calls the programs.
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
        self.config = config
        self._shapes: DeviceState = jax.tree.map(_shape_of, state)
        self.buckets = buckets
        self.executables = executables

    def declare(self, names: Iterable[Hashable] | None = None) -> None:
        """Declares these programs, or every one. The largest forward pass is lowered here: see `_hidden`."""
        for name in self.names if names is None else names:
            self._declare(name)

    @property
    def names(self) -> list[Hashable]:
        """The names of all programs, in the order in which the background thread compiles those that are left to it.

        The programs that a first request meets come first. The largest shapes follow, because they stand in for the
        others. Some names are there twice.
        """
        buckets = self.buckets
        names: list[Hashable] = [*self.essential(), *self.usual(), ("prompt_logprobs", buckets.extend[0].num_tokens)]
        for key in sorted(buckets.all, key=lambda key: -key.num_tokens):
            names += [("forward", key), *self._embed(key)]
            names += [("prompt_logprobs", key.num_tokens)] if key.phase is Phase.EXTEND else []
        return [*names, *self.sampling, *self.encoders]

    @property
    def sampling(self) -> list[Hashable]:
        """Names of the programs that sample, those for most rows first. Drafts are sampled with masks only."""
        buckets, rare = self.buckets, SWITCHED if self.config.has_switches else RARE
        draft_rows = {key.num_rows for key in buckets.drafts}
        other_rows = {key.num_rows for key in buckets.all if key not in buckets.drafts}
        names: list[Hashable] = []
        for num_rows in sorted(draft_rows | other_rows, reverse=True):
            variants = COMMON if num_rows in other_rows else ()
            if num_rows in draft_rows or num_rows == buckets.max_rows or num_rows.bit_count() == 1:
                variants += tuple(each for each in rare if num_rows in other_rows or each.has_masks)
            names += [("sample", num_rows, variant) for variant in variants]
        return names

    @property
    def encoders(self) -> list[EncodeName]:
        """Names of the programs that encode images, and of those for videos, the largest first; none for text."""
        vision = self.config.vision
        kinds = [] if vision is None else [False, True] if vision.frame_rows else [False]
        return [("encode", size, is_video) for is_video in kinds for size in reversed(self.buckets.encode)]

    def largest(self) -> list[Hashable]:
        """The largest program of each kind, whose memory analyses are read. The forward pass comes first."""
        key, most_rows = self.buckets.extend[-1], max(key.num_rows for key in self.buckets.all)
        names: list[Hashable] = [("forward", key), ("sample", most_rows, EVERYTHING)]
        names += [("prompt_logprobs", key.num_tokens)]
        return names + [name for name in self.encoders if name[1] == self.buckets.encode[-1]]

    def essential(self) -> list[Hashable]:
        """Programs that must be compiled before the first request, because no larger one can stand in for them.

        A shape that does not read shared prefixes once can stand in for one that does, and without the shapes for
        drafts there are fewer drafts. Without switches `EVERYTHING` would do far more work for most batches.
        """
        buckets, variants = self.buckets, (EVERYTHING,) if self.config.has_switches else (GREEDY, SAMPLED, EVERYTHING)
        largest = (buckets.extend[-1], *buckets.decode[-1:])
        names: list[Hashable] = [name for key in largest for name in (("forward", key), *self._embed(key))]
        names += [("sample", buckets.max_rows, variant) for variant in variants]
        names += [("prompt_logprobs", buckets.max_tokens)]
        names += [("write_rows", k) for k in ROWS_AT_A_TIME] + [("write_counts",), ("write_bias",)]
        names += [("copy_slots",)] if self.config.page_size > 1 else []
        names += [name for name in self.encoders if name[1] == buckets.encode[-1]]
        return names + [("write_masks", k) for k in UPLOAD_SIZES]

    def usual(self) -> list[Hashable]:
        """Programs that a first request uses if they are compiled. None of them is essential."""
        buckets = self.buckets
        keys = [*buckets.extend[:1], *buckets.decode[:1]]
        names: list[Hashable] = [name for key in keys for name in (("forward", key), *self._embed(key))]
        for num_rows in sorted({key.num_rows for key in keys}):
            names += [("sample", num_rows, variant) for variant in (GREEDY, SAMPLED)]
        names += [name for name in self.encoders if name[1] == buckets.encode[0]]
        essential = set(self.essential())
        return [name for name in names if name not in essential]

    def _embed(self, key: BucketKey) -> list[Hashable]:
        """The program that gives vectors after a forward pass of this shape, if the engine embeds."""
        return [("embed", key)] if self.config.embeds else []

    def are_ready(self, key: BucketKey) -> bool:
        """Whether any batch of this shape can run."""
        names = [("forward", key), ("sample", key.num_rows, EVERYTHING), ("prompt_logprobs", key.num_tokens)]
        return all(map(self.executables.is_ready, names))

    def _declare(self, name: Hashable) -> None:
        """Declares the program of this name: the function, the shapes that it takes, and what it may reuse."""
        state, config = self._shapes, self.config
        declare = functools.partial(self.executables.declare, name)
        match name:
            case ("forward", BucketKey() as key):
                kinds = {"num_groups": config.num_groups, "has_states": config.has_states}
                is_deterministic = not self.buckets.decode
                run = functools.partial(step.forward, self._merge, key, is_deterministic=is_deterministic, **kinds)
                packed = _host(sum(step.packed_sizes(key, **kinds)))
                tables = state.pool, state.page_table, state.last_token
                specs = (COLUMNS, WHOLE, jax.tree.map(spec_of, state.pool), WHOLE)
                declare(run, self._leaf_shapes, *tables, packed, *seen(state, key), donate=(1, 2), out_specs=specs)
            case ("prompt_logprobs", int() as num_tokens):
                run = functools.partial(step.prompt_logprobs, self._merge, num_top=config.num_top)
                chosen = _host(num_tokens, MAX_TOP_LOGPROBS)
                declare(run, self._leaf_shapes, self._hidden(num_tokens), _host(num_tokens), chosen)
            case ("embed", BucketKey() as key):
                declare(step.pooled, self._hidden(key.num_tokens), _host(key.num_rows))
            case ("sample", int() as num_rows, Variant() as variant):
                flags = {"is_sampled": variant.is_sampled, "has_thresholds": variant.has_thresholds}
                sample = functools.partial(step.sample, **flags)
                if config.has_switches and variant == EVERYTHING:
                    sample = step.sample_needed
                rows = _host(num_rows)
                declare(
                    functools.partial(sample, num_top=config.num_top),
                    self._logits(num_rows),
                    _host(num_rows, step.SAMPLING_COLUMNS),
                    state.last_token,
                    state.penalties if variant.has_tables else None,
                    _host(num_rows, MAX_TOP_LOGPROBS) if variant.has_logprobs else None,
                    TokenMasks(state.masks, rows, rows) if variant.has_masks else None,  # pyright: ignore[reportArgumentType]
                    donate=(2, 3),
                )
            case ("encode", int() as num_tiles, bool() as is_video):
                assert config.vision is not None, "a text model encodes nothing"
                run = functools.partial(step.encode, self._merge, is_video=is_video)
                pixels = _host(num_tiles, 3, *(config.vision.image_size,) * 2, dtype=jnp.float32)
                rows = _host(num_tiles, config.vision.rows_of(is_video=is_video))
                declare(run, self._leaf_shapes, state.vision, pixels, rows, donate=(1,))
            case ("write_rows", int() as k):
                declare(step.write_rows, state.page_table, _host(k), _host(k, config.columns), donate=(0,))
            case ("write_masks", int() as k):
                masks = _host(k, state.masks.shape[1], dtype=jnp.uint32)
                declare(step.write_rows, state.masks, _host(k), masks, donate=(0,))
            case ("copy_slots",):
                slots = _host(COPY_CHUNK)
                specs = jax.tree.map(spec_of, state.pool)
                declare(copy_slots, state.pool, slots, slots, donate=(0,), out_specs=specs)
            case ("write_counts",):
                ids = _host(COUNT_CHUNK)
                declare(step.write_counts, state.penalties, _host(), _host(), ids, ids, donate=(0,))
            case ("write_bias",):
                values = _host(BIAS_CHUNK, dtype=jnp.float32)
                declare(step.write_bias, state.penalties, _host(), _host(BIAS_CHUNK), values, donate=(0,))
            case _:
                raise AssertionError(f"{name} names no program")

    def _hidden(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        """The hidden states of so many tokens. Passes differ in that number only, so one pass is lowered for all."""
        _, hidden, *_ = self.executables.output_shape(("forward", self.buckets.extend[-1]))
        sharding = sharding_of(self.executables.mesh, None, 2)
        return jax.ShapeDtypeStruct((num_tokens, hidden.shape[1]), hidden.dtype, sharding=sharding)

    def _logits(self, num_rows: int) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(self.executables.mesh, 1, 2)
        return jax.ShapeDtypeStruct((num_rows, self.config.vocab_size), jnp.float32, sharding=sharding)


def _host(*dims: int, dtype: jax.typing.DTypeLike = jnp.int32) -> HostArray:
    """The shape of an array that comes from the host at every call."""
    return HostArray(dims, dtype)
