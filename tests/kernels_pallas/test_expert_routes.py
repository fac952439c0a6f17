"""Experts of tokens and places of their copies, in interpret mode against the definition."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jsg.kernels_pallas import expert_routes, ops
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from tests.kernels_pallas.definition import QUICKLY


@functools.cache
def compiled(implementation: str, choice: ChoiceSpec, num_own: int | None = None):
    choose = functools.partial(ops.expert_routes, implementation=implementation, num_own=num_own)
    return jax.jit(
        lambda logits, first=0, bias=None: choose(logits, choice, first=first, bias=bias), compiler_options=QUICKLY
    )


def most_likely(per_token: int) -> ChoiceSpec:
    return ChoiceSpec(per_token=per_token)


def check_is_the_definition(
    logits: np.ndarray,
    choice: ChoiceSpec,
    routes: Any,
    *,
    first: int = 0,
    num_own: int | None = None,
    bias: np.ndarray | None = None,
) -> None:
    """Token by token, from the best expert on; of equal ones the first. Sorted from `first` on, and around."""
    routes = jax.tree.map(np.asarray, routes)
    num_tokens, num_experts = logits.shape
    own = slice(first, num_experts if num_own is None else first + num_own)
    experts, expected = np.zeros((2, num_tokens, choice.per_token))
    experts = experts.astype(int)
    for token, row in enumerate(logits.astype(np.float64)):
        scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        if choice.score == "sigmoid":
            scores = 1 / (1 + np.exp(-row))
        in_choice = scores if bias is None else scores + bias.astype(np.float64)
        groups = in_choice.reshape(choice.groups, -1)
        if choice.groups > choice.kept_groups:
            order = np.argsort(-np.sort(groups)[:, -2:].sum(1), kind="stable")
            groups = groups.copy()
            groups[order[choice.kept_groups :]] = choice.masked_score
        experts[token] = np.argsort(-groups.reshape(-1), kind="stable")[: choice.per_token]
        weights = scores[experts[token]]
        if choice.is_renormed:
            weights = weights / (max(weights.sum(), choice.least_sum) + choice.added_sum)
        is_own = (experts[token] >= own.start) & (experts[token] < own.stop)
        expected[token] = np.where(is_own, weights * choice.factor, 0)
    np.testing.assert_allclose(routes.weights, expected, rtol=3e-6)
    order = np.argsort((experts.reshape(-1) - first) % num_experts, kind="stable")
    assert np.array_equal(routes.sizes, np.bincount(experts.reshape(-1), minlength=num_experts)[own])
    assert np.array_equal(routes.tokens, order // choice.per_token)
    assert np.array_equal(routes.places.reshape(-1), np.argsort(order))


def some_logits(num_tokens: int, num_experts: int) -> np.ndarray:
    """Some experts are equally likely."""
    logits = 3 * np.random.default_rng(num_tokens).normal(size=(num_tokens, num_experts)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    return logits


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "chosen"),
    [(37, 5, 3), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((1, 8, 2), (300, 4, 4), (300, 40, 8)))],
)
def test_it_is_what_its_definition_says(implementation: str, num_tokens: int, num_experts: int, chosen: int):
    logits, choice = some_logits(num_tokens, num_experts), most_likely(chosen)
    check_is_the_definition(logits, choice, compiled(implementation, choice)(logits))


GROUPED = ChoiceSpec(per_token=3, score="sigmoid", groups=4, kept_groups=2, factor=2.5)
OTHERS: dict[str, tuple[ChoiceSpec, tuple[float, float] | None]] = {
    # With the least and the largest bias.
    "not renormed": (ChoiceSpec(per_token=2, is_renormed=False), None),
    "softmax, bias, least sum": (ChoiceSpec(per_token=3, least_sum=0.5), (-0.3, 0.3)),
    "sigmoid, added sum": (ChoiceSpec(per_token=2, score="sigmoid", added_sum=0.1), (-0.3, 0.3)),
    "sigmoid, factor": (ChoiceSpec(per_token=2, score="sigmoid", factor=0.5, is_renormed=False), (-0.3, 0.3)),
    "groups, without the others": (GROUPED, (-0.3, 0.3)),
    # The biased scores of the kept groups are negative, so experts of the others come first.
    "groups, the others count 0": (dataclasses.replace(GROUPED, masked_score=0.0), (-2.0, -1.1)),
}


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_choices_and_weights(implementation: str, name: str):
    (choice, biases), logits = OTHERS[name], some_logits(37, 12)
    bias = None if biases is None else np.random.default_rng(5).uniform(*biases, 12).astype(np.float32)
    routes = compiled(implementation, choice, 7)(logits, 2, bias)
    check_is_the_definition(logits, choice, routes, first=2, num_own=7, bias=bias)


@pytest.mark.parametrize("num_own", [40, pytest.param(9, marks=pytest.mark.slow)])
def test_many_experts_are_chosen_for_one_block_of_tokens_by_each_program(monkeypatch: pytest.MonkeyPatch, num_own: int):
    """With a bias and groups, of lengths that are no power of two; the last of ten blocks is not full."""
    monkeypatch.setattr(expert_routes, "sizes_for", lambda *_, **__: {"block_elements": 8 * 64, "num_warps": 4})
    logits, choice = some_logits(75, 40), ChoiceSpec(per_token=8, score="sigmoid", groups=4, kept_groups=3)
    bias = np.random.default_rng(0).normal(size=40).astype(np.float32)
    own = {"first": 40 - num_own, "num_own": num_own}
    route = functools.partial(expert_routes.expert_routes, choice=choice, **own, interpret=True)
    run = jax.jit(lambda x, bias: route(x, bias=bias), compiler_options=QUICKLY)
    check_is_the_definition(logits, choice, run(logits, bias), **own, bias=bias)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("num_own", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))])
def test_every_device_chooses_alike_and_has_its_own_experts_in_front(implementation: str, num_own: int):
    """Also a device whose experts no token chooses, and one that has every expert that is chosen."""
    logits = some_logits(37, 8)
    one_sided = logits + np.where(np.arange(8) < 4, 100, 0).astype(np.float32)
    firsts = range(0, 8, num_own)
    for given in (logits, one_sided):
        for first in firsts:
            routes = compiled(implementation, most_likely(2), num_own)(given, first)
            check_is_the_definition(given, most_likely(2), routes, first=first, num_own=num_own)
    sizes = [int(compiled(implementation, most_likely(2), num_own)(one_sided, first).sizes.sum()) for first in firsts]
    assert sum(sizes) == 74 and not any(sizes[len(sizes) // 2 :])


@pytest.mark.parametrize(("implementation", "num_experts"), [("triton", 8), ("triton", 40), ("reference", 8)])
def test_padding_reads_no_kernel(implementation: str, num_experts: int):
    """It chooses what the last real token chooses, whatever stands there; the real tokens as without it."""
    logits, choice, count = some_logits(37, num_experts), most_likely(2), 5
    route = functools.partial(ops.expert_routes, choice=choice, implementation=implementation)
    routes = jax.jit(lambda x, num_real: route(x, num_real=num_real), compiler_options=QUICKLY)
    padded = np.concatenate([logits[:count], np.full_like(logits[count:], np.nan)])
    repeated = logits[np.minimum(np.arange(37), count - 1)]
    check_is_the_definition(repeated, choice, routes(padded, count))
    assert np.isnan(np.asarray(routes(padded, 0).weights)).sum() == 0, "without a token the first row says it"


@pytest.mark.parametrize("block", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_however_the_tokens_are_cut(monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(expert_routes, "sizes_for", lambda *_, **__: {"block_elements": 8 * block, "num_warps": 4})
    logits = some_logits(50, 6)
    route = functools.partial(expert_routes.expert_routes, first=0, num_own=6, interpret=True)
    run = jax.jit(lambda x: route(x, most_likely(2)), compiler_options=QUICKLY)
    check_is_the_definition(logits, most_likely(2), run(logits))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_token_that_is_not_finite_takes_places_of_its_own(implementation: str):
    logits = some_logits(37, 5)
    clean = jax.tree.map(np.asarray, compiled(implementation, most_likely(3))(logits))
    for bad, where in ((np.nan, 5), (np.inf, (5, 2)), (-np.inf, 5)):
        spoilt = logits.copy()
        spoilt[where] = bad
        routes = jax.tree.map(np.asarray, compiled(implementation, most_likely(3))(spoilt))
        assert np.isnan(routes.weights[5]).all()
        assert np.array_equal(np.delete(routes.weights, 5, 0), np.delete(clean.weights, 5, 0))
        assert routes.sizes.sum() == 111
        assert sorted(routes.places.reshape(-1)) == list(range(111))
        assert np.array_equal(routes.tokens[routes.places], np.arange(37)[:, None].repeat(3, 1))
