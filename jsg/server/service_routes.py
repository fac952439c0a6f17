"""Endpoints about the server itself."""

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import jsg
from jsg.errors import RequestError
from jsg.server.failures import json_response
from jsg.server.front import Front, FrontDoor, ReadyFront, public_name
from jsg.server.openai_common import now

HIDDEN_KNOBS = frozenset({"api_key", "compilation_cache_dir"})  # a secret, and a path of this machine
OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no key

router = APIRouter()


@router.get("/health")
@router.get("/ready")
@router.head("/health", include_in_schema=False)
@router.head("/ready", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while requests can be answered; 503 while the engine loads and after it has ended."""
    door: FrontDoor = request.app.state.door
    return json_response({"status": door.status}, 200 if door.is_open else 503)


@router.get("/v1/models")
async def models(front: ReadyFront) -> Response:
    """The one model."""
    card = {"id": front.model_name, "object": "model", "created": now(), "owned_by": "jsg"}
    return json_response(
        {"object": "list", "data": [card | {"max_model_len": front.generator.info.max_request_tokens}]}
    )


@router.get("/get_model_info")
async def model_info(front: ReadyFront) -> Response:
    """What is known of the loaded model."""
    return json_response(_model_info(front) | {"is_generation": True})


@router.get("/get_server_info")
async def server_info(front: ReadyFront) -> Response:
    """The knobs, the model, and the engine's counters; no key, and no path of this machine."""
    knobs: dict[str, Any] = dataclasses.asdict(front.server_config) | dataclasses.asdict(front.engine_config)
    shown = {name: value for name, value in knobs.items() if name not in HIDDEN_KNOBS} | _names(front)
    state = {"version": jsg.__version__, "model_info": _model_info(front)}
    return json_response(shown | state | {"internal_states": [await front.client.stats()]})


@router.post("/flush_cache")
async def flush_cache(front: ReadyFront) -> Response:
    """Empties the prefix cache, or refuses with 400 while requests run or wait."""
    if not await front.client.flush_cache():
        raise RequestError("the cache can be flushed only while no request runs or waits; try again later")
    return json_response({"success": True, "message": "the prefix cache is empty"})


def _model_info(front: Front) -> dict[str, Any]:
    return dataclasses.asdict(front.generator.info) | _names(front)


def _names(front: Front) -> dict[str, str]:
    """What is served, under names that say nothing of where it lies."""
    config = front.engine_config
    return {
        "model_path": public_name(config.model_path),
        "tokenizer_path": public_name(config.tokenizer_path or config.model_path),
    }
