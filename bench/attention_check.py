"""Compares attention on the device with attention by its definition, because a wrong kernel may be fast too."""

import dataclasses

import jax
import numpy as np

from bench import attention_cases
from bench.attention_cases import Case
from jsg.kernels_pallas import ops

BATCHES = tuple(case for case in attention_cases.CASES if case.rows)
"""The cases that have a result; a batch of padding alone has none."""


TPU_PAGE_SIZE = 16
"""Slots of a page of every case on a TPU, whose kernel takes no page of one."""


def largest_error(
    batch: Case,
    dtype: jax.typing.DTypeLike,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    implementation: str | None = None,
) -> float:
    """The largest difference of any element between `ops.paged_attention` and the definition, on shuffled pages.

    Args:
        batch: The case, with other heads.
        dtype: Type of queries, keys and values.
        heads: Query heads.
        kv_heads: Key-value heads.
        head_dim: The width of one.
        implementation: See `ops.paged_attention`; None for the kernel of a TPU where JAX runs on one, which the
            reference does not stand in for, and elsewhere for the best.

    Raises:
        NotImplementedError: The implementation that is named cannot do this case.
    """
    case = dataclasses.replace(batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    implementation = implementation or ("tpu" if jax.default_backend() == "tpu" else None)
    if is_by_head := implementation == "tpu":
        case = dataclasses.replace(case, page_size=TPU_PAGE_SIZE)
    arrays = attention_cases.make(case, dtype=dtype)
    attend = jax.jit(ops.paged_attention, static_argnames=("scale", "window", "softcap", "implementation"))
    out = attend(
        arrays.queries,
        attention_cases.cache_of(arrays.keys, arrays.values, is_by_head=is_by_head),
        arrays.inputs,
        scale=head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        sinks=arrays.sinks,
        implementation=implementation,
    )
    return float(np.max(np.abs(np.asarray(out, np.float64)[: len(arrays.expected)] - arrays.expected)))
