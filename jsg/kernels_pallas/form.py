"""How a kernel in few bits is kept. No JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

NUMBERS_OF_4_BITS: Mapping[str, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "uint4": tuple(map(float, range(16))),
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}
"""Kind of numbers in 4 bits → what each code means. A byte has two codes, that of the first input in its lower bits."""


SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e8m0fnu": 1, "int8": 1}
"""Types of scales → bytes of one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How a kernel in few bits is kept. It has no arrays, and programs are compiled for it.

    Attributes:
        numbers: The kind of its numbers, one of `few_bits.TYPES`.
        group: Consecutive inputs of a channel that have a scale of their own; None for all of them.
        scale: The type of scales, one of `SCALE_BYTES`.
        has_zero: Whether each group has a zero, an int8 on the scale of its numbers.
        has_factor: Whether each block has a number, float32, that multiplies its scales.
        has_step: Whether zeros are on a scale of their own, of which each block has a step, float32.
        block: Consecutive inputs of a channel that have a factor of their own, whole groups; None for all of them.
        has_order: Whether inputs are taken in another order, which has the inputs of each group side by side.
        is_exact: Whether bfloat16 holds each number times its scale, because scales have few significant bits.
    """

    numbers: Literal["int8", "e4m3", "int4", "uint4", "e2m1"]
    group: int | None = None
    scale: str = "float32"
    has_zero: bool = False
    has_factor: bool = False
    has_step: bool = False
    block: int | None = None
    has_order: bool = False
    is_exact: bool = False

    @property
    def per_byte(self) -> int:
        """Numbers in a byte."""
        return 2 if self.numbers in NUMBERS_OF_4_BITS else 1

    @property
    def bytes_per_number(self) -> float:
        """The bytes of a number with its part of what its group and its block have, if there are such."""
        of_group = 0 if self.group is None else (SCALE_BYTES[self.scale] + self.has_zero) / self.group
        of_block = 0 if self.block is None else 4 * (self.has_factor + self.has_step) / self.block
        return 1 / self.per_byte + of_group + of_block

    def joined(self, other: "Form") -> "Form | None":
        """The form that kernels of both can have without a change of what they mean; None if there is none.

        Numbers of 4 bits become some of 8, a long group becomes several, and zeros are added that are zero.
        """
        forms, block = (self, other), self.block
        kinds = {(form.scale, form.has_factor, form.has_order, form.has_zero == form.has_step) for form in forms}
        if block is None or block != other.block or kinds != {("int8", True, False, True)}:
            return None
        group = min(form.group or block for form in forms)
        has_zero, has_step = (any(getattr(form, name) for form in forms) for name in ("has_zero", "has_step"))
        return Form("int8", group, "int8", has_zero, has_factor=True, has_step=has_step, block=block)

    @property
    def scales_columns(self) -> bool:
        """Whether the product is that with the numbers themselves, each column's sum times its scale."""
        return self.per_byte == 1 and self.group is None and not self.has_zero and not self.has_order
