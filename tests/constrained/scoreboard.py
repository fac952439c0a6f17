"""The results for the schemas of two public suites: which of them compile, and what their grammars accept.

`python -m tests.constrained.scoreboard DATA` prints the tables; with `--write` it renews `scoreboard.json` beside this
file, which `test_scoreboard.py` compares with. A schema passes when it compiles, accepts every valid instance and
rejects every invalid one; where there are no instances, when it compiles. A schema that contradicts itself is refused,
which is right where no instance is valid: that is a verdict of its own. No model and no vocabulary takes part:
instances are JSON texts, read byte by byte.
"""

import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import json
import pathlib
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jsg.constrained.compiler import compile_tables
from jsg.constrained.run.machine import Machine
from jsg.constrained.schema.normalise import NO_VALUE
from jsg.errors import GrammarError
from jsg.types import GrammarSpec

BOARD = pathlib.Path(__file__).with_name("scoreboard.json")
SECONDS = 60.0  # of CPU, for a schema and all its instances: on any machine, only what hangs needs as many
MAX_SHARE = 5 / 71
"""The largest part of the time of all cases that one may take: 5 s, where all of them took 71."""
UNKNOWN_FORMATS = (*("ecmascript-regex", "idn-email", "idn-hostname", "regex", "unknown"),)
"""Formats that are no assertions here, as the standard allows: what they reject is no false accept."""


KEYWORDS = (
    *("unevaluatedProperties", "unevaluatedItems", "additionalProperties", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "uniqueItems", "minContains", "maxContains", "contains", "multipleOf"),
    *("minProperties", "maxProperties", "properties", "required", "prefixItems", "items", "pattern", "format", "enum"),
    *("anyOf", "oneOf", "allOf", "const", "not", "$dynamicRef", "$ref", "$id", "$schema", "$vocabulary"),
)


class Verdict(enum.StrEnum):
    """The result for a schema: the first of these that is true."""

    CRASH = "crash"
    TIMEOUT = "timeout"
    FALSE_ACCEPT = "false accept"
    FALSE_REJECT = "false reject"
    UNSATISFIABLE = "unsatisfiable"
    REFUSED = "refused"
    PASSED = "passed"


@dataclasses.dataclass(frozen=True)
class Case:
    """A schema with its instances: (is valid, value)."""

    split: str
    name: str
    schema: Any
    instances: tuple[tuple[bool, Any], ...]


@dataclasses.dataclass
class Outcome:
    """How one case went. `detail` is the refusal, or the first instance that went wrong."""

    case: Case
    verdict: Verdict
    detail: str = ""
    num_valid: int = 0
    num_valid_rejected: int = 0
    num_invalid_accepted: int = 0
    seconds: float = 0.0

    @property
    def keyword(self) -> str:
        """The keyword that a refusal names first; "other" where it names none."""
        named = re.search(r"(?<![A-Za-z])(" + "|".join(map(re.escape, KEYWORDS)) + r")(?![A-Za-z])", self.detail)
        return named.group(1) if named else "other"


def maskbench(data: pathlib.Path, *, has_instances: bool = True) -> Iterator[Case]:
    """The schemas of the development sample that have instances, or the others."""
    with (data / "maskbench-dev.jsonl").open() as lines:
        for line in lines:
            entry = json.loads(line)
            if bool(entry["tests"]) == has_instances:
                split = entry["name"].split("---")[0]
                split = split if "---" in entry["name"] else split.split("_")[0]
                instances = tuple((test["valid"], test["data"]) for test in entry["tests"])
                yield Case(f"maskbench {split}", entry["name"], entry["schema"], instances)


def json_schema_suite(data: pathlib.Path) -> Iterator[Case]:
    """JSON-Schema-Test-Suite, the optional part too, without what is an annotation here: some formats, and content."""
    for path in sorted((data / "json-schema-test-suite" / "tests").rglob("*.json")):
        parts = path.relative_to(data / "json-schema-test-suite" / "tests").parts
        if ("format" in parts and path.stem in UNKNOWN_FORMATS) or path.stem == "content":
            continue
        split = f"suite {parts[0]}" + (" optional" if "optional" in parts else "")
        for group in json.loads(path.read_text()):
            schema, instances = group["schema"], tuple((test["valid"], test["data"]) for test in group["tests"])
            if parts[0] == "draft7" and isinstance(schema, dict):
                schema = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema  # its folder says it there
            yield Case(split, f"{'/'.join(parts)}: {group['description']}", schema, instances)


def cases(data: pathlib.Path) -> Iterator[Case]:
    """All of both suites."""
    yield from maskbench(data)
    yield from json_schema_suite(data)
    yield from maskbench(data, has_instances=False)


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside the block after this number of CPU seconds."""

    def expire(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, expire)
    gc.freeze()  # what else is in the process, which after many tests is a lot, is not searched for garbage
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        gc.unfreeze()
        signal.signal(signal.SIGPROF, before)


@functools.cache
def _warm() -> None:
    """Reads a text, so that no case pays for compiling the code that reads texts."""
    machine = Machine(compile_tables(GrammarSpec("json_schema", '{"maxLength": 99, "minProperties": 1}')))
    machine.advance(machine.start(), b'{"a": ["b"]}')


def judge(case: Case) -> Outcome:
    """Compiles one schema, property order free and whitespace flexible, and reads its instances."""
    _warm()
    outcome = Outcome(case, Verdict.PASSED)
    started = time.thread_time()  # other threads of the process have nothing to do with it
    try:
        with cpu_limit(SECONDS):
            spec = GrammarSpec("json_schema", json.dumps(case.schema), "flexible", "free", "open")
            _read_instances(Machine(compile_tables(spec)), outcome)
    except GrammarError as error:
        _note_refusal(outcome, str(error))
    except TimeoutError:
        outcome.verdict = Verdict.TIMEOUT
    except Exception as bug:  # that it is counted, and named, is the point
        outcome.verdict, outcome.detail = Verdict.CRASH, repr(bug)
    outcome.seconds = time.thread_time() - started
    return outcome


def _note_refusal(outcome: Outcome, message: str) -> None:
    outcome.verdict, outcome.detail = Verdict.REFUSED, message
    if NO_VALUE in message:
        outcome.num_valid = outcome.num_valid_rejected = sum(is_valid for is_valid, _ in outcome.case.instances)
        outcome.verdict = Verdict.FALSE_REJECT if outcome.num_valid else Verdict.UNSATISFIABLE


def _read_instances(machine: Machine, outcome: Outcome) -> None:
    for is_valid, value in outcome.case.instances:
        text = json.dumps(value, ensure_ascii=False)
        config = machine.advance(machine.start(), text.encode(errors="surrogatepass"))
        is_accepted = config is not None and machine.is_accepting(config)
        outcome.num_valid += is_valid
        outcome.num_valid_rejected += is_valid and not is_accepted
        outcome.num_invalid_accepted += is_accepted and not is_valid
        if is_accepted != is_valid and (not outcome.detail or is_accepted):
            outcome.verdict = Verdict.FALSE_ACCEPT if is_accepted else Verdict.FALSE_REJECT
            outcome.detail = text[:300]


def board(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The counts that are committed; those of schemas without instances stand apart, under "untested"."""
    tested = [outcome for outcome in outcomes if outcome.case.instances]
    return _counts(tested) | {"untested": _counts(outcome for outcome in outcomes if not outcome.case.instances)}


def _counts(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Verdicts by split, refusals by keyword."""
    splits: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    refused: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        counts = splits[outcome.case.split]
        counts[outcome.verdict.value] += 1
        counts["schemas"] += 1
        if outcome.verdict is Verdict.REFUSED:
            refused[outcome.keyword] += 1
        else:
            counts["valid instances"] += outcome.num_valid
            counts["valid instances rejected"] += outcome.num_valid_rejected
    return {
        "splits": {name: dict(sorted(counts.items())) for name, counts in sorted(splits.items())},
        "refused by keyword": dict(sorted(refused.items())),
    }


def total(board: dict[str, Any], suite: str) -> collections.Counter[str]:
    """The sum over all splits whose name begins with `suite`."""
    counts: collections.Counter[str] = collections.Counter()
    for name, split in board["splits"].items():
        if name.startswith(suite):
            counts.update(split)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=pathlib.Path, help="the folder that --shared-data names")
    parser.add_argument("--write", action="store_true", help="renew scoreboard.json")
    parser.add_argument("--show", choices=[verdict.value for verdict in Verdict], help="list the cases of one verdict")
    parser.add_argument("--only", default="", help="cases whose split and name hold this text")
    options = parser.parse_args()
    outcomes = [judge(case) for case in cases(options.data) if options.only in f"{case.split} {case.name}"]
    made = board(outcomes)
    for suite in ("maskbench", "suite"):
        counts = total(made, suite)
        print(suite, dict(counts))
        if counts["schemas"]:
            print(f"  passed {counts['passed'] / counts['schemas']:.2%}")
    print("refused by keyword", collections.Counter(made["refused by keyword"]).most_common())
    print("untested", dict(total(made["untested"], "maskbench")), made["untested"]["refused by keyword"])
    slowest = sorted(outcomes, key=lambda outcome: -outcome.seconds)[:5]
    print("slowest", [(round(outcome.seconds, 2), outcome.case.name) for outcome in slowest])
    for outcome in outcomes:
        if outcome.verdict.value == options.show:
            print(f"{outcome.case.split} | {outcome.case.name} | {outcome.detail[:300]}")
    if options.write:
        BOARD.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
