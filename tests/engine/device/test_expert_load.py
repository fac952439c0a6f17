"""The load of the busiest group of experts: the sampled estimate against values that can be calculated."""

import itertools
import statistics

import pytest

from jsg.engine.device.expert_load import ExpertLoad, expert_load


def test_one_group_has_everything():
    assert expert_load(8, 2, 1) == ExpertLoad(2.0, 2.0)
    assert expert_load(8, 2, 10_000) == ExpertLoad(8.0, 20_000.0)


@pytest.mark.parametrize("num_groups", [2, 4, 8])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_few_tokens_are_counted_out(num_tokens: int, num_groups: int):
    sets = list(itertools.combinations(range(8), 2))
    reads, copies = [], []
    for chosen in itertools.product(sets, repeat=num_tokens):
        groups = [[8 // num_groups * g <= e < 8 // num_groups * (g + 1) for e in range(8)] for g in range(num_groups)]
        picked = list(itertools.chain(*chosen))
        reads.append(max(sum(group[e] for e in set(picked)) for group in groups))
        copies.append(max(sum(group[e] for e in picked) for group in groups))
    load = expert_load(8, 2, num_tokens, num_groups)
    assert load.num_read == pytest.approx(statistics.mean(reads), rel=0.03)
    assert load.num_copies == pytest.approx(statistics.mean(copies), rel=0.03)


def test_many_tokens_read_all_and_are_nearly_even():
    """Of eight groups the busiest of a normal distribution is 1.42 standard deviations above the mean."""
    load = expert_load(8, 2, 8192, 8)
    deviation = (8192 * 2 / 8 * (1 - 2 / 8)) ** 0.5
    assert load.num_read == 1
    assert load.num_copies == pytest.approx(2048 + 1.42 * (8 / 7) ** 0.5 * deviation, abs=0.5 * deviation)


def test_the_same_at_every_call():
    first = expert_load(8, 2, 32, 4)
    expert_load.cache_clear()
    assert expert_load(8, 2, 32, 4) == first
    assert first.num_read <= 2 and 16 < first.num_copies < 32
