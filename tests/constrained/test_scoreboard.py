"""The public suites: nothing invalid is ever accepted, and what passes only grows."""

import json

import pytest

from tests.constrained.scoreboard import BOARD, board, json_schema_suite, judge, maskbench, total

MIN_PASSED = 0.80  # of the maskbench schemas that have instances
MAX_REJECTED = 0.005  # of the valid instances of compiled schemas


@pytest.mark.slow
def test_the_scoreboard_only_improves(shared_data):
    data = shared_data("maskbench-dev.jsonl").parent
    outcomes = [judge(case) for case in (*maskbench(data), *json_schema_suite(data))]
    wrong = [o for o in outcomes if o.verdict.value in ("false accept", "timeout", "crash")]
    assert not wrong, [(o.verdict.value, o.case.name, o.detail) for o in wrong]
    made, committed = board(outcomes), json.loads(BOARD.read_text())
    counts = total(made, "maskbench")
    assert counts["schemas"] == 1047
    assert counts["passed"] >= MIN_PASSED * counts["schemas"]
    assert counts["valid instances rejected"] <= MAX_REJECTED * counts["valid instances"]
    for name, split in committed["splits"].items():
        assert made["splits"][name].get("passed", 0) >= split.get("passed", 0), name
        assert made["splits"][name].get("false reject", 0) <= split.get("false reject", 0), name
    for keyword, count in made["refused by keyword"].items():
        assert count <= committed["refused by keyword"].get(keyword, 0), f"more schemas are refused for {keyword}"
