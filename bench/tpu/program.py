"""What each operation of a program compiled for a TPU costs, and how long the program's own schedule takes with that.

XLA estimates the cycles of what it computes itself and writes them into the optimised program. It also writes there
which arrays lie in vector memory and which in HBM, and when copies between these begin and must have ended. A Pallas
kernel has no estimate. Its loops are counted in bundles, one a cycle, of the final code of its own dump.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.compiled import NO_ESTIMATE
from bench.hlo import Array, arrays_in
from bench.tp.compiled import KINDS
from bench.tpu.chips import Chip, exchange_seconds

FREE = re.compile("parameter|tuple|get-tuple-element|bitcast|constant|partition-id|after-all|call-(start|update|done)")
"""What takes no time of the core. A call is of the sparse core, beside the other operations."""
LEAST_CYCLES = 2120
"""XLA's estimate of an operation with almost nothing to do. It stands for those that have no estimate."""
ROW_CYCLES = 30
"""Of one row that a gather or a scatter moves, which has no estimate either: bundles of a row in the code of both."""
MEMORY_SHARE = 0.86
"""What memory gives of its published rate: the most that an attention kernel reached on a v7x (arXiv 2604.15464)."""
POOL_AXES = 5
"""Of a layer's keys and values. No other array of a program has as many."""
STACKED = re.compile(r"\s*0x([0-9a-f]+)\s+(LB|LH|LE|PB|PF)?\s*:\s*(>*)")
"""A bundle's address, what begins there (LB: the body of a loop, PF: what comes after it), and its depth in loops."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a kernel: how many loops it is in, itself included, and its bundles, inner loops included once."""

    depth: int
    bundles: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of Pallas: the number of its programs, and its loops, the whole of it first, at depth 0."""

    programs: int
    loops: tuple[Loop, ...]

    @property
    def deepest(self) -> int:
        """In how many loops the innermost are."""
        return max(each.depth for each in self.loops)

    def bundles(self, depth: int) -> int:
        """Those of the largest loop at a depth that counts from the deepest, which is -1."""
        return max(each.bundles for each in self.loops if each.depth == self.deepest + 1 + depth)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a program.

    Attributes:
        kind: "product", "elementwise", "kernel" (of Pallas), "exchange", "copy", "wait" or "loop".
        cycles: Of the core.
        hbm_bytes: What it reads from HBM and writes there, itself or by the copy that it begins. Of an exchange, the
            bytes of the whole result.
        of: The copy whose end a "wait" awaits, the name of a "kernel", or what an "exchange" is.
        body: What a "loop" repeats, as often as its trips say.
    """

    name: str
    kind: str
    cycles: int = 0
    hbm_bytes: int = 0
    of: str = ""
    body: tuple["Operation", ...] = ()


def operations(hlo: str) -> list[Operation]:
    """The operations of an optimised program that take time, in the order in which it runs them."""
    lines: dict[str, list[str]] = defaultdict(list)
    computation = ""
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?%(\S+) \(", line):
            computation = "ENTRY" if header[1] else header[2]
        lines[computation].append(line)
    return _operations_of("ENTRY", lines)


def _operations_of(computation: str, lines: Mapping[str, Sequence[str]]) -> list[Operation]:
    known: dict[str, list[Array]] = {}
    found = []
    for line in lines[computation]:
        match = re.match(r" +(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)", line)
        if match is None:
            continue
        name, result, operation, rest = match.groups()
        operands = [known[each] for each in re.findall(r"%([\w.-]+)", rest.split("), ")[0]) if each in known]
        results = list(arrays_in(result))
        if operation == "get-tuple-element" and (index := re.search(r"index=(\d+)", rest)):
            results = [operands[0][int(index[1])]]
        known[name] = results
        if operation == "while":
            called = re.search(r"condition=%([^\s,]+), body=%([^\s,]+)", rest)
            assert called is not None, "XLA names both"
            [trips] = re.findall(r" constant\((\d+)\)", "".join(lines[called[1]]))  # it counts up to this number
            found.append(Operation(name, "loop", body=tuple(_operations_of(called[2], lines)) * int(trips)))
        elif not FREE.fullmatch(operation):
            found.append(_operation(name, operation, [*itertools.chain(*operands)], results, rest))
    return [each for each in found if each is not None]


def _operation(name: str, operation: str, operands: list[Array], results: list[Array], rest: str) -> Operation | None:
    estimate = re.search(r'"estimated_cycles":"?(\d+)', rest)
    estimate = None if estimate is None or int(estimate[1]) >= NO_ESTIMATE else estimate
    cycles = int(estimate[1]) if estimate else LEAST_CYCLES
    if operation in ("copy-start", "slice-start"):
        return Operation(name, "copy", hbm_bytes=min(each.num_bytes for each in results if each.shape))
    if source := re.match(r"%([\w.-]+)", rest) if operation.endswith("-done") else None:
        return Operation(name, "wait", of=source[1])
    if re.fullmatch(f"({KINDS})(-start)?", operation):
        size = max(each.num_bytes for each in results)
        return Operation(name, "exchange", hbm_bytes=size, of=operation.removesuffix("-start"))
    if operation == "custom-call":
        # How much of a pool a kernel reads or writes is not in the program.
        moved = [each for each in (*operands, *results) if not each.is_in_vmem and len(each.shape) < POOL_AXES]
        size = sum(each.num_bytes for each in moved)
        return Operation(name, "kernel", hbm_bytes=size, of=name.partition(".")[0]) if "tpu_custom" in rest else None
    if not estimate and all(each.shape == () for each in results):
        return None  # a number, in scalar memory
    if "kind=kCustom" in rest:  # a gather, or a scatter in place
        rows = operands[1] if results[0] in operands[:1] else results[0]
        moved = [each.num_bytes for each in (*operands[1:], *results) if each not in operands[:1]]
        return Operation(name, "elementwise", LEAST_CYCLES + ROW_CYCLES * rows.shape[0], sum(moved))
    kind = "product" if "kind=kOutput" in rest or operation == "convolution" else "elementwise"
    return Operation(name, kind, cycles, sum(each.num_bytes for each in (*operands, *results) if not each.is_in_vmem))


def seconds(
    program: Sequence[Operation], chip: Chip, num_devices: int, kernel: Callable[[Operation], tuple[str, float, float]]
) -> Mapping[str, float]:
    """The time of a program by kinds of operations, if core and memory work side by side as its schedule allows.

    The core does one operation after another. Memory does one copy, or the reading and writing of one operation, after
    another, in the order in which they begin. An operation ends when both have done their part.

    Args:
        program: Its operations.
        chip: What runs it.
        num_devices: How many devices exchange.
        kernel: What a kernel counts as, its seconds of the core, and its bytes of HBM.
    """
    found: dict[str, float] = defaultdict(float)
    core, memory, ends = 0.0, 0.0, dict[str, float]()
    for each in itertools.chain(*(each.body or [each] for each in program)):
        before, kind = core, each.kind
        busy, num_bytes = each.cycles / chip.clock_hz, float(each.hbm_bytes)
        if each.kind == "exchange":
            busy, num_bytes = exchange_seconds(chip, each.of, each.hbm_bytes, num_devices), 0.0
        elif each.kind == "kernel":
            kind, busy, num_bytes = kernel(each)
        if num_bytes:
            memory = max(memory, core) + num_bytes / (MEMORY_SHARE * chip.bytes_per_s)
        if each.kind == "copy":
            ends[each.name] = memory
        else:
            core = max(core + busy, memory if num_bytes else 0.0, ends.get(each.of, 0.0))
        found[kind] += core - before
    return found


def loops(bundles: str) -> list[Loop]:
    """The loops of a kernel from its final bundles: all of it, and the others in the order of their code."""
    rows = [match.groups() for line in bundles.splitlines() if (match := STACKED.match(line))]
    found = [Loop(0, int(rows[-1][0], 16) + 1)]
    for index, (address, kind, nest) in enumerate(rows):
        if kind == "LB":
            after = (int(a, 16) for a, k, n in rows[index + 1 :] if k == "PF" and 0 < len(n) < len(nest))
            end = next(after, int(rows[-1][0], 16) + 1)
            found.append(Loop(len(nest), end - int(address, 16)))
    return found
