"""`/v1/embeddings`."""

import base64
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import msgspec
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.processing.vectors import check_dimensions, to_vector, whole
from jsg.prompt_ids import PromptIds
from jsg.server.caller import CurrentCall
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_ANSWERS, new_rid
from jsg.server.http.body import Body, Prompts, is_prompt_list
from jsg.server.http.event_stream import until_disconnect
from jsg.server.http.json_body import new_router
from jsg.server.http.long_response import respond_in_pieces
from jsg.server.shared.fields import END_USER, MAX_NAME_CHARS, MODEL
from jsg.server.shared.reading import check_inputs, prompt_usage
from jsg.speech.answers.answer import Prompt
from jsg.types import SamplingParams

router = new_router()


class EmbeddingsBody(Body):
    """What `/v1/embeddings` takes: texts or token ids, and the form of their vectors."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "messages": "a conversation has no vector; send its text as input",
        "truncate_prompt_tokens": "the server never shortens a prompt; shorten it before you send it",
    }

    input: Prompts = Field(description="A text, the token ids of a text, or a list of either.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`base64` gives the bytes of the float32 numbers, the lowest byte first. Default: `float`."
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="The length of a vector. A shorter vector is the beginning of the whole one, normed again; a model "
        "that was not trained for it refuses.",
    )
    model: str | None = Field(None, description=MODEL)
    user: str | None = Field(None, max_length=MAX_NAME_CHARS, description=END_USER)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request, call: CurrentCall, front: ReadyFront) -> Response:
    """Gives the vector of each input. A model that generates text refuses the call."""
    embedder = front.generator.info.embedder
    if embedder is None:
        raise front.lacks("/v1/embeddings", "a model that embeds")
    front.check_model(body.model)
    check_dimensions(embedder, body.dimensions)
    id_lists = await _encode(body, front)
    rid, namespace = f"embd-{new_rid()}", call.caller.namespace()
    sampling = SamplingParams(max_new_tokens=1, temperature=0)
    prompts = [
        Prompt(
            rid=f"{rid}_{index}",
            input_ids=input_ids,
            sampling=sampling,
            only_scores_next=True,
            namespace=namespace,
            embed=True,
        )
        for index, input_ids in enumerate(id_lists)
    ]
    generation = await front.generator.begin(dataclasses.replace(call, user=body.user), prompts)
    await until_disconnect(request, generation.complete())
    states = whole([answer.vector for answer in generation.answers])
    usage = prompt_usage(generation.answers)

    def pieces() -> Iterator[bytes]:
        yield b'{"object":"list","data":['
        for index, state in enumerate(states):
            vector = to_vector(state, embedder, body.dimensions)
            is_base64 = body.encoding_format == "base64"
            shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector.tolist()
            entry = {"object": "embedding", "index": index, "embedding": shown}
            yield (b"," if index else b"") + msgspec.json.encode(entry)
        yield b"]," + msgspec.json.encode({"model": front.model_name, "usage": usage})[1:]

    return await respond_in_pieces(pieces(), functools.partial(front.generator.share.turn, call.caller.tenant))


async def _encode(body: EmbeddingsBody, front: Front) -> list[tuple[int, ...] | PromptIds]:
    given: Any = body.input if is_prompt_list(body.input) else [body.input]
    if not 1 <= len(given) <= MAX_ANSWERS:
        raise RequestError(f"input must have 1 to {MAX_ANSWERS} items, but has {len(given)}; split it", "input")
    id_lists = await front.generator.encode(given)
    check_inputs(id_lists, front.generator.info, "input")
    return id_lists
