"""Attention on the device against attention by hand, in float64 on the host: a wrong kernel is fast too."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.kernels_pallas.tile import QUERY_TILE


class Batch(NamedTuple):
    """Per row its cached and its new tokens; rows with one new token come first."""

    name: str
    rows: tuple[tuple[int, int], ...]


BATCHES = (
    Batch("decode", ((0, 1), (7, 1), (130, 1), (1000, 1))),
    Batch("prefill", ((0, 150), (0, 5))),
    Batch("extend", ((64, 70), (3, 2), (700, 64))),
    Batch("mixed", ((40, 1), (200, 1), (10, 65), (0, 3))),
)


def largest_error(batch: Batch, dtype: jax.typing.DTypeLike, *, heads: int, kv_heads: int, head_dim: int) -> float:
    """The largest difference of any element between `ops.paged_attention` and the definition, on shuffled pages."""
    rng = np.random.default_rng(0)
    lengths = [cached + new for cached, new in batch.rows]
    pages = 1 + rng.permutation(sum(lengths)).astype(np.int32)
    table = np.zeros((len(lengths) + 1, max(lengths)), np.int32)
    for row, pages_of_row in enumerate(np.split(pages, np.cumsum(lengths)[:-1]), start=1):
        table[row, : len(pages_of_row)] = pages_of_row
    shape = (len(pages) + 1, 1, kv_heads, head_dim)
    keys, values = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    queries = jnp.asarray(rng.standard_normal((sum(new for _, new in batch.rows), heads, head_dim)), dtype)
    attend = jax.jit(ops.paged_attention, static_argnames=("scale",))
    found = attend(queries, (keys, values), _inputs(batch, table), scale=head_dim**-0.5)
    expected = _by_definition(batch, table, *(np.asarray(x, np.float64) for x in (queries, keys, values)))
    return float(np.max(np.abs(np.asarray(found, np.float64) - expected)))


def _inputs(batch: Batch, table: np.ndarray) -> AttentionInputs:
    num_singles = next((i for i, (_, new) in enumerate(batch.rows) if new > 1), len(batch.rows))
    tiles, done = [], num_singles
    for row, (cached, new) in enumerate(batch.rows[num_singles:], start=num_singles + 1):
        tiles += [(row, done + i, min(QUERY_TILE, new - i), cached + i) for i in range(0, new, QUERY_TILE)]
        done += new
    rows, starts, lens, positions = jnp.asarray(np.array([*tiles, (0, 0, 0, 0)], np.int32).T)
    return AttentionInputs(
        page_table=jnp.asarray(table),
        single_rows=jnp.arange(1, num_singles + 1, dtype=jnp.int32),
        single_kv_lens=jnp.asarray([cached + 1 for cached, _ in batch.rows[:num_singles]], jnp.int32),
        tile_rows=rows,
        tile_starts=starts,
        tile_lens=lens,
        tile_positions=positions,
        num_tiles=jnp.int32(len(tiles)),
    )


def _by_definition(
    batch: Batch, table: np.ndarray, queries: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Softmax attention of each query over the keys up to its own position."""
    group = queries.shape[1] // keys.shape[2]
    out, done = np.zeros_like(queries), 0
    for row, (cached, new) in enumerate(batch.rows, start=1):
        pages = table[row, : cached + new]
        key, value = (np.repeat(pool[pages, 0], group, axis=1) for pool in (keys, values))
        scores = np.einsum("qnh,snh->nqs", queries[done : done + new], key) * queries.shape[-1] ** -0.5
        is_seen = np.arange(cached + new) <= np.arange(cached, cached + new)[:, None]
        weights = np.where(is_seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        weights /= weights.sum(axis=-1, keepdims=True)
        out[done : done + new] = np.einsum("nqs,snh->qnh", weights, value)
        done += new
    return out
