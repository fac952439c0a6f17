"""Endpoints of OpenAI's interface that need another kind of model, which the server refuses by name."""

from collections.abc import Mapping

from fastapi import Request
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.server.front import Front, ReadyFront
from jsg.server.http.json_body import new_router

NEEDED: Mapping[str, str] = {
    "/v1/classify": "a model that classifies",
    "/v1/moderations": "a model that moderates",
    "/v1/audio/speech": "a model that speaks",
    "/v1/audio/transcriptions": "a model that hears",
    "/v1/audio/translations": "a model that hears",
    "/v1/images/generations": "a model that draws",
    "/v1/images/edits": "a model that draws",
    "/v1/images/variations": "a model that draws",
}
"""Path → the kind of model that it needs."""

router = new_router()


async def refuse(request: Request, front: ReadyFront) -> Response:
    """Refuses the call, because the model generates text, or embeds it."""
    raise refusal(request.url.path, front)


def refusal(path: str, front: Front, needed: str | None = None) -> RequestError:
    """The error of a call that needs another kind of model."""
    does, endpoints = "generates text", "/v1/chat/completions, /v1/completions or /v1/score"
    if front.generator.info.embedder is not None:
        does, endpoints = "embeds texts", "/v1/embeddings"
    return RequestError(
        f"{path} needs {needed or NEEDED[path]}, but {front.model_name!r} {does}; use {endpoints} here, and another "
        "server for this",
        param="model",
    )


for _path in NEEDED:
    router.post(_path)(refuse)
