"""The product of two blocks of e4m3 inside a Pallas-Triton kernel.

Pallas' own product has no word for how many numbers tensor cores may add up before the sum goes to float32. Without it
Triton takes none for the answer, and multiplies on a Hopper card in float16 instead of e4m3. Those of a Hopper card add
with about 14 bits (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2), so a caller keeps blocks short and adds them up
itself.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.triton import dialect as triton  # Pallas has no public way to lower an operation of one's own
from jax._src.pallas.triton import lowering
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxtyping import Array, Float

AS_LONG_AS_THE_BLOCK = 2**30
"""Summands that may be added up before float32: all of a block."""

_dot = Primitive("e4m3_dot")


def e4m3_dot(left: Float[Array, "m k"], right: Float[Array, "n k"]) -> Float[Array, "m n"]:
    """left · rightᵀ in float32, summed over the last axis of both."""
    return _dot.bind(left, right)


@_dot.def_abstract_eval
def _(left: ShapedArray, right: ShapedArray) -> ShapedArray:
    return ShapedArray((left.shape[0], right.shape[0]), jnp.float32)


def _in_float32(left: jax.Array, right: jax.Array) -> jax.Array:
    """The same outside of Triton, for interpret mode."""
    wide = left.astype(jnp.float32), right.astype(jnp.float32)
    return lax.dot_general(*wide, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


mlir.register_lowering(_dot, mlir.lower_fun(_in_float32, multiple_results=False))


@lowering.register_lowering(_dot)
def _(ctx: lowering.LoweringRuleContext, left: ir.Value, right: ir.Value) -> ir.Value:
    kind = ir.RankedTensorType.get(ctx.avals_out[0].shape, ir.F32Type.get())
    zeros = lowering._zeros(kind)
    return triton.dot(left, triton.trans(right, (1, 0)), zeros, max_num_imprecise_acc=AS_LONG_AS_THE_BLOCK)
