"""Kernels in few bits: what is kept of them, and what they mean. Every reader and every product uses this one record.

A weight is a number of few bits, less the zero of its group, times the scale of its group. If zeros have a step, it is
the number times the scale, less the zero times the step. A group has consecutive inputs of one output channel; products
sum over inputs. See `Form`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from jsg.kernels_pallas.form import NUMBERS_OF_4_BITS, Form

TYPES: Mapping[str, jax.typing.DTypeLike] = {
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
    "int4": jnp.uint8,
    "uint4": jnp.uint8,
    "e2m1": jnp.uint8,
}
"""Kind of numbers → the type of an array of them. bfloat16 and float16 hold every number exactly."""

jax.tree_util.register_static(Form)


class Quantised(NamedTuple):
    """The value of a parameter that is a kernel in few bits. Arrays have its axes, and fewer numbers on that of inputs.

    Attributes:
        values: Its numbers in the type of `TYPES`. In 4 bits two consecutive inputs are in a byte.
        scale: One for each group of inputs.
        form: How it is kept.
        zero: One for each group.
        factor: One for each block.
        order: [D] The input that each place among the numbers stands for.
        step: One for each block.
    """

    values: Any
    scale: Any
    form: Form
    zero: Any = None
    factor: Any = None
    order: Any = None
    step: Any = None

    @property
    def axis(self) -> int:
        """The axis of inputs, which products sum over."""
        return next(i for i, size in enumerate(self.scale.shape) if size != self.values.shape[i])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        shape = list(self.values.shape)
        shape[self.axis] *= self.form.per_byte
        return tuple(shape)

    @property
    def wide_scale(self) -> Any:
        """The scales in float32, with their factors."""
        scale = self.scale.astype(jnp.float32)
        return scale if self.factor is None else scale * self._spread(self.factor, scale.shape[self.axis])

    @property
    def wide_zero(self) -> Any:
        """The zeros in float32, with their steps; there are some."""
        zero = self.zero.astype(jnp.float32)
        return zero if self.step is None else zero * self._spread(self.step, zero.shape[self.axis])

    def restored(self, dtype: jax.typing.DTypeLike) -> Num[Array, "..."]:
        """The kernel as an array: computed in float32, with its inputs in their own order, and rounded to a type."""
        axis, form, values = self.axis, self.form, self.values
        if form.per_byte == 2:
            values = jnp.stack([values & 15, values >> 4], axis + 1).reshape(self.shape)
            if form.numbers == "int4":
                values = values.astype(jnp.int8) - 8
            elif form.numbers == "e2m1":
                values = jnp.asarray(NUMBERS_OF_4_BITS[form.numbers], jnp.bfloat16)[values]
        wide = jnp.bfloat16 if form.is_exact else jnp.float32  # a short type keeps what a GPU writes short
        numbers, scale = values.astype(wide), self.scale if form.is_exact else self.wide_scale
        count = numbers.shape[axis]
        if self.zero is None:
            numbers *= self._spread(scale, count)
        elif self.step is None:
            numbers = (numbers - self._spread(self.zero.astype(wide), count)) * self._spread(scale, count)
        else:
            numbers = numbers * self._spread(scale, count) - self._spread(self.wide_zero, count)
        numbers = numbers.astype(dtype)
        return numbers if self.order is None else jnp.take(numbers, jnp.argsort(self.order), axis)

    def _spread(self, parts: Num[Array, "..."], count: int) -> Num[Array, "..."]:
        """What each part of the inputs has, for each of `count` parts of them."""
        return jnp.repeat(parts, count // parts.shape[self.axis], self.axis)


def zeros(form: Form, shape: tuple[int, ...], axis: int) -> Quantised:
    """A kernel of this shape, whose inputs are on this axis, without its numbers."""

    def of(length: int, dtype: jax.typing.DTypeLike) -> Array:
        return jnp.zeros((*shape[:axis], length, *shape[axis + 1 :]), dtype)

    num_inputs = shape[axis]
    groups, blocks = (1 if length is None else num_inputs // length for length in (form.group, form.block))
    return Quantised(
        of(num_inputs // form.per_byte, TYPES[form.numbers]),
        of(groups, form.scale),
        form,
        of(groups, jnp.int8) if form.has_zero else None,
        of(blocks, jnp.float32) if form.has_factor else None,
        jnp.zeros(num_inputs, jnp.int32) if form.has_order else None,
        of(blocks, jnp.float32) if form.has_step else None,
    )
