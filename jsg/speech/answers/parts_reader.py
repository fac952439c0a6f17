"""The parts of an answer: texts and calls of tools, each text with its log-probabilities, up to a stop string."""

import dataclasses
import hashlib
import uuid
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import final

from jsg.constrained.call_styles import ArgumentTypes
from jsg.processing.growing_text import GrowingText
from jsg.processing.stop_strings import MakeFinder
from jsg.speech.answers.tool_calls import CallDelta, ContentDelta, Gap, ToolCallParser, ToolDelta, merged
from jsg.speech.dialects import Dialect
from jsg.types import TokenLogprob


@final
@dataclasses.dataclass(frozen=True, slots=True)
class CallForm:
    """How an answer writes calls.

    Attributes:
        dialect: The written form of a call.
        names: The tools that may be called.
        types: The types of the arguments of each, for dialects that write strings without quotes.
        only_complete: A call is given when it is complete, and one that never is counts as text.
    """

    dialect: Dialect
    names: Collection[str]
    types: Mapping[str, ArgumentTypes] = dataclasses.field(default_factory=dict)
    only_complete: bool = False


@final
class PartsReader:
    """Reads the text of one answer once: finds its calls, and stop strings and patterns in the rest of it.

    A call, its marks and the white space beside it are not text, and a stop string never spans a call or a mark. A
    character is examined once it is known to be text, which may be later: what looks like the beginning of a call may
    not be one.

    To a text belong the log-probabilities of the tokens that begin in it, and of tokens without text that follow it.
    Those of calls and their marks are left out. Texts have them only where `place` and `settle` are called.

    Invariants: the last `held_len` characters may still become a stop string or a call, or the beginning of one.
    `_text` was found to be text, and was not given because of the end that may become a stop string. `_waiting` has the
    tokens that may still belong to a text, each with the character at which it begins.

    Attributes:
        len_after: The characters after the stop string that was found last.
        pattern: The stop pattern whose match was found last; None where it was a stop string.
    """

    def __init__(self, form: CallForm, make_finder: MakeFinder | None):
        """Begins an answer. The finder looks for its stop strings; None where it has none."""
        self.len_after = 0
        self.pattern: str | None = None
        self._make_finder = make_finder
        self._finder = None if make_finder is None else make_finder()
        self._nonce = uuid.uuid4().hex  # not the request's name, which clients may use for many requests
        self._id_len = 9 if form.dialect.id_form == "nine_letters" else None
        self._parser = ToolCallParser(
            form.dialect, form.names, self._new_id, types=form.types, streams_arguments=not form.only_complete
        )
        self._found: list[ToolDelta] = []
        self._text = GrowingText()
        self._gap = Gap(form.dialect.skipped)
        self._stop = 0, ""  # the number of parts before the stop string that was found last, and the string
        self._num_read = self._num_settled = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self._is_in_call = False

    @property
    def held_len(self) -> int:
        """Characters at the end of the answer that are not decided."""
        return self._parser.held_len + (0 if self._finder is None else self._finder.held_len)

    @property
    def has_calls(self) -> bool:
        """Whether the answer has calls so far."""
        return self._parser.num_calls > 0

    @property
    def is_cut(self) -> bool:
        """Whether the answer ends inside a call so far."""
        return self._parser.is_cut

    def read(self, text: str) -> None:
        """Takes more of an answer, in which no stop string counts."""
        self._num_read += len(text)
        if self._finder is None:
            self._found += self._parser.push(text)
        else:
            self._text.append(text)
            self._give(0)

    def advance(self, char: str) -> int:
        """Takes one character of an answer with stop strings. Gives the length of the one that this finds, or 0.

        `len_after` is then the number of characters after the string, with the new one.
        """
        held_len = self._parser.held_len + 1
        self._num_read += 1
        found, end, text_len = self._look(self._parser.push(char))
        # What is neither text nor held back was a mark after the text, or a call.
        if not found and text_len + self._parser.held_len < held_len:
            self._forget()
        self.len_after = held_len - end
        return found

    def finish(self, *, is_cut: bool = False) -> int:
        """Ends the answer, which the model did not end itself if `is_cut`. Gives what `advance` gives.

        The characters that are only now known to be text count.
        """
        held_len, is_in_call = self._parser.held_len, self._parser.is_in_call
        deltas = self._parser.finish(is_cut=is_cut)
        if self._finder is None:
            self._found += deltas
            return 0
        found, end, _ = self._look(deltas)
        self.len_after = held_len - end
        return 0 if is_in_call else found  # the answer was cut off inside a call, where no stop string counts

    def stop(self, *, is_shown: bool) -> None:
        """Ends the answer at the stop string that was found last; `is_shown` if this string is text of the answer."""
        num_found, stop = self._stop
        del self._found[num_found:]
        self._text.take_all()
        self._text.append(stop if is_shown else "")

    def take(self, *, is_last: bool) -> Sequence[ToolDelta]:
        """Takes the texts and calls that were found since the last time. `is_last` if the answer has ended."""
        if self._finder is not None:
            self._give(0 if is_last else self._finder.held_len)
        if is_last and (rest := self._gap.end(has_calls=self.has_calls)):
            self._found.append(ContentDelta(rest))
        if is_last and self._waiting:
            self.settle(is_last=True)
        found, self._found, self._num_settled = self._found, [], 0
        return merged(found)

    def _look(self, deltas: Sequence[ToolDelta]) -> tuple[int, int, int]:
        """Length and end of the first stop string in more text and calls, 0 for none; and how long the text is."""
        assert self._finder is not None, "an answer without stop strings is read in pieces"
        found = end = text_len = 0
        for delta in deltas:
            if isinstance(delta, CallDelta):
                self._forget()
                self._gap.drop()
                self._found.append(delta)
                continue
            for char in delta.text:
                text_len += 1
                self._text.append(char)
                if (match_len := self._finder.advance(char)) and not found:
                    found, end, self.pattern = match_len, text_len, self._finder.pattern
                    self._give(match_len)
                    self._stop = len(self._found), str(self._text)
        return found, end, text_len

    def _forget(self) -> None:
        """Looks for stop strings from here on: none begins in the text so far."""
        assert self._make_finder is not None and self._finder is not None
        self._give(0)
        if self._finder.held_len:
            self._finder = self._make_finder()

    def _give(self, held_len: int) -> None:
        """Gives the text but for its end, which may become a stop string."""
        text = self._text.take(len(self._text) - held_len)
        if shown := self._gap.push(text) if text else "":
            self._found.append(ContentDelta(shown))

    def _new_id(self, index: int) -> str:
        """A name for a call that no other answer has."""
        digest = hashlib.sha256(f"{self._nonce} {index}".encode()).hexdigest()
        return f"call_{digest[:24]}" if self._id_len is None else digest[: self._id_len]

    # The log-probabilities of texts.

    def place(self, scores: Sequence[TokenLogprob]) -> None:
        """Takes the log-probabilities of tokens that begin with the next character."""
        self._waiting += [(self._num_read, score) for score in scores]

    def settle(self, *, is_last: bool = False) -> None:
        """Gives the texts that were found since the last time the tokens that begin in them."""
        if self._finder is not None and not is_last:
            self._give(self._finder.held_len)
        decided = self._num_read - self.held_len - self._gap.held_len
        tokens: list[TokenLogprob] = []
        while self._waiting and (is_last or self._waiting[0][0] < decided):
            tokens.append(self._waiting.popleft()[1])
        for index, part in enumerate(self._found[self._num_settled :], start=self._num_settled):
            self._is_in_call = isinstance(part, CallDelta)
            if isinstance(part, ContentDelta):
                self._found[index] = dataclasses.replace(part, scores=tuple(tokens))
                tokens = []
        if is_last and tokens and not self._is_in_call:
            self._found.append(ContentDelta("", tuple(tokens)))
        self._num_settled = len(self._found)
