"""Begins the generation of an HTTP request."""

from collections.abc import Sequence

from starlette.requests import Request

from jsg.server.caller import ApiCall, state_of
from jsg.server.front import Front
from jsg.server.generation import Generation
from jsg.server.http.event_stream import until_disconnect
from jsg.server.http.field_rules import FieldRules
from jsg.speech.answers.answer import Prompt


async def begin(request: Request, front: Front, call: ApiCall, prompts: Sequence[Prompt]) -> Generation:
    """Gives the same as `Generator.begin`, unless the client leaves while stop patterns are compiled.

    The rules of the request's fields take note of token ids that no token has.

    Raises:
        ClientDisconnect: It has left.
        JsgError: As `Generator.begin`.
    """
    rules: FieldRules = state_of(request.scope)["field_rules"]
    size = front.generator.info.vocab_size
    for sampling in {id(prompt.sampling): prompt.sampling for prompt in prompts}.values():
        for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", dict(sampling.logit_bias))):
            if any(token >= size for token in ids):
                rules.note(f"an id in {name} that is outside the vocabulary", "no token has it; leave it out")
    beginning = front.generator.begin(call, prompts)
    if not any(prompt.sampling.stop_regex for prompt in prompts):
        return await beginning  # which waits for turns of the event loop at most
    return await until_disconnect(request, beginning)
