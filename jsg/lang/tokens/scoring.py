"""The requests that score choices on an engine: all at once, and as few as possible.

Two ways give the same numbers. The first makes a request for each leaf of the trie, which scores its own prompt. The
second makes a request for each inner node, which scores the tokens that may follow. If the choices differ in one token,
the second way needs only one request. It is also the only way behind joined branches.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, final

from jsg.errors import RequestError
from jsg.lang.tokens.model import ScoredChoice, ScoredChoices
from jsg.lang.tokens.trie import TokenTrie
from jsg.processing.answer import Answer, Prompt
from jsg.processing.encode_parts import EncodedChoices
from jsg.processing.tokenizer import Tokenizer
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
            raise RequestError(
                f"choices must have at most {self.scores} tokens in all, scored by themselves counted again, but have "
                f"{num_tokens}; shorten them or send fewer",
                param="choices",
            )

    def check_prompts(self, num_prompts: int, num_tokens: int) -> None:
        """Raises RequestError where the requests are too many, or have too many tokens."""
        for what, number, most in (("requests", num_prompts, self.prompts), ("tokens", num_tokens, self.tokens)):
            if number > most:
                raise RequestError(
                    f"choices must be scored by at most {most} {what}, the prompt counted for each request, but need "
                    f"{number}; shorten the prompt, or send fewer choices",
                    param="choices",
                )


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
        is_cheaper = len(self._trie.inner_nodes) <= len(self._trie.leaves)
        by_node = is_cheaper or bool(encoded.before.joined)
        self._alone = list(dict.fromkeys(filter(None, encoded.choice_ids))) if unconditional else []
        self._is_unconditional = unconditional
        if limits is not None:
            lens = self._prompt_lens(by_node=by_node) + list(map(len, self._alone))
            limits.check_prompts(len(lens), sum(lens))
        self._asks = self._by_node() if by_node else self._by_leaf()
        self.prompts = (*(ask.prompt for ask in self._asks), *map(self._score_alone, self._alone))

    def read(self, answers: Sequence[Answer], tokenizer: Tokenizer) -> ScoredChoices:
        """Reads the answers to `prompts`, in their order."""
        asked, alone = answers[: len(self._asks)], answers[len(self._asks) :]
        logprobs: dict[int, float] = {}
        for ask, answer in zip(self._asks, asked, strict=True):
            # A node on the paths of several requests has one score, or rounding would make equal choices differ.
            for node, logprob in zip(ask.nodes, ask.scores(answer), strict=True):
                logprobs.setdefault(node, logprob)
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

    def _prompt_lens(self, *, by_node: bool) -> list[int]:
        """Gives the number of tokens of each prompt that `_by_node` or `_by_leaf` makes."""
        start, depths = len(self._encoded.prefix_ids), self._trie.depths()
        if not by_node:
            return [start + depths[leaf] for leaf in self._trie.leaves if leaf]
        return [
            start + depths[node]
            for node in self._trie.inner_nodes
            for _ in range(-(-len(self._trie.children[node]) // MAX_TOP_LOGPROBS))
        ]

    def _by_leaf(self) -> "list[_Ask]":
        start = len(self._encoded.prefix_ids)
        return [
            _Ask(self._prompt(nodes, _SCORE_PROMPT, logprob_start_len=start), tuple(nodes))
            for leaf in self._trie.leaves
            if (nodes := self._trie.path(leaf))
        ]

    def _by_node(self) -> "list[_Ask]":
        asks: list[_Ask] = []
        for inner in self._trie.inner_nodes:
            edges = self._trie.children[inner]
            for some in itertools.batched(edges, MAX_TOP_LOGPROBS):
                prompt = self._prompt(self._trie.path(inner), _SCORE_NEXT, token_ids_logprob=some)
                asks.append(_Ask(prompt, tuple(edges[token] for token in some)))
        return asks

    def _prompt(self, nodes: Sequence[int], sampling: SamplingParams, **reports: Any) -> Prompt:
        before = self._encoded.before
        return Prompt(
            rid=f"{self._rid}-{next(self._numbers)}",
            input_ids=self._encoded.prefix_ids + tuple(map(self._trie.token, nodes)),
            position_jumps=before.position_jumps,
            joined=before.joined,
            media=before.media,
            sampling=sampling,
            return_logprob=True,
            **reports,
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
    """A request, and the nodes of the trie that it scores."""

    prompt: Prompt
    nodes: tuple[int, ...]

    def scores(self, answer: Answer) -> list[float]:
        scored = (
            [logprob for _, logprob in answer.logprobs[0].chosen]
            if self.prompt.token_ids_logprob
            else [token.logprob for token in answer.prompt_logprobs]
        )
        assert None not in scored, "a token stands before every choice"
        return [logprob for logprob in scored if logprob is not None]
