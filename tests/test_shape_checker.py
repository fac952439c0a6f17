"""Signatures with shapes are checked while the tests run, and no verdict depends on chance."""

import pathlib
import random

import jax.numpy as jnp
import jaxtyping
import pytest

from jsg.kernels_pallas import ops
from tests.shape_checker import checked

ROOT = pathlib.Path(__file__).parent.parent
MACHINE_CODE = ROOT / "jsg" / "kernels_pallas" / "native"
"""It emits an instruction per call, so checks would take longer than LLVM. `ops` has the shapes of its functions."""


def test_every_module_with_shapes_is_listed(pytestconfig: pytest.Config):
    listed = pytestconfig.getoption("--jaxtyping-packages").split(",")
    has_shapes = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in sorted((ROOT / "jsg").rglob("*.py"))
        if file.parent != MACHINE_CODE and '[Array, "' in file.read_text()
    ]
    assert listed == [*has_shapes, "tests.shape_checker.checked"]


def test_a_wrong_shape_is_seen():
    with pytest.raises(jaxtyping.TypeCheckError, match="gated"):
        ops.gated(jnp.zeros((5, 3, 4)))


def test_a_wrong_item_is_seen_and_nothing_is_drawn_from_random():
    @jaxtyping.jaxtyped(typechecker=checked)
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    before = random.getstate()
    assert total([3, 2]) == 5
    with pytest.raises(jaxtyping.TypeCheckError, match="total"):
        total([2.5, 2])  # pyright: ignore[reportArgumentType]
    assert random.getstate() == before
