"""Makes the expression of the arguments of a call in a style other than JSON: all that is between its head and end.

The XML styles write strings as they are. So a reader takes a text for a string only where it is not JSON of a type that
the argument may have, as far as `ArgumentTypes` knows. The grammar allows a text only if it is valid as it is read.
"""

import dataclasses
import functools
import json
from collections.abc import Collection
from typing import final

from jsg.constrained.call_styles import ALL_TYPES, LITERAL_MARKS, XML_MARKS, ArgumentTypes, CallStyle, XmlMarks, json_of
from jsg.constrained.ir import EMPTY, NEVER, Expr, any_of, literal, optional, seq
from jsg.constrained.schema.json_text import words
from jsg.constrained.schema.objects import bare_object_expr
from jsg.constrained.schema.scope import Scope
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
from jsg.constrained.schema.spelling import JSON, Mark, Spelling, spelling_of
from jsg.constrained.schema.strings import described, raw_expr
from jsg.constrained.schema.whitespace import Spacing
from jsg.constrained.special_tokens import spelled
from jsg.errors import GrammarError

_WORDS = {"true": (b"True", b"true"), "false": (b"False", b"false"), "null": (b"None", b"null")}
"""The spellings of words that are whole values. Templates of some models show them as Python has them."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class CallForm:
    """The form of the arguments of a call.

    Attributes:
        style: Its style.
        special: The marks of the style that are special tokens, or the special tokens in its marks.
        types: The types that a reader expects of the arguments.
    """

    style: CallStyle
    special: Collection[str]
    types: ArgumentTypes

    @property
    def spelling(self) -> Spelling:
        """The notation of the values."""
        return spelling_of(self.style, self.special)


def arguments_expr(scope: Scope, document: Document, form: CallForm) -> Expr:
    """The arguments of a call that are valid for the document's root, and the gap before the first of them.

    Raises:
        GrammarError: The arguments can be no objects, or the style cannot write them.
    """
    shapes = document.nodes[document.root]
    objects = [shape for shape in shapes if isinstance(shape, Object)]
    if len(objects) < len(shapes):
        raise GrammarError(
            "the arguments of a call must be an object that is described by properties, and not by enum or const, in "
            "the form in which this model writes calls of tools; describe its properties"
        )
    marks = XML_MARKS.get(form.style)
    if marks is None:
        assign = literal(LITERAL_MARKS[form.style].assign)
        spelling = dataclasses.replace(form.spelling, name_begin=b"")
        spacing = dataclasses.replace(scope.spacing, colon=assign)
        top = dataclasses.replace(scope, spelling=spelling, spacing=spacing)
    else:
        top = _xml_scope(scope, objects, marks, form)
    found = any_of([bare_object_expr(top, shape) for shape in objects])
    return found if marks is None or found == NEVER else seq(_gap(marks), found)


def _xml_scope(scope: Scope, objects: list[Object], marks: XmlMarks, form: CallForm) -> Scope:
    """A scope in which an object's members are arguments between marks."""

    def mark(text: str) -> Expr:
        return literal(spelled(text, form.special))

    gap = _gap(marks)
    between = gap if marks.value[0] else EMPTY
    colon = seq(mark(marks.key[1]), between, mark(marks.value[0]), literal(marks.pad))
    spelling = dataclasses.replace(JSON, name_begin=spelled(marks.key[0], form.special))
    values = _XmlValues(scope, marks, form, gap, _types_of_nodes(objects, form.types))
    spacing = Spacing(EMPTY, colon, EMPTY)
    return dataclasses.replace(scope, spelling=spelling, spacing=spacing, value=values.value)


def _gap(marks: XmlMarks) -> Expr:
    return optional(literal(marks.gap)) if marks.is_gap_optional else literal(marks.gap)


def _types_of_nodes(objects: list[Object], types: ArgumentTypes) -> dict[NodeName, set[frozenset[str]]]:
    """The sets of types that a reader expects for the values of each node."""
    found: dict[NodeName, set[frozenset[str]]] = {}
    for shape in objects:
        for name, node in shape.properties.items():
            found.setdefault(node, set()).add(types.of(name))
        others = [pattern.node for pattern in shape.patterns] + [node for _, node in shape.some] + [shape.additional]
        for node in others:
            found.setdefault(node, set()).add(types.others)
    return found


@final
class _XmlValues:
    """The values of the XML styles, each with the mark and the gap after it."""

    def __init__(
        self,
        scope: Scope,
        marks: XmlMarks,
        form: CallForm,
        gap: Expr,
        types: dict[NodeName, set[frozenset[str]]],
    ) -> None:
        self._scope = scope
        self._says_type = marks.says_type
        self._mark = Mark.of(marks.value[1], form.special)
        self._pad = marks.pad
        self._gap = gap
        self._types = types

    def value(self, node: NodeName) -> Expr:
        """The values of a node, as a call of a rule."""
        return self._scope.book.call(("argument", node), f"argument {node}", lambda: self._value(node))

    def _value(self, node: NodeName) -> Expr:
        shapes = self._scope.shapes(node)
        if not self._says_type:
            for types in self._types[node]:
                _check_types(shapes, types)
        begins = (' string="true">', ' string="false">') if self._says_type else ("", "")
        strings = self._strings(shapes, node)
        # Where calls do not say the type, any text is a string or a value of a type that is allowed as a whole.
        is_any_text = String() in shapes and not self._says_type
        others = NEVER if is_any_text else self._others(shapes, node)
        parts = [
            seq(literal(begin), part) for begin, part in zip(begins, (strings, others), strict=True) if part != NEVER
        ]
        return seq(any_of(parts), self._gap) if parts else NEVER

    def _strings(self, shapes: tuple[Shape, ...], node: NodeName) -> Expr:
        """The strings, with the mark."""
        pad = literal(self._pad)
        known = [json.loads(shape.text) for shape in shapes if isinstance(shape, Const) and _is_text(shape)]
        for text in known:
            self._mark.check(text)
            if not self._is_read_as_string(text, node):
                _check_reading(text, shapes)
        readable = {text for text in known if self._is_read_as_string(text, node)}
        options = [seq(words(((text + self._pad).encode() + self._mark.spelling) for text in readable))]
        for shape in shapes:
            if isinstance(shape, String):
                # Any string may end in the pad, which is then no part of it.
                options.append(self._raw(shape, EMPTY if shape == String() else pad, node))
        return any_of(options)

    def _raw(self, shape: String, before: Expr, node: NodeName) -> Expr:
        """A string as it is, with the mark, as a call of the rule that all strings of this shape share."""
        make = functools.partial(raw_expr, self._scope, shape, self._mark, before)
        return self._scope.book.call(("argument", shape), described(shape, node), make)

    def _is_read_as_string(self, text: str, node: NodeName) -> bool:
        return self._says_type or all(
            types == {"string"} or json_of(text, types) is None for types in self._types[node]
        )

    def _others(self, shapes: tuple[Shape, ...], node: NodeName) -> Expr:
        """The values that are no strings, with the mark."""
        others = [shape for shape in shapes if not isinstance(shape, String) and not _is_text(shape)]
        found = {shape.text for shape in others if isinstance(shape, Const)} & _WORDS.keys()
        found.update(("true", "false") if Boolean() in others else (), ("null",) if Null() in others else ())
        rest = [shape for shape in others if not _is_word(shape)]
        options = [words(spelling for word in found for spelling in _WORDS[word])]
        options += [self._scope.alternatives(rest, node)] if rest else []
        value = any_of(options)
        return NEVER if value == NEVER else seq(value, literal(self._pad), literal(self._mark.spelling))


def _is_text(shape: Shape) -> bool:
    return isinstance(shape, Const) and shape.text[0] == '"'


def _is_word(shape: Shape) -> bool:
    return isinstance(shape, Boolean | Null) or (isinstance(shape, Const) and shape.text in _WORDS)


def _check_types(shapes: tuple[Shape, ...], types: frozenset[str]) -> None:
    """Refuses values that a reader would take for others.

    Raises:
        GrammarError: The reader does not expect their type, or a string may look like another value that is not valid.
    """
    unseen = {kind for shape in shapes for kind in _types_of_shape(shape)} - types
    if unseen:
        raise GrammarError(
            "in the form in which this model writes calls the type of an argument must be seen without "
            f'working its schema out, but that it may be of type {min(unseen)} is not seen; give it a "type"'
        )
    whole = {kind for kind, shape in _WHOLE.items() if shape in shapes}
    whole |= {"integer"} if "number" in whole else set()
    # What looks like the mark after a value may be in a string of an array or object, unless the value is a string.
    has_strings = any(isinstance(shape, String) or _is_text(shape) for shape in shapes)
    unclear = types & {"array", "object"} if has_strings and String() not in shapes else frozenset[str]()
    if any(isinstance(shape, String) for shape in shapes):
        unclear |= types - {"string"} - whole
    if unclear:
        raise GrammarError(
            f"an argument that may be a string must not also be of type {min(unclear)} if either has a "
            "restriction, because this model writes strings without quotes, so that the two cannot be told apart; "
            "allow only one of them"
        )


def _check_reading(text: str, shapes: tuple[Shape, ...]) -> None:
    """Refuses a string that a reader takes for another value, unless that value is valid too.

    Raises:
        GrammarError: The value is not valid, so the string would be lost.
    """
    value = json_of(text, ALL_TYPES) or ""
    kind = _types_of_shape(Const(value))[0]
    if not {Const(value), _WHOLE[kind], *([Number()] if kind == "integer" else [])} & {*shapes}:
        raise GrammarError(
            f"the string {text[:60]!r} under enum or const is read as {kind} where the argument may be that, "
            'because this model writes strings without quotes; give the argument "type": "string"'
        )


_WHOLE: dict[str, Shape] = {
    "null": Null(),
    "boolean": Boolean(),
    "integer": Number(is_integer=True),
    "number": Number(),
    "array": Array(),
    "object": Object(),
}
"""For each type, the shape of all its values."""


def _types_of_shape(shape: Shape) -> tuple[str, ...]:
    match shape:
        case Const(text):
            return (_TYPE_OF_SIGN.get(text[0], "integer" if text.lstrip("-").isdigit() else "number"),)
        case String():
            return ("string",)
        case Number(is_integer=is_integer):
            return ("integer",) if is_integer else ("number",)
        case Boolean():
            return ("boolean",)
        case Null():
            return ("null",)
        case Array():
            return ("array",)
        case Object():
            return ("object",)


_TYPE_OF_SIGN = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}
