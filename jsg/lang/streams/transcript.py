"""What a stream's prompt says so far: its text as it grows, its turns, and the spans that are to become variables."""

import dataclasses

from jsg.lang.ir import Image, Role, Text, Video
from jsg.lang.streams.variables import Variable


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """What the model wrote in a turn: its answer, without the reasoning, and that."""

    text: str
    reasoning: str = ""


Content = Text | Image | Video | Said


@dataclasses.dataclass(slots=True)
class Turn:
    """One message."""

    role: Role
    content: list[Content] = dataclasses.field(default_factory=list)


class Transcript:
    """Of one stream; only the stream's task changes it.

    Attributes:
        log: All text, markers of turns included; done when the stream has ended.
        turns: All turns, the open one last.
        role: Of the open turn.
        fork_len: Pieces that a fork began with.
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
        """All text from a piece on."""
        return "".join(self.log.pieces_between(start))

    def fork(self, size: int) -> "list[Transcript]":
        """Copies that go their own way."""
        text = self.text()
        return [Transcript(text, self.snapshot(), self.role) for _ in range(size)]

    def snapshot(self) -> tuple[Turn, ...]:
        """The turns as they are now."""
        if not self.turns:
            return ()
        last = self.turns[-1]
        return (*self.turns[:-1], Turn(last.role, list(last.content)))  # only the last one can still grow

    def new_content(self) -> list[Content]:
        """What was added to the turn that was open at the fork, and to those after it."""
        num_turns, num_items = self._fork_content
        new = self.turns[num_turns - 1].content[num_items:] if num_turns else []
        return [*new, *(content for turn in self.turns[num_turns:] for content in turn.content)]

    def write(self, text: str) -> None:
        """Appends text."""
        if text:
            self.log.add(text)

    def add(self, content: Content) -> None:
        """Notes it as part of the open turn."""
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
        """From here on the text is to become a variable."""
        self._scopes[name] = self.log.num_pieces

    def close_scope(self, name: str) -> str:
        """The text since `open_scope`."""
        return self.text(self._scopes.pop(name))
