"""What a workload of the paper is: a program, the arguments of its runs, and what it asks of an engine."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from bench.paper.texts import Texts
from jsg.lang.function import SglFunction

Need = Literal["choices", "forms", "joins", "pictures"]
"""What an engine must be able to do: score choices, keep to a regular expression, append branches that were computed
apart, see pictures."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload.

    Attributes:
        name: Its name in reports and on the command line.
        title: What it is, in a line.
        program: The program. Each run of it is one program of the paper's programs per second.
        arguments: Makes the arguments of this many runs.
        count: The runs of the published script.
        needs: What an engine must be able to do.
        branches: Whether a program has calls that need not wait for each other.
    """

    name: str
    title: str
    program: SglFunction
    arguments: Callable[[Texts, int], list[dict[str, Any]]]
    count: int
    needs: frozenset[Need] = frozenset()
    branches: bool = False

    def num_runs(self, scale: float) -> int:
        """How many runs a scale takes."""
        return max(1, round(self.count * scale))

    def runs(self, texts: Texts, scale: float) -> list[dict[str, Any]]:
        """The arguments of all runs. A scale below 1 takes fewer of them, which are as long as before."""
        return self.arguments(texts, self.num_runs(scale))
