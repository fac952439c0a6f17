"""The keywords that constrain values, and a reader that checks the form of their values."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from jsg.constrained.schema.locations import Location
from jsg.constrained.schema.shapes import Json
from jsg.constrained.schema.values import decimal_of, is_number
from jsg.errors import GrammarError

REFUSED = {"contains": "leave it out, or say in prefixItems which items must be there"}
"""Keywords about arrays that are not supported, and what to do instead. `docs/packages/constrained.md` says why."""

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
        "uniqueItems",
    )
)
HELPERS = frozenset(("discriminator", "else", "maxContains", "minContains", "then"))
"""Keywords that have a meaning only beside one of `CONSTRAINING`."""

SAYING_NOTHING = frozenset(
    (
        *("$schema", "$vocabulary", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"),
        *("$defs", "definitions"),
        *("$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    )
)
"""Keywords of the standard that do not constrain values, and that users do not take for rules."""

UNREACHABLE: Final = 2**31 - 1
"""A count of items, members or characters that no text reaches."""

_OLD = {"disallow": "not", "divisibleBy": "multipleOf", "extends": "allOf"}
"""Keywords of draft 3 that constrain values, and the keywords that replaced them."""


def enforced(location: Location) -> Mapping[str, Json]:
    """The keywords of the schema at a location that constrain values.

    Raises:
        GrammarError: A keyword belongs to a draft that is not supported.
    """
    if not isinstance(location.schema, dict):
        return {}
    if location.draft <= 7 and "$ref" in location.schema:
        return {"$ref": location.schema["$ref"]}
    for keyword, successor in _OLD.items():
        if keyword in location.schema:
            raise GrammarError(
                f"{keyword} at {location.pointer} is a keyword of draft 3, which is not supported; write {successor}"
            )
    return {k: v for k, v in location.schema.items() if k in CONSTRAINING or k in HELPERS}


class Reader:
    """Reads the values of a schema's keywords, and refuses values of the wrong form."""

    def __init__(self, location: Location, keywords: Mapping[str, Json]):
        self.location = location
        self.keywords = keywords

    def where(self, keyword: str) -> str:
        """The keyword and its pointer, for messages."""
        return f"{keyword} at {self.location.pointer}"

    def fail(self, keyword: str, what: str) -> GrammarError:
        """The error that the value of the keyword is not `what`."""
        return GrammarError(f"{self.where(keyword)} must be {what}; correct it")

    def count(self, keyword: str) -> int | None:
        """The value as a count; None without the keyword. A count that no text can reach becomes `UNREACHABLE`."""
        if keyword not in self.keywords:
            return None
        if is_number(self.keywords[keyword]):
            number = self.number(keyword)
            if number >= 0 and number == number.to_integral_value():
                return int(min(number, UNREACHABLE))
        raise self.fail(keyword, "an integer that is not negative")

    def number(self, keyword: str) -> Decimal:
        """The value as a number."""
        value = self.keywords[keyword]
        if not isinstance(value, int | float | Decimal) or isinstance(value, bool):
            raise self.fail(keyword, "a number")
        return decimal_of(value, self.where(keyword))

    def text(self, keyword: str) -> str:
        """The value as a string."""
        value = self.keywords[keyword]
        if not isinstance(value, str):
            raise self.fail(keyword, "a string")
        return value

    def flag(self, keyword: str) -> bool:
        """The value as true or false; false without the keyword."""
        value = self.keywords.get(keyword, False)
        if not isinstance(value, bool):
            raise self.fail(keyword, "true or false")
        return value

    def array(self, keyword: str) -> list[Json]:
        """The value as an array; an empty one without the keyword."""
        value = self.keywords.get(keyword, [])
        if not isinstance(value, list):
            raise self.fail(keyword, "an array")
        return value

    def schemas(self, keyword: str) -> int:
        """The number of schemas in the array, which is at least one."""
        number = len(self.array(keyword))
        if not number:
            raise self.fail(keyword, "an array with at least one schema")
        return number

    def mapping(self, keyword: str) -> Mapping[str, Json]:
        """The value as an object; an empty one without the keyword."""
        value = self.keywords.get(keyword, {})
        if not isinstance(value, dict):
            raise self.fail(keyword, "an object")
        return value

    def names(self, keyword: str) -> tuple[str, ...]:
        """The value as an array of strings, without duplicates; empty without the keyword."""
        return self._strings(keyword, self.keywords.get(keyword, []))

    def names_by_name(self, keyword: str) -> Mapping[str, tuple[str, ...]]:
        """The value as an object of arrays of strings. Schemas, which `dependencies` may hold too, are left out."""
        return {
            name: self._strings(keyword, value)
            for name, value in self.mapping(keyword).items()
            if isinstance(value, list) or keyword == "dependentRequired"
        }

    def refusals(self) -> list[str]:
        """Why the keywords about arrays cannot be enforced, one reason for each keyword of `REFUSED`."""
        return [f"{self.where(word)} is not supported; {REFUSED[word]}" for word in REFUSED if word in self.keywords]

    def types(self) -> frozenset[str] | None:
        """The names in `type`; None without the keyword."""
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
