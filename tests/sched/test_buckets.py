"""The shapes that a step may have: every step fits one, with little padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsg.errors import ConfigError
from jsg.sched.buckets import Phase, make_buckets, make_deterministic_buckets


@given(st.integers(1, 300), st.integers(0, 10_000), st.booleans())
def test_buckets_hold_every_step_with_little_padding(max_running: int, more: int, is_deterministic: bool):
    chunk = max_running + more
    buckets = (
        make_deterministic_buckets(max_running, chunk, chunk) if is_deterministic else make_buckets(max_running, chunk)
    )
    assert len(buckets.all) <= 24, "design: at most 24 forward executables"
    assert buckets.max_rows >= max_running and buckets.max_tokens >= chunk and buckets.chunk == chunk
    for phase, most in ((Phase.DECODE, max_running), (Phase.EXTEND, chunk)):
        for num_tokens in {1, min(2, most), most // 3 + 1, most - 1 or 1, most}:
            key = buckets.pick(phase, num_tokens)
            keys = buckets.decode if phase is Phase.DECODE and buckets.decode else buckets.extend
            assert key == min((k for k in keys if k.num_tokens >= num_tokens), key=lambda k: k.num_tokens)
            if not is_deterministic:
                assert key.num_tokens <= max(64, 2 * num_tokens) and key.phase is phase
    assert is_deterministic == (not buckets.decode)


@pytest.mark.parametrize("max_running", [1, 8, 10, 250, 256])
def test_every_number_of_rows_can_be_a_multiple_of_something(max_running: int):
    buckets = make_buckets(max_running, max_running, row_multiple=8, shares_prefixes=True)
    assert all(key.num_rows % 8 == key.num_tokens % 8 == 0 for key in buckets.all)
    assert max_running <= buckets.decode[-1].num_rows == buckets.max_rows < max_running + 8
    assert buckets.pick(Phase.DECODE, max_running).num_tokens == buckets.max_rows
    assert buckets.decode[0].num_rows == 8


def test_a_shape_for_drafts_must_be_worth_it():
    buckets = make_buckets(32, 512)
    sizes = [key.num_rows for key in buckets.drafts]
    assert sizes == [8, 16, 32, 64, 128]
    for least, wanted, most, expected in (
        (4, 11, 128, 8),  # three quarters of 16 are 12
        (4, 12, 128, 16),
        (4, 23, 128, 16),  # three quarters of 32 are 24
        (4, 24, 128, 32),
        (16, 20, 128, 32),  # a full batch has no room for drafts in 16 rows
        (31, 40, 128, 64),  # nor in 32 for enough of them
        (16, 95, 128, 64),
        (16, 96, 128, 128),
        (16, 300, 128, 128),
        (16, 300, 64, 64),  # the largest is not compiled yet
        (32, 40, 32, 32),
    ):
        assert buckets.rows_worth(least, wanted, most) == expected


@pytest.mark.parametrize("make", [make_buckets, lambda rows, chunk: make_deterministic_buckets(rows, chunk, 512)])
def test_a_chunk_must_hold_a_token_of_everybody(make):
    with pytest.raises(ConfigError, match="--chunked-prefill-size must be at least --max-running-requests"):
        make(64, 63)


def test_deterministic_chunk_must_fit_its_one_shape():
    with pytest.raises(ConfigError, match="at most 256"):
        make_deterministic_buckets(4, 257, 256)
