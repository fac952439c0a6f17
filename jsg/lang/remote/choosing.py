"""`select` on an API, which gives one of the choices, by the strongest means that the API has."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, final

from jsg.errors import BackendError, RequestError, UnsupportedError
from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.caller import Caller, Reply
from jsg.lang.remote.wire import Bill, Call, ModelPrompt, Scored, cost_of
from jsg.lang.tokens.choices import decide, greedy_token_selection, token_trie, unconditional_likelihood_normalized
from jsg.lang.tokens.model import ScoredChoice, ScoredChoices
from jsg.lang.words.backend import Selection
from jsg.lang.words.ir import SamplingArgs, Select

NO_TEMPERATURE = 1.0
NUM_TRIES = 3
"""The number of calls whose answer is no choice before that is an error."""
_DEFAULT, _GREEDY = token_trie.name, greedy_token_selection.name
_UNCONDITIONAL = unconditional_likelihood_normalized.name


class Encoder(Protocol):
    """The tokenizer of the model, such as a `tiktoken.Encoding`."""

    def encode(self, text: str) -> Sequence[int]:
        """Gives the tokens of a text."""
        ...


@final
class Chooser:
    """Chooses by one API, for all its sessions. It has no state."""

    def __init__(self, caller: Caller, unsupported: Unsupported, encoder: Encoder | None = None):
        self._caller = caller
        self._unsupported = unsupported
        self._encoder = encoder

    async def choose(self, prompt: ModelPrompt, select: Select) -> Selection:
        """Chooses one of the choices after `prompt`.

        Raises:
            UnsupportedError: The API cannot honour the method or the temperature.
            BackendError: The API gave none of the choices.
        """
        if not select.choices:
            raise RequestError("select needs one choice at least, but got none", "choices")
        if isinstance(prompt, str) and (scored := await self._caller.score(prompt, select.choices)) is not None:
            return self._by_scores(scored, select)
        if select.decision is not None:
            raise UnsupportedError(
                f"decide needs the probabilities of its labels, but {self._caller.api.name} does not score texts; use "
                "select, or a backend that scores, such as jsg's own",
                "decide",
            )
        if len(select.choices) == 1:
            return Selection(select.choices[0], (1.0,), cost_of([]))
        can = self._caller.api.abilities
        is_inside = isinstance(prompt, str) or prompt[-1].role == "assistant"
        if can.forces_choices_inside if is_inside else can.forces_choices:
            self._check_method(select, _DEFAULT)
            return await self._by_asking(prompt, select, is_forced=True)
        if isinstance(prompt, str) and can.max_alternatives and select.temperature == 0:
            self._check_method(select, _DEFAULT, _GREEDY)
            return await self._by_race(prompt, select)
        self._check_method(select, _DEFAULT)
        return await self._by_asking(prompt, select, is_forced=False)

    def _check_method(self, select: Select, *honoured: str) -> None:
        """Refuses a method that is not among `honoured`. The default method stands for the best that the API can do."""
        if select.method not in honoured:
            self._unsupported.leave_out(
                f'choices_method "{select.method}"', "it does not score its prompt; leave the method out"
            )

    def _by_scores(self, scored: Scored, select: Select) -> Selection:
        if select.method == _UNCONDITIONAL:
            self._unsupported.leave_out(f'choices_method "{_UNCONDITIONAL}"', "a choice alone has other tokens there")
            select = dataclasses.replace(select, method=_DEFAULT)
        if not all(scored.texts[1:]):
            raise BackendError(f"{self._caller.api.name} gave no tokens of the prompt; use another dialect")
        choices = scored_choices(scored)
        selection = decide(
            select.choices, choices, method=select.method, temperature=select.temperature, seed=select.seed
        )
        shown = [[[one.logprob, None, one.text] for one in text] for text in scored.texts[1:]]
        own = [text[len(text) - len(one.token_ids) :] for text, one in zip(shown, choices.choices, strict=True)]
        return dataclasses.replace(
            selection, meta=selection.meta | {"input_token_logprobs": own} | cost_of([scored.bill])
        )

    async def _by_asking(self, prompt: ModelPrompt, select: Select, *, is_forced: bool) -> Selection:
        """Lets the model continue. Its answer must be a choice, or, if it is not forced, begin with one."""
        room = max(len(choice.encode()) for choice in select.choices) + 1  # a token has at least one byte
        # An API that takes no temperature refuses only one that the program asked for.
        has_own = select.temperature != 0 or self._caller.api.abilities.takes_temperature
        args = SamplingArgs(
            max_tokens=room, temperature=select.temperature if has_own else NO_TEMPERATURE, seed=select.seed
        )
        call = Call(prompt=prompt, args=args, choices=select.choices if is_forced else ())
        replies: list[Reply] = []
        while len(replies) < NUM_TRIES:
            replies += await self._caller.collect(call)
            if (choice := chosen(replies[-1].text, select.choices, is_forced=is_forced)) is not None:
                return Selection(choice, None, cost_of(reply.bill for reply in replies))
        raise BackendError(
            f"{self._caller.api.name} was asked {NUM_TRIES} times for one of {list(select.choices)} and answered "
            f"{replies[-1].text[:200]!r} at last; name the choices in the prompt"
        )

    async def _by_race(self, prompt: str, select: Select) -> Selection:
        """Takes, token by token, the likeliest reported token with which a choice continues."""
        args = SamplingArgs(max_tokens=1, temperature=0.0)
        num_top = self._caller.api.abilities.max_alternatives
        bills: list[Bill | None] = []
        prefix = ""
        while len(alive := [choice for choice in select.choices if choice.startswith(prefix)]) > 1:
            call = Call(prompt=prompt + prefix, args=args, wants_tokens=True, num_alternatives=num_top)
            (reply,) = await self._caller.collect(call)
            bills.append(reply.bill)
            step = race_step(alive, prefix, reply.tokens[0].top if reply.tokens else {})
            if step is None and self._encoder is not None:
                # No choice continues with a reported token, so a call allows only the first tokens of the choices.
                firsts = {self._encoder.encode(choice[len(prefix) :])[0] for choice in alive}
                (reply,) = await self._caller.collect(Call(prompt=prompt + prefix, args=args, allowed=tuple(firsts)))
                bills.append(reply.bill)
                step = race_step(alive, prefix, {reply.text: 0.0})
            if step in select.choices or step is None:
                break
            prefix = step
        else:
            step = alive[0]
        if step is None:
            raise BackendError(
                f"none of the {num_top} tokens that {self._caller.api.name} finds most likely begins one of "
                f"{alive}; name the choices in the prompt, or give OpenAI(tokenizer=...)"
            )
        return Selection(step, None, cost_of(bills))


def race_step(alive: Sequence[str], prefix: str, top: Mapping[str, float]) -> str | None:
    """Gives a longer prefix of some choice, or a whole choice; None where no token decides.

    A token that goes beyond a choice counts for it: "Yes." counts for "Yes".
    """
    for token, _ in sorted(top.items(), key=lambda item: -item[1]):
        text = prefix + token
        if token and any(choice.startswith(text) for choice in alive):
            return text
        if token and (whole := [choice for choice in alive if text.startswith(choice)]):
            return max(whole, key=len)
    return prefix if prefix in alive else None


def chosen(answer: str, choices: Sequence[str], *, is_forced: bool) -> str | None:
    """Gives the choice that equals a forced answer, or the longest with which a free answer begins."""
    if is_forced:
        return answer if answer in choices else None
    begun = [choice for choice in choices if answer.startswith(choice) or answer.lstrip().startswith(choice.strip())]
    return max(begun, key=len, default=None)


def scored_choices(scored: Scored) -> ScoredChoices:
    """Gives scores in the form of the choices methods. An API names tokens by their text, so ids are invented."""
    ids: dict[str, int] = {}
    alone, *texts = [[ids.setdefault(token.text, len(ids)) for token in text] for text in scored.texts]
    common_len = min(_common_len(alone, text) for text in texts)
    choices = []
    for text, tokens in zip(texts, scored.texts[1:], strict=True):
        own = tokens[common_len:]
        if any(token.logprob is None for token in own):
            raise RequestError(
                "select needs a prompt before the choices: nothing precedes their first token", "choices"
            )
        choices.append(
            ScoredChoice(
                token_ids=tuple(text[common_len:]),
                logprobs=tuple(token.logprob or 0.0 for token in own),
                token_texts=tuple(token.text for token in own),
            )
        )
    return ScoredChoices(part_ids=(), common_ids=(), choices=tuple(choices), meta={})


def _common_len(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length
