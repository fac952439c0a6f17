"""A language model without numbers: what a token means is a hash of every token before it.

The next token is a function of the hash, so that outputs do not depend on scheduling at all: `TokenModel.expected` says
what they must be.
"""

import dataclasses
import itertools

import numpy as np

from jsg.sched.request import RunningRequest
from jsg.types import FinishReason, FinishType, Request, TokenLogprob

VOCAB = 8
EOS = frozenset({VOCAB - 1})
TILE_ROWS, FRAME_ROWS = 4, 2
NEWLINE = 9
"""What the newline looks like to the model. What the encoder makes of pixels is larger, what tokens are is smaller."""


def mix(state: int, value: int) -> int:
    """The hash of a prefix and one more token: 63 bits, never 0."""
    state = (state ^ (value + 1)) * 0xBF58476D1CE4E5B9 & (2**63 - 1)
    return (state ^ state >> 29) | 1


def advance(state: int, token: int, index: int, position: int) -> int:
    """The hash of a prefix and one more token, which stands at `index` of its row and at `position` for the model."""
    state = mix(state, token)
    return state if index == position else mix(state, 1000 + position)


def positions(request: Request, size: int) -> list[int]:
    """What the model must be told of each token: written down once more, token by token."""
    found: list[int] = []
    jumps, starts = dict(request.position_jumps), request.joined
    next_position, behind_prefix, furthest = 0, 0, 0
    for index in range(size):
        if starts and index == starts[0]:
            behind_prefix = furthest = next_position
        if starts and index in starts:
            furthest = max(furthest, next_position)
            next_position = furthest if index >= starts[-1] else behind_prefix
        found.append(next_position + jumps.get(index, 0))
        next_position = found[-1] + 1
    return found


def features(tile: np.ndarray, *, is_video: bool) -> np.ndarray:
    """int64: what the encoder makes of one tile or frame: for each row the first pixel, and which row it is."""
    return 10 + 100 * int(tile[0, 0, 0]) + 50 * is_video + np.arange(FRAME_ROWS if is_video else TILE_ROWS)


def looks(tokens: np.ndarray, request: Request) -> np.ndarray:
    """int64: what the model sees of each of the first tokens of a request."""
    seen = tokens.astype(np.int64)
    for item in request.media:
        rows = np.concatenate([features(tile, is_video=item.is_video) for tile in item.pixels])
        shown = np.where(item.rows < 0, NEWLINE, rows[item.rows])
        seen[item.start : item.end] = shown[: max(len(seen) - item.start, 0)]
    return seen


def prefix_hashes(tokens: np.ndarray, request: Request) -> list[int]:
    """The hash of each prefix. No two namespaces share any, so a page that crossed between them would be noticed.

    A branch goes on from the hash of the common prefix, and what is behind the branches from all of theirs.
    """
    state = mix(12345, int.from_bytes(request.namespace.encode()))
    starts, hashes, ends, behind_prefix = request.joined, [], [], state
    spelled = zip(looks(tokens, request).tolist(), positions(request, len(tokens)), strict=True)
    for index, (token, position) in enumerate(spelled):
        if starts and index == starts[0]:
            behind_prefix = state
        if starts and index in starts:
            ends.append(state)
            state = behind_prefix
        if starts and index == starts[-1]:
            for end in ends:
                state = mix(state, end)
        own_index = index
        if starts and starts[0] <= index < starts[-1]:
            own_index = index - max(start for start in starts if start <= index) + starts[0]
        state = advance(state, token, own_index, position)
        hashes.append(state)
    return hashes


def own_request(running: RunningRequest) -> Request:
    """The request of which `running.tokens` are the prompt: that of a branch is made up from its whole."""
    whole = running.branch_of
    if whole is None:
        return running.request
    request = whole.request
    spans = [(start, end) for start, end in itertools.pairwise(request.joined) if start < end]
    spans = spans or [(request.joined[0], request.joined[0])]
    start, end = spans[running.arrival - (whole.arrival - len(request.joined))]
    first = request.joined[0]
    jumps = [(index, extra) for index, extra in request.position_jumps if index < first]
    jumps += [(index - start + first, extra) for index, extra in request.position_jumps if start <= index < end]
    ids = request.input_ids[:first] + request.input_ids[start:end]
    return Request(rid=request.rid, input_ids=ids, namespace=request.namespace, position_jumps=tuple(jumps))


@dataclasses.dataclass(frozen=True)
class Expected:
    """All that a client must see of one request, whatever the scheduling."""

    tokens: list[int]
    finish: FinishReason
    prompt_logprobs: tuple[TokenLogprob, ...] | None


@dataclasses.dataclass(frozen=True)
class TokenModel:
    """A language model: which token follows a prefix. One prefix in `broken_every` gives logits that are not finite."""

    broken_every: int = 200

    def next_token(self, prefix_hash: int, output_index: int) -> int:
        """-1 where the logits are not finite. The index counts, as it does for the noise of sampling."""
        value = mix(prefix_hash, output_index) >> 7
        return -1 if value % self.broken_every == 0 else value % VOCAB

    def logprob(self, prefix_hash: int, token: int) -> TokenLogprob:
        return TokenLogprob(token, -float(mix(prefix_hash, token) % 1000))

    def prompt_scores(self, request: Request, hashes: list[int], start: int, stop: int) -> list[TokenLogprob]:
        """What positions `start` to `stop` say of the tokens behind them, and the first token, of which none does."""
        first = request.logprob_start_len
        scores = [TokenLogprob(request.input_ids[0], None)] if start == 0 and first == 0 else []
        for position in range(max(start + 1, first), min(stop + 1, len(request.input_ids))):
            scores.append(self.logprob(hashes[position - 1], request.input_ids[position]))
        return scores

    def expected(self, request: Request) -> Expected:
        """The answer, computed alone."""
        sampling, prompt = request.sampling, np.array(request.input_ids)
        hashes = prefix_hashes(prompt, request)
        to_come = positions(request, len(prompt) + sampling.max_new_tokens)
        scores = None
        if request.return_logprob and 0 <= request.logprob_start_len < len(prompt):
            scores = tuple(self.prompt_scores(request, hashes, 0, len(prompt)))
        tokens: list[int] = []
        state = hashes[-1]
        while len(tokens) < sampling.max_new_tokens:
            token = self.next_token(state, len(tokens))
            if token < 0:
                return Expected(tokens, FinishReason(FinishType.ERROR), scores)
            tokens.append(token)
            ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}
            if token in ends and len(tokens) >= sampling.min_new_tokens:
                return Expected(tokens, FinishReason(FinishType.STOP, matched=token), scores)
            index = len(prompt) + len(tokens) - 1
            state = advance(state, token, index, to_come[index])
        return Expected(tokens, FinishReason(FinishType.LENGTH), scores)
