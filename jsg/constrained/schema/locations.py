"""The places of schemas in a document: their children, their references, and the draft whose rules hold there.

A place has a small number, so that sets of schemas are cheap. It gets its number when it is first asked for. Only the
search for identifiers and anchors reads the whole document, once.
"""

import re
import urllib.parse
from collections.abc import Iterator
from typing import NamedTuple

from jsg.constrained.limits import Limits, check
from jsg.constrained.schema.shapes import Json
from jsg.errors import GrammarError

EVERYTHING = 1
"""The place of the schema `true`. Every document has it."""

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_SINGLES = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_HOLDERS = frozenset((*_LISTS, *_MAPS, *_SINGLES))
_DRAFTS = (("draft-04", 4), ("draft-06", 6), ("draft-07", 7), ("2019-09", 2019), ("2020-12", 2020))
NEWEST = 2020


class Place(NamedTuple):
    """One schema in the document.

    Attributes:
        pointer: Its JSON pointer; `#` for the document's root.
        schema: Its JSON.
        base: The URI against which its references are resolved.
        draft: The version of JSON Schema that it follows: 4, 6, 7, 2019 or 2020.
    """

    pointer: str
    schema: Json
    base: str
    draft: int


def step(pointer: str, token: str | int) -> str:
    """The pointer of a member."""
    name = str(token)
    if "~" in name or "/" in name:
        name = name.replace("~", "~0").replace("/", "~1")
    return f"{pointer}/{name}"


class Locations:
    """The places of one document.

    Attributes:
        places: Every place by its number. Number 0 is not used, so that the minus sign can mean negation.
        unknown_drafts: Values of `$schema` that name no known draft.
    """

    def __init__(self, root: Json, limits: Limits):
        everything = Place("#true", True, "", NEWEST)
        self.places = [everything, everything]
        self.unknown_drafts: list[str] = []
        self._limits = limits
        self._numbers: dict[str, int] = {}
        self._resources: dict[str, Place] = {}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._dynamic: dict[str, list[str]] = {}
        self._root = self._enter(Place("#", root, "", NEWEST))
        self._resources[""] = self._root
        self._find_identifiers()
        self.root = self._number(self._root)

    def child(self, number: int, *path: str | int) -> int:
        """The place of a schema inside the schema at `number`.

        Raises:
            GrammarError: There is no schema at this path.
        """
        place = self.places[number]
        for token in path:
            place = self._member(place, token)
        return self._number(place)

    def synthetic(self, number: int, what: str, schema: Json) -> int:
        """A place for a schema that is not in the document but follows from the schema at `number`."""
        place = self.places[number]
        return self._number(place._replace(pointer=f"{place.pointer} ({what})", schema=schema))

    def reference(self, number: int, keyword: str) -> int:
        """The place to which `$ref`, `$dynamicRef` or `$recursiveRef` of the schema at `number` leads.

        Raises:
            GrammarError: It leads out of the document, to nothing, or to several places.
        """
        place = self.places[number]
        assert isinstance(place.schema, dict)
        reference = place.schema[keyword]
        if not isinstance(reference, str):
            raise GrammarError(f"{keyword} at {place.pointer} must be a string; write a reference such as '#/$defs/a'")
        where = f"{keyword} {reference!r} at {place.pointer}"
        try:
            uri, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(place.base, reference))
        except ValueError:
            raise GrammarError(f"{where} is not a URI reference; write one such as '#/$defs/a'") from None
        if reference.startswith("#"):  # urljoin drops a base URI that has no hierarchy, such as urn:…
            uri, fragment = place.base, reference[1:]
        resource = self._resources.get(uri)
        if resource is None:
            raise GrammarError(
                f"{where} leads out of the schema; only references inside it are supported, put its target under $defs"
            )
        fragment = urllib.parse.unquote(fragment)
        if keyword != "$ref":
            self._check_dynamic(keyword, fragment, where)
        if not fragment:
            return self._number(resource)
        if not fragment.startswith("/"):
            found = self._anchors.get((uri, fragment))
            if found is None:
                raise GrammarError(
                    f"{where} leads nowhere: there is no such anchor; define it or correct the reference"
                )
            return self._number(found)
        found = resource
        for token in fragment[1:].split("/"):
            found = self._member(found, token.replace("~1", "/").replace("~0", "~"), where)
        return self._number(found)

    def _check_dynamic(self, keyword: str, fragment: str, where: str) -> None:
        anchors = self._dynamic.get(fragment if keyword == "$dynamicRef" else "", [])
        if len(anchors) > 1:
            raise GrammarError(
                f"{where} may lead to {anchors[0]} or {anchors[1]}, which depends on the value; only a {keyword} with "
                "one target is supported, use $ref"
            )

    def _member(self, place: Place, token: str | int, where: str | None = None) -> Place:
        holder = place.schema
        pointer = step(place.pointer, token)
        if isinstance(holder, dict) and isinstance(token, str) and token in holder:
            value = holder[token]
        elif isinstance(holder, list) and re.fullmatch("0|[1-9][0-9]{0,8}", str(token)) and int(token) < len(holder):
            value = holder[int(token)]
        else:
            raise GrammarError(f"{where or pointer} leads nowhere: there is no {pointer}; correct the reference")
        return self._enter(Place(pointer, value, place.base, place.draft))

    def _number(self, place: Place) -> int:
        number = self._numbers.get(place.pointer)
        if number is None:
            if not isinstance(place.schema, bool | dict):
                raise GrammarError(
                    f"a schema must be an object or a boolean, but {place.pointer} is {_kind(place.schema)}; correct it"
                )
            number = self._numbers[place.pointer] = len(self.places)
            self.places.append(place)
        return number

    def _enter(self, place: Place) -> Place:
        """The place with the draft and base that its own schema sets."""
        schema = place.schema
        if not isinstance(schema, dict):
            return place
        draft = place.draft
        if isinstance(name := schema.get("$schema"), str):
            draft = next((number for part, number in _DRAFTS if part in name), NEWEST)
            if draft == NEWEST and "json-schema.org" not in name and name not in self.unknown_drafts:
                self.unknown_drafts.append(name)
        base = place.base
        identifier = schema.get("id" if draft == 4 else "$id")
        if isinstance(identifier, str) and not identifier.startswith("#") and not (draft <= 7 and "$ref" in schema):
            try:
                base = urllib.parse.urldefrag(urllib.parse.urljoin(base, identifier))[0]
            except ValueError:
                raise GrammarError(
                    f"the identifier {identifier!r} at {place.pointer} is not a URI; correct it"
                ) from None
        return place._replace(base=base, draft=draft)

    def _find_identifiers(self) -> None:
        stack = [(self._root, 0)]
        while stack:
            place, depth = stack.pop()
            check(depth, self._limits.nesting, "levels of schemas inside one another")
            schema = place.schema
            assert isinstance(schema, dict) or not stack
            if not isinstance(schema, dict):
                return
            self._register(place, schema)
            stack.extend((member, depth + 1) for member in self._members(place, schema))

    def _register(self, place: Place, schema: dict[str, Json]) -> None:
        is_old = place.draft <= 7
        if is_old and "$ref" in schema:
            return
        identifier = schema.get("id" if place.draft == 4 else "$id")
        if isinstance(identifier, str):
            if identifier.startswith("#"):
                self._anchors.setdefault((place.base, identifier[1:]), place)
            else:
                self._resources.setdefault(place.base, place)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._anchors.setdefault((place.base, anchor), place)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(anchor, []).append(place.pointer)
        if schema.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("", []).append(place.pointer)

    def _members(self, place: Place, schema: dict[str, Json]) -> Iterator[Place]:
        if _HOLDERS.isdisjoint(schema):
            return
        for keyword in _SINGLES:
            if isinstance(schema.get(keyword), dict):
                yield self._member(place, keyword)
        for keyword in _LISTS:
            if isinstance(members := schema.get(keyword), list):
                holder = self._member(place, keyword)
                yield from (self._member(holder, i) for i in range(len(members)) if isinstance(members[i], dict))
        for keyword in _MAPS:
            if isinstance(members := schema.get(keyword), dict):
                holder = Place(step(place.pointer, keyword), members, place.base, place.draft)
                for name, value in members.items():
                    if isinstance(value, dict):
                        yield self._enter(Place(step(holder.pointer, name), value, place.base, place.draft))


def _kind(value: Json) -> str:
    kinds = {type(None): "null", str: "a string", list: "an array"}
    return kinds.get(type(value), "a number")
