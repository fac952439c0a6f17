"""The small pieces every family is made of. Letters: `jsg/models/inputs.py`.

A parameter carries its `Origin`: the tensors of the checkpoint it is made of. So the names of a family stand in its own
file beside the shapes, and `jsg/models/loading.py` needs no table. Modules are built of zeros; build them under
`nnx.eval_shape` and nothing is allocated.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.reference_norm import rms_norm
from jsg.models.quantise import Quantised


class Source(NamedTuple):
    """One tensor of the checkpoint: its name and its shape in the file, where a projection is [out, in]."""

    name: str
    shape: tuple[int, ...]


class Origin(NamedTuple):
    """How a parameter is made of tensors of the checkpoint.

    Each source is transposed if `transposed`, given the parameter's shape except along `join_axis`, and all are joined
    along that axis.
    """

    sources: tuple[Source, ...]
    join_axis: int = 0
    transposed: bool = False


def parameter(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike, origin: Origin, *, summed_axis: int | None = None
) -> nnx.Param:
    """A parameter of zeros that knows where its values come from.

    Args:
        shape: Of the values.
        dtype: Of the values.
        origin: Where they come from.
        summed_axis: For a kernel that may be kept in 8 bits, the axis that products sum over: its value is then an
            array or, with `--quantization`, a `Quantised`.
    """
    return nnx.Param(jnp.zeros(shape, dtype), origin=origin, summed_axis=summed_axis)


def project(
    x: Float[Array, "T D"], kernel: Float[Array, "D *out"] | Quantised, result: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "T *out"]:
    """x · kernel, summed in float32 whatever the type of the result.

    Of a kernel in 8 bits the numbers are exact in the type of `x`, and its scales, which whole columns share, multiply
    the sums.
    """
    if isinstance(kernel, Quantised):
        return (project(x, kernel.values.astype(x.dtype)) * kernel.scale).astype(result)
    dimensions, precision = (((1,), (0,)), ((), ())), exact_precision(x.dtype)
    return lax.dot_general(x, kernel, dimensions, precision=precision, preferred_element_type=result)


def exact_precision(dtype: jax.typing.DTypeLike) -> lax.Precision | None:
    """Float32 means float32: left to itself, a GPU multiplies it in a shorter type (TF32)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def activation_result(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """The result type that a matmul is asked for where its result is rounded to `dtype` anyway.

    On CPU a bfloat16 matmul with a bfloat16 result would convert the whole kernel to float32 on every call. On a GPU a
    float32 result is one more pass over memory, and keeps XLA from adding the residual stream inside the matmul (seen
    in the step compiled for an H200: 9 launches a layer against 10 or 11).
    """
    return jnp.float32 if ops.target_platform() == "cpu" else dtype


class Linear(nnx.Module):
    """One matmul for one or several projections of the checkpoint that read the same input."""

    def __init__(
        self,
        names: tuple[str, ...],
        in_dim: int,
        out_shape: tuple[int, ...],
        dtype: jax.typing.DTypeLike,
        *,
        out_dims: tuple[int, ...] | None = None,
        join_axis: int = 0,
        bias: bool = False,
    ):
        """Declares kernel [in_dim, *out_shape] and, if asked for, bias [*out_shape].

        Args:
            names: Projections of the checkpoint; `.weight` and `.bias` are appended.
            in_dim: Width of the input.
            out_shape: Shape of the output per token.
            dtype: Of the parameters.
            out_dims: Output width of each projection; equal parts by default.
            join_axis: The axis of `out_shape` along which the projections stand side by side.
            bias: Whether the projections have biases.
        """
        if out_dims is None:
            out_dims = (math.prod(out_shape) // len(names),) * len(names)
        weights = tuple(Source(f"{name}.weight", (width, in_dim)) for name, width in zip(names, out_dims, strict=True))
        origin = Origin(weights, join_axis + 1, transposed=True)
        self.kernel = parameter((in_dim, *out_shape), dtype, origin, summed_axis=0)
        biases = tuple(Source(f"{name}.bias", (width,)) for name, width in zip(names, out_dims, strict=True))
        self.bias = parameter(out_shape, dtype, Origin(biases, join_axis)) if bias else None

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T *out"]:
        """The projections of every token, in the dtype of `x`."""
        out = project(x, self.kernel.get_value(), activation_result(x.dtype))
        return (out if self.bias is None else out + self.bias[...].astype(out.dtype)).astype(x.dtype)


class Embedding(nnx.Module):
    """A row of numbers per token; the head too, where a model ties both."""

    def __init__(self, name: str, vocab_size: int, width: int, dtype: jax.typing.DTypeLike):
        self.table = parameter((vocab_size, width), dtype, Origin((Source(f"{name}.weight", (vocab_size, width)),)))

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """The row of each token."""
        return self.table[...].at[token_ids].get(mode="clip")

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """How well each row of the table matches, in float32."""
        dimensions, precision = (((1,), (1,)), ((), ())), exact_precision(hidden.dtype)
        return lax.dot_general(
            hidden, self.table[...], dimensions, precision=precision, preferred_element_type=jnp.float32
        )


class RMSNorm(nnx.Module):
    """Divides by the root mean square of the last axis, then scales."""

    def __init__(self, name: str, width: int, eps: float, dtype: jax.typing.DTypeLike):
        self.weight = parameter((width,), dtype, Origin((Source(f"{name}.weight", (width,)),)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises in float32; the scale is applied in the dtype of `x`, as the checkpoints were trained."""
        return rms_norm(x, self.weight[...], self.eps)
