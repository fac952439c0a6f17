"""The prompt of a stream on an API that continues text."""

from collections.abc import AsyncGenerator
from typing import assert_never, final

from jsg.errors import UnsupportedError
from jsg.lang.remote.choosing import Chooser
from jsg.lang.remote.continuing import Continuer
from jsg.lang.remote.session import RemoteSession
from jsg.lang.words.backend import Piece, PromptItem
from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, Text, Video
from jsg.processing.growing_text import GrowingText


@final
class TextSession(RemoteSession):
    """A `Session` whose prompt is a text."""

    def __init__(self, continuer: Continuer, chooser: Chooser, text: str = "") -> None:
        super().__init__(continuer, chooser)
        self._text = GrowingText()
        self._text.append(text)

    async def extend(self, item: PromptItem) -> str:
        """As `Session.extend`. Raises UnsupportedError: a completions API takes text only."""
        match item:
            case Text():
                self._text.append(item.text)
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

    def generate(self, gen: Gen) -> AsyncGenerator[Piece]:
        """As `Session.generate`."""
        return self._generate(self._continuer, str(self._text), gen.args)

    def _prompt(self, what: str) -> str:
        return str(self._text)

    def _add(self, text: str) -> None:
        self._text.append(text)

    def _copy(self) -> "TextSession":
        return TextSession(self._continuer.copy(), self._chooser, str(self._text))
