"""Products of rows and kernels that are both in e4m3. Letters: `jsg/models/inputs.py`.

Rows are rounded as they come: their scales are computed from the numbers of the step, and a checkpoint's scales of
activations are not used. A row is rounded by itself, so its result depends on no other row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.inputs import Fp8Kernel, Fp8Rows

LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)


def rounded(x: Float[Array, "R D"], groups: int) -> Fp8Rows:
    """Rounds rows to e4m3, to nearest and ties to even, with the largest number of a group at the end of the range.

    A row that is not finite becomes NaN where it is not, or all over.
    """
    wide = x.astype(jnp.float32).reshape(len(x), groups, -1)
    scale = scales_of(jnp.max(jnp.abs(wide), axis=2, keepdims=True))
    values = (wide * (1 / scale)).astype(jnp.float8_e4m3fn)
    return Fp8Rows(values.reshape(x.shape), scale[..., 0])


def scales_of(largest: Float[Array, "*groups"]) -> Float[Array, "*groups"]:
    """The scales of groups with these largest numbers; not 0 for a group of zeros."""
    return jnp.maximum(largest * (1 / LARGEST), float(jnp.finfo(jnp.float32).tiny))


def matmul(rows: Fp8Rows, kernel: Fp8Kernel, sizes: Int[Array, " E"] | None = None) -> Float[Array, "R F"]:
    """The product in float32. Each group of inputs is summed, multiplied with both scales, and added to the others.

    Args:
        rows: The rows, in as many groups as the kernel has.
        kernel: One kernel [F, D], or those of experts.
        sizes: Rows of each expert, as in `ops.grouped_matmul`; None for one kernel.
    """
    (num_rows, groups), depth = rows.scale.shape, rows.values.shape[1]
    group = None if sizes is None else jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=num_rows)

    def scaled(values: jax.Array, row_scale: jax.Array, kernels: jax.Array, scale: jax.Array) -> jax.Array:
        return _sums(values, kernels, sizes) * row_scale[:, None] * (scale if group is None else scale[group])

    if groups == 1:
        return scaled(rows.values, rows.scale[:, 0], kernel.values, kernel.scale[..., 0, :])

    def add(index: Int[Array, ""], total: Float[Array, "R F"]) -> Float[Array, "R F"]:
        length = depth // groups
        values, kernels = (
            lax.dynamic_slice_in_dim(each, index * length, length, axis=each.ndim - 1)
            for each in (rows.values, kernel.values)
        )
        return total + scaled(values, rows.scale[:, index], kernels, kernel.scale[..., index, :])

    return lax.fori_loop(0, groups, add, jnp.zeros((num_rows, kernel.values.shape[-2]), jnp.float32))


def _sums(
    rows: Float[Array, "R D"], kernels: Float[Array, "*E F D"], sizes: Int[Array, " E"] | None
) -> Float[Array, "R F"]:
    rows, kernels = rows.astype(jnp.float32), kernels.astype(jnp.float32)  # which holds every product exactly
    if sizes is None:
        return lax.dot_general(rows, kernels, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return lax.ragged_dot(rows, jnp.swapaxes(kernels, 1, 2), sizes, precision=lax.Precision.HIGHEST)
