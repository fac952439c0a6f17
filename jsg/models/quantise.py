"""Kernels in 8 bits: a byte for each number and a float32 scale for each output channel. Activations stay as they are.

Symmetric, with the largest number of a channel at the end of the range, rounded to nearest, ties to even: Wu et al.
2020 (arXiv:2004.09602) for int8, Micikevicius et al. 2022 (arXiv:2209.05433) for e4m3. No family knows of it: the
parameters that say which axis products sum over are declared anew, and the loader fills what is declared.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from jsg.errors import ModelError

STORED: Mapping[str, jax.typing.DTypeLike] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""`--quantization` → the type of the stored numbers. bfloat16 and float16 hold every number of both exactly."""


class Quantised(NamedTuple):
    """The value of a parameter that is a kernel in 8 bits; the kernel is `values * scale`.

    Attributes:
        values: In the shape of the kernel; int8 or float8_e4m3fn.
        scale: float32, one for each output channel: that shape, with 1 for the axis that products sum over.
    """

    values: Array
    scale: Array


def declare(module: nnx.Module, dtype: jax.typing.DTypeLike) -> None:
    """Declares the module's kernels anew, with numbers of `dtype`. For use under `nnx.eval_shape`."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param) and (axis := node.get_metadata("summed_axis")) is not None:
            scales = (*node.shape[:axis], 1, *node.shape[axis + 1 :])
            node.set_value(Quantised(jnp.zeros(node.shape, dtype), jnp.zeros(scales)))


def quantise(tensor: Num[Array, "out in"], name: str, dtype: jax.typing.DTypeLike) -> Quantised:
    """A projection as the checkpoint has it, [out, in], in 8 bits; a channel is a row.

    Where that is a normal float32, `scale` is max|w| / 127 or max|w| / 448 to within a rounding, and no number is off
    by more than half a step: scale / 2 in int8; in e4m3 a sixteenth of the number, or scale / 1024 if that is more.

    Args:
        tensor: In any floating type; computed with in float32.
        name: Of the tensor, for the error.
        dtype: One of `STORED`.

    Raises:
        ModelError: A number is not finite.
    """
    numbers = tensor.astype(jnp.float32)
    largest = jnp.max(jnp.abs(numbers), axis=1, keepdims=True)
    if not jnp.isfinite(numbers).all():  # asked of all: a maximum may pass over NaN
        raise ModelError(
            f"{name} must hold finite numbers to be quantised, but has NaN or infinity; is the checkpoint whole? "
            "Without --quantization it is loaded as it is"
        )
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    # Reciprocals: of a division XLA makes one or not, by the number of rows, and rows are read in pieces of any number.
    scale = jnp.maximum(largest * (1 / limit), jnp.finfo(jnp.float32).tiny)  # a channel of zeros has one too
    scaled: Float[Array, "out in"] = numbers * (1 / scale)
    return Quantised((jnp.round(scaled) if is_integer else scaled).astype(dtype), scale)
