"""The two programs of a step, forward and sample, called as the engine calls them but outside of it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jsg.cache.pool import KVPool, make_pool
from jsg.engine.device import step
from jsg.engine.device.executables import COMPILER_OPTIONS, Executables
from jsg.engine.device.programs import GREEDY
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.tile import GROUP_TILE, QUERY_TILE
from jsg.models.loading import load_model
from jsg.models.model import Model
from jsg.models.spec import ModelSpec
from jsg.sched.buckets import BucketKey, Phase


class Work(NamedTuple):
    """One packed step: its shape and the two arrays that the engine would send."""

    key: BucketKey
    packed: np.ndarray
    sampling: np.ndarray


class BareStep:
    """A model with random weights over a pool of random keys and values, whose pages are dealt out in advance.

    Running a step changes neither contexts nor positions, so the same work can be repeated.
    """

    def __init__(
        self,
        config: ModelSpec,
        dtype: jax.typing.DTypeLike,
        *,
        max_rows: int,
        context_len: int,
        pool_tokens: int | None = None,
        page_size: int = 1,
        is_shuffled: bool = True,
        compiler_options: Mapping[str, str | bool | int] | None = None,
    ):
        """Allocates everything.

        Args:
            config: The model's shape.
            dtype: Type of weights, activations and pool.
            max_rows: Most requests in one step.
            context_len: Most tokens of one row.
            pool_tokens: Number of KV slots; by default enough for the whole context of every row. With fewer, a row
                that is longer than its share uses the pages of the next row too.
            page_size: KV slots in one page.
            is_shuffled: Whether the pages of a row are scattered over the pool, as after long service, or side by side.
            compiler_options: Options of XLA; by default the engine's on this platform.
        """
        self.config = config
        self.page_size = page_size
        graph, leaves = nnx.split(load_model(None, config, load_format="dummy", dtype=dtype))
        flat, structure = jax.tree.flatten(leaves)
        self._merge: step.Merge = lambda leaves: cast(Model, nnx.merge(graph, jax.tree.unflatten(structure, leaves)))
        self._leaves = tuple(flat)
        columns = -(-context_len // page_size)
        num_pages = max_rows * columns if pool_tokens is None else pool_tokens // page_size
        self._pages = _deal_pages(num_pages, max_rows, columns, is_shuffled=is_shuffled)
        self._shared_len = 0
        self._pool = _random_pool(config, num_pages + 1, page_size, dtype)
        self._page_table = jnp.asarray(self._pages)
        self._last_token = jnp.ones(max_rows + 1, jnp.int32)
        if compiler_options is None:
            compiler_options = COMPILER_OPTIONS.get(jax.default_backend())
        self._executables = Executables(forbid_compile=False, compiler_options=compiler_options)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self._leaves)

    def share_prefix(self, num_tokens: int) -> None:
        """Puts the first tokens of all rows into the same pages. Their number must be a multiple of the page size."""
        columns = num_tokens // self.page_size
        self._pages[1:, :columns] = self._pages[1, :columns]
        self._page_table = jnp.asarray(self._pages)
        self._shared_len = num_tokens

    def prepare(self, key: BucketKey, chunks: Sequence[tuple[int, int]]) -> Work:
        """Packs a step and compiles its programs.

        Args:
            key: The shape. In a decode step every row has one new token; in an extend step every row is cut into tiles.
                If the shape has room for groups, all rows are one group.
            chunks: For each row its cached and its new tokens.
        """
        self._compile(key)
        sampling = np.zeros((key.num_rows, step.SAMPLING_COLUMNS), np.int32)
        sampling[: len(chunks), 0] = np.arange(1, len(chunks) + 1)
        return Work(key, self._pack(key, chunks), sampling)

    def dispatch(self, work: Work) -> jax.Array:
        """Starts the step. Returns its tokens, which may still be computed."""
        logits, _, self._pool, self._page_table = self._executables(
            ("forward", work.key), self._leaves, self._pool, self._page_table, self._last_token, work.packed
        )
        output, self._last_token, _ = self._executables(
            ("sample", work.key.num_rows, GREEDY), logits, work.sampling, self._last_token, None, None
        )
        return output.tokens

    def run(self, work: Work) -> np.ndarray:
        """Runs the step and reads its tokens."""
        return np.asarray(self.dispatch(work))

    def runner(self, key: BucketKey, chunks: Sequence[tuple[int, int]]) -> Callable[[], np.ndarray]:
        """Calls `prepare` now, and returns a function that calls `run`."""
        work = self.prepare(key, chunks)
        return lambda: self.run(work)

    def planned_mib(self, work: Work) -> dict[str, float]:
        """MiB that the compiler plans for the forward pass: temporaries, and results that reuse donated arguments."""
        analysis = self._executables.compiled(("forward", work.key)).memory_analysis()
        if analysis is None:
            return {}
        return {
            "temporary_mib": analysis.temp_size_in_bytes / 2**20,
            "aliased_mib": analysis.alias_size_in_bytes / 2**20,
        }

    def _compile(self, key: BucketKey) -> None:
        forward_name, sample_name = ("forward", key), ("sample", key.num_rows, GREEDY)

        def forward(leaves, pool, page_table, last_token, packed):
            return step.forward(self._merge, key, leaves, pool, page_table, last_token, packed)

        def sample(logits, packed, last_token, tables, chosen):
            options = {"is_sampled": False, "has_thresholds": False, "num_top": 1}
            return step.sample(logits, packed, last_token, tables, chosen, **options)

        packed = jax.ShapeDtypeStruct((sum(step.packed_sizes(key)),), jnp.int32)
        state = (self._leaves, self._pool, self._page_table, self._last_token)
        self._executables.lower(forward_name, forward, *state, packed, donate=(1, 2))
        logits = jax.ShapeDtypeStruct((key.num_rows, self.config.vocab_size), jnp.float32)
        columns = jax.ShapeDtypeStruct((key.num_rows, step.SAMPLING_COLUMNS), jnp.int32)
        self._executables.lower(sample_name, sample, logits, columns, self._last_token, None, None, donate=(2,))
        self._executables.compile([forward_name, sample_name])

    def _pack(self, key: BucketKey, chunks: Sequence[tuple[int, int]]) -> np.ndarray:
        sizes = step.packed_sizes(key)
        packed = np.zeros(sum(sizes), np.int32)
        parts = step.PackedInputs(*np.split(packed, np.cumsum(sizes)[:-1]))  # pyright: ignore[reportArgumentType] # numpy views
        done, tiles = 0, []
        for row, (cached, num_new) in enumerate(chunks, start=1):
            new = slice(done, done + num_new)
            positions = np.arange(cached, cached + num_new)
            parts.token_ids[new] = np.random.default_rng(row).integers(0, self.config.vocab_size, num_new)
            parts.positions[new] = parts.model_positions[new] = positions
            pages = self._pages[row, positions // self.page_size]
            parts.slots[new] = pages * self.page_size + positions % self.page_size
            parts.rows[new] = row
            parts.logit_index[row - 1] = new.stop - 1
            for start in range(0, num_new, QUERY_TILE):
                tiles.append((row, done + start, min(QUERY_TILE, num_new - start), cached + start))
            done = new.stop
        if key.num_groups:
            _fill_groups(parts, len(chunks), self._shared_len)
        if key.phase is Phase.DECODE:
            parts.counts[2] = len(chunks)
        else:
            parts.counts[0] = len(tiles)
            for part, column in zip(parts[-4:], np.array(tiles, np.int32).T, strict=True):
                part[: len(tiles)] = column
        return packed


def _fill_groups(parts: step.PackedInputs, num_rows: int, shared_len: int) -> None:
    """One group of all rows, in as few tiles as possible."""
    parts.shared_lens[:num_rows] = shared_len
    members = parts.group_members.reshape(-1, GROUP_TILE)
    members[:] = -1
    for tile, first in enumerate(range(0, num_rows, GROUP_TILE)):
        of_tile = np.arange(first, min(first + GROUP_TILE, num_rows))
        members[tile, : len(of_tile)] = of_tile
        parts.group_rows[tile], parts.group_lens[tile] = first + 1, shared_len


def _deal_pages(num_pages: int, max_rows: int, columns: int, *, is_shuffled: bool) -> np.ndarray:
    """The page table. Row 0 is for padding; each other row takes pages in order, from where its share begins."""
    pages = np.arange(1, num_pages + 1, dtype=np.int32)
    if is_shuffled:
        np.random.default_rng(0).shuffle(pages)
    starts = np.arange(max_rows)[:, None] * (num_pages // max_rows)
    rows = pages[(starts + np.arange(columns)) % num_pages]
    return np.concatenate([np.zeros((1, columns), np.int32), rows])


def _random_pool(config: ModelSpec, num_pages: int, page_size: int, dtype: jax.typing.DTypeLike) -> KVPool:
    """A pool full of random keys and values, as after use. A processor might treat zeros specially."""
    is_by_head = ops.is_pool_by_head(jax.default_backend())
    [layer] = make_pool(config.kv_shapes[:1], num_pages, page_size, dtype, is_by_head=is_by_head).layers
    fill = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), layer[0].shape, dtype))
    seeds = range(config.num_layers * len(layer))
    return KVPool(tuple(tuple(map(fill, each)) for each in itertools.batched(seeds, len(layer))))
