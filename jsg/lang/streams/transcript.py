"""The transcript of a stream: its text as it grows, its turns, and its open scopes."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jsg.lang.streams.variables import Variable
from jsg.lang.words.ir import Image, Role, Text, Video
from jsg.processing.growing_text import GrowingText


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """Text of the model in a turn: the answer without the reasoning, and the reasoning."""

    text: str
    reasoning: str = ""


Content = Text | Image | Video | Said


@dataclasses.dataclass(slots=True)
class Turn:
    """One message."""

    role: Role
    content: list[Content] = dataclasses.field(default_factory=list)


class _Stretch(NamedTuple):
    """The turns between two forks, which never change again.

    Attributes:
        before: The stretch before it.
        turns: The turns.
        is_continued: Whether the first one goes on with the last turn of the stretch before.
    """

    before: "_Stretch | None"
    turns: Sequence[Turn]
    is_continued: bool


class Transcript:
    """The transcript of one stream. Only the task of the stream changes it.

    Branches share the text and the turns before their fork, so that a fork costs the same however many they are.

    Attributes:
        log: All text, marks of turns included. It is done when the stream has ended.
        role: The role of the open turn.
        fork_len: The number of pieces with which a fork began.
    """

    def __init__(self, text: str = "", before: _Stretch | None = None, role: Role | None = None):
        self.log = Variable()
        self.role: Role | None = role
        self._text = GrowingText()
        self.write(text)
        self.fork_len = self.log.num_pieces
        self._fork = before
        self._begin_stretch(before)
        self._scopes: dict[str, int] = {}

    @property
    def num_chars(self) -> int:
        """The number of characters of all text."""
        return len(self._text)

    def text(self, start: int = 0) -> str:
        """Gives all text from a piece on."""
        return "".join(self.log.pieces(start)) if start else str(self._text)

    def fork(self, size: int) -> "list[Transcript]":
        """Gives copies for branches."""
        before = self._stretch()
        self._begin_stretch(before)
        text = self.text()
        return [Transcript(text, before, self.role) for _ in range(size)]

    @property
    def has_turns(self) -> bool:
        """Whether a turn was opened."""
        return bool(self._turns) or self._before is not None

    @property
    def is_turn_begun(self) -> bool:
        """Whether the open turn has content."""
        stretch = self._stretch()
        return stretch is not None and bool(stretch.turns[-1].content)

    def snapshot(self) -> tuple[Turn, ...]:
        """Gives the turns as they are now."""
        return tuple(self._turns_since(None))

    def new_content(self) -> list[Content]:
        """Gives what was added since the fork to the turn that was open then, and to later turns."""
        return [content for turn in self._turns_since(self._fork) for content in turn.content]

    def _turns_since(self, end: _Stretch | None) -> list[Turn]:
        """Copies of the turns since a stretch. Where a turn was open then, the first has the rest of it."""
        stretches: list[_Stretch] = []
        stretch = self._stretch()
        while stretch is not None and stretch is not end:
            stretches.append(stretch)
            stretch = stretch.before
        turns: list[Turn] = []
        for stretch in reversed(stretches):
            own = iter(stretch.turns)
            if stretch.is_continued and turns:
                turns[-1].content.extend(next(own).content)
            turns.extend(Turn(turn.role, list(turn.content)) for turn in own)
        return turns

    def _stretch(self) -> _Stretch | None:
        """The stretch that ends here. The turns of one in which nothing has come are those before it."""
        is_empty = not self._turns or (self._is_continued and len(self._turns) == 1 and not self._turns[0].content)
        return self._before if is_empty else _Stretch(self._before, self._turns, self._is_continued)

    def _begin_stretch(self, before: _Stretch | None) -> None:
        self._before = before
        self._turns = [] if self.role is None else [Turn(self.role)]
        self._is_continued = self.role is not None

    def write(self, text: str) -> None:
        """Appends text."""
        if text:
            self.log.add(text)
            self._text.append(text)

    def add(self, content: Content) -> None:
        """Adds content to the open turn, if one is open."""
        if self.role is not None:
            self._turns[-1].content.append(content)

    def open_turn(self, role: Role) -> None:
        """Begins a turn."""
        self.role = role
        self._turns.append(Turn(role))

    def close_turn(self) -> None:
        """Ends the open turn."""
        self.role = None

    def open_scope(self, name: str) -> None:
        """Begins a scope, whose text becomes a variable."""
        self._scopes[name] = self.log.num_pieces

    def close_scope(self, name: str) -> str:
        """Ends a scope; gives its text."""
        return self.text(self._scopes.pop(name))
