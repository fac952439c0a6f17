"""The events of a response that is streamed."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from jsg.errors import JsgError
from jsg.server.generation import Generation
from jsg.server.http.event_stream import Event, EventForm, Events, Write
from jsg.server.http.failures import error_body
from jsg.server.openai.responses_reply import TEXT, Object, Reply
from jsg.speech.answers.answer import AnswerDelta


async def events_of(
    reply: Reply, generation: Generation, on_end: Callable[[Object], Awaitable[Object]], write: Write
) -> AsyncGenerator[Events]:
    """The events of a response, in OpenAI's order; the first comes with the first token.

    Args:
        reply: The response.
        generation: Of its one answer.
        on_end: Takes the response that has ended; returns the response that the client is shown.
        write: Sends an event at once.

    Raises:
        JsgError: The answer failed before the first event. The last events show a later failure.
    """
    number, forms = 0, dict[str, EventForm]()  # of the texts of each message

    def event(kind: str, /, **fields: Any) -> Event:
        nonlocal number
        number += 1
        return {"type": kind, "sequence_number": number - 1, **fields}

    def send(delta: AnswerDelta) -> bool:
        nonlocal number
        message, text = reply.items[-1], delta.only_text
        form = forms.get(message.item_id)
        if not text or form is None or not write(form.fill(number, text)):
            return False
        number += 1
        message.grown.append(text)
        return True

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
                        deltas.senders[0] = send
                    number += 1
                    yield form.fill(number - 1, fields["delta"])
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
