"""`/select`: scores several texts that may come next, and chooses one of them."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, get_args

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.lang.tokens.choices import METHODS, check_draw, decide, method_named
from jsg.lang.tokens.model import ScoredChoices
from jsg.processing.parts import Part, TextPart
from jsg.server.caller import CurrentCall
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_ANSWERS
from jsg.server.http.body import Body, Checked, ClientNames, Rid
from jsg.server.http.event_stream import until_disconnect
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.server.native.generate import Salt
from jsg.server.native.lang_backend import FrontModel
from jsg.server.native.parts import PromptParts, read_parts
from jsg.server.shared.fields import CACHE_SALT, EXTRA_KEY, PRIORITY

MAX_CHOICES = MAX_ANSWERS // 2  # a choice may be scored twice
MAX_TEMPERATURE = 100.0

Method = Literal[
    "token_trie", "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]
assert set(get_args(Method)) == set(METHODS)

router = new_router()


class SelectBody(Body):
    """What `/select` takes: a prompt and the texts that may come next."""

    ERROR_NAMES: ClassVar[ClientNames] = ClientNames({"input_ids": "prompt"})

    prompt: str | PromptParts = Field(
        description="A text, in which written special tokens count as special tokens, or a list of parts as in "
        "`/generate`."
    )
    choices: Annotated[Checked[str], Field(min_length=1, max_length=MAX_CHOICES)] = Field(
        description="Texts that may come next. Each is encoded together with the text before it. Special tokens that "
        "are written in a choice are plain characters."
    )
    method: Method | None = Field(
        None, description="The method that chooses. Without it the choices are scored and none is chosen."
    )
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = Field(
        None,
        description="With 0, the default, the choice with the best score is taken. With a larger value one is drawn by "
        "the scores.",
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(None, description="The seed of the draw.")
    unconditional: bool | None = Field(
        None, description="Score each choice without the prompt too. A method that needs these scores always gets them."
    )
    rid: Rid | None = Field(None, description="The beginning of the names of the requests that this call makes.")
    cache_salt: Salt | None = Field(None, description=CACHE_SALT)
    extra_key: Salt | None = Field(None, description=EXTRA_KEY)
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(None, description=PRIORITY)


@router.post("/select")
async def select(body: SelectBody, request: Request, call: CurrentCall, front: ReadyFront) -> Response:
    """Scores several texts that may come next, in one batch, and chooses one if the request names a method.

    With a method the answer has `probabilities` too. They are exact over the trie of the tokens: the probability of
    each choice, given that one of the choices comes next.
    """
    if body.method is None:
        for name in ("temperature", "seed"):
            if getattr(body, name) is not None:
                raise RequestError(f"{name} needs a method, but the request has none; name one, or leave it out", name)
    else:
        check_draw(body.method, body.temperature or 0.0)
    namespace = call.caller.namespace(body.cache_salt, body.extra_key)
    parts = await _parts(body, front, namespace)
    model = FrontModel(
        front,
        call,
        namespace=namespace,
        priority=body.priority or 0,
        rid=body.rid,
    )
    unconditional = bool(body.unconditional) or (
        body.method is not None and method_named(body.method).needs_unconditional
    )
    scored = await until_disconnect(request, model.score(parts, tuple(body.choices), unconditional=unconditional))
    return json_response(_shown(scored) | _chosen(body, scored))


async def _parts(body: SelectBody, front: Front, namespace: str) -> tuple[Part, ...]:
    if isinstance(body.prompt, str):
        return (TextPart(body.prompt, is_markup=True),)
    return await read_parts(front, body.prompt, namespace)


def _shown(scored: ScoredChoices) -> dict[str, Any]:
    return {
        "part_ids": list(map(list, scored.part_ids)),
        "common_ids": scored.common_ids,
        "choices": [dataclasses.asdict(choice) for choice in scored.choices],
        "meta_info": scored.meta,
    }


def _chosen(body: SelectBody, scored: ScoredChoices) -> dict[str, Any]:
    if body.method is None:
        return {}
    selection = decide(body.choices, scored, method=body.method, temperature=body.temperature or 0.0, seed=body.seed)
    return {
        "choice": body.choices.index(selection.choice),
        "text": selection.choice,
        "probabilities": selection.probabilities,
        "meta_info": selection.meta,
    }
