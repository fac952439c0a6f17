"""Kernels in 8 or 4 bits, with scales. Activations are not rounded.

In 8 bits a number is a byte and each output channel has a float32 scale. The rounding is symmetric, with the largest
number of a channel at the end of the range, to nearest and ties to even: Wu et al. 2020 (arXiv:2004.09602) for int8,
Micikevicius et al. 2022 (arXiv:2209.05433) for e4m3. In 4 bits a byte has two numbers, and each `SCALE_GROUP` inputs
of a channel have a scale.

Families have no code for it: parameters that name the axis which products sum over are declared anew, and the loader
fills what is declared.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from jsg.errors import ModelError
from jsg.kernels_pallas.inputs import SCALE_GROUP

STORED: Mapping[str, jax.typing.DTypeLike] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""`--quantization` in 8 bits → the type of the stored numbers. bfloat16 and float16 hold each of them exactly."""
PAIRS = jnp.uint8
"""The type of what is stored in 4 bits: two numbers."""
BYTES_PER_NUMBER: Mapping[str, float] = {**dict.fromkeys(STORED, 1.0), "int4": 0.5 + 2 / SCALE_GROUP}
"""`--quantization` → bytes of a number, with its part of the scale of a group."""
DROPPED_BITS = 19
"""Lower bits of a float32 that the scale of a group has not. Five significant bits are left, and a number of 4 bits has
at most three, so bfloat16 holds their products exactly."""


class Quantised(NamedTuple):
    """The value of a parameter that is a kernel in 8 or 4 bits; the kernel is numbers times scales.

    Attributes:
        values: In 8 bits numbers, int8 or float8_e4m3fn, in the shape of the kernel. In 4 bits uint8, with half as many
            along the axis that products sum over: two consecutive numbers, the first in the lower bits, each plus 8.
        scale: In the shape of the kernel, but along the axis that products sum over it has 1 in 8 bits, float32, and
            in 4 bits one for each `SCALE_GROUP` inputs, bfloat16.
    """

    values: Any
    scale: Any

    @property
    def is_grouped(self) -> bool:
        """Whether it is in 4 bits."""
        return self.values.dtype == PAIRS

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        shape = list(self.values.shape)
        if self.is_grouped:
            shape[self._summed_axis] *= 2
        return tuple(shape)

    @property
    def _summed_axis(self) -> int:
        return next(i for i, size in enumerate(self.scale.shape) if size != self.values.shape[i])

    def restored(self, dtype: jax.typing.DTypeLike) -> Num[Array, "..."]:
        """The kernel as an array. From 4 bits bfloat16 and longer types hold it exactly."""
        numbers, axis, shape = self.values, self._summed_axis, self.shape
        if self.is_grouped:
            pairs = jnp.stack([self.values & 15, self.values >> 4], axis + 1)
            numbers = pairs.reshape(shape).astype(jnp.int8) - 8
        scale = jnp.repeat(self.scale, shape[axis] // self.scale.shape[axis], axis)
        return (numbers.astype(scale.dtype) * scale).astype(dtype)


def declare(module: nnx.Module, quantization: str) -> None:
    """Declares the module's kernels anew, as `--quantization` says. For use under `nnx.eval_shape`.

    Raises:
        ModelError: The inputs of a kernel are not whole groups.
    """
    in_4_bits = quantization == "int4"
    dtype = PAIRS if in_4_bits else STORED[quantization]
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param) and (axis := node.get_metadata("summed_axis")) is not None:
            before, num_inputs, after = node.shape[:axis], node.shape[axis], node.shape[axis + 1 :]
            if in_4_bits and num_inputs % SCALE_GROUP:
                raise ModelError(
                    f"--quantization int4 needs kernels whose number of inputs is a multiple of {SCALE_GROUP}, but "
                    f"{node.get_metadata('origin').sources[0].name} has {num_inputs}; int8 works with any"
                )
            count, groups = (num_inputs // 2, num_inputs // SCALE_GROUP) if in_4_bits else (num_inputs, 1)
            scale = jnp.zeros((*before, groups, *after), jnp.bfloat16 if in_4_bits else jnp.float32)
            node.set_value(Quantised(jnp.zeros((*before, count, *after), dtype), scale))


def quantise(
    tensor: Num[Array, "out in"] | Num[np.ndarray, "out in"], name: str, dtype: jax.typing.DTypeLike
) -> Quantised:
    """A projection of a checkpoint, [out, in], in 8 or 4 bits. A channel is a row.

    Arrays of numpy stay such. Their bits are those of JAX's, which would compile a dozen programs for each shape.

    In 8 bits `scale` is max|w| / 127 or max|w| / 448 to within a rounding, if that is a normal float32. Then no number
    is off by more than half a step: scale / 2 in int8; in e4m3 a sixteenth of the number, or scale / 1024 if that is
    more. In 4 bits no number is off by more than scale / 2 either: see `_in_4_bits`.

    Args:
        tensor: In any floating type; the computation is in float32.
        name: The tensor's name, for the error.
        dtype: One of `STORED`, or `PAIRS`.

    Raises:
        ModelError: A number is not finite.
    """
    xp, numbers = tensor.__array_namespace__(), tensor.astype(jnp.float32)
    if not xp.isfinite(numbers).all():  # of all numbers, because a maximum may ignore NaN
        raise ModelError(
            f"{name} must hold finite numbers to be quantised, but has NaN or infinity; is the checkpoint whole? "
            "Without --quantization it is loaded as it is"
        )
    if dtype == PAIRS:
        return _in_4_bits(numbers)
    largest = xp.max(xp.abs(numbers), axis=1, keepdims=True)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    # Reciprocals, because XLA replaces a division by one for some numbers of rows and not for others, and numpy never.
    scale = xp.maximum(largest * (1 / limit), jnp.finfo(jnp.float32).tiny)  # not 0 for a channel of zeros
    scaled = numbers * (1 / scale)
    return Quantised((xp.round(scaled) if is_integer else scaled).astype(dtype), scale)


def _in_4_bits(numbers: Float[Array, "out in"] | Float[np.ndarray, "out in"]) -> Quantised:
    """Numbers from -8 to 7, two in a byte. A scale may be negative: the side with the larger numbers has 8 steps.

    The scale is rounded up to the next number of five significant bits, so that no number lies beyond the range.
    """
    xp, groups = numbers.__array_namespace__(), numbers.reshape(len(numbers), -1, SCALE_GROUP)
    above, below = xp.max(groups, axis=2), -xp.min(groups, axis=2)
    step = xp.maximum(xp.maximum(above, below) * (1 / 8), xp.minimum(above, below) * (1 / 7))
    bits = xp.maximum(step, jnp.finfo(jnp.float32).tiny).view(jnp.uint32)
    whole = (bits + ((1 << DROPPED_BITS) - 1)) >> DROPPED_BITS << DROPPED_BITS
    scale = xp.where(below >= above, whole.view(jnp.float32), -whole.view(jnp.float32))
    nibbles = (xp.clip(xp.round(groups * (1 / scale)[..., None]), -8, 7) + 8).astype(PAIRS)
    pairs = nibbles.reshape(len(numbers), -1, 2)
    return Quantised(pairs[..., 0] | pairs[..., 1] << 4, scale.astype(jnp.bfloat16))
