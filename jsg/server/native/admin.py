"""Endpoints that abort requests and empty the prefix cache."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints
from starlette.responses import Response

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
        ("finished_reason", "abort_message"), 'an aborted answer always has the reason "abort"; leave it out'
    )

    rid: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        None,
        description="The name of the request to end. Its answers `rid_0`, `rid_1`, ... end too, if it has several.",
    )
    abort_all: bool | None = Field(
        None,
        description="End all requests of this API key. With the admin key, or on a server without keys, the requests "
        "of all clients end.",
    )


@router.post("/abort_request")
async def abort_request(body: AbortBody, caller: CurrentCaller, front: ReadyFront) -> Response:
    """Ends requests of the caller; their answers finish with the reason "abort".

    The status is 200 even if no request of this name runs, because it may just have ended by itself. `aborted` is the
    number of answers that were ended.
    """
    if bool(body.rid) == bool(body.abort_all):
        got = "both" if body.rid else "neither"
        raise RequestError(f"exactly one of rid and abort_all must be given, but got {got}; send one", param="rid")
    client = front.client
    if body.abort_all:
        aborted = client.abort_all(None if caller.is_admin else caller.tenant)
    else:
        # If a request has several answers, each has the name of the request with numbers after it.
        name = re.compile(re.escape(body.rid or "") + r"(_[0-9]+){0,2}")
        rids = [rid for rid in client.live_rids(caller.tenant) if name.fullmatch(rid)]
        aborted = sum(client.abort(rid, caller.tenant) for rid in rids)
    return json_response({"success": True, "aborted": aborted})


@router.post("/flush_cache")
async def flush_cache(caller: CurrentCaller, front: ReadyFront) -> Response:
    """Empties the prefix cache of all keys; answers 400 while requests run or wait. Only admins may call it.

    With several engines it empties the caches of those that are idle, and answers 400 if another engine is not idle.
    """
    check_admin(caller, "/flush_cache touches what all keys share")
    if not await answer_in_time(front, front.client.flush_cache()):
        rest = "; the caches of idle engines were emptied" if len(front.client.engines) > 1 else ""
        raise RequestError(
            f"the cache can be flushed only while no request runs or waits, but some do; try again later{rest}"
        )
    return json_response({"success": True, "message": "the prefix cache is empty"})


def check_admin(caller: Caller, why: str) -> None:
    """Raises ForbiddenError for a caller without the rights of an admin. `why` begins the message."""
    if not caller.is_admin:
        raise ForbiddenError(f"{why}, so it needs the admin key, but got another; use the key of --admin-api-key")
