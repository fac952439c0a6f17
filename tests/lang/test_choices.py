import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jsg.errors import RequestError
from jsg.lang.tokens import choices, scoring
from jsg.lang.tokens.choices import decide, trie_logprobs
from jsg.lang.tokens.model import ScoredChoice, ScoredChoices
from jsg.lang.tokens.scoring import ScorePlan
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model
from jsg.speech.prompts.encode_parts import EncodedChoices, EncodedPrompt
from tests.lang.fake_model import scored_answer

VOCAB = 4
MAX_LEN = 3
SEQUENCES = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=MAX_LEN).map(tuple), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("tiny"))


def next_logprobs(ids: tuple[int, ...]) -> list[float]:
    """A model: a distribution of its own behind every sequence, sharp enough that all matter somewhere."""
    rng = random.Random(repr(ids))
    logits = [rng.gauss(0, 2) for _ in range(VOCAB)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def scored(sequences: Sequence[tuple[int, ...]], *, prefix: tuple[int, ...] = (9,)) -> ScoredChoices:
    return ScoredChoices(
        part_ids=(),
        common_ids=prefix,
        choices=tuple(
            ScoredChoice(
                token_ids=ids,
                token_texts=tuple(map(str, ids)),
                logprobs=tuple(next_logprobs(prefix + ids[:i])[token] for i, token in enumerate(ids)),
                unconditional=tuple(next_logprobs(ids[:i])[token] if i else None for i, token in enumerate(ids)),
            )
            for ids in sequences
        ),
        meta={"prompt_tokens": 1},
    )


def enumerated(sequences: Sequence[tuple[int, ...]], prefix: tuple[int, ...] = (9,)) -> tuple[list[float], float]:
    """The share of each choice in all continuations, each of which counts for the longest that it begins with.

    Also the share of the continuations that begin with a choice.
    """
    masses = [0.0] * len(sequences)
    for continuation in itertools.product(range(VOCAB), repeat=MAX_LEN):
        begun = [ids for ids in sequences if continuation[: len(ids)] == ids]
        if begun:
            mass = math.exp(sum(next_logprobs(prefix + continuation[:i])[t] for i, t in enumerate(continuation)))
            owners = [i for i, ids in enumerate(sequences) if ids == max(begun, key=len)]
            for index in owners:
                masses[index] += mass / len(owners)
    return [mass / sum(masses) for mass in masses], sum(masses)


class TestCalibration:
    @given(SEQUENCES)
    def test_f16_probabilities_are_those_of_all_continuations_enumerated(self, sequences):
        logprobs, mass = trie_logprobs(scored(sequences))
        shares, whole = enumerated(sequences)
        assert [math.exp(p) for p in logprobs] == pytest.approx(shares, abs=1e-9)
        assert math.exp(mass) == pytest.approx(whole, abs=1e-9)
        assert decide([str(i) for i in range(len(sequences))], scored(sequences)).meta["label_mass"] == math.exp(mass)

    def test_a_choice_that_begins_another_has_what_does_not_go_on(self):
        (short, long, other), _ = trie_logprobs(scored([(1,), (1, 2), (3,)]))
        next_p = math.exp(next_logprobs((9, 1))[2])
        assert math.exp(long - short) == pytest.approx(next_p / (1 - next_p))
        assert math.exp(short) + math.exp(long) + math.exp(other) == pytest.approx(1)

    def test_equal_tokens_share(self):
        (one, two, other), _ = trie_logprobs(scored([(1,), (1,), (3,)]))
        assert one == two
        assert math.exp(one) * 2 == pytest.approx(1 - math.exp(other))

    def test_f16_an_exact_zero_counts(self):
        certain = ScoredChoice(token_ids=(1, 2), token_texts=("a", "b"), logprobs=(-1.0, 0.0))
        other = ScoredChoice(token_ids=(3,), token_texts=("c",), logprobs=(-0.6,))
        both = ScoredChoices(part_ids=(), common_ids=(), choices=(certain, other), meta={})
        assert decide(("ab", "c"), both, method="token_length_normalized").choice == "ab", "-0.5 on average"
        assert decide(("ab", "c"), both).choice == "c"

    def test_what_cannot_be_is_refused_and_what_underflows_is_not(self):
        def of(*logprobs: float) -> ScoredChoices:
            made = (ScoredChoice(token_ids=(i,), token_texts=("x",), logprobs=(p,)) for i, p in enumerate(logprobs))
            return ScoredChoices(part_ids=(), common_ids=(), choices=tuple(made), meta={})

        assert decide("ab", of(-2000.0, -2001.0)).probabilities == pytest.approx((0.7310586, 0.2689414))
        assert decide("ab", of(-math.inf, -5.0)).probabilities == (0.0, 1.0)
        with pytest.raises(RequestError, match="none of them a chance"):
            decide("ab", of(-math.inf, -math.inf))


class TestPublishedMethods:
    def test_token_length_normalized_is_the_mean(self):
        given = scored([(1, 2, 0), (2,), (3, 3)])
        means = [sum(c.logprobs) / len(c.logprobs) for c in given.choices]
        selection = decide("abc", given, method="token_length_normalized")
        assert selection.choice == "abc"[means.index(max(means))]
        assert selection.meta["normalized_prompt_logprobs"] == means
        assert selection.meta["input_token_logprobs"][1] == [[given.choices[1].logprobs[0], 2, "2"]]
        assert sum(selection.probabilities or ()) == pytest.approx(1), "probabilities whatever the method"

    def test_greedy_token_selection_goes_token_by_token(self):
        def choice(*logprobs: float) -> ScoredChoice:
            return ScoredChoice(
                token_ids=tuple(range(len(logprobs))), token_texts=("",) * len(logprobs), logprobs=logprobs
            )

        rows = (choice(-1.0, -0.2), choice(-1.0, -5.0, 0.0), choice(-1.0), choice(-2.0, 0.0))
        given = ScoredChoices(part_ids=(), common_ids=(), choices=rows, meta={})
        selection = decide("abcd", given, method="greedy_token_selection")
        assert selection.choice == "a" and selection.meta["greedy_logprob_matrix"][0] == [-1.0, -0.2, -0.6]
        assert selection.meta["greedy_logprob_matrix"][2] == [-1.0, -1.0, -1.0]

    def test_unconditional_likelihood_normalized_is_the_mean_gain(self):
        given = scored([(1, 2), (2, 0, 3), (3,)])
        gains = [
            sum(own - (alone or 0.0) for own, alone in zip(c.logprobs, c.unconditional, strict=True)) / len(c.logprobs)
            for c in given.choices
        ]
        selection = decide("abc", given, method="unconditional_likelihood_normalized")
        assert selection.choice == "abc"[gains.index(max(gains))]
        assert selection.meta["unconditional_token_logprobs"][0][0] == [None, 1, "1"]

    @pytest.mark.parametrize("method", [name for name in choices.METHODS if name != "token_trie"])
    def test_an_empty_choice_has_no_mean(self, method: str):
        with pytest.raises(RequestError, match="at least one token"):
            decide(("", "b"), scored([(), (1,)]), method=method)

    def test_the_objects_are_named(self):
        assert choices.METHODS["token_trie"] is choices.token_trie
        assert choices.METHODS["token_length_normalized"] is choices.token_length_normalized
        assert choices.METHODS["greedy_token_selection"] is choices.greedy_token_selection
        assert choices.METHODS["unconditional_likelihood_normalized"] is choices.unconditional_likelihood_normalized
        with pytest.raises(RequestError, match=r"must be one of token_trie, .*, but got 'best'"):
            decide(("a",), scored([(1,)]), method="best")


class TestTemperature:
    def test_draws_follow_the_probabilities(self):
        given = scored([(1,), (2,), (3, 0)])
        probabilities = decide("abc", given).probabilities
        drawn = [decide("abc", given, temperature=1.0, seed=seed).choice for seed in range(4000)]
        assert [drawn.count(c) / 4000 for c in "abc"] == pytest.approx(probabilities, abs=0.03)
        cold = {decide("abc", given, temperature=1e-4, seed=seed).choice for seed in range(50)}
        assert cold == {decide("abc", given).choice}

    def test_a_seed_draws_the_same_again(self):
        given = scored([(1,), (2,), (3, 0)])
        drawn = [decide("abc", given, temperature=2.0, seed=seed).choice for seed in range(30)]
        assert drawn == [decide("abc", given, temperature=2.0, seed=seed).choice for seed in range(30)]
        assert len(set(drawn)) > 1

    def test_what_cannot_be_drawn_is_refused(self):
        with pytest.raises(RequestError, match="has no scores to draw by"):
            decide("ab", scored([(1,), (2,)]), method="greedy_token_selection", temperature=0.5)
        for wrong in (-1.0, math.nan, math.inf):
            with pytest.raises(RequestError, match="temperature must be at least 0"):
                decide("ab", scored([(1,), (2,)]), temperature=wrong)


class TestPlan:
    @given(SEQUENCES, st.booleans(), st.booleans(), st.sampled_from([0, 4, scoring.MAX_PATH_SCORES]))
    def test_all_ways_read_the_same(self, tokenizer, sequences, is_joined, unconditional, most):
        assume(any(sequences))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scoring, "MAX_PATH_SCORES", most)
            self.check_scores(tokenizer, sequences, is_joined, unconditional)

    def check_scores(self, tokenizer, sequences, is_joined, unconditional):
        before = EncodedPrompt(input_ids=(9, 9, 9, 1), joined=(1, 2, 3) if is_joined else ())
        encoded = EncodedChoices(before=before, common_ids=(2,), choice_ids=tuple(sequences))
        plan = ScorePlan(encoded, rid="a", unconditional=unconditional)
        read = plan.read([scored_answer(p, tokenizer, next_logprobs) for p in plan.prompts], tokenizer)
        expected = scored(sequences, prefix=encoded.prefix_ids)
        assert [c.token_ids for c in read.choices] == list(sequences)
        for ours, theirs in zip(read.choices, expected.choices, strict=True):
            assert ours.logprobs == theirs.logprobs
            assert ours.unconditional == (theirs.unconditional if unconditional else ())
        assert len({p.rid for p in plan.prompts}) == len(plan.prompts)

    def test_choices_of_one_token_are_one_request(self):
        encoded = EncodedChoices(before=EncodedPrompt(input_ids=(9,)), common_ids=(), choice_ids=((1,), (2,), (3,)))
        (prompt,) = ScorePlan(encoded, rid="a").prompts
        assert (prompt.input_ids, prompt.sampling.max_new_tokens) == ((9,), 1)
        many = EncodedChoices(
            before=EncodedPrompt(input_ids=(9,)), common_ids=(), choice_ids=tuple((i,) for i in range(300))
        )
        assert [len(p.token_ids_logprob) for p in ScorePlan(many, rid="a").prompts] == [128, 128, 44]

    def test_a_request_scores_what_no_earlier_one_does(self):
        choices = ((1, 2, 3, 4), (1, 2, 5, 6), (1, 2, 7), (8, 9, 1))
        plan = ScorePlan(
            EncodedChoices(before=EncodedPrompt(input_ids=(9,)), common_ids=(), choice_ids=choices), rid="a"
        )
        asked = [(p.input_ids[1:], p.logprob_start_len - 1, p.token_ids_logprob) for p in plan.prompts]
        assert asked == [((1, 2, 3, 4), 0, (8, 5, 7)), ((1, 2, 5), -2, (6,)), ((8, 9, 1), 1, ())]

    def test_an_offset_right_before_the_choices(self):
        before = EncodedPrompt(input_ids=(9,), position_jumps=((1, 5),))
        plan = ScorePlan(EncodedChoices(before=before, common_ids=(), choice_ids=((1,), (2,))), rid="a")
        (prompt,) = plan.prompts
        assert (prompt.input_ids, prompt.position_jumps, prompt.token_ids_logprob) == ((9,), ((1, 5),), (1, 2))
        prompt.requests(0)
