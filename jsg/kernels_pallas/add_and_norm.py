"""Residual add and RMS norm in one launch, for NVIDIA. Letters: `jsg/models/inputs.py`.

XLA fuses the norm with the add before it, but the sum is needed once more further down, so that every second layer it
pays for a launch that does nothing but add (seen in the step compiled for an H200).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

MAX_WIDTH = 16_384
"""A row is held in registers: 16 warps of 32 lanes with 32 numbers each."""
VALUES_PER_LANE = 16


def add_and_norm(
    x: Float[Array, "T D"], update: Float[Array, "T D"], weight: Float[Array, " D"], eps: float, *, interpret: bool
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """See `ops.add_and_norm`.

    Raises:
        NotImplementedError: A row is wider than `MAX_WIDTH`.
    """
    num_rows, width = x.shape
    if width > MAX_WIDTH:
        raise NotImplementedError(f"add_and_norm takes rows of at most {MAX_WIDTH} numbers, but got {width}")
    padded = pl.next_power_of_2(width)
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, width=width, padded=padded),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2,
        grid=(num_rows,),
        compiler_params=plgpu.CompilerParams(num_warps=min(max(padded // (32 * VALUES_PER_LANE), 1), 16), num_stages=1),
        interpret=interpret,
        name="add_and_norm",
    )(x, update, weight)


def _kernel(x_ref, update_ref, weight_ref, sum_ref, normed_ref, *, eps: float, width: int, padded: int) -> None:  # noqa: ANN001
    """Grid (T,): one program per row, which it holds in registers. Refs are whole arrays in device memory.

    Columns past `width`, up to the next power of two, are masked: they load as zero and are not stored.
    """
    row, columns = pl.program_id(0), jnp.arange(padded)
    is_real = columns < width

    load = functools.partial(plgpu.load, mask=is_real, other=0.0)
    total = load(x_ref.at[row, columns]) + load(update_ref.at[row, columns])
    wide = total.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.sum(wide * wide) / width + eps)
    plgpu.store(sum_ref.at[row, columns], total, mask=is_real)
    plgpu.store(normed_ref.at[row, columns], load(weight_ref.at[columns]) * normed.astype(total.dtype), mask=is_real)
