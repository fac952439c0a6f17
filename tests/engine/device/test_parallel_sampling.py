"""Devices that share the columns of the logits choose the tokens that one would."""

import pytest

from tests.own_process import said


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[list[int], list[int]]]:
    """By case, the tokens of one device and of four."""
    return said("tests.engine.device.parallel_sampling")


def test_each_offers_its_best_and_the_best_of_all_wins(results):
    """Greedily and drawn, of all tokens and of those that a mask allows; of equal ones the lower."""
    assert len(results) == 12
    for case, (one, four) in results.items():
        assert four == one, case
        assert len({token // 24 for token in one if token >= 0}) == 4, "tokens of every device"


def test_a_row_that_is_not_finite_is_told_by_every_device(results):
    for case, (one, _) in results.items():
        assert (-1 in one) == case.startswith("broken")
