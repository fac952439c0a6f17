"""The sparse feed-forward block against a loop over tokens, and what keeps its tokens apart."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jsg.errors import ModelError
from jsg.kernels_pallas import grouped_matmul, ops
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.kernels_pallas.reference_routes import Routes
from jsg.models import decoder
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec, RouterSpec
from jsg.models.experts import SparseFeedForward
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint
from tests.models.paged import MAX_TOKENS, PagedModel, load_directory
from tests.models.test_config import read
from tests.own_process import said

CONFIG = VARIANTS["mixtral_three_of_five"]
WIDTH, INNER, EXPERTS, CHOSEN = 64, 96, 5, 3


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> SparseFeedForward:
    config = read(tmp_path_factory.mktemp("config"), CONFIG)
    assert (config.hidden_size, config.layers[0].mlp.inner) == (WIDTH, INNER)
    assert (config.layers[0].mlp.count, config.layers[0].mlp.router.choice.per_token) == (EXPERTS, CHOSEN)
    return random_block(config.layers[0].mlp, jnp.float32)


def random_block(spec: ExpertsSpec, dtype: jax.typing.DTypeLike) -> SparseFeedForward:
    """A block whose projections keep the size of what they are given, with biases of up to about 1/2."""
    block = SparseFeedForward(spec, "", WIDTH, dtype)
    for index, param in enumerate(jax.tree.leaves(nnx.state(block), is_leaf=lambda leaf: isinstance(leaf, nnx.Param))):
        summed = max([16, *param.shape[-2:-1]])
        value = np.random.default_rng(index).standard_normal(param.shape, np.float32) * np.float32(summed**-0.5)
        param.set_value(jax.device_put(value.astype(param.get_value().dtype)))
    return block


def compiled(block: SparseFeedForward) -> Callable[[np.ndarray], np.ndarray]:
    """The block, compiled once for each number of tokens."""
    made = jax.jit(lambda x: block(x))
    return lambda x: np.asarray(made(x))


@pytest.fixture(scope="module")
def run(block: SparseFeedForward) -> Callable[[np.ndarray], np.ndarray]:
    return compiled(block)


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(99).standard_normal((count, WIDTH), np.float32)


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
        assert np.isnan(out[3]).any() and np.array_equal(np.delete(out, 3, 0), np.delete(clean, 3, 0))


ROUTER = RouterSpec(
    choice=ChoiceSpec(per_token=CHOSEN, score="sigmoid", least_sum=1e-3, factor=2.5),
    has_bias=True,
    choice_bias="choice",
)
SHARED = FeedForwardSpec(inner=32)


def test_a_router_with_biases_and_a_shared_block_without_a_gate():
    """The bias of the projection counts in the weights, that of the choice does not."""
    block = random_block(ExpertsSpec(count=EXPERTS, inner=INNER, router=ROUTER, shared=SHARED), jnp.float32)
    x = tokens(40)
    exact = x.astype(np.float64)
    logits = exact @ np.asarray(block.router[...], np.float64) + np.asarray(block.router_bias[...], np.float64)
    scores = 1 / (1 + np.exp(-logits))
    chosen = np.argsort(-(scores + np.asarray(block.choice_bias[...], np.float64)), axis=1)[:, :CHOSEN]
    assert (chosen != np.argsort(-scores, axis=1)[:, :CHOSEN]).any()
    weights = np.take_along_axis(scores, chosen, 1)
    weights *= 2.5 / weights.sum(1, keepdims=True)
    kernels = [np.asarray(getattr(block, name)[...], np.float64) for name in ("gate", "up", "down")]
    gate, up = np.moveaxis(np.asarray(block.shared.gate_up.kernel[...], np.float64), 1, 0)
    expected = gated_by_hand(exact, gate, up, np.asarray(block.shared.down.kernel[...], np.float64))
    for row, experts, shares in zip(range(40), chosen, weights, strict=True):
        for expert, share in zip(experts, shares, strict=True):
            expected[row] += share * gated_by_hand(exact[row], *(kernel[expert] for kernel in kernels))
    np.testing.assert_allclose(compiled(block)(x), expected, rtol=0, atol=5e-5)


def test_a_shared_block_as_large_as_an_expert_is_in_their_launches(monkeypatch: pytest.MonkeyPatch):
    """On a GPU, of few tokens. The result is what it is on a CPU."""
    block = random_block(ExpertsSpec(count=EXPERTS, inner=32, router=ROUTER, shared=SHARED, shared_gate="g"), "float32")
    x, multiply, kinds = tokens(8), grouped_matmul._multiply, []
    alone = compiled(block)(x)
    monkeypatch.setitem(ops.BEST, "cpu", "triton")
    monkeypatch.setattr(
        grouped_matmul, "_multiply", lambda *args, **how: kinds.append(args[5] is None) or multiply(*args, **how)
    )
    np.testing.assert_allclose(compiled(block)(x), alone, rtol=0, atol=2e-5)
    assert kinds == [False, False]


def gated_by_hand(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)) @ down


def test_what_stays_float32_in_a_model_of_bfloat16(monkeypatch: pytest.MonkeyPatch):
    """The bias of a choice always; a router and the weights if the record says so."""
    given: list[jax.Array] = []
    routes = ops.expert_routes

    def noted(logits: jax.Array, choice: ChoiceSpec, **how: Any) -> Routes:
        given.append(logits)
        return routes(logits, choice, **how)

    monkeypatch.setattr(ops, "expert_routes", noted)
    plain = RouterSpec(choice=ChoiceSpec(per_token=CHOSEN), choice_bias="choice")
    long = dataclasses.replace(plain, is_float32=True)
    unrounded = dataclasses.replace(long, rounds_weights=False)
    made = [
        random_block(ExpertsSpec(count=EXPERTS, inner=INNER, router=router), jnp.bfloat16)
        for router in (plain, long, unrounded)
    ]
    assert [block.choice_bias[...].dtype for block in made] == [jnp.float32] * 3
    assert [block.router[...].dtype for block in made] == [jnp.bfloat16, jnp.float32, jnp.float32]
    x = jax.device_put(tokens(40).astype(jnp.bfloat16))
    results = [np.asarray(block(x), np.float32) for block in made]
    exact = np.asarray(x, np.float64) @ np.asarray(made[1].router[...], np.float64)
    errors = [np.abs(np.asarray(logits, np.float64) - exact).max() for logits in given]
    assert errors[0] > 1e-3 > 1e-5 > errors[1] == errors[2]
    assert not np.array_equal(results[1], results[2]) and np.abs(results[1] - results[2]).max() < 0.05


def test_padding_reads_no_expert_that_no_token_chose(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """One row of a step with room for more, and a prompt: in each layer as many copies, of no more experts."""
    sizes: list[np.ndarray] = []
    routes = ops.expert_routes

    def noted(*given: Any, **how: Any) -> Routes:
        made = routes(*given, **how)
        jax.debug.callback(lambda found: sizes.append(np.asarray(found)), made.sizes)
        return made

    monkeypatch.setattr(ops, "expert_routes", noted)
    decoder._run_layer.clear_cache()  # of traces of other tests
    write_checkpoint(tmp_path, "mixtral_three_of_five", random_tensors("mixtral_three_of_five", 0))
    config, model = load_directory(tmp_path)
    paged = PagedModel(config, model)
    paged.extend({0: [7]})
    paged.decode({0: 9})
    jax.effects_barrier()
    decoder._run_layer.clear_cache()  # of those that note
    assert len(sizes) == 2 * config.num_layers
    assert all(each.sum() == MAX_TOKENS * CHOSEN and np.count_nonzero(each) == CHOSEN for each in sizes)


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


DEVICES = {"mixtral": 4, "gpt_oss": 4, "glm4_moe": 2}
"""Which share out a small model of each family."""


@pytest.mark.parametrize(
    ("variants", "implementation", "quantization", "groups"),
    [
        # Each group of two devices adds the biases of gpt-oss once.
        (("mixtral", "glm4_moe", "gpt_oss"), "reference", "none", (2,)),
        pytest.param(("mixtral",), "triton", "int8", (1, 2, 4), marks=pytest.mark.slow),
        pytest.param(("glm4_moe",), "triton", "int8", (1, 2), marks=pytest.mark.slow),
        *(
            pytest.param(("mixtral",), name, "none", (1, 2, 4), marks=[pytest.mark.slow, pytest.mark.long])
            for name in ("reference", "triton")
        ),
        pytest.param(("gpt_oss",), "triton", "int8", (1, 4), marks=pytest.mark.slow),
    ],
)
def test_devices_with_experts_of_their_own_make_what_one_makes(
    tmp_path, variants: tuple[str, ...], implementation: str, quantization: str, groups: tuple[int, ...]
):
    """In one group and in several; some devices without a token. What is not finite stays alone.

    GLM-4.5 has groups of experts, a bias of the choice, and a block that all tokens use. Mixtral in one, two and four
    groups is long without quantisation.
    """
    told = []
    for variant in variants:
        directory = tmp_path / variant
        directory.mkdir()
        write_checkpoint(directory, variant, random_tensors(variant, 0))
        case = {"directory": str(directory), "implementation": implementation, "quantization": quantization}
        told += [case | {"devices": DEVICES[variant], "groups": count} for count in groups]
    for case, result in zip(told, said("tests.models.shared_experts", told=told), strict=True):
        assert max(result["differences"]) < 1e-5, case
        assert result["broken"] == [3, 4, 9], case
        assert result["others_are_as_before"], case
