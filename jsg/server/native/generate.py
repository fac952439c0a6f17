"""`/generate`: SGLang's own interface."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar

from fastapi import Request
from pydantic import Field, StringConstraints, model_validator
from starlette.responses import Response

from jsg.checks import quote
from jsg.errors import RequestError
from jsg.processing.answer import Answer, Prompt
from jsg.processing.encode_parts import EncodedPrompt, split_answer
from jsg.processing.tokenizer import Tokenizer
from jsg.server.caller import CurrentCall
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_ANSWERS, Generation, new_rid
from jsg.server.http.body import Body, Checked, Rid, TokenIds, client_names, is_prompt_list
from jsg.server.http.event_stream import Event, respond_with_events, until_disconnect
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.server.native.parts import PromptParts, read_parts
from jsg.server.native.sampling import Object, one_each, to_samplings
from jsg.server.shared.fields import MAX_NAME_CHARS, Only
from jsg.server.shared.media_fields import IMAGE_DATA, NUM_FRAMES, VIDEO_DATA, MediaData, NumFrames, encode_with_media
from jsg.server.shared.prompt_parts import encode_prompt
from jsg.types import MAX_TOP_LOGPROBS

HOLD_BEAT_S = 15.0
FREE_SCORES = 4096  # logprobs so far of a stream, from which on its next event waits until they have grown by a part:
LEAST_GROWTH = 1 / 16  # else a thousand tokens, each with 128 alternatives, would be a gigabyte of events

type StartLen = Annotated[int, Field(ge=-1, lt=2**31)]
type TopCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
type Salt = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS)]

NO_SOUND = "models of this version hear nothing; leave it out"
NO_ADAPTERS = "adapters are not served; serve a model that has them merged"
NO_SESSIONS = "send the whole prompt: the prefix cache keeps what it shares with earlier ones"
NOT_SPLIT = "an engine does both prefill and decode here; leave it out"
NOT_ROUTED = "the server itself chooses the engine that a request goes to; leave it out"
NO_INNARDS = "what happens inside the model is not reported; leave it out"

router = new_router()


class GenerateBody(Body):
    """What `/generate` takes: one prompt or a list, as text or as token ids; or one prompt in parts."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "input_embeds": "prompts are text or input_ids",
        **dict.fromkeys(("audio_data", "use_audio_in_video"), NO_SOUND),
        **dict.fromkeys(("modalities", "video_config"), "what the prompt and image_data and video_data have says it"),
        **dict.fromkeys(("mm_hashes", "mm_content_hashes"), "the server hashes pictures itself; leave it out"),
        "max_dynamic_patch": "a picture is cut into tiles as the model's config says; leave it out",
        **dict.fromkeys(("lora_path", "lora_id"), NO_ADAPTERS),
        **dict.fromkeys(("session_id", "session_params", "conversation_id"), NO_SESSIONS),
        "custom_logit_processor": "code of clients is never run; logit_bias in sampling_params shifts single tokens",
        **dict.fromkeys(
            ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"), NOT_SPLIT
        ),
        "disagg_prefill_dp_rank": NOT_SPLIT,
        **dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "routing_key", "kv_router_hint"), NOT_ROUTED),
        **dict.fromkeys(("return_hidden_states", "return_routed_experts", "return_indexer_topk"), NO_INNARDS),
        **dict.fromkeys(("return_sampling_mask", "return_entropy"), NO_INNARDS),
        **dict.fromkeys(
            ("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"), "top_logprobs_num gives them as lists"
        ),
        "return_bytes": "answers are JSON; /detokenize gives the text of single tokens",
        "return_prompt_token_ids": "/tokenize gives the tokens of a text",
        **dict.fromkeys(
            ("require_reasoning", "max_thinking_tokens"), "thinking is not told from the rest; use max_new_tokens"
        ),
        **dict.fromkeys(("no_logs", "custom_labels"), "what is logged is the server's to choose; leave it out"),
        "background": "keep the connection open, and use stream to see the answer grow",
    }

    ACCEPTED: ClassVar[Mapping[str, str]] = {"log_metrics": "routers send true, and every request is counted"}

    text: str | Checked[str] | None = Field(None, description=f"This or `input_ids`. A list has at most {MAX_ANSWERS}.")
    input_ids: TokenIds | Checked[TokenIds] | None = Field(None, description="This or `text`.")
    prompt: PromptParts | None = Field(
        None,
        description="In place of both: one prompt in parts. A bare text is encoded with special tokens as plain "
        "characters, a list holds token ids as they are, other parts are objects. What its texts became is in "
        "`meta_info.part_ids`, and `kept_ids` and `tail` go on in the answer without encoding it again.",
    )
    image_data: MediaData = Field(None, description=IMAGE_DATA)
    video_data: MediaData = Field(None, description=VIDEO_DATA)
    num_frames: NumFrames = Field(None, description=NUM_FRAMES)
    hold: bool | None = Field(
        None,
        description="Generate nothing, but keep the prompt in the cache as long as this stream is open: with `stream`, "
        "`max_new_tokens` 0 or absent, and nothing to sample by. The first event comes when it is cached.",
    )
    sampling_params: Object | Checked[Object] | None = Field(
        None, description="See `sampling_params` below; a list has those of each prompt, here and in what follows."
    )
    rid: Rid | Checked[Rid] | None = Field(
        None, description="Name of the request, for `/abort_request`; prompt i of a list is `rid_i`."
    )
    stream: bool | None = Field(None, description="Answer with events, each with all of the text so far.")
    return_logprob: bool | Checked[bool] | None = Field(
        None, description="Report the log-probability of each output token, as [logprob, id, text or null]."
    )
    logprob_start_len: StartLen | Checked[StartLen] | None = Field(
        None, description="Score the prompt too, from this token on; -1, the default, scores none of it."
    )
    top_logprobs_num: TopCount | Checked[TopCount] | None = Field(
        None, description="So many most likely alternatives at each scored position."
    )
    token_ids_logprob: TokenIds | Checked[TokenIds | None] | None = Field(
        None, description="Score these tokens at each position."
    )
    return_text_in_logprobs: bool | None = Field(None, description="Show the text of each token that is scored.")
    cache_salt: Salt | Checked[Salt | None] | None = Field(
        None, description="Only requests of one salt (and one key) share cached prefixes."
    )
    extra_key: Salt | Checked[Salt | None] | None = Field(None, description="Divides the cache as `cache_salt` does.")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None, description="Larger goes first in the queue, as far as the bound on passing allows."
    )
    return_cache_info: bool | None = Field(
        None, description="`meta_info.cache` tells why the cached prefix ended where it did."
    )
    log_metrics: Annotated[Any, Only((True,), "every request is counted")] = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_off(cls, data: Any) -> Any:
        """SGLang's clients send every field they know: false or empty, what is refused here asks for nothing."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value or name not in cls.REFUSED}


@router.post("/generate")
async def generate(body: GenerateBody, request: Request, call: CurrentCall, front: ReadyFront) -> Response:
    """Answers one prompt with an object, a list of prompts or `n` > 1 with a list; as events with `stream`.

    An event holds all of its answer so far; what comes faster than the client reads is put into one event, and so is
    what would repeat many logprobs for little text. The `input_*` logprobs, which never change, are in the first event
    of an answer that has them and in its last.
    """
    generator = front.generator
    prompts, is_list, encoded = await _prompts(body, call, front)
    given = "input_ids" if body.input_ids is not None else "prompt" if encoded is not None else "text"
    with client_names({"input_ids": given}):
        generation = generator.begin(call, prompts)
    is_list = is_list or len(generation.answers) > 1
    texts = generator.tokenizer if body.return_text_in_logprobs else None

    def shown(index: int, *, with_prompt_logprobs: bool = True) -> Event:
        answer = generation.answers[index]
        result = answer.result(texts, with_prompt_logprobs=with_prompt_logprobs)
        if encoded is not None:
            result["meta_info"] |= _of_parts(encoded, answer, generator.tokenizer, is_first=index == 0)
        return result

    if body.hold:
        return await respond_with_events(request, _held_events(generation, shown), beat_s=HOLD_BEAT_S)
    if body.stream:
        return await respond_with_events(request, _events(generation, is_list, shown))
    await until_disconnect(request, generation.complete())
    results = [shown(index) for index in range(len(generation.answers))]
    return json_response(results if is_list else results[0])


async def _held_events(generation: Generation, shown: Callable[[int], Event]) -> AsyncGenerator[Event]:
    async with aclosing(generation.hold()) as deltas:
        async for _ in deltas:
            yield shown(0)


def _of_parts(encoded: EncodedPrompt, answer: Answer, tokenizer: Tokenizer, *, is_first: bool) -> dict[str, Any]:
    """What a client needs to continue an answer to a prompt in parts. Of several answers the first has the prompt."""
    tells_prompt = answer.finish is not None or answer.request.hold  # once is enough: at the end, or when a hold begins
    meta: dict[str, Any] = {"part_ids": encoded.part_ids} if is_first and tells_prompt else {}
    if answer.finish is not None:
        kept_ids, tail = split_answer(tokenizer, answer)
        meta |= {"kept_ids": kept_ids, "tail": tail}
    return meta


async def _events(generation: Generation, is_list: bool, shown: Callable[..., Event]) -> AsyncGenerator[Event]:
    has_shown_prompt: set[int] = set()
    num_free = FREE_SCORES / len(generation.answers)
    num_shown = [0] * len(generation.answers)
    async with aclosing(generation.run()) as deltas:
        async for index, delta in deltas:
            answer = generation.answers[index]
            is_due = delta.finish is not None or (index not in has_shown_prompt and bool(answer.prompt_logprobs))
            request = answer.request
            num_scores = len(answer.logprobs) * (1 + request.top_logprobs_num + len(request.token_ids_logprob))
            if not is_due and num_scores - num_shown[index] < (num_scores - num_free) * LEAST_GROWTH:
                continue
            num_shown[index] = num_scores
            if is_due:
                has_shown_prompt.add(index)
            place = {"index": index} if is_list else {}
            yield shown(index, with_prompt_logprobs=is_due) | place


async def _prompts(
    body: GenerateBody, call: CurrentCall, front: Front
) -> tuple[list[Prompt], bool, EncodedPrompt | None]:
    """The prompts of a body, whether it has a list of them, and the one that came in parts."""
    given = [name for name in ("text", "input_ids", "prompt") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError("exactly one of text and input_ids must be given, or prompt", param="text")
    in_parts = None
    is_list = False
    # All are read together; what their salts are together divides what is kept of their pictures.
    namespace = call.caller.namespace(_joined(body.cache_salt), _joined(body.extra_key))
    if body.prompt is not None:
        for name in ("image_data", "video_data", "num_frames"):
            if getattr(body, name) is not None:
                raise RequestError(f"a prompt in parts has pictures as parts of its own, and no {name}", name)
        parts = await read_parts(front, body.prompt, namespace)
        in_parts = await encode_prompt(front, parts, namespace=namespace)
        all_encoded = [in_parts]
    else:
        all_encoded, is_list = await _encoded(given[0], body, front, namespace)
    count = len(all_encoded)
    samplings = to_samplings(
        _params_of_hold(body, is_list=is_list) if body.hold else body.sampling_params,
        [len(encoded.input_ids) for encoded in all_encoded],
        front.generator.info.max_request_tokens,
    )
    rids = one_each("rid", body.rid, count, None)
    if isinstance(body.rid, str) and is_list:
        rids = [f"{body.rid}_{index}" for index in range(count)]
    salts = one_each("cache_salt", body.cache_salt, count, None)
    extra_keys = one_each("extra_key", body.extra_key, count, None)
    prompts = [
        Prompt(
            rid=rids[index] or new_rid(),
            **encoded.fields,
            sampling=samplings[index],
            namespace=call.caller.namespace(salts[index], extra_keys[index]),
            priority=body.priority or 0,
            return_cache_info=bool(body.return_cache_info),
            hold=bool(body.hold),
            **reports,
        )
        for index, (encoded, reports) in enumerate(zip(all_encoded, _logprob_fields(body, count), strict=True))
    ]
    return prompts, is_list, in_parts


async def _encoded(name: str, body: GenerateBody, front: Front, namespace: str) -> tuple[list[EncodedPrompt], bool]:
    """Each prompt in a field, and whether that holds a list of them."""
    given = getattr(body, name)
    is_list = is_prompt_list(given)
    each: Any = given if is_list else [given]
    if not 1 <= len(each) <= MAX_ANSWERS:
        rule = f"{name} must have at least one prompt and at most {MAX_ANSWERS}"
        raise RequestError(f"{rule}, but has {len(each) or 'none'}; send some, or several requests", name)
    return await encode_with_media(front, each, body, is_list=is_list, field=name, namespace=namespace), is_list


def _joined(given: Sequence[str | None] | str | None) -> str | None:
    """One text for the salts of several prompts, other than for any others."""
    return given if given is None or isinstance(given, str) else repr(given)


def _params_of_hold(body: GenerateBody, *, is_list: bool) -> Object:
    """The sampling parameters of a hold. Raises RequestError for what a hold cannot be."""
    if not body.stream:
        raise RequestError("a hold lasts as long as its stream is open: it needs stream, which must be true", "stream")
    if is_list or isinstance(body.sampling_params, list):
        raise RequestError("a hold must have one prompt, but got a list; send a request for each", "hold")
    params = {"max_new_tokens": 0} | {k: v for k, v in (body.sampling_params or {}).items() if v is not None}
    if meaningless := sorted(params.keys() - {"max_new_tokens", "n"}):
        name = meaningless[0]
        raise RequestError(f"a hold generates nothing, so {quote(name)} means nothing to it; leave it out", name)
    for name in ("max_new_tokens", "n"):
        allowed = 0 if name == "max_new_tokens" else 1
        if (value := params.get(name, allowed)) != allowed:
            raise RequestError(
                f"a hold generates nothing: {name} must be {allowed} or absent, but got {quote(value)}", name
            )
    return params


def _logprob_fields(body: GenerateBody, count: int) -> list[dict[str, Any]]:
    """What to report of each prompt. What is given once for all goes to those that report log-probabilities."""
    wanted = one_each("return_logprob", body.return_logprob, count, False)
    is_mixed = isinstance(body.return_logprob, list)

    def each(name: str, value: Any, default: Any) -> list[Any]:
        if isinstance(value, list):
            return one_each(name, value, count, default)
        return [default if value is None or (is_mixed and not wants) else value for wants in wanted]

    chosen: Any = body.token_ids_logprob or ()
    if chosen and isinstance(chosen[0], int):
        chosen = tuple(chosen)
    starts = each("logprob_start_len", body.logprob_start_len, -1)
    tops = each("top_logprobs_num", body.top_logprobs_num, 0)
    id_lists = each("token_ids_logprob", chosen, ())
    return [
        {
            "return_logprob": wants,
            "logprob_start_len": start,
            "top_logprobs_num": top,
            "token_ids_logprob": tuple(ids),
        }
        for wants, start, top, ids in zip(wanted, starts, tops, id_lists, strict=True)
    ]
