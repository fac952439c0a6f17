"""The estimate of what running requests will still need."""

import pytest

from jsg.sched.admission import DECAY_STEPS, FLOOR, START, AdmissionEstimate
from jsg.sched.request import new_running_request
from jsg.types import Request, SamplingParams


def test_estimate_sinks_to_its_floor_and_starts_afresh():
    estimate = AdmissionEstimate(1.0)
    assert estimate.fraction == START
    for _ in range(DECAY_STEPS // 2):
        estimate.step()
    assert estimate.fraction == pytest.approx((START + FLOOR) / 2)
    for _ in range(DECAY_STEPS):
        estimate.step()
    assert estimate.fraction == pytest.approx(FLOOR)
    estimate.on_idle()
    assert estimate.fraction == START


def test_estimate_learns_from_a_retract_and_forgets_in_time():
    estimate = AdmissionEstimate(0.01)
    sampling = SamplingParams(max_new_tokens=100)
    first, second = (new_running_request(Request(rid=r, input_ids=(1,), sampling=sampling), 0, 0.0) for r in "ab")
    first.num_known += 40
    estimate.on_retract([first, second])
    assert estimate.fraction == pytest.approx((60 + 20) / 200)
    first.num_known += 60
    estimate.on_retract([first])
    assert estimate.fraction == 1.0
    for _ in range(2 * DECAY_STEPS):
        estimate.step()
    assert estimate.fraction == pytest.approx(FLOOR * 0.01)
    estimate.on_retract([])
    assert 0 <= estimate.fraction <= 1


def test_estimate_is_a_fraction_whatever_the_knob():
    assert AdmissionEstimate(100.0).fraction == 1.0
    assert AdmissionEstimate(0.01).fraction == pytest.approx(START * 0.01)
