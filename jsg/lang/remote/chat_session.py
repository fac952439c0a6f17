"""A stream's prompt on an API of conversations."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import assert_never, final

from jsg.errors import RequestError, UnsupportedError
from jsg.lang.backend import Piece, PromptItem, Selection, Session
from jsg.lang.ir import Gen, Image, RoleBegin, RoleEnd, Select, Text, Video
from jsg.lang.remote.choosing import Chooser
from jsg.lang.remote.continuing import Continuer
from jsg.lang.remote.messages import PICTURE, Conversation, picture_of
from jsg.lang.remote.text_session import check_no_offsets, no_join
from jsg.lang.remote.whole_turn import WholeTurn
from jsg.lang.remote.wire import Message


@final
class ChatSession:
    """A `BlockSession` whose prompt is turns.

    Where the API goes on in a turn of the assistant that has begun, gens and constants alternate freely. Where it does
    not, a gen must be the first thing in its turn, or, with speculation, the whole turn is asked for at once.
    """

    def __init__(self, continuer: Continuer, chooser: Chooser, conversation: Conversation | None = None):
        self._continuer = continuer
        self._chooser = chooser
        self._conversation = conversation or Conversation()
        self._turn = WholeTurn(continuer)
        # What an API says beyond a gen is of use to the next only where it could have been asked for that.
        self._single = continuer if self._continues else Continuer(continuer.caller, continuer.unsupported, None)

    @property
    def wants_blocks(self) -> bool:
        """Whether `generate_block` is to be used."""
        return self._continuer.num_ahead is not None and not self._continues

    async def extend(self, item: PromptItem) -> str:
        """As `Session.extend`. Raises RequestError outside of a turn, UnsupportedError for what has no place there."""
        match item:
            case RoleBegin():
                self._break_off()
                return self._conversation.begin(item.role)
            case RoleEnd():
                self._break_off()
                return self._conversation.end(item.role)
            case Text():
                self._check_open("text")
                self._conversation.add(item.text)
                self._continuer.extended(item.text)
                self._turn.extended(item.text)
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
            self._check_speculates("gen")
            for piece in await self.generate_block([gen]):
                yield piece
            return
        pieces = self._single.generate(prompt, gen.args)
        said: list[str] = []
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                said.append(piece.text)
                if piece.meta is not None:
                    self._conversation.add("".join(said))
                yield piece

    async def generate_block(self, items: Sequence[Text | Gen]) -> Sequence[Piece]:
        """As `BlockSession.generate_block`."""
        prompt = self._prompt("gen")
        gens = [item for item in items if isinstance(item, Gen)]
        starts_with_gen = bool(items) and isinstance(items[0], Gen)
        if len(gens) == 1 and starts_with_gen and not self._begun:
            # Nothing precedes it: an ordinary call does, and may stop where the gen does.
            written = [piece async for piece in self._single.generate(prompt, gens[0].args)]
            pieces = [Piece("".join(one.text for one in written), written[-1].meta, written[-1].others)]
        else:
            conversation = prompt if not self._begun else prompt[:-1]
            pieces = await self._turn.generate(conversation, self._begun, items)
        answers = iter(pieces)
        for item in items:
            self._conversation.add(item.text if isinstance(item, Text) else next(answers).text)
        return pieces

    async def select(self, select: Select) -> Selection:
        """As `Session.select`."""
        prompt = self._prompt("select")
        if self._begun and not self._continues:
            raise UnsupportedError(
                f"{self._name} cannot go on in a turn of the assistant that has begun, so select must be the first "
                "thing in assistant(); move the text before it into the user's turn"
            )
        self._break_off()
        selection = await self._chooser.choose(prompt, select)
        self._conversation.add(selection.choice)
        return selection

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> Sequence[Session]:
        """As `Session.fork`: copies."""
        check_no_offsets(position_ids_offset, self._name)
        return [self._copy() for _ in range(size)]

    async def join(self, branches: Sequence[Session]) -> None:
        """Raises UnsupportedError."""
        raise no_join(self._name, branches)

    async def close(self) -> None:
        """Nothing is held."""

    def _copy(self) -> "ChatSession":
        made = ChatSession(self._continuer.copy(), self._chooser, self._conversation.copy())
        made._turn = self._turn.copy(made._continuer)
        return made

    @property
    def _name(self) -> str:
        return self._continuer.caller.api.name

    @property
    def _continues(self) -> bool:
        return self._continuer.caller.api.abilities.continues

    @property
    def _begun(self) -> str:
        """What the open turn holds."""
        return self._conversation.messages[-1].text

    def _break_off(self) -> None:
        self._continuer.broke_off()
        self._turn.broke_off()

    def _check_open(self, what: str) -> str:
        """The role of the open turn. Raises RequestError outside of one."""
        if (role := self._conversation.open_role) is None:
            raise RequestError(
                f"{self._name} is a chat model: {what} must be in a turn, but no turn is open; "
                "put it into system(), user() or assistant()"
            )
        return role

    def _check_speculates(self, what: str) -> None:
        if self._continuer.num_ahead is None:
            raise UnsupportedError(
                f"{self._name} cannot go on in a turn of the assistant that has begun, so {what} must be the first "
                "thing in assistant(). Move the text before it into the user's turn, or let the whole turn be asked "
                "for at once with @function(num_api_spec_tokens=...); for a server that can, say so with dialect="
            )

    def _prompt(self, what: str) -> tuple[Message, ...]:
        """The turns, the open one last if it holds something. Raises RequestError outside of the assistant's turn."""
        if self._check_open(what) != "assistant":
            raise RequestError(f"{self._name} answers in the assistant's turns; put {what} into assistant()")
        messages = self._conversation.messages
        return messages if messages[-1].parts else messages[:-1]
