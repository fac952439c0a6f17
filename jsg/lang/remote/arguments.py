"""Makes fields of a request from the arguments of a gen. Each is honoured, or refused by its name."""

import json
import warnings
from collections.abc import Mapping
from typing import Any, final

from jsg.errors import RequestError, UnsupportedError
from jsg.lang.words.backend import OnUnsupported
from jsg.lang.words.ir import PUBLISHED, SamplingArgs, check_forms
from jsg.lang.words.patterns import DTYPE_PATTERNS

_STRUCTURAL = frozenset(
    {"max_tokens", "n", "stop", "temperature", "return_logprob", "top_logprobs_num", "return_text_in_logprobs"}
)
"""The arguments that sessions handle. The others are fields of a request, or not supported."""


@final
class Unsupported:
    """Refuses the arguments that a backend cannot honour, or leaves them out with a warning, once per argument."""

    def __init__(self, backend: str, policy: OnUnsupported):
        if policy not in ("error", "warn"):
            raise RequestError(f'on_unsupported must be "error" or "warn", but got {policy!r}', "on_unsupported")
        self.backend = backend
        self._policy = policy
        self._warned: set[str] = set()

    def leave_out(self, argument: str, remedy: str) -> None:
        """Warns, the first time. Raises UnsupportedError unless `on_unsupported="warn"`."""
        message = f"{self.backend} cannot honour {argument}: {remedy}"
        if self._policy == "error":
            raise UnsupportedError(f'{message}, or leave it out with on_unsupported="warn"', argument)
        if argument not in self._warned:
            self._warned.add(argument)
            warnings.warn(f"{message}; it is left out", stacklevel=2)


def normalised(args: SamplingArgs) -> SamplingArgs:
    """Gives arguments with None for values that ask for nothing, and with `max_tokens` and `temperature` set.

    Raises:
        RequestError: Several arguments give the form of the answer, or `top_logprobs_num` is without `return_logprob`.
    """
    asked = args.asked().given()
    check_forms(asked)
    if "top_logprobs_num" in asked and "return_logprob" not in asked:
        raise RequestError(
            f"top_logprobs_num must be left out without return_logprob, but got {asked['top_logprobs_num']}; ask for "
            "return_logprob too",
            "top_logprobs_num",
        )
    return SamplingArgs(**asked).over(PUBLISHED)


def request_fields(args: SamplingArgs, names: Mapping[str, str], unsupported: Unsupported) -> dict[str, Any]:
    """Gives the arguments that are fields of a request.

    Args:
        args: The normalised arguments.
        names: The field of each argument; a dot leads into an object. A `dtype` is sent as the `regex` of its type.
            `response_format` and `output_config` take a schema in the form of OpenAI and Anthropic.
        unsupported: Refuses the other arguments.

    Raises:
        UnsupportedError: An argument has no field.
        RequestError: A schema is not JSON.
    """
    fields: dict[str, Any] = {}
    for argument, value in args.given().items():
        if argument in _STRUCTURAL:
            continue
        source = "regex" if argument == "dtype" else argument
        if source not in names:
            unsupported.leave_out(argument, "say it in the prompt, use a backend that can (jsg's own can)")
            continue
        if argument == "dtype":
            value = DTYPE_PATTERNS[value]
        put_field(fields, names[source], list(value) if isinstance(value, tuple) else value)
    return fields


def put_field(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Sets a field; gives all fields. Raises RequestError where a schema is not JSON."""
    match path:
        case "response_format":
            schema = {"name": "answer", "schema": _schema(value), "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        case "output_config":
            fields["output_config"] = {"format": {"type": "json_schema", "schema": _schema(value)}}
        case "structured_outputs.json":
            fields["structured_outputs"] = {"json": _schema(value)}
        case _ if "." in path:
            outer, inner = path.split(".", 1)
            fields.setdefault(outer, {})[inner] = value
        case _:
            fields[path] = value
    return fields


def _schema(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"json_schema must be JSON, but {error}", "json_schema") from None
