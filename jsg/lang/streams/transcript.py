"""The transcript of a stream: its text as it grows, its turns, and its open scopes."""

import dataclasses

from jsg.lang.ir import Image, Role, Text, Video
from jsg.lang.streams.variables import Variable


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


class Transcript:
    """The transcript of one stream. Only the task of the stream changes it.

    Attributes:
        log: All text, marks of turns included. It is done when the stream has ended.
        turns: All turns, the open one last.
        role: The role of the open turn.
        fork_len: The number of pieces with which a fork began.
    """

    def __init__(self, text: str = "", turns: tuple[Turn, ...] = (), role: Role | None = None):
        self.log = Variable()
        if text:
            self.log.add(text)
        self.turns = list(turns)
        self.role: Role | None = role
        self.fork_len = self.log.num_pieces
        self._fork_content = (len(self.turns), len(self.turns[-1].content) if self.turns else 0)
        self._scopes: dict[str, int] = {}

    def text(self, start: int = 0) -> str:
        """Gives all text from a piece on."""
        return "".join(self.log.pieces(start))

    def fork(self, size: int) -> "list[Transcript]":
        """Gives copies for branches."""
        text = self.text()
        return [Transcript(text, self.snapshot(), self.role) for _ in range(size)]

    def snapshot(self) -> tuple[Turn, ...]:
        """Gives the turns as they are now."""
        if not self.turns:
            return ()
        last = self.turns[-1]
        return (*self.turns[:-1], Turn(last.role, list(last.content)))  # only the last turn can still grow

    def new_content(self) -> list[Content]:
        """Gives what was added since the fork to the turn that was open then, and to later turns."""
        num_turns, num_items = self._fork_content
        new = self.turns[num_turns - 1].content[num_items:] if num_turns else []
        return [*new, *(content for turn in self.turns[num_turns:] for content in turn.content)]

    def write(self, text: str) -> None:
        """Appends text."""
        if text:
            self.log.add(text)

    def add(self, content: Content) -> None:
        """Adds content to the open turn, if one is open."""
        if self.role is not None:
            self.turns[-1].content.append(content)

    def open_turn(self, role: Role) -> None:
        """Begins a turn."""
        self.role = role
        self.turns.append(Turn(role))

    def close_turn(self) -> None:
        """Ends the open turn."""
        self.role = None

    def open_scope(self, name: str) -> None:
        """Begins a scope, whose text becomes a variable."""
        self._scopes[name] = self.log.num_pieces

    def close_scope(self, name: str) -> str:
        """Ends a scope; gives its text."""
        return self.text(self._scopes.pop(name))
