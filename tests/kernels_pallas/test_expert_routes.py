"""Experts of tokens and places of their copies, in interpret mode against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import expert_routes, ops


@functools.cache
def compiled(implementation: str, experts_per_token: int, num_own: int | None = None):
    choose = functools.partial(ops.expert_routes, implementation=implementation, num_own=num_own)
    return jax.jit(lambda logits, first=0: choose(logits, experts_per_token, first=first))


def check_is_the_definition(
    logits: np.ndarray, experts_per_token: int, routes, *, first: int = 0, num_own: int | None = None
) -> None:
    """Token by token, from the most likely expert on; of equal ones the first. Sorted from `first` on, and around."""
    routes = jax.tree.map(np.asarray, routes)
    likely = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    experts = np.argsort(-likely, axis=1, kind="stable")[:, :experts_per_token]
    weights = np.take_along_axis(likely, experts, 1)
    num_experts = logits.shape[1]
    own = slice(first, num_experts if num_own is None else first + num_own)
    is_own = (experts >= own.start) & (experts < own.stop)
    expected = np.where(is_own, weights / weights.sum(1, keepdims=True), 0)
    np.testing.assert_allclose(routes.weights, expected, rtol=2e-6)
    order = np.argsort((experts.reshape(-1) - first) % num_experts, kind="stable")
    assert np.array_equal(routes.sizes, np.bincount(experts.reshape(-1), minlength=num_experts)[own])
    assert np.array_equal(routes.tokens, order // experts_per_token)
    assert np.array_equal(routes.places.reshape(-1), np.argsort(order))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(("num_tokens", "num_experts", "chosen"), [(1, 8, 2), (37, 5, 3), (300, 4, 4)])
def test_it_is_what_its_definition_says(implementation: str, num_tokens: int, num_experts: int, chosen: int):
    logits = np.array(3 * jax.random.normal(jax.random.key(num_tokens), (num_tokens, num_experts)))
    logits[::3] = np.round(logits[::3])  # some experts are equally likely
    check_is_the_definition(logits, chosen, compiled(implementation, chosen)(logits))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_every_device_chooses_alike_and_has_its_own_experts_in_front(implementation: str):
    """Also a device whose experts no token chooses, and one that has every expert that is chosen."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(37, 8)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    one_sided = logits + np.where(np.arange(8) < 4, 100, 0).astype(np.float32)
    for given in (logits, one_sided):
        for num_own in (1, 2, 4):
            for first in range(0, 8, num_own):
                routes = compiled(implementation, 2, num_own)(given, first)
                check_is_the_definition(given, 2, routes, first=first, num_own=num_own)
    sizes = [compiled(implementation, 2, 4)(one_sided, first).sizes for first in (0, 4)]
    assert [int(each.sum()) for each in sizes] == [74, 0]


@pytest.mark.parametrize("block", [1, 16])
def test_however_the_tokens_are_cut(monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(expert_routes, "sizes_for", lambda *_, **__: {"block_elements": 8 * block, "num_warps": 4})
    logits = np.array(jax.random.normal(jax.random.key(7), (50, 6)))
    routes = expert_routes.expert_routes(jnp.asarray(logits), 2, first=0, num_own=6, interpret=True)
    check_is_the_definition(logits, 2, routes)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_token_that_is_not_finite_takes_places_of_its_own(implementation: str):
    logits = np.array(jax.random.normal(jax.random.key(8), (20, 8)))
    clean = jax.tree.map(np.asarray, compiled(implementation, 2)(logits))
    for bad, where in ((np.nan, 5), (np.inf, (5, 2)), (-np.inf, 5)):
        spoilt = logits.copy()
        spoilt[where] = bad
        routes = jax.tree.map(np.asarray, compiled(implementation, 2)(spoilt))
        assert np.isnan(routes.weights[5]).all()
        assert np.array_equal(np.delete(routes.weights, 5, 0), np.delete(clean.weights, 5, 0))
        assert routes.sizes.sum() == 40
        assert sorted(routes.places.reshape(-1)) == list(range(40))
        assert np.array_equal(routes.tokens[routes.places], np.arange(20)[:, None].repeat(2, 1))
