"""The methods of `select`: which of several choices a model prefers, by how likely their tokens are.

`token_trie` is the default, and its scores are probabilities. Of all token sequences with which the model could
continue, take those that begin with the tokens of a choice: the probability of a choice is its share of them. A
sequence that begins with two choices counts for the longer one only. The other three methods come from SGLang and keep
its formulas.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jsg.errors import RequestError
from jsg.lang.tokens.model import ScoredChoice, ScoredChoices
from jsg.lang.tokens.trie import TokenTrie
from jsg.lang.words.backend import Selection


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a method.

    Attributes:
        best: Index of the preferred choice.
        scores: The score of each choice, by which one is drawn as by logits. None where the method has no scores.
        meta: Further fields of the report.
    """

    best: int
    scores: tuple[float, ...] | None
    meta: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ChoicesMethod:
    """A way to choose.

    Attributes:
        name: Its name in `ir.Select`.
        judge: Gives the verdict for the scores and the name of the method. Raises RequestError where it cannot judge
            these choices.
        needs_unconditional: Whether the choices must be scored by themselves as well.
        has_scores: Whether a choice may be drawn by its verdicts.
    """

    name: str
    judge: Callable[[ScoredChoices, str], Verdict]
    needs_unconditional: bool = False
    has_scores: bool = True


def _by_trie(scored: ScoredChoices, name: str) -> Verdict:
    """The most likely choice, by exact probabilities over the trie of the tokens."""
    scores, _ = trie_logprobs(scored)
    return Verdict(_first_best(scores), tuple(scores), {})


def _by_mean(scored: ScoredChoices, name: str) -> Verdict:
    """The choice whose tokens are likeliest on average, which favours long and predictable choices."""
    scores = [_mean(choice.logprobs, name) for choice in scored.choices]
    return Verdict(_first_best(scores), tuple(scores), {})


def _by_greedy_tokens(scored: ScoredChoices, name: str) -> Verdict:
    """Keeps, token by token, the choices whose token is likeliest; a short choice continues with its mean."""
    length = max(len(choice.logprobs) for choice in scored.choices)
    matrix = [
        [*choice.logprobs, *[_mean(choice.logprobs, name)] * (length - len(choice.logprobs))]
        for choice in scored.choices
    ]
    left = list(range(len(matrix)))
    for column in range(length):
        best = max(matrix[row][column] for row in left)
        left = [row for row in left if matrix[row][column] == best]
    return Verdict(left[0], None, {"greedy_logprob_matrix": matrix})


def _by_gain(scored: ScoredChoices, name: str) -> Verdict:
    """The choice whose tokens the prompt makes likelier, on average, than they are by themselves.

    A first token, which nothing precedes, counts as certain.
    """
    scores: list[float] = []
    for choice in scored.choices:
        gains = [own - (alone or 0.0) for own, alone in zip(choice.logprobs, choice.unconditional, strict=True)]
        scores.append(_mean(gains, name))
    alone = [_shown(choice, choice.unconditional) for choice in scored.choices]
    return Verdict(_first_best(scores), tuple(scores), {"unconditional_token_logprobs": alone})


token_trie = ChoicesMethod("token_trie", _by_trie)
token_length_normalized = ChoicesMethod("token_length_normalized", _by_mean)
greedy_token_selection = ChoicesMethod("greedy_token_selection", _by_greedy_tokens, has_scores=False)
unconditional_likelihood_normalized = ChoicesMethod(
    "unconditional_likelihood_normalized", _by_gain, needs_unconditional=True
)
METHODS = {
    method.name: method
    for method in (token_trie, token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)
}


def method_named(name: str) -> ChoicesMethod:
    """Gives the method of that name. Raises RequestError where there is none."""
    if name not in METHODS:
        raise RequestError(f"choices_method must be one of {', '.join(METHODS)}, but got {name!r}", "choices_method")
    return METHODS[name]


def check_draw(method: str, temperature: float) -> None:
    """Raises RequestError where there is no such method, or where it cannot draw at this temperature."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise RequestError(f"temperature must be at least 0 and finite, but got {temperature}", "temperature")
    if temperature and not method_named(method).has_scores:
        raise RequestError(
            f"temperature must be 0 with {method}, which has no scores to draw by, but got {temperature}; "
            f"use {token_trie.name}",
            param="temperature",
        )


def decide(
    choices: Sequence[str],
    scored: ScoredChoices,
    *,
    method: str = token_trie.name,
    temperature: float = 0.0,
    seed: int | None = None,
) -> Selection:
    """Chooses; gives also the probability of each choice, whatever the method, and what SGLang reports of the choices.

    Args:
        choices: The texts of the choices, in the order in which they were scored.
        scored: The scores, with unconditional ones where the method needs them.
        method: Name of a method.
        temperature: At 0 the preferred choice is taken; above it one is drawn by the scores.
        seed: The seed of the draw.

    Raises:
        RequestError: An argument breaks a rule, or the method cannot judge these choices.
    """
    check_draw(method, temperature)
    verdict = method_named(method).judge(scored, method)
    logprobs, mass = trie_logprobs(scored)
    probabilities = tuple(map(math.exp, logprobs))
    meta = scored.meta | {
        "probabilities": list(probabilities),
        "label_mass": math.exp(mass),
        "normalized_prompt_logprobs": [
            sum(choice.logprobs) / len(choice.logprobs) if choice.logprobs else None for choice in scored.choices
        ],
        "input_token_logprobs": [_shown(choice, choice.logprobs) for choice in scored.choices],
        **verdict.meta,
    }
    index = verdict.best if temperature == 0 else _draw(verdict, temperature, seed)
    return Selection(choices[index], probabilities, meta)


def trie_logprobs(scored: ScoredChoices) -> tuple[list[float], float]:
    """Gives the log-probability of each choice, given that one of them comes, and the one that one of them comes.

    Choices with the same tokens share their probability equally.

    Raises:
        RequestError: All choices are impossible for the model.
    """
    trie = TokenTrie([choice.token_ids for choice in scored.choices])
    logprobs: dict[int, float] = {}
    for choice, end in zip(scored.choices, trie.ends, strict=True):
        logprobs.update(zip(trie.path(end), choice.logprobs, strict=True))
    goes_on = _chances_to_go_on(trie, logprobs)
    masses = [
        sum(choice.logprobs)
        + (math.log1p(-goes_on[end]) if goes_on[end] < 1 else -math.inf)
        - math.log(trie.ends.count(end))
        for choice, end in zip(scored.choices, trie.ends, strict=True)
    ]
    largest = max(masses)
    if largest == -math.inf:
        raise RequestError("one choice at least must be possible, but the model gives none of them a chance", "choices")
    total = largest + math.log(sum(math.exp(mass - largest) for mass in masses))
    return [mass - total for mass in masses], min(0.0, total)


def _chances_to_go_on(trie: TokenTrie, logprobs: Mapping[int, float]) -> list[float]:
    """Gives for each node the probability that the model, once there, continues to the end of a choice below it."""
    ends = set(trie.ends)
    chances = [0.0] * len(trie.children)
    for node in reversed(range(len(trie.children))):  # a node comes after its parent
        chances[node] = min(
            1.0,
            sum(
                math.exp(logprobs[child]) * (1.0 if child in ends else chances[child])
                for child in trie.children[node].values()
            ),
        )
    return chances


def _draw(verdict: Verdict, temperature: float, seed: int | None) -> int:
    assert verdict.scores is not None, "was checked"
    largest = max(verdict.scores)
    weights = [math.exp((score - largest) / temperature) for score in verdict.scores]
    return random.Random(seed).choices(range(len(weights)), weights)[0]


def _first_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda index: scores[index])


def _mean(values: Sequence[float], method: str) -> float:
    if not values:
        raise RequestError(
            f"a choice must have at least one token for {method}, but one has none; use {token_trie.name}, or leave "
            "the empty choice out",
            param="choices",
        )
    return sum(values) / len(values)


def _shown(choice: ScoredChoice, logprobs: Sequence[float | None]) -> list[list[Any]]:
    """Gives logprobs in the form of `/generate`: value, id and text of each token."""
    return [list(entry) for entry in zip(logprobs, choice.token_ids, choice.token_texts, strict=True)]
