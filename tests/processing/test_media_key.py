"""Words for pictures in the key of the radix tree: two pictures share them only if the model sees the same."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsg.processing.media.key import MAX_VOCAB_SIZE, MIN_TOKENS, image_key, key_words
from jsg.processing.media.processor import PixelTiles

BASE = {"mode": "image", "size": (2, 3), "tiling": [(1, 2)]}


def test_equal_bytes_shown_otherwise_have_another_key():
    values = np.arange(24, dtype=np.float32)
    keys = [
        image_key(pixels, **{**BASE, **change})
        for pixels, change in [
            (values.reshape(2, 3, 2, 2), {}),
            (values.reshape(2, 3, 4, 1), {}),
            (values.reshape(1, 6, 2, 2), {}),
            (values.view(np.int32).reshape(2, 3, 2, 2), {}),
            (values.view(np.uint8).reshape(2, 3, 2, 8), {}),
            (values.view(">f4").reshape(2, 3, 2, 2), {}),
            (values.reshape(2, 3, 2, 2), {"mode": "video"}),
            (values.reshape(2, 3, 2, 2), {"size": (3, 2)}),
            (values.reshape(2, 3, 2, 2), {"size": (23, 2)}),
            (values.reshape(2, 3, 2, 2), {"tiling": [(2, 1)]}),
            (values.reshape(2, 3, 2, 2), {"tiling": []}),
            (values.reshape(2, 3, 2, 2), {"tiling": [(1, 2), (1, 2)]}),
        ]
    ]
    assert all(len(key) == 32 for key in keys)
    assert len(set(keys)) == len(keys)


def test_the_same_has_the_same_key_however_it_lies_in_memory():
    pixels = np.random.default_rng(0).random((2, 3, 4, 4), np.float32)
    turned = np.asfortranarray(pixels)
    strided = np.repeat(pixels, 2, axis=0)[::2]
    assert image_key(pixels, **BASE) == image_key(turned, **BASE) == image_key(strided, **BASE)


def test_one_bit_of_a_pixel_changes_the_key():
    pixels = np.zeros((1, 3, 2, 2), np.float32)
    other = pixels.copy()
    other.view(np.uint32)[0, 2, 1, 1] = 0x8000_0000  # -0.0, which compares equal
    assert image_key(pixels, **BASE) != image_key(other, **BASE)


def test_tiles_differ_by_each_of_their_fields():
    tiles = PixelTiles(np.zeros((3, 3, 2, 2), np.float32), (4, 6), "image", (1, 2))
    others = [{"size": (6, 4)}, {"mode": "video"}, {"grid": (2, 1)}, {"pixels": np.zeros((3, 3, 4, 1), np.float32)}]
    keys = [tiles.key(), *(dataclasses.replace(tiles, **change).key() for change in others)]
    assert len(set(keys)) == len(keys)


@given(st.binary(min_size=32, max_size=32), st.integers(MIN_TOKENS, 100), st.integers(1, MAX_VOCAB_SIZE))
def test_words_are_no_tokens_and_fit(digest, num_tokens, vocab_size):
    words = key_words(digest, num_tokens, vocab_size)
    assert words.dtype == np.int32 and words.shape == (num_tokens,)
    assert words.min() >= vocab_size
    np.testing.assert_array_equal(words, key_words(digest, 101, vocab_size)[:num_tokens])


def test_no_word_is_a_token_of_the_largest_vocabulary():
    words = key_words(bytes(32), 5000, MAX_VOCAB_SIZE)  # some forty would be, were all of [0, 2^31) allowed
    assert words.min() >= MAX_VOCAB_SIZE


def test_words_differ_from_place_to_place_and_from_picture_to_picture():
    digests = [bytes(31) + bytes([number]) for number in range(20)]
    words = [set(key_words(digest, 576, 32_000).tolist()) for digest in digests]
    assert all(len(each) == 576 for each in words)
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(words, 2))


def test_every_bit_of_the_first_words_varies():
    words = np.array([key_words(bytes(24) + number.to_bytes(8), MIN_TOKENS, MAX_VOCAB_SIZE) for number in range(2000)])
    bits = (words[:, :, None] >> np.arange(30)) & 1  # the 31st is set a little more often: words begin at 2^24
    assert np.abs(bits.mean(0) - 0.5).max() < 0.06  # 5 standard deviations
    assert MIN_TOKENS * np.log2(2**31 - MAX_VOCAB_SIZE) >= 128


def test_too_few_words_for_128_bits_are_refused():
    with pytest.raises(ValueError, match="at least 5 tokens"):
        key_words(bytes(32), MIN_TOKENS - 1, 32_000)
    with pytest.raises(ValueError, match="vocabulary of at most"):
        key_words(bytes(32), 576, MAX_VOCAB_SIZE + 1)
