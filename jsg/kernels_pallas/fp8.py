"""Products of rows that are rounded to e4m3 with kernels in e4m3: who multiplies. See `Fp8Kernel`.

XLA would give a product of one kernel to cuBLASLt. Compiled so for an H200, a dense layer had 17 launches in decoding
256 rows and 19 in a step of 8192 tokens, instead of 10 and 11 with Triton's kernels: cuBLASLt's sums are in float32 and
are scaled afterwards, it wants a multiple of 16 rows, and XLA takes three launches to round rows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import reference_fp8
from jsg.kernels_pallas.activation import Activation
from jsg.kernels_pallas.falling_back import falling_back
from jsg.kernels_pallas.inputs import Fp8Kernel, Fp8Rows, GroupKernels


def matmul(
    x: Float[Array, "T D"] | Fp8Rows, kernel: Fp8Kernel, result: jax.typing.DTypeLike, named: str | None, best: str
) -> Float[Array, "T *out"]:
    """See `ops.matmul`: `named` is the implementation that was asked for, and `best` what works best here."""
    (*out, depth), groups = kernel.values.shape, len(kernel.scale)
    flat = Fp8Kernel(kernel.values.reshape(-1, depth), kernel.scale.reshape(groups, -1))
    is_rounded = isinstance(x, Fp8Rows)
    num_rows = len(x.values if is_rounded else x)
    if (named or best) == "triton":
        from jsg.kernels_pallas.fp8_matmul import fp8_matmul

        with falling_back("fp8_matmul", "triton", named):
            return fp8_matmul(x, [flat], result=result, interpret=best != "triton").reshape(num_rows, *out)
    rows = x if is_rounded else reference_fp8.rounded(x, groups)
    return reference_fp8.matmul(rows, flat).astype(result).reshape(num_rows, *out)


def grouped_matmul(
    x: Float[Array, "R D"],
    kernels: Fp8Kernel,
    sizes: Int[Array, " E"],
    bias: Float[Array, "E F"] | None,
    result: jax.typing.DTypeLike,
    named: str | None,
    best: str,
) -> Float[Array, "R F"]:
    """See `ops.grouped_matmul`."""
    if (named or best) == "triton":
        from jsg.kernels_pallas.fp8_matmul import fp8_matmul

        with falling_back("fp8_matmul", "triton", named):
            how = {"sizes": sizes, "biases": [bias], "interpret": best != "triton"}
            return fp8_matmul(x, [kernels], **how, result=result)
    rows = reference_fp8.rounded(x, kernels.scale.shape[1])
    sums = reference_fp8.matmul(rows, kernels, sizes)
    if bias is not None:
        sums += bias[jnp.repeat(jnp.arange(len(bias)), sizes, total_repeat_length=len(sums))]
    return sums.astype(result)


def grouped_gated(
    x: Float[Array, "T D"],
    tokens: Int[Array, " R"] | None,
    kernels: Sequence[GroupKernels],
    sizes: Int[Array, " E"],
    activation: Activation,
    *,
    interpret: bool,
) -> Float[Array, "R F"]:
    """See `ops.grouped_gated`, by Triton's kernel."""
    from jsg.kernels_pallas.fp8_matmul import fp8_matmul

    values, biases = ([getattr(each, name) for each in kernels] for name in ("values", "bias"))
    how = {"tokens": tokens, "sizes": sizes, "biases": biases, "interpret": interpret}
    return fp8_matmul(x, values, **how, activation=activation, result=x.dtype)
