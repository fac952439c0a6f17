"""Signatures are checked while the tests run, and no verdict depends on chance."""

import random

import jaxtyping
import pytest

from jsg.models import slices


def test_a_wrong_type_is_seen_and_nothing_is_drawn_from_random():
    before = random.getstate()
    assert slices.outer_axis([3, 2], (3, 2), 0) == 0
    with pytest.raises(jaxtyping.TypeCheckError, match="outer_axis"):
        slices.outer_axis([2.5, 2], (3, 2), 0)  # pyright: ignore[reportArgumentType]
    assert random.getstate() == before
