"""Compares attention of one chunk of a prompt, in the ways that `ops.paged_attention` may compute it and in JAX's own.

    triton, triton pages of 16    `ragged_paged_attention`: one token in each page, sixteen
    cudnn, mosaic                 `chunks.paged_attention`: the chunk's own keys gathered and seen by that kernel, those
                                  before it by the one of "triton"
    cudnn alone, xla              `jax.nn.dot_product_attention`, for which nobody gathers keys: by cuDNN if nothing
                                  precedes the chunk, and by XLA

What the engine runs is a table: "chunks" in `jsg/kernels_pallas/tuning`.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu

from bench.clock import sample_until
from jsg.kernels_pallas import chunks, cudnn_chunks, mosaic_chunks
from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.kernels_pallas.ragged_paged_attention import ragged_paged_attention
from jsg.kernels_pallas.tile import QUERY_TILE

OPTIONAL = ("cudnn", "mosaic", "cudnn alone")
"""The sides that not every machine has."""
ON_GPU = ("triton", "triton pages of 16", *OPTIONAL, "xla")
ON_CPU = ("xla",)
"""The sides that a CPU measures. It could only interpret the kernels, which is too slow except for a test."""
QUEUED = 10
"""The number of calls in one sample. It hides the host's cost of a call, as a step does."""
MAX_SCORES = 2**30
"""The most scores of all heads together. The side "xla" writes them to memory, and is left out if there are more."""
MAX_ERROR = {"float32": 1e-4, "bfloat16": 3e-2}
"""The most by which two sides may differ for standard normal values. Above 1 the error is relative, because rounding is
coarser there."""


class Chunk(NamedTuple):
    """Random queries of new tokens, and keys and values of cached and of new ones."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array

    @property
    def cached(self) -> int:
        """The number of cached tokens."""
        return len(self.keys) - len(self.queries)


def measure(
    num_tokens: int,
    dtype: str,
    *,
    cached: int = 0,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sides: Sequence[str] | None = None,
    count: int = 20,
    budget_s: float = 1.0,
) -> dict[str, list[float]]:
    """Milliseconds of one layer's attention, by side.

    Args:
        num_tokens: Number of tokens of the chunk; a multiple of 16.
        dtype: Type of all arrays.
        cached: Number of tokens before the chunk; a multiple of 16.
        heads: Number of query heads.
        kv_heads: Number of key-value heads.
        head_dim: Size of each head.
        sides: The sides to measure; None for all that this device can run.
        count: Number of samples of each side; fewer if time runs out.
        budget_s: Seconds for the samples of one side.

    Raises:
        ArithmeticError: Two sides differ by more than rounding explains. A wrong kernel may be fast too.
    """
    on_cpu = jax.default_backend() == "cpu"
    lens = (num_tokens, cached + num_tokens, cached + num_tokens)
    shapes = [(each, of, head_dim) for each, of in zip(lens, (heads, kv_heads, kv_heads), strict=True)]
    keys = jax.random.split(jax.random.key(0), 3)
    chunk = Chunk(*(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)))
    samples: dict[str, list[float]] = {}
    expected = None
    for name in sides or (ON_CPU if on_cpu else ON_GPU):
        if (name == "xla" and heads * num_tokens * lens[1] > MAX_SCORES) or (name == "cudnn alone" and cached):
            continue
        try:
            run = _side(name, chunk, interpret=on_cpu)
            found = np.asarray(run(), np.float32)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if name not in OPTIONAL:
                raise
            print(f"without {name}: {error}", file=sys.stderr)
            continue
        expected = found if expected is None else expected
        error = np.max(np.abs(found - expected) / np.maximum(1, np.abs(expected)))
        if not error <= MAX_ERROR[dtype]:  # also true for NaN
            raise ArithmeticError(f"{name!r} differs from the first side by {error:.2g} at {num_tokens} tokens")
        samples[name] = [
            sample / QUEUED
            for sample in sample_until(functools.partial(_queue, run), count=count, warm_up=1, budget_s=budget_s)
        ]
    return samples


def _queue(run: Callable[[], jax.Array]) -> None:
    for _ in range(QUEUED - 1):
        run()
    run().block_until_ready()


def _side(name: str, chunk: Chunk, *, interpret: bool) -> Callable[[], jax.Array]:
    """A function that runs one side's attention of the chunk. Its inputs are already in the form for this side."""
    page_size = 16 if name.endswith("16") else 1
    match name:
        case "xla":
            return functools.partial(jax.jit(_by_xla), *chunk)
        case "cudnn alone":
            attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            return functools.partial(jax.jit(attend), *chunk)
        case "cudnn":
            attend = functools.partial(_apart, own=cudnn_chunks.attend)
        case "mosaic":
            params = mosaic_gpu.InterpretGPUParams() if interpret else False
            attend = functools.partial(_apart, own=functools.partial(mosaic_chunks.attend, interpret=params))
        case _:
            attend = _together
    run = jax.jit(functools.partial(attend, interpret=interpret))
    return functools.partial(run, *_in_pages(chunk, page_size))


def _by_xla(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    seen = len(keys) - len(queries) + jnp.arange(len(queries))
    mask = jnp.arange(len(keys))[None, :] <= seen[:, None]
    return jax.nn.dot_product_attention(queries, keys, values, mask=mask[None], implementation="xla")


def _together(
    queries: jax.Array, keys: jax.Array, values: jax.Array, inputs: AttentionInputs, *, interpret: bool
) -> jax.Array:
    scale = queries.shape[-1] ** -0.5
    return ragged_paged_attention(queries, keys, values, inputs, scale=scale, interpret=interpret).out


def _apart(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    inputs: AttentionInputs,
    *,
    own: chunks.OwnAttention,
    interpret: bool,
) -> jax.Array:
    inputs = inputs._replace(chunks=chunks.list_chunks(inputs, len(queries)))
    scale = queries.shape[-1] ** -0.5
    return chunks.paged_attention(queries, keys, values, inputs, own=own, scale=scale, interpret=interpret).out


def _in_pages(chunk: Chunk, page_size: int) -> tuple[jax.Array, jax.Array, jax.Array, AttentionInputs]:
    """The queries, pools of shuffled pages, and the arrays that say which tokens see which."""
    num_tokens, num_pages = len(chunk.queries), len(chunk.keys) // page_size
    pages = 1 + np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    in_order = [x.reshape(num_pages, page_size, *x.shape[1:]) for x in (chunk.keys, chunk.values)]
    pools = [jnp.zeros((num_pages + 1, *x.shape[1:]), x.dtype).at[pages].set(x) for x in in_order]
    starts = np.arange(0, num_tokens, QUERY_TILE, dtype=np.int32)
    nobody = jnp.zeros(1, jnp.int32)
    inputs = AttentionInputs(
        page_table=jnp.asarray(np.stack([np.zeros_like(pages), pages])),
        single_rows=nobody,
        single_kv_lens=nobody,
        tile_rows=jnp.ones(len(starts), jnp.int32),
        tile_starts=jnp.asarray(starts),
        tile_lens=jnp.asarray(np.minimum(QUERY_TILE, num_tokens - starts)),
        tile_positions=jnp.asarray(chunk.cached + starts),
        num_tiles=jnp.int32(len(starts)),
    )
    return chunk.queries, pools[0], pools[1], inputs
