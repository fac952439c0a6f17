"""Top-k and top-p without a sort, against sorting; the kernels in interpret mode."""

import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.engine.device import packing, sampling, step
from jsg.kernels_pallas import ops, reference_threshold
from jsg.types import SamplingParams
from tests.kernels_pallas.definition import QUICKLY

VOCAB = 1000
SLACK = 1e-5
"""Of the mass: float32 sums in any order."""


@functools.cache
def compiled(implementation: str):
    """Which logits are kept, [R, V]."""

    def is_kept(logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        threshold, _ = ops.kept_threshold(logits, temperature, top_k, top_p, implementation=implementation)
        return reference_threshold.sortable(logits) >= threshold[:, None]

    return jax.jit(is_kept, compiler_options=QUICKLY)


def kept(implementation: str, logits: np.ndarray, *, temperature: float = 1, top_k: int = 0, top_p: float = 1):
    """Which logits of rows [R, V] are kept, when all rows are sampled alike; `top_k` 0 for all."""
    rows, vocab = logits.shape
    settings = (np.full(rows, temperature, np.float32), np.full(rows, top_k or vocab, np.int32))
    return np.asarray(compiled(implementation)(logits, *settings, np.full(rows, top_p, np.float32)))


def check(
    logits: np.ndarray,
    is_kept: np.ndarray,
    *,
    name: str = "",
    temperature: float = 1,
    top_k: int = 0,
    top_p: float = 1,
) -> None:
    """What is kept of one row is what a sort says: for top-k exactly, for top-p to the rounding of its sums."""
    order = np.asarray(reference_threshold.sortable(jnp.asarray(logits))).astype(np.int64)
    least = order[is_kept].min()
    np.testing.assert_array_equal(is_kept, order >= least, f"{name}: ties with the last one stay, and all above it")
    kth = np.sort(order)[::-1][(top_k or len(order)) - 1]
    if top_p >= 1:
        np.testing.assert_array_equal(is_kept, order >= kth, name)
        return
    assert least >= kth, f"{name}: more than top-k"
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights = np.where(order >= kth, weights, 0)
    mass = weights / weights.sum()
    assert mass[is_kept].sum() >= top_p - SLACK, f"{name}: less than top-p"
    assert mass[is_kept & (order > least)].sum() < top_p + SLACK, f"{name}: more than top-p"


def rows() -> dict[str, np.ndarray]:
    """Rows that are awkward in different ways."""
    rng = np.random.default_rng(1)
    normal = 3 * rng.normal(size=VOCAB).astype(np.float32)
    neighbours = (1 + np.arange(VOCAB) * np.float32(2**-23)).astype(np.float32)
    few = np.full(VOCAB, -np.inf, np.float32)
    few[[3, 500, 999]] = [1, 2, 1]
    every = np.exp(rng.uniform(-80, 80, VOCAB)) * rng.choice([-1, 1], VOCAB)
    return {
        "normal": normal,
        "ties": np.round(normal),
        "equal": np.full(VOCAB, -2.5, np.float32),
        "zeros of both signs": np.where(np.arange(VOCAB) % 2, 0.0, -0.0).astype(np.float32),
        "mostly minus infinity": few,
        "neighbouring floats": rng.permutation(neighbours),
        "neighbouring floats far below the largest": np.where(np.arange(VOCAB) == 5, np.float32(3e38), -neighbours),
        "every magnitude": every.astype(np.float32),
        "far below zero": normal - np.float32(1e6),
    }


SETTINGS = (
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": VOCAB - 1},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.999, "temperature": 3.0},
    {"top_k": 50, "top_p": 0.5, "temperature": 0.01},
    {"top_k": 300, "top_p": 0.95, "temperature": 1e6},
    {},
)


@pytest.mark.parametrize("implementation", ["triton", "tpu", "reference"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_keeps_what_sorting_keeps(settings: dict, implementation: str):
    is_kept = kept(implementation, np.stack(list(rows().values())), **settings)
    for row, (name, logits) in enumerate(rows().items()):
        check(logits, is_kept[row], name=name, **settings)


@pytest.mark.parametrize("implementation", ["triton", "tpu", "reference"])
@hypothesis.given(
    logits=hypothesis.extra.numpy.arrays(
        np.float32,
        33,
        elements=st.sampled_from([-np.inf, -3e38, -7.0, -0.5, -0.0, 0.0, 1e-30, 0.5, 0.5000001, 7, 3e38]),
    ),
    top_k=st.integers(1, 33),
    top_p=st.sampled_from([1e-6, 0.1, 0.4999, 0.77, 1.0]),
    temperature=st.sampled_from([0.05, 1.0, 40.0]),
)
@hypothesis.settings(max_examples=30)
def test_keeps_what_sorting_keeps_of_any_row(
    implementation: str, logits: np.ndarray, top_k: int, top_p: float, temperature: float
):
    hypothesis.assume(np.isfinite(logits).any())
    settings = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    among_others = np.full((len(rows()), VOCAB), -np.inf, np.float32)  # the shape of a program that there is already
    among_others[0, : len(logits)] = logits
    check(among_others[0], kept(implementation, among_others, **settings)[0], **settings)


largest = jax.jit(
    functools.partial(ops.top_logits, implementation="triton"), static_argnums=1, compiler_options=QUICKLY
)


@pytest.mark.parametrize("implementation", ["triton", "tpu"])
def test_a_row_with_nan_ends_and_leaves_the_others_alone(implementation: str):
    clean = np.stack(list(rows().values()))
    broken = clean.copy()
    broken[1, [3, 4]] = np.nan, np.inf
    broken[2] = np.nan
    others = [0, *range(3, len(clean))]
    settings = {"top_k": 40, "top_p": 0.9}
    results = [kept(implementation, logits, **settings)[others] for logits in (broken, clean)]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("count", [20, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, VOCAB))])
def test_the_largest_logits_come_in_order_and_equal_ones_by_id(count: int):
    logits = np.stack(list(rows().values())) + np.float32(0)  # for a sort in numpy both zeros are one
    values, ids = largest(logits, count)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=-1))


def test_the_largest_of_a_row_with_nan_are_of_that_row():
    logits = np.stack(list(rows().values()))
    logits[1, ::7] = np.array([0x7FFFFFFF, 0xFFC00000, 0x7FC00000] * 48, np.uint32)[:143].view(np.float32)
    logits[2] = np.nan
    values, ids = largest(logits, 20)
    for row in (1, 2):
        assert len(set(np.asarray(ids[row]).tolist())) == 20, "none twice, and none left out"
        np.testing.assert_array_equal(logits[row, ids[row]], values[row])


@pytest.mark.slow
def test_a_vocabulary_of_several_blocks():
    rng = np.random.default_rng(4)
    logits = np.round(rng.normal(size=(2, 9001)), 2).astype(np.float32)
    for top_k, top_p in ((5000, 1), (0, 0.9), (400, 0.3)):
        for implementation in ("triton", "tpu"):
            check(logits[0], kept(implementation, logits, top_k=top_k, top_p=top_p)[0], top_k=top_k, top_p=top_p)
    values, ids = largest(logits, 128)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :128]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=-1))


@pytest.mark.slow
def test_tokens_are_the_same_with_and_without_the_kernels(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(2 * rng.normal(size=(4, VOCAB)).astype(np.float32))
    samplings = [
        SamplingParams(top_p=0.9, top_k=40),
        SamplingParams(temperature=0),
        SamplingParams(min_p=0.1, temperature=1.5),
        SamplingParams(top_p=0.5),
    ]
    packed = np.zeros((4, step.SAMPLING_COLUMNS), np.int32)
    for row, params in enumerate(samplings):
        packed[row, 0], packed[row, 2:] = row + 1, packing.sampling_row(params, 7, VOCAB)
    inputs = step.unpack_sampling(jnp.asarray(packed))

    def choose() -> jax.Array:
        return jax.jit(
            lambda: sampling.choose_tokens(logits, inputs, None, is_sampled=True), compiler_options=QUICKLY
        )()

    expected = choose()
    for implementation in ("triton", "tpu"):
        monkeypatch.setattr(ops, "best_implementation", lambda name=implementation: name)
        np.testing.assert_array_equal(choose(), expected)
