"""`/metrics`."""

from fastapi import Request
from starlette.responses import PlainTextResponse, Response

from jsg.server.front import FrontDoor
from jsg.server.http.json_body import new_router
from jsg.server.telemetry.telemetry import Telemetry

router = new_router()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Gives counters, gauges and histograms for Prometheus, in its text format or as OpenMetrics.

    Answers within about a second whatever the engine does; `jsg:engine_stats_age_seconds` says how old its values are.
    Answers within 100 ms of each other are the same, unless the request has `Cache-Control: no-cache`.
    """
    telemetry: Telemetry = request.app.state.telemetry
    door: FrontDoor = request.app.state.door
    anew = "no-cache" in request.headers.get("cache-control", "")
    body, media_type = await telemetry.scrape(door, request.headers.get("accept", ""), anew=anew)
    return Response(body, headers={"Content-Type": media_type})
