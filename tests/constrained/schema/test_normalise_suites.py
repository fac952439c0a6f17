"""`normalise` against test suites of JSON Schema: whatever it does not refuse must take exactly the valid values."""

import collections
import json
from collections.abc import Iterator
from decimal import Decimal

import pytest

from jsg.constrained.schema.normalise import normalise
from jsg.errors import GrammarError
from tests.constrained.schema.shapes_oracle import is_valid

DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
NOT_COUNTED = "format.json"
"""It says that formats are annotations; here they are enforced."""

STRICTER = {("vocabulary.json", "no validation: invalid number, but it still validates")}
"""A meta-schema that switches keywords off; here they hold all the same."""

MOST_REFUSED = {
    "contains.json": 14,
    "defs.json": 1,
    "definitions.json": 1,
    "dynamicRef.json": 12,
    "maxContains.json": 4,
    "minContains.json": 7,
    "not.json": 1,
    "ref.json": 2,
    "refRemote.json": 26,
    "unevaluatedItems.json": 10,
    "unevaluatedProperties.json": 11,
    "uniqueItems.json": 6,
}
"""Schemas that are refused, by file, both drafts together. It may only shrink."""

MOST_REFUSED_MASKBENCH = 53
"""Of 1 343 schemas. It may only shrink."""


def outcomes(schema, tests: list) -> Iterator[tuple[str, bool, bool]]:
    """(description, whether it should be valid, whether it is) of each test."""
    try:
        document = normalise(schema)
    except GrammarError as error:
        if "no value is valid" not in str(error):
            raise
        document = None
    for test in tests:
        yield test.get("description", ""), test["valid"], document is not None and is_valid(document, test["data"])


def test_the_test_suite(shared_data):
    refused = collections.Counter()
    wrong = []
    num_tests = 0
    for draft, dialect in DRAFTS.items():
        for path in sorted(shared_data(f"json-schema-test-suite/tests/{draft}").glob("*.json")):
            if path.name == NOT_COUNTED:
                continue
            for case in json.loads(path.read_text(), parse_float=Decimal):
                schema = case["schema"]
                if isinstance(schema, dict):
                    schema.setdefault("$schema", dialect)
                try:
                    for what, should, is_so in outcomes(schema, case["tests"]):
                        num_tests += 1
                        if should != is_so and not (should and (path.name, what) in STRICTER):
                            wrong.append((draft, path.name, case["description"], what))
                except GrammarError:
                    refused[path.name] += 1
    assert not wrong
    assert num_tests > 1_600
    assert not refused - collections.Counter(MOST_REFUSED)


@pytest.mark.slow
def test_maskbench(shared_data):
    num_refused = num_tests = 0
    wrong = []
    with shared_data("maskbench-dev.jsonl").open() as rows:
        for line in rows:
            row = json.loads(line, parse_float=Decimal)
            try:
                for _, should, is_so in outcomes(row["schema"], row["tests"]):
                    num_tests += 1
                    if should != is_so:
                        wrong.append((row["name"], "rejected" if should else "accepted"))
            except GrammarError:
                num_refused += 1
    assert not wrong
    assert num_tests > 3_750
    assert num_refused <= MOST_REFUSED_MASKBENCH
