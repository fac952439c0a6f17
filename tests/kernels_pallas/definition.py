"""A kernel for attention in interpret mode, and what its result must equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import attention_cases as cases
from jsg.kernels_pallas.attention_block import Attended

TOLERANCES = {"float32": 3e-6, "bfloat16": 2e-2}


def named(name: str) -> cases.Case:
    return next(case for case in cases.CASES if case.name == name)


def attend(kernel: Callable[..., Attended], case: cases.Case, arrays: cases.Arrays, sizes: Any) -> Attended:
    def run(*args: Any) -> Attended:
        scale = case.head_dim**-0.5
        return kernel(*args, scale=scale, window=case.window, softcap=case.softcap, sizes=sizes, interpret=True)

    return jax.tree.map(np.asarray, jax.jit(run)(arrays.queries, arrays.keys, arrays.values, arrays.inputs))


def check(
    kernel: Callable[..., Attended],
    case: cases.Case,
    sizes: Any,
    dtype: str = "float32",
    pool_dtype: str | None = None,
) -> None:
    arrays = cases.make(case, dtype=dtype, pool_dtype=pool_dtype)
    found = attend(kernel, case, arrays, sizes)
    assert found.out.dtype == jnp.dtype(dtype)
    num_real = len(arrays.expected)
    np.testing.assert_allclose(found.out[:num_real].astype(np.float32), arrays.expected, atol=TOLERANCES[dtype])
    np.testing.assert_allclose(found.lse[:num_real], arrays.expected_lse, atol=TOLERANCES[dtype])
    assert len(found.out) == num_real + case.padding
    assert not found.out[num_real:].any()
    assert (found.lse[num_real:] == -np.inf).all()
