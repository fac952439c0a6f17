"""Choosing tokens on the device against a sort-based reference on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.engine.device import noise, packing, step
from jsg.engine.device.programs import GREEDY, VARIANTS, Variant
from jsg.engine.device.sampling import (
    PenaltyTables,
    SamplingInputs,
    TokenMasks,
    _penalties,
    choose_tokens,
    count_tokens,
    first_best,
    token_logprobs,
)
from jsg.kernels_pallas import ops
from jsg.types import SamplingParams
from tests.kernels_pallas.definition import QUICKLY

VOCAB = 200


def inputs_of(*samplings: SamplingParams, output_index: int = 0, seeds: list[int] | None = None) -> SamplingInputs:
    """Rows 1, 2, … with these parameters."""
    packed = np.zeros((len(samplings), step.SAMPLING_COLUMNS), np.int32)
    for i, sampling in enumerate(samplings):
        seed = seeds[i] if seeds else sampling.sampling_seed or 0
        packed[i, 0], packed[i, 1] = i + 1, output_index
        packed[i, 2:] = packing.sampling_row(sampling, seed, VOCAB)
    return step.unpack_sampling(jnp.asarray(packed))


FLAGS = ("is_sampled", "has_thresholds")
choose_jitted = jax.jit(choose_tokens, static_argnames=FLAGS, compiler_options=QUICKLY)
sample_jitted = jax.jit(step.sample, static_argnames=(*FLAGS, "num_top"), compiler_options=QUICKLY)
needed_jitted = jax.jit(step.sample_needed, static_argnames="num_top", compiler_options=QUICKLY)


def choose(logits: np.ndarray, inputs: SamplingInputs, tables: PenaltyTables | None = None) -> np.ndarray:
    return np.asarray(choose_jitted(logits, inputs, tables, is_sampled=True))


def kept_by_sorting(logits: np.ndarray, sampling: SamplingParams) -> set[int]:
    """Temperature, top-k, top-p of what is left, min-p; ties stay in."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    k = VOCAB if sampling.top_k == -1 else sampling.top_k
    kept = {i for i in order if scaled[i] >= scaled[order[k - 1]]}
    weights = np.exp(scaled - scaled.max())
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, set()
    for i in (i for i in order if i in kept):
        if mass >= sampling.top_p * total and not (nucleus and scaled[i] == min(scaled[j] for j in nucleus)):
            break
        nucleus.add(i)
        mass += weights[i]
    return {int(i) for i in nucleus if weights[i] >= sampling.min_p}


def drawn(logits: np.ndarray, sampling: SamplingParams, count: int = 3000) -> np.ndarray:
    """Tokens of `count` rows that differ in their seeds only."""
    inputs = inputs_of(*[sampling] * count, seeds=list(range(count)))
    return choose(np.tile(logits, (count, 1)), inputs)


def test_without_thresholds_the_tokens_are_those_of_thresholds_that_keep_all():
    fields = [{"temperature": 0.7}, {"temperature": 0}, {"temperature": 1.3, "top_k": VOCAB}] * 20
    samplings = [SamplingParams(**each) for each in fields]
    assert not any(packing.has_thresholds(each, VOCAB) for each in samplings)
    logits = np.random.default_rng(4).normal(size=(60, VOCAB)).astype(np.float32)
    inputs = inputs_of(*samplings, seeds=list(range(60)))
    plain = choose_jitted(logits, inputs, None, is_sampled=True, has_thresholds=False)
    np.testing.assert_array_equal(plain, choose(logits, inputs))


@pytest.mark.parametrize("fields", [{"top_k": VOCAB - 1}, {"top_p": 0.99}, {"min_p": 0.01}], ids=str)
def test_what_may_keep_a_token_away_is_a_threshold(fields: dict):
    assert packing.has_thresholds(SamplingParams(**fields), VOCAB)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.05, "temperature": 1.7},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
    ids=str,
)
def test_draws_exactly_from_the_set_that_sorting_keeps(fields: dict):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=VOCAB).astype(np.float32) * 2
    logits[7] = logits[11]  # a tie
    sampling = SamplingParams(**fields)
    expected = kept_by_sorting(logits, sampling)
    tokens = drawn(logits, sampling)
    assert set(tokens.tolist()) <= expected
    weights = np.exp(logits.astype(np.float64) / sampling.temperature)
    weights /= sum(weights[i] for i in expected)
    likely = {i for i in expected if weights[i] > 5e-3}
    assert likely <= set(tokens.tolist())
    counts = np.bincount(tokens, minlength=VOCAB)
    chi = sum((counts[i] - 3000 * weights[i]) ** 2 / (3000 * weights[i]) for i in likely)
    assert chi < 2 * len(likely) + 30


def test_temperature_zero_is_argmax_beside_sampled_rows():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, VOCAB)).astype(np.float32)
    tokens = choose(logits, inputs_of(SamplingParams(temperature=0), SamplingParams()))
    assert tokens[0] == logits[0].argmax()


def test_a_row_draws_the_same_token_in_any_batch():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(8, VOCAB)).astype(np.float32)
    samplings = [SamplingParams(sampling_seed=i, top_p=0.9, top_k=50) for i in range(8)]
    together = choose(logits, inputs_of(*samplings))
    alone = [choose(logits[i : i + 1], inputs_of(samplings[i]))[0] for i in range(8)]
    np.testing.assert_array_equal(together, alone)


def test_seed_and_output_index_both_change_the_noise():
    logits = np.zeros((1, VOCAB), np.float32)
    tokens = {
        (seed, index): choose(logits, inputs_of(SamplingParams(sampling_seed=seed), output_index=index))[0]
        for seed in (0, 1, 2**32, 2**63)
        for index in range(4)
    }
    assert len(set(tokens.values())) > 12


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("has_thresholds", [True, False])
def test_logits_that_are_not_finite_give_minus_one_and_leave_other_rows_alone(bad: float, has_thresholds: bool):
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 3], logits[1, 5] = bad, 9
    inputs = inputs_of(SamplingParams(), SamplingParams(temperature=0))
    found = choose_jitted(logits, inputs, None, is_sampled=True, has_thresholds=has_thresholds)
    assert found.tolist() == [-1, 5]


@pytest.mark.parametrize("num_bad", [1, 1408])
def test_a_long_row_that_is_not_finite_gives_minus_one(num_bad: int):
    logits = np.zeros((2, 1408), np.float32)
    logits[0, 7 : 7 + num_bad], logits[1, 5] = np.nan, 9
    inputs = inputs_of(SamplingParams(temperature=0), SamplingParams(temperature=0))
    assert choose(logits, inputs).tolist() == [-1, 5]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the vectors that the authors publish with Random123 for threefry2x32 with 13 rounds
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0xFD36D048, 0x2D17272C)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xBA3E4725, 0xF27D669E)),
    ],
)
def test_threefry_gives_the_published_vectors(counter: tuple, key: tuple, expected: tuple):
    words = noise.threefry(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
    assert tuple(map(int, words)) == expected


def tables_with(prompt: list[int], output: list[int], bias: dict[int, float]) -> PenaltyTables:
    """Tables in which row 1 belongs to a request with these tokens, made as the runner makes them."""
    tables = PenaltyTables(jnp.full((3, VOCAB), 7, jnp.int32), jnp.full((3, VOCAB), 5.0))  # an earlier request's
    ids = np.full(16, -1, np.int32)
    ids[: len(prompt + output)] = prompt + output
    is_output = (np.arange(16) >= len(prompt)).astype(np.int32)
    tables = jax.jit(step.write_counts)(tables, jnp.int32(1), jnp.int32(1), jnp.asarray(ids), jnp.asarray(is_output))
    bias_ids = np.full(4, -1, np.int32)
    values = np.zeros(4, np.float32)
    bias_ids[: len(bias)], values[: len(bias)] = list(bias), list(bias.values())
    return jax.jit(step.write_bias)(tables, jnp.int32(1), jnp.asarray(bias_ids), jnp.asarray(values))


@pytest.mark.parametrize("vocab", [7, 128, 200, 144, 1024])
def test_the_first_of_equally_good_tokens_wins(vocab: int):
    """In blocks, on a CPU, or not, where the vocabulary has none."""
    scores = np.random.default_rng(vocab).integers(0, 3, (40, vocab)).astype(np.float32)
    scores[:3] = -np.inf
    scores[1, -1] = scores[2, 5] = 0.0
    assert np.array_equal(first_best(jnp.asarray(scores)), scores.argmax(-1))


@pytest.mark.parametrize("implementation", ["reference", "tpu"])
def test_penalties_and_bias_equal_their_formulas(implementation: str):
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(10, VOCAB)).astype(np.float32)
    prompt, output = [3, 4, 4], [4, 9, 9, 0]
    sampling = SamplingParams(
        temperature=0, frequency_penalty=0.3, presence_penalty=0.7, repetition_penalty=1.5, logit_bias=((11, 1.25),)
    )
    expected = logits[0].copy()
    for token in {*prompt, *output}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(output):
        expected[token] -= 0.3 * output.count(token) + 0.7
    expected[11] += 1.25
    inputs = inputs_of(sampling, *[SamplingParams(temperature=0)] * 9)  # a kernel takes eight rows at a time
    tables, penalise = tables_with(prompt, output, {11: 1.25}), jax.jit(ops.penalised, static_argnames="implementation")
    got = np.asarray(penalise(logits, *tables, _penalties(inputs), implementation=implementation))
    np.testing.assert_allclose(got[0], expected, atol=1e-6)
    np.testing.assert_array_equal(got[1:], logits[1:])


def test_a_row_without_penalties_ignores_what_its_tables_hold():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 3] = 1
    tables = tables_with([3], [3], {3: -100.0})
    assert choose(logits, inputs_of(SamplingParams(temperature=0)), tables).tolist() == [3]


def test_new_tokens_are_counted_and_padding_goes_to_row_zero():
    tables = tables_with([1], [2], {})
    inputs = inputs_of(SamplingParams(frequency_penalty=1))
    counts = np.asarray(jax.jit(count_tokens)(tables, inputs, jnp.array([2])).counts)
    assert counts[1, 2] == 4 and counts[1].sum() == 5, "two in the output, and another token in the prompt"


def test_a_bias_of_minus_infinity_is_never_drawn():
    logits = np.zeros(VOCAB, np.float32)
    logits[5] = 50
    sampling = SamplingParams(min_new_tokens=1)
    tables = tables_with([1], [], {5: -np.inf})
    tokens = [choose(logits[None], inputs_of(sampling, seeds=[i]), tables)[0] for i in range(20)]
    assert 5 not in tokens


def test_logprobs_are_of_the_unmodified_logits():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    scored = jax.jit(token_logprobs, static_argnums=3)
    scores = scored(jnp.asarray(logits), jnp.array([4, 5, 6]), jnp.array([[9, 1]] * 3), 5)
    np.testing.assert_allclose(scores.token, exact[[0, 1, 2], [4, 5, 6]], atol=1e-5)
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-logits, axis=-1)[:, :5])
    np.testing.assert_allclose(scores.chosen, exact[:, [9, 1]], atol=1e-5)


# Masks.


def masks_of(allowed: list[list[int]], forced: list[int]) -> TokenMasks:
    """A pool whose row i + 1 allows `allowed[i]`, in the order of the rows of logits; an empty list is row 0."""
    pool = np.zeros((len(allowed) + 1, -(-VOCAB // 32)), np.uint32)
    pool[0] = 0xFFFFFFFF
    for row, tokens in enumerate(allowed, 1):
        for token in tokens:
            pool[row, token >> 5] |= np.uint32(1) << (token & 31)
    rows = np.array([row if tokens else 0 for row, tokens in enumerate(allowed, 1)], np.int32)
    return TokenMasks(jnp.asarray(pool), jnp.asarray(rows), jnp.asarray(forced, jnp.int32))


def sample_masked(
    logits: np.ndarray, samplings: list[SamplingParams], masks: TokenMasks | None, *, is_sampled: bool = True
) -> step.StepOutput:
    packed = np.zeros((len(samplings), step.SAMPLING_COLUMNS), np.int32)
    for i, sampling in enumerate(samplings):
        packed[i, 2:] = packing.sampling_row(sampling, i, VOCAB)
    chosen = jnp.zeros((len(samplings), 1), jnp.int32)
    last_token = jnp.zeros(1, jnp.int32)
    return sample_jitted(
        jnp.asarray(logits),
        jnp.asarray(packed),
        last_token,
        None,
        chosen,
        masks,
        is_sampled=is_sampled,
        has_thresholds=is_sampled,
        num_top=VOCAB,
    )[0]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.5}], ids=str)
def test_only_allowed_tokens_are_chosen_and_row_0_changes_nothing(fields: dict):
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(60, VOCAB)).astype(np.float32) * 3
    allowed = [sorted(rng.choice(VOCAB, size=size, replace=False).tolist()) for size in [1, 2, 5, 190, 0] * 12]
    output = sample_masked(logits, [SamplingParams(**fields)] * 60, masks_of(allowed, [-1] * 60))
    plain = sample_masked(logits, [SamplingParams(**fields)] * 60, None)
    for row, tokens in enumerate(allowed):
        token = int(output.tokens[row])
        assert token in tokens or (not tokens and token == int(plain.tokens[row]))
        if "temperature" in fields:
            assert token == max(tokens or range(VOCAB), key=lambda i: logits[row, i])
    assert output.logprobs is not None and plain.logprobs is not None
    np.testing.assert_allclose(output.logprobs.top, plain.logprobs.top, rtol=1e-6)  # two programs: the last bits differ


def test_kept_mass_is_the_probability_of_what_is_allowed():
    logits = np.random.default_rng(9).normal(size=(3, VOCAB)).astype(np.float32) * 4
    output = sample_masked(logits, [SamplingParams()] * 3, masks_of([[1, 40, 199], [], list(range(100))], [-1] * 3))
    weights = np.exp(logits.astype(np.float64))
    weights /= weights.sum(axis=1, keepdims=True)
    expected = [weights[0, [1, 40, 199]].sum(), 1.0, weights[2, :100].sum()]
    np.testing.assert_allclose(output.kept_mass, expected, rtol=1e-5)


def test_a_forced_token_stands_whatever_the_logits_say_unless_they_are_broken():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 7] = 5
    logits[2, 3] = np.nan
    output = sample_masked(logits, [SamplingParams(temperature=0)] * 3, masks_of([[], [], []], [-1, 11, 11]))
    assert output.tokens.tolist() == [7, 11, -1] and output.logprobs is not None
    assert float(output.logprobs.token[1]) == pytest.approx(-np.log(VOCAB - 1 + np.exp(5)), abs=1e-5)


# What no row needs is left out.


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_one_program_with_branches_gives_the_bits_of_one_for_each_need(variant: Variant):
    """Of the rows some need everything that the variant can do, and some nothing."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(8, VOCAB)).astype(np.float32) * 3
    logits[6, 3] = np.nan
    packed = np.zeros((8, step.SAMPLING_COLUMNS), np.int32)
    for row in range(8):
        needs = variant if row % 3 else GREEDY
        fields = {"top_p": 0.9, "top_k": 20} if needs.has_thresholds else {}
        fields |= {"repetition_penalty": 1.2, "frequency_penalty": 0.5} if needs.has_tables else {}
        sampling = SamplingParams(temperature=0.8 * needs.is_sampled, **fields)
        packed[row] = [row + 1, row, *packing.sampling_row(sampling, row, VOCAB)]
    tables = PenaltyTables(jnp.asarray(rng.integers(0, 5, (9, VOCAB)), jnp.int32), jnp.zeros((9, VOCAB), jnp.float32))
    some = [[1, 40], [], list(range(100))]
    forced = [-1] * 7 + [11 if variant.has_masks else -1]
    masks = masks_of([some[row % 3] if variant.has_masks else [] for row in range(8)], forced)
    chosen = np.full((8, 2), 4 if variant.has_logprobs else -1, np.int32)
    arrays = jnp.asarray(logits), jnp.asarray(packed), jnp.zeros(9, jnp.int32)

    own, own_tokens, own_tables = sample_jitted(
        *arrays,
        tables if variant.has_tables else None,
        chosen if variant.has_logprobs else None,
        masks if variant.has_masks else None,
        is_sampled=variant.is_sampled,
        has_thresholds=variant.has_thresholds,
        num_top=5,
    )
    one, tokens, new_tables = needed_jitted(*arrays, tables, chosen, masks, num_top=5)
    same = [(own.tokens, one.tokens), (own_tokens, tokens)]
    same += [(own_tables.counts, new_tables.counts)] if own_tables is not None else []
    same += zip(own.logprobs, one.logprobs, strict=True) if own.logprobs is not None else []
    same += [(own.kept_mass, one.kept_mass)] if own.kept_mass is not None else []
    for expected, found in same:
        np.testing.assert_array_equal(np.asarray(expected).view(np.int32), np.asarray(found).view(np.int32))
    assert int(one.tokens[6]) == -1 and len(set(one.tokens.tolist())) > 2
    assert variant.has_logprobs or not np.any(one.logprobs.top), "nothing was scored"
