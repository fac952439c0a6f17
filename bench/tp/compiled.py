"""Reads the exchanges between devices from a compiled program."""

import re
from collections import Counter

from bench.hlo import arrays_in
from bench.tp.interconnect import Collective

KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"


def collectives(hlo: str) -> list[Collective]:
    """The collectives of an optimised program, equal ones together, the most frequent first.

    An asynchronous collective counts once.
    """
    found: Counter[tuple[str, int]] = Counter()
    for result, kind in re.findall(rf" = (.*?) ({KINDS})(?:-start)?\(", hlo):
        # The result of the start of an asynchronous collective has its operands and its results. The larger one counts.
        found[kind, max(array.num_bytes for array in arrays_in(result))] += 1
    return [Collective(kind, size, count) for (kind, size), count in found.most_common()]
