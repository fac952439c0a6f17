"""The seam between a `TokenSession` and a model whose tokens jsg knows: in this process, or behind `jsg serve`.

Prompts go down in parts and come back as the tokens they became, so that the next call sends those tokens and every one
of them is found in the prefix cache.
"""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from jsg.processing.parts import Part
from jsg.processing.turns import ChatTurns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """One continuation.

    Attributes:
        prompt: What is continued.
        sampling: Fields of `SamplingParams.from_dict`; `n` is 1 unless a gen asks for more.
        reports: `return_logprob`, `logprob_start_len`, `top_logprobs_num`, as `jsg.Engine.generate` takes them.
    """

    prompt: tuple[Part, ...]
    sampling: dict[str, Any]
    reports: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a continuation ended.

    Attributes:
        part_ids: The tokens of each `TextPart` of the prompt, in order, those in branches included. Text parts one
            behind another are one text: all its tokens stand with the first of them, and the others have none.
        kept_ids: Output tokens whose text lies wholly in the answer.
        tail: The rest of the answer's text, which is only the beginning of a token that a stop string cut.
        meta: `meta_info` of `/generate`.
        others: Texts of the second and further continuations.
    """

    part_ids: tuple[tuple[int, ...], ...]
    kept_ids: tuple[int, ...]
    tail: str
    meta: dict[str, Any]
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class TokenDelta:
    """New text; `outcome` in the last one."""

    text: str
    outcome: Outcome | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChoice:
    """One choice, encoded together with the text before it.

    Attributes:
        token_ids: Its tokens, from the first position on where a choice departs from the prompt's text encoded alone.
        token_texts: Their texts.
        logprobs: Of each, given all before it.
        unconditional: Of each, given nothing but the choice's tokens before it (None at the first); empty unless asked.
    """

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float | None, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChoices:
    """All choices, scored in one engine call.

    Attributes:
        part_ids: As in `Outcome`, without the text parts that the prompt ends in, which were encoded together with each
            choice.
        common_ids: Tokens of those up to where a choice departs from them.
        choices: In the order given.
        meta: `prompt_tokens`, `cached_tokens`, as `/generate` reports them, over all choices.
    """

    part_ids: tuple[tuple[int, ...], ...]
    common_ids: tuple[int, ...]
    choices: tuple[ScoredChoice, ...]
    meta: dict[str, Any]


class Hold(Protocol):
    """A prefix that stays in the cache."""

    part_ids: tuple[tuple[int, ...], ...]
    """As in `Outcome`."""

    async def cached(self) -> None:
        """Returns when it is computed, or when it will not be."""
        ...

    async def release(self) -> None:
        """Ends it. A second time does nothing."""
        ...


class TokenModel(Protocol):
    """A model by its tokens. Safe for any number of sessions at a time; all on one event loop."""

    async def turns(self) -> ChatTurns:
        """The model's chat template. Raises RequestError where it has none."""
        ...

    def generate(self, call: TokenCall) -> AsyncIterator[TokenDelta]:
        """Continues a prompt. Closing it early aborts. Raises JsgError."""
        ...

    async def score(
        self, prompt: tuple[Part, ...], choices: Sequence[str], *, unconditional: bool = False
    ) -> ScoredChoices:
        """How likely each choice comes next, in one engine call. Raises JsgError."""
        ...

    async def hold(self, prompt: tuple[Part, ...]) -> Hold:
        """Has a prompt computed and kept cached until `Hold.release`, as long as memory allows; need not wait for it.

        Raises JsgError.
        """
        ...
