"""Rounds rows to e4m3, as one Pallas-Triton launch. Letters: `jsg/models/inputs.py`.

XLA needs three launches to write both the numbers and their scales: it makes a row's largest number a launch of its
own. A program owns one row, which it reads once. What makes the row of others, which XLA cannot put into such a launch,
is in it too: the sum of the residual stream with its norm, or what gates let through.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from jsg.kernels_pallas.activation import Activation
from jsg.kernels_pallas.attention_block import whole_spec
from jsg.kernels_pallas.inputs import Fp8Rows
from jsg.kernels_pallas.reference_fp8 import scales_of
from jsg.kernels_pallas.reference_rows import opened

ELEMENTS_OF_A_WARP = 1024

type _Make = Callable[..., tuple[Float[Array, "groups length"], ...]]
"""Makes a row, and perhaps another that is written as it is, of a function that loads rows and of what is given."""


def rounded(x: Float[Array, "R D"], groups: int, *, interpret: bool = False) -> Fp8Rows:
    """See `reference_fp8.rounded`."""
    rows, _ = _launch(lambda load, given: (load(given[0]),), (x,), groups, x.shape[1], interpret=interpret)
    return rows


def normed(
    x: Float[Array, "R D"],
    more: Float[Array, "R D"] | None,
    factor: Float[Array, " D"],
    eps: float,
    groups: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "R D"], Fp8Rows]:
    """See `ops.normed_rows`."""
    depth = x.shape[1]

    def make(load: Callable[..., Array], given: tuple[jax.Ref, ...]) -> tuple[Float[Array, "groups length"], ...]:
        *summands, weights = given
        total = sum((load(each) for each in summands[1:]), start=load(summands[0]))
        wide = total.astype(jnp.float32)
        made = wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide)) / depth + eps)
        made = (load(weights, is_shared=True) * made.astype(weights.dtype)).astype(total.dtype)
        return made, *([total] if more is not None else [])

    given = (x, factor) if more is None else (x, more, factor)
    rows, sums = _launch(make, given, groups, depth, [x] if more is not None else [], interpret=interpret)
    return (sums[0] if sums else x), rows


def gated(gate_up: Float[Array, "R _ D"], activation: Activation, groups: int, *, interpret: bool = False) -> Fp8Rows:
    """See `ops.gated_rows`."""
    parts, depth = gate_up.shape[1:]
    rows, _ = _launch(
        lambda load, given: (opened(tuple(load(given[0], i) for i in range(parts)), activation, jnp.float32),),
        *((gate_up,), groups, depth),
        interpret=interpret,
    )
    return rows


def _launch(
    make: _Make,
    given: tuple[Array, ...],
    groups: int,
    depth: int,
    beside: list[Array] | None = None,
    *,
    interpret: bool,
) -> tuple[Fp8Rows, list[Array]]:
    """The rows that are made of each row of what is given, and arrays like those `beside` with further ones."""
    num_rows, beside = len(given[0]), beside or []
    shapes = (((num_rows, depth), jnp.float8_e4m3fn), ((num_rows, groups), jnp.float32))
    made = [jax.ShapeDtypeStruct(*shape) for shape in (*shapes, *((each.shape, each.dtype) for each in beside))]
    warps = min(16, max(1, pl.next_power_of_2(depth) // ELEMENTS_OF_A_WARP))
    values, scale, *sums = pl.pallas_call(
        functools.partial(fp8_rounding_kernel, make, len(given)),
        grid=(num_rows,),
        in_specs=[whole_spec(each) for each in given],
        out_specs=jax.tree.map(whole_spec, made),
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
    )(*given)
    return Fp8Rows(values, scale), sums


def fp8_rounding_kernel(make: _Make, num_given: int, *refs: Any) -> None:
    """One program: one row, with each group of its numbers in a row of a block.

    Grid: (rows,). Blocks: every array stays in device memory. Owns: its row of the results.

    Masked: groups past the last, and numbers past the last of a group. A row that is not finite changes no other row.
    """
    given, (values, scales, *sums) = refs[:num_given], refs[num_given:]
    row, groups = pl.program_id(0), scales.shape[1]
    length = values.shape[1] // groups
    group, index = jnp.arange(pl.next_power_of_2(groups))[:, None], jnp.arange(pl.next_power_of_2(length))[None, :]
    mask, at = (group < groups) & (index < length), group * length + index

    def load(ref: jax.Ref, *lead: int, is_shared: bool = False) -> Float[Array, "groups length"]:
        return plgpu.load(ref.at[at] if is_shared else ref.at[(row, *lead, at)], mask=mask, other=0)

    made, *others = make(load, given)
    wide = made.astype(jnp.float32)
    scale = scales_of(jnp.max(jnp.abs(wide), axis=1, keepdims=True))
    plgpu.store(values.at[row, at], (wide * (1 / scale)).astype(values.dtype), mask=mask)
    plgpu.store(scales.at[row, group], scale, mask=group < groups)
    for ref, each in zip(sums, others, strict=True):
        plgpu.store(ref.at[row, at], each, mask=mask)
