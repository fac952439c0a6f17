import random

import jax.numpy as jnp
import jaxtyping
import pytest

from jsg.kernels_pallas import ops
from tests.shape_checker import checked


def test_a_wrong_shape_is_seen():
    with pytest.raises(jaxtyping.TypeCheckError, match="gated"):
        ops.gated(jnp.zeros((5, 4)))


def test_a_wrong_item_is_seen_and_nothing_is_drawn_from_random():
    @jaxtyping.jaxtyped(typechecker=checked)
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    before = random.getstate()
    assert total([3, 2]) == 5
    with pytest.raises(jaxtyping.TypeCheckError, match="total"):
        total([2.5, 2])  # pyright: ignore[reportArgumentType]
    assert random.getstate() == before
