"""Reads the exchanges between devices from a compiled program."""

import math
import re
from collections import Counter

from bench.tp.interconnect import Collective

KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}


def collectives(hlo: str) -> list[Collective]:
    """The collectives of an optimised program, equal ones together, the most frequent first.

    An asynchronous collective counts once.
    """
    found: Counter[tuple[str, int]] = Counter()
    for result, kind in re.findall(rf" = (.*?) ({KINDS})(?:-start)?\(", hlo):
        # The result of the start of an asynchronous collective has its operands and its results. The larger one counts.
        sizes = [
            ITEM_BYTES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result)
        ]
        found[kind, max(sizes)] += 1
    return [Collective(kind, size, count) for (kind, size), count in found.most_common()]
