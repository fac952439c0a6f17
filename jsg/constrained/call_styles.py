r"""The styles in which models write the arguments of a call other than as JSON, and the types that arguments may have.

    qwen_xml          <function=f>\n<parameter=a>\ntext\n</parameter>\n</function>
    glm_xml           f\n<arg_key>a</arg_key>\n<arg_value>text</arg_value>\n</tool_call>
    deepseek_xml      <｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">text</｜DSML｜parameter>\n…
    minimax_xml       <invoke name="f">\n<parameter name="a">text</parameter>\n</invoke>
    python            f(a="text", b=[1, None])
    gemma             call:f{a:<|"|>text<|"|>,b:[1,null]}
    function_gemma    call:f{a:<escape>text<escape>,b:[1,null]}

`jsg.speech` reads a style and `jsg.constrained` writes its grammar. Both follow the records of this module.

The XML styles write strings as they are and everything else as JSON, so a reader needs the types that an argument may
have. They are found in the schema without working it out: `ArgumentTypes` may have a type too many, but none too few.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any, Literal, final

CallStyle = Literal["qwen_xml", "glm_xml", "deepseek_xml", "minimax_xml", "python", "gemma", "function_gemma"]

ALL_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
"""JSON Schema's types. A number without a point and an exponent is "integer", any other is "number"."""
_MAX_VISITS = 2_000
_MAX_DEPTH = 32


@final
@dataclasses.dataclass(frozen=True, slots=True)
class XmlMarks:
    """The marks around the name, the keys and the values of a call.

    Each mark of a value has its first character only once, so that it cannot begin inside itself.

    Attributes:
        name: What comes before and after the name of the tool. Without a mark after it, white space or `<` ends it.
        key: What comes before and after a key.
        value: What comes before and after a value.
        pad: What comes between the first mark and the value, and between the value and the second mark.
        gap: What is between two marks.
        end: What follows the last argument.
        says_type: A value's first mark says whether the value is a string, after which nobody has to ask its schema.
        is_gap_optional: Some models of the family write the gap, and others do not.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    pad: str
    gap: str
    end: str
    says_type: bool = False
    is_gap_optional: bool = False


@final
@dataclasses.dataclass(frozen=True, slots=True)
class LiteralMarks:
    """The marks of a call whose arguments are literals of a notation much like JSON.

    Attributes:
        name: What comes before and after the name of the tool.
        assign: What separates a name from its value among the arguments.
        end: What follows the last argument.
        quote: What comes before and after a string, in which nothing is escaped; None for strings like Python's.
    """

    name: tuple[str, str]
    assign: str
    end: str
    quote: str | None


XML_MARKS: Mapping[CallStyle, XmlMarks] = {
    "qwen_xml": XmlMarks(
        name=("<function=", ">"),
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        pad="\n",
        gap="\n",
        end="</function>",
    ),
    "glm_xml": XmlMarks(
        name=("", ""),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        pad="",
        gap="\n",
        end="</tool_call>",
        is_gap_optional=True,
    ),
    "deepseek_xml": XmlMarks(
        name=('<｜DSML｜invoke name="', '">'),
        key=('<｜DSML｜parameter name="', '"'),
        value=("", "</｜DSML｜parameter>"),
        pad="",
        gap="\n",
        end="</｜DSML｜invoke>",
        says_type=True,
    ),
    "minimax_xml": XmlMarks(
        name=('<invoke name="', '">'),
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        pad="",
        gap="\n",
        end="</invoke>",
    ),
}
TYPE_MARKS: Mapping[str, bool | None] = {'string="true">': True, 'string="false">': False, ">": None}
"""What separates a key from its value in a style that says types, with what each says of the value."""

LITERAL_MARKS: Mapping[CallStyle, LiteralMarks] = {
    "python": LiteralMarks(("", "("), "=", ")", None),
    "gemma": LiteralMarks(("call:", "{"), ":", "}", '<|"|>'),
    "function_gemma": LiteralMarks(("call:", "{"), ":", "}", "<escape>"),
}

CALL_MARKS: Mapping[str, XmlMarks | LiteralMarks] = {**XML_MARKS, **LITERAL_MARKS}
"""The marks of every style."""

_SPACES = r"\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
PLAIN_NAME = rf"""[^{_SPACES}:=,<>{{}}()\[\]"'|\\]+"""
"""A regular expression of the names and keys that need no quotes. Every style can write them.

It names all white space of ECMA-262, which grammars follow, and of Python, because `\\s` is not the same in both.
"""
PYTHON_WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
"""Python's names of values. Models that see them in their prompts write them too, so every reader takes them."""


def is_plain_name(text: str) -> bool:
    """Whether every style can write the text as a name or key."""
    return re.fullmatch(PLAIN_NAME, text) is not None


def json_of(text: str, types: Collection[str]) -> str | None:
    """The JSON that a value's text means where it may be of these types; None if it is not JSON of one of them.

    Strings in quotes are not taken, because a string has none in the styles that need to ask.
    """
    text = PYTHON_WORDS.get(text, text)
    kind = _type_of_json(text)
    return text if kind is not None and kind != "string" and kind in types else None


def _type_of_json(text: str) -> str | None:
    """The type of a JSON text; None if it is none."""
    if not text or text != text.strip():
        return None
    try:
        # Only the type is of interest, so long numbers need not be worked out.
        value = json.loads(text, parse_int=lambda _: 0, parse_float=lambda _: 0.5, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return type_of(value)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def type_of(value: Any) -> str:
    """The type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float() | Decimal():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentTypes:
    """The types that each argument of a tool may have.

    Attributes:
        by_name: The types of the declared arguments.
        others: The types of any other argument.
    """

    by_name: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    others: frozenset[str] = ALL_TYPES

    def of(self, name: str) -> frozenset[str]:
        """The types of an argument."""
        return self.by_name.get(name, self.others)

    def schema(self) -> dict[str, Any]:
        """A schema of arguments of these types, which says nothing else."""
        return {
            "type": "object",
            "properties": {
                name: {"type": sorted(types)} for name, types in self.by_name.items() if is_plain_name(name)
            },
            "additionalProperties": {"type": sorted(self.others)},
        }

    @classmethod
    def read(cls, parameters: Mapping[str, Any] | bool | None) -> "ArgumentTypes":
        """The types of a tool's arguments, by the JSON Schema of its parameters.

        The types in `type`, `enum`, `const`, local `$ref`, `allOf`, `anyOf` and `oneOf` are seen.
        """
        types = _Types(parameters)
        schema = types.resolved(parameters)
        properties = schema.get("properties")
        others = schema.get("additionalProperties", True)
        return cls(
            {name: types.of(each) for name, each in properties.items()} if isinstance(properties, Mapping) else {},
            ALL_TYPES if schema.get("patternProperties") or others is False else types.of(others),
        )


class _Types:
    """Finds types in one document, with a bound on the work."""

    def __init__(self, document: Any):
        self._document = document
        self._num_visits = 0

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """The schema, or the one to which it refers; {} where that is not known."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return {}
            if "$ref" not in schema:
                return schema
            schema = self._target(schema["$ref"])
        return {}

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types of the values that a schema allows, and perhaps others."""
        self._num_visits += 1
        schema = self.resolved(schema)
        if depth > _MAX_DEPTH or self._num_visits > _MAX_VISITS:
            return ALL_TYPES
        found = ALL_TYPES
        if isinstance(kinds := schema.get("type"), str | list):
            found &= _named([kinds] if isinstance(kinds, str) else kinds)
        if isinstance(values := schema.get("enum"), list):
            found &= _named([type_of(value) for value in values])
        if "const" in schema:
            found &= _named([type_of(schema["const"])])
        for keyword in ("allOf", "anyOf", "oneOf"):
            if isinstance(members := schema.get(keyword), list) and members:
                each = [self.of(member, depth + 1) for member in members]
                found &= frozenset.intersection(*each) if keyword == "allOf" else frozenset.union(*each)
        return found

    def _target(self, reference: Any) -> Any:
        """What a reference leads to; None where it does not lead to a place in this document."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._document
        for token in reference[1:].split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                return None
            found = found[key]
        return found if reference[1:2] in ("", "/") else None


def _named(kinds: Collection[Any]) -> frozenset[str]:
    """Types as JSON Schema names them. A number may be written without a point."""
    found = frozenset(kind for kind in kinds if isinstance(kind, str))
    return (found | {"integer"} if "number" in found else found) & ALL_TYPES
