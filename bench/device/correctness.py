"""Checks the results that a device computes, because a wrong result is worth nothing however fast it is."""

import numpy as np

from bench.device.events import Part

MAX_ERROR = {"float32": 5e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""The largest error of results of about 1, by type. An accelerator may multiply float32 in a shorter type."""


class Correctness:
    """The errors that one part found. Each becomes a figure, and those that are too large are collected."""

    def __init__(self, part: Part):
        self._part = part
        self._wrong: list[str] = []

    def add(self, name: str, error: float, at_most: float, op: str | None = None) -> None:
        """Records an error of an operation, or of what XLA computes if none is named.

        Raises:
            ArithmeticError: The error is not finite.
        """
        is_right = error <= at_most  # False for NaN
        self._wrong.extend([] if is_right else [name])
        if not np.isfinite(error):
            raise ArithmeticError(f"the error is {error}")
        facts = {"at_most": at_most, "is_right": is_right} | ({} if op is None else {"op": op})
        self._part.add(name, "abs", [error], kind="error", **facts)

    def end(self) -> None:
        """Ends the check, after all errors were recorded.

        Raises:
            ArithmeticError: An error was too large.
        """
        if self._wrong:
            raise ArithmeticError(f"wrong on this device: {', '.join(self._wrong)}")
