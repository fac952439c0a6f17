"""Experts of tokens and places of their copies, in interpret mode against the definition."""

import functools

import jax
import numpy as np
import pytest

from jsg.kernels_pallas import expert_routes, ops
from tests.kernels_pallas.definition import QUICKLY


@functools.cache
def compiled(implementation: str, experts_per_token: int, num_own: int | None = None, is_renormed: bool = True):
    how = {"implementation": implementation, "num_own": num_own, "is_renormed": is_renormed}
    choose = functools.partial(ops.expert_routes, **how)
    return jax.jit(lambda logits, first=0: choose(logits, experts_per_token, first=first), compiler_options=QUICKLY)


def check_is_the_definition(
    logits: np.ndarray,
    experts_per_token: int,
    routes,
    *,
    first: int = 0,
    num_own: int | None = None,
    is_renormed: bool = True,
) -> None:
    """Token by token, from the most likely expert on; of equal ones the first. Sorted from `first` on, and around."""
    routes = jax.tree.map(np.asarray, routes)
    likely = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    experts = np.argsort(-likely, axis=1, kind="stable")[:, :experts_per_token]
    weights = np.take_along_axis(likely, experts, 1)
    num_experts = logits.shape[1]
    own = slice(first, num_experts if num_own is None else first + num_own)
    is_own = (experts >= own.start) & (experts < own.stop)
    expected = np.where(is_own, weights / (weights if is_renormed else likely).sum(1, keepdims=True), 0)
    np.testing.assert_allclose(routes.weights, expected, rtol=2e-6)
    order = np.argsort((experts.reshape(-1) - first) % num_experts, kind="stable")
    assert np.array_equal(routes.sizes, np.bincount(experts.reshape(-1), minlength=num_experts)[own])
    assert np.array_equal(routes.tokens, order // experts_per_token)
    assert np.array_equal(routes.places.reshape(-1), np.argsort(order))


def some_logits(num_tokens: int, num_experts: int) -> np.ndarray:
    """Some experts are equally likely."""
    logits = 3 * np.random.default_rng(num_tokens).normal(size=(num_tokens, num_experts)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    return logits


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "chosen"),
    [(37, 5, 3), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((1, 8, 2), (300, 4, 4)))],
)
def test_it_is_what_its_definition_says(implementation: str, num_tokens: int, num_experts: int, chosen: int):
    logits = some_logits(num_tokens, num_experts)
    check_is_the_definition(logits, chosen, compiled(implementation, chosen)(logits))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_weights_may_be_those_of_a_softmax_over_all_experts(implementation: str):
    logits, first = some_logits(37, 8), 2
    routes = compiled(implementation, 2, 3, is_renormed=False)(logits, first)
    check_is_the_definition(logits, 2, routes, first=first, num_own=3, is_renormed=False)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("num_own", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))])
def test_every_device_chooses_alike_and_has_its_own_experts_in_front(implementation: str, num_own: int):
    """Also a device whose experts no token chooses, and one that has every expert that is chosen."""
    logits = some_logits(37, 8)
    one_sided = logits + np.where(np.arange(8) < 4, 100, 0).astype(np.float32)
    firsts = range(0, 8, num_own)
    for given in (logits, one_sided):
        for first in firsts:
            routes = compiled(implementation, 2, num_own)(given, first)
            check_is_the_definition(given, 2, routes, first=first, num_own=num_own)
    sizes = [int(compiled(implementation, 2, num_own)(one_sided, first).sizes.sum()) for first in firsts]
    assert sum(sizes) == 74 and not any(sizes[len(sizes) // 2 :])


@pytest.mark.parametrize("block", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_however_the_tokens_are_cut(monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(expert_routes, "sizes_for", lambda *_, **__: {"block_elements": 8 * block, "num_warps": 4})
    logits = some_logits(50, 6)
    route = functools.partial(expert_routes.expert_routes, first=0, num_own=6, interpret=True)
    run = jax.jit(lambda x: route(x, 2), compiler_options=QUICKLY)
    check_is_the_definition(logits, 2, run(logits))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_token_that_is_not_finite_takes_places_of_its_own(implementation: str):
    logits = some_logits(37, 5)
    clean = jax.tree.map(np.asarray, compiled(implementation, 3)(logits))
    for bad, where in ((np.nan, 5), (np.inf, (5, 2)), (-np.inf, 5)):
        spoilt = logits.copy()
        spoilt[where] = bad
        routes = jax.tree.map(np.asarray, compiled(implementation, 3)(spoilt))
        assert np.isnan(routes.weights[5]).all()
        assert np.array_equal(np.delete(routes.weights, 5, 0), np.delete(clean.weights, 5, 0))
        assert routes.sizes.sum() == 111
        assert sorted(routes.places.reshape(-1)) == list(range(111))
        assert np.array_equal(routes.tokens[routes.places], np.arange(37)[:, None].repeat(3, 1))
