"""Kernels in few bits: what is kept of them, and what they mean. Every reader and every product uses this one record.

A weight is a number of few bits, less the zero of its group, times the scale of its group. A group has consecutive
inputs of one output channel; products sum over inputs. See `Form`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

TYPES: Mapping[str, jax.typing.DTypeLike] = {
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
    "int4": jnp.uint8,
    "e2m1": jnp.uint8,
}
"""Kind of numbers → the type of an array of them. bfloat16 and float16 hold every number exactly."""
NUMBERS_OF_4_BITS: Mapping[str, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}
"""Kind of numbers in 4 bits → what each code means. A byte has two codes, that of the first input in its lower bits."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How a kernel in few bits is kept. It has no arrays: programs are compiled for it.

    Attributes:
        numbers: The kind of its numbers, one of `TYPES`.
        group: Consecutive inputs of a channel that have a scale of their own; None for all of them.
        scale: The type of scales: "float32", "float16", "bfloat16", "float8_e4m3fn" or "float8_e8m0fnu".
        has_zero: Whether each group has a zero, an int8 on the scale of its numbers.
        factor: How a number for each channel, float32, changes its scales, which are floats of 8 bits: "times" or
            "over". None if there is none.
        has_order: Whether inputs are taken in another order, which has the inputs of each group side by side.
        is_exact: Whether bfloat16 holds each number times its scale, because scales have few significant bits.
    """

    numbers: Literal["int8", "e4m3", "int4", "e2m1"]
    group: int | None = None
    scale: str = "float32"
    has_zero: bool = False
    factor: Literal["times", "over"] | None = None
    has_order: bool = False
    is_exact: bool = False

    @property
    def per_byte(self) -> int:
        """Numbers in a byte."""
        return 2 if self.numbers in NUMBERS_OF_4_BITS else 1

    @property
    def bytes_per_number(self) -> float:
        """The bytes of a number with its part of its group's scale and zero, if it has a group."""
        beside = 0 if self.group is None else (jnp.dtype(self.scale).itemsize + self.has_zero) / self.group
        return 1 / self.per_byte + beside

    @property
    def scales_columns(self) -> bool:
        """Whether the product is that with the numbers themselves, each column's sum times its scale."""
        return self.per_byte == 1 and self.group is None and not self.has_zero and not self.has_order

    def zeros(self, shape: tuple[int, ...], axis: int) -> "Quantised":
        """A kernel of this shape, whose inputs are on this axis, without its numbers."""

        def of(length: int, dtype: jax.typing.DTypeLike) -> Array:
            return jnp.zeros((*shape[:axis], length, *shape[axis + 1 :]), dtype)

        num_inputs = shape[axis]
        groups = 1 if self.group is None else num_inputs // self.group
        return Quantised(
            of(num_inputs // self.per_byte, TYPES[self.numbers]),
            of(groups, self.scale),
            self,
            of(groups, jnp.int8) if self.has_zero else None,
            of(1, jnp.float32) if self.factor else None,
            jnp.zeros(num_inputs, jnp.int32) if self.has_order else None,
        )


class Quantised(NamedTuple):
    """The value of a parameter that is a kernel in few bits. Arrays have its axes, and fewer numbers on that of inputs.

    Attributes:
        values: Its numbers in the type of `TYPES`. In 4 bits two consecutive inputs are in a byte.
        scale: One for each group of inputs.
        form: How it is kept.
        zero: One for each group.
        factor: One for each channel.
        order: [D] The input that each place among the numbers stands for.
    """

    values: Any
    scale: Any
    form: Form
    zero: Any = None
    factor: Any = None
    order: Any = None

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
    def column_scale(self) -> Any:
        """What multiplies the sum of each column, in float32, if the kernel has no groups."""
        scale = self.scale.astype(jnp.float32)
        if self.factor is None:
            return scale
        return scale / self.factor if self.form.factor == "over" else scale * self.factor

    def restored(self, dtype: jax.typing.DTypeLike) -> Num[Array, "..."]:
        """The kernel as an array: computed in float32, with its inputs in their own order, and rounded to a type."""
        axis, form, values = self.axis, self.form, self.values
        if form.per_byte == 2:
            codes = jnp.stack([values & 15, values >> 4], axis + 1).reshape(self.shape)
            if form.numbers == "int4":
                values = codes.astype(jnp.int8) - 8
            else:
                values = jnp.asarray(NUMBERS_OF_4_BITS[form.numbers], jnp.bfloat16)[codes]
        wide = jnp.bfloat16 if form.is_exact else jnp.float32  # a short type keeps what a GPU writes short
        numbers, scale = values.astype(wide), self.scale.astype(wide)
        if self.zero is not None:
            numbers -= self._spread(self.zero.astype(wide))
        if self.factor is not None:
            scale = scale / self.factor if form.factor == "over" else scale * self.factor
        numbers = (numbers * self._spread(scale)).astype(dtype)
        return numbers if self.order is None else jnp.take(numbers, jnp.argsort(self.order), axis)

    def _spread(self, of_groups: Num[Array, "..."]) -> Num[Array, "..."]:
        """What each group has, for each of its inputs."""
        return jnp.repeat(of_groups, self.shape[self.axis] // of_groups.shape[self.axis], self.axis)
