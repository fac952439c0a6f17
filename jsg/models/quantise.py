"""Kernels in 8 bits: a byte for each number and a float32 scale for each output channel. Activations are not rounded.

The rounding is symmetric, with the largest number of a channel at the end of the range, to nearest and ties to even: Wu
et al. 2020 (arXiv:2004.09602) for int8, Micikevicius et al. 2022 (arXiv:2209.05433) for e4m3. Families have no code for
it: parameters that name the axis which products sum over are declared anew, and the loader fills what is declared.
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
        values: int8 or float8_e4m3fn, in the shape of the kernel.
        scale: float32, one for each output channel: the kernel's shape with 1 for the axis that products sum over.
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
    """A projection of a checkpoint, [out, in], in 8 bits. A channel is a row.

    `scale` is max|w| / 127 or max|w| / 448 to within a rounding, if that is a normal float32. Then no number is off by
    more than half a step: scale / 2 in int8; in e4m3 a sixteenth of the number, or scale / 1024 if that is more.

    Args:
        tensor: In any floating type; the computation is in float32.
        name: The tensor's name, for the error.
        dtype: One of `STORED`.

    Raises:
        ModelError: A number is not finite.
    """
    numbers = tensor.astype(jnp.float32)
    largest = jnp.max(jnp.abs(numbers), axis=1, keepdims=True)
    if not jnp.isfinite(numbers).all():  # of all numbers, because a maximum may ignore NaN
        raise ModelError(
            f"{name} must hold finite numbers to be quantised, but has NaN or infinity; is the checkpoint whole? "
            "Without --quantization it is loaded as it is"
        )
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    # Reciprocals, because XLA replaces a division by one for some numbers of rows and not for others, and rows are read
    # in pieces of any number.
    scale = jnp.maximum(largest * (1 / limit), jnp.finfo(jnp.float32).tiny)  # not 0 for a channel of zeros
    scaled: Float[Array, "out in"] = numbers * (1 / scale)
    return Quantised((jnp.round(scaled) if is_integer else scaled).astype(dtype), scale)
