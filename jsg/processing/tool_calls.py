"""Finds calls of tools in the text of a model, in a whole text or as it comes.

Each model family was trained on one written form of calls, its dialect:

    llama3_json   {"name": "f", "parameters": {…}}; {"name": …}        with or without <|python_tag|> before it
    hermes        <tool_call> {"name": "f", "arguments": {…}} </tool_call>    with line breaks; Qwen too
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]   or   [TOOL_CALLS]f[ARGS]{…}

Text that only looks like a call (no JSON, a name that no tool has, arguments that are no object) stays text.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection
from typing import Literal, Protocol, final

from jsg.processing.call_reader import CallReader
from jsg.processing.json_scanner import ScanStep
from jsg.processing.stop_strings import StopMatcher
from jsg.processing.thoughts import MARKER_TOKENS

Dialect = Literal["llama3_json", "hermes", "mistral"]

_WHITESPACE = " \t\r\n"
_MAX_HELD_LEN = 400  # no header and no run of whitespace is held back that is longer
_HEADER = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """How a dialect writes calls.

    Attributes:
        openings: Strings that a call, or a list of calls, begins with.
        closing: The string that may stand behind a call as a part of it.
        arguments: Key of the arguments.
        between: Characters that are dropped between two calls.
        special: Strings that are special tokens in some tokenizers.
    """

    openings: tuple[str, ...]
    closing: str
    arguments: str
    between: str
    special: tuple[str, ...]


_FORMS: dict[Dialect, _Form] = {
    "llama3_json": _Form(
        ('{"name"', '{"type": "function"', "<|python_tag|>"), "", "parameters", _WHITESPACE + ";,", ("<|python_tag|>",)
    ),
    "hermes": _Form(("<tool_call>",), "</tool_call>", "arguments", _WHITESPACE, ("<tool_call>", "</tool_call>")),
    "mistral": _Form(("[TOOL_CALLS]",), "", "arguments", _WHITESPACE, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
}


def detect_dialect(chat_template: str | None) -> Dialect | None:
    """The dialect of a chat template; None if it is unknown."""
    text = chat_template or ""
    if "[TOOL_CALLS]" in text:
        return None if "[ARGS]" in text else "mistral"
    if "<tool_call>" in text:
        # Some families put something other than JSON between the same tags.
        return None if "<function=" in text or "<arg_key>" in text else "hermes"
    if "<|python_tag|>" in text or ("<|start_header_id|>" in text and '"parameters"' in text):
        return "llama3_json"
    return None


def markers(dialect: Dialect) -> tuple[str, ...]:
    """Strings that must stay in a text so that its calls are found, although they may be special tokens."""
    return _FORMS[dialect].special


class SpecialTokens(Protocol):
    """The part of a `Tokenizer` that is used here. Its module would import libraries that an engine does not need."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of the special tokens."""
        ...

    def token_id(self, token: str, /) -> int | None:
        """The id of a token by its written form, or None."""
        ...


def nameable_tokens(tokenizer: SpecialTokens, vocab_size: int, eos_token_ids: Collection[int]) -> dict[int, str]:
    """The special tokens of a model that a grammar may name, by id: the markers of calls and of thoughts.

    Args:
        tokenizer: The model's.
        vocab_size: Rows of the model's vocabulary. It cannot write a token beyond them.
        eos_token_ids: Tokens that end an answer, so they are never inside it.
    """
    names = MARKER_TOKENS.union(*(form.special for form in _FORMS.values()))
    ids = {name: tokenizer.token_id(name) for name in names}
    special = tokenizer.special_ids
    return {
        i: name
        for name, i in ids.items()
        if i is not None and i in special and i < vocab_size and i not in eos_token_ids
    }


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is the JSON object that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text outside of calls."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallDelta:
    """An addition to call number `index`. Only the first delta of a call has its id and name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


ToolDelta = ContentDelta | CallDelta


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The text and the calls of an answer.

    Attributes:
        content: Its text; None if it has only calls.
        calls: Its calls in order.
        is_cut: The arguments of the last call are not complete.
    """

    content: str | None
    calls: tuple[ToolCall, ...]
    is_cut: bool = False


def parse_tool_calls(
    text: str,
    dialect: Dialect,
    names: Collection[str] | None,
    new_id: Callable[[int], str],
    *,
    streams_arguments: bool = True,
) -> ParsedAnswer:
    """Parses a whole answer. The result is that of `ToolCallParser` for any pieces of it."""
    parser = ToolCallParser(dialect, names, new_id, streams_arguments=streams_arguments)
    found = join_deltas([*parser.push(text), *parser.finish()])
    return dataclasses.replace(found, is_cut=parser.is_cut)


def join_deltas(deltas: Collection[ToolDelta]) -> ParsedAnswer:
    """The answer that these deltas make together."""
    content: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
            continue
        if delta.id is not None and delta.name is not None:
            calls.append((delta.id, delta.name, []))
        calls[delta.index][2].append(delta.arguments)
    return ParsedAnswer(
        "".join(content) if content or not calls else None,
        tuple(ToolCall(id, name, "".join(parts)) for id, name, parts in calls),
    )


@final
class ToolCallParser:
    """Takes the text of an answer, and gives its text and calls.

    A call is reported when its name is known and its arguments have begun; the arguments follow as they come. If the
    text then stops being JSON (which a grammar prevents), the call keeps what it has and the rest is text. Before that,
    the beginning of a call is held back, and becomes text if it is no call. Whitespace next to a call is dropped.

    Invariants: the text that was pushed and neither reported nor dropped is `_gap + _held`, and in a call what its
    reader has read. Every character is examined once.
    """

    def __init__(
        self,
        dialect: Dialect,
        names: Collection[str] | None,
        new_id: Callable[[int], str],
        *,
        streams_arguments: bool = True,
    ):
        """Begins an answer.

        Args:
            dialect: The model's.
            names: The tools that may be called; None accepts any name.
            new_id: Makes the id of a call from its number, which counts from 0.
            streams_arguments: False holds a call back until it is complete, so every broken call becomes text.
        """
        self.num_calls = 0
        self._form = _FORMS[dialect]
        self._names = None if names is None else frozenset(names)
        self._new_id = new_id
        self._streams = streams_arguments
        self._state: Callable[[str], None] = self._in_content
        self._matcher = StopMatcher(self._form.openings)
        self._held = ""
        self._gap = ""
        self._droppable = _WHITESPACE
        self._reader = CallReader(self._form.arguments, self._names)
        self._is_begun = False
        self._is_list = False
        self._deltas: list[ToolDelta] = []

    @property
    def held_len(self) -> int:
        """Characters at the end of the text that are neither reported nor dropped yet."""
        if self._is_begun:
            return 0
        num_read = self._reader.num_read if self._state == self._in_call else 0
        return len(self._gap) + len(self._held) + num_read

    @property
    def is_in_call(self) -> bool:
        """Whether the text so far ends inside a call or its marks, or inside what may be a call."""
        return self._state != self._in_content

    @property
    def is_cut(self) -> bool:
        """Whether the last call that was reported is not complete."""
        return self._is_begun

    def push(self, text: str) -> list[ToolDelta]:
        """Takes more of the text."""
        for char in text:
            self._state(char)
        return self._take()

    def finish(self) -> list[ToolDelta]:
        """Ends the text, and gives what was held back."""
        is_behind_call = self._state in (self._in_list, self._in_closing) and self.num_calls > 0
        if not is_behind_call:
            self._report_text(self._take_held())
        if self.num_calls == 0 and self._gap:
            self._deltas.append(ContentDelta(self._gap))
        self._gap = self._held = ""
        return self._take()

    def _take(self) -> list[ToolDelta]:
        """Takes the deltas so far. Neighbours that belong together are joined."""
        if self._is_begun:
            self._report_fragment()
        joined: list[ToolDelta] = []
        for index, group in itertools.groupby(self._deltas, lambda d: d.index if isinstance(d, CallDelta) else None):
            deltas = list(group)
            first = deltas[0]
            if isinstance(first, ContentDelta) or index is None:
                joined.append(ContentDelta("".join(d.text for d in deltas if isinstance(d, ContentDelta))))
            else:
                arguments = "".join(d.arguments for d in deltas if isinstance(d, CallDelta))
                joined.append(dataclasses.replace(first, arguments=arguments))
        self._deltas = []
        return joined

    # The states of the parser. Each is a method that takes one character.

    def _in_content(self, char: str) -> None:
        matched_len = self._matcher.advance(char)
        self._held += char
        if not matched_len:
            cut = len(self._held) - self._matcher.held_len
            text, self._held = self._held[:cut], self._held[cut:]
            self._report_text(text)
            return
        before, self._held = self._held[:-matched_len], self._held[-matched_len:]
        self._report_text(before)
        if self._held[0] != "{":
            self._state = self._in_opening
            return
        opening, self._held = self._held, ""
        self._begin_reader()
        for part in opening:
            self._in_call(part)

    def _in_opening(self, char: str) -> None:
        """After the opening string."""
        is_mistral = self._held.startswith("[TOOL_CALLS]")
        if char == "{" and not is_mistral:
            self._begin_reader()
            self._in_call(char)
        elif char == "[" and is_mistral:
            self._hold(char)
            self._is_list = True
            self._state = self._in_list
        elif char in _WHITESPACE:
            self._hold(char)
        elif is_mistral and _HEADER.fullmatch(char):
            self._hold(char)
            self._state = self._in_header
        else:
            self._fail(char)

    def _in_list(self, char: str) -> None:
        """Between the calls of a list."""
        if char == "{":
            self._begin_reader()
            self._in_call(char)
        elif char == "]" and self.num_calls:
            self._end_section()
        elif char in _WHITESPACE + ",":
            self._hold(char)
        else:
            self._fail(char)

    def _in_header(self, char: str) -> None:
        """In the name in front of arguments that stand alone."""
        if char != "{":
            self._hold(char)
            return
        header = _HEADER.fullmatch(self._held.removeprefix("[TOOL_CALLS]").lstrip())
        if header is None or (self._names is not None and header[1] not in self._names):
            self._fail(char)
            return
        self._begin_reader(header[1])
        self._in_call(char)

    def _in_call(self, char: str) -> None:
        """In the JSON of a call."""
        step = self._reader.push(char)
        if step is ScanStep.WRONG:
            self._fail(char)
            return
        is_complete = step is ScanStep.LAST
        if not self._is_begun and (self._streams or is_complete):
            self._begin_call()
        if not is_complete:
            return
        self._report_fragment()
        self._held = ""
        self._is_begun = False
        if self._is_list:
            self._state = self._in_list
        elif self._form.closing:
            self._state = self._in_closing
        else:
            self._end_section()

    def _in_closing(self, char: str) -> None:
        """After a call, where its closing string should come."""
        self._held += char
        closing = self._held.lstrip(_WHITESPACE)
        if closing == self._form.closing:
            self._held = ""
            self._end_section()
        elif not self._form.closing.startswith(closing) or len(self._held) > _MAX_HELD_LEN:
            held, self._held = self._held, ""
            self._end_section()
            for part in held:
                self._state(part)

    # What the states share.

    def _hold(self, char: str) -> None:
        self._held += char
        if len(self._held) > _MAX_HELD_LEN:
            self._fail("")

    def _take_held(self) -> str:
        """Takes the text that is neither reported nor dropped, without the gap before it."""
        is_in_call = self._state == self._in_call
        held = "" if self._is_begun else self._held + (self._reader.text if is_in_call else "")
        self._held = ""
        return held

    def _begin_reader(self, name: str | None = None) -> None:
        self._reader = CallReader(self._form.arguments, self._names, name)
        self._state = self._in_call

    def _end_section(self) -> None:
        self._is_begun = False
        self._is_list = False
        self._matcher = StopMatcher(self._form.openings)
        self._state = self._in_content

    def _fail(self, char: str) -> None:
        """Reports what was held as text, because it is no call, and then takes the character as text."""
        if self._is_begun:
            self._report_fragment()
        held = self._take_held()
        self._end_section()
        self._report_text(held)
        if char:
            self._in_content(char)

    def _begin_call(self) -> None:
        """Reports that a call has begun, if its name is known and its arguments have begun."""
        name = self._reader.name
        if name is None or not self._reader.has_arguments:
            return
        self._is_begun = True
        self._gap = ""
        self._droppable = self._form.between
        self._deltas.append(CallDelta(self.num_calls, self._new_id(self.num_calls), name, ""))
        self.num_calls += 1

    def _report_fragment(self) -> None:
        if fragment := self._reader.take_fragment():
            self._deltas.append(CallDelta(self.num_calls - 1, None, None, fragment))

    def _report_text(self, text: str) -> None:
        """Reports text, but holds back its end that is dropped if a call follows or if it follows the last call."""
        text = self._gap + text
        is_shown = text.strip(self._droppable) or len(text) > _MAX_HELD_LEN
        shown = text.rstrip(_WHITESPACE) or text if is_shown else ""
        self._gap = text[len(shown) :]
        if shown:
            self._deltas.append(ContentDelta(shown))
            self._droppable = _WHITESPACE
