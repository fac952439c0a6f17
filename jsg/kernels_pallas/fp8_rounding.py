"""Rounds rows to e4m3, as one Pallas-Triton launch. Letters: `jsg/models/inputs.py`.

XLA needs three launches to write both the numbers and their scales: it makes a row's largest number a launch of its
own. A program owns one row, which it reads once.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from jsg.kernels_pallas.attention_block import whole_spec
from jsg.kernels_pallas.reference_fp8 import Fp8Rows, scales_of

ELEMENTS_OF_A_WARP = 1024


def rounded(x: Float[Array, "R D"], groups: int, *, interpret: bool = False) -> Fp8Rows:
    """See `reference_fp8.rounded`."""
    num_rows, depth = x.shape
    shapes = ((x.shape, jnp.float8_e4m3fn), ((num_rows, groups), jnp.float32))
    made = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    warps = min(16, max(1, pl.next_power_of_2(depth) // ELEMENTS_OF_A_WARP))
    made = pl.pallas_call(
        fp8_rounding_kernel,
        grid=(num_rows,),
        in_specs=[whole_spec(x)],
        out_specs=jax.tree.map(whole_spec, made),
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
    )(x)
    return Fp8Rows(*made)


def fp8_rounding_kernel(rows: jax.Ref, values: jax.Ref, scales: jax.Ref) -> None:
    """One program: one row, with each group of its numbers in a row of a block.

    Grid: (rows,). Blocks: every array stays in device memory. Owns: its row of the result.

    Masked: groups past the last, and numbers past the last of a group. A row that is not finite changes no other row.
    """
    row, groups = pl.program_id(0), scales.shape[1]
    length = rows.shape[1] // groups
    group, index = jnp.arange(pl.next_power_of_2(groups))[:, None], jnp.arange(pl.next_power_of_2(length))[None, :]
    mask, at = (group < groups) & (index < length), group * length + index
    wide = plgpu.load(rows.at[row, at], mask=mask, other=0).astype(jnp.float32)
    scale = scales_of(jnp.max(jnp.abs(wide), axis=1, keepdims=True))
    plgpu.store(values.at[row, at], (wide * (1 / scale)).astype(values.dtype), mask=mask)
    plgpu.store(scales.at[row, group], scale, mask=group < groups)
