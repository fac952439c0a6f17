"""Compares attention on the device with attention by its definition, because a wrong kernel may be fast too."""

import dataclasses

import jax
import numpy as np

from bench import attention_cases
from bench.attention_cases import Case
from jsg.kernels_pallas import ops

BATCHES = tuple(case for case in attention_cases.CASES if case.rows)
"""The cases that have a result; a batch of padding alone has none."""


def largest_error(batch: Case, dtype: jax.typing.DTypeLike, *, heads: int, kv_heads: int, head_dim: int) -> float:
    """The largest difference of any element between `ops.paged_attention` and the definition, on shuffled pages."""
    case = dataclasses.replace(batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    arrays = attention_cases.make(case, dtype=dtype)
    attend = jax.jit(ops.paged_attention, static_argnames=("scale", "window", "softcap"))
    out = attend(
        arrays.queries,
        (arrays.keys, arrays.values),
        arrays.inputs,
        scale=head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        sinks=arrays.sinks,
    )
    return float(np.max(np.abs(np.asarray(out, np.float64)[: len(arrays.expected)] - arrays.expected)))
