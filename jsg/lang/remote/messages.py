"""The conversation that a program writes."""

import base64
from collections.abc import Iterable
from typing import final

from jsg.errors import RequestError
from jsg.lang.remote.wire import Message, Picture
from jsg.lang.words.ir import Image, Role

BEGIN = "<|im_start|>{role}\n"
END = "<|im_end|>\n"
PICTURE = "<image>"
"""The marks of turns and pictures in a state's text, on a backend that has no text for them."""


@final
class Conversation:
    """Turns, of which the last may be open.

    Invariants: no part is an empty text, and no two texts of a turn are next to each other.
    """

    def __init__(self, messages: Iterable[Message] = (), *, is_open: bool = False):
        self._messages = list(messages)
        self._is_open = is_open

    def copy(self) -> "Conversation":
        """Makes a conversation that begins as this one is now."""
        return Conversation(self._messages, is_open=self._is_open)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All turns, the open one last."""
        return tuple(self._messages)

    @property
    def open_role(self) -> Role | None:
        """The role of the open turn."""
        return self._messages[-1].role if self._is_open else None

    def begin(self, role: Role) -> str:
        """Opens a turn; gives its mark. Raises RequestError inside another turn."""
        if self._is_open:
            raise RequestError(
                f"a turn must be ended before another begins, but {role} begins inside {self.open_role}; "
                f"put {self.open_role}_end() before it"
            )
        self._messages.append(Message(role, ()))
        self._is_open = True
        return BEGIN.format(role=role)

    def end(self, role: Role) -> str:
        """Closes the turn; gives its mark. Raises RequestError if another turn, or none, is open."""
        if self.open_role != role:
            raise RequestError(f"only the open turn can be ended, but {role} is not: {self.open_role or 'none'} is")
        self._is_open = False
        return END

    def add(self, part: str | Picture) -> None:
        """Appends a part to the open turn."""
        turn = self._messages[-1]
        parts = turn.parts
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts, part = parts[:-1], parts[-1] + part
        self._messages[-1] = Message(turn.role, (*parts, part) if part else parts)


def picture_of(image: Image) -> Picture:
    """Gives an image in the form in which calls carry it."""
    return Picture(image.media_type, base64.b64encode(image.data).decode("ascii"))
