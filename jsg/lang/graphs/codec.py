"""Writes the parts of a graph as JSON, and reads them, by the types of the fields of their dataclasses.

    node       {"kind": "append", "id", "stream", "line", and the fields of its dataclass}
    piece      "text" · {"argument": name} · {"node": id, "name": variable, "index": i}
    value      {"text": [piece], "is_text": true} · {"list": [value]} · {"tuple": [value]} · {"dict": {key: value}} ·
               {"constant": 1} · {"variable": ref} · {"state": stream, "variables": {name: value}}
    condition  {"equals": [text, text]} · {"contains": [text, text]} · {"matches": [text, pattern]} · {"not": c} ·
               {"all": [c]} · {"any": [c]}      (a text is a list of pieces)
    media      {"image": base64, "media_type"} · {"video": base64, "media_type", "num_frames"} · {"argument": name}

Fields that hold their default are left out. Reading is strict, so that a graph of a later version or with a mistake is
refused and never half run: a field that is unknown, missing, of a wrong type or out of range is a GraphError.
"""

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Never

from jsg.errors import GraphError, RequestError
from jsg.lang.graphs.nodes import (
    AllOf,
    AnyNode,
    AnyOf,
    ArgumentRef,
    Block,
    Condition,
    Constant,
    ConstantValue,
    Contains,
    DictValue,
    Equals,
    ListValue,
    Matches,
    Not,
    Piece,
    StateValue,
    TextValue,
    TupleValue,
    Value,
    Values,
    VariableValue,
    kind_of,
)
from jsg.lang.words.ir import Image, SamplingArgs, Video
from jsg.processing.media.base64_files import read_base64, write_base64

MAX_DEPTH = 32
"""The largest depth of blocks in blocks, values in values and conditions in conditions."""
_MAX_SHOWN = 40  # characters of a refused text
_MAX_ABS = 2**53  # the whole numbers that every JSON reader keeps exactly

_TAGS: dict[type, str] = {
    ArgumentRef: "argument",
    TextValue: "text",
    ListValue: "list",
    TupleValue: "tuple",
    DictValue: "dict",
    ConstantValue: "constant",
    VariableValue: "variable",
    StateValue: "state",
    Equals: "equals",
    Contains: "contains",
    Matches: "matches",
    Not: "not",
    AllOf: "all",
    AnyOf: "any",
    Image: "image",
    Video: "video",
}
"""The key that stands for the name of a part's first field, and tells the kind of the part."""
_LISTED = (Equals, Contains, Matches)  # the tag holds a list of all fields


def write(kind: Any, value: Any) -> Any:
    """Gives a part of a graph in the form that `json.dumps` takes.

    Args:
        kind: The declared type of the part: a dataclass of `nodes`, a union of some, a tuple, ....
        value: The part.
    """
    return _form(kind).write(value)


def read(kind: Any, source: Any, what: str, location: "Location") -> Any:
    """Reads what `write` gives.

    Args:
        kind: The declared type, as in `write`.
        source: A parsed JSON value.
        what: The field that holds the value, for messages.
        location: The location of the field.

    Raises:
        GraphError: The value is of another kind.
    """
    return _form(kind).read(source, what, location)


class Location(NamedTuple):
    """A location in a graph that is read.

    Attributes:
        name: Its name in messages.
        depth: The number of blocks, values and conditions around it.
    """

    name: str
    depth: int = 0

    def fail(self, rule: str) -> Never:
        """Raises GraphError for this location."""
        raise GraphError(f"{self.name}: {rule}", param="graph")

    def refuse(self, rule: str, source: Any) -> Never:
        """Raises GraphError for a value, which the message shows if it is short."""
        self.fail(f"{rule}, but got {_shown(source)}")

    def deeper(self) -> "Location":
        """Gives the location one level deeper. Raises GraphError below the largest depth."""
        if self.depth == MAX_DEPTH:
            self.fail(f"blocks, values and conditions may be nested {MAX_DEPTH} deep at most")
        return Location(self.name, self.depth + 1)

    def check_keys(self, source: Any, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Raises GraphError for a value that is no object, lacks a field or has an unknown one."""
        if not isinstance(source, dict):
            self.refuse(f"expected an object with the fields {', '.join(required)}", source)
        missing = [name for name in required if name not in source]
        unknown = [str(name) for name in source if name not in required and name not in optional]
        if missing or unknown:
            rules = [f"the field {name!r} is missing" for name in missing[:1]]
            self.fail(" and ".join(rules + [f"there is no field {name[:40]!r}" for name in unknown[:1]]))


def _shown(source: Any) -> str:
    match source:
        case str():
            return repr(source if len(source) <= _MAX_SHOWN else f"{source[:_MAX_SHOWN]}...")
        case None | bool():
            return {None: "null", True: "true", False: "false"}[source]
        case int() if abs(source) > _MAX_ABS:
            return "one that is larger"
        case int() | float():
            return repr(source)
    return "a list" if isinstance(source, list) else "an object"


class _Form(NamedTuple):
    """How values of a type are read from JSON and written."""

    read: Callable[[Any, str, Location], Any]
    write: Callable[[Any], Any] = lambda value: value


@functools.cache
def _form(kind: Any) -> _Form:
    if kind in _FORMS:
        return _FORMS[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind == AnyNode:
        return _node(inner)
    if kind in (Value, Condition):
        return _deeper(_choice(inner))
    if dataclasses.is_dataclass(kind):
        return _deeper(_record(Block)) if kind is Block else _record(typing.cast(type, kind))
    if origin is Literal:
        return _one_of(inner)
    if origin is tuple:
        return _many(_form(inner[0])) if inner[-1] is Ellipsis else _row(tuple(map(_form, inner)))
    if type(None) in inner:
        return _optional(_form(_without_none(kind)))
    return _choice(inner)


def _without_none(kind: Any) -> Any:
    return functools.reduce(operator.or_, (inner for inner in typing.get_args(kind) if inner is not type(None)))


# Parts: objects whose fields are those of a dataclass.


class _Field(NamedTuple):
    name: str
    key: str
    form: _Form
    default: Any
    is_required: bool


class _Fields(NamedTuple):
    """The fields of a dataclass, and their keys."""

    all: tuple[_Field, ...]
    required: tuple[str, ...]
    optional: frozenset[str]

    def read(
        self, source: Mapping[str, Any], location: Location, start: int = 0, end: int | None = None
    ) -> dict[str, Any]:
        """Reads some of the fields of an object, whose keys were checked."""
        return {
            name: form.read(source[key], key, location)
            for name, key, form, _, _ in self.all[start:end]
            if key in source
        }

    def write(self, part: Any) -> dict[str, Any]:
        """Writes all fields but those that hold their default."""
        values = [(field, getattr(part, field.name)) for field in self.all]
        return {
            field.key: field.form.write(value) for field, value in values if field.is_required or value != field.default
        }


@functools.cache
def _fields(kind: type) -> _Fields:
    types, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    keys = [_key(kind), *(field.name for field in fields[1:])]
    found = tuple(
        _Field(field.name, key, _form(types[field.name]), field.default, field.default is dataclasses.MISSING)
        for field, key in zip(fields, keys, strict=True)
    )
    required = tuple(field.key for field in found if field.is_required)
    return _Fields(found, required, frozenset(field.key for field in found if not field.is_required))


def _key(kind: type) -> str:
    return _TAGS.get(kind) or dataclasses.fields(kind)[0].name


def _record(kind: type) -> _Form:
    def read(source: Any, what: str, location: Location) -> Any:
        fields = _fields(kind)
        location.check_keys(source, fields.required, fields.optional)
        return kind(**fields.read(source, location))

    return _Form(read, lambda part: _fields(kind).write(part))


def _node(kinds: Iterable[type]) -> _Form:
    by_name = {kind.__name__.lower(): kind for kind in kinds}

    def read(source: Any, what: str, location: Location) -> Any:
        if not isinstance(source, dict):
            location.refuse("a node must be an object", source)
        name, number = source.get("kind"), source.get("id")
        is_number = isinstance(number, int) and abs(number) <= _MAX_ABS
        location = Location(f"node {number if is_number else '?'}", location.depth)
        if not isinstance(name, str) or name not in by_name:
            location.refuse(f"kind must be one of {', '.join(by_name)}", name)
        fields = _fields(by_name[name])
        location.check_keys(source, ("kind", *fields.required), fields.optional)
        common = fields.read(source, location, 0, 3)  # every node has these, and messages name it by them
        location = Location(f"node {number} ({name}, {common['line']})", location.depth)
        return by_name[name](**common, **fields.read(source, location, 3))

    return _Form(read, lambda node: {"kind": kind_of(node), **_fields(type(node)).write(node)})


def _listed(kind: type) -> _Form:
    tag = _TAGS[kind]

    def read(source: Any, what: str, location: Location) -> Any:
        location.check_keys(source, [tag])
        return kind(*row().read(source[tag], tag, location))

    def row() -> _Form:
        return _row([field.form for field in _fields(kind).all])

    return _Form(read, lambda part: {tag: row().write([getattr(part, field.name) for field in _fields(kind).all])})


def _choice(kinds: Sequence[type]) -> _Form:
    """Gives the form for one of several kinds of parts, which have different keys, or for text."""
    parts = [kind for kind in kinds if kind is not str]
    forms = {
        kind: _MEDIA if kind in (Image, Video) else (_listed if kind in _LISTED else _record)(kind) for kind in parts
    }
    by_key = {_key(kind): form for kind, form in forms.items()}
    rule = f"expected an object with one of the fields {', '.join(by_key)}{', or text' if str in kinds else ''}"

    def read(source: Any, what: str, location: Location) -> Any:
        if str in kinds and isinstance(source, str):
            return _text(source, what, location)
        keys = by_key.keys() & source if isinstance(source, dict) else ()
        return by_key[keys.pop()].read(source, what, location) if len(keys) == 1 else location.refuse(rule, source)

    return _Form(read, lambda part: part if isinstance(part, str) else forms[type(part)].write(part))


def _deeper(form: _Form) -> _Form:
    return _Form(lambda source, what, location: form.read(source, what, location.deeper()), form.write)


# What fields hold.


def _optional(form: _Form) -> _Form:
    return _Form(
        lambda source, what, location: None if source is None else form.read(source, what, location),
        lambda value: None if value is None else form.write(value),
    )


def _many(form: _Form) -> _Form:
    read = form.read
    return _Form(
        lambda source, what, location: tuple([read(item, what, location) for item in _array(source, what, location)]),
        lambda items: [form.write(item) for item in items],
    )


def _row(forms: Sequence[_Form]) -> _Form:
    def read(source: Any, what: str, location: Location) -> Any:
        if len(_array(source, what, location)) != len(forms):
            location.fail(f"{what} must be a list of {len(forms)}, but got {len(source)} items")
        return tuple(form.read(item, what, location) for form, item in zip(forms, source, strict=True))

    return _Form(read, lambda row: [form.write(item) for form, item in zip(forms, row, strict=True)])


def _one_of(values: Sequence[str]) -> _Form:
    def read(source: Any, what: str, location: Location) -> Any:
        if not isinstance(source, str) or source not in values:
            location.refuse(f"{what} must be one of {', '.join(values)}", source)
        return source

    return _Form(read)


def _array(source: Any, what: str, location: Location) -> list[Any]:
    return source if isinstance(source, list) else location.refuse(f"{what} must be a list", source)


def _text(source: Any, what: str, location: Location) -> str:
    if not isinstance(source, str):
        location.refuse(f"{what} must be text", source)
    try:
        source.encode()
    except UnicodeEncodeError:
        location.fail(f"{what} must be valid Unicode, but has a lone surrogate")
    return source


def _whole(source: Any, what: str, location: Location, least: int = 0) -> int:
    if not isinstance(source, int) or isinstance(source, bool):
        location.refuse(f"{what} must be a whole number", source)
    if not least <= source <= _MAX_ABS:
        location.refuse(f"{what} must be between {'-2^53' if least else '0'} and 2^53", source)
    return source


def _signed(source: Any, what: str, location: Location) -> int:
    return _whole(source, what, location, -_MAX_ABS)


def _number(source: Any, what: str, location: Location) -> float:
    if not isinstance(source, int | float) or isinstance(source, bool):
        location.refuse(f"{what} must be a number", source)
    if abs(source) > _MAX_ABS or not math.isfinite(source):
        location.refuse(f"{what} must be a finite number, 2^53 at most", source)
    return float(source)


def _flag(source: Any, what: str, location: Location) -> bool:
    return source if isinstance(source, bool) else location.refuse(f"{what} must be true or false", source)


def _constant(source: Any, what: str, location: Location) -> Constant:
    if source is None or isinstance(source, bool):
        return source
    number = _number(source, what, location)
    return source if isinstance(source, int) else number


def _named_values(source: Any, what: str, location: Location) -> Values:
    if not isinstance(source, dict):
        location.refuse(f"{what} must be an object", source)
    read = _form(Value).read
    return tuple((_text(name, what, location), read(value, name, location)) for name, value in source.items())


def _media(source: Any, what: str, location: Location) -> Image | Video:
    kind = "video" if "video" in source else "image"
    location.check_keys(source, (kind, "media_type", "num_frames") if kind == "video" else (kind, "media_type"))
    try:
        data = read_base64(_text(source[kind], kind, location), kind)
    except RequestError as error:
        location.fail(str(error))
    media_type = _text(source["media_type"], "media_type", location)
    if kind == "video":
        return Video(data, _whole(source["num_frames"], "num_frames", location), media_type)
    assert isinstance(data, bytes), "only a video may be frames"
    return Image(data, media_type)


def _written_media(media: Image | Video) -> dict[str, Any]:
    written = {_TAGS[type(media)]: write_base64(media.data), "media_type": media.media_type}
    return written if isinstance(media, Image) else {**written, "num_frames": media.num_frames}


def sampling_from_dict(source: Any) -> SamplingArgs:
    """Reads what `sampling_to_dict` gives. Raises GraphError. The backend checks the ranges of values."""
    return _sampling(source, "sampling_params", Location("sampling_params"))


def sampling_to_dict(args: SamplingArgs) -> dict[str, Any]:
    """Gives the sampling arguments that are not None."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in args.given().items()}


def _sampling(source: Any, what: str, location: Location) -> SamplingArgs:
    if not isinstance(source, dict):
        location.refuse("sampling arguments must be an object", source)
    read = _sampling_readers()
    if unknown := [str(name) for name in source if name not in read]:
        location.fail(f"there is no sampling argument {unknown[0][:40]!r}")
    return SamplingArgs(**{name: read[name](value, name, location) for name, value in source.items()})


@functools.cache
def _sampling_readers() -> dict[str, Callable[[Any, str, Location], Any]]:
    kinds = {name: _without_none(kind) for name, kind in typing.get_type_hints(SamplingArgs).items()}
    return {name: _signed if kind is int else _form(kind).read for name, kind in kinds.items()}


_MEDIA = _Form(_media, _written_media)
_FORMS: dict[Any, _Form] = {
    str: _Form(_text),
    int: _Form(_whole),
    float: _Form(_number),
    bool: _Form(_flag),
    Constant: _Form(_constant),
    Values: _Form(_named_values, lambda values: {name: write(Value, value) for name, value in values}),
    TextValue: _Form(  # where only a text may be, it has no tag
        lambda source, what, location: TextValue(read(tuple[Piece, ...], source, what, location)),
        lambda text: write(tuple[Piece, ...], text.pieces),
    ),
    SamplingArgs: _Form(_sampling, sampling_to_dict),
}
