"""The layers that all families are made of. Letters: `jsg/models/inputs.py`.

A parameter has its `Origin`: the tensors of the checkpoint that it is made of. So the names of tensors are beside the
shapes, and `jsg/models/loading.py` needs no table. Modules are built with zeros. Under `nnx.eval_shape` nothing is
allocated.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.inputs import PANEL_WIDTH, Fp8Kernel, Fp8Rows, Panels
from jsg.kernels_pallas.reference_rows import rms_norm
from jsg.models.block_spec import NormSpec
from jsg.models.origin import Origin, Source, side_by_side
from jsg.models.tensor_parallel import add_up, first_index, num_parts


def parameter(
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    origin: Origin,
    *,
    summed_axis: int | None = None,
    is_kernel: bool = False,
) -> nnx.Param:
    """A parameter of zeros with its origin.

    Args:
        shape: Shape of the values.
        dtype: Type of the values.
        origin: The tensors that they come from.
        summed_axis: For a kernel that may be quantised, the axis that products sum over. With `--quantization` its
            value is a `Quantised` instead of an array.
        is_kernel: Whether it is read by `project` or `Embedding` only, so that it may lie in panels: see `lay_out`.
    """
    return nnx.Param(jnp.zeros(shape, dtype), origin=origin, summed_axis=summed_axis, is_kernel=is_kernel)


def whole(name: str, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, split_axis: int | None = None) -> nnx.Param:
    """The parameter that is a tensor of the checkpoint, as it is there."""
    return parameter(shape, dtype, Origin((Source(name, shape),), split_axis=split_axis))


def project(
    x: Float[Array, "T D"] | Fp8Rows,
    kernel: Float[Array, "D *out"] | Quantised | Panels | Fp8Kernel,
    result: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "T *out"]:
    """x · kernel, summed in float32 whatever the type of the result. With panels it has one axis of outputs.

    The type of `x` holds the numbers of a kernel in 8 bits exactly, whose scales multiply the sums if each column has
    one. Other kernels in few bits are restored in the type of `x`, unless `x` is rounded as well: see `Fp8Kernel`.
    """
    if isinstance(kernel, Fp8Kernel):
        return ops.matmul(x, kernel, result)
    assert not isinstance(x, Fp8Rows), "rows are rounded for kernels in e4m3 only"
    if isinstance(kernel, Quantised) and kernel.form.scales_columns and not ops.has_faster_columns(x, kernel):
        return (project(x, kernel.values.astype(x.dtype)) * kernel.wide_scale).astype(result)
    if isinstance(kernel, Panels | Quantised):
        return ops.matmul(x, kernel, result)
    dimensions, precision = (((1,), (0,)), ((), ())), exact_precision(x.dtype)
    return lax.dot_general(x, kernel, dimensions, precision=precision, preferred_element_type=result)


def exact_precision(dtype: jax.typing.DTypeLike) -> lax.Precision | None:
    """The precision that makes float32 exact: without it a GPU multiplies float32 in a shorter type (TF32)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def activation_result(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """The result type of a matmul whose result is rounded to `dtype` afterwards.

    On a CPU a bfloat16 matmul with a bfloat16 result would convert the whole kernel to float32 in every call. On a GPU
    a float32 result costs one more pass over memory, and prevents XLA from adding the residual stream inside the matmul
    (in the step compiled for an H200: 9 launches a layer against 10 or 11).
    """
    return jnp.float32 if ops.target_platform() == "cpu" else dtype


class Linear(nnx.Module):
    """One matmul for one or several projections of the checkpoint that read the same input."""

    def __init__(
        self,
        names: tuple[str, ...] | tuple[Source, ...],
        in_dim: int,
        out_shape: tuple[int, ...],
        dtype: jax.typing.DTypeLike,
        *,
        out_dims: tuple[int, ...] | None = None,
        out_repeats: tuple[int, ...] | None = None,
        out_orders: tuple[tuple[int, ...] | None, ...] | None = None,
        join_axis: int = 0,
        split_axis: int | None = None,
        bias: bool = False,
    ):
        """Declares kernel [in_dim, *out_shape] and, if asked for, bias [*out_shape].

        Args:
            names: Projections of the checkpoint; `.weight` and `.bias` are appended. Those of one name come one after
                another in one tensor. Or the rows of tensors that they are, without biases.
            in_dim: Width of the input.
            out_shape: Shape of the output per token.
            dtype: Type of the parameters.
            out_dims: Output width of each projection; equal parts by default.
            out_repeats: `Source.repeats` of each projection; 1 by default.
            out_orders: `Part.order` of each projection; that of the file by default.
            join_axis: The axis of `out_shape` along which the projections are side by side.
            split_axis: The axis of the kernel that devices share out. With 0 each device has a slice of the input, and
                the results are added up.
            bias: Whether the projections have biases.
        """
        if out_dims is None:
            out_dims = (math.prod(out_shape) // len(names),) * len(names)
        each = out_repeats or (1,) * len(names), out_orders or (None,) * len(names)
        weights = tuple(rows for rows in names if isinstance(rows, Source))
        weights = weights or side_by_side([f"{name}.weight" for name in names], out_dims, (in_dim,), *each)
        origin = Origin(weights, join_axis + 1, transposed=True, split_axis=split_axis)
        self.is_split_input = split_axis == 0
        self.out_shape, self.dtype = out_shape, dtype
        summed_axis = None if math.prod(out_shape) == 1 else 0  # a gate of one number is as small as a router's
        self.kernel = parameter((in_dim, *out_shape), dtype, origin, summed_axis=summed_axis, is_kernel=True)
        biases = side_by_side([f"{name}.bias" for name in names], out_dims, (), *each)
        bias_split = split_axis - 1 if split_axis else None  # with a split input each device would add it
        self.bias = parameter(out_shape, dtype, Origin(biases, join_axis, split_axis=bias_split)) if bias else None

    def part(self, x: Float[Array, "T D"] | Fp8Rows) -> Float[Array, "T *out"]:
        """This device's part of the projections of every token, without biases, before it is added up."""
        kernel = self.kernel.get_value()
        dtype = self._dtype_of(x)
        # Panels have results of any type at the same speed. A bias is added before the sum is rounded.
        is_rounded = isinstance(kernel, Panels) and self.bias is None
        out = project(x, kernel, dtype if is_rounded else activation_result(dtype))
        if isinstance(kernel, Panels):
            out = out.reshape(len(x), *self.out_shape)
        return out

    def __call__(self, x: Float[Array, "T D"] | Fp8Rows) -> Float[Array, "T *out"]:
        """The projections of every token, in the dtype of `x`, or that of parameters if `x` is rounded."""
        out = self.part(x)
        out = add_up(out) if self.is_split_input else out
        if self.bias is not None:
            # On a GPU XLA adds a vector inside the matmul, but would write out a bias of several axes for every token.
            bias = self.bias[...].astype(out.dtype).reshape(-1)
            out = (out.reshape(len(out), -1) + bias).reshape(out.shape)
        return out.astype(self._dtype_of(x))

    def _dtype_of(self, x: Float[Array, "T D"] | Fp8Rows) -> jax.typing.DTypeLike:
        return self.dtype if isinstance(x, Fp8Rows) else x.dtype


class Embedding(nnx.Module):
    """A row of numbers for each token id. It is also the head of a model that ties both."""

    def __init__(self, name: str, vocab_size: int, width: int, dtype: jax.typing.DTypeLike, *, is_head: bool):
        self.vocab_size = vocab_size
        origin = Origin((Source(f"{name}.weight", (vocab_size, width)),), split_axis=0)
        self.table = parameter((vocab_size, width), dtype, origin, is_kernel=is_head)

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """The row of each token."""
        table = self.table.get_value()
        if isinstance(table, Panels):
            ids = jnp.clip(token_ids, 0, self.vocab_size - 1)
            return table.values[ids // PANEL_WIDTH, :, ids % PANEL_WIDTH].reshape(len(ids), -1)
        if num_parts() == 1:
            return table.at[token_ids].get(mode="clip")
        row = jnp.clip(token_ids, 0, self.vocab_size - 1) - first_index(len(table))
        is_here = (row >= 0) & (row < len(table))
        return add_up(jnp.where(is_here[:, None], table.at[row].get(mode="clip"), 0))

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """The logits of each row of the table, in float32. On several devices, of each row of this device's slice."""
        table = self.table.get_value()
        if isinstance(table, Panels):
            return project(hidden, table)
        dimensions, precision = (((1,), (1,)), ((), ())), exact_precision(hidden.dtype)
        return lax.dot_general(hidden, table, dimensions, precision=precision, preferred_element_type=jnp.float32)


class RMSNorm(nnx.Module):
    """Divides by the root mean square of the last axis, then scales. If it is centred it subtracts the mean first."""

    def __init__(
        self,
        spec: NormSpec,
        prefix: str,
        width: int,
        dtype: jax.typing.DTypeLike,
        *,
        order: tuple[int, ...] | None = None,
    ):
        """Declares the weight, if it has one. `order` is its `Part.order`."""
        sources = side_by_side([f"{prefix}{spec.name}{spec.suffix}"], [width], (), [1], [order])
        self.weight = parameter((width,), dtype, Origin(sources)) if spec.name else None
        self.shape, self.dtype = (width,), dtype
        self.eps = spec.eps
        self.is_wide = spec.is_wide
        self.adds_one = spec.adds_one
        self.is_centred = spec.is_centred

    @property
    def factor(self) -> Float[Array, " D"]:
        """What multiplies, in the type in which it does so: that of activations, or float32 if the norm is wide."""
        weight = jnp.ones(self.shape, self.dtype) if self.weight is None else self.weight[...]
        weight = weight.astype(jnp.float32) if self.is_wide else weight
        return weight + 1 if self.adds_one else weight

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises in float32, and rounds where it was rounded in training."""
        wide = x
        if self.is_centred:
            wide = x.astype(jnp.float32)
            wide -= wide.mean(-1, keepdims=True)
        return rms_norm(wide, self.factor, self.eps).astype(x.dtype)
