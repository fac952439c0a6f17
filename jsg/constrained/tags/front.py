"""Makes a grammar of a structural tag: free text with places in it that a grammar governs.

Two forms are read. The older form is SGLang's; it has `structures` (each with begin, schema and end) and `triggers`.
The newer form is XGrammar's, a tree of formats under `format`:

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"type": "tag", "begin": "<f=add>", "content": {"type": "json_schema", "json_schema": {…}}, "end": "</f>"}]}}

Free text inside a tag ends where the end of the tag first comes up. A `{"type": "token", "token": "<name>"}` means the
special token that is written so; it may also be the begin or the end of a tag, or a trigger. With `if_known` the model
need not have it, and then it matches nothing. A `json_schema` with `or_any_object` means any JSON object where its
schema cannot be enforced. One with a `style` means the arguments of a call in a style of `jsg.constrained.call_styles`,
without the head and the end of the call. A `field` beside a grammar is the field of the request that brought it: errors
in this grammar name the field, and not the place in the structural tag.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, final, get_args

from jsg.constrained.build.builder import build
from jsg.constrained.call_styles import XML_MARKS, ArgumentTypes, CallStyle
from jsg.constrained.chars import charset
from jsg.constrained.choices import choices_grammar
from jsg.constrained.ebnf.parser import ebnf_grammar
from jsg.constrained.ir import EMPTY, ByteSet, Call, Expr, Grammar, Repeat, alt, literal, merge_rules, optional, seq
from jsg.constrained.json_input import read_json
from jsg.constrained.limits import LIMITS, Limits, check
from jsg.constrained.regex.parse import regex_grammar
from jsg.constrained.schema.front import schema_grammar
from jsg.constrained.special_tokens import FIRST_BYTE, LAST_BYTE, may_be_text, special_bytes
from jsg.constrained.tags.fields import PARAM, Fields
from jsg.constrained.tags.free_text import Branch, free_text
from jsg.constrained.utf8 import utf8
from jsg.errors import GrammarError
from jsg.types import GRAMMAR_FIELDS, AdditionalProperties, PropertyOrder, Whitespace

Ends = tuple[bytes, ...]
"""Strings, one of which must follow a format. () where nothing need follow."""


def structural_tag_grammar(
    text: str,
    limits: Limits = LIMITS,
    *,
    whitespace: Whitespace = "fixed",
    property_order: PropertyOrder = "declared",
    additional_properties: AdditionalProperties = "open",
) -> Grammar:
    """The grammar of a structural tag.

    Args:
        text: The tag as JSON.
        limits: What the grammar may cost.
        whitespace: The whitespace in the JSON of its schemas.
        property_order: The order of the properties in its schemas.
        additional_properties: Whether objects of its schemas may have undeclared members; see `schema_grammar`.

    Raises:
        GrammarError: The text is no structural tag, or uses something that is not supported.
    """
    fields = Fields.read(read_json(text, PARAM, limits), "the structural tag")
    fields.expect_type("structural_tag")
    formats = _Formats(limits, whitespace, property_order, additional_properties)
    is_tree = fields.has("format")
    expr = formats.of(fields.object("format"), ()) if is_tree else formats.of_structures(fields)
    fields.end()
    return Grammar(PARAM, {PARAM: expr, **formats.rules}, annotations=tuple(formats.annotations))


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Style:
    """How the values of a schema are written: as JSON, or as arguments of a call."""

    name: str = "json"
    special: tuple[str, ...] = ()

    @property
    def call_style(self) -> CallStyle | None:
        """The style of the arguments of a call; None for JSON."""
        return next((style for style in get_args(CallStyle) if style == self.name), None)

    def loosest(self, schema: Any) -> str:
        """A schema, as JSON, of any object. A reader of the call must still take arguments for what they are."""
        if self.name not in XML_MARKS:
            return '{"type": "object"}'
        return json.dumps(ArgumentTypes.read(schema).schema())


@final
class _Formats:
    """Makes expressions of formats, and the rules that they call.

    Attributes:
        rules: The rules so far; none is called `structural_tag`.
        annotations: What its schemas have in them that is not enforced, and where, for reports.
    """

    def __init__(
        self,
        limits: Limits,
        whitespace: Whitespace,
        property_order: PropertyOrder,
        additional_properties: AdditionalProperties,
    ):
        self.rules: dict[str, Expr] = {}
        self.annotations: list[str] = []
        self._limits = limits
        self._whitespace: Whitespace = whitespace
        self._property_order: PropertyOrder = property_order
        self._additional_properties: AdditionalProperties = additional_properties
        self._merged: dict[tuple[str, ...], Call] = {}
        self._compilers: dict[str, Callable[[Fields, Ends], Expr]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": functools.partial(self._embedded, "pattern", regex_grammar),
            "grammar": functools.partial(self._embedded, "grammar", ebnf_grammar),
            "any_text": self._any_text,
            "whole": self._whole,
            "sequence": self._sequence,
            "or": self._or,
            "optional": functools.partial(self._repeated, 0, 1),
            "star": functools.partial(self._repeated, 0, None),
            "plus": functools.partial(self._repeated, 1, None),
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "token_triggered_tags": self._token_triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "dispatch": self._dispatch,
            "token": self._token,
        }

    def of(self, fields: Fields, ends: Ends) -> Expr:
        """The expression of one format and one of `ends` after it."""
        kind = fields.string("type")
        compiler = self._compilers.get(kind)
        if compiler is None:
            raise fields.refusal(
                f"a format's type must be one of {', '.join(self._compilers)}", repr(kind[:60]), "use one of these"
            )
        expr = compiler(fields, ends)
        fields.end()
        return expr

    def of_structures(self, fields: Fields) -> Expr:
        """The expression of the older form."""
        triggers = [text.encode() for text in fields.strings("triggers")]
        tags: list[tuple[bytes, Expr]] = []
        for structure in fields.objects("structures"):
            begin = structure.string("begin").encode()
            schema = self._schema(structure.value("schema"), structure)
            end = structure.string("end")
            structure.end()
            tags.append((begin, seq(schema, literal(end))))
        return self._triggered(fields, triggers, tags, ends=())

    # Formats that match one piece of text.

    def _const_string(self, fields: Fields, ends: Ends) -> Expr:
        return seq(literal(fields.string("value")), _one_of(ends))

    def _token(self, fields: Fields, ends: Ends) -> Expr:
        return seq(literal(_spelling(fields)), _one_of(ends))

    def _json_schema(self, fields: Fields, ends: Ends) -> Expr:
        schema = fields.value("json_schema")
        is_free = fields.flag("any_order") or self._property_order == "free"
        style = _Style(fields.choice("style", ("json", *get_args(CallStyle))))
        if style.call_style is not None:
            style = dataclasses.replace(style, special=tuple(fields.strings("special_tokens", ())))
        part = self._schema(
            schema,
            fields,
            "free" if is_free else "declared",
            style,
            or_any_object=fields.flag("or_any_object"),
        )
        return seq(part, _one_of(ends))

    def _embedded(self, member: str, make: Callable[[str, Limits], Grammar], fields: Fields, ends: Ends) -> Expr:
        """A grammar of another kind, whose text is a member of the format."""
        text = fields.string(member)
        part = self._merge((member, text), fields, lambda: make(text, self._limits))
        return seq(part, _one_of(ends))

    def _any_text(self, fields: Fields, ends: Ends) -> Expr:
        excluded = [text.encode() for text in fields.strings("excludes", ())]
        most = fields.count("max_chars")
        if fields.flag("special_tokens"):
            return self._any_tokens(fields, excluded, most, ends)
        fields.expect_only("max_tokens", None, "a grammar over bytes cannot count tokens; use max_chars")
        if most is None:
            return self._free_text([], excluded, ends)
        if excluded or ends:
            raise fields.refusal(
                "any_text may have max_chars only where nothing is excluded and no end follows it",
                "both",
                "leave max_chars out",
            )
        return Repeat(utf8(charset.UNIVERSE), 0, most)

    def _any_tokens(self, fields: Fields, excluded: list[bytes], most: int | None, ends: Ends) -> Expr:
        """Any text with any special tokens in it."""
        if excluded or ends or most is not None:
            raise fields.refusal(
                "any_text with special_tokens must have nothing else, and no end behind it", "more", "leave it out"
            )
        name = Repeat(ByteSet(((0, LAST_BYTE - 1),)), 1, None)
        special = seq(ByteSet(((FIRST_BYTE, FIRST_BYTE),)), name, ByteSet(((LAST_BYTE, LAST_BYTE),)))
        return Repeat(alt(utf8(charset.UNIVERSE), special), 0, None)

    def _whole(self, fields: Fields, ends: Ends) -> Expr:
        """A grammar of any kind, as a client would send it alone."""
        kind, text = fields.choice("kind", GRAMMAR_FIELDS), fields.string("text")

        def make() -> Grammar:
            order, members = self._property_order, self._additional_properties
            match kind:
                case "json_schema":
                    return schema_grammar(text, self._whitespace, order, members, self._limits)
                case "structural_tag":
                    return structural_tag_grammar(
                        text,
                        self._limits,
                        whitespace=self._whitespace,
                        property_order=order,
                        additional_properties=members,
                    )
                case "regex":
                    return regex_grammar(text, self._limits)
                case "ebnf":
                    return ebnf_grammar(text, self._limits)
                case _:
                    return choices_grammar(text, self._limits)

        return seq(self._merge(("whole", kind, text), fields, make, kind), _one_of(ends))

    # Formats made of others.

    def _sequence(self, fields: Fields, ends: Ends) -> Expr:
        elements = fields.objects("elements")
        parts = [self.of(element, ()) for element in elements[:-1]]
        return seq(*parts, self.of(elements[-1], ends))

    def _or(self, fields: Fields, ends: Ends) -> Expr:
        return alt(*(self.of(element, ends) for element in fields.objects("elements")))

    def _repeat(self, fields: Fields, ends: Ends) -> Expr:
        least = fields.number("min")
        most = fields.number("max")
        if least < 0 or (most != -1 and most < least):
            raise fields.refusal("repeat must have 0 ≤ min ≤ max, or max -1", f"{least} and {most}", "correct them")
        return self._repeated(least, None if most == -1 else most, fields, ends)

    def _repeated(self, least: int, most: int | None, fields: Fields, ends: Ends) -> Expr:
        content = self.of(fields.object("content"), ())
        return seq(optional(content) if most == 1 and not least else Repeat(content, least, most), _one_of(ends))

    # Tags.

    def _tag(self, fields: Fields, ends: Ends) -> Expr:
        begin, rest = self._tag_parts(fields)
        return seq(literal(begin), rest, _one_of(ends))

    def _tag_parts(self, fields: Fields) -> tuple[bytes, Expr]:
        """The text that a tag begins with, and an expression of the rest."""
        begin = _text_or_token(fields, "begin", fields.value("begin"))
        end = fields.value("end")
        choices = [_text_or_token(fields, "end", each) for each in (end if isinstance(end, list) else [end])]
        ends = tuple(dict.fromkeys(choices)) if any(choices) else ()
        return begin, self.of(fields.object("content"), ends)

    def _tags(self, fields: Fields) -> list[tuple[bytes, Expr]]:
        tags: list[tuple[bytes, Expr]] = []
        for tag in fields.objects("tags"):
            tag.expect_type("tag")
            tags.append(self._tag_parts(tag))
            tag.end()
        return tags

    def _triggered_tags(self, fields: Fields, ends: Ends) -> Expr:
        triggers = [_text_or_token(fields, "triggers", value) for value in fields.list("triggers")]
        if not all(triggers):
            raise fields.refusal("no trigger may be empty", "an empty text", "leave it out")
        excluded = [text.encode() for text in fields.strings("excludes", ())]
        return self._triggered(fields, triggers, self._tags(fields), ends, excluded)

    def _token_triggered_tags(self, fields: Fields, ends: Ends) -> Expr:
        triggers = [special_bytes(text) for text in fields.strings("trigger_tokens")]
        fields.expect_only("exclude_tokens", [], "special tokens are never part of free text")
        return self._triggered(fields, triggers, self._tags(fields), ends)

    def _triggered(
        self,
        fields: Fields,
        triggers: list[bytes],
        tags: list[tuple[bytes, Expr]],
        ends: Ends,
        excluded: Sequence[bytes] = (),
    ) -> Expr:
        at_least_one = fields.flag("at_least_one")
        is_last = fields.flag("stop_after_first")
        by_trigger: dict[bytes, list[Expr]] = {trigger: [] for trigger in _shortest(triggers)}
        for begin, rest in tags:
            trigger = next((trigger for trigger in by_trigger if begin.startswith(trigger)), None)
            if trigger is None:
                raise fields.refusal(
                    "each tag must begin with one of the triggers", _shown(begin), "add its beginning to the triggers"
                )
            by_trigger[trigger].append(seq(literal(begin[len(trigger) :]), rest))
        for trigger, found in by_trigger.items():
            if not found:
                raise fields.refusal("each trigger must begin a tag", _shown(trigger), "leave it out or add a tag")
        tail = _one_of(ends) if is_last else EMPTY
        calls = {trigger: self._rule("tags", alt(*found)) for trigger, found in by_trigger.items()}
        branches = [Branch(trigger, seq(call, tail), is_last=is_last) for trigger, call in calls.items()]
        self._check_reachable(fields, [*calls], [*excluded, *ends])
        if not at_least_one:
            return self._free_text(branches, excluded, ends)
        first = alt(*(seq(literal(trigger), call) for trigger, call in calls.items()))
        if is_last:
            return seq(first, tail)
        return seq(first, self._free_text(branches, excluded, ends))

    def _tags_with_separator(self, fields: Fields, ends: Ends) -> Expr:
        tag = alt(*(seq(literal(begin), rest) for begin, rest in self._tags(fields)))
        least = 1 if fields.flag("at_least_one") else 0
        most = 1 if fields.flag("stop_after_first") else None
        tag = self._rule("tags", tag)
        return seq(Repeat(tag, least, most, literal(fields.string("separator"))), _one_of(ends))

    def _dispatch(self, fields: Fields, ends: Ends) -> Expr:
        is_last = not fields.flag("loop", default=True)
        excluded = [text.encode() for text in fields.strings("excludes", ())]
        branches: list[Branch] = []
        for trigger, content in fields.pairs("rules"):
            then = self._rule("tags", self.of(content, ()))
            tail = _one_of(ends) if is_last else EMPTY
            branches.append(Branch(trigger.encode(), seq(then, tail), is_last=is_last))
        self._check_reachable(fields, [branch.text for branch in branches], [*excluded, *ends])
        return self._free_text(branches, excluded, ends)

    # What formats share.

    def _check_reachable(self, fields: Fields, triggers: Sequence[bytes], stops: Sequence[bytes]) -> None:
        """Refuses a trigger that can never come up because a shorter string in it comes up first."""
        for trigger in triggers:
            for other in (*triggers, *stops):
                is_same = other == trigger
                if is_same and triggers.count(trigger) == 1 and trigger not in stops:
                    continue
                # In the spelling of a special token nothing comes up but the token.
                if is_same or (other in trigger and may_be_text(trigger)):
                    raise fields.refusal(
                        "no trigger may have another trigger, an excluded text or the end of its tag in it",
                        f"{_shown(trigger)} and {_shown(other)}",
                        "change one of them",
                    )

    def _free_text(self, branches: Sequence[Branch], excluded: Sequence[bytes], ends: Ends) -> Expr:
        """Free text with branches, without the excluded texts, up to one of `ends`."""
        forbidden = [Branch(text, None) for text in excluded if text not in ends]
        last = [Branch(end, EMPTY, is_last=True) for end in ends]
        return self._rule("text", free_text([*branches, *forbidden, *last], self._limits, may_end=not ends))

    def _schema(
        self,
        schema: Any,
        fields: Fields,
        property_order: PropertyOrder | None = None,
        style: "_Style | None" = None,
        *,
        or_any_object: bool = False,
    ) -> Expr:
        """A value of the schema. With `or_any_object`, a schema that cannot be enforced allows any object."""
        order: PropertyOrder = property_order or self._property_order
        text = json.dumps(schema)
        style = style or _Style()

        def read(schema_text: str) -> Grammar:
            return schema_grammar(
                schema_text,
                self._whitespace,
                order,
                self._additional_properties,
                self._limits,
                style.call_style,
                style.special,
            )

        def make() -> Grammar:
            if not or_any_object:
                return read(text)
            try:
                grammar = read(text)
                build(grammar, self._limits)  # only this shows that the grammar is too large
            except GrammarError as error:
                return dataclasses.replace(read(style.loosest(schema)), annotations=(f"the whole schema ({error})",))
            return grammar

        return self._merge(("json_schema", order, text, str(or_any_object), str(style)), fields, make)

    def _merge(
        self, key: tuple[str, ...], fields: Fields, make: Callable[[], Grammar], kind: str | None = None
    ) -> Call:
        """A call of another grammar. Its rules are added once, however often it is in the tag.

        Errors in a grammar that has a `kind` are the same as if it were alone.
        """
        field = fields.string("field") if fields.has("field") else None
        if key not in self._merged:
            try:
                grammar = make()
            except GrammarError as error:
                if (field := error.field or field) is None and kind is None:
                    raise GrammarError(f"{fields.path}: {error}", PARAM) from error
                raise GrammarError(error.message, kind or PARAM, field) from error
            start, rules = merge_rules(grammar, f"{len(self._merged)}:")
            self.rules |= rules
            self.annotations += [f"{annotation} in {fields.path}" for annotation in grammar.annotations]
            self._merged[key] = Call(start)
        return self._merged[key]

    def _rule(self, name: str, expr: Expr) -> Expr:
        if isinstance(expr, Call):
            return expr
        check(len(self.rules), self._limits.positions, "rules", PARAM)
        name = f"{name} {len(self.rules)}"
        self.rules[name] = expr
        return Call(name)


def _one_of(ends: Ends) -> Expr:
    return alt(*map(literal, ends)) if ends else EMPTY


def _shortest(triggers: Sequence[bytes]) -> list[bytes]:
    """The triggers without those that begin with another trigger, because the shorter one comes up first."""
    kept: list[bytes] = []
    for trigger in sorted(triggers):
        if not (kept and trigger.startswith(kept[-1])):
            kept.append(trigger)
    return kept


def _spelling(fields: Fields) -> bytes:
    fields.flag("if_known")  # `special_tokens.named_tokens` reads it; a token that is not known never comes
    return special_bytes(fields.string("token", not_empty=True))


def _text_or_token(fields: Fields, name: str, value: Any) -> bytes:
    """The bytes of a text, or of the special token that a format of type token names."""
    if isinstance(value, str):
        return fields.checked(name, value).encode()
    token = Fields.read(value, f"{fields.path}.{name}")
    token.expect_type("token")
    spelling = _spelling(token)
    token.end()
    return spelling


def _shown(text: bytes) -> str:
    kind = "" if may_be_text(text) else "the token "
    return kind + repr(text.strip(bytes((FIRST_BYTE, LAST_BYTE)))[:60].decode(errors="replace"))
