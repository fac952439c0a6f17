"""Outputs of one request added up to an answer."""

import pathlib

import numpy as np
import pytest
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders, models, pre_tokenizers

from jsg.cache_report import CacheReport, EvictionCause, MissReason
from jsg.media import MIN_DIGEST_BYTES, MIN_TOKENS, MediaInput
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.speech.answers.answer import Answer, AnswerDelta, Prompt, with_common_point
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams, TokenLogprob, namespace_digest


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level: token i is the i-th letter of the alphabet that byte-level BPE writes bytes in."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = JsonTokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    directory: pathlib.Path = tmp_path_factory.mktemp("bytes")
    made.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


def answer_of(tokenizer: Tokenizer, **fields: object) -> Answer:
    sampling = SamplingParams.from_dict(fields)
    return Answer(Request(rid="r", input_ids=(1, 2), sampling=sampling, return_logprob=True), tokenizer)


def push(answer: Answer, text: str, tokenizer: Tokenizer, finish: FinishReason | None = None) -> str:
    ids = tuple(tokenizer.encode(text))
    scores = tuple(TokenLogprob(token, -0.5) for token in ids)
    return answer.push(
        RequestOutput(rid="r", token_ids=ids, finish=finish, prompt_tokens=2, cached_tokens=1, logprobs=scores)
    ).text


def test_adds_up_to_the_result(tokenizer: Tokenizer):
    answer = answer_of(tokenizer)
    assert push(answer, "ab", tokenizer) + push(answer, "c", tokenizer, FinishReason(FinishType.LENGTH)) == "abc"
    result = answer.result()
    assert result["text"] == "abc"
    assert result["output_ids"] == tokenizer.encode("abc")
    meta = result["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 1)
    assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in tokenizer.encode("abc")]


def test_deltas_join_to_what_they_add_together(tokenizer: Tokenizer):
    whole, cut = answer_of(tokenizer), answer_of(tokenizer)
    ids = tuple(tokenizer.encode("aé"))
    scores = tuple(TokenLogprob(token, -1.0) for token in ids)
    finish = FinishReason(FinishType.LENGTH)
    at_once = whole.push(RequestOutput(rid="r", token_ids=ids, finish=finish, logprobs=scores))
    pieces = [
        cut.push(
            RequestOutput(
                rid="r", token_ids=(token,), finish=finish if score is scores[-1] else None, logprobs=(score,)
            )
        )
        for token, score in zip(ids, scores, strict=True)
    ]
    assert len(pieces) == 3
    expected = AnswerDelta(text="aé", token_ids=ids, logprobs=scores, finish=finish, scores=scores)
    assert AnswerDelta.join(pieces) == at_once == expected
    assert AnswerDelta.join(pieces[:1]) == pieces[0]


def test_a_result_does_not_change_when_the_answer_goes_on(tokenizer: Tokenizer):
    answer = answer_of(tokenizer)
    push(answer, "a", tokenizer)
    earlier = answer.result()
    push(answer, "b", tokenizer, FinishReason(FinishType.LENGTH))
    assert (earlier["text"], earlier["output_ids"]) == ("a", tokenizer.encode("a"))
    assert earlier["meta_info"]["finish_reason"] is None
    assert len(earlier["meta_info"]["output_token_logprobs"]) == earlier["meta_info"]["completion_tokens"] == 1


def test_prompt_logprobs_may_be_left_out(tokenizer: Tokenizer):
    answer = answer_of(tokenizer)
    scores = (TokenLogprob(1, None), TokenLogprob(2, -0.25))
    answer.push(RequestOutput(rid="r", token_ids=(3,), prompt_logprobs=scores, logprobs=(TokenLogprob(3, -0.5),)))
    assert answer.result()["meta_info"]["input_token_logprobs"] == [[None, 1, None], [-0.25, 2, None]]
    meta = answer.result(with_prompt_logprobs=False)["meta_info"]
    assert not any(name.startswith("input_") for name in meta)
    assert meta["output_token_logprobs"] == [[-0.5, 3, None]]


def test_why_the_cached_prefix_ended_is_told_when_asked_for(tokenizer: Tokenizer):
    request = Request(rid="r", input_ids=(7, 8, 9), namespace="salted", return_cache_info=True)
    answer = Answer(request, tokenizer)
    assert answer.result()["meta_info"]["cache"] is None, "nothing is known before it was admitted"
    report = CacheReport(
        matched_tokens=1, matchable_tokens=2, first_difference=1, cached_continuations=(5, 6), evicted_tokens=3,
        evicted_for=EvictionCause.PROMPT, evicted_for_own=False, why=MissReason.EVICTED,
    )  # fmt: skip
    answer.push(RequestOutput(rid="r", token_ids=(1,), cache_report=report))
    answer.push(RequestOutput(rid="r", token_ids=(1,), finish=FinishReason(FinishType.LENGTH)))
    assert answer.result()["meta_info"]["cache"] == {
        "why": "evicted",
        "matched_tokens": 1,
        "matchable_tokens": 2,
        "first_difference": {"position": 1, "token_id": 8, "cached_token_ids": [5, 6]},
        "evicted_at": None,
        "evicted_tokens": 3,
        "evicted_for": "prompt",
        "evicted_for_own": False,
        "unusable_tokens": 0,
        "namespace": namespace_digest("salted"),
    }
    assert "salted" not in str(answer.result())
    silent = Answer(Request(rid="r", input_ids=(7, 8, 9)), tokenizer)
    silent.push(RequestOutput(rid="r", token_ids=(1,), cache_report=report))
    assert "cache" not in silent.result()["meta_info"]


@pytest.mark.parametrize(
    ("fields", "num_scores"),
    [
        ({"top_logprobs_num": 4}, 0),
        ({"return_logprob": True}, 2 * 10),
        ({"return_logprob": True, "logprob_start_len": 0}, 2 * (10 + 6)),
        ({"return_logprob": True, "logprob_start_len": 4, "top_logprobs_num": 4}, 2 * (10 + 2) * 5),
        ({"return_logprob": True, "logprob_start_len": 9, "token_ids_logprob": (1, 2)}, 2 * 10 * 3),
    ],
)
def test_the_scores_of_a_prompt_are_counted(fields: dict, num_scores: int):
    sampling = SamplingParams(n=2, max_new_tokens=10)
    assert Prompt(rid="p", input_ids=(1,) * 6, sampling=sampling, **fields).num_scores == num_scores


def test_a_stop_string_ends_the_answer_and_nothing_after_it_counts(tokenizer: Tokenizer):
    answer = answer_of(tokenizer, stop=["!"])
    push(answer, "ab!cd", tokenizer)
    assert answer.text == "ab"
    assert answer.finish == FinishReason(FinishType.STOP, matched="!")
    assert len(answer.logprobs) == len(answer.token_ids) == 3
    push(answer, "more", tokenizer)
    answer.push(RequestOutput(rid="r", finish=FinishReason(FinishType.ABORT)))
    assert answer.result()["text"] == "ab"
    assert answer.result()["meta_info"]["finish_reason"] == {"type": "stop", "matched": "!"}


def test_logprobs_carry_the_exact_text_of_each_token(tokenizer: Tokenizer):
    answer = answer_of(tokenizer)
    push(answer, " a", tokenizer, FinishReason(FinishType.LENGTH))
    shown = answer.result(tokenizer)["meta_info"]["output_token_logprobs"]
    assert [text for _, _, text in shown] == [" ", "a"]


def test_n_answers_have_names_and_seeds_of_their_own():
    prompt = Prompt(rid="p", input_ids=(1,), sampling=SamplingParams(n=3, sampling_seed=5), namespace="tenant")
    requests = prompt.requests(fresh_seed=99)
    assert [r.rid for r in requests] == ["p_0", "p_1", "p_2"]
    assert [r.sampling.sampling_seed for r in requests] == [5, 6, 7]
    assert {r.namespace for r in requests} == {"tenant"}
    (single,) = Prompt(rid="p", input_ids=(1,), sampling=SamplingParams()).requests(fresh_seed=99)
    assert (single.rid, single.sampling.sampling_seed) == ("p", 99)


@pytest.mark.parametrize(
    ("fields", "points"),
    [
        ({}, ()),
        ({"snapshot_at": (2, 4)}, (2, 4)),
        ({"sampling": SamplingParams(n=3)}, (6,)),
        ({"sampling": SamplingParams(n=3), "snapshot_at": (4, 6)}, (4, 6)),
        ({"return_logprob": True}, ()),
        ({"return_logprob": True, "logprob_start_len": 1}, ()),
        ({"return_logprob": True, "logprob_start_len": 5, "snapshot_at": (2, 6)}, (2, 4, 6)),
        ({"return_logprob": True, "logprob_start_len": 6}, ()),
        ({"sampling": SamplingParams(max_new_tokens=0)}, (6,)),
        ({"sampling": SamplingParams(max_new_tokens=0), "hold": True}, ()),
    ],
)
def test_requests_say_where_they_part_from_others(fields: dict, points: tuple):
    prompt = Prompt(**{"rid": "p", "input_ids": (1,) * 6, "sampling": SamplingParams()} | fields)
    made = prompt.requests(0)
    assert [request.snapshot_at for request in made] == [points] * prompt.sampling.n
    assert all(request.snapshot_at is made[0].snapshot_at for request in made), "the wire has it once"


class TestCommonPoint:
    SHARED = tuple(range(40))

    def points(self, *prompts: Prompt) -> list[tuple[int, ...]]:
        return [prompt.snapshot_at for prompt in with_common_point(prompts)]

    def prompt(self, *behind: int, **fields) -> Prompt:
        return Prompt(**{"rid": "p", "input_ids": self.SHARED + behind, "sampling": SamplingParams()} | fields)

    def test_prompts_that_come_together_say_where_they_part(self):
        assert self.points(self.prompt(7, 8), self.prompt(7), self.prompt(8, snapshot_at=(5, 40))) == [
            (40,), (40,), (5, 40)
        ]  # fmt: skip
        assert self.points(self.prompt(), self.prompt()) == [(40,)] * 2
        assert self.points(self.prompt(7)) == [()]
        assert self.points() == []

    def test_what_is_scored_in_all_of_them_is_not_shared(self):
        scored = {"return_logprob": True, "logprob_start_len": 38}
        assert self.points(self.prompt(7, **scored), self.prompt(8, **scored)) == [(37,)] * 2
        scored["logprob_start_len"] = 0
        assert self.points(self.prompt(7, **scored), self.prompt(8, **scored)) == [()] * 2

    def test_few_tokens_and_those_of_others_are_not_worth_it(self):
        assert self.points(self.prompt(7, input_ids=(1,) * 31 + (2,)), self.prompt(input_ids=(1,) * 31)) == [()] * 2
        assert self.points(self.prompt(7, namespace="a"), self.prompt(8)) == [()] * 2

    def test_different_pictures_have_equal_placeholders(self):
        def picture(digest: bytes, start: int) -> MediaInput:
            words, pixels = np.arange(MIN_TOKENS, dtype=np.int32) + 512, np.zeros((1, 3, 1, 1), np.float32)
            return MediaInput(
                start=start, words=words, rows=words - 512, pixels=pixels, digest=digest.ljust(MIN_DIGEST_BYTES)
            )

        ids = (1,) * (60 + 2 * MIN_TOKENS)
        same, later = picture(b"a", 10), 50 + MIN_TOKENS
        prompts = [
            self.prompt(input_ids=ids, media=(same, picture(digest, later)), rid=digest.decode())
            for digest in (b"b", b"c")
        ]
        assert self.points(*prompts) == [(later,)] * 2
        assert self.points(prompts[0], prompts[0]) == [(len(ids),)] * 2
