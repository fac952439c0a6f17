"""The public suites: nothing invalid is accepted, and every schema that passed before still passes."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.constrained.scoreboard import BOARD, MAX_SHARE, Case, Outcome, Verdict, board, cases, judge, total

MIN_PASSED = 0.80  # of the maskbench schemas that have instances
MAX_REJECTED = 0.005  # of the valid instances of compiled schemas
TOO_LARGE = "a grammar may have at most"  # all of it, which no one keyword is to blame for


def _judge_all(all_cases: Iterable[Case]) -> list[Outcome]:
    """Asserts of each that nothing invalid is accepted, and that a refusal names its reason."""
    outcomes = [judge(case) for case in all_cases]
    wrong = [o for o in outcomes if o.verdict in (Verdict.FALSE_ACCEPT, Verdict.TIMEOUT, Verdict.CRASH)]
    assert not wrong, [(o.verdict.value, o.case.name, o.detail) for o in wrong]
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    assert slowest.seconds <= MAX_SHARE * sum(o.seconds for o in outcomes), (slowest.case.name, slowest.seconds)
    refused = [o for o in outcomes if o.verdict is Verdict.REFUSED]
    unnamed = [o for o in refused if "#" not in o.detail or (o.keyword == "other" and TOO_LARGE not in o.detail)]
    assert not unnamed, [(o.case.name, o.detail) for o in unnamed]
    return outcomes


@pytest.mark.slow
def test_the_scoreboard_only_improves(shared_data):
    outcomes = _judge_all(cases(shared_data("maskbench-dev.jsonl").parent))
    made, committed = board(outcomes), json.loads(BOARD.read_text())
    counts = total(made, "maskbench")
    assert counts["schemas"] == 1047 and counts["passed"] >= MIN_PASSED * counts["schemas"]
    assert counts["valid instances rejected"] <= MAX_REJECTED * counts["valid instances"]
    assert total(made["untested"], "maskbench")["schemas"] == 296
    _check_improved(made, committed)
    _check_improved(made["untested"], committed["untested"])


def _check_improved(made: dict[str, Any], committed: dict[str, Any]) -> None:
    """Verdicts by split and refusals by keyword are not worse than those that are committed."""
    for name, split in committed["splits"].items():
        assert made["splits"][name].get("passed", 0) >= split.get("passed", 0), name
        for verdict in (Verdict.FALSE_REJECT, Verdict.UNSATISFIABLE):
            assert made["splits"][name].get(verdict.value, 0) <= split.get(verdict.value, 0), (name, verdict)
    for keyword, count in made["refused by keyword"].items():
        assert count <= committed["refused by keyword"].get(keyword, 0), f"more schemas are refused for {keyword}"
