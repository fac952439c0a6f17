"""The tables of docs/reference: every endpoint, and the fields of each body."""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jsg.config import ServerConfig
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from jsg.server.http.body import Body
from jsg.server.native.sampling import ACCEPTED_SAMPLING, REFUSED_SAMPLING
from jsg.types import GRAMMAR_FIELDS, GRAMMAR_OPTIONS, GrammarSpec, SamplingParams

PATHS = {
    "chat": ("/v1/chat/",),
    "completions": ("/v1/completions",),
    "responses": ("/v1/responses",),
    "messages": ("/v1/messages",),
    "scoring": ("/v1/embeddings", "/rerank", "/v1/score", "/v1/decisions", "/v1/systemone"),
    "native": ("/",),
}
"""Page → how the paths of its endpoints begin. The first page that fits has the endpoint."""

NAMES = (*PATHS, "endpoints", "sampling")
"""The pages with tables of this module."""

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


class Section(NamedTuple):
    """The table of an endpoint or of a kind of object, with its head."""

    title: str
    text: str


@functools.cache
def pages() -> dict[str, str]:
    """Page → its tables; where one names a kind of object, the name leads to the table of that kind."""
    groups: dict[Any, list[APIRoute]] = {}
    for route in sorted(_routes(create_app(FrontDoor(), ServerConfig())), key=lambda route: route.path):
        if route.include_in_schema:
            groups.setdefault(route.endpoint, []).append(route)
    sections: dict[str, list[Section]] = {page: [] for page in PATHS}
    seen: set[type[Body]] = set()
    for page, found in sections.items():
        of_page = [group for group in groups.values() if _page_of(group[0]) == page]
        found += [Section(_places(group), text) for group in of_page if (text := _query_table(group[0]))]
        bodies: dict[type[Body], list[str]] = {}
        for group in of_page:
            if body := _body_of(group[0]):
                bodies.setdefault(body, []).append(_places(group))
        for body, places in bodies.items():
            found += _sections(", ".join(places), body, seen)
    homes = {section.title: page for page, found in sections.items() for section in found}
    homes["`sampling_params`"] = "sampling"
    made = {page: "\n\n".join(_shown(section) for section in found) for page, found in sections.items()}
    made |= {"endpoints": "\n".join(_list_of_endpoints(groups)), "sampling": "\n".join(_sampling_table())}
    return {page: _with_links(text, page, homes) for page, text in made.items()}


def table(page: str) -> str:
    """The tables of one page of docs/reference."""
    return pages()[page]


def _page_of(route: APIRoute) -> str:
    return next(page for page, begins in PATHS.items() if route.path.startswith(begins))


def _shown(section: Section) -> str:
    """Endpoints are a level above kinds of objects."""
    return f"{'##' if ' ' in section.title else '###'} {section.title}\n\n{section.text}"


def _with_links(text: str, page: str, homes: Mapping[str, str]) -> str:
    """The text, in which names of kinds of objects lead to their tables."""

    def link(found: re.Match[str]) -> str:
        home = homes.get(found[0])
        if home is None:
            return found[0]
        anchor = "" if home == "sampling" else f"#{found[1].lower()}"
        return f"[{found[0]}]({'' if home == page and anchor else f'{home}.md'}{anchor})"

    lines = (line if line.startswith("#") else re.sub(r"`(\w+)`", link, line) for line in text.split("\n"))
    return "\n".join(lines)


def _list_of_endpoints(groups: Mapping[Any, list[APIRoute]]) -> Iterator[str]:
    """One row for each endpoint, which leads to the page with its table if it has one."""
    yield "| method and path | what it does |"
    yield "|---|---|"
    for endpoint, group in groups.items():
        has_table = _body_of(group[0]) or _query_table(group[0])
        places = f"[{_places(group)}]({_page_of(group[0])}.md)" if has_table else _places(group)
        yield f"| {places} | {_first_line(endpoint)} |"


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


def _query_table(route: APIRoute) -> str:
    """A table of what may stand behind the question mark; empty if nothing may."""
    rows = []
    for name, info in _query_fields(route):
        default = "**required**" if info.is_required() else f"`{json.dumps(info.default)}`"
        rows.append(f"| `{name}` | {default} | {_cell(info.description or '')} |")
    return "\n".join(["| in the query | default | |", "|---|---|---|", *rows]) if rows else ""


def _query_fields(route: APIRoute) -> Iterator[tuple[str, FieldInfo]]:
    """Names and rules, where one model holds all of them too."""
    for field in route.dependant.query_params:
        kind = field.field_info.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield from kind.model_fields.items()
        else:
            yield field.alias, field.field_info


def _sections(title: str, body: type[Body], seen: set[type[Body]]) -> Iterator[Section]:
    """A table of the body's fields, then one for each kind of object inside it that has no table yet."""
    seen.add(body)
    yield Section(title, "\n".join(_table(body)))
    for inner in _inner_bodies(body):
        if inner not in seen:
            yield from _sections(f"`{inner.__name__}`", inner, seen)


def _table(body: type[Body]) -> Iterator[str]:
    schema = body.model_json_schema()
    definitions = schema.get("$defs", {})
    required = schema.get("required", ())
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
    for name, default in GRAMMAR_OPTIONS.items():
        yield f"| `{name}` | `{json.dumps(default)}` | {_cell(texts[name])} |"


def _texts(documented: Any) -> dict[str, str]:
    """Attribute → what its class says of it."""
    found = re.findall(r"^    (\w+): (.+?)(?=\n    \w+: |\Z)", _attributes(documented), re.DOTALL | re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in found}


def _attributes(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__ or "").split("Attributes:\n")[1]
