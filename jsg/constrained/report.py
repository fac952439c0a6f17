"""The report of `jsg grammar check`: the size of a grammar, what it forces, and where a text leaves it."""

import dataclasses
import time

from jsg.constrained.chars import charset
from jsg.constrained.compiler import annotations, compile_tables
from jsg.constrained.run.machine import Machine
from jsg.types import GrammarSpec

MAX_FORCED = 200  # bytes of forced text that are shown
CONTEXT = 30  # bytes that are shown before the place where a text leaves the grammar


@dataclasses.dataclass(frozen=True, slots=True)
class TextReport:
    """How far a grammar matches a text.

    Attributes:
        num_read: How many bytes of the text, from its start, begin a text of the grammar.
        num_bytes: How many bytes the text has.
        is_complete: Whether a text may end after the bytes that were read.
        forced: The bytes that must come after them.
        allowed: The bytes that may come after them.
    """

    num_read: int
    num_bytes: int
    is_complete: bool
    forced: bytes
    allowed: frozenset[int]

    @property
    def is_match(self) -> bool:
        """Whether the grammar matches the whole text."""
        return self.num_read == self.num_bytes and self.is_complete


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarReport:
    """The result of compiling a grammar.

    Attributes:
        compile_ms: Wall time of compiling, in milliseconds.
        num_positions: Places where a byte or a rule may be; the size of the tables grows with them.
        num_rules, num_loops: Rules, and repetitions that are counted while a text is read.
        num_bytes: Bytes of the tables.
        forced: The bytes that every text begins with.
        annotations: What the schemas have in them that is not enforced, and where.
        text: The report on a given text; None without a text.
    """

    compile_ms: float
    num_positions: int
    num_rules: int
    num_loops: int
    num_bytes: int
    forced: bytes
    annotations: tuple[str, ...]
    text: TextReport | None

    def __str__(self) -> str:
        lines = [
            f"compiles: yes, in {self.compile_ms:.1f} ms",
            f"size:     {self.num_positions} positions, {self.num_rules} rules, {self.num_loops} counted repetitions, "
            f"{self.num_bytes} bytes",
            f"forced:   {_shown(self.forced)}" if self.forced else "forced:   nothing at the beginning",
            *(f"ignored:  {annotation}" for annotation in self.annotations),
        ]
        return "\n".join(lines)


def check_grammar(spec: GrammarSpec, text: str | None = None) -> GrammarReport:
    """Compiles a grammar and reads a text with it.

    Raises:
        GrammarError: It does not compile; the message says why.
    """
    started = time.perf_counter()
    tables = compile_tables(spec)
    compile_ms = 1000 * (time.perf_counter() - started)
    machine = Machine(tables)
    return GrammarReport(
        compile_ms=compile_ms,
        num_positions=tables.num_positions,
        num_rules=tables.num_rules,
        num_loops=len(tables.loops),
        num_bytes=tables.num_bytes,
        forced=machine.forced_run(machine.start(), MAX_FORCED),
        annotations=annotations(spec),
        text=None if text is None else check_text(machine, text.encode()),
    )


def check_text(machine: Machine, text: bytes) -> TextReport:
    """Reads as much of a text as the grammar allows."""
    config, num_read = machine.start(), 0
    while num_read < len(text) and (following := machine.advance(config, text[num_read : num_read + 1])) is not None:
        config, num_read = following, num_read + 1
    return TextReport(
        num_read=num_read,
        num_bytes=len(text),
        is_complete=machine.is_accepting(config),
        forced=machine.forced_run(config, MAX_FORCED),
        allowed=frozenset(machine.allowed_bytes(config)),
    )


def describe_text(report: TextReport, text: bytes) -> str:
    """The report in words, with the place in the text."""
    read = text[: report.num_read]
    if report.is_match:
        head = "text:     matches"
    elif report.num_read == report.num_bytes:
        head = "text:     is a beginning, but may not end here"
    else:
        line, column = read.count(b"\n") + 1, len(read[read.rfind(b"\n") + 1 :].decode(errors="replace")) + 1
        wrong = text[report.num_read : report.num_read + 1]
        head = (
            f"text:     leaves the grammar at line {line}, column {column}: after {_shown(read[-CONTEXT:])} "
            f"{_shown(wrong)} may not come"
        )
    if report.forced:
        return f"{head}\nnext:     {_shown(report.forced)} is forced"
    allowed = _shown_set(report.allowed)
    end = "the end" if report.is_complete else ""
    return f"{head}\nnext:     {' or '.join(part for part in (allowed, end) if part) or 'nothing'}"


def _shown(data: bytes) -> str:
    """Bytes as a person reads them."""
    return repr(data.decode(errors="backslashreplace"))


def _shown_set(values: frozenset[int]) -> str:
    """Bytes as a list of characters and ranges."""
    return ", ".join(
        _name(low) if low == high else f"{_name(low)} to {_name(high)}" for low, high in charset.of(values)
    )


def _name(value: int) -> str:
    return repr(chr(value)) if 0x20 <= value < 0x7F else f"byte {value:#04x}"
