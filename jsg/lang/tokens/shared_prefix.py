"""The common prompt of several sessions, which is encoded once, computed once, and held until they are closed."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import final

from jsg.errors import JsgError
from jsg.lang.tokens.model import Hold, TokenModel
from jsg.processing.parts import JoinedPart, Part, TextPart, TokenPart
from jsg.prompt_ids import PromptIds, join_ids

logger = logging.getLogger(__name__)
_CUT = TokenPart(())
"""Ends a text, so that later text is not encoded together with it. Several sessions go on from here."""


@final
class SharedPrefix:
    """The prompt of a session when it was forked.

    The model is asked for a hold at once. A branch waits for it only at its first call of the model. A model that
    cannot hold the prefix is called without.

    Invariant: once `_parts` has the prompt, `_outer` is None and `_own_parts` is empty.
    """

    def __init__(
        self, model: TokenModel, outer: "SharedPrefix | None", parts: Sequence[Part], num_users: int, *, is_held: bool
    ) -> None:
        """Begins to compute the prompt; must be called on the event loop.

        Args:
            model: The model that holds it.
            outer: The prefix of the forked session, if it had not waited for that.
            parts: The parts after `outer`.
            num_users: The number of sessions that will release it.
            is_held: Whether it is computed now and kept cached; otherwise its text is only cut off from later text.
        """
        self._model = model
        self._outer = outer
        self._own_parts = tuple(parts)
        self._num_users = num_users
        self._hold: Hold | None = None
        self._parts: tuple[Part, ...] | None = None
        self._task = asyncio.get_running_loop().create_task(self._compute()) if is_held else None

    async def parts(self) -> tuple[Part, ...]:
        """Gives the prompt, as tokens where the model holds it."""
        if self._task is not None:
            await asyncio.wait((self._task,))
        if self._parts is not None:
            return self._parts
        return self._settle(cut_off(await self._whole()))

    def add_user(self) -> None:
        """Counts one more session that will release it."""
        self._num_users += 1

    async def release(self) -> None:
        """Counts one session less. The last one ends the hold."""
        self._num_users -= 1
        if self._num_users or self._task is None:
            return
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._hold is not None:
            await self._hold.release()

    async def _whole(self) -> tuple[Part, ...]:
        """Gives the prompt without a cut at its end, by a loop, because a chain of forks may be long."""
        pieces = [self._own_parts]  # in reverse order
        outer = self._outer
        while outer is not None:
            if outer._task is not None:
                await asyncio.wait((outer._task,))
            if outer._parts is not None:
                pieces.append(outer._parts)
                break
            pieces.append(cut_off(outer._own_parts))
            outer = outer._outer
        return tuple(part for piece in reversed(pieces) for part in piece)

    async def _compute(self) -> None:
        whole = await self._whole()
        parts = cut_off(whole)
        if not any(isinstance(part, JoinedPart) for part in whole):  # a hold has no branches
            self._hold = await try_hold(self._model, whole)
            if self._hold is not None:
                parts = (*commit(whole, self._hold.part_ids), _CUT)
        self._settle(parts)

    def _settle(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        self._parts, self._outer, self._own_parts = parts, None, ()
        return parts


async def try_hold(model: TokenModel, prompt: tuple[Part, ...]) -> Hold | None:
    """Asks a model to hold a prompt; gives None where it does not.

    That is no error, because an error of the prompt, or of the model, is raised when the prompt is continued.
    """
    try:
        return await model.hold(prompt)
    except JsgError:
        return None
    except Exception:
        logger.exception("a model failed to hold a prompt, which goes on without; this is a bug")
        return None


def commit(parts: Sequence[Part], part_ids: Iterable[tuple[int, ...] | PromptIds]) -> tuple[Part, ...]:
    """Gives the parts with tokens in place of texts; `part_ids` is that of `tokens.model.Outcome`."""
    return _committed(parts, iter(part_ids))


def _committed(parts: Sequence[Part], ids: Iterator[tuple[int, ...] | PromptIds]) -> tuple[Part, ...]:
    made: list[Part] = []
    for part in parts:
        match part:
            case TextPart():
                part = TokenPart(next(ids))
            case JoinedPart(branches):
                part = JoinedPart(tuple(_committed(branch, ids) for branch in branches))
        if isinstance(part, TokenPart) and made and isinstance(made[-1], TokenPart):
            made[-1] = TokenPart(join_ids((made[-1].ids, part.ids)))
        else:
            made.append(part)
    return tuple(made)


def cut_off(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Gives the parts with a cut after a text at their end."""
    return (*parts, _CUT) if parts and isinstance(parts[-1], TextPart) else parts
