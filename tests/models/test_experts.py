"""The sparse feed-forward block against a loop over tokens, and what keeps its tokens apart."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jsg.errors import ModelError
from jsg.models.experts import SparseFeedForward
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint
from tests.models.test_config import read
from tests.own_process import said

CONFIG = VARIANTS["mixtral_three_of_five"]
WIDTH, INNER, EXPERTS, CHOSEN = 64, 96, 5, 3


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> SparseFeedForward:
    config = read(tmp_path_factory.mktemp("config"), CONFIG)
    assert (config.hidden_size, config.layers[0].mlp.inner) == (WIDTH, INNER)
    assert (config.layers[0].mlp.count, config.layers[0].mlp.router.choice.per_token) == (EXPERTS, CHOSEN)
    block = SparseFeedForward(config.layers[0].mlp, "", WIDTH, jnp.float32)
    for index, param in enumerate(jax.tree.leaves(nnx.state(block), is_leaf=lambda leaf: isinstance(leaf, nnx.Param))):
        param.set_value(jax.random.normal(jax.random.key(index), param.shape) * param.shape[-2] ** -0.5)
    return block


@pytest.fixture(scope="module")
def run(block: SparseFeedForward) -> Callable[[np.ndarray], np.ndarray]:
    """The block, compiled once for each number of tokens."""
    compiled = jax.jit(lambda x: block(x))
    return lambda x: np.asarray(compiled(x))


def tokens(count: int) -> np.ndarray:
    return np.array(jax.random.normal(jax.random.key(99), (count, WIDTH)))


def by_hand(block: SparseFeedForward, x: np.ndarray) -> np.ndarray:
    """One token, one expert after the other, in float64."""
    kernels = {name: np.asarray(getattr(block, name)[...], np.float64) for name in ("gate", "up", "down")}
    router = np.asarray(block.router[...], np.float64)
    out = np.zeros((len(x), WIDTH))
    for row, token in zip(out, x.astype(np.float64), strict=True):
        likely = np.exp(token @ router)
        chosen = np.argsort(-likely)[:CHOSEN]
        for expert in chosen:
            gate, up = token @ kernels["gate"][expert], token @ kernels["up"][expert]
            made = (gate / (1 + np.exp(-gate)) * up) @ kernels["down"][expert]
            row += likely[expert] / likely[chosen].sum() * made
    return out


@pytest.mark.parametrize("count", [64, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 7))])
def test_it_is_the_weighted_sum_of_the_chosen_experts(block: SparseFeedForward, run, count: int):
    x = tokens(count)
    np.testing.assert_allclose(run(x), by_hand(block, x), rtol=0, atol=2e-5)


def test_a_token_is_the_same_to_the_last_bit_wherever_it_stands(run):
    """Deterministic mode rests on it."""
    x = tokens(64)
    whole = run(x)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(64)
        assert np.array_equal(run(x[order]), whole[order])
    others = run(np.concatenate([x[:5], 3 * x[5:]]))
    assert np.array_equal(others[:5], whole[:5])


def test_a_token_that_is_not_finite_stays_alone(run):
    x = tokens(64)
    clean = run(x)
    for bad in (np.nan, np.inf):
        x[3, 5] = bad
        out = run(x)
        assert np.isnan(out[3]).any()
        assert np.array_equal(np.delete(out, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 0}, r"num_local_experts must be an integer in \[1, "),
        ({"num_experts_per_tok": 6}, r"num_experts_per_tok must be an integer in \[1, 5\]"),
    ],
)
def test_numbers_of_experts_are_checked(tmp_path, changes: dict, message: str):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, CONFIG | changes)


@pytest.mark.parametrize(
    ("variant", "implementation", "quantization", "groups"),
    [
        ("gpt_oss", "reference", "none", (2,)),  # each group of two devices adds its biases once
        *(
            pytest.param("mixtral", *case, (1, 2, 4), marks=[pytest.mark.slow, *more])
            for case, more in (
                (("reference", "none"), [pytest.mark.long]),
                (("triton", "none"), [pytest.mark.long]),
                (("triton", "int8"), []),
            )
        ),
        pytest.param("gpt_oss", "triton", "int8", (1, 4), marks=pytest.mark.slow),
    ],
)
def test_devices_with_experts_of_their_own_make_what_one_makes(
    tmp_path, variant: str, implementation: str, quantization: str, groups: tuple[int, ...]
):
    """Four devices in one, two and four groups; some of them without a token. What is not finite stays alone.

    In one, two and four groups it is long without quantisation.
    """
    write_checkpoint(tmp_path, variant, random_tensors(variant, 0))
    told = [{"implementation": implementation, "quantization": quantization, "groups": count} for count in groups]
    for result in said("tests.models.shared_experts", str(tmp_path), told=told):
        assert max(result["differences"]) < 1e-5
        assert result["broken"] == [3, 4, 9]
        assert result["others_are_as_before"]
