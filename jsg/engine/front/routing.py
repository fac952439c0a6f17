"""Which of several engines gets a request: one that holds its prefix, unless that engine has too much to do.

This is host code without a clock or a loop. The caller says when a request began and ended, and every choice is a
function of the calls so far.

**Load** is the unfinished work of an engine, in prompt tokens. For each live request it counts the prompt tokens that
are neither cached nor computed yet, and the tokens of an answer of average length, at most as many as the request may
have. A token of an answer counts `OUTPUT_WEIGHT`, because it takes a step of its own.

**The rule.** An engine is overloaded for a request when its load exceeds that of the least loaded engine by more than
the sum of two terms: a quarter of the least load (`TOLERANCE`), and `MOVE_COST` times the tokens that the least loaded
engine would have to compute again. Of the engines that are not overloaded, the one that holds most of the prompt is
taken. Among equals it is the least loaded, and among idle ones the one that was given least work so far. So a prefix
stays where it is while that costs less than computing it again. A hot prefix spreads: an engine to which it has moved
holds it from then on, and the load decides between the two. A request that has moved does not go back before the new
engine is overloaded.

**Several routers** for the same engines tell each other their loads, and each adds those of the others to its own. What
they hear is a little old and the same for all, so each looks at a few engines by chance: some of all, and some of those
that hold most of the prompt. Otherwise all of them would choose the one engine that was the least loaded.
"""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, final

import numpy as np

from jsg.engine.front.prefix_index import (
    BLOCK_TOKENS,
    BlockHolders,
    PrefixIndex,
    PrefixPath,
    answered_path,
    prefix_path,
)
from jsg.types import Request

OUTPUT_WEIGHT = 4
"""Prompt tokens that take as long as a token of an answer: 1.5 to 6 in the tables of docs/scaling.md."""
MOVE_COST = 2
TOLERANCE = 4  # a fourth
FIRST_OUTPUT_LEN = 256  # the expected length of an answer before the first one has ended
OUTPUT_MEMORY = 32  # answers that the mean length looks back on
SAMPLE = 4  # engines that one of several routers looks at

Reason = Literal["prefix", "load", "overload"]
REASONS: tuple[Reason, ...] = ("prefix", "load", "overload")
"""Why an engine was chosen: it holds most of the prompt; no engine holds any; one that holds more is overloaded."""


@dataclasses.dataclass(slots=True, eq=False)
class Routed:
    """A request on its way through an engine.

    Attributes:
        request: The request.
        engine: The engine that has it.
        path: The blocks of its prompt.
        reason: Why it has this engine.
        num_matched: Tokens of the prompt that the engine should find in its cache.
        times: When each matched block was last used before.
        time: When the index noted its blocks.
        computed_until: Blocks that were noted at this time or later may not have been computed when the request came;
            None where every earlier request had begun.
        prompt_work, output_work: What it adds to the load; `prompt_work` counts until the request has begun.
        is_begun: The engine has given a first output.
    """

    request: Request
    engine: int
    path: PrefixPath
    reason: Reason
    num_matched: int
    times: list[int]
    time: int
    computed_until: int | None
    prompt_work: int
    output_work: int
    is_begun: bool = False


@final
class _Lane:
    """One engine as the router knows it."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.not_begun: OrderedDict[int, Routed] = OrderedDict()  # by time, so the oldest is first


@final
class Router:
    """Chooses engines and keeps account of their load.

    Invariant: an engine's load is the sum of the work of its requests that have not ended; without any it is 0.
    """

    def __init__(
        self, pool_tokens: Sequence[int], page_size: int = 1, *, rng: np.random.Generator | None = None
    ) -> None:
        """Makes a router that has given no request yet.

        Args:
            pool_tokens: How many tokens the prefix cache of each engine holds at most; 0 where it has none.
            page_size: Tokens in a page of these caches, which share whole pages only.
            rng: A source of chance that no other router has, where it is one of several for these engines.
        """
        self._page_size = page_size
        self._rng = rng
        self._last: tuple[Request, PrefixPath] | None = None
        self._holders = BlockHolders(len(pool_tokens))
        self._lanes = [
            _Lane(PrefixIndex(size // BLOCK_TOKENS, self._holders, engine)) for engine, size in enumerate(pool_tokens)
        ]
        self._loads = np.zeros(len(pool_tokens), np.int64)
        self._others = np.zeros(len(pool_tokens), np.int64)  # the loads of all other routers
        self._told = np.zeros((2, len(pool_tokens)), np.int64)  # of this router, see `told`
        self._given = np.zeros(len(pool_tokens), np.int64)  # all work that each engine was given so far
        self._output_len = float(FIRST_OUTPUT_LEN)
        self._routed: Counter[tuple[int, Reason]] = Counter(
            {(engine, reason): 0 for engine in range(len(self._lanes)) for reason in REASONS}
        )

    @property
    def routed(self) -> Mapping[tuple[int, Reason], int]:
        """Requests that each engine has begun, by the reason for its choice."""
        return self._routed

    @property
    def told(self) -> np.ndarray:
        """int64 [2, engines]: prompt tokens to compute and live requests of this router, for others' `note_others`."""
        return self._told.copy()

    def route(self, request: Request, among: Sequence[int]) -> Routed:
        """Chooses one of these engines and adds the request to its load. There is at least one."""
        path = self._path(request)
        matched = self._holders.match(path) * BLOCK_TOKENS
        engine, reason = self._choose(np.array(among), matched)
        lane = self._lanes[engine]
        num_matched = min(int(matched[engine]), _matchable(request)) // self._page_size * self._page_size
        output_len = min(request.sampling.max_new_tokens, round(self._output_len))
        times = lane.index.times(path)
        oldest = next(iter(lane.not_begun), None)
        routed = Routed(
            request=request,
            engine=engine,
            path=path,
            reason=reason,
            num_matched=num_matched,
            times=times,
            time=lane.index.use(path),
            computed_until=oldest,
            prompt_work=len(request.input_ids) - num_matched,
            output_work=OUTPUT_WEIGHT * output_len,
        )
        self._loads[engine] += routed.prompt_work + routed.output_work
        self._given[engine] += routed.prompt_work + routed.output_work
        self._told[:, engine] += routed.prompt_work, 1
        lane.not_begun[routed.time] = routed
        return routed

    def begin(self, routed: Routed, cached_tokens: int) -> None:
        """Notes the first output of a request, and how many tokens of its prompt were cached.

        If those are fewer than expected, the engine has dropped the first block that was missing, and so it has dropped
        every block that was last used before that one.
        """
        lane = self._lanes[routed.engine]
        self._loads[routed.engine] -= routed.prompt_work
        self._told[0, routed.engine] -= routed.prompt_work
        routed.is_begun = True
        self._routed[routed.engine, routed.reason] += 1
        lane.not_begun.pop(routed.time, None)
        if routed.request.hold:
            lane.index.hold(routed.path)
        missing = cached_tokens // BLOCK_TOKENS  # index of the first block that was missing
        slack = max(BLOCK_TOKENS, self._page_size)  # a smaller difference means that part of a block or page is shared
        if routed.request.joined or cached_tokens + slack > routed.num_matched or missing >= len(routed.times):
            return
        if routed.computed_until is None or routed.times[missing] < routed.computed_until:
            lane.index.forget_until(routed.times[missing])

    def end(self, routed: Routed, output_ids: Sequence[int]) -> None:
        """Notes the end of a request, once. If it has begun, the engine's cache has its prompt and its answer.

        Args:
            routed: The request.
            output_ids: All tokens that it has generated.
        """
        lane = self._lanes[routed.engine]
        self._loads[routed.engine] -= routed.output_work
        self._told[1, routed.engine] -= 1
        if not routed.is_begun:
            self._loads[routed.engine] -= routed.prompt_work
            self._told[0, routed.engine] -= routed.prompt_work
            lane.not_begun.pop(routed.time, None)
            lane.index.undo(routed.path, routed.time, len(routed.times))
            return
        if routed.request.hold:
            lane.index.release(routed.path)
        if len(output_ids) > 1:
            lane.index.use(answered_path(routed.request, routed.path, output_ids))
        if output_ids:
            self._output_len += (len(output_ids) - self._output_len) / OUTPUT_MEMORY

    def note_others(self, told: np.ndarray) -> None:
        """Notes the sum of what all other routers have told, which counts until this is called again."""
        self._others = told[0] + round(OUTPUT_WEIGHT * self._output_len) * told[1]

    def note_stored(self, engine: int, blocks: Iterable[bytes]) -> None:
        """Notes what the engine says that its cache has gained, for whichever router's requests.

        It is known until `note_removed`. Requests that this router has sent are known at once, as ever.
        """
        self._lanes[engine].index.store(blocks)

    def note_removed(self, engine: int, blocks: Iterable[bytes]) -> None:
        """Notes what the engine says that its cache has dropped."""
        self._lanes[engine].index.remove(blocks)

    def forget(self, engine: int) -> None:
        """Notes that the engine's cache is empty, or that the engine is gone."""
        self._lanes[engine].index.clear()

    def _path(self, request: Request) -> PrefixPath:
        """The blocks of its prompt, computed once for the `n` answers to a prompt, which come one after another."""
        if self._last is None or not _have_one_prompt(self._last[0], request):
            self._last = request, prefix_path(request)
        return self._last[1]

    def _choose(self, engines: np.ndarray, matched: np.ndarray) -> tuple[int, Reason]:
        """The one of these engines to choose, given how many tokens of the prompt each of all engines holds."""
        if self._rng is not None:
            engines = _sample(self._rng, engines, matched[engines])
        loads = self._loads + self._others
        order = engines[np.lexsort((engines, self._given[engines], loads[engines]))]
        loads, matched = loads[order], matched[order]
        gains = np.maximum(matched - matched[0], 0)
        is_able = loads - loads[0] <= MOVE_COST * gains + loads[0] // TOLERANCE
        chosen = np.where(is_able, matched, -1).argmax()  # among equals the first, which is the least loaded
        if matched[chosen] < matched.max():
            return int(order[chosen]), "overload"
        return int(order[chosen]), "prefix" if matched[chosen] else "load"


def _sample(rng: np.random.Generator, engines: np.ndarray, matched: np.ndarray) -> np.ndarray:
    """A few of these engines, and a few of those that hold most of the prompt."""
    groups = engines, engines[matched == matched.max()]
    return np.unique([group[rng.integers(len(group), size=SAMPLE)] for group in groups])


def _have_one_prompt(left: Request, right: Request) -> bool:
    """Whether two requests share the objects of one prompt; compares no tokens."""
    return (
        left.input_ids is right.input_ids
        and left.media is right.media
        and left.namespace == right.namespace
        and left.joined is right.joined
        and left.position_jumps is right.position_jumps
    )


def _matchable(request: Request) -> int:
    """How many tokens of a prompt can come from a cache: not the last one, which must run, and none that is scored."""
    if request.wants_prompt_logprobs:
        return max(request.logprob_start_len - 1, 0)
    return len(request.input_ids) - (request.sampling.max_new_tokens > 0)
