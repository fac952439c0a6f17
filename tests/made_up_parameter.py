"""`python -m tests.made_up_parameter`: adds a parameter to the table, and prints as JSON where it then appears.

It runs in a process of its own, because the modules of jsg read the table when they are loaded.
"""

import json
from typing import Any, get_args

from jsg import parameters

NAME = "sharpness"
HELP = "How sharp the answer is."


def error_of(make: Any) -> str | None:
    """The message with which something is refused."""
    from jsg.errors import JsgError

    try:
        make()
    except JsgError as error:
        return str(error)
    return None


def in_language() -> dict[str, Any]:
    from jsg.lang.graphs.codec import sampling_from_dict, sampling_to_dict
    from jsg.lang.program.primitives import sampling_args
    from jsg.lang.program.run_args import take_run_args
    from jsg.lang.tokens.session import sampling_of

    args = sampling_args(**{NAME: 2})
    return {
        "gen": args.given(),
        "gen refuses": error_of(lambda: sampling_args(**{NAME: "very"})),
        "run": take_run_args({NAME: 3, "other": 1})[0].given(),
        "run with the neutral value": take_run_args({NAME: 1.0})[0].given(),
        "graph": sampling_to_dict(sampling_from_dict({NAME: 4.0})),
        "graph refuses": error_of(lambda: sampling_from_dict({NAME: "very"})),
        "session": sampling_of(args),
    }


def to_others() -> dict[str, Any]:
    from jsg.lang.program.primitives import sampling_args
    from jsg.lang.remote.ahead import could_be_shared
    from jsg.lang.remote.anthropic_wire import MessagesApi
    from jsg.lang.remote.arguments import Unsupported, normalised, request_fields
    from jsg.lang.remote.dialects import DIALECTS
    from jsg.lang.remote.wire import Call

    args, unsupported = normalised(sampling_args(**{NAME: 2})), Unsupported("the API", "error")
    messages: Any = MessagesApi(None, "model", unsupported, prefill=True, sampling=True)  # pyright: ignore[reportArgumentType]
    sent = {name: request_fields(args, dialect.chat_fields, unsupported) for name, dialect in DIALECTS.items()}
    return sent | {
        "anthropic": messages._arguments(Call(prompt="a", args=args), has_begun=False)["extra_body"],
        "shares a call": could_be_shared(args),
    }


def in_bodies() -> dict[str, Any]:
    from jsg.server.anthropic.body import MessagesBody
    from jsg.server.native.sampling import to_samplings
    from jsg.server.openai.chat import ChatBody
    from jsg.server.openai.completions import CompletionBody
    from jsg.server.openai.responses_body import ResponsesBody
    from jsg.speech.prompts.chat_template import ChatTemplate
    from jsg.speech.reply_plan import ReplyPlan
    from jsg.speech.rules.tool_use import Speech

    plan = ReplyPlan(Speech(ChatTemplate("", bos_token=None, eos_token=None), dialect=None, special=frozenset()))
    messages = [{"role": "user", "content": "a"}]
    chat = ChatBody.model_validate({"messages": messages, NAME: 2})
    text = CompletionBody.model_validate({"prompt": "a", NAME: 3})
    response = ResponsesBody.model_validate({"input": "a", NAME: 4})
    message = MessagesBody.model_validate({"messages": messages, "max_tokens": 8, NAME: 5})
    samplings = {
        "chat": chat._to_sampling(8, plan),
        "completions": text._to_sampling(8, plan),
        "responses": response.to_sampling(8, plan),
        "messages": message.to_sampling(plan),
        "generate": to_samplings({NAME: 6}, [1], 64)[0],
    }
    described = ChatBody.model_json_schema()["properties"][NAME]["description"]
    refused = error_of(lambda: to_samplings({NAME: 10}, [1], 64))
    return {name: getattr(sampling, NAME) for name, sampling in samplings.items()} | {
        "described": described,
        "generate refuses": refused,
    }


def in_steps() -> dict[str, Any]:
    """What an engine's step samples by, what the server says of its model, and what the page offers."""
    import numpy as np

    from jsg.engine.device.packing import sampling_row
    from jsg.engine.device.step import SAMPLING_COLUMNS, unpack_sampling
    from jsg.server.openai.models import DEFAULTS
    from jsg.server.page.routes import page_files
    from jsg.types import SamplingParams

    packed = np.zeros((1, SAMPLING_COLUMNS), np.int32)
    packed[0, 2:] = sampling_row(SamplingParams(**{NAME: 7}), 0, 100)
    numbers = page_files()["/page/parameters.js"].content.decode().splitlines()[0]
    return {
        "step": float(unpack_sampling(packed).numbers[NAME][0]),
        "models": DEFAULTS[NAME],
        "page": json.loads(numbers.partition(" = ")[2].rstrip(";"))[-1],
    }


def main() -> None:
    made_up = parameters.Parameter(
        NAME,
        parameters.Number(0, 9, "in [0, 9]"),
        1.0,
        get_args(parameters.Interface),
        remote=get_args(parameters.Remote),
        is_stateless=True,
        is_in_steps=True,
        help=HELP,
    )
    parameters.PARAMETERS += (made_up,)  # before any other module of jsg is loaded
    print(json.dumps({"language": in_language(), "others": to_others(), "bodies": in_bodies(), "steps": in_steps()}))


if __name__ == "__main__":
    main()
