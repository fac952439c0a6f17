"""The text that a chat template writes between the contents of a program's turns."""

import dataclasses
from typing import final

from jsg.errors import RequestError
from jsg.speech.prompts.turns import ChatTurns, Opening


@final
@dataclasses.dataclass(frozen=True, slots=True)
class TurnWriter:
    """The position of a prompt in its conversation.

    Attributes:
        roles: The roles of all turns so far.
        is_open: Whether the last of them is open.
        opening: The text before the content of the open turn, while that content has not begun.
        trims_end: Whether the template removes white space at the end of the open turn's content.
        written: The part of the template's text after the last content that the prompt has already.
    """

    roles: tuple[str, ...] = ()
    is_open: bool = False
    opening: Opening | None = None
    trims_end: bool = False
    written: str = ""

    @property
    def open_role(self) -> str | None:
        """The role of the open turn."""
        return self.roles[-1] if self.is_open else None

    def open(self, turns: ChatTurns, role: str, *, is_first: bool) -> "tuple[TurnWriter, str]":
        """Opens a turn; gives the text that comes before its content in any case and is not written yet.

        Args:
            turns: The template.
            role: The role of the turn.
            is_first: Whether the prompt is empty. Else a BOS at the front of the template is left out.

        Raises:
            RequestError: A turn is open, or the template does not take this turn.
        """
        if self.is_open:
            raise RequestError(f"a turn must be closed before the next, but {self.roles[-1]} is open; close it", "role")
        roles = (*self.roles, role)
        opening = turns.opening(roles)
        if not self.roles and not is_first and turns.bos_token:
            opening = dataclasses.replace(
                opening,
                text=opening.text.removeprefix(turns.bos_token),
                reply=opening.reply.removeprefix(turns.bos_token),
            )
        certain = opening.certain
        made = TurnWriter(roles, is_open=True, opening=opening, trims_end=opening.trims_end, written=certain)
        return made, _behind(certain, self.written)

    def begin(self, *, is_reply: bool) -> "tuple[TurnWriter, str]":
        """Begins the content of the open turn, if it has not begun; gives the text that is still due before it."""
        if self.opening is None:
            return self, ""
        whole = self.opening.reply if is_reply else self.opening.text
        return dataclasses.replace(self, opening=None, written=""), _behind(whole, self.written)

    def close(self, turns: ChatTurns) -> "tuple[TurnWriter, str]":
        """Closes the open turn, whose content has begun; gives the text that follows it in any case."""
        closing = turns.closing(self.roles)
        return TurnWriter(self.roles, written=closing), closing

    def end(self, turns: ChatTurns) -> "tuple[TurnWriter, str]":
        """Leaves the conversation for a text outside of turns; gives the template's text at its end."""
        if self.is_open or not self.roles:
            return self, ""
        ending = turns.ending(self.roles)
        return dataclasses.replace(self, written=ending), _behind(ending, self.written)


def _behind(whole: str, written: str) -> str:
    """Gives the part of a text that is still to be written."""
    shared = next((i for i, pair in enumerate(zip(whole, written, strict=False)) if pair[0] != pair[1]), None)
    return whole[min(len(whole), len(written)) if shared is None else shared :]
