"""Writes the tables of docs/server.md from the code: `python docs/server_fields.py`.

What stands between the two marker lines of the page is made here; a test compares it with what the code says now.
"""

import dataclasses
import inspect
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jsg.call_styles import LITERAL_MARKS, XML_MARKS
from jsg.config import ServerConfig
from jsg.dialects import DIALECTS, Dialect, Slot
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from jsg.server.http.body import Body
from jsg.server.native.sampling import ACCEPTED_SAMPLING, REFUSED_SAMPLING
from jsg.types import GRAMMAR_FIELDS, GrammarSpec, SamplingParams

PAGE = pathlib.Path(__file__).parent / "server.md"
BEGIN, END = "<!-- made by docs/server_fields.py -->", "<!-- end of what docs/server_fields.py made -->"

LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} items",
    "maxItems": "≤ {} items",
}


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{after}", encoding="utf-8")


def made_part() -> str:
    """What the page holds now between the markers."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip() + "\n"


def tables() -> str:
    """One list of all endpoints, then a table of fields for each that takes a body."""
    routes = [route for route in _routes(create_app(FrontDoor(), ServerConfig())) if route.include_in_schema]
    by_place: dict[Any, list[APIRoute]] = {}
    for route in sorted(routes, key=lambda route: route.path):
        by_place.setdefault(route.endpoint, []).append(route)
    parts = [*_forms_of_calls(), "\n### Endpoints\n", "| method and path | what it does |", "|---|---|"]
    parts += [f"| {_places(group)} | {_first_line(endpoint)} |" for endpoint, group in by_place.items()]
    for group in by_place.values():
        parts += _query_section(_places(group), group[0])
    bodies: dict[type[Body], list[str]] = {}
    for group in by_place.values():
        if body := _body_of(group[0]):
            bodies.setdefault(body, []).append(_places(group))
    seen: set[type[Body]] = set()
    for body, places in bodies.items():
        parts += _section(", ".join(places), body, seen)
    parts += _sampling_table()
    return "\n".join(parts) + "\n"


def _forms_of_calls() -> Iterator[str]:
    """One row for each dialect."""
    yield "### Forms of tool calls\n"
    yield "| `--tool-call-parser` | other names | an answer with calls begins with (`↵` is a line break) |"
    yield "|---|---|---|"
    for dialect in DIALECTS.values():
        text = "".join(map(str, dialect.section[0]))
        shown = {Slot.NAME: "NAME", Slot.NUMBER: "0", Slot.BODY: _head(dialect)}
        for piece in dialect.call:
            text += piece if isinstance(piece, str) else shown.get(piece, "")
            if piece in (Slot.BODY, Slot.ARGUMENTS):
                break
        text = text.replace("\n", "↵").replace("|", "\\|").strip()
        aliases = ", ".join(f"`{name}`" for name in dialect.aliases)
        yield f"| `{dialect.name}` | {aliases} | `{text}` |"


def _head(dialect: Dialect) -> str:
    """What stands before the arguments in the body of a call."""
    if dialect.call_style is None:
        return f'{{"name": "NAME", "{dialect.arguments_key}": '
    marks = XML_MARKS.get(dialect.call_style) or LITERAL_MARKS[dialect.call_style]
    return "NAME".join(marks.name)


def _routes(app: Any) -> Iterator[APIRoute]:
    """Every route, those of included routers too."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            yield from _routes(router) if (router := getattr(route, "original_router", None)) else ()


def _places(group: list[APIRoute]) -> str:
    return ", ".join(f"`{'|'.join(sorted(route.methods - {'HEAD'}))} {route.path}`" for route in group)


def _first_line(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _body_of(route: APIRoute) -> type[Body] | None:
    for field in route.dependant.body_params:
        kind = field.field_info.annotation
        if inspect.isclass(kind) and issubclass(kind, Body):
            return kind
    return None


def _query_section(title: str, route: APIRoute) -> Iterator[str]:
    """A table of what may stand behind the question mark."""
    if route.dependant.query_params:
        yield f"\n### {title}\n"
        yield "| in the query | default | |"
        yield "|---|---|---|"
    for name, info in _query_fields(route):
        default = "**required**" if info.is_required() else f"`{json.dumps(info.default)}`"
        yield f"| `{name}` | {default} | {_cell(info.description or '')} |"


def _query_fields(route: APIRoute) -> Iterator[tuple[str, FieldInfo]]:
    """Names and rules, where one model holds all of them too."""
    for field in route.dependant.query_params:
        kind = field.field_info.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield from kind.model_fields.items()
        else:
            yield field.alias, field.field_info


def _section(title: str, body: type[Body], seen: set[type[Body]]) -> Iterator[str]:
    """A table of the body's fields, then one for each kind of object inside it that has no table yet."""
    seen.add(body)
    schema = body.model_json_schema()
    definitions = schema.get("$defs", {})
    required = schema.get("required", ())
    yield f"\n### {title}\n"
    yield _first_line(body) + "\n"
    yield "| field | value | |"
    yield "|---|---|---|"
    for name, field in schema.get("properties", {}).items():
        note = "**required**. " if name in required else ""
        note += field.get("description", "")
        if name in body.ACCEPTED:
            note = f"accepted, changes nothing: {body.ACCEPTED[name]}"
        yield f"| `{name}` | {_cell(_kind(field, definitions))} | {_cell(note)} |"
    yield from _rows(body.HARMLESS, "no effect, with a warning")
    yield from _rows(body.REFUSED, "refused")
    for inner in _inner_bodies(body):
        if inner not in seen:
            yield from _section(f"`{inner.__name__}`", inner, seen)


def _rows(fields: Mapping[str, str], fate: str) -> Iterator[str]:
    """One row for all fields that have one fate for one reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(fields.items()):
        by_reason.setdefault(reason, []).append(f"`{name}`")
    for reason, names in by_reason.items():
        yield f"| {', '.join(names)} | {fate} | {_cell(reason)} |"


def _inner_bodies(body: type[Body]) -> list[type[Body]]:
    """The kinds of objects that the fields of a body hold, in the order of their first appearance."""
    found: dict[type[Body], None] = {}

    def look(annotation: Any) -> None:
        if inspect.isclass(annotation) and issubclass(annotation, Body):
            found[annotation] = None
        for argument in getattr(annotation, "__args__", ()):
            look(argument)
        if value := getattr(annotation, "__value__", None):
            look(value)

    for field in body.model_fields.values():
        look(field.annotation)
    return list(found)


def _kind(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if options := schema.get("anyOf") or schema.get("oneOf"):
        kinds = (_kind(option, definitions) for option in options if option.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"`{name}`" if "properties" in definitions[name] else _kind(definitions[name], definitions)
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    name = str(schema.get("type", "anything"))
    if name == "array":
        name = f"list of {_kind(schema.get('items', {}), definitions)}"
        name += "," if any(limit in schema for limit in LIMITS) else ""
    limits = [text.format(_number(schema[limit])) for limit, text in LIMITS.items() if limit in schema]
    return f"{name} {', '.join(limits)}".strip()


def _number(value: float) -> str:
    """Powers of two as people know them."""
    exponent = abs(value).bit_length() - 1 if isinstance(value, int) else 0
    if exponent >= 16 and abs(value) == 2**exponent:
        return f"{'-' if value < 0 else ''}2^{exponent}"
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _sampling_table() -> Iterator[str]:
    """The fields of `sampling_params`, with the text of their own docstring."""
    texts = _texts(SamplingParams)
    yield "\n### `sampling_params`\n"
    yield "| field | default | |"
    yield "|---|---|---|"
    for field in dataclasses.fields(SamplingParams):
        if field.name == "grammar":
            yield from _grammar_rows(texts["grammar"])
            continue
        yield f"| `{field.name}` | `{json.dumps(field.default)}` | {_cell(texts[field.name])} |"
    for name, reason in ACCEPTED_SAMPLING.items():
        yield f"| `{name}` | | {_cell(f'accepted, changes nothing: {reason}')} |"
    yield from _rows(REFUSED_SAMPLING, "refused")


def _grammar_rows(text: str) -> Iterator[str]:
    """In place of `grammar` a field for each kind of it, and how its JSON is written."""
    fields = ", ".join(f"`{name}`" for name in GRAMMAR_FIELDS)
    yield f"| {fields} | `null` | One of them. {_cell(re.sub(r'\s+', ' ', text))} |"
    texts = _texts(GrammarSpec)
    for field in dataclasses.fields(GrammarSpec):
        if field.init and field.default is not dataclasses.MISSING:
            yield f"| `{field.name}` | `{json.dumps(field.default)}` | {_cell(texts[field.name])} |"


def _texts(documented: Any) -> dict[str, str]:
    """Attribute → what its class says of it."""
    found = re.findall(r"^    (\w+): (.+?)(?=\n    \w+: |\Z)", _attributes(documented), re.DOTALL | re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in found}


def _attributes(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__ or "").split("Attributes:\n")[1]


if __name__ == "__main__":
    main()
