"""The pool of token masks: one row per content, the least recently used given away, padding that changes nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.engine.device.mask_pool import ALL_ALLOWED, UPLOAD_SIZES, MaskPool, num_words

WORDS = 3


def mask_of(number: int) -> np.ndarray:
    return np.full(WORDS, number, np.uint32)


def key_of(number: int) -> bytes:
    return number.to_bytes(4)


def ask(pool: MaskPool, numbers: list[int]) -> list[int]:
    """Rows of these masks for one step, as the engine asks for them."""
    pool.begin_step()
    rows = []
    for number in numbers:
        row = pool.find(key_of(number))
        rows.append(pool.put(key_of(number), mask_of(number)) if row is None else row)
    return rows


def send(pool: MaskPool, device: np.ndarray) -> int:
    """Writes what is new to a device that is an array; returns the number of transfers."""
    uploads = pool.take_uploads()
    for rows, masks in uploads:
        assert len(rows) == len(masks) and len(rows) in UPLOAD_SIZES
        device[rows] = masks
    return len(uploads)


def new_device(num_rows: int) -> np.ndarray:
    device = np.zeros((num_rows, WORDS), np.uint32)
    device[ALL_ALLOWED] = 0xFFFFFFFF
    return device


def test_words_of_a_mask():
    assert [num_words(size) for size in (1, 32, 33, 131_072)] == [1, 1, 2, 4096]


def test_no_mask_is_row_0():
    assert MaskPool(WORDS).find(None) == ALL_ALLOWED


def test_equal_masks_are_sent_once():
    pool, device = MaskPool(WORDS), new_device(4096)
    first = ask(pool, [5, 6, 5])
    assert first[0] == first[2] != first[1] and ALL_ALLOWED not in first
    assert send(pool, device) == 1
    assert ask(pool, [6, 5]) == [first[1], first[0]]
    assert send(pool, device) == 0
    assert (pool.num_made, pool.num_found, len(pool)) == (2, 3, 2)


@pytest.mark.parametrize(("count", "transfers"), [(1, 1), (2, 1), (8, 1), (9, 2), (20, 3)])
def test_what_is_new_is_sent_in_few_transfers(count: int, transfers: int):
    pool, device = MaskPool(WORDS), new_device(4096)
    ask(pool, list(range(count)))
    assert send(pool, device) == transfers


@given(seed=st.integers(0, 2**20), num_rows=st.integers(7, 20))
@settings(max_examples=60)
def test_the_device_always_holds_what_a_step_names(seed: int, num_rows: int):
    rng = np.random.default_rng(seed)
    pool, device = MaskPool(WORDS, num_rows), new_device(num_rows)
    for _ in range(60):
        numbers = rng.integers(0, 30, size=rng.integers(1, 7)).tolist()
        rows = ask(pool, numbers)
        pool.check_integrity()
        if rng.random() < 0.8:  # otherwise the next step sends it all
            send(pool, device)
            assert (device[rows] == np.array(numbers, np.uint32)[:, None]).all()
        assert (device[ALL_ALLOWED] == 0xFFFFFFFF).all()


def test_the_least_recently_used_is_given_away():
    pool = MaskPool(WORDS, 4)
    rows = ask(pool, [1]) + ask(pool, [2]) + ask(pool, [3]) + ask(pool, [1])
    assert ask(pool, [4]) == [rows[1]]
    assert pool.find(key_of(2)) is None and pool.find(key_of(1)) == rows[0]


def test_a_step_with_more_masks_than_rows_is_a_bug():
    with pytest.raises(AssertionError, match="more masks than"):
        ask(MaskPool(WORDS, 4), [1, 2, 3, 4])
