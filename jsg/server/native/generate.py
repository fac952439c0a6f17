"""`/generate`: the native interface of SGLang."""

import functools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, final

from fastapi import Request
from pydantic import Field, StringConstraints, model_validator
from starlette.responses import Response

from jsg.errors import RequestError, quote
from jsg.processing.tokenizer import Tokenizer
from jsg.server.caller import CurrentCall
from jsg.server.deltas import Send
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_ANSWERS, Generation, new_rid
from jsg.server.http.body import Body, Checked, ClientNames, Rid, TokenIds, is_prompt_list
from jsg.server.http.event_stream import (
    Event,
    EventForm,
    Events,
    Write,
    respond_with_events,
    until_disconnect,
    writer_of,
)
from jsg.server.http.field_rules import FieldRules
from jsg.server.http.json_body import CurrentRules, new_router
from jsg.server.http.json_pieces import JsonLists, item_pieces, json_pieces
from jsg.server.http.long_response import respond_in_pieces
from jsg.server.native.parts import PromptParts, read_parts
from jsg.server.native.sampling import Object, one_each, to_samplings
from jsg.server.shared.answers import step_of
from jsg.server.shared.beginning import begin
from jsg.server.shared.fields import CACHE_SALT, EXTRA_KEY, MAX_NAME_CHARS, MODEL, PRIORITY, Only
from jsg.server.shared.harmless import harmless
from jsg.server.shared.media_fields import IMAGE_DATA, NUM_FRAMES, VIDEO_DATA, MediaData, NumFrames, encode_with_media
from jsg.server.shared.prompt_parts import encode_prompt
from jsg.speech.answers.answer import Answer, AnswerDelta, Prompt, asked
from jsg.speech.prompts.encode_parts import EncodedPrompt, split_answer
from jsg.speech.reply_plan import ReplyPlan
from jsg.speech.rules.thinking import NO_THOUGHTS, ThoughtWish
from jsg.types import MAX_TOP_LOGPROBS, SamplingParams

HOLD_BEAT_S = 15.0
# Each event of a stream repeats all logprobs so far. Beyond FREE_SCORES of them, the next event waits until their
# number has grown by LEAST_GROWTH. Else a thousand tokens with 128 alternatives each would be a gigabyte of events.
FREE_SCORES = 4096
LEAST_GROWTH = 1 / 16
# What is in `meta_info` of each event, if nothing more is asked for: what changes from one to the next, and what not.
CHANGING = frozenset(("completion_tokens", "cached_tokens", "e2e_latency", "queue_time"))
FIXED = frozenset(("id", "finish_reason", "prompt_tokens", "time_to_first_token"))
CHARS_OF_PARAMS = 64  # reading the sampling parameters of a prompt takes as long as encoding so many characters

type StartLen = Annotated[int, Field(ge=-1, lt=2**31)]
type TopCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
type Salt = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS)]

NO_SOUND = "no model of this version takes audio; leave it out"
NO_ADAPTERS = "adapters are not served; serve a model into which the adapter is merged"
NO_SESSIONS = "there are no sessions; send the whole prompt, whose shared prefix the cache keeps"
NOT_SPLIT = "each engine does both prefill and decode; leave it out"
NOT_ROUTED = "the server chooses the engine of each request; leave it out"
NO_INNARDS = "the inner values of the model are not reported; leave it out"

router = new_router()


class GenerateBody(Body):
    """What `/generate` takes: one prompt or a list of prompts as text or token ids, or one prompt in parts."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "input_embeds": "a prompt is text or token ids; send text or input_ids",
        **dict.fromkeys(("audio_data", "use_audio_in_video"), NO_SOUND),
        **dict.fromkeys(
            ("modalities", "video_config"), "image_data and video_data say what the prompt has; leave it out"
        ),
        **dict.fromkeys(("mm_hashes", "mm_content_hashes"), "the server computes the hashes of pictures; leave it out"),
        "max_dynamic_patch": "the config of the model says how pictures are cut into tiles; leave it out",
        **dict.fromkeys(("lora_path", "lora_id"), NO_ADAPTERS),
        **dict.fromkeys(("session_id", "session_params", "conversation_id"), NO_SESSIONS),
        "custom_logit_processor": "the server never runs code of clients; logit_bias in sampling_params changes logits",
        **dict.fromkeys(
            ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"), NOT_SPLIT
        ),
        "disagg_prefill_dp_rank": NOT_SPLIT,
        **dict.fromkeys(("data_parallel_rank", "routed_dp_rank"), NOT_ROUTED),
        **dict.fromkeys(("return_hidden_states", "return_routed_experts", "return_indexer_topk"), NO_INNARDS),
        **dict.fromkeys(("return_sampling_mask", "return_entropy"), NO_INNARDS),
        **dict.fromkeys(
            ("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"),
            "use top_logprobs_num, which gives the logprobs as lists",
        ),
        "return_bytes": "answers are JSON; use /detokenize for the text of single tokens",
        "return_prompt_token_ids": "use /tokenize for the tokens of a text",
        "no_logs": "the options of the server say what is logged; leave it out",
        "background": "an answer needs an open connection; use stream to read it as it grows",
    }

    HARMLESS: ClassVar[Mapping[str, str]] = harmless("custom_labels", "kv_router_hint", "routing_key")

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "log_metrics": "only true is taken, because every request is counted",
        "stream_options": "only `include_usage` is taken, because `meta_info` always has the numbers of tokens",
    }

    model: str | None = Field(None, description=MODEL)
    text: str | Checked[str] | None = Field(
        None, description=f"A text or a list of at most {MAX_ANSWERS} texts. Send it, `input_ids` or `prompt`."
    )
    input_ids: TokenIds | Checked[TokenIds] | None = Field(
        None, description=f"Token ids of a prompt, or a list with the token ids of at most {MAX_ANSWERS} prompts."
    )
    prompt: PromptParts | None = Field(
        None,
        description="One prompt in parts. A part is a text, in which special tokens are plain characters, a list of "
        "token ids, or an object. `meta_info.part_ids` has the tokens that the texts became. With `kept_ids` and "
        "`tail` of `meta_info`, a client continues the answer without encoding it again.",
    )
    image_data: MediaData = Field(None, description=IMAGE_DATA)
    video_data: MediaData = Field(None, description=VIDEO_DATA)
    num_frames: NumFrames = Field(None, description=NUM_FRAMES)
    hold: bool | None = Field(
        None,
        description="Generate nothing, and keep the prompt in the cache while this stream is open. It needs `stream`. "
        "`sampling_params` may have `max_new_tokens` 0 and `n` 1 only. The first event comes when the prompt is "
        "cached.",
    )
    sampling_params: Object | Checked[Object] | None = Field(
        None,
        description="An object, see `sampling_params`, or a list with one object for each prompt. The fields "
        "below take such lists too.",
    )
    rid: Rid | Checked[Rid] | None = Field(
        None, description="The name of the request, for `/abort_request`. Prompt i of a list gets the name `rid_i`."
    )
    stream: bool | None = Field(None, description="Answer with events. Each event has the whole text so far.")
    incremental: bool | None = Field(
        None,
        description="`text`, `output_ids` and `reasoning_content` of an event have only what is new, and only the last "
        "event of an answer has logprobs. It needs `stream`. A long answer is then sent once, and not once per token.",
    )
    return_logprob: bool | Checked[bool] | None = Field(
        None,
        description="Report the log-probability of each output token as [logprob, token id, text or null]. Without it "
        "the next four fields ask for nothing.",
    )
    logprob_start_len: StartLen | Checked[StartLen] | None = Field(
        None,
        description="Score the prompt from this token on. The default, -1, scores none of its tokens. If nothing else "
        "is asked of `input_ids` (`max_new_tokens` is 0, and no alternatives are reported), the default is 0.",
    )
    top_logprobs_num: TopCount | Checked[TopCount] | None = Field(
        None,
        description="The number of most likely tokens to report at each scored position. With `max_new_tokens` 0 the "
        "one scored position of the output is that of the next token, which is not generated. A prompt that fills the "
        "context has none.",
    )
    token_ids_logprob: TokenIds | Checked[TokenIds | None] | None = Field(
        None, description="Token ids whose log-probabilities are reported at each scored position."
    )
    return_text_in_logprobs: bool | None = Field(None, description="Report the text of each scored token.")
    cache_salt: Salt | Checked[Salt | None] | None = Field(None, description=CACHE_SALT)
    extra_key: Salt | Checked[Salt | None] | None = Field(None, description=EXTRA_KEY)
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(None, description=PRIORITY)
    return_cache_info: bool | None = Field(
        None, description="`meta_info.cache` says where the cached prefix ended, and why."
    )
    return_waited: bool | None = Field(
        None, description="`meta_info.waited` has for what the answer waited, and for how many seconds."
    )
    require_reasoning: bool | None = Field(
        None,
        description="The output may begin with thoughts, and a grammar governs what follows. The end of the prompt "
        "says whether they are open. `meta_info.reasoning_tokens` counts the tokens up to their end marker.",
    )
    max_thinking_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="As `require_reasoning`, with a limit: after so many tokens of thoughts they are ended."
    )
    separate_reasoning: bool | None = Field(
        None,
        description="As `require_reasoning`, and thoughts are cut from the text: `reasoning_content` has them. It "
        "needs `text` or `input_ids`.",
    )
    log_metrics: Annotated[Any, Only((True,), "every request is counted")] = None
    stream_options: Annotated[
        Any, Only(({"include_usage": True}, {"include_usage": False}), "meta_info always has the numbers of tokens")
    ] = None

    def client_names(self) -> ClientNames:
        """As `Body.client_names`."""
        given = "input_ids" if self.input_ids is not None else "text" if self.prompt is None else "prompt"
        return ClientNames({"input_ids": given})

    @property
    def thought_wish(self) -> ThoughtWish | None:
        """What the client wants of thoughts; None where they are text like any other."""
        if not (self.require_reasoning or self.separate_reasoning or self.max_thinking_tokens is not None):
            return None
        budget, is_split = self.max_thinking_tokens, bool(self.separate_reasoning)
        return ThoughtWish(budget=budget, budget_field="max_thinking_tokens", is_split=is_split)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_off(cls, data: Any) -> Any:
        """Drops unused fields that are false or empty: clients of SGLang send every field that they know."""
        if not isinstance(data, dict):
            return data
        unused = cls.REFUSED.keys() | cls.HARMLESS.keys()
        return {name: value for name, value in data.items() if value or name not in unused}


@router.post("/generate")
async def generate(
    body: GenerateBody, request: Request, rules: CurrentRules, call: CurrentCall, front: ReadyFront
) -> Response:
    """Answers one prompt with an object, and several prompts or `n` > 1 with a list; with `stream` it sends events.

    Each event has the whole answer so far, or with `incremental` what is new. Tokens that come faster than the client
    reads are put into one event, and so are tokens whose event would repeat many logprobs for little text. The logprobs
    of the prompt never change, so only the first event of an answer that has them and its last event show them.
    """
    front.check_model(body.model)
    generator = front.generator
    prompts, is_list, encoded = await _prompts(body, call, front)
    prompts = await _thinking(body, prompts, call, front, rules)
    generation = await begin(request, front, call, prompts)
    is_list = is_list or len(generation.answers) > 1
    texts = generator.tokenizer if body.return_text_in_logprobs else None

    logprobs = [_LogprobsJson(answer, texts) for answer in generation.answers]

    def shown(index: int, delta: AnswerDelta | None = None) -> Event:
        answer = generation.answers[index]
        result = answer.result(with_prompt_logprobs=False, with_logprobs=False, delta=delta)
        if body.separate_reasoning:
            result["reasoning_content"] = answer.thoughts if delta is None else delta.thoughts
        if body.thought_wish is not None:
            result["meta_info"]["reasoning_tokens"] = answer.num_tokens_before
        if rules.warnings:
            result["meta_info"]["warnings"] = rules.warnings
        if encoded is not None:
            result["meta_info"] |= _of_parts(encoded, answer, generator.tokenizer, is_first=index == 0)
        return result

    turn = functools.partial(generator.share.turn, call.caller.tenant)
    if body.hold:
        return respond_with_events(request, _held_events(generation, shown), beat_s=HOLD_BEAT_S)
    if body.stream:
        events = _increments if body.incremental else _events
        shown_events = events(generation, is_list, logprobs, shown, writer_of(request))
        return respond_with_events(request, shown_events, turn=turn)
    await until_disconnect(request, generation.complete())
    results = await generator.share.each(call.caller.tenant, shown, range(len(generation.answers)))
    for result, scores in zip(results, logprobs, strict=True):
        result["meta_info"] |= scores.shown(with_prompt=True)
    return await respond_in_pieces(item_pieces(results) if is_list else json_pieces(results[0]), turn)


async def _thinking(
    body: GenerateBody, prompts: list[Prompt], call: CurrentCall, front: Front, rules: FieldRules
) -> list[Prompt]:
    """The prompts whose answers may begin with thoughts, if the client says so."""
    wish = body.thought_wish
    if wish is None:
        return prompts
    if body.separate_reasoning and body.prompt is not None:
        raise RequestError(
            "separate_reasoning needs text or input_ids, but the prompt is in parts, whose answer a client continues; "
            "leave it out",
            "separate_reasoning",
        )
    if front.speech.thinking is None:
        given = [name for name in ("require_reasoning", "separate_reasoning") if getattr(body, name)]
        for name in given:
            rules.pass_over(name, NO_THOUGHTS)
    plan = ReplyPlan(front.speech, wish)
    return await front.generator.share.each(
        call.caller.tenant, lambda prompt: plan.ready(prompt, rules.pass_over), prompts
    )


async def _held_events(generation: Generation, shown: Callable[[int], Event]) -> AsyncGenerator[Event]:
    with generation.hold() as deltas:
        async for _ in deltas:
            yield shown(0)


def _of_parts(encoded: EncodedPrompt, answer: Answer, tokenizer: Tokenizer, *, is_first: bool) -> dict[str, Any]:
    """What a client needs to continue an answer to a prompt in parts. The first of several answers has the prompt."""
    tells_prompt = answer.finish is not None or answer.request.hold  # it is told once: at the end, or as a hold begins
    meta: dict[str, Any] = {"part_ids": list(map(list, encoded.part_ids))} if is_first and tells_prompt else {}
    if answer.finish is not None:
        kept_ids, tail = split_answer(tokenizer, answer)
        meta |= {"kept_ids": kept_ids, "tail": tail}
    return meta


@final
class _LogprobsJson:
    """The logprobs of an answer as JSON, which is made once and which several events repeat.

    It is made in pieces, while they are sent, and other work runs between them. Else 30 clients that read the logprobs
    of a thousand tokens with 100 alternatives each, all at once, kept the event loop from every other client for 13 s.
    """

    def __init__(self, answer: Answer, texts: Tokenizer | None) -> None:
        step = step_of(answer.request)
        self._answer = answer
        self._of_prompt = JsonLists(functools.partial(answer.shown_prompt_logprobs, texts), step)
        self._of_answer = JsonLists(functools.partial(answer.shown_logprobs, texts), step)

    def shown(self, *, with_prompt: bool) -> dict[str, Iterable[bytes]]:
        """All of them so far, by their names in `meta_info`. Each must be read to its end before the next are shown."""
        answer = self._answer
        if not answer.request.return_logprob:
            return {}
        made = self._of_prompt.until(len(answer.prompt_logprobs)) if with_prompt else {}
        return made | self._of_answer.until(len(answer.logprobs))  # the answer may grow meanwhile


def _form_of(event: Event) -> EventForm | None:
    """The form of an answer's later events; None where more changes than its text, its tokens and its times."""
    meta = event["meta_info"]
    if meta.keys() - CHANGING != FIXED or "reasoning_content" in event or meta["time_to_first_token"] is None:
        return None
    gaps = {name: EventForm.GAP if name in CHANGING else value for name, value in meta.items()}
    return EventForm(event | {"text": EventForm.GAP, "output_ids": EventForm.GAP, "meta_info": gaps})


def _filled(form: EventForm, answer: Answer, new: Answer | AnswerDelta) -> bytes:
    counts = len(answer.token_ids), answer.cached_tokens
    return form.fill(new.text, new.token_ids, *counts, answer.elapsed_s, answer.queue_s)


def _sender(write: Write, form: EventForm | None, answer: Answer, *, is_whole: bool) -> Send:
    def send(delta: AnswerDelta) -> bool:
        if form is None or delta.finish is not None:
            return False
        return write(_filled(form, answer, answer if is_whole else delta))

    return send


async def _events(
    generation: Generation,
    is_list: bool,
    logprobs: Sequence[_LogprobsJson],
    shown: Callable[[int], Event],
    write: Write,
) -> AsyncGenerator[Events]:
    has_shown_prompt: set[int] = set()
    forms: dict[int, EventForm | None] = {}
    num_free = FREE_SCORES / len(generation.answers)
    num_shown = [0] * len(generation.answers)
    with generation.run() as deltas:
        async for index, delta in deltas:
            answer = generation.answers[index]
            if delta.finish is None and (form := forms.get(index)) is not None:
                yield _filled(form, answer, answer)
                continue
            is_due = delta.finish is not None or (index not in has_shown_prompt and bool(answer.prompt_logprobs))
            request = answer.request
            num_scores = len(answer.logprobs) * (1 + request.top_logprobs_num + len(request.token_ids_logprob))
            if not is_due and num_scores - num_shown[index] < (num_scores - num_free) * LEAST_GROWTH:
                continue
            num_shown[index] = num_scores
            if is_due:
                has_shown_prompt.add(index)
            event: Event = shown(index) | ({"index": index} if is_list else {})
            event["meta_info"] |= logprobs[index].shown(with_prompt=is_due)
            forms[index] = form = _form_of(event)
            deltas.senders[index] = _sender(write, form, answer, is_whole=True)
            yield event


async def _increments(
    generation: Generation,
    is_list: bool,
    logprobs: Sequence[_LogprobsJson],
    shown: Callable[[int, AnswerDelta], Event],
    write: Write,
) -> AsyncGenerator[Events]:
    forms: dict[int, EventForm | None] = {}
    with generation.run() as deltas:
        async for index, delta in deltas:
            if delta.finish is None and (form := forms.get(index)) is not None:
                yield _filled(form, generation.answers[index], delta)
                continue
            event: Event = shown(index, delta) | ({"index": index} if is_list else {})
            if delta.finish is not None:
                event["meta_info"] |= logprobs[index].shown(with_prompt=True)
            forms[index] = form = _form_of(event)
            deltas.senders[index] = _sender(write, form, generation.answers[index], is_whole=False)
            yield event


async def _prompts(
    body: GenerateBody, call: CurrentCall, front: Front
) -> tuple[list[Prompt], bool, EncodedPrompt | None]:
    """The prompts of a body, whether the body has a list of them, and the prompt in parts if it has one."""
    if body.incremental and not body.stream:
        raise RequestError(
            "incremental needs stream, whose events it changes, but stream is not set; set it, or leave incremental "
            "out",
            "incremental",
        )
    given = [name for name in ("text", "input_ids", "prompt") if getattr(body, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise RequestError(
            f"exactly one of text, input_ids and prompt must be given, but got {got}; send one", param="text"
        )
    in_parts = None
    is_list = False
    # The pictures of all prompts are read together. All salts together divide what is kept of the pictures.
    namespace = call.caller.namespace(_joined(body.cache_salt), _joined(body.extra_key))
    if body.prompt is not None:
        for name in ("image_data", "video_data", "num_frames"):
            if getattr(body, name) is not None:
                raise RequestError(
                    f"{name} must not come with a prompt in parts; send pictures and videos as parts of the prompt",
                    name,
                )
        parts = await read_parts(front, body.prompt, namespace)
        in_parts = await encode_prompt(front, parts, namespace=namespace)
        all_encoded = [in_parts]
    else:
        all_encoded, is_list = await _encoded(given[0], body, front, namespace)
    count, info = len(all_encoded), front.generator.info
    given_params = _params_of_hold(body, is_list=is_list) if body.hold else body.sampling_params
    lengths = [len(encoded.input_ids) for encoded in all_encoded]
    samplings = await front.generator.beside(
        lambda: to_samplings(given_params, lengths, info.max_request_tokens), CHARS_OF_PARAMS * count
    )
    rids = one_each("rid", body.rid, count, None)
    if isinstance(body.rid, str) and is_list:
        rids = [f"{body.rid}_{index}" for index in range(count)]
    unnamed = new_rid()
    salts = one_each("cache_salt", body.cache_salt, count, None)
    extra_keys = one_each("extra_key", body.extra_key, count, None)
    logprob_fields = _logprob_fields(body, count)

    def prompt(index: int) -> Prompt:
        encoded = all_encoded[index]
        room = info.max_request_tokens - len(encoded.input_ids)
        return Prompt(
            rid=rids[index] or (f"{unnamed}_{index}" if is_list else unnamed),
            **encoded.fields,
            **_asked(body, samplings[index], logprob_fields[index], room),
            namespace=call.caller.namespace(salts[index], extra_keys[index]),
            priority=body.priority or 0,
            return_cache_info=bool(body.return_cache_info),
            sees_all=call.caller.is_admin,
            return_waited=bool(body.return_waited),
            hold=bool(body.hold),
        )

    prompts = await front.generator.share.each(call.caller.tenant, prompt, range(count))
    return prompts, is_list, in_parts


async def _encoded(name: str, body: GenerateBody, front: Front, namespace: str) -> tuple[list[EncodedPrompt], bool]:
    """The prompts in a field, and whether the field holds a list of them."""
    given = getattr(body, name)
    is_list = is_prompt_list(given)
    each: Any = given if is_list else [given]
    if not 1 <= len(each) <= MAX_ANSWERS:
        rule = f"{name} must have at least one prompt and at most {MAX_ANSWERS}"
        todo = "send several requests" if each else "send one"
        raise RequestError(f"{rule}, but has {len(each) or 'none'}; {todo}", name)
    return await encode_with_media(front, each, body, is_list=is_list, field=name, namespace=namespace), is_list


def _joined(given: Sequence[str | None] | str | None) -> str | None:
    """One text for the salts of several prompts; different salts give different texts."""
    return given if given is None or isinstance(given, str) else repr(given)


def _params_of_hold(body: GenerateBody, *, is_list: bool) -> Object:
    """The sampling parameters of a hold. Raises RequestError for a body that does not fit a hold."""
    if not body.stream:
        raise RequestError(
            "stream must be true for a hold, which lasts while its stream is open, but is not; set it", "stream"
        )
    if is_list or isinstance(body.sampling_params, list):
        raise RequestError("a hold must have one prompt, but got a list; send a request for each prompt", "hold")
    params = {"max_new_tokens": 0} | {k: v for k, v in (body.sampling_params or {}).items() if v is not None}
    if meaningless := sorted(params.keys() - {"max_new_tokens", "n"}):
        name = meaningless[0]
        raise RequestError(f"a hold generates nothing, so it must not have {quote(name)}; leave it out", name)
    for name in ("max_new_tokens", "n"):
        allowed = 0 if name == "max_new_tokens" else 1
        if (value := params.get(name, allowed)) != allowed:
            raise RequestError(
                f"a hold generates nothing, so {name} must be {allowed} or absent, but got {quote(value)}; leave it "
                "out",
                name,
            )
    return params


def _asked(body: GenerateBody, sampling: SamplingParams, reports: dict[str, Any], room: int) -> dict[str, Any]:
    """The fields of a prompt that say what to sample and to report. `room` is for that many tokens behind the prompt.

    Where without new tokens nothing at all would be reported, the prompt is: the `select` of SGLang's front end asks so
    for unconditional scores.
    """
    has_others = sampling.max_new_tokens or reports["top_logprobs_num"] or reports["token_ids_logprob"]
    is_bare = not has_others and body.input_ids is not None and body.logprob_start_len is None
    if is_bare and not (body.image_data or body.video_data):
        reports = reports | {"logprob_start_len": 0}
    return asked(sampling, room, **reports)


def _logprob_fields(body: GenerateBody, count: int) -> list[dict[str, Any]]:
    """The reports of each prompt."""
    chosen: Any = body.token_ids_logprob or ()
    if chosen and isinstance(chosen[0], int):
        chosen = tuple(chosen)
    given = {
        "return_logprob": (body.return_logprob, False),
        "logprob_start_len": (body.logprob_start_len, -1),
        "top_logprobs_num": (body.top_logprobs_num, 0),
        "token_ids_logprob": (chosen, ()),
    }
    each = [one_each(name, value, count, default) for name, (value, default) in given.items()]
    return [dict(zip(given, values, strict=True)) for values in zip(*each, strict=True)]
