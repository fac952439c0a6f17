"""Real data in place of synthetic texts: the published files of three data sets, and files of arguments for the rest.

Each round takes the rows behind those of the round before, and begins again when none are left, because a peer's cache
still has what it saw. For the same reason the examples that all prompts share are others in each round, or follow each
other in another order.
"""

import csv
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.paper.workload import Workload

HELLASWAG_SHOTS, GSM8K_SHOTS, MMLU_SHOTS = 20, 5, 5
LETTERS = "ABCD"

Runs = list[dict[str, Any]]
CountTokens = Callable[[str], int]


class DataError(Exception):
    """A file does not hold what a workload needs."""


def runs_from(workload: Workload, path: Path, number: int, count: int, num_tokens: CountTokens) -> Runs:
    """The arguments of `count` programs in one round.

    Args:
        workload: Whose programs.
        path: For `mmlu` a folder with `dev` and `test` of CSV files; else JSON lines: those of `hellaswag` and `gsm8k`
            as they are published, and those of other workloads with the arguments of one program each.
        number: Of the round.
        count: How many programs.
        num_tokens: Counts the tokens of a text.

    Raises:
        DataError: The file cannot be read, or lacks a field.
    """
    try:
        match workload.name:
            case "mmlu":
                return _mmlu(path, number, count)
            case "hellaswag":
                return _hellaswag(_lines(path), number, count)
            case "gsm8k":
                return _gsm8k(_lines(path), number, count, num_tokens)
            case _:
                return [_checked(workload, path, row) for row in _taken(_lines(path), number * count, count)]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(f"a row of {path} is not one of {workload.name}: {error!r}") from error


def _lines(path: Path) -> list[Any]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise DataError(f"{path} must hold a JSON object in each line: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty")
    return rows


def _taken(rows: Sequence[Any], start: int, count: int) -> list[Any]:
    """So many rows from one on, around the end."""
    return [rows[(start + index) % len(rows)] for index in range(count)]


def _checked(workload: Workload, path: Path, row: Any) -> dict[str, Any]:
    """A row with just the arguments of the program."""
    needed = set(list(inspect.signature(workload.program.func).parameters)[1:])
    if not isinstance(row, dict) or row.keys() != needed:
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"each line of {path} must have the fields {sorted(needed)}, but one has {found}")
    return row


def _shots_and_rows(rows: Sequence[Any], number: int, num_shots: int, count: int) -> tuple[list[Any], list[Any]]:
    start = number * (num_shots + count)
    return _taken(rows, start, num_shots), _taken(rows, start + num_shots, count)


def _hellaswag(rows: Sequence[Any], number: int, count: int) -> Runs:
    shots, asked = _shots_and_rows(rows, number, HELLASWAG_SHOTS, count)
    examples = "".join(f"{row['ctx']} {row['endings'][int(row['label'])]}\n" for row in shots)
    return [
        {"examples": examples, "question": row["ctx"], "choices": [f" {ending}" for ending in row["endings"]]}
        for row in asked
    ]


def _gsm8k(rows: Sequence[Any], number: int, count: int, num_tokens: CountTokens) -> Runs:
    """An answer has as many tokens as the one in the file."""
    shots, asked = _shots_and_rows(rows, number, GSM8K_SHOTS, count)
    examples = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in shots)
    return [
        {
            "examples": examples,
            "question": f"Question: {row['question']}\nAnswer:",
            "num_tokens": max(1, num_tokens(row["answer"])),
        }
        for row in asked
    ]


def _mmlu(path: Path, number: int, count: int) -> Runs:
    """Subjects follow each other. With fewer programs than questions, each subject has its share."""
    found: list[Runs] = []
    for file in sorted((path / "test").glob("*_test.csv")):
        subject = file.name.removesuffix("_test.csv")
        shots = list(_questions(path / "dev" / f"{subject}_dev.csv"))[:MMLU_SHOTS]
        shots = _taken(shots, number, len(shots))
        examples = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        examples += "".join(f"{question} {answer}\n\n" for question, answer in shots)
        found.append([{"examples": examples, "question": question} for question, _ in _questions(file)])
    if not found:
        raise DataError(f"{path} must have files test/SUBJECT_test.csv and dev/SUBJECT_dev.csv")
    total = sum(map(len, found))
    runs: Runs = []
    for before, rows in zip(_sums(found), found, strict=True):
        share = (before + len(rows)) * count // total - before * count // total
        runs += _taken(rows, number * share, share)
    return runs


def _sums(found: Sequence[Runs]) -> Iterator[int]:
    """The rows before each subject."""
    before = 0
    for rows in found:
        yield before
        before += len(rows)


def _questions(file: Path) -> Iterator[tuple[str, str]]:
    """Questions with their alternatives, and the letters of their answers."""
    with file.open(newline="") as lines:
        for row in csv.reader(lines):
            alternatives = "".join(f"\n{letter}. {row[1 + index]}" for index, letter in enumerate(LETTERS))
            yield f"{row[0]}{alternatives}\nAnswer:", row[1 + len(LETTERS)]
