"""Endpoints about the server itself."""

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import jsg
from jsg.errors import RequestError
from jsg.server.failures import json_response
from jsg.server.front import FrontDoor, ReadyFront
from jsg.server.openai_common import now

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no key

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
@router.api_route("/ready", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """200 while requests can be answered; 503 while the engine loads and after it has ended."""
    door: FrontDoor = request.app.state.door
    return json_response({"status": door.status}, 200 if door.is_open else 503)


@router.get("/v1/models")
async def models(front: ReadyFront) -> Response:
    """The one model."""
    card = {"id": front.model_name, "object": "model", "created": now(), "owned_by": "jsg"}
    return json_response({"object": "list", "data": [card | {"max_model_len": front.generator.info.context_length}]})


@router.get("/get_model_info")
async def model_info(front: ReadyFront) -> Response:
    """What is known of the loaded model."""
    config = front.engine_config
    info = dataclasses.asdict(front.generator.info)
    names = {"model_path": config.model_path, "tokenizer_path": config.tokenizer_path or config.model_path}
    return json_response(info | names | {"is_generation": True})


@router.get("/get_server_info")
async def server_info(front: ReadyFront) -> Response:
    """Every knob but the key, the model, and the engine's counters."""
    knobs: dict[str, Any] = dataclasses.asdict(front.server_config) | dataclasses.asdict(front.engine_config)
    del knobs["api_key"]
    stats = await front.client.stats()
    info = dataclasses.asdict(front.generator.info)
    return json_response(knobs | {"version": jsg.__version__, "model_info": info, "internal_states": [stats]})


@router.post("/flush_cache")
async def flush_cache(front: ReadyFront) -> Response:
    """Empties the prefix cache, or refuses with 400 while requests run or wait."""
    if not await front.client.flush_cache():
        raise RequestError("the cache can be flushed only while no request runs or waits; try again later")
    return json_response({"success": True, "message": "the prefix cache is empty"})
