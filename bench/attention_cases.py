"""The table of attention cases for tests and benchmarks, and attention by its definition, which all must equal."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jsg.kernels_pallas.inputs import AttentionInputs, PrefixGroups
from jsg.kernels_pallas.tile import GROUP_TILE, QUERY_TILE
from jsg.window import Window


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch, and the shape of the model.

    Attributes:
        name: Its name in a report.
        rows: For each row (cached tokens, new tokens). Rows with one new token come first.
        heads: Number of query heads.
        kv_heads: Number of key-value heads.
        head_dim: Size of each head.
        page_size: Tokens in a page.
        window: See `ops.paged_attention`.
        softcap: See `ops.paged_attention`.
        has_sinks: Whether query heads have sinks: see `ops.paged_attention`.
        shared: Groups of rows, each with the number of first tokens that its rows have in the same pages.
        padding: Number of tokens that belong to no row.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 1
    window: Window | None = None
    softcap: float | None = None
    has_sinks: bool = False
    shared: tuple[tuple[tuple[int, ...], int], ...] = ()
    padding: int = 3


CASES = (
    Case("decode", ((0, 1), (7, 1), (130, 1), (300, 1))),
    Case("decode-mha", ((5, 1), (200, 1)), heads=3, kv_heads=3),
    Case("decode-8-kv-heads", ((5, 1), (200, 1)), heads=16, kv_heads=8),
    Case("decode-pages-of-16", ((40, 1), (31, 1), (14, 1), (15, 1)), page_size=16),
    Case("decode-pages-of-24", ((100, 1), (22, 1), (23, 1), (24, 1)), page_size=24),
    Case("decode-pages-of-64", ((100, 1), (62, 1), (63, 1), (64, 1)), page_size=64),
    Case("decode-window", ((300, 1), (3, 1), (140, 1), (32, 1)), window=Window(32)),
    Case("decode-softcap", ((30, 1), (200, 1)), softcap=2.0),
    Case("decode-without-padding", ((15, 1), (16, 1), (31, 1), (32, 1), (63, 1), (64, 1), (95, 1)), padding=0),
    Case("prefill-below-a-tile", ((0, 5),)),
    Case("prefill-many-tiles", ((0, 150),)),
    Case("extend", ((64, 70), (3, 2), (129, 64))),
    Case("mixed", ((40, 1), (200, 1), (10, 65), (0, 3))),
    Case("pages-of-16", ((40, 1), (31, 1), (16, 40), (0, 17)), page_size=16),
    Case("window", ((300, 1), (3, 1), (140, 90), (0, 80)), window=Window(32)),
    Case("decode-aligned-window", ((279, 1), (39, 1), (40, 1), (3, 1)), window=Window(40, is_aligned=True)),
    Case("aligned-window", ((300, 1), (40, 1), (130, 90), (0, 80)), page_size=16, window=Window(40, is_aligned=True)),
    Case("softcap", ((30, 1), (9, 20)), softcap=5.0),
    Case("decode-sinks", ((0, 1), (7, 1), (130, 1), (300, 1)), softcap=2.0, has_sinks=True),
    Case("sinks", ((300, 1), (3, 1), (140, 90), (0, 80)), window=Window(32), has_sinks=True),
    Case(
        "shared",
        ((99, 1), (63, 1), (90, 1), (3, 1), (70, 1), (130, 1), (63, 1)),
        shared=(((5, 6), 33), ((0, 2, 4, 1), 60)),
        padding=0,
    ),
    Case("shared-pages-of-16", ((99, 1), (47, 1), (60, 1)), heads=3, kv_heads=1, page_size=16, shared=(((2, 0), 32),)),
    Case("shared-sinks", ((99, 1), (47, 1), (60, 1)), shared=(((2, 0), 32),), has_sinks=True),
    Case("shared-by-two-tiles", tuple((20 + i, 1) for i in range(19)), heads=2, shared=((tuple(range(18)), 17),)),
    Case("nothing", (), padding=4),
)
"""Cases for everything that can differ between batches. Their heads are so small that any implementation is fast."""

DECODE = tuple(case for case in CASES if all(new == 1 for _, new in case.rows))
"""The cases in which each row has one new token."""

MODELS = {
    "llama-3-8b": (32, 8, 128),
    "llama-3.2-1b": (32, 8, 64),
    "qwen2.5-7b": (28, 4, 128),
    "phi-3-mini": (32, 32, 96),
    "phi-2": (32, 32, 80),
    "gemma-2b": (8, 1, 256),
    "gemma-4-31b": (32, 4, 512),  # in layers without windows
}
"""The numbers of query heads and key-value heads, and head_dim, of models that people run."""


def for_model(case: Case, model: str) -> Case:
    """The same batch with the heads of one of `MODELS`."""
    heads, kv_heads, head_dim = MODELS[model]
    return dataclasses.replace(case, name=f"{case.name}-{model}", heads=heads, kv_heads=kv_heads, head_dim=head_dim)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A case as arrays. The expected results are those of the packed tokens without padding."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    inputs: AttentionInputs
    sinks: np.ndarray | None
    expected: np.ndarray
    expected_lse: np.ndarray


def make(
    case: Case,
    *,
    dtype: jax.typing.DTypeLike = "float32",
    pool_dtype: jax.typing.DTypeLike | None = None,
    singles: bool = True,
    latent: bool = False,
    seed: int = 0,
) -> Arrays:
    """Random tensors on permuted pages, and the attention of their rounded values by its definition.

    Args:
        case: The case.
        dtype: Type of the queries.
        pool_dtype: Type of keys and values; None for the type of the queries.
        singles: False puts rows with one new token into tiles too, and leaves their groups out.
        latent: Values are those of the keys.
        seed: Seed of everything random.
    """
    rng = np.random.default_rng(seed)
    pages_of = [-(-(old + new) // case.page_size) for old, new in case.rows]
    num_pages = sum(pages_of) + 2
    table = np.zeros((len(case.rows) + 1, max(pages_of, default=1) + 1), np.int32)
    free = rng.permutation(np.arange(1, num_pages)).astype(np.int32)
    for row, count in enumerate(pages_of):
        table[row + 1, :count], free = free[:count], free[count:]
    for members, shared_len in case.shared:
        pages = shared_len // case.page_size
        table[np.array(members) + 1, :pages] = table[members[0] + 1, :pages]
    shape = (num_pages, case.page_size, case.kv_heads, case.head_dim)
    num_tokens = sum(new for _, new in case.rows) + case.padding
    keys, values = (_rounded(rng, shape, pool_dtype or dtype) for _ in range(2))
    values = keys if latent else values
    keys[0] = values[0] = 0  # the slot for padding rows
    queries = _rounded(rng, (num_tokens, case.heads, case.head_dim), dtype)
    # The first is above all scores.
    sinks = np.array([30, *3 * rng.standard_normal(case.heads - 1)], np.float32) if case.has_sinks else None
    out = np.zeros((num_tokens - case.padding, case.heads, case.head_dim), np.float32)
    lse = np.zeros(out.shape[:2], np.float32)
    for row, tokens in enumerate(_tokens_of(case)):
        pages, lengths = table[row + 1], case.rows[row]
        out[tokens], lse[tokens] = _by_definition(case, queries[tokens], keys, values, sinks, pages, *lengths)
    return Arrays(queries, keys, values, _inputs(case, table, singles), sinks, out, lse)


def cache_of(
    keys: jax.Array | np.ndarray, values: jax.Array | np.ndarray, *, is_by_head: bool
) -> tuple[jax.Array, ...]:
    """Pools `[P, page_size, K, H]` as a kernel wants them: as they are, or by head (see `KVPool.layers`)."""
    if not is_by_head:
        return jnp.asarray(keys), jnp.asarray(values)
    sides = [jnp.swapaxes(each, 1, 2) for each in (keys, values)]
    joined = jnp.concatenate(sides, axis=-1)[:, :, None] if keys.shape[-1] % 128 else jnp.stack(sides, axis=2)
    return (joined,)


def _tokens_of(case: Case) -> list[slice]:
    """The places of each row's new tokens among the packed tokens."""
    ends = list(itertools.accumulate(new for _, new in case.rows))
    return [slice(end - new, end) for end, (_, new) in zip(ends, case.rows, strict=True)]


def _rounded(rng: np.random.Generator, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(jnp.dtype(dtype))


def _int32(numbers: npt.ArrayLike) -> jax.Array:
    """For `jnp.asarray` JAX compiles a program for each shape."""
    return jax.device_put(np.asarray(numbers, np.int32))


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
        page_table=jax.device_put(table),
        single_rows=_int32(np.arange(1, leading + 3) * (np.arange(leading + 2) < leading)),
        single_kv_lens=_int32([old + 1 for old, _ in case.rows[:leading]] + [0, 0]),
        tile_rows=_int32(padded[:, 0]),
        tile_starts=_int32(padded[:, 1]),
        tile_lens=_int32(padded[:, 2]),
        tile_positions=_int32(padded[:, 3]),
        num_tiles=jnp.int32(len(tiles)),
        groups=_groups(case, leading + 2) if case.shared and singles else None,
    )


def _groups(case: Case, num_singles: int) -> PrefixGroups:
    """Every group of `case.shared` in tiles of its members, and one unused tile."""
    shared_lens, tiles = np.zeros(num_singles, np.int32), []
    for members, shared_len in case.shared:
        shared_lens[list(members)] = shared_len
        for start in range(0, len(members), GROUP_TILE):
            tile = members[start : start + GROUP_TILE]
            tiles.append((tile[0] + 1, shared_len, *tile, *[-1] * (GROUP_TILE - len(tile))))
    padded = np.array([*tiles, (0, 0, *[-1] * GROUP_TILE)], np.int32)
    return PrefixGroups(*map(_int32, (shared_lens, padded[:, 0], padded[:, 1], padded[:, 2:])))


def _by_definition(
    case: Case,
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    sinks: np.ndarray | None,
    pages: np.ndarray,
    old: int,
    new: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The softmax attention of one row's new tokens, and its log-sum-exp, in float64."""
    position, query_position = np.arange(old + new), np.arange(old, old + new)[:, None]
    at = pages[position // case.page_size], position % case.page_size
    group = case.heads // case.kv_heads
    key, value = (np.repeat(pool[at].astype(np.float64), group, axis=1) for pool in (keys, values))
    scores = case.head_dim**-0.5 * np.einsum("qnh,snh->nqs", queries.astype(np.float64), key)
    if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
    is_seen = position <= query_position
    if case.window is not None:
        length = case.window.length
        first = query_position // length * length if case.window.is_aligned else query_position + 1 - length
        is_seen &= position >= first
    scores = np.where(is_seen, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
        value = np.concatenate([value, np.zeros((1, *value.shape[1:]))])
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    out = np.einsum("nqs,snh->qnh", weights / total, value)
    return out.astype(np.float32), (largest + np.log(total))[..., 0].T.astype(np.float32)
