"""Answers → `choices`: what comes in pieces adds up to the whole, and offsets are places in it."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jsg.errors import AbortedError
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.server.caller import ApiCall, Caller
from jsg.server.http.field_rules import FieldRules
from jsg.server.media_sources import MediaSources
from jsg.server.openai.chat import ChatBody, ChatChoice, _prompt
from jsg.server.openai.common import Choice, TokenNames
from jsg.server.openai.completions import TextChoice
from jsg.server.text_threads import TextThreads
from jsg.speech.answers.answer import Answer
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.speech.rules.thinking import ThoughtWish
from jsg.speech.rules.tool_use import Speech
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams, TokenLogprob

MakeChoice = Callable[[Answer], Choice]
LENGTH = FinishReason(FinishType.LENGTH)
BYTES_AND_SPECIALS = st.lists(st.integers(0, 258), min_size=1, max_size=12)
TEXT_BYTES = st.text(min_size=1, max_size=6)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir) -> Tokenizer:
    return load_tokenizer(tokenizer_dir)


def scored(ids: Sequence[int], *, is_prompt: bool = False) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token, None, ()) if is_prompt and index == 0 else TokenLogprob(token, -0.5, ((token, -0.5),))
        for index, token in enumerate(ids)
    )


def play(
    tokenizer: Tokenizer, make: MakeChoice, prompt: Sequence[int], ids: Sequence[int], size: int, **sampling
) -> tuple[dict, list[dict]]:
    """The same answer whole, and in pieces of so many tokens."""
    params = SamplingParams(max_new_tokens=len(ids), **sampling)
    request = Request(rid="a", input_ids=tuple(prompt), sampling=params, return_logprob=True, logprob_start_len=0)
    whole, streamed = Answer(request, tokenizer), Answer(request, tokenizer)
    shows_whole, shows_pieces = make(whole), make(streamed)
    pieces = []
    for start in range(0, len(ids), size):
        part = tuple(ids[start : start + size])
        output = RequestOutput(
            rid="a",
            token_ids=part,
            logprobs=scored(part),
            prompt_logprobs=scored(prompt, is_prompt=True) if start == 0 else None,
            finish=LENGTH if start + size >= len(ids) else None,
        )
        whole.push(output)
        pieces += shows_pieces.pieces(streamed.push(output))
    return shows_whole.whole(), pieces


class TestTexts:
    @given(BYTES_AND_SPECIALS, BYTES_AND_SPECIALS, st.integers(1, 5), st.booleans(), st.booleans())
    @settings(max_examples=100, deadline=None)
    def test_pieces_add_up_to_the_whole(self, tokenizer, prompt, ids, size, echo, skips):
        names = TokenNames(tokenizer, as_ids=False)
        whole, pieces = play(
            tokenizer,
            lambda answer: TextChoice(0, answer, tokenizer, names, echo=echo),
            prompt,
            ids,
            size,
            skip_special_tokens=skips,
        )
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        for name, values in whole["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        if echo:
            assert whole["text"] == tokenizer.decode([*prompt, *ids], skip_special_tokens=skips)

    @given(TEXT_BYTES, TEXT_BYTES)
    @settings(max_examples=60, deadline=None)
    def test_offsets_are_places_in_the_text(self, tokenizer, prompt, answer):
        names = TokenNames(tokenizer, as_ids=False)
        prompt_ids = tokenizer.encode(prompt, parse_special=False)
        ids = tokenizer.encode(answer, parse_special=False)
        whole, _ = play(
            tokenizer, lambda made: TextChoice(0, made, tokenizer, names, echo=True), prompt_ids, ids, size=2
        )
        assert whole["text"] == prompt + answer
        places = [place for place, char in enumerate(prompt + answer) for _ in char.encode()]
        assert whole["logprobs"]["text_offset"] == places

    @given(BYTES_AND_SPECIALS, BYTES_AND_SPECIALS, st.booleans())
    @example([0], [169, 94, 0], False)  # two bytes that look like the beginning of a character until a third comes
    @settings(max_examples=100, deadline=None)
    def test_a_token_behind_a_character_that_was_cut_off_has_its_own_place(self, tokenizer, prompt, ids, skips):
        names = TokenNames(tokenizer, as_ids=False)
        whole, _ = play(
            tokenizer,
            lambda made: TextChoice(0, made, tokenizer, names, echo=True),
            prompt,
            ids,
            size=2,
            skip_special_tokens=skips,
        )
        for token_id, place in zip([*prompt, *ids], whole["logprobs"]["text_offset"], strict=True):
            raw = tokenizer.token_bytes(token_id)
            if raw.isascii() and not (skips and token_id in tokenizer.special_ids):
                assert whole["text"][place:].startswith(raw.decode())

    def test_a_token_among_those_of_its_name_is_as_likely_as_the_likeliest(self, tokenizer):
        """Several tokens may have one name; greedy is told by comparing with the best of them."""
        names = TokenNames(tokenizer, as_ids=False)
        request = Request(rid="a", input_ids=(1,), return_logprob=True, top_logprobs_num=1)
        answer = Answer(request, tokenizer)
        unknown, other = 300, 301  # neither has a text
        token = TokenLogprob(unknown, -2.0, ((other, -1.0),))
        answer.push(RequestOutput(rid="a", token_ids=(unknown,), logprobs=(token,), finish=LENGTH))
        shown = TextChoice(0, answer, tokenizer, names, echo=False).whole()["logprobs"]
        assert shown["token_logprobs"] == [-2.0] and shown["top_logprobs"] == [{"": -1.0}]

    def test_no_logprob_is_infinite(self, tokenizer):
        request = Request(rid="a", input_ids=(1,), return_logprob=True, top_logprobs_num=1)
        answer = Answer(request, tokenizer)
        token = TokenLogprob(64, -math.inf, ((65, -math.inf),))
        answer.push(RequestOutput(rid="a", token_ids=(64,), logprobs=(token,), finish=LENGTH))
        names = TokenNames(tokenizer, as_ids=True)
        shown = TextChoice(0, answer, tokenizer, names, echo=False).whole()["logprobs"]
        assert shown["top_logprobs"] == [{"token_id:65": -9999.0, "token_id:64": -9999.0}]
        (entry,) = ChatChoice(0, answer, names, wish=ThoughtWish()).whole()["logprobs"]["content"]
        assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


class TestMessages:
    @given(BYTES_AND_SPECIALS, st.integers(1, 5))
    @settings(max_examples=60, deadline=None)
    def test_pieces_add_up_to_the_whole(self, tokenizer, ids, size):
        names = TokenNames(tokenizer, as_ids=False)
        whole, pieces = play(tokenizer, lambda answer: ChatChoice(0, answer, names, wish=ThoughtWish()), [1], ids, size)
        assert pieces[0]["delta"] == {"role": "assistant", "content": "", "refusal": None, "reasoning_content": None}
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["message"]["content"]
        content = [entry for piece in pieces for entry in (piece["logprobs"] or {"content": []})["content"]]
        assert content == whole["logprobs"]["content"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


@pytest.mark.parametrize("continues", [True, False])
def test_only_a_continued_message_keeps_its_leading_space(tokenizer, continues):
    threads = TextThreads()
    front: Any = SimpleNamespace(
        chat=ChatPrompt(tokenizer),
        generator=SimpleNamespace(info=SimpleNamespace(max_request_tokens=1000)),
        media=MediaSources(None, threads),
    )
    messages = [{"role": "assistant", "content": "a"}]
    body = ChatBody.model_validate({"messages": messages, "continue_final_message": continues})
    call = ApiCall(caller=Caller(), route="/v1/chat/completions")
    plan = body.plan(Speech(front.chat.template, dialect=None, special=frozenset()))
    with contextlib.closing(threads):
        assert asyncio.run(_prompt(body, 0, FieldRules(), call, front, plan)).is_continued is continues


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_an_abort_is_no_answer(tokenizer, kind):
    answer = Answer(Request(rid="a", input_ids=(1,)), tokenizer)
    names = TokenNames(tokenizer, as_ids=False)
    choice = (
        TextChoice(0, answer, tokenizer, names, echo=True)
        if kind == "text"
        else ChatChoice(0, answer, names, wish=ThoughtWish())
    )
    delta = answer.push(RequestOutput(rid="a", finish=FinishReason(FinishType.ABORT)))
    with pytest.raises(AbortedError):
        choice.whole()
    with pytest.raises(AbortedError):
        choice.pieces(delta)
