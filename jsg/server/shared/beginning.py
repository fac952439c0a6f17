"""Begins the generation of an HTTP request."""

from collections.abc import Sequence

from starlette.requests import Request

from jsg.processing.answer import Prompt
from jsg.server.caller import ApiCall
from jsg.server.front import Front
from jsg.server.generation import Generation
from jsg.server.http.event_stream import until_disconnect


async def begin(request: Request, front: Front, call: ApiCall, prompts: Sequence[Prompt]) -> Generation:
    """Gives the same as `Generator.begin`, unless the client leaves while stop patterns are compiled.

    Raises:
        ClientDisconnect: It has left.
        JsgError: As `Generator.begin`.
    """
    beginning = front.generator.begin(call, prompts)
    if not any(prompt.sampling.stop_regex for prompt in prompts):
        return await beginning  # which waits for turns of the event loop at most
    return await until_disconnect(request, beginning)
