"""The requests that score choices on an engine: all at once, as few as possible, and each token computed once.

The trie of the choices is cut into paths. The request of a path scores its own tokens, and at each of them the tokens
with which other choices go on. So the request of another choice scores only what is after its first own token, and
finds the stem, which is not scored again, in the cache. The tokens of one node only are scored as the tokens that may
follow it. Behind joined branches this is the only way.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, final

from jsg.errors import RequestError
from jsg.lang.tokens.model import ScoredChoice, ScoredChoices
from jsg.lang.tokens.trie import TokenTrie
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.prompts.encode_parts import EncodedChoices
from jsg.types import MAX_TOP_LOGPROBS, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreLimits:
    """The limits of the requests that score some choices.

    Attributes:
        prompts: The number of requests.
        tokens: The tokens of all their prompts.
        scores: The tokens of all choices, where equal choices count once.
    """

    prompts: int
    tokens: int
    scores: int

    def check_choices(self, encoded: EncodedChoices, *, unconditional: bool) -> None:
        """Raises RequestError where the choices have too many tokens."""
        num_tokens = sum(map(len, set(encoded.choice_ids))) * (2 if unconditional else 1)
        if num_tokens > self.scores:
            raise RequestError.of(
                "choices",
                f"must have at most {self.scores} tokens in all, scored by themselves counted again, but have "
                f"{num_tokens}; shorten them or send fewer",
            )

    def check_prompts(self, num_prompts: int, num_tokens: int) -> None:
        """Raises RequestError where the requests are too many, or have too many tokens."""
        for what, number, most in (("requests", num_prompts, self.prompts), ("tokens", num_tokens, self.tokens)):
            if number > most:
                raise RequestError.of(
                    "choices",
                    f"must be scored by at most {most} {what}, the prompt counted for each request, but need "
                    f"{number}; shorten the prompt, or send fewer choices",
                )


MAX_PATH_SCORES = 512
"""How many scores of other choices' tokens one path may report. Beyond it, requests of their own cost less."""

_SCORE_PROMPT = SamplingParams(max_new_tokens=0)
_SCORE_NEXT = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


@final
class ScorePlan:
    """The requests that score some choices, and the reading of their answers.

    Attributes:
        prompts: The requests, which are submitted together and have one answer each.
    """

    def __init__(
        self,
        encoded: EncodedChoices,
        *,
        rid: str,
        unconditional: bool = False,
        limits: "ScoreLimits | None" = None,
        **fields: Any,
    ) -> None:
        """Plans the requests. `fields` are further fields of each `Prompt`, such as `namespace`.

        Args:
            encoded: The choices.
            rid: The beginning of the name of each request.
            unconditional: Whether each choice is also scored by itself.
            limits: The limits of all requests together.

        Raises:
            RequestError: The requests would exceed the limits.
        """
        if limits is not None:
            limits.check_choices(encoded, unconditional=unconditional)
        self._encoded = encoded
        self._trie = TokenTrie(encoded.choice_ids)
        self._rid = rid
        self._fields = fields
        self._numbers = itertools.count()
        self._depths = self._trie.depths()
        self._alone = list(dict.fromkeys(filter(None, encoded.choice_ids))) if unconditional else []
        self._is_unconditional = unconditional
        self._asks = self._by_node() if encoded.before.joined else self._by_path()
        if limits is not None:
            lens = [len(encoded.prefix_ids) + self._depths[ask.end] for ask in self._asks]
            lens += map(len, self._alone)
            limits.check_prompts(len(lens), sum(lens))
        self.prompts = (*map(self._prompt, self._asks), *map(self._score_alone, self._alone))

    def read(self, answers: Sequence[Answer], tokenizer: Tokenizer) -> ScoredChoices:
        """Reads the answers to `prompts`, in their order."""
        asked, alone = answers[: len(self._asks)], answers[len(self._asks) :]
        logprobs: dict[int, float] = {}
        for ask, answer in zip(self._asks, asked, strict=True):
            logprobs |= ask.scores(answer)
        unconditional = {
            ids: tuple(token.logprob for token in answer.prompt_logprobs)
            for ids, answer in zip(self._alone, alone, strict=True)
        }
        return ScoredChoices(
            part_ids=self._encoded.before.part_ids,
            common_ids=self._encoded.common_ids,
            choices=tuple(
                ScoredChoice(
                    token_ids=ids,
                    token_texts=tuple(tokenizer.token_bytes(i).decode(errors="replace") for i in ids),
                    logprobs=tuple(logprobs[node] for node in self._trie.path(end)),
                    unconditional=unconditional.get(ids, ()) if self._is_unconditional else (),
                )
                for ids, end in zip(self._encoded.choice_ids, self._trie.ends, strict=True)
            ),
            meta={
                "id": self._rid,
                "prompt_tokens": sum(len(answer.request.input_ids) for answer in answers),
                "cached_tokens": sum(answer.cached_tokens for answer in answers),
                "completion_tokens": 0,
                "e2e_latency": max((answer.elapsed_s for answer in answers), default=0.0),
            },
        )

    def _by_path(self) -> "list[_Ask]":
        asks: list[_Ask] = []
        for top, *nodes in self._trie.paths:
            first, tops = self._depths[top] + 1, (top, *nodes[:-1])
            steps = tuple(self._trie.children[node] for node in tops)
            others = [dict(itertools.islice(edges.items(), 1, None)) for edges in steps]
            tokens = tuple(dict.fromkeys(itertools.chain.from_iterable(others)))
            if len(nodes) == 1:
                asks += self._of_node(top, steps[0])
            elif len(tokens) <= min(MAX_TOP_LOGPROBS, MAX_PATH_SCORES // len(nodes)):
                asks.append(_Ask(nodes[-1], tokens, steps, first))
            else:
                own = tuple({self._trie.token(node): node} for node in nodes)
                asks.append(_Ask(nodes[-1], (), own, first))
                asks += [ask for node, edges in zip(tops, others, strict=True) for ask in self._of_node(node, edges)]
        return asks

    def _by_node(self) -> "list[_Ask]":
        return [ask for node in self._trie.inner_nodes for ask in self._of_node(node, self._trie.children[node])]

    def _of_node(self, node: int, edges: Mapping[int, int]) -> "list[_Ask]":
        return [
            _Ask(node, tuple(token for token, _ in some), (dict(some),))
            for some in itertools.batched(edges.items(), MAX_TOP_LOGPROBS)
        ]

    def _prompt(self, ask: "_Ask") -> Prompt:
        before = self._encoded.before
        return Prompt(
            rid=f"{self._rid}-{next(self._numbers)}",
            input_ids=self._encoded.prefix_ids + tuple(map(self._trie.token, self._trie.path(ask.end))),
            position_jumps=before.position_jumps,
            joined=before.joined,
            media=before.media,
            snapshot_at=before.snapshot_at,
            sampling=_SCORE_PROMPT if ask.first else _SCORE_NEXT,
            return_logprob=True,
            logprob_start_len=len(self._encoded.prefix_ids) + ask.first - 1 if ask.first else -1,
            token_ids_logprob=ask.tokens,
            **self._fields,
        )

    def _score_alone(self, ids: tuple[int, ...]) -> Prompt:
        return Prompt(
            rid=f"{self._rid}-{next(self._numbers)}",
            input_ids=ids,
            sampling=_SCORE_PROMPT,
            return_logprob=True,
            logprob_start_len=0,
            **self._fields,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Ask:
    """A request for scores, whose prompt leads to one node of the trie.

    Attributes:
        end: The node.
        tokens: The tokens that are scored beside those of the prompt.
        edges: For each place that is scored, the nodes that it scores, by token id.
        first: The depth of the first node whose token is scored as one of the prompt; 0 where the tokens after the
            prompt are scored.
    """

    end: int
    tokens: tuple[int, ...]
    edges: tuple[Mapping[int, int], ...]
    first: int = 0

    def scores(self, answer: Answer) -> dict[int, float]:
        """Gives the scores of the nodes that this request scores."""
        scores: dict[int, float] = {}
        places = answer.prompt_logprobs if self.first else answer.logprobs
        for place, edges in zip(places, self.edges, strict=True):
            scored = {place.token_id: place.logprob} | dict(place.chosen)
            for token, node in edges.items():
                logprob = scored[token]
                assert logprob is not None, "a token stands before every choice"
                scores[node] = logprob
        return scores
