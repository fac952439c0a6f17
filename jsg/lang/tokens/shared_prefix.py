"""A prompt that several sessions begin with: encoded once, computed once, and held until they are closed."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import final

from jsg.errors import JsgError
from jsg.lang.tokens.model import Hold, TokenModel
from jsg.processing.parts import JoinedPart, Part, TextPart, TokenPart

logger = logging.getLogger(__name__)
_CUT = TokenPart(())
"""Behind a text: the text ends here, and what follows is encoded by itself."""


@final
class SharedPrefix:
    """What a session was when it was forked.

    The hint goes to the model at once, and a branch waits for it only when it asks the model something. It is a hint: a
    model that cannot hold the prefix is asked without.

    Invariant: once `_parts` is the prompt, `_outer` and `_own_parts` are gone.
    """

    def __init__(
        self, model: TokenModel, outer: "SharedPrefix | None", parts: Sequence[Part], num_users: int, *, is_held: bool
    ) -> None:
        """Begins to compute it; must be called on the event loop.

        Args:
            model: Where it is to be held.
            outer: What the forked session itself began with and had not waited for.
            parts: What stands behind `outer`.
            num_users: Sessions that will release it.
            is_held: Compute it now and keep it cached; otherwise its text is only cut off from what follows.
        """
        self._model = model
        self._outer = outer
        self._own_parts = tuple(parts)
        self._num_users = num_users
        self._hold: Hold | None = None
        self._parts: tuple[Part, ...] | None = None
        self._task = asyncio.get_running_loop().create_task(self._compute()) if is_held else None

    async def parts(self) -> tuple[Part, ...]:
        """The prompt; as tokens, where the model has taken the hint."""
        if self._task is not None:
            await asyncio.wait((self._task,))
        if self._parts is not None:
            return self._parts
        return self._settle(_cut_off(await self._whole()))

    def add_user(self) -> None:
        """One more session that will release it."""
        self._num_users += 1

    async def release(self) -> None:
        """One user less; the last one ends the hold."""
        self._num_users -= 1
        if self._num_users or self._task is None:
            return
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._hold is not None:
            await self._hold.release()

    async def _whole(self) -> tuple[Part, ...]:
        """The prompt without a cut at its end. A chain of forks may be long, so this goes along it in a loop."""
        pieces = [self._own_parts]  # the last first
        outer = self._outer
        while outer is not None:
            if outer._task is not None:
                await asyncio.wait((outer._task,))
            if outer._parts is not None:
                pieces.append(outer._parts)
                break
            pieces.append(_cut_off(outer._own_parts))
            outer = outer._outer
        return tuple(part for piece in reversed(pieces) for part in piece)

    async def _compute(self) -> None:
        whole = await self._whole()
        parts = _cut_off(whole)
        if not any(isinstance(part, JoinedPart) for part in whole):  # the cache does not keep what is behind branches
            self._hold = await try_hold(self._model, whole)
            if self._hold is not None:
                parts = commit(whole, self._hold.part_ids)
        self._settle(parts)

    def _settle(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        self._parts, self._outer, self._own_parts = parts, None, ()
        return parts


async def try_hold(model: TokenModel, prompt: tuple[Part, ...]) -> Hold | None:
    """Has a model hold a prompt; None where it does not, which is no error: it is a hint.

    Whatever is wrong with the prompt, or the model, is said when the prompt is continued.
    """
    try:
        return await model.hold(prompt)
    except JsgError:
        return None
    except Exception:
        logger.exception("a model failed to hold a prompt, which goes on without; this is a bug")
        return None


def commit(parts: Sequence[Part], part_ids: Iterable[Sequence[int]]) -> tuple[Part, ...]:
    """The parts with tokens in place of texts; `part_ids` as in `tokens.model.Outcome`."""
    ids = iter(part_ids)

    def tokens_of(some: Sequence[Part]) -> tuple[Part, ...]:
        made: list[Part] = []
        for part in some:
            match part:
                case TextPart():
                    part = TokenPart(tuple(next(ids)))
                case JoinedPart(branches):
                    part = JoinedPart(tuple(tokens_of(branch) for branch in branches))
            if isinstance(part, TokenPart) and made and isinstance(made[-1], TokenPart):
                made[-1] = TokenPart(made[-1].ids + part.ids)
            else:
                made.append(part)
        return tuple(made)

    return tokens_of(parts)


def _cut_off(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return (*parts, _CUT) if parts and isinstance(parts[-1], TextPart) else parts
