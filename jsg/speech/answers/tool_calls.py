"""Finds calls of tools in the text of a model, in a whole text or as it comes.

Each model family was trained on one written form of calls, its dialect; `jsg.speech.dialects` has a record of each.
Text that only looks like a call (no JSON, a name that no tool has, arguments that are no object) stays text.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol, final

from jsg.constrained.call_styles import ArgumentTypes
from jsg.processing.growing_text import GrowingText
from jsg.processing.stop_strings import StopMatcher
from jsg.speech.answers.call_reader import CallReader
from jsg.speech.answers.json_scanner import ScanStep
from jsg.speech.answers.thoughts import MARKER_TOKENS
from jsg.speech.dialects import DIALECTS, Dialect
from jsg.types import TokenLogprob

MAX_HELD_LEN = 1000
"""The most characters that are held back because they may begin a call. They are at most 4000 bytes."""

_WHITESPACE = " \t\r\n"
_MAX_GAP_LEN = 400  # no run of whitespace is held back that is longer


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
    names = MARKER_TOKENS.union(*(dialect.markers for dialect in DIALECTS.values()))
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
    """Text outside of calls, and the log-probabilities of its tokens where they were asked for."""

    text: str
    scores: tuple[TokenLogprob, ...] = ()


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


@final
class GrowingAnswer:
    """An answer that texts and calls are added to, in time linear in what is added."""

    def __init__(self) -> None:
        self._content = GrowingText()
        self._calls: list[tuple[str, str, GrowingText]] = []

    def add(self, deltas: Iterable[ToolDelta]) -> None:
        """Adds texts and calls."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
                continue
            if delta.id is not None and delta.name is not None:
                self._calls.append((delta.id, delta.name, GrowingText()))
            self._calls[delta.index][2].append(delta.arguments)

    def whole(self, *, is_cut: bool = False) -> ParsedAnswer:
        """The answer so far; `is_cut` if the arguments of its last call are not complete."""
        content = str(self._content)
        return ParsedAnswer(
            content if content or not self._calls else None,
            tuple(ToolCall(id, name, str(arguments)) for id, name, arguments in self._calls),
            is_cut,
        )


@final
class ToolCallParser:
    """Takes the text of an answer, and gives its text and calls.

    A call is reported when its name is known and its arguments have begun; the arguments follow as they come. Before
    that, the beginning of a call is held back, and becomes text if it is no call, or if it is longer than
    `MAX_HELD_LEN`. If a call breaks off after it was reported (which a grammar prevents), it keeps what it has and the
    rest is text. Whitespace next to a call is dropped, and so is a list without calls if its beginning is a marker.

    The text after a call has no marker of the dialect in it, whatever becomes of the call. A marker in front of the
    first call that begins no call is text, because an answer may write about it. Where answers are rows of messages,
    markers and headers are never text.

    Invariants: the text that was pushed and neither reported nor dropped is the gap of `_report`, `_held`, and in a
    call what its reader has read. Every character is examined a few times at most.
    """

    def __init__(
        self,
        dialect: Dialect,
        names: Collection[str] | None,
        new_id: Callable[[int], str],
        *,
        types: Mapping[str, ArgumentTypes] | None = None,
        streams_arguments: bool = True,
    ):
        """Begins an answer.

        Args:
            dialect: The model's.
            names: The tools that may be called; None accepts any name.
            new_id: Makes the id of a call from its number, which counts from 0. Where the model writes ids itself, a
                call has the one that the model wrote, unless an earlier call of the answer has it.
            types: The types of the arguments of each tool, for dialects that write strings without quotes.
            streams_arguments: False holds a call back until it is complete, so every broken call becomes text.
        """
        self._dialect = dialect
        known = None if names is None else frozenset(names)
        self._new_reader = functools.partial(CallReader, dialect, known, types or {})
        self._streams = streams_arguments
        self._openings = dialect.openings(sorted(names or ()))
        marks = (*self._openings, *dialect.markers)
        self._matcher = StopMatcher(marks)
        self._plain = re.compile(f"[^{re.escape(''.join({mark[0] for mark in marks}))}]+")
        self._report = _Report(new_id, dialect.skipped)
        self._state: Callable[[str], None] = self._in_content
        self._held = ""
        self._word = ""  # the end of `_held` that may become an awaited string
        self._awaited: tuple[str, ...] = ()
        self._calls_before: int | None = None  # the number of calls before the section, in a section
        self._reader = self._new_reader()
        self._is_begun = False
        self._is_in_message = False  # after the header of a text, where only markers open

    @property
    def num_calls(self) -> int:
        """The calls that were reported so far."""
        return self._report.num_calls

    @property
    def held_len(self) -> int:
        """Characters at the end of the text that are neither reported nor dropped yet."""
        if self._is_begun:
            return 0
        num_read = self._reader.num_read if self._state == self._in_call else 0
        return self._report.gap.held_len + len(self._held) + num_read

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
        start = 0
        while start < len(text):
            if self._state == self._in_content and not self._held:
                plain = self._plain.match(text, start)
                if plain:
                    self._report_text(plain[0])
                    start = plain.end()
                    continue
            self._state(text[start])
            start += 1
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[ToolDelta]:
        """Ends the text, and gives what was held back.

        Where the answer was cut short (`is_cut`), a call that has not begun its arguments, and its marks, are dropped.
        """
        is_behind_call = self._state in (self._between, self._in_closing)
        if self._is_begun or (is_behind_call and self.num_calls > (self._calls_before or 0)):
            self._held = ""
        elif is_cut and (self._state != self._in_content or self._drops_markers):
            self._held = self._held[: len(self._held) - self._matcher.held_len] if not self.is_in_call else ""
        elif self._state == self._in_call and self._dialect.messages and not self._reader.has_arguments:
            self._held = ""  # a header without what it is for
        elif self._state != self._in_content:
            self._give_up()
        self._report.text(self._held)
        self._report.end()
        self._held = ""
        return self._take()

    def _take(self) -> list[ToolDelta]:
        if self._is_begun:
            self._report.fragment(self._reader)
        return self._report.take()

    # The states of the parser. Each is a method that takes one character.

    def _in_content(self, char: str) -> None:
        self._read_text(char)

    def _in_section_start(self, char: str) -> None:
        """Where the rest of the beginning of a section should come."""
        found = self._await(char, self._awaited[:1])
        if found is None:
            self._give_up()
        elif found:
            self._awaited = self._awaited[1:]
            self._state = self._in_section_start if self._awaited else self._between

    def _between(self, char: str) -> None:
        """In a section, where a call or the end of the section should come."""
        begin, (end, *_) = self._dialect.call[0], self._dialect.section_marks[1]
        found = self._await(char, [*self._dialect.skipped, end, *([begin] if isinstance(begin, str) else ())])
        if found == begin:
            self._state = self._before_body
        elif found == end and (self.num_calls > (self._calls_before or 0) or self._dialect.has_marked_section):
            self._calls_before = None
            self._held, self._awaited = "", self._dialect.section_marks[1][1:]
            self._state = self._in_closing
            if not self._awaited:
                self._end_call()
        elif found == end or (found is None and (isinstance(begin, str) or not self._word)):
            self._give_up()
        elif found is None:
            word = self._word
            self._held = self._held.removesuffix(word)
            self._begin_reader(word)

    def _before_body(self, char: str) -> None:
        """After what a call begins with."""
        if char not in _WHITESPACE:
            self._begin_reader(char)
            return
        self._held += char
        if self.held_len > MAX_HELD_LEN:
            self._give_up()

    def _in_call(self, char: str) -> None:
        """In the name or the arguments of a call."""
        step = self._reader.push(char)
        if step is ScanStep.INSIDE and self._is_begun:
            return
        if step is ScanStep.WRONG:
            self._give_up()
            self._state(char)
            return
        is_complete = step is ScanStep.LAST
        has_begun = self._reader.name is not None and self._reader.has_arguments
        if has_begun and not self._is_begun and (self._streams or is_complete):
            self._is_begun = True
            self._report.begin(self._reader)
        elif not has_begun and not is_complete and self.held_len > MAX_HELD_LEN:
            self._give_up()
        if not is_complete:
            return
        self._held = ""
        if self._is_begun:
            self._report.fragment(self._reader)
            self._is_begun = False
            self._awaited = self._dialect.end
            self._state = self._in_closing
            if not self._awaited:
                self._end_call()
        else:  # it was the header of a text
            self._end_section()
            self._is_in_message = True

    def _in_closing(self, char: str) -> None:
        """After a call, where its end should come."""
        found = self._await(char, self._awaited[:1])
        if found == "":
            return
        held, self._held, self._word = self._held, "", ""
        if found:
            self._awaited = self._awaited[1:]
            if not self._awaited:
                self._end_call()
            return
        self._end_call()
        for part in held:
            self._state(part)

    # What the states share.

    def _read_text(self, char: str, *, opens: bool = True) -> None:
        """Takes a character of text. Calls begin in it only where `opens`."""
        matched_len = self._matcher.advance(char)
        self._held += char
        mark = self._held[-matched_len:] if matched_len else ""
        is_marker = mark in self._dialect.markers
        is_opening = opens and mark in self._openings and (is_marker or not self._is_in_message)
        if is_opening or (is_marker and self._drops_markers):
            self._report.text(self._held[:-matched_len])
            self._held = ""
            self._is_in_message = False
            self._matcher.reset()
            if is_opening:
                self._enter(mark)
        elif cut := len(self._held) - self._matcher.held_len:
            self._report_text(self._held[:cut])
            self._held = self._held[cut:]

    def _report_text(self, text: str) -> None:
        self._is_in_message |= self._dialect.messages is not None and not text.isspace()
        self._report.text(text)

    @property
    def _drops_markers(self) -> bool:
        """Whether no marker is text any more."""
        return self.num_calls > 0 or self._dialect.messages is not None

    def _enter(self, mark: str) -> None:
        """Goes on after the mark that begins a call or a section."""
        section = self._dialect.section_marks[0]
        is_read = mark in self._dialect.markers and self._dialect.messages is None
        self._held, self._word = (mark, "") if is_read else ("", "")
        if section and mark != self._dialect.call[0]:
            self._calls_before = self.num_calls
            self._awaited = section[1:] if mark == section[0] else section
            self._state = self._in_section_start if self._awaited else self._between
        else:
            self._state = self._before_body
        for char in "" if is_read else mark:
            self._state(char)

    def _await(self, char: str, awaited: Collection[str]) -> str | None:
        """Takes a character where one of some strings should come, and white space before it.

        Gives the string when it is complete, "" while it may still come, and None when it cannot come any more.
        """
        self._held += char
        self._word = (self._word + char).lstrip(_WHITESPACE)
        if self._word in awaited:
            found, self._word = self._word, ""
            return found
        if self.held_len > MAX_HELD_LEN or not any(each.startswith(self._word) for each in awaited):
            return None
        return ""

    def _begin_reader(self, text: str) -> None:
        self._reader = self._new_reader()
        self._state = self._in_call
        for char in text:
            self._state(char)

    def _end_call(self) -> None:
        self._word = ""
        if self._calls_before is None:
            self._end_section()
        else:
            self._state = self._between

    def _end_section(self) -> None:
        self._is_begun = False
        self._calls_before = None
        self._held = self._word = ""
        self._matcher.reset()
        self._state = self._in_content

    def _give_up(self) -> None:
        """Reads what was held back as text, because it is no call."""
        held = self._held + (self._reader.text if self._state == self._in_call else "")
        if self._is_begun:
            self._report.fragment(self._reader)
            held = ""
        self._end_section()
        for char in held:
            self._read_text(char, opens=False)


@final
class Gap:
    """Text that is given only if more text follows, and dropped if a call follows or has come before.

    It is white space and, after a call, what is no text between two calls.
    """

    def __init__(self, skipped: str):
        """Begins an answer. `skipped` are characters besides white space that are no text between two calls."""
        self._held = ""
        self._behind_call = _WHITESPACE + skipped
        self._droppable = _WHITESPACE

    @property
    def held_len(self) -> int:
        """How many characters are held."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Takes text; gives what is certain to be text of the answer."""
        text = self._held + text
        if text.strip(self._droppable):
            shown = text.rstrip(_WHITESPACE)
            self._droppable = _WHITESPACE
        else:
            shown = ""
        if (gap_len := len(text) - len(shown)) > _MAX_GAP_LEN:
            shown = text[: len(shown) + gap_len - gap_len % (_MAX_GAP_LEN + 1)]
            self._droppable = _WHITESPACE
        self._held = text[len(shown) :]
        return shown

    def drop(self) -> None:
        """A call has come."""
        self._held = ""
        self._droppable = self._behind_call

    def end(self, *, has_calls: bool) -> str:
        """Ends the text; gives what is held if the answer has no calls."""
        held, self._held = self._held, ""
        return "" if has_calls else held


@final
class _Report:
    """The text and calls that a parser has found, and not given yet."""

    def __init__(self, new_id: Callable[[int], str], skipped: str):
        self.num_calls = 0
        self.gap = Gap(skipped)
        self._new_id = new_id
        self._ids: set[str] = set()
        self._deltas: list[ToolDelta] = []

    def text(self, text: str) -> None:
        """Reports text, but holds back its end that is dropped if a call follows or if it follows the last call."""
        if shown := self.gap.push(text):
            self._deltas.append(ContentDelta(shown))

    def begin(self, reader: CallReader) -> None:
        """Reports that a call has begun."""
        self.gap.drop()
        call_id = reader.call_id
        if call_id is None or call_id in self._ids:
            call_id = self._new_id(self.num_calls)
        self._ids.add(call_id)
        self._deltas.append(CallDelta(self.num_calls, call_id, reader.name, ""))
        self.num_calls += 1

    def fragment(self, reader: CallReader) -> None:
        """Reports more of the arguments of the last call."""
        if fragment := reader.take_fragment():
            self._deltas.append(CallDelta(self.num_calls - 1, None, None, fragment))

    def end(self) -> None:
        """Ends the text."""
        if rest := self.gap.end(has_calls=self.num_calls > 0):
            self._deltas.append(ContentDelta(rest))

    def take(self) -> list[ToolDelta]:
        """Takes the deltas so far. Neighbours that belong together are joined."""
        found, self._deltas = self._deltas, []
        return merged(found)


def merged(deltas: list[ToolDelta]) -> list[ToolDelta]:
    """The same texts and calls, in which neighbours that belong together are joined."""
    if len(deltas) < 2:
        return deltas
    joined: list[ToolDelta] = []
    for index, group in itertools.groupby(deltas, lambda d: d.index if isinstance(d, CallDelta) else None):
        parts = list(group)
        first = parts[0]
        if isinstance(first, ContentDelta) or index is None:
            texts = [part for part in parts if isinstance(part, ContentDelta)]
            scores = itertools.chain.from_iterable(part.scores for part in texts)
            joined.append(ContentDelta("".join(part.text for part in texts), tuple(scores)))
        else:
            arguments = "".join(part.arguments for part in parts if isinstance(part, CallDelta))
            joined.append(dataclasses.replace(first, arguments=arguments))
    return joined
