"""The ablations of the paper: what each takes away from the engine or from the way in which programs run."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from bench.paper.recorded import Ways
from bench.paper.workload import Workload


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """An ablation.

    Attributes:
        title: What is different, in a few words.
        options: Options of `jsg serve`.
        ways: How programs are run.
        is_for: The kind of workloads on which it can make a difference.
    """

    title: str
    options: tuple[str, ...] = ()
    ways: Ways = dataclasses.field(default_factory=Ways)
    is_for: Literal["all", "branches", "forms"] = "all"

    def concerns(self, workload: Workload) -> bool:
        """Whether it can make a difference to this workload."""
        match self.is_for:
            case "branches":
                return workload.branches
            case "forms":
                return "forms" in workload.needs
            case "all":
                return True


FULL = "full"
ARMS: Mapping[str, Arm] = {
    FULL: Arm(title="all of it"),
    "no-cache": Arm(title="no cache of prefixes", options=("--disable-radix-cache",), ways=Ways(hints_forks=False)),
    "blocks": Arm(title="prefixes of whole blocks of 16 only", options=("--page-size", "16")),
    "fcfs": Arm(title="first come, first served", options=("--schedule-policy", "fcfs")),
    "one-by-one": Arm(title="calls of a program one by one", ways=Ways(one_by_one=True), is_for="branches"),
    "no-hint": Arm(title="forks give no hint", ways=Ways(hints_forks=False), is_for="branches"),
    "no-drafts": Arm(title="no drafts but forced ones", options=("--speculative", "off")),
    "no-jump": Arm(title="no jump-forward", options=("--jump-forward", "off"), is_for="forms"),
    "retokenize": Arm(title="jump-forward appends", options=("--jump-forward", "retokenize"), is_for="forms"),
    "compiles": Arm(title="a form compiled for each call", ways=Ways(compiles_always=True), is_for="forms"),
}
"""The arms by name. A table of blocks finds the same tokens as a tree whose pages have 16: whole blocks, from the
beginning on. What differs, the order of eviction, does not matter while the pool has room."""
