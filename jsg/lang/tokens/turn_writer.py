"""What a chat template writes between the contents of a program's turns, as they open and close."""

import dataclasses
from typing import final

from jsg.errors import RequestError
from jsg.processing.turns import ChatTurns, Opening


@final
@dataclasses.dataclass(frozen=True, slots=True)
class TurnWriter:
    """Where a prompt is in its conversation.

    Attributes:
        roles: Of all turns so far.
        is_open: The last of them is not closed.
        opening: Of the open turn, while its content has not begun.
        trims_end: The template takes white space off the end of the open turn's content.
        written: What stands behind the last content already: the beginning of what the template writes there.
    """

    roles: tuple[str, ...] = ()
    is_open: bool = False
    opening: Opening | None = None
    trims_end: bool = False
    written: str = ""

    @property
    def open_role(self) -> str | None:
        """Whose turn is open."""
        return self.roles[-1] if self.is_open else None

    def open(self, turns: ChatTurns, role: str, *, is_first: bool) -> "tuple[TurnWriter, str]":
        """Opens a turn; gives what is certain to stand before its content, and is not written yet.

        Args:
            turns: The template.
            role: Whose turn it is.
            is_first: Nothing stands in the prompt yet. Else a BOS at the front of the template is left out.

        Raises:
            RequestError: A turn is open, or the template does not take this one.
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
        """Begins the content of the open turn, where it has not begun; gives what is to be written before it."""
        if self.opening is None:
            return self, ""
        whole = self.opening.reply if is_reply else self.opening.text
        return dataclasses.replace(self, opening=None, written=""), _behind(whole, self.written)

    def close(self, turns: ChatTurns) -> "tuple[TurnWriter, str]":
        """Closes the open turn, whose content has begun; gives what follows it whatever comes next."""
        closing = turns.closing(self.roles)
        return TurnWriter(self.roles, written=closing), closing

    def end(self, turns: ChatTurns) -> "tuple[TurnWriter, str]":
        """Leaves the conversation for a text outside of turns; gives what the template writes at its end."""
        if self.is_open or not self.roles:
            return self, ""
        ending = turns.ending(self.roles)
        return dataclasses.replace(self, written=ending), _behind(ending, self.written)


def _behind(whole: str, written: str) -> str:
    """What is left to write of a text of which the beginning is written."""
    shared = next((i for i, pair in enumerate(zip(whole, written, strict=False)) if pair[0] != pair[1]), None)
    return whole[min(len(whole), len(written)) if shared is None else shared :]
