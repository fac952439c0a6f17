"""Outputs of one request added up to an answer."""

import pathlib

import pytest
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders, models, pre_tokenizers

from jsg.processing.answer import Answer, Prompt
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams, TokenLogprob


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


def test_shows_an_earlier_state_of_an_answer_that_has_gone_on(tokenizer: Tokenizer):
    answer = answer_of(tokenizer)
    ids = tokenizer.encode("ab")
    first = answer.push(RequestOutput(rid="r", token_ids=(ids[0],), logprobs=(TokenLogprob(ids[0], -1.0),)))
    push(answer, "b", tokenizer, FinishReason(FinishType.LENGTH))
    earlier = answer.result(until=first)
    assert (earlier["text"], earlier["output_ids"]) == ("a", [ids[0]])
    assert earlier["meta_info"]["finish_reason"] is None
    assert len(earlier["meta_info"]["output_token_logprobs"]) == earlier["meta_info"]["completion_tokens"] == 1


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
