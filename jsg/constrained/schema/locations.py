"""The locations of schemas in a document: their children, their references, and the draft whose rules hold there.

A location has a small number, so that sets of schemas are cheap. It gets its number when it is first asked for. Only
the search for identifiers and anchors reads the whole document, once.
"""

import re
import urllib.parse
from collections.abc import Iterator
from typing import NamedTuple

from jsg.constrained.limits import Limits, check
from jsg.constrained.schema.shapes import Json
from jsg.errors import GrammarError

EVERYTHING = 1
"""The location of the schema `true`. Every document has it."""

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


class Location(NamedTuple):
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
    """The locations of one document.

    Attributes:
        all: Every location by its number. Number 0 is not used, so that the minus sign can mean negation.
        unknown_drafts: Values of `$schema` that name no known draft.
    """

    def __init__(self, root: Json, limits: Limits):
        everything = Location("#true", True, "", NEWEST)
        self.all = [everything, everything]
        self.unknown_drafts: list[str] = []
        self._limits = limits
        self._numbers: dict[str, int] = {}
        self._resources: dict[str, Location] = {}
        self._anchors: dict[tuple[str, str], Location] = {}
        self._dynamic: dict[str, list[str]] = {}
        self._root = self._enter(Location("#", root, "", NEWEST))
        self._resources[""] = self._root
        self._find_identifiers()
        self.root = self._number(self._root)

    def child(self, number: int, *path: str | int) -> int:
        """The location of a schema inside the schema at `number`.

        Raises:
            GrammarError: There is no schema at this path.
        """
        location = self.all[number]
        for token in path:
            location = self._member(location, token)
        return self._number(location)

    def synthetic(self, number: int, what: str, schema: Json) -> int:
        """A location for a schema that is not in the document but follows from the schema at `number`."""
        location = self.all[number]
        return self._number(location._replace(pointer=f"{location.pointer} ({what})", schema=schema))

    def reference(self, number: int, keyword: str) -> int:
        """The location to which `$ref`, `$dynamicRef` or `$recursiveRef` of the schema at `number` leads.

        Raises:
            GrammarError: It leads out of the document, to nothing, or to several locations.
        """
        location = self.all[number]
        assert isinstance(location.schema, dict)
        reference = location.schema[keyword]
        if not isinstance(reference, str):
            raise GrammarError(
                f"{keyword} at {location.pointer} must be a string; write a reference such as '#/$defs/a'"
            )
        where = f"{keyword} {reference!r} at {location.pointer}"
        try:
            uri, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(location.base, reference))
        except ValueError:
            raise GrammarError(f"{where} is not a URI reference; write one such as '#/$defs/a'") from None
        if reference.startswith("#"):  # urljoin drops a base URI that has no hierarchy, such as urn:…
            uri, fragment = location.base, reference[1:]
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

    def _member(self, location: Location, token: str | int, where: str | None = None) -> Location:
        holder = location.schema
        pointer = step(location.pointer, token)
        if isinstance(holder, dict) and isinstance(token, str) and token in holder:
            value = holder[token]
        elif isinstance(holder, list) and re.fullmatch("0|[1-9][0-9]{0,8}", str(token)) and int(token) < len(holder):
            value = holder[int(token)]
        else:
            raise GrammarError(f"{where or pointer} leads nowhere: there is no {pointer}; correct the reference")
        return self._enter(Location(pointer, value, location.base, location.draft))

    def _number(self, location: Location) -> int:
        number = self._numbers.get(location.pointer)
        if number is None:
            if not isinstance(location.schema, bool | dict):
                raise GrammarError(
                    f"a schema must be an object or a boolean, but {location.pointer} is {_kind(location.schema)}; "
                    "correct it"
                )
            number = self._numbers[location.pointer] = len(self.all)
            self.all.append(location)
        return number

    def _enter(self, location: Location) -> Location:
        """The location with the draft and base that its own schema sets."""
        schema = location.schema
        if not isinstance(schema, dict):
            return location
        draft = location.draft
        if isinstance(name := schema.get("$schema"), str):
            draft = next((number for part, number in _DRAFTS if part in name), NEWEST)
            if draft == NEWEST and "json-schema.org" not in name and name not in self.unknown_drafts:
                self.unknown_drafts.append(name)
        base = location.base
        identifier = schema.get("id" if draft == 4 else "$id")
        if isinstance(identifier, str) and not identifier.startswith("#") and not (draft <= 7 and "$ref" in schema):
            try:
                base = urllib.parse.urldefrag(urllib.parse.urljoin(base, identifier))[0]
            except ValueError:
                raise GrammarError(
                    f"the identifier {identifier!r} at {location.pointer} is not a URI; correct it"
                ) from None
        return location._replace(base=base, draft=draft)

    def _find_identifiers(self) -> None:
        stack = [(self._root, 0)]
        while stack:
            location, depth = stack.pop()
            check(depth, self._limits.nesting, "levels of schemas inside one another")
            schema = location.schema
            assert isinstance(schema, dict) or not stack
            if not isinstance(schema, dict):
                return
            self._register(location, schema)
            stack.extend((member, depth + 1) for member in self._members(location, schema))

    def _register(self, location: Location, schema: dict[str, Json]) -> None:
        is_old = location.draft <= 7
        if is_old and "$ref" in schema:
            return
        identifier = schema.get("id" if location.draft == 4 else "$id")
        if isinstance(identifier, str):
            if identifier.startswith("#"):
                self._anchors.setdefault((location.base, identifier[1:]), location)
            else:
                self._resources.setdefault(location.base, location)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._anchors.setdefault((location.base, anchor), location)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(anchor, []).append(location.pointer)
        if schema.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("", []).append(location.pointer)

    def _members(self, location: Location, schema: dict[str, Json]) -> Iterator[Location]:
        if _HOLDERS.isdisjoint(schema):
            return
        for keyword in _SINGLES:
            if isinstance(schema.get(keyword), dict):
                yield self._member(location, keyword)
        for keyword in _LISTS:
            if isinstance(members := schema.get(keyword), list):
                holder = self._member(location, keyword)
                yield from (self._member(holder, i) for i in range(len(members)) if isinstance(members[i], dict))
        for keyword in _MAPS:
            if isinstance(members := schema.get(keyword), dict):
                holder = Location(step(location.pointer, keyword), members, location.base, location.draft)
                for name, value in members.items():
                    if isinstance(value, dict):
                        yield self._enter(Location(step(holder.pointer, name), value, location.base, location.draft))


def _kind(value: Json) -> str:
    kinds = {type(None): "null", str: "a string", list: "an array"}
    return kinds.get(type(value), "a number")
