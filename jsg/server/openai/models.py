"""`/v1/models`: the one model that is served."""

import datetime
from typing import Any

from starlette.responses import Response

from jsg.server.front import Front, ReadyFront
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router

router = new_router()


@router.get("/v1/models")
async def models(front: ReadyFront) -> Response:
    """Lists the served model, which is the only one."""
    name = front.model_name
    return json_response(
        {"object": "list", "data": [_card(front)], "has_more": False, "first_id": name, "last_id": name}
    )


@router.get("/v1/models/{model:path}")
async def model(model: str, front: ReadyFront) -> Response:
    """Describes the model of this name, which may have slashes."""
    front.check_model(model)
    return json_response(_card(front))


def _card(front: Front) -> dict[str, Any]:
    """The model as OpenAI's and Anthropic's clients read it."""
    return {
        "id": front.model_name,
        "object": "model",
        "created": front.created,
        "type": "model",
        "created_at": f"{datetime.datetime.fromtimestamp(front.created, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "display_name": front.model_name,
        "owned_by": "jsg",
        "root": front.model_name,
        "parent": None,
        "max_model_len": front.generator.info.max_request_tokens,
        "modalities": ["text", *front.media.placeholders],
    }
