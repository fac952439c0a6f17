"""`/v1/models`: the one model that is served."""

from typing import Any

from starlette.responses import Response

from jsg.server.front import Front, ReadyFront
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router

router = new_router()


@router.get("/v1/models")
async def models(front: ReadyFront) -> Response:
    """Lists the served model, which is the only one."""
    return json_response({"object": "list", "data": [_card(front)]})


@router.get("/v1/models/{model:path}")
async def model(model: str, front: ReadyFront) -> Response:
    """Describes the model of this name, which may have slashes."""
    front.check_model(model)
    return json_response(_card(front))


def _card(front: Front) -> dict[str, Any]:
    return {
        "id": front.model_name,
        "object": "model",
        "created": front.created,
        "owned_by": "jsg",
        "root": front.model_name,
        "parent": None,
        "max_model_len": front.generator.info.max_request_tokens,
        "modalities": ["text", *front.media.placeholders],
    }
