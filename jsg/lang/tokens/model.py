"""The seam between a `TokenSession` and a model whose tokens jsg knows, in this process or behind `jsg serve`.

Prompts are sent in parts and come back as the tokens that they became, so that the next call sends those tokens and the
prefix cache has each of them.
"""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, final

from jsg.processing.parts import Part
from jsg.prompt_ids import PromptIds
from jsg.speech.prompts.turns import ChatTurns

type Act = Callable[[], Awaitable[object]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """One continuation.

    Attributes:
        prompt: The prompt.
        sampling: The fields of `SamplingParams.from_dict`; `n` is 1 unless a gen asks for more.
        reports: `return_logprob`, `logprob_start_len`, `top_logprobs_num`, as in `jsg.Engine.generate`.
    """

    prompt: tuple[Part, ...]
    sampling: dict[str, Any]
    reports: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a continuation.

    Attributes:
        part_ids: The tokens of each `TextPart` of the prompt, in order, those in branches included. Consecutive text
            parts are one text: the first of them has all its tokens, and the others have none.
        kept_ids: The output tokens whose text is wholly in the answer.
        tail: The rest of the answer, which is the beginning of a token that a stop string cut.
        meta: The `meta_info` of `/generate`.
        others: The texts of the second and further continuations.
    """

    part_ids: tuple[tuple[int, ...] | PromptIds, ...]
    kept_ids: tuple[int, ...]
    tail: str
    meta: dict[str, Any]
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class TokenDelta:
    """New text. The last delta has the `outcome`."""

    text: str
    outcome: Outcome | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChoice:
    """One choice, encoded together with the text before it.

    Attributes:
        token_ids: Its tokens, from the first position on at which a choice differs from the text of the prompt alone.
        token_texts: The texts of the tokens.
        logprobs: The log-probability of each token, given all tokens before it.
        unconditional: The log-probability of each token, given only the tokens of the choice before it (None for the
            first token); empty unless asked for.
    """

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float | None, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChoices:
    """The scores of all choices.

    Attributes:
        part_ids: As in `Outcome`, without the text parts at the end of the prompt, which were encoded together with
            each choice.
        common_ids: The tokens of those text parts up to the first position at which a choice differs.
        choices: The choices, in the order given.
        meta: The report over all choices: `prompt_tokens`, `cached_tokens` and others of `/generate`.
    """

    part_ids: tuple[tuple[int, ...] | PromptIds, ...]
    common_ids: tuple[int, ...]
    choices: tuple[ScoredChoice, ...]
    meta: dict[str, Any]


@final
class Hold:
    """A prefix that stays in the cache.

    Attributes:
        part_ids: The tokens of the prompt, as in `Outcome`.
    """

    def __init__(
        self, part_ids: tuple[tuple[int, ...] | PromptIds, ...], end: Act | None = None, wait: Act | None = None
    ) -> None:
        """`end` ends it; None where nothing is held. `wait` returns as `cached` does; None where it is computed."""
        self.part_ids = part_ids
        self._end = end
        self._wait = wait

    async def cached(self) -> None:
        """Returns when the prefix is computed, or when it will not be."""
        if self._wait is not None:
            await self._wait()

    async def release(self) -> None:
        """Ends the hold. A second call does nothing."""
        end, self._end = self._end, None
        if end is not None:
            await end()


class TokenModel(Protocol):
    """A model whose tokens jsg knows. It serves any number of sessions at a time, all on one event loop."""

    async def turns(self) -> ChatTurns:
        """Gives the chat template. Raises RequestError where the model has none."""
        ...

    def generate(self, call: TokenCall) -> AsyncIterator[TokenDelta]:
        """Continues a prompt. Closing the iterator early aborts. Raises JsgError."""
        ...

    async def score(
        self, prompt: tuple[Part, ...], choices: Sequence[str], *, unconditional: bool = False
    ) -> ScoredChoices:
        """Scores how likely each choice comes next, in one submission. Raises JsgError."""
        ...

    async def hold(self, prompt: tuple[Part, ...]) -> Hold:
        """Lets a prompt be computed, and kept cached until `Hold.release` if memory allows. Need not wait for it.

        Raises JsgError.
        """
        ...
