"""Rows of the tables of modelled speeds and bytes, from a compile."""

import pytest

from bench.nvidia import model
from bench.nvidia.estimate import Estimate, Load
from bench.nvidia.work import Kind


def test_a_row_is_modelled_from_launches_of_the_program():
    estimate, key = Estimate("h200", "8B"), model.decode_key(32)
    two = estimate.compiled(key, (0, 1))
    kinds = [work.kind for work in two.works]
    assert len(kinds) == two.num_launches, "every launch has its work"
    assert (kinds.count(Kind.PRODUCT), kinds.count(Kind.ATTENTION)) == (4 * 2 + 1, 2)
    assert sum(work.kernel_bytes for work in two.works) == 2 * (2 * 218_103_808 + 4096 * 128_256)
    ms = 1e3 * estimate.seconds(key, Load(32, 1024))
    assert 0.9 < ms / 6.02 < 1.1, "as an H200 measured it: docs/performance.md"


def test_a_prompt_of_a_hybrid_is_modelled():
    """Two launches of tiles and one of attention, whose own bytes have neither states nor keys."""
    estimate, key = Estimate("h200", "Qwen3.5-9B"), model.extend_key(8192)
    each = [work for work in estimate.compiled(key, (0, 3)).works if work.kind is Kind.ATTENTION]
    assert len(each) == 3
    of_tiles = 8192 * 32 * (2 * 64 * 4 + 128 * 2 + 4 * 4) + 8192 * 8192 * 2
    assert all(work.other_bytes < 1.2 * of_tiles for work in each)


CASES = [(name, rows) for name in ("Qwen3.5-9B", "Qwen3.5-35B-A3B") for rows in model.ROWS]


@pytest.mark.parametrize(
    ("name", "rows"),
    [pytest.param(*case, marks=() if case == ("Qwen3.5-9B", 256) else pytest.mark.long) for case in CASES],
)
def test_a_decode_step_of_a_hybrid_moves_hardly_more_than_it_must(name: str, rows: int):
    """Weights, keys and values once, and each state once in and once out. A copy of the states would double them."""
    estimate, key, load = Estimate("h200", name), model.decode_key(rows), Load(rows, 1024)
    assert 1 < estimate.traffic(key, load).ratio <= 1.15
    each = [work for work in estimate.compiled(key, (0, 3)).works if work.kind is Kind.ATTENTION]
    assert len(each) == 2, "the rule, and attention"
    assert all(work.other_bytes < 16 * 2**20 for work in each), "states and keys are in no launch's own bytes"
