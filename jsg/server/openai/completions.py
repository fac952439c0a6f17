"""`/v1/completions`."""

import codecs
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, final

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.infilling import Infilling
from jsg.processing.tokenizer import Tokenizer
from jsg.server.caller import ApiCall, CurrentCall, CurrentCaller
from jsg.server.front import Front, ReadyFront
from jsg.server.http.body import Prompts, is_prompt_list
from jsg.server.http.json_body import new_router
from jsg.server.http.json_pieces import item_pieces
from jsg.server.http.long_response import respond_in_pieces
from jsg.server.openai.body import OpenAIBody
from jsg.server.openai.common import TokenNames, head_of, rendered, respond, shown_logprob
from jsg.server.shared.answers import NOT_ENDED, finish_of, reports_of, scores_json
from jsg.server.shared.beginning import begin
from jsg.server.shared.fields import Only
from jsg.server.shared.harmless import harmless
from jsg.server.shared.media_fields import IMAGE_DATA, NUM_FRAMES, VIDEO_DATA, MediaData, NumFrames, encode_with_media
from jsg.speech.answers.answer import PROMPT_TAIL_LEN, Answer, AnswerDelta, Prompt
from jsg.types import MAX_TOP_LOGPROBS, TokenLogprob, altered

DEFAULT_MAX_TOKENS = 16  # OpenAI's

router = new_router()


class CompletionBody(OpenAIBody):
    """One prompt or a list of prompts, as text or as token ids, and the parameters of the answers."""

    HARMLESS: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.HARMLESS,
        **harmless("reasoning", "reasoning_effort", "service_tier", "store"),
    }

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.ACCEPTED,
        "add_special_tokens": "only true is taken; send token ids for a prompt without special tokens",
    }

    prompt: Prompts = Field(description="A text, the token ids of a prompt, or a list of either.")
    image_data: MediaData = Field(None, description=IMAGE_DATA)
    video_data: MediaData = Field(None, description=VIDEO_DATA)
    num_frames: NumFrames = Field(None, description=NUM_FRAMES)
    max_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description=f"The largest number of tokens to generate. The default is {DEFAULT_MAX_TOKENS}, or less if the "
        "context has less room.",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="The number of most likely tokens to report at each position, beside the log-probability of the "
        "token.",
    )
    suffix: str | None = Field(
        None,
        description="What stands behind the answer, for a model of code whose tokenizer has the marks for it. The "
        "prompts must be texts, and `echo` must be off.",
    )
    echo: bool | None = Field(
        None,
        description="Put the prompt in front of the answer. With `logprobs` the prompt is scored too, so it must have "
        "no pictures or videos.",
    )

    add_special_tokens: Annotated[Any, Only((True,), "send token ids for a prompt without special tokens")] = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are asked for."""
        return bool(self.echo) and self.logprobs is not None

    def _names(self) -> dict[str, str]:
        return super()._names() | {"top_logprobs_num": "logprobs"}

    def _params(self) -> dict[str, str]:
        return super()._params() | ({"max_new_tokens": self.PROMPT} if self.max_tokens is None else {})


@final
class TextChoice:
    """One answer as a text, whole or in pieces. An echoed prompt stands in front of the text, or of the first piece."""

    def __init__(self, index: int, answer: Answer, tokenizer: Tokenizer, names: TokenNames, *, echo: bool) -> None:
        self.answer = answer
        self._index = index
        self._names = names
        self._offset = 0
        self._is_first = True
        self._tail_ids = () if echo else answer.request.input_ids[-PROMPT_TAIL_LEN:]
        self._tokenizer = tokenizer
        # The echo has whole characters only: the answer's text has the character that the prompt may end inside of.
        self._unsent = self._detokenize(()).push(answer.request.input_ids) if echo else ""

    @functools.cached_property
    def _detokenizer(self) -> IncrementalDetokenizer:
        return self._detokenize(self._tail_ids)

    def _detokenize(self, tail_ids: Sequence[int]) -> IncrementalDetokenizer:
        skips_special = self.answer.request.sampling.skip_special_tokens
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens=skips_special, prompt_tail_ids=tail_ids)

    def whole(self) -> dict[str, Any]:
        """The finished answer."""
        return self._show(self.answer.text, self.answer.logprobs, has_ended=True)

    def pieces(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """The new text with its log-probabilities, and the reason for the end; an empty list if all are empty."""
        shown = self._show(delta.text, delta.logprobs, has_ended=delta.finish is not None)
        return [shown] if shown["text"] or shown["logprobs"] or shown["finish_reason"] else []

    def text_piece(self, text: str) -> dict[str, Any]:
        """A piece that adds a text."""
        return {"index": self._index, "text": text, "logprobs": None, **NOT_ENDED}

    def _show(self, text: str, scored: Sequence[TokenLogprob], *, has_ended: bool) -> dict[str, Any]:
        text, self._unsent = self._unsent + text, ""
        before: Sequence[TokenLogprob] = self.answer.prompt_logprobs if self._is_first else ()
        num_before, self._is_first = len(before), False

        def show(start: int, stop: int) -> dict[str, list[Any]]:
            behind = scored[max(0, start - num_before) : max(0, stop - num_before)]
            return self._logprobs(itertools.chain(before[start:stop], behind))

        request, num_scored = self.answer.request, num_before + len(scored)
        logprobs = scores_json(show, num_scored, request) if request.return_logprob else None
        end = finish_of(self.answer) | reports_of(self.answer) if has_ended else NOT_ENDED
        return {"index": self._index, "text": text, "logprobs": logprobs, **end}

    def _logprobs(self, scored: Iterable[TokenLogprob]) -> dict[str, Any]:
        shown: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in scored:
            logprob = token.logprob
            shown["tokens"].append(self._names.name(token.token_id))
            shown["token_logprobs"].append(None if logprob is None else shown_logprob(logprob))
            shown["top_logprobs"].append(None if logprob is None else self._top(token))
            place, self._offset = self._place(token.token_id)
            shown["text_offset"].append(place)
        return shown

    def _place(self, token_id: int) -> tuple[int, int]:
        """Where the text of the next token begins, and where the text of the token behind it begins."""
        was_inside = self._detokenizer.is_inside_character
        text = self._detokenizer.push((token_id,))
        num_cut_off = 0
        if was_inside and text and (raw := self._names.raw(token_id))[0] & 0xC0 != 0x80:
            # Where this token does not complete a character that earlier tokens began, U+FFFD stands in front of it,
            # once for each byte that cannot begin a character. Python finds half of a surrogate pair one byte later.
            num_cut_off = len(text) - len(codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(raw)))
        return self._offset + num_cut_off, self._offset + len(text)

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the chosen one. Of several tokens with one name, the most likely is shown."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob or 0.0)):
            top.setdefault(self._names.name(token_id), shown_logprob(logprob))
        return top


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, call: CurrentCall, front: ReadyFront) -> Response:
    """Continues each prompt `n` times; with `stream` it sends events."""
    front.check_model(body.model)
    call = altered(call, user=body.user)
    rid = body.response_id("cmpl")
    generation = await begin(request, front, call, await _prompts(body, call, front, rid))
    tokenizer = front.generator.tokenizer
    names = TokenNames(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))

    def choice(index: int) -> TextChoice:
        return TextChoice(index, generation.answers[index], tokenizer, names, echo=bool(body.echo))

    indices = range(len(generation.answers))
    if body.echo:
        num_echoed = sum(len(each.request.input_ids) for each in generation.answers)
        choices = await front.generator.beside(lambda: [*map(choice, indices)], num_echoed)
    else:
        choices = await front.generator.share.each(call.caller.tenant, choice, indices)
    return await respond(
        request,
        front,
        body,
        generation,
        choices,
        head_of(rid, front),
        kind="text_completion",
        event_kind="text_completion",
    )


@router.post("/v1/completions/render")
async def render_completions(body: CompletionBody, caller: CurrentCaller, front: ReadyFront) -> Response:
    """Gives the tokens of each prompt and generates nothing, for routers that look for them in caches."""
    front.check_model(body.model)
    call = ApiCall(caller=caller, route="/v1/completions")
    shown = [rendered(prompt) for prompt in await _prompts(body, call, front, "render")]
    return await respond_in_pieces(item_pieces(shown), functools.partial(front.generator.share.turn, caller.tenant))


async def _prompts(body: CompletionBody, call: ApiCall, front: Front, rid: str) -> list[Prompt]:
    is_list = is_prompt_list(body.prompt)
    given: Any = body.prompt if is_list else [body.prompt]
    if not given:
        raise RequestError("prompt must have at least one prompt, but it is an empty list; send one", param="prompt")
    most = front.generator.info.max_request_tokens

    end_ids: tuple[int, ...] = ()
    if body.suffix:
        given, end_ids = await _with_suffix(body, given, body.suffix, front)

    def limit(input_ids: Sequence[int]) -> int:
        if body.max_tokens is not None:
            return body.max_tokens
        return max(1, min(DEFAULT_MAX_TOKENS, most - len(input_ids)))

    all_encoded = await encode_with_media(
        front,
        given,
        body,
        is_list=is_list,
        field="prompt",
        namespace=call.caller.namespace(body.cache_salt, body.extra_key),
    )
    if body.scores_prompt and any(encoded.media for encoded in all_encoded):
        raise RequestError(
            "echo must not come with logprobs if the prompt has pictures or videos, because the model does not predict "
            "their tokens; leave one out",
            "echo",
        )
    plan = body.plan(front.speech)
    alike: dict[int, Prompt] = {}  # by the number of new tokens: what else is sampled is the same for all

    def prompt(index: int) -> Prompt:
        encoded = all_encoded[index]
        most_new = limit(encoded.input_ids)
        if most_new not in alike:
            made = body.to_prompt(
                call,
                rid,
                encoded.input_ids,
                plan=plan,
                max_new_tokens=most_new,
                return_logprob=body.logprobs is not None,
                logprob_start_len=0 if body.scores_prompt else -1,
                top_logprobs_num=body.logprobs or 0,
            )
            if end_ids:
                stops = (*made.sampling.stop_token_ids, *end_ids)
                made = altered(made, sampling=dataclasses.replace(made.sampling, stop_token_ids=stops))
            alike[most_new] = made
        name = rid if len(given) == 1 else f"{rid}_{index}"
        return altered(alike[most_new], rid=name, input_ids=encoded.input_ids, media=encoded.media)

    return await front.generator.share.each(call.caller.tenant, prompt, range(len(all_encoded)))


async def _with_suffix(
    body: CompletionBody, prompts: Sequence[Any], suffix: str, front: Front
) -> tuple[list[list[int]], tuple[int, ...]]:
    """The tokens of prompts whose answers stand before a text, and the tokens that end an answer.

    Raises:
        RequestError: The model cannot do that, or a prompt is no text.
        ContextLengthError: As `Tokenizer.encode`.
    """
    generator = front.generator
    infilling = Infilling.of(generator.tokenizer)
    if infilling is None:
        raise RequestError(
            "suffix is not supported by this model: its tokenizer has no marks for a text behind the answer; leave it "
            "out, or serve a model of code that fills in the middle",
            "suffix",
        )
    if not all(isinstance(prompt, str) for prompt in prompts) or body.echo or body.image_data or body.video_data:
        raise RequestError(
            "suffix must come with prompts that are texts, without echo and without pictures or videos, but does not; "
            "leave the other field out, or send a text",
            "suffix",
        )
    limit = generator.info.max_request_tokens
    num_chars = sum(map(len, prompts)) + len(suffix) * len(prompts)
    ids = await generator.beside(lambda: [infilling.encode(text, suffix, limit) for text in prompts], num_chars)
    return ids, infilling.end_ids
