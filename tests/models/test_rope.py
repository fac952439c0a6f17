import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas.reference_write import rotate
from jsg.models.block_spec import RopeSpec
from jsg.models.config import read_spec
from jsg.models.rope import attention_factor, inverse_frequencies, rotation
from tests.golden.variants import ROPES

RECORDED = Path(__file__).parents[1] / "golden" / "data" / "ropes.npz"


@pytest.mark.parametrize("name", sorted(ROPES))
def test_frequencies_of_published_models_are_those_of_hugging_face(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ROPES[name]))
    config = read_spec(tmp_path)
    with np.load(RECORDED, allow_pickle=False) as file:
        recorded = file[name]
    frequencies = inverse_frequencies(config.layers[0].attention.rope, config.layers[0].attention.head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_array_max_ulp(frequencies, recorded[:-1], maxulp=2)
    assert attention_factor(config.layers[0].attention.rope) == pytest.approx(float(recorded[-1]), rel=1e-6)


@pytest.mark.parametrize("rope", [RopeSpec(type="linear", factor=4.0), RopeSpec(type="yarn", factor=4.0)])
def test_scaling_slows_the_slowest_dimension_by_the_factor(rope):
    plain = inverse_frequencies(dataclasses.replace(rope, type="default"), 64)
    assert plain[-1] / inverse_frequencies(rope, 64)[-1] == pytest.approx(4.0, rel=1e-5)


def test_angles_stay_exact_far_out():
    positions = np.array([0, 1, 8191, 131071, 1_000_000], np.int32)
    turn = rotation(jnp.asarray(positions), RopeSpec(), 128)
    angles = positions.astype(np.float32)[:, None] * inverse_frequencies(RopeSpec(), 128)
    np.testing.assert_allclose(turn.cos, np.cos(angles.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(turn.sin, np.sin(angles.astype(np.float64)), atol=1e-6)


def test_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 32)), jnp.float32) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, *rotation(jnp.array([at]), RopeSpec(), 32))
            for x, at in ((query, query_position), (key, key_position))
        ]
        return float(jnp.vdot(*turned))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotated", [None, 12])
def test_heads_in_another_order_are_turned_as_in_the_file(rotated: int | None, is_interleaved: bool):
    """Pairs of the file are turned and scaled; what is behind them stays as it is."""
    width, position, scale = rotated or 16, 9, 1.25
    factors = tuple(1.0 + i / 4 for i in range(width // 2))
    rope = RopeSpec(
        type="longrope", factors=factors, attention_factor=scale, rotated=rotated, is_interleaved=is_interleaved
    )
    head = np.random.default_rng(0).standard_normal(16)
    pairs = [(2 * i, 2 * i + 1) if is_interleaved else (i, i + width // 2) for i in range(width // 2)]
    wanted = head.copy()
    for i, (first, second) in enumerate(pairs):
        turn = scale * np.exp(1j * position / factors[i] / 1e4 ** (2 * i / width)) * complex(head[first], head[second])
        wanted[first], wanted[second] = turn.real, turn.imag
    order = list(rope.row_order(16) or range(16))
    x = jnp.asarray(head[order], jnp.float32)[None, None]
    found = rotate(x, *rotation(jnp.array([position]), rope, 16))
    np.testing.assert_allclose(found[0, 0], wanted[order], atol=1e-5)


def test_bfloat16_heads_are_turned_in_float32():
    x = jnp.ones((1, 1, 8), jnp.bfloat16)
    turned = rotate(x, *rotation(jnp.array([1001]), RopeSpec(), 8))
    exact = rotate(x.astype(jnp.float32), *rotation(jnp.array([1001]), RopeSpec(), 8))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))


def test_a_step_on_a_cpu_computes_angles_once():
    @jax.jit
    def step(x: jax.Array, positions: jax.Array) -> jax.Array:
        turn = rotation(positions, RopeSpec(), 8)
        return jnp.cumsum(rotate(jnp.cumsum(rotate(x, *turn), 0), *turn), 0)

    shapes = jax.ShapeDtypeStruct((4, 2, 8), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    text = step.lower(*shapes).compile().as_text() or ""
    assert [text.count(f" {name}(") for name in ("cosine", "sine")] == [1, 1]
