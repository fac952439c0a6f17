"""A stream's prompt on an API that continues text."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, assert_never, final

from jsg.errors import UnsupportedError
from jsg.lang.backend import Piece, PromptItem, Selection, Session
from jsg.lang.ir import Gen, Image, RoleBegin, RoleEnd, Select, Text, Video
from jsg.lang.remote.choosing import Chooser
from jsg.lang.remote.continuing import Continuer


@final
class TextSession:
    """A `Session` whose prompt is a text."""

    def __init__(self, continuer: Continuer, chooser: Chooser, text: str = ""):
        self._continuer = continuer
        self._chooser = chooser
        self._text = text

    async def extend(self, item: PromptItem) -> str:
        """As `Session.extend`. Raises UnsupportedError: a completions API takes text only."""
        match item:
            case Text():
                self._text += item.text
                self._continuer.extended(item.text)
                return item.text
            case RoleBegin() | RoleEnd():
                raise UnsupportedError(
                    f"{self._name} continues text and has no turns; write the text without {item.role}(), "
                    'or use a chat model with api="chat"'
                )
            case Image() | Video():
                raise UnsupportedError(f"{self._name} continues text and takes no pictures; use a chat model")
        assert_never(item)

    async def generate(self, gen: Gen) -> AsyncGenerator[Piece]:
        """As `Session.generate`."""
        pieces = self._continuer.generate(self._text, gen.args)
        said: list[str] = []
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                said.append(piece.text)
                if piece.meta is not None:
                    self._text += "".join(said)
                yield piece

    async def select(self, select: Select) -> Selection:
        """As `Session.select`."""
        self._continuer.broke_off()
        selection = await self._chooser.choose(self._text, select)
        self._text += selection.choice
        return selection

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> Sequence[Session]:
        """As `Session.fork`: copies."""
        check_no_offsets(position_ids_offset, self._name)
        return [TextSession(self._continuer.copy(), self._chooser, self._text) for _ in range(size)]

    async def join(self, branches: Sequence[Session]) -> None:
        """Raises UnsupportedError."""
        raise no_join(self._name, branches)

    async def close(self) -> None:
        """Nothing is held."""

    @property
    def _name(self) -> str:
        return self._continuer.caller.api.name


def check_no_offsets(position_ids_offset: Sequence[int] | None, name: str) -> None:
    """Raises UnsupportedError where a fork asks for other positions."""
    if position_ids_offset is not None and any(position_ids_offset):
        raise UnsupportedError(
            f"{name} has no say in positions; leave position_ids_offset out, or use jsg's own backend"
        )


def no_join(name: str, branches: Sequence[Any]) -> UnsupportedError:
    """Why branches cannot be joined side by side."""
    return UnsupportedError(
        f"{name} cannot put {len(branches)} branches side by side behind one prompt; read their variables and append "
        'those, which is what join("gather_variable") is for, or use jsg\'s own backend'
    )
