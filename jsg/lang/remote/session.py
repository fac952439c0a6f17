"""What the sessions of chat APIs and of completions APIs have in common."""

import abc
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from jsg.errors import UnsupportedError
from jsg.lang.remote.choosing import Chooser
from jsg.lang.remote.continuing import Continuer
from jsg.lang.remote.wire import ModelPrompt
from jsg.lang.words.backend import Piece, PromptItem, Selection, Session
from jsg.lang.words.ir import Gen, SamplingArgs, Select


class RemoteSession(abc.ABC):
    """The prompt of a stream on an API. The API keeps nothing of it: each call sends the whole prompt."""

    def __init__(self, continuer: Continuer, chooser: Chooser) -> None:
        self._continuer = continuer
        self._chooser = chooser

    @abc.abstractmethod
    async def extend(self, item: PromptItem) -> str:
        """As `Session.extend`. Raises UnsupportedError for what the API does not take."""

    @abc.abstractmethod
    def generate(self, gen: Gen) -> AsyncGenerator[Piece]:
        """As `Session.generate`."""

    @abc.abstractmethod
    def _prompt(self, what: str) -> ModelPrompt:
        """The prompt of a call, `what` being "gen" or "select".

        Raises:
            RequestError: A call may not stand here.
            UnsupportedError: The API cannot continue the text here.
        """

    @abc.abstractmethod
    def _add(self, text: str) -> None:
        """Appends what the model wrote."""

    @abc.abstractmethod
    def _copy(self) -> Self:
        """A session for a branch of a fork."""

    async def select(self, select: Select) -> Selection:
        """As `Session.select`."""
        prompt = self._prompt("select")
        self._continuer.broke_off()
        selection = await self._chooser.choose(prompt, select)
        self._add(selection.choice)
        return selection

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> Sequence[Session]:
        """As `Session.fork`: copies."""
        if position_ids_offset is not None and any(position_ids_offset):
            raise UnsupportedError(
                f"{self._name} has no say in positions; leave position_ids_offset out, or use jsg's own backend"
            )
        return [self._copy() for _ in range(size)]

    async def join(self, branches: Sequence[Session]) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            f"{self._name} cannot put {len(branches)} branches side by side behind one prompt; read their variables "
            'and append those, which is what join("gather_variable") is for, or use jsg\'s own backend'
        )

    async def close(self) -> None:
        """As `Session.close`: the session holds nothing at the API."""
        return

    @property
    def _name(self) -> str:
        return self._continuer.caller.api.name

    async def _generate(self, continuer: Continuer, prompt: ModelPrompt, args: SamplingArgs) -> AsyncGenerator[Piece]:
        """Continues the prompt, which then ends with the answer."""
        written: list[str] = []
        async with contextlib.aclosing(continuer.generate(prompt, args)) as pieces:
            async for piece in pieces:
                written.append(piece.text)
                if piece.meta is not None:
                    self._add("".join(written))
                yield piece
