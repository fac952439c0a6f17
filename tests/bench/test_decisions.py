"""The figures of `bench.decisions`."""

import math

import pytest

from bench.decisions import Judged, accuracy, brier, calibration_error, fitted


def judged(*pairs: tuple[float, int]) -> list[Judged]:
    return [Judged((p, 1 - p), right, 1.0) for p, right in pairs]


def test_scores_by_hand():
    some = judged((0.9, 0), (0.9, 0), (0.9, 1), (0.4, 1))
    assert accuracy(some) == 0.75
    assert brier(some) == pytest.approx((2 * 0.01 + 2 * 0.01 + 2 * 0.81 + 2 * 0.16) / 4)
    # Of the bin of 0.9 two of three are right, and the one at 0.6 is right.
    assert calibration_error(some) == pytest.approx((abs(2.7 - 2) + abs(0.6 - 1)) / 4)
    assert calibration_error(judged((0.75, 0), (0.75, 0), (0.75, 0), (0.75, 1))) == pytest.approx(0)


def test_the_fitted_temperature_calibrates():
    sure = judged(*[(0.99, 0)] * 3, (0.99, 1))
    temperature = fitted(sure)
    assert sure[0].at(temperature).probabilities[0] == pytest.approx(0.75, abs=0.02)
    assert temperature == pytest.approx(math.log(99) / math.log(3), rel=0.05)
