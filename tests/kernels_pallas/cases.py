"""One table of attention cases for every implementation, and the naive attention they must equal."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.kernels_pallas.tile import QUERY_TILE


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch: per row (cached tokens, new tokens), and the shape of the model."""

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 1
    window: int | None = None
    softcap: float | None = None
    padding: int = 3


CASES = (
    Case("decode", ((0, 1), (7, 1), (130, 1), (300, 1))),
    Case("decode-mha", ((5, 1), (200, 1)), heads=3, kv_heads=3),
    Case("decode-8-kv-heads", ((5, 1), (200, 1)), heads=16, kv_heads=8),
    Case("prefill-below-a-tile", ((0, 5),)),
    Case("prefill-many-tiles", ((0, 150),)),
    Case("extend", ((64, 70), (3, 2), (129, 64))),
    Case("mixed", ((40, 1), (200, 1), (10, 65), (0, 3))),
    Case("pages-of-16", ((40, 1), (31, 1), (16, 40), (0, 17)), page_size=16),
    Case("window", ((300, 1), (3, 1), (140, 90), (0, 80)), window=32),
    Case("softcap", ((30, 1), (9, 20)), softcap=5.0),
    Case("nothing", (), padding=4),
)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A case made into arrays; `expected` holds the real packed tokens only."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    inputs: AttentionInputs
    expected: np.ndarray


def make(case: Case, *, singles: bool = True, seed: int = 0) -> Arrays:
    """Random tensors on permuted pages. `singles=False` sends one-token rows through tiles too."""
    rng = np.random.default_rng(seed)
    pages_of = [-(-(old + new) // case.page_size) for old, new in case.rows]
    num_pages = sum(pages_of) + 2
    columns = max(pages_of, default=1) + 1
    table = np.zeros((len(case.rows) + 1, columns), np.int32)
    free = rng.permutation(np.arange(1, num_pages)).astype(np.int32)
    for row, count in enumerate(pages_of):
        table[row + 1, :count], free = free[:count], free[count:]
    shape = (num_pages, case.page_size, case.kv_heads, case.head_dim)
    keys, values = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    num_tokens = sum(new for _, new in case.rows) + case.padding
    queries = rng.standard_normal((num_tokens, case.heads, case.head_dim), dtype=np.float32)
    inputs = _inputs(case, table, singles)
    expected = [_naive(case, queries, keys, values, table, row) for row in range(len(case.rows))]
    flat = np.concatenate(expected) if expected else np.zeros((0, case.heads, case.head_dim), np.float32)
    return Arrays(queries, keys, values, inputs, flat)


def _inputs(case: Case, table: np.ndarray, singles: bool) -> AttentionInputs:
    leading = 0
    while singles and leading < len(case.rows) and case.rows[leading][1] == 1:
        leading += 1
    tiles, start = [], leading
    for row, (old, new) in enumerate(case.rows[leading:], start=leading):
        for offset in range(0, new, QUERY_TILE):
            tiles.append((row + 1, start + offset, min(QUERY_TILE, new - offset), old + offset))
        start += new
    padded = np.array(tiles + [(0, 0, 0, 0)] * 2, np.int32)
    return AttentionInputs(
        page_table=jnp.asarray(table),
        single_rows=jnp.asarray(np.arange(1, leading + 3) * (np.arange(leading + 2) < leading), jnp.int32),
        single_kv_lens=jnp.asarray([old + 1 for old, _ in case.rows[:leading]] + [0, 0], jnp.int32),
        tile_rows=jnp.asarray(padded[:, 0]),
        tile_starts=jnp.asarray(padded[:, 1]),
        tile_lens=jnp.asarray(padded[:, 2]),
        tile_positions=jnp.asarray(padded[:, 3]),
        num_tiles=jnp.int32(len(tiles)),
    )


def _naive(
    case: Case, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, table: np.ndarray, row: int
) -> np.ndarray:
    """Softmax attention of one row, head by head and query by query, in float64."""
    old, new = case.rows[row]
    start = sum(n for _, n in case.rows[:row])
    positions = np.arange(old + new)
    pages, offsets = table[row + 1][positions // case.page_size], positions % case.page_size
    out = np.zeros((new, case.heads, case.head_dim))
    for i in range(new):
        low = 0 if case.window is None else max(0, old + i + 1 - case.window)
        for head in range(case.heads):
            kv = head // (case.heads // case.kv_heads)
            key = keys[pages, offsets, kv][low : old + i + 1].astype(np.float64)
            value = values[pages, offsets, kv][low : old + i + 1].astype(np.float64)
            scores = key @ queries[start + i, head].astype(np.float64) * case.head_dim**-0.5
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ value / weights.sum()
    return out.astype(np.float32)
