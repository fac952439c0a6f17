"""The folder of a run: one file for each part, so that a later call goes on where an earlier one stopped. No JAX here.

DIR/parts/NAME.json   what one part has measured, written anew after each figure
DIR/run.json          the figures of all parts, in the form of the other benches
DIR/report.md         what ran, what failed, and what to do next
DIR/run.log           the standard error of parts in which something failed
"""

import dataclasses
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.device.failures import Failure, Kind
from bench.report import Figure

MOST_ATTEMPTS = 2


class OtherRunError(Exception):
    """The folder has results of another device or plan. The message says what to do."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Record:
    """What is known of one part.

    Attributes:
        part: Its name.
        call: The call of the program in which it ran; the first one is 1.
        date: When it began.
        commit: The commit that was measured.
        conditions: What its figures depend on; with others it must run again.
        attempts: How often it has begun, except those times that were only too short.
        has_ended: Whether it came to its end, however that was. Otherwise the whole run ended in its middle.
        is_cut: Whether it had less than its own time, because the call ended.
        seconds: How long it took.
        by_reference: Operations that plain `jnp` did, because their kernels did not compile.
        rates: Copy bandwidth and matmul rate that its floors follow from.
        header: Fields that it has sent for the head of the report.
        figures: What it has measured.
        failures: What failed.
        left_out: What it has left out for lack of time.
    """

    part: str
    call: int
    date: str
    commit: str
    conditions: dict[str, str]
    attempts: int = 1
    has_ended: bool = False
    is_cut: bool = False
    seconds: float = 0.0
    by_reference: tuple[str, ...] = ()
    rates: tuple[float, float] | None = None
    header: dict[str, Any] = dataclasses.field(default_factory=dict)
    figures: list[Figure] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)

    @property
    def was_too_short(self) -> bool:
        """Whether only the end of the call has kept it from measuring everything."""
        return self.has_ended and not self.failures and self.is_cut and bool(self.left_out)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to measure."""
        return self.has_ended and not self.failures and not self.was_too_short

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        figures = [figure.as_json() for figure in self.figures]
        return fields | {"figures": figures, "failures": [dataclasses.asdict(failure) for failure in self.failures]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Record":
        """The record from the result of `as_json`."""
        figures = [
            Figure(each["name"], each["unit"], tuple(each["samples"]), each["facts"]) for each in fields["figures"]
        ]
        failures = [Failure(Kind(each["kind"]), each["reason"], each["op"]) for each in fields["failures"]]
        lists = {"by_reference": tuple(fields["by_reference"]), "rates": fields["rates"] and tuple(fields["rates"])}
        return cls(**(dict(fields) | lists | {"figures": figures, "failures": failures}))


class Folder:
    """The records of a run, in memory and in their files.

    Attributes:
        path: The folder.
        conditions: Those of this call.
        records: What is known of each part, under any conditions.
        call: The number of this call.
    """

    def __init__(self, path: Path, conditions: Mapping[str, str], fixed: Collection[str] = ()):
        """Reads the folder, if it is there.

        Args:
            path: The folder.
            conditions: What figures depend on.
            fixed: Those conditions that all parts of a folder have in common.

        Raises:
            OtherRunError: A record was made under another one of the fixed conditions.
        """
        self.path = path
        self.conditions = dict(conditions)
        files = sorted((path / "parts").glob("*.json"))
        found = [Record.from_json(json.loads(file.read_text(encoding="utf-8"))) for file in files]
        self.records = {record.part: record for record in found}
        self.call = 1 + max((record.call for record in found), default=0)
        for record in found:
            for name in fixed:
                if record.conditions[name] != self.conditions[name]:
                    raise OtherRunError(
                        f"{path.name} has results of {name} {record.conditions[name]}, but this is "
                        f"{self.conditions[name]}; give another --folder"
                    )

    def current(self) -> dict[str, Record]:
        """The records that were made under the conditions of this call."""
        return {name: record for name, record in self.records.items() if record.conditions == self.conditions}

    def why_again(self, name: str) -> str | None:
        """The condition by which an old record of the part does not count any more; None if there is none."""
        record = self.records.get(name)
        if record is None:
            return None
        changed = [key for key in self.conditions if record.conditions.get(key) != self.conditions[key]]
        return f"{changed[0]} has changed since call {record.call}" if changed else None

    def why_not(self, name: str) -> str | None:
        """Why the part need not run; None if it must."""
        record = self.current().get(name)
        if record is None or record.was_too_short:
            return None
        if record.is_done:
            return f"done in call {record.call}"
        if record.attempts >= MOST_ATTEMPTS:
            return f"it failed {record.attempts} times (--again {name})"
        return None

    def begin(self, name: str, **fields: Any) -> Record:
        """A new record in place of an old one, written at once: if the run is killed, the next call knows where."""
        before = self.current().get(name)
        counted = 0 if before is None or before.is_done else before.attempts
        record = Record(part=name, call=self.call, conditions=self.conditions, attempts=counted + 1, **fields)
        self.records[name] = record
        self.write(record)
        return record

    def end(self, record: Record, seconds: float) -> None:
        """Records that a part came to its end. A part that was only cut off has not made an attempt."""
        record.has_ended, record.seconds = True, round(seconds, 1)
        if record.was_too_short:
            record.attempts -= 1
        self.write(record)

    def write(self, record: Record) -> None:
        """Writes one record."""
        write_json(self.path / "parts" / f"{record.part}.json", record.as_json())


def figures_of(records: Iterable[Record]) -> list[Figure]:
    """The figures of several parts. Each gets the number of its call as a fact."""
    return [
        dataclasses.replace(figure, facts=figure.facts | {"call": record.call})
        for record in records
        for figure in record.figures
    ]


def write_json(path: Path, content: Any) -> None:
    """Writes a file that is either the old or the new one, whenever the machine stops."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file that is either the old or the new one, whenever the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
