"""Probes: whether the server is alive, whether it takes requests, and whether the engine generates tokens."""

import asyncio
import contextlib
import uuid
from typing import final

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jsg import types
from jsg.engine.front.served import ServedEngine
from jsg.errors import JsgError, QueueFullError, RequestError
from jsg.prompt_ids import PromptIds
from jsg.server.front import FrontDoor, ReadyFront
from jsg.server.http.event_stream import until_disconnect
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.types import FinishType, GrammarSpec, SamplingParams

OWNER = "health"  # no tenant has this name, so the probe counts for nobody, and nobody can abort it
NAMESPACE = "health"  # no tenant has this namespace, so the probe's token is in nobody's cache
PRIORITY = 2**31 - 1  # a probe must not fail because of a long queue
GRAMMAR = GrammarSpec("regex", "(?s:.+)")  # a vocabulary of any language has a token for it
RETRY_S = 0.05  # nor because of a full one, if there is room again in time

router = new_router()


@router.get("/health")
async def health(request: Request) -> Response:
    """Answers 200 while an engine is warm and alive, during a shutdown too, and 503 otherwise."""
    door: FrontDoor = request.app.state.door
    return json_response({"status": door.status}, 200 if door.is_healthy else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Answers 200 while the server takes new requests, and 503 otherwise."""
    door: FrontDoor = request.app.state.door
    return json_response({"status": door.status}, 200 if door.is_open else 503)


@router.get("/health_generate")
async def health_generate(request: Request, front: ReadyFront) -> Response:
    """Answers 200 once the least busy engine has made a token, and 503 after `--health-timeout`.

    The token is one that a grammar allows, which is compiled for it. While the engine still loads what grammars need,
    any token will do.

    Probes that come while another one runs share its token.
    """
    probe: EngineProbe = request.app.state.probe
    await until_disconnect(request, probe.run(front.client, front.server_config.health_timeout))
    return json_response({"status": "ok"})


@final
class EngineProbe:
    """Has the engine make one token, for all probes that ask at the same time."""

    def __init__(self) -> None:
        self._running: asyncio.Task[str | None] | None = None

    async def run(self, client: ServedEngine, timeout_s: float) -> None:
        """Waits for the token of the probe that runs, or of a new one. A client that leaves does not end the probe.

        Raises:
            HTTPException: 503, no token came in time, the engine takes no requests or grammars do not work.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(_probe(client, timeout_s, GRAMMAR if client.takes_grammars else None))
        failure = await asyncio.shield(self._running)
        if failure is not None:
            raise HTTPException(503, failure, {"Retry-After": "1"})


async def _probe(client: ServedEngine, timeout_s: float, grammar: GrammarSpec | None) -> str | None:
    """None once there is a token, otherwise why there is none. It raises nothing, because nobody may be waiting."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await _makes_token(client, grammar):
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        return f"the engine made no token within {timeout_s:g} s; see /health and the server's log"
    except JsgError as error:
        if type(error) is RequestError and grammar is not None:  # the model's tokenizer takes none, as clients are told
            return await _probe(client, timeout_s, None)
        return str(error)
    return None


async def _makes_token(client: ServedEngine, grammar: GrammarSpec | None) -> bool:
    """Whether a token came. False where the queue is full, or all requests, and with them this one, were aborted.

    Raises:
        JsgError: The engine has ended, or the grammar does not work.
    """
    request = types.Request(
        rid=uuid.uuid4().hex,
        input_ids=PromptIds.of((0,)),
        sampling=SamplingParams(max_new_tokens=1, temperature=0, grammar=grammar),
        namespace=NAMESPACE,
        priority=PRIORITY,
    )
    with contextlib.suppress(QueueFullError):
        if grammar is not None:
            await client.grammars.check(grammar, OWNER)
        first: asyncio.Future[types.RequestOutput | Exception] = asyncio.get_running_loop().create_future()
        end = client.begin(request, OWNER, lambda output: None if first.done() else first.set_result(output))
        try:
            output = await first
        finally:
            end()
        if isinstance(output, Exception):
            raise output
        if output.finish is not None and output.finish.type is FinishType.ERROR:
            raise output.finish.to_error()
        return bool(output.token_ids)
    return False
