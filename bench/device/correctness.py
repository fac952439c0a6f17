"""Is what a device computes right? A fast kernel that is wrong is not fast."""

import numpy as np

from bench.device.events import Part

MAX_ERROR = {"float32": 5e-3, "bfloat16": 5e-2}
"""Of results whose numbers are about 1; an accelerator may multiply float32 in a shorter type."""


class Correctness:
    """Errors of one part, each a figure, and which of them are too large."""

    def __init__(self, part: Part):
        self._part = part
        self._wrong: list[str] = []

    def add(self, name: str, error: float, at_most: float) -> None:
        """Notes an error.

        Raises:
            ArithmeticError: It is not finite.
        """
        is_right = error <= at_most  # not so for NaN
        self._wrong.extend([] if is_right else [name])
        if not np.isfinite(error):
            raise ArithmeticError(f"the error is {error}")
        self._part.add(name, "abs", [error], kind="error", at_most=at_most, is_right=is_right)

    def end(self) -> None:
        """Everything was noted.

        Raises:
            ArithmeticError: Something was wrong.
        """
        if self._wrong:
            raise ArithmeticError(f"wrong on this device: {', '.join(self._wrong)}")
