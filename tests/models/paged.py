"""Runs a model the way the engine does, by hand and small enough to be checked by reading.

Chunks go through query tiles, then one token at a time, over a pool whose pages are dealt out in a shuffled order.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jsg.cache.pool import KVPool, make_pool, make_states
from jsg.kernels_pallas.inputs import AttentionInputs, Pieces
from jsg.kernels_pallas.tile import QUERY_TILE
from jsg.models.config import read_spec
from jsg.models.inputs import ForwardInputs
from jsg.models.loading import load_model
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import gather_columns, sharding_of, spec_of
from tests.kernels_pallas.definition import QUICKLY

MAX_TOKENS = 128  # packed tokens of one step; decode steps are padded to it too, so that one program serves both
MAX_CONTEXT = 128  # tokens of one row
NUM_ROWS = 3
NUM_TILES = NUM_ROWS + MAX_TOKENS // QUERY_TILE


def load_directory(directory: Path) -> tuple[ModelSpec, nnx.Module]:
    config = read_spec(directory)
    return config, load_model(directory, config)


class PagedModel:
    """A model, its pool, and how many tokens each row has; the rows' pages are fixed."""

    def __init__(
        self, config: ModelSpec, model: nnx.Module, page_size: int = 1, dtype=jnp.float32, mesh: Mesh | None = None
    ):
        pages_per_row = MAX_CONTEXT // page_size
        pages = np.random.default_rng(0).permutation(np.arange(1, NUM_ROWS * pages_per_row + 1))
        self.page_table = pages.reshape(NUM_ROWS, pages_per_row).astype(np.int32)
        self._page_size = page_size
        place = functools.partial(sharding_of, mesh)
        self._has_states = bool(config.state_shapes)

        def new_pool() -> KVPool:
            pool = make_pool(config.kv_shapes, len(pages) + 1, page_size, dtype, place=place)
            states = make_states(config.state_shapes, NUM_ROWS + 1, dtype, place)
            return pool._replace(states=jax.tree.map(lambda x: x.at[1:].set(jnp.nan), states))  # nobody may read them

        self._new_pool = new_pool
        graph, self._own_state = nnx.split(model)

        def forward(state, inputs, pool):
            model = nnx.merge(graph, state)
            hidden, pool = model(inputs, pool)
            return gather_columns(model.logits(hidden)), pool

        if mesh is not None:
            parts = tuple(jax.tree.map(spec_of, each) for each in (self._own_state, self._new_pool()))
            whole = PartitionSpec()
            specs = {"in_specs": (parts[0], whole, parts[1]), "out_specs": (whole, parts[1])}
            forward = jax.shard_map(forward, mesh=mesh, check_vma=False, **specs)
        self._forward = jax.jit(forward, donate_argnums=2, compiler_options=QUICKLY)
        self.vision = None  # rows [I, D] that tokens from the vocabulary's size on are embedded as
        self.reset()

    def reset(self, model: nnx.Module | None = None) -> None:
        """Forgets all sequences; computes with the parameters of another model of the same shape, if one is given."""
        self.pool = self._new_pool()
        self._lens = np.zeros(NUM_ROWS, np.int64)
        self._state = self._own_state if model is None else nnx.state(model)

    def extend(self, chunks: dict[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Adds a chunk to each of the given rows; returns the logits [tokens, V] of each row's chunk."""
        tiles, tokens, positions, slots, spans = [], [], [], [], {}
        for row, chunk in chunks.items():
            spans[row] = slice(len(tokens), len(tokens) + len(chunk))
            for start in range(0, len(chunk), QUERY_TILE):
                length = min(QUERY_TILE, len(chunk) - start)
                tiles.append((row, len(tokens) + start, length, self._lens[row] + start))
            chunk_positions = self._lens[row] + np.arange(len(chunk))
            tokens += list(chunk)
            positions += list(chunk_positions)
            slots += list(self._slots(row, chunk_positions))
            self._lens[row] += len(chunk)
        tile_columns = [_padded(column, NUM_TILES) for column in zip(*tiles, strict=True)]
        none = _padded([], NUM_ROWS)
        attention = AttentionInputs(self.page_table, none, none, *tile_columns, np.int32(len(tiles)))
        lens = {row: len(chunk) for row, chunk in chunks.items()}
        logits = self._run(tokens, positions, slots, attention, lens)
        return {row: logits[span] for row, span in spans.items()}

    def decode(self, tokens: dict[int, int]) -> dict[int, np.ndarray]:
        """Adds one token to each of the given rows; returns the logits [V] of each."""
        rows = np.array(list(tokens))
        positions = self._lens[rows]
        slots = [self._slots(row, position) for row, position in zip(rows, positions, strict=True)]
        self._lens[rows] += 1
        no_tiles = [_padded([], NUM_TILES)] * 4
        attention = AttentionInputs(
            self.page_table, _padded(rows, NUM_ROWS), _padded(positions + 1, NUM_ROWS), *no_tiles, np.int32(0)
        )
        logits = self._run(list(tokens.values()), positions, slots, attention, dict.fromkeys(tokens, 1))
        return {row: logits[i] for i, row in enumerate(tokens)}

    def _slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        return self.page_table[row, positions // self._page_size] * self._page_size + positions % self._page_size

    def _run(self, tokens, positions, slots, attention: AttentionInputs, lens: dict[int, int]) -> np.ndarray:
        packed = [_padded(column, MAX_TOKENS) for column in (tokens, positions, slots)]
        pieces = self._pieces(np.array(list(lens)), np.array(list(lens.values()))) if self._has_states else None
        inputs = ForwardInputs(*packed, attention, self.vision, pieces=pieces)
        logits, self.pool = self._forward(self._state, inputs, self.pool)
        return np.asarray(logits)

    def _pieces(self, rows: np.ndarray, lens: np.ndarray) -> Pieces:
        """The new tokens of these rows, which have been counted. The slot of a row is its number plus one."""
        columns = (np.cumsum(lens) - lens, lens, rows + 1, rows + 1, self._lens[rows] - lens, [])
        return Pieces(*(_padded(column, NUM_ROWS) for column in columns))


def _padded(values: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    padded = np.zeros(length, np.int32)
    padded[: len(values)] = values
    return padded
