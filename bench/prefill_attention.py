"""Compares attention of one whole prompt: the kernel over pages, and JAX's attention over contiguous arrays.

    ragged, pages of 1     `ragged_paged_attention` with one token in each page
    ragged, pages of 16    the same with sixteen tokens in each page
    cudnn, xla             `jax.nn.dot_product_attention`, for which keys and values would have to be gathered first

The engine always runs the first. cuDNN would replace it for prompts without a cached prefix on a device that shows that
cuDNN is faster there; no device has been measured yet.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.clock import sample_until
from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.kernels_pallas.ragged_paged_attention import ragged_paged_attention
from jsg.kernels_pallas.tile import QUERY_TILE

ON_GPU = ("ragged, pages of 1", "ragged, pages of 16", "cudnn", "xla")
ON_CPU = ("xla",)
"""The sides that a CPU measures. It could only interpret the kernel, which is too slow except for a test."""
QUEUED = 10
"""The number of calls in one sample. It hides the host's cost of a call, as a step does."""
MAX_SCORES = 2**30
"""The most scores of all heads together. The side "xla" writes them to memory, and is left out if there are more."""
MAX_ERROR = {"float32": 1e-4, "bfloat16": 3e-2}
"""The most by which two sides may differ for standard normal values. Above 1 the error is relative, because rounding is
coarser there."""


class Prompt(NamedTuple):
    """Random queries, keys and values of one prompt."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array


def measure(
    num_tokens: int,
    dtype: str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sides: Sequence[str] | None = None,
    count: int = 20,
    budget_s: float = 2.0,
) -> dict[str, list[float]]:
    """Milliseconds of one layer's attention, by side.

    Args:
        num_tokens: Number of tokens of the prompt; a multiple of 16.
        dtype: Type of all arrays.
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
    shapes = [(num_tokens, each, head_dim) for each in (heads, kv_heads, kv_heads)]
    keys = jax.random.split(jax.random.key(0), 3)
    prompt = Prompt(*(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)))
    samples: dict[str, list[float]] = {}
    expected = None
    for name in sides or (ON_CPU if on_cpu else ON_GPU):
        if name == "xla" and heads * num_tokens**2 > MAX_SCORES:
            continue
        run = _side(name, prompt, interpret=on_cpu)
        try:
            found = np.asarray(run(), np.float32)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if name != "cudnn":
                raise
            print(f"without cuDNN: {error}", file=sys.stderr)  # not every machine has it
            continue
        expected = found if expected is None else expected
        error = np.max(np.abs(found - expected) / np.maximum(1, np.abs(expected)))
        if not error <= MAX_ERROR[dtype]:  # also true for NaN
            raise ArithmeticError(f"{name!r} differs from the side before it by {error:.2g} at {num_tokens} tokens")
        samples[name] = [
            sample / QUEUED
            for sample in sample_until(functools.partial(_queue, run), count=count, warm_up=1, budget_s=budget_s)
        ]
    return samples


def _queue(run: Callable[[], jax.Array]) -> None:
    for _ in range(QUEUED - 1):
        run()
    run().block_until_ready()


def _side(name: str, prompt: Prompt, *, interpret: bool) -> Callable[[], jax.Array]:
    """A function that runs one side's attention of the prompt. Its inputs are already in the form for this side."""
    match name:
        case "xla" | "cudnn":
            return functools.partial(jax.jit(functools.partial(_dense, implementation=name)), *prompt)
        case _:
            page_size = int(name.rpartition(" ")[2])
            run = jax.jit(functools.partial(_ragged, interpret=interpret))
            return functools.partial(run, *_in_pages(prompt, page_size))


def _dense(
    queries: jax.Array, keys: jax.Array, values: jax.Array, *, implementation: Literal["xla", "cudnn"]
) -> jax.Array:
    return jax.nn.dot_product_attention(queries, keys, values, is_causal=True, implementation=implementation)


def _ragged(
    queries: jax.Array, keys: jax.Array, values: jax.Array, inputs: AttentionInputs, *, interpret: bool
) -> jax.Array:
    scale = queries.shape[-1] ** -0.5
    return ragged_paged_attention(queries, keys, values, inputs, scale=scale, interpret=interpret).out


def _in_pages(prompt: Prompt, page_size: int) -> tuple[jax.Array, jax.Array, jax.Array, AttentionInputs]:
    """The queries, pools of shuffled pages, and the arrays that say which tokens see which."""
    num_tokens = len(prompt.queries)
    num_pages = num_tokens // page_size
    pages = 1 + np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    in_order = [x.reshape(num_pages, page_size, *x.shape[1:]) for x in (prompt.keys, prompt.values)]
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
        tile_positions=jnp.asarray(starts),
        num_tiles=jnp.int32(len(starts)),
    )
    return prompt.queries, pools[0], pools[1], inputs
