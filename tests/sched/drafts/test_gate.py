"""Which drafts are worth it, by costs that the tests set."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsg.sched.buckets import Buckets, make_buckets, make_deterministic_buckets
from jsg.sched.drafts.estimates import FIRST_GUESSES, MOST, Estimates, kind_of
from jsg.sched.drafts.gate import GAIN, HOST_SECONDS, HOST_SECONDS_A_ROW, LEAST_CHANCE, Gate
from jsg.step_reports import Source

CPU = make_buckets(32, 512)
GPU = make_buckets(256, 8192, row_multiple=8)


def gate_of(buckets: Buckets, seconds) -> Gate:
    """A gate that has measured `seconds(rows)` of every shape."""
    gate = Gate(buckets)
    gate.is_wanted = True
    for key in [*gate.to_measure]:
        gate.note(key, seconds(key.num_rows))
    return gate


def test_without_all_costs_only_what_is_sure_is_drafted():
    gate = Gate(CPU)
    gate.is_wanted = True
    assert gate.to_measure and gate.choose(1, [[0.99, 0.98]], 128) is None and not gate.may_gain(1, 128)
    for key in [*gate.to_measure]:
        assert not gate.is_open
        gate.note(key, 0.01)
    assert gate.is_open and gate.may_gain(1, 128) and gate.choose(1, [[0.99, 0.98]], 128)


def test_the_decode_shapes_between_measured_ones_lie_on_a_line():
    gate = gate_of(GPU, lambda rows: 0.001 * rows)
    assert [key.num_rows for key in gate._plain] == [8, 32, 256]
    for rows, expected in ((1, 0.008), (8, 0.008), (16, 0.016), (33, 0.064), (100, 0.128), (256, 0.256)):
        assert gate.plain_seconds(rows) == pytest.approx(expected)


def test_a_busy_machine_makes_no_small_step_look_dearer_than_a_large_one():
    gate = Gate(CPU)
    for key in [*gate.to_measure]:
        gate.note(key, 1.0 if key.num_rows == 1 else 0.001 * key.num_rows)
    assert gate.plain_seconds(1) == 0.008


@given(
    num_rows=st.integers(1, 32),
    chances=st.lists(st.lists(st.floats(0.01, 1), max_size=6), max_size=32),
    slope=st.floats(0, 2),
    most=st.sampled_from([16, 64, 128]),
)
def test_the_choice_is_the_best_shape_or_none(num_rows: int, chances: list[list[float]], slope: float, most: int):
    """Compared with every count of drafts in every shape."""
    falling = [[*itertools.accumulate(each, lambda a, b: a * b)] for each in chances[:num_rows]]
    gate = gate_of(CPU, lambda rows: 0.01 * (1 + slope * rows / 8))
    choice = gate.choose(num_rows, falling, most)
    ranked = sorted((chance for each in falling for chance in each if chance >= LEAST_CHANCE), reverse=True)
    host = HOST_SECONDS + HOST_SECONDS_A_ROW * num_rows
    rates = {
        key.num_rows: (num_rows + sum(ranked[: key.num_rows - num_rows])) / (gate.seconds[key] + host)
        for key in CPU.drafts
        if num_rows < key.num_rows <= most and ranked
    }
    plain = num_rows / gate.plain_seconds(num_rows)
    if choice is None:
        assert all(rate <= GAIN * plain * (1 + 1e-9) for rate in rates.values())
        return
    assert rates[choice.num_rows] == pytest.approx(max(rates.values())) and rates[choice.num_rows] > GAIN * plain
    assert sum(choice.counts) == min(len(ranked), choice.num_rows - num_rows)
    taken = sorted((c for each, n in zip(falling, choice.counts, strict=True) for c in each[:n]), reverse=True)
    assert taken == ranked[: len(taken)]


def test_a_full_batch_that_computes_all_it_can_has_no_drafts():
    """Where each row costs as much as the first: not even with proposals that are nearly sure."""
    gate = gate_of(GPU, lambda rows: 0.0001 * rows)
    assert not gate.may_gain(256, 320) and gate.choose(256, [[0.99] * 64] * 256, 320) is None
    memory_bound = gate_of(GPU, lambda rows: 0.01 + 1e-6 * rows)
    assert memory_bound.may_gain(8, 320) and memory_bound.choose(8, [[0.9] * 4] * 8, 320)


def test_the_model_drafts_as_many_tokens_as_are_worth_its_time():
    """A token costs as much as a part of a step; those that are there anyway count."""
    own = [[0.8, 0.6, 0.4, 0.2]]
    gate = gate_of(CPU, lambda rows: 0.01)
    assert gate.num_repeats(1, [], own, 128) == 0, "nothing is measured"
    gate.expect_repeats()
    assert gate.is_open and gate.to_measure == [1, 8, 32]
    for part, expected in ((0.01, 4), (0.15, 3), (0.6, 1), (1.0, 0)):
        gate.repeat_seconds = dict.fromkeys((1, 8, 32), part * 0.01)
        assert gate.num_repeats(1, [], own, 128) == expected, part
    gate.repeat_seconds = dict.fromkeys((1, 8, 32), 0.003)
    assert gate.num_repeats(2, [], own, 128) == 1
    assert gate.num_repeats(2, [[0.99] * 6], own, 128) == 0, "other proposals gain more alone"


def test_in_deterministic_mode_drafts_cost_nothing():
    gate = Gate(make_deterministic_buckets(4, 64, 64))
    assert gate.is_open and not gate.may_gain(4, 64), "nobody wants drafts"
    gate.is_wanted = True
    assert gate.may_gain(4, 64)
    choice = gate.choose(2, [[0.5, 0.25, 0.12, 0.06], [0.9]], 64)
    assert choice is not None and choice.counts == (3, 1) and choice.num_rows == 64


def test_estimates_follow_what_comes_and_begin_with_those_of_the_namespace():
    namespace = Estimates()
    kind = kind_of(Source.TEXT, 3)
    assert namespace.chance(kind) == FIRST_GUESSES[Source.TEXT][2]
    first = Estimates(namespace)
    for _ in range(100):
        first.count(kind, is_right=False)
    assert first.chance(kind) < 0.01 and namespace.chance(kind) < 0.05
    assert Estimates(namespace).chance(kind) == namespace.chance(kind)
    assert first.chance(kind_of(Source.TEXT, 4)) == FIRST_GUESSES[Source.TEXT][3], "kinds are counted apart"
    for _ in range(int(MOST)):
        first.count(kind, is_right=True)
    assert first.chance(kind) > 0.6, "the last tokens weigh most"
    assert Estimates().chance(kind) == FIRST_GUESSES[Source.TEXT][2]
