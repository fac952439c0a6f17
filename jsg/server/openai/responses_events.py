"""The events of a response that is streamed."""

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from jsg.errors import JsgError
from jsg.server.generation import Generation
from jsg.server.http.event_stream import Event, EventForm, Events
from jsg.server.http.failures import error_body
from jsg.server.openai.responses_reply import TEXT, Object, Reply


async def events_of(
    reply: Reply, generation: Generation, on_end: Callable[[Object], Awaitable[Object]]
) -> AsyncGenerator[Events]:
    """The events of a response, in OpenAI's order; the first comes with the first token.

    Args:
        reply: The response.
        generation: Of its one answer.
        on_end: Takes the response that has ended; returns the response that the client is shown.

    Raises:
        JsgError: The answer failed before the first event. The last events show a later failure.
    """
    number, forms = itertools.count(), dict[str, EventForm]()  # of the texts of each message

    def event(kind: str, /, **fields: Any) -> Event:
        return {"type": kind, "sequence_number": next(number), **fields}

    has_begun = False
    try:
        with generation.run() as deltas:
            async for _, delta in deltas:
                if not has_begun:
                    has_begun = True
                    begun = reply.begun()
                    yield event("response.created", response=begun)
                    yield event("response.in_progress", response=begun)
                for kind, fields in reply.take(delta):
                    if kind != TEXT or fields["logprobs"]:
                        yield event(kind, **fields)
                        continue
                    if (form := forms.get(fields["item_id"])) is None:
                        gaps = {"type": kind, "sequence_number": EventForm.GAP, **fields, "delta": EventForm.GAP}
                        form = forms[fields["item_id"]] = EventForm(gaps, named=True)
                    yield form.fill(next(number), fields["delta"])
        endings = list(reply.end())
        ended = await on_end(reply.ended())
    except JsgError as error:
        if not has_begun:
            raise
        failure = error_body(generation.call.route, error)["error"]
        yield event("error", code=failure["code"] or "server_error", message=failure["message"], param=failure["param"])
        yield event("response.failed", response=reply.failed(failure["message"]))
        return
    for kind, fields in endings:
        yield event(kind, **fields)
    yield event(f"response.{ended['status']}", response=ended)
