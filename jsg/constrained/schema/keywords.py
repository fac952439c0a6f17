"""The keywords that constrain values, and the form that their own values must have."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from jsg.constrained.schema.formats import FORMATS
from jsg.constrained.schema.locations import Place
from jsg.constrained.schema.shapes import Json
from jsg.constrained.schema.values import decimal_of, is_number
from jsg.errors import GrammarError

STANDARD_FORMATS = frozenset(
    (
        *FORMATS,
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
    )
)
"""Formats that have a meaning. Those that are not enforced are refused; any other name is an annotation."""

REFUSED = {
    "contains": "leave it out, or say in prefixItems which items must be there",
    "uniqueItems": "leave it out, or set maxItems to 1",
}
"""Keywords about arrays that are not supported, and what to do. `docs/packages/constrained.md` gives the reason."""

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
CONSTRAINING = frozenset(
    (
        *REFERENCES,
        *REFUSED,
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "not",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
HELPERS = frozenset(("else", "maxContains", "minContains", "then"))
"""Keywords that say something only beside one of `CONSTRAINING`."""

SAYING_NOTHING = frozenset(
    (
        *("$schema", "$vocabulary", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"),
        *("$defs", "definitions"),
        *("$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    )
)
"""Keywords of the standard that do not constrain values, and that users do not take for rules."""

UNREACHABLE: Final = 2**31 - 1
"""More items, members or characters than any text has."""

_OLD = {"disallow": "not", "divisibleBy": "multipleOf", "extends": "allOf"}
"""Keywords of draft 3 that constrain values, and what replaced them."""


def enforced(place: Place) -> Mapping[str, Json]:
    """The keywords of the schema at a place that constrain values.

    Raises:
        GrammarError: One is of a draft that is not supported.
    """
    if not isinstance(place.schema, dict):
        return {}
    if place.draft <= 7 and "$ref" in place.schema:
        return {"$ref": place.schema["$ref"]}
    for keyword, successor in _OLD.items():
        if keyword in place.schema:
            raise GrammarError(
                f"{keyword} at {place.pointer} is a keyword of draft 3, which is not supported; write {successor}"
            )
    return {k: v for k, v in place.schema.items() if k in CONSTRAINING or k in HELPERS}


class Reader:
    """Reads the values of a schema's keywords, and refuses those that are not what they must be."""

    def __init__(self, place: Place, keywords: Mapping[str, Json]):
        self.place = place
        self.keywords = keywords

    def where(self, keyword: str) -> str:
        """The keyword and its pointer, for messages."""
        return f"{keyword} at {self.place.pointer}"

    def fail(self, keyword: str, what: str) -> GrammarError:
        """The error for a value of the keyword that is not `what`."""
        return GrammarError(f"{self.where(keyword)} must be {what}; correct it")

    def count(self, keyword: str) -> int | None:
        """A count; None where the keyword is not there. A count that no text can reach becomes `UNREACHABLE`."""
        if keyword not in self.keywords:
            return None
        if is_number(self.keywords[keyword]):
            number = self.number(keyword)
            if number >= 0 and number == number.to_integral_value():
                return int(min(number, UNREACHABLE))
        raise self.fail(keyword, "an integer that is not negative")

    def number(self, keyword: str) -> Decimal:
        """A number."""
        value = self.keywords[keyword]
        if not isinstance(value, int | float | Decimal) or isinstance(value, bool):
            raise self.fail(keyword, "a number")
        return decimal_of(value, self.where(keyword))

    def text(self, keyword: str) -> str:
        """A string."""
        value = self.keywords[keyword]
        if not isinstance(value, str):
            raise self.fail(keyword, "a string")
        return value

    def array(self, keyword: str) -> list[Json]:
        """An array; empty where the keyword is not there."""
        value = self.keywords.get(keyword, [])
        if not isinstance(value, list):
            raise self.fail(keyword, "an array")
        return value

    def schemas(self, keyword: str) -> int:
        """How many schemas the array has; one at least."""
        number = len(self.array(keyword))
        if not number:
            raise self.fail(keyword, "an array with at least one schema")
        return number

    def mapping(self, keyword: str) -> Mapping[str, Json]:
        """An object; empty where the keyword is not there."""
        value = self.keywords.get(keyword, {})
        if not isinstance(value, dict):
            raise self.fail(keyword, "an object")
        return value

    def names(self, keyword: str) -> tuple[str, ...]:
        """An array of strings, each once; empty where the keyword is not there."""
        return self._strings(keyword, self.keywords.get(keyword, []))

    def names_by_name(self, keyword: str) -> Mapping[str, tuple[str, ...]]:
        """An object of arrays of strings, without its other values: `dependencies` may hold schemas too."""
        return {
            name: self._strings(keyword, value)
            for name, value in self.mapping(keyword).items()
            if isinstance(value, list) or keyword == "dependentRequired"
        }

    def refusals(self) -> list[str]:
        """Why the keywords about arrays cannot be enforced, one reason for each keyword of `REFUSED`."""
        words = [word for word in REFUSED if word in self.keywords]
        most = self.count("maxItems")
        if self.keywords.get("uniqueItems") is False or (most is not None and most <= 1):
            words = [word for word in words if word != "uniqueItems"]
        return [f"{self.where(word)} is not supported; {REFUSED[word]}" for word in words]

    def types(self) -> frozenset[str] | None:
        """The names in `type`; None where it is not there."""
        if "type" not in self.keywords:
            return None
        value = self.keywords["type"]
        names = value if isinstance(value, list) else [value]
        known = {"null", "boolean", "number", "integer", "string", "array", "object"}
        if not names or not all(isinstance(name, str) and name in known for name in names):
            raise self.fail("type", f"one or several of {', '.join(sorted(known))}")
        return frozenset(name for name in names if isinstance(name, str))

    def _strings(self, keyword: str, value: Json) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.fail(keyword, f"{'an array' if keyword == 'required' else 'arrays'} of strings")
        return tuple(dict.fromkeys(name for name in value if isinstance(name, str)))
