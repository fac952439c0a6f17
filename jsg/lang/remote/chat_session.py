"""The prompt of a stream on an API of conversations."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import assert_never, final

from jsg.errors import RequestError, UnsupportedError
from jsg.lang.remote.choosing import Chooser
from jsg.lang.remote.continuing import Continuer
from jsg.lang.remote.messages import PICTURE, Conversation, picture_of
from jsg.lang.remote.session import RemoteSession
from jsg.lang.remote.whole_turn import WholeTurn
from jsg.lang.remote.wire import Message
from jsg.lang.words.backend import Piece, PromptItem
from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, Text, Video


@final
class ChatSession(RemoteSession):
    """A `BlockSession` whose prompt is turns.

    Where the API continues an open turn of the assistant, gens and constants alternate freely. Where it does not, a gen
    must be the first thing in its turn; with speculation, one call asks for the whole turn.
    """

    def __init__(self, continuer: Continuer, chooser: Chooser, conversation: Conversation | None = None):
        super().__init__(continuer, chooser)
        self._conversation = conversation or Conversation()
        self._turn = WholeTurn(continuer)
        # What an API writes beyond a gen answers the next gen only where the API continues an open turn.
        self._single = continuer if self._continues else Continuer(continuer.caller, continuer.unsupported, None)

    @property
    def wants_blocks(self) -> bool:
        """Whether `generate_block` is to be used."""
        return self._continuer.num_ahead is not None and not self._continues

    async def extend(self, item: PromptItem) -> str:
        """As `Session.extend`. Raises RequestError outside of a turn, UnsupportedError for what has no place there."""
        match item:
            case RoleBegin():
                self._continuer.broke_off()
                return self._conversation.begin(item.role)
            case RoleEnd():
                self._continuer.broke_off()
                return self._conversation.end(item.role)
            case Text():
                self._check_open("text")
                self._conversation.add(item.text)
                self._continuer.extended(item.text)
                return item.text
            case Image():
                if self._check_open("a picture") != "user":
                    raise UnsupportedError(f"{self._name} takes pictures in the user's turns only; put it into user()")
                self._conversation.add(picture_of(item))
                return PICTURE
            case Video():
                raise UnsupportedError(f"{self._name} takes no videos; append frames of it with image()")
        assert_never(item)

    async def generate(self, gen: Gen) -> AsyncGenerator[Piece]:
        """As `Session.generate`."""
        prompt = self._prompt("gen")
        if self._begun and not self._continues:
            self._check_speculates()
            for piece in await self.generate_block([gen]):
                yield piece
            return
        async with contextlib.aclosing(self._generate(self._single, prompt, gen.args)) as pieces:
            async for piece in pieces:
                yield piece

    async def generate_block(self, items: Sequence[Text | Gen]) -> Sequence[Piece]:
        """As `BlockSession.generate_block`."""
        prompt = self._prompt("gen")
        gens = [item for item in items if isinstance(item, Gen)]
        starts_with_gen = bool(items) and isinstance(items[0], Gen)
        if len(gens) == 1 and starts_with_gen and not self._begun:
            # Nothing precedes the gen, so an ordinary call answers it, and stops where the gen does.
            written = [piece async for piece in self._single.generate(prompt, gens[0].args)]
            pieces = [Piece("".join(one.text for one in written), written[-1].meta, written[-1].others)]
        else:
            conversation = prompt if not self._begun else prompt[:-1]
            pieces = await self._turn.generate(conversation, self._begun, items)
        answers = iter(pieces)
        for item in items:
            self._conversation.add(item.text if isinstance(item, Text) else next(answers).text)
        return pieces

    def _add(self, text: str) -> None:
        self._conversation.add(text)

    def _copy(self) -> "ChatSession":
        return ChatSession(self._continuer.copy(), self._chooser, self._conversation.copy())

    @property
    def _continues(self) -> bool:
        return self._continuer.caller.api.abilities.continues

    @property
    def _begun(self) -> str:
        """The text of the open turn."""
        return self._conversation.messages[-1].text

    def _check_open(self, what: str) -> str:
        """The role of the open turn. Raises RequestError outside of one."""
        if (role := self._conversation.open_role) is None:
            raise RequestError(
                f"{self._name} is a chat model: {what} must be in a turn, but no turn is open; "
                "put it into system(), user() or assistant()"
            )
        return role

    def _check_speculates(self) -> None:
        if self._continuer.num_ahead is None:
            raise UnsupportedError(
                f"{self._name} cannot go on in a turn of the assistant that has begun, so gen must be the first "
                "thing in assistant(). Move the text before it into the user's turn, or let the whole turn be asked "
                "for at once with @function(num_api_spec_tokens=...); for a server that can, say so with dialect="
            )

    def _prompt(self, what: str) -> tuple[Message, ...]:
        """As `RemoteSession._prompt`: the turns, the open one last if it holds something."""
        if self._check_open(what) != "assistant":
            raise RequestError(f"{self._name} answers in the assistant's turns; put {what} into assistant()")
        if what == "select" and self._begun and not self._continues:
            raise UnsupportedError(
                f"{self._name} cannot go on in a turn of the assistant that has begun, so select must be the first "
                "thing in assistant(); move the text before it into the user's turn"
            )
        messages = self._conversation.messages
        return messages if messages[-1].parts else messages[:-1]
