"""Endpoints of OpenAI's interface that need another kind of model, which the server refuses by name."""

from collections.abc import Mapping

from fastapi import Request
from starlette.responses import Response

from jsg.server.front import ReadyFront
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
    """Refuses the call, because the model generates text or embeds it."""
    path = request.url.path
    raise front.lacks(path, NEEDED[path])


for _path in NEEDED:
    router.post(_path)(refuse)
