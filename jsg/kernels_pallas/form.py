"""How a kernel in few bits is kept. No JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

NUMBERS_OF_4_BITS: Mapping[str, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}
"""Kind of numbers in 4 bits → what each code means. A byte has two codes, that of the first input in its lower bits."""


SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e8m0fnu": 1}
"""Types of scales → bytes of one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How a kernel in few bits is kept. It has no arrays, and programs are compiled for it.

    Attributes:
        numbers: The kind of its numbers, one of `few_bits.TYPES`.
        group: Consecutive inputs of a channel that have a scale of their own; None for all of them.
        scale: The type of scales, one of `SCALE_BYTES`.
        has_zero: Whether each group has a zero, an int8 on the scale of its numbers.
        has_factor: Whether each channel has a number, float32, that multiplies its scales.
        has_order: Whether inputs are taken in another order, which has the inputs of each group side by side.
        is_exact: Whether bfloat16 holds each number times its scale, because scales have few significant bits.
    """

    numbers: Literal["int8", "e4m3", "int4", "e2m1"]
    group: int | None = None
    scale: str = "float32"
    has_zero: bool = False
    has_factor: bool = False
    has_order: bool = False
    is_exact: bool = False

    @property
    def per_byte(self) -> int:
        """Numbers in a byte."""
        return 2 if self.numbers in NUMBERS_OF_4_BITS else 1

    @property
    def bytes_per_number(self) -> float:
        """The bytes of a number with its part of its group's scale and zero, if it has a group."""
        beside = 0 if self.group is None else (SCALE_BYTES[self.scale] + self.has_zero) / self.group
        return 1 / self.per_byte + beside

    @property
    def scales_columns(self) -> bool:
        """Whether the product is that with the numbers themselves, each column's sum times its scale."""
        return self.per_byte == 1 and self.group is None and not self.has_zero and not self.has_order
