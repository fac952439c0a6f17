"""Whether a value is valid for a `Document`, read straight off its docstrings. Slow and simple, on purpose."""

import functools
import json
import re
import warnings
from decimal import Decimal
from fractions import Fraction

from jsg.constrained.chars.chardfa import CharDfa
from jsg.constrained.schema.formats import format_expr
from jsg.constrained.schema.shapes import (
    Array,
    Boolean,
    Const,
    Document,
    NodeName,
    Null,
    Number,
    Object,
    Shape,
    String,
)


def parse(text: str):
    return json.loads(text, parse_float=Decimal)


def is_valid(document: Document, value, node: NodeName | None = None) -> bool:
    return any(_fits(document, value, shape) for shape in document.nodes[node or document.root])


def _same(one, other) -> bool:
    """Equality as JSON Schema has it: 1 is 1.0, and true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if _is_number(one) and _is_number(other):
        return _exact(one) == _exact(other)
    return type(one) is type(other) and one == other


def _is_number(value) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _exact(value) -> Fraction:
    return Fraction(value if not isinstance(value, float) else repr(value))


def _fits(document: Document, value, shape: Shape) -> bool:
    match shape:
        case Const(text):
            return _same(value, parse(text))
        case Boolean():
            return isinstance(value, bool)
        case Null():
            return value is None
        case Number():
            return _is_number(value) and _fits_number(_exact(value), shape)
        case String():
            return isinstance(value, str) and _fits_string(value, shape)
        case Array():
            return isinstance(value, list) and _fits_array(document, value, shape)
        case Object():
            return isinstance(value, dict) and _fits_object(document, value, shape)


def _fits_number(value: Fraction, shape: Number) -> bool:
    if shape.min is not None and not (value > shape.min or (value == shape.min and not shape.is_min_exclusive)):
        return False
    if shape.max is not None and not (value < shape.max or (value == shape.max and not shape.is_max_exclusive)):
        return False
    if shape.is_integer and value.denominator != 1:
        return False
    if any(value % Fraction(step) for step in shape.multiple_of):
        return False
    if not all(value % Fraction(step) for step in shape.not_multiple_of):
        return False
    return value not in {Fraction(number) for number in shape.excluded}


def _fits_string(value: str, shape: String) -> bool:
    if len(value) < shape.min_length or (shape.max_length is not None and len(value) > shape.max_length):
        return False
    if not all(_is_found(pattern, value) for pattern in shape.patterns):
        return False
    if any(_is_found(pattern, value) for pattern in shape.not_patterns):
        return False
    return value not in shape.excluded and all(_format(name).accepts(value) for name in shape.formats)


@functools.cache
def _format(name: str) -> CharDfa:
    return CharDfa.of(format_expr(name))  # formats have tests of their own


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Python's meaning of the pattern, where ECMA-262's is another one."""
    pattern = re.sub(r"\\p\{(Letter|L)\}", r"[^\\W\\d_]", pattern).replace(r"\p{digit}", r"\d")
    pattern = re.sub(r"\\c([A-Za-z])", lambda match: f"\\x{ord(match[1]) % 32:02x}", pattern)
    pattern = re.sub(r"(?<!\\)\$(?=$|\)|\|)", r"\\Z", pattern)
    pattern = pattern.replace(r"\d", "[0-9]") if "[" not in pattern else pattern
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # `[[a]` may mean something else one day
        return re.compile(pattern.replace("(?<", "(?P<").replace("(?P<=", "(?<=").replace("(?P<!", "(?<!"))


def _is_found(pattern: str, value: str) -> bool:
    return _compiled(pattern).search(value) is not None


def _fits_array(document: Document, value: list, shape: Array) -> bool:
    if len(value) < shape.min_items or (shape.max_items is not None and len(value) > shape.max_items):
        return False
    for i, item in enumerate(value):
        if not is_valid(document, item, shape.prefix[i] if i < len(shape.prefix) else shape.items):
            return False
    return all(any(is_valid(document, item, node) for item in value[start:]) for node, start in shape.some)


def _fits_object(document: Document, value: dict, shape: Object) -> bool:
    if len(value) < shape.min_properties or (shape.max_properties is not None and len(value) > shape.max_properties):
        return False
    if not shape.required <= value.keys():
        return False
    if not all(is_valid(document, item, _member(document, shape, name)) for name, item in value.items()):
        return False
    return _serves(document, {n: v for n, v in value.items() if n not in shape.properties}, shape.some)


def _serves(document: Document, members: dict, some: tuple[tuple[String, NodeName], ...]) -> bool:
    """Whether each of `some` can have a different member."""
    if not some:
        return True
    (name_shape, node), *rest = some
    return any(
        _fits_string(name, name_shape)
        and is_valid(document, item, node)
        and _serves(document, {n: v for n, v in members.items() if n != name}, tuple(rest))
        for name, item in members.items()
    )


def _member(document: Document, shape: Object, name: str) -> NodeName:
    if name in shape.properties:
        return shape.properties[name]
    if shape.names is not None and not any(_fits(document, name, names) for names in shape.names):
        return "never"
    cells = [
        cell.node
        for cell in shape.patterns
        if all(_is_found(p, name) for p in cell.matches) and not any(_is_found(p, name) for p in cell.excludes)
    ]
    assert len(cells) <= 1, f"{name!r} belongs to two of {shape.patterns}"
    if cells:
        return cells[0]
    if any(_is_found(pattern, name) for pattern in shape.additional_excludes):
        return "never"
    return shape.additional
