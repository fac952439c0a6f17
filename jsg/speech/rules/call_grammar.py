"""Makes the structural tag that lets a model call tools, in the form that it was trained on and in no other."""

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, final

from jsg.errors import GrammarError
from jsg.speech.dialects import Dialect, Piece, Slot
from jsg.speech.rules.styled_calls import styled_call
from jsg.types import GrammarSpec

Format = dict[str, Any]


NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client's, which the model may call.

    Attributes:
        name: The name by which it is called.
        description: What it does.
        parameters: A JSON Schema of its arguments, which are an object; None where the client gave none.
        field: The field in which the client wrote the parameters.
        is_strict: False where the client allows arguments that do not match the schema. They are then any object if the
            schema cannot be enforced or is missing.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    field: str | None = None
    is_strict: bool = True

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON Schema that the arguments of a call match."""
        if self.parameters is None:
            return NO_ARGUMENTS if self.is_strict else ANY_ARGUMENTS
        return self.parameters

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates know it."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.parameters or {}}
        return {"type": "function", "function": function}


def tools_to_structural_tag(
    tools: Sequence[Tool],
    tool_choice: Literal["auto", "required"],
    dialect: Dialect,
    *,
    parallel: bool = True,
    special_tokens: Collection[str] = (),
    form: Mapping[str, Any] | None = None,
) -> GrammarSpec:
    """The grammar of an answer that may, or must, call tools.

    With "auto" the answer is free text with calls in it, and whatever begins like a call must be one. With "required"
    it is calls and nothing else, at least one. If the text of an answer must have a form, "auto" means calls and
    nothing else, or the form and nothing else.

    Args:
        tools: The tools that may be called, at least one. Each has its own name.
        tool_choice: Whether there must be a call.
        dialect: How the model writes a call.
        parallel: An answer may have several calls; after the only one nothing follows.
        special_tokens: Written forms of the tokenizer's special tokens. A marker of the dialect that is among them
            is written as a special token, not as text.
        form: The form of an answer without calls, as a format of a structural tag; None for free text.

    Raises:
        GrammarError: Arguments could not be an object.
    """
    writer = _Writer(tools, dialect, frozenset(special_tokens), parallel)
    if tool_choice == "required":
        answer = writer.calls()
    elif form is None:
        answer = writer.text_or_calls()
    else:
        answer = {"type": "or", "elements": [writer.calls(), writer.text(form)]}
    return _whole(answer, form)


def form_to_structural_tag(
    form: Mapping[str, Any], dialect: Dialect, special_tokens: Collection[str] = ()
) -> GrammarSpec:
    """The grammar of an answer without tools whose text has a form, with the header that the dialect puts before it."""
    return _whole(_Writer([], dialect, frozenset(special_tokens), False).text(form), form)


def _whole(answer: Format, form: Mapping[str, Any] | None) -> GrammarSpec:
    """The grammar of an answer. For what it costs the field is to blame that brought most of its text."""
    text = json.dumps({"type": "structural_tag", "format": answer}, ensure_ascii=False)
    is_of_form = form is not None and 2 * len(json.dumps(form, ensure_ascii=False)) > len(text)
    return GrammarSpec("structural_tag", text, field=form.get("field") if form and is_of_form else "tools")


@final
class _Writer:
    """Writes the formats of the answers that a dialect has for some tools."""

    def __init__(self, tools: Sequence[Tool], dialect: Dialect, special: frozenset[str], parallel: bool):
        self._tools = tools
        self._dialect = dialect
        self._special = special.intersection(dialect.markers)
        # Where the markers of messages are special tokens, one that no grammar may name ends the answers of the model.
        self._ends_answer = bool(dialect.messages and self._special) and dialect.call[-1] not in self._special
        self._parallel = parallel and not self._ends_answer

    def text(self, form: Mapping[str, Any] | None = None) -> Format:
        """A text that ends an answer; without a form it is free."""
        text = dict(form) if form else {"type": "any_text", "excludes": list(self._dialect.markers)}
        if self._dialect.messages is None:
            return text
        return _sequence(*self._start(), *self._written(self._dialect.messages.last), text)

    def calls(self) -> Format:
        """Calls and nothing else."""
        answer = _sequence(*self._start(), self._section())
        if self._dialect.wrap[0] not in self._special:
            return answer
        return {"type": "or", "elements": [answer, _sequence(_token(self._dialect.wrap[0]), self._wrapped())]}

    def text_or_calls(self) -> Format:
        """Free text with calls in it, or with calls after it where answers are rows of messages."""
        if self._dialect.messages is None:
            return self._text_with_calls()
        begin, end = self._dialect.messages.before
        text: Format = {"type": "any_text", "excludes": list(self._dialect.markers)}
        first, *head = self._written(begin)
        before = {"type": "tag", "begin": first, "content": _sequence(*head, text), "end": self._written(end)}
        texts = {"type": "star", "content": _sequence(*self._start(), before)}
        return _sequence(texts, {"type": "or", "elements": [self.calls(), self.text()]})

    def _text_with_calls(self) -> Format:
        section, (wrap, _) = self._dialect.section, self._dialect.wrap
        opening = (*section[0], *self._dialect.call)[0]
        triggers: list[str | Format] = []
        tags: list[Format] = []
        if opening in section[0] and opening not in self._dialect.markers:
            tags += [self._section_that_begins_with(tool) for tool in self._tools]
            triggers += [tag["begin"] for tag in tags]
        elif isinstance(opening, str) and section[0]:
            triggers += self._spellings(opening)
            begin, end = (self._written(pieces, is_lenient=True) for pieces in (section[0][1:], section[1]))
            content = _sequence(*begin, self._row(is_lenient=True), *end)
            tags += [_tag(trigger, content) for trigger in triggers]
        elif isinstance(opening, str):
            triggers += self._spellings(opening)
            tags += [self._tag(tool, begin, is_lenient=True) for tool in self._tools for begin in triggers]
        else:
            triggers += self._dialect.triggers[:1]
            tags += [self._tag(tool) for tool in self._tools]
        if wrap in self._special:
            triggers.append(_token(wrap))
            tags.append(_tag(_token(wrap), self._wrapped()))
        # A reader of the answer takes other openings, too, for the beginning of a call.
        others = (*self._dialect.openings([]), *self._dialect.markers)
        return {
            "type": "triggered_tags",
            "triggers": triggers,
            "tags": tags,
            "stop_after_first": bool(section[0]) or not self._parallel,
            "excludes": [text for text in dict.fromkeys(others) if text not in triggers],
        }

    def _section(self) -> Format:
        begin, end = (self._written(pieces) for pieces in self._dialect.section)
        return _sequence(*begin, self._row(), *end)

    def _section_that_begins_with(self, tool: Tool) -> Format:
        """A section, without markers, whose first call is of this tool."""
        begin, end = (self._written(pieces) for pieces in self._dialect.section)
        head, *rest = self._written(self._dialect.call, tool)
        one = _list([self._tag(each) for each in self._tools], "", parallel=False)
        more: Format = {"type": "star", "content": _sequence(*self._written(self._dialect.between), one)}
        return _tag("".join(map(str, (*begin, head))), _sequence(*rest, *([more] if self._parallel else ()), *end))

    def _wrapped(self) -> Format:
        """Calls after the special token that may begin them, and the one that then ends them."""
        end = self._dialect.wrap[1]
        return _sequence(self._section(), *(self._written((end,)) if end else ()))

    def _row(self, *, is_lenient: bool = False) -> Format:
        """One call or, if there may be several, a row of calls."""
        calls = (self._dialect.call, *(self._dialect.messages.calls if self._dialect.messages else ()))
        tags = [self._tag(tool, call=call, is_lenient=is_lenient) for tool in self._tools for call in calls]
        between = self._written(self._dialect.between)
        if all(isinstance(each, str) for each in between):
            return _list(tags, "".join(map(str, between)), self._parallel)
        one = _list(tags, "", parallel=False)
        return _sequence(one, {"type": "star", "content": _sequence(*between, one)}) if self._parallel else one

    def _start(self) -> list[Format]:
        """What a message begins with, which the prompt may have already."""
        messages = self._dialect.messages
        return [{"type": "optional", "content": _sequence(*self._written(messages.start))}] if messages else []

    def _tag(
        self,
        tool: Tool,
        begin: str | Format | None = None,
        *,
        call: tuple[Piece, ...] | None = None,
        is_lenient: bool = False,
    ) -> Format:
        """A call of a tool. `begin` spells its first marker."""
        call = call or self._dialect.call
        call = call[:-1] if self._ends_answer else call
        head = self._written(call[:1], tool) if begin is None else [begin]
        return _tag(head[0], _sequence(*head[1:], *self._written(call[1:], tool, is_lenient=is_lenient)))

    def _written(
        self, pieces: Iterable[Piece], tool: Tool | None = None, *, is_lenient: bool = False
    ) -> list[str | Format]:
        """Pieces of the dialect as texts and formats. With `is_lenient` markers may be spelled in any way."""
        found: list[str | Format] = []
        for piece in pieces:
            if isinstance(piece, str):
                spellings = self._spellings(piece)
                found.append(_either(spellings) if is_lenient and len(spellings) > 1 else spellings[-1])
            elif piece is Slot.NUMBER:
                found.append({"type": "regex", "pattern": "0|[1-9][0-9]{0,5}"})
            elif piece is Slot.MARKED_ID:
                marked = self._written(("[CALL_ID]",)), {"type": "regex", "pattern": "[a-zA-Z0-9]{9}"}
                found.append({"type": "optional", "content": _sequence(*marked[0], marked[1])})
            else:
                assert tool is not None, "only a call has slots for a tool"
                if piece is Slot.BODY:
                    found += self._body(tool)
                else:
                    found.append(tool.name if piece is Slot.NAME else _arguments(tool))
        return found

    def _spellings(self, text: str) -> list[str | Format]:
        """The spellings of a piece: plain characters, and a special token where it is one."""
        return [text, _token(text)] if text in self._special else [text]

    def _body(self, tool: Tool) -> list[str | Format]:
        style = self._dialect.call_style
        if style is not None:
            return styled_call(tool.name, _arguments(tool), style, self._special)
        name = json.dumps(tool.name, ensure_ascii=False)
        return [f'{{"name": {name}, "{self._dialect.arguments_key}": ', _arguments(tool), "}"]


def _arguments(tool: Tool) -> Format:
    lenient = {} if tool.is_strict else {"or_any_object": True}
    field = {} if tool.field is None else {"field": tool.field}
    return {"type": "json_schema", "json_schema": _object_schema(tool), **lenient, **field}


def _token(text: str) -> Format:
    return {"type": "token", "token": text}


def _tag(begin: str | Format, content: Format) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": ""}


def _either(spellings: Sequence[str | Format]) -> Format:
    return {"type": "or", "elements": [_sequence(each) for each in spellings]}


def _sequence(*elements: str | Format) -> Format:
    """The elements in this order; texts side by side are one."""
    found: list[Format] = []
    for each in elements:
        if not isinstance(each, str):
            found.append(each)
        elif found and found[-1]["type"] == "const_string":
            found[-1] = {"type": "const_string", "value": found[-1]["value"] + each}
        else:
            found.append({"type": "const_string", "value": each})
    return found[0] if len(found) == 1 else {"type": "sequence", "elements": found}


def _list(tags: list[Format], separator: str, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _object_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments. They are an object, even where the schema does not say so."""
    kind = tool.schema.get("type", "object")
    if kind == "object" or (isinstance(kind, list) and "object" in kind):
        return {**tool.schema, "type": "object"}
    if not tool.is_strict:
        return ANY_ARGUMENTS
    raise GrammarError(
        f"the parameters of a tool must be a JSON Schema of an object, but those of {tool.name[:60]!r} are not; "
        'give them "type": "object"',
        "tools",
        tool.field,
    )
