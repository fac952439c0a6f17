"""Bodies of requests: JSON, read strictly.

JSON that two readers could understand differently, or that cannot be text for a model, is refused: names given twice,
numbers that are not finite, half of a character. A NUL is text: models write it, and schemas name it. jiter, pydantic's
parser, refuses such JSON and says the line; then Python's reader, which takes it, is used to find the place in the
value. A large body is parsed and checked in a thread, where it does not delay other requests.
"""

import dataclasses
import email.message
import functools
import json
import math
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any, cast, final

import jiter
from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jsg.errors import RequestError, place_name
from jsg.server.caller import caller_of, state_of
from jsg.server.http.body import CHUNK, Body
from jsg.server.http.event_stream import until_disconnect
from jsg.server.http.field_rules import HEADER, FieldRules, log_new
from jsg.server.http.validation import describe_invalid
from jsg.server.text_threads import LONG_BYTES

MAX_DEPTH = 64  # of lists and objects in each other; code that reads the value later may recurse
MAX_PARTS = 2**16  # lists, objects and names; a million of them stop the whole process while garbage is collected
MAX_TEXTS = 2**17  # names too; the parser makes all of a list in one go, and a million take it 50 ms
MAX_DIGITS = 4300  # of an integer: jiter's limit, and Python's
MAX_INLINE_BYTES = 2**15  # a larger body is parsed in a thread, which costs 0.1 ms
MAX_QUOTE_CHARS = 40

type _Path = tuple[str | int, ...]


def new_router() -> APIRouter:
    """A router whose endpoints read their bodies as this module does."""
    return APIRouter(route_class=JsonRoute)


async def _body_bytes(request: Request) -> int:
    return state_of(request.scope)["body_bytes"]


BodyBytes = Annotated[int, Depends(_body_bytes)]
"""The size of the body of a request, for an endpoint of `new_router`."""


async def _field_rules(request: Request) -> FieldRules:
    return state_of(request.scope)["field_rules"]


CurrentRules = Annotated[FieldRules, Depends(_field_rules)]
"""The rules for the fields of a body, for an endpoint that can tell only later whether a field has an effect."""


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object that the bytes hold. Raises RequestError, which names the field where there is one."""
    if _num_texts(raw) > MAX_TEXTS:
        raise RequestError(f"the body must have at most {MAX_TEXTS} texts, but has more; send several requests")
    if _num_parts(raw) > MAX_PARTS:
        raise RequestError(
            f"the body must have at most {MAX_PARTS} lists, objects and names, but has more; send several requests"
        )
    try:
        value = jiter.from_json(raw, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="none")
        _inspect(value, _PLAIN | {str})  # jiter reads 1e999 as infinity, and takes more levels
    except ValueError:
        value = _read_with_faults(raw)
        _inspect(value, _PLAIN)
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, but got {_quote(raw.decode())}; send {{...}}")
    return value


def _read_with_faults(raw: bytes) -> Any:
    """The value of what jiter has refused, with a `_Fault` for each thing that is wrong in it. Raises RequestError."""
    try:
        text = raw.decode()
        if text.startswith("\ufeff"):
            raise RequestError(
                "the body must begin with its JSON object, but begins with a byte order mark; leave it out"
            )
        return _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body must be UTF-8, but byte {error.start} is not: {error.reason}; encode it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body must be JSON, but it is not: {error.msg} at character {error.pos}; correct it"
        ) from None
    except RecursionError:
        raise _too_deep("the body") from None


@final
class JsonRoute(APIRoute):
    """A route whose body, if it takes one, is read, parsed and checked here.

    Its endpoint gives a `Response`, and has no arguments but its body, the request and what depends on the request. So
    it is called directly: FastAPI's way of finding the arguments takes longer than many answers.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that answers a request of this route."""
        if self.body_field is None:
            return super().get_route_handler()
        asked, annotation = self.dependant, self.body_field.field_info.annotation
        assert annotation is not None and not (asked.path_params or asked.query_params)
        content_type, [body] = TypeAdapter[Any](annotation), asked.body_params
        needs = [(str(each.name), cast(Any, each.call)) for each in asked.dependencies]

        async def answer(request: Request, content: object) -> Response:
            arguments: dict[str, Any] = {name: await call(request) for name, call in needs}
            if asked.request_param_name is not None:
                arguments[asked.request_param_name] = request
            return await self.endpoint(**arguments, **{body.name: content})

        async def read_and_answer(request: Request) -> Response:
            state, headers = request.app.state, request.headers
            num_media_bytes = state.door.media_body_bytes
            raw = await _read(request, state.max_request_bytes + num_media_bytes)
            if state.door.front is not None:  # a thousand requests that come at once are not read at once
                await state.door.front.generator.share.turn(caller_of(request.scope).tenant)
            _check_kind(headers.get("content-encoding", "identity"), headers.get("content-type", ""))
            if not raw:
                raise RequestError("the body must be a JSON object, but it is empty; send {...}")
            rules = FieldRules(is_strict=state.strict_fields)
            validate = functools.partial(_validate, raw, content_type, state.max_request_bytes, rules)
            is_inline = len(raw) <= MAX_INLINE_BYTES
            content = validate() if is_inline else await state.door.threads.run(validate, len(raw))
            names = content.client_names() if isinstance(content, Body) else None
            state_of(request.scope).update(body_bytes=len(raw), field_rules=rules, client_names=names)
            answering = answer(request, content)
            # Long texts and pictures wait in queues, and those of a client that has left must not make others wait. A
            # short body may name a picture that takes long.
            is_short = len(raw) <= LONG_BYTES and not num_media_bytes
            response = await (answering if is_short else until_disconnect(request, answering))
            if rules.warnings:
                response.headers[HEADER] = "; ".join(rules.warnings)
                log_new(rules.warnings, request.url.path, state.logged_warnings)
            return response

        return read_and_answer


def _validate(raw: bytes, content_type: TypeAdapter[Any], limit: int, rules: FieldRules) -> object:
    value = parse_json(raw)
    if len(raw) > limit and len(raw) - _num_media_chars(value) > limit:
        raise HTTPException(
            413,
            f"the body must have at most {limit} bytes without its pictures and videos, but has more; send less text, "
            "or raise --max-request-bytes",
        )
    try:
        return content_type.validate_python(value, context=rules)
    except ValidationError as error:
        raise RequestError(*describe_invalid(error.errors(include_url=False), value)) from None


async def _read(request: Request, limit: int) -> bytes:
    """The body, of which no more than `limit` bytes are ever kept. Raises HTTPException when there are more."""
    rule = f"the body must have at most {limit} bytes, but has more"
    too_large = HTTPException(413, f"{rule}; send less, or raise --max-request-bytes")
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


@functools.lru_cache(64)
def _check_kind(encoding: str, given: str) -> None:
    """Raises HTTPException for a body whose `Content-Encoding` and `Content-Type` do not say that it is plain JSON.

    This check also keeps other sites' pages out: a browser asks for permission before it sends JSON across sites.
    """
    if (encoding := encoding.strip().lower()) != "identity":
        raise HTTPException(415, f"Content-Encoding must be identity, but got {_quote(encoding)}; send it uncompressed")
    parsed = email.message.Message()
    parsed["content-type"] = given
    kind, charset = parsed.get_content_type(), parsed.get_param("charset", "utf-8")
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not given or not is_json or str(charset).lower() not in ("utf-8", "utf8", "us-ascii"):
        shown = _quote(given) if given else "none"
        remedy = "send 'Content-Type: application/json' (with curl: -H 'Content-Type: application/json')"
        raise HTTPException(415, f"Content-Type must be application/json, in UTF-8, but got {shown}; {remedy}")


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Fault:
    """Stands in the parsed value for something that must be refused, until `_inspect` has found its place."""

    rule: str
    received: object


def _integer(text: str) -> int | _Fault:
    num_digits = len(text.removeprefix("-"))
    return int(text) if num_digits <= MAX_DIGITS else _Fault(f"a number of at most {MAX_DIGITS} digits", num_digits)


def _float(text: str) -> float | _Fault:
    return value if math.isfinite(value := float(text)) else _Fault("a finite number", text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        made[twice] = _Fault("given once in its object", "it twice")
    return made


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_float, object_pairs_hook=_object)
_MEDIA_NAMES = frozenset(("url", "image_url", "video_url", "image_data", "video_data"))
_TYPED_MEDIA_NAMES = frozenset(("data", "image", "video"))  # where `media_type` stands beside them
_PART_SIGNS = (b"[", b"{", b":")
_PLAIN = frozenset({int, bool, type(None)})


def _num_texts(raw: bytes) -> int:
    """How many texts JSON has, names too. Quotes inside texts count only if that makes no difference."""
    at_most = raw.count(b'"') // 2
    return at_most if at_most <= MAX_TEXTS else _without_escapes(raw).count(b'"') // 2


def _num_parts(raw: bytes) -> int:
    """How many lists, objects and names JSON text has. Signs inside strings count only if that makes no difference."""
    at_most = sum(map(raw.count, _PART_SIGNS))
    if at_most <= MAX_PARTS:
        return at_most
    outside = b"".join(_without_escapes(raw).split(b'"')[::2])
    return sum(map(outside.count, _PART_SIGNS))


def _without_escapes(raw: bytes) -> bytes:
    """JSON without the quotes that are inside its texts."""
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"")


def _num_media_chars(root: dict[str, Any]) -> int:
    """The characters of all files in a body, which the names of their fields in the various APIs tell."""
    waiting: list[Any] = [root]
    count = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += (item for item in value if isinstance(item, dict | list))
        for name, item in value.items() if isinstance(value, dict) else ():
            is_media = name in _MEDIA_NAMES or (name in _TYPED_MEDIA_NAMES and "media_type" in value)
            if is_media and isinstance(item, str | list):
                count += _num_chars(item)
            elif isinstance(item, dict | list):
                waiting.append(item)
    return count


def _num_chars(value: Any) -> int:
    """The characters of a text, or of all texts in a list."""
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return len(value) if isinstance(value, str) else 0


def _inspect(root: Any, sound: frozenset[type]) -> None:
    """Raises RequestError for the first fault, for text that is not valid and for deep nesting, and names the place.

    Values of the types `sound` are right. Raises ValueError for a number that is not finite, whose text is not known.
    """
    waiting: list[tuple[_Path, Any]] = [((), root)] if isinstance(root, dict) else []
    while waiting:
        path, container = waiting.pop()
        if len(path) >= MAX_DEPTH:
            raise _too_deep(_name(path[:1]))
        if isinstance(container, list):
            members = _not_sound(container, sound)
        else:
            for name in () if str in sound else container:
                _check_text(name, path, "a name in ")
            members = container.items()
        for key, value in members:
            if isinstance(value, dict | list):
                waiting.append(((*path, key), value))
            elif type(value) in sound:
                pass
            elif isinstance(value, str):
                _check_text(value, (*path, key))
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError
            elif isinstance(value, _Fault):
                place = (*path, key)
                message = f"{_name(place)} must be {value.rule}, but got {value.received}; correct it"
                raise RequestError(message, str(place[0]))


def _not_sound(values: list[Any], sound: frozenset[type]) -> Iterator[tuple[int, Any]]:
    """The items of a list with their indices, without chunks of sound ones. Other threads get turns between chunks."""
    for start in range(0, len(values), CHUNK):
        kinds = set(map(type, chunk := values[start : start + CHUNK]))
        if not (kinds <= sound or (kinds == {float} and all(map(math.isfinite, chunk)))):
            yield from enumerate(chunk, start)


def _check_text(text: str, path: _Path, where: str = "") -> None:
    """Raises RequestError for text that UTF-8 cannot express."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = (
            f"{where}{_name(path)} must be text, but has half of a surrogate pair at character {error.start}; "
            "remove or replace it"
        )
        raise RequestError(message, str(path[0]) if path else None) from None


def _name(path: _Path) -> str:
    return place_name(path) or "the body"


def _too_deep(where: str) -> RequestError:
    return RequestError(f"{where} must have at most {MAX_DEPTH} levels of lists and objects, but has more; nest less")


def _quote(text: str) -> str:
    return repr(text) if len(text) <= MAX_QUOTE_CHARS else repr(text[:MAX_QUOTE_CHARS]) + "..."
