"""Endpoints that change or show what requests are under way and what is cached."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.responses import Response

from jsg.cache.dump import MAX_DEPTH, MAX_NODES
from jsg.errors import ForbiddenError, RequestError
from jsg.server.caller import Caller, CurrentCaller
from jsg.server.front import ReadyFront
from jsg.server.http.body import Body
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.server.native.info import answer_in_time

router = new_router()


class AbortBody(Body):
    """What `/abort_request` takes."""

    REFUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("finished_reason", "abort_message"), "an aborted answer says that it was aborted, and nothing else"
    )

    rid: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        None, description="Ends the request of that name, and the answers `rid_0`, `rid_1`, ... that were made of it."
    )
    abort_all: bool | None = Field(
        None, description="Ends all requests of this key; with the admin key, or where there are no keys, everybody's."
    )


@router.post("/abort_request")
async def abort_request(body: AbortBody, caller: CurrentCaller, front: ReadyFront) -> Response:
    """Ends requests of the caller's own; their answers finish with the reason "abort".

    200 also where none of that name runs: that it has just ended by itself is no error. `aborted` counts the answers.
    """
    if bool(body.rid) == bool(body.abort_all):
        raise RequestError("exactly one of rid and abort_all must be given", param="rid")
    client = front.client
    if body.abort_all:
        aborted = client.abort_all(None if caller.is_admin else caller.tenant)
    else:
        # Answers to a list, or to n > 1, have the name of their request with numbers behind it.
        name = re.compile(re.escape(body.rid or "") + r"(_[0-9]+){0,2}")
        rids = [rid for rid in client.live_rids(caller.tenant) if name.fullmatch(rid)]
        aborted = sum(client.abort(rid, caller.tenant) for rid in rids)
    return json_response({"success": True, "aborted": aborted})


@router.post("/flush_cache")
async def flush_cache(caller: CurrentCaller, front: ReadyFront) -> Response:
    """Empties everybody's prefix cache, or refuses with 400 while requests run or wait. For admins.

    Of several engines it empties those that are idle, and refuses where another is not.
    """
    _check_admin(caller, "/flush_cache touches what all keys share")
    if not await answer_in_time(front, front.client.flush_cache()):
        rest = "; engines that were idle have done so" if len(front.client.engines) > 1 else ""
        raise RequestError(f"the cache can be flushed only while no request runs or waits; try again later{rest}")
    return json_response({"success": True, "message": "the prefix cache is empty"})


class RadixQuery(BaseModel):
    """How much `/debug/radix` shows."""

    model_config = ConfigDict(extra="forbid")

    depth: int = Field(8, ge=1, le=MAX_DEPTH, description="Levels below a namespace.")
    nodes: int = Field(1000, ge=1, le=MAX_NODES, description="Namespaces and nodes, at most.")


@router.get("/debug/radix")
async def radix(query: Annotated[RadixQuery, Query()], caller: CurrentCaller, front: ReadyFront) -> Response:
    """The shape of the prefix cache: lengths, locks, ages; no text, no tokens, namespaces as digests. For admins.

    Of several engines under `engines`, in the order of their numbers.
    """
    _check_admin(caller, "/debug/radix shows what all keys share")
    return json_response(await answer_in_time(front, front.client.dump_cache(query.depth, query.nodes)))


def _check_admin(caller: Caller, why: str) -> None:
    if not caller.is_admin:
        raise ForbiddenError(f"{why}, and this key may not; use the key of --admin-api-key")
