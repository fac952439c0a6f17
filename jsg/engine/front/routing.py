"""Which of several engines gets a request: one that holds its prefix, unless that one has too much to do.

Host code without a clock or a loop: who calls says when something began and ended, and every choice is a function of
the calls so far.

**Load** is the work an engine has been given and not finished, in prompt tokens: those of live requests that are not
cached and not yet computed, and for each live request the tokens of an answer as long as answers have been, whatever
ended them, at most what it may have. A token of an answer counts `OUTPUT_WEIGHT`, because it takes a step of its own.

**The rule.** An engine is overloaded for a request when its load exceeds that of the least loaded engine by more than
a quarter of that (`TOLERANCE`), and `MOVE_COST` times the tokens that the least loaded one would have to compute again.
Of the engines that are not, the one that holds most of the prompt is taken; of several the least loaded, and of several
such, which are idle mostly, the one that has been given least so far. So a prefix stays where it is while that costs
less than computing it again, and a hot one spreads: an engine to which it was moved holds it from then on, and the load
decides between the two. That is the hysteresis too: a request that has moved does not go back before the other engine
is overloaded in its turn.
"""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal, final

from jsg.engine.front.prefix_index import BLOCK_TOKENS, PrefixIndex, PrefixPath, answered_path, prefix_path
from jsg.types import Request

OUTPUT_WEIGHT = 4
"""Prompt tokens that take as long as a token of an answer: 1.5 to 6 in the tables of docs/scaling.md."""
MOVE_COST = 2
TOLERANCE = 4  # a fourth
FIRST_OUTPUT_LEN = 256  # what an answer is taken for before one has ended
OUTPUT_MEMORY = 32  # answers that the mean length of answers is about

Reason = Literal["prefix", "load", "overload"]
REASONS: tuple[Reason, ...] = ("prefix", "load", "overload")
"""Why an engine was chosen: it holds most of the prompt; none holds any; one that holds more is overloaded."""


@dataclasses.dataclass(slots=True, eq=False)
class Routed:
    """A request on its way through an engine.

    Attributes:
        request: What is to be done.
        engine: Who does it.
        path: Where its prompt lies.
        reason: Why this engine.
        num_matched: Tokens of the prompt that the engine should find in its cache.
        times: When each matched block had last been used.
        time: When the index learnt of it.
        computed_until: What the engine was given at this time or later it may not have computed when this came; None
            where it had begun with everything.
        prompt_work, output_work: What it adds to the load; the first until the engine has told of it.
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
    """What is known of one engine."""

    def __init__(self, pool_tokens: int) -> None:
        self.index = PrefixIndex(pool_tokens // BLOCK_TOKENS)
        self.load = 0
        self.given = 0  # all work so far
        self.not_begun: OrderedDict[int, Routed] = OrderedDict()  # by time, so the oldest is first


@final
class Router:
    """Chooses engines and keeps account of them.

    Invariant: an engine's load is the sum of the work of its requests that have not ended; without any it is 0.
    """

    def __init__(self, pool_tokens: Sequence[int], page_size: int = 1) -> None:
        """Knows nothing yet.

        Args:
            pool_tokens: For each engine how many tokens its prefix cache holds at most; 0 where it has none.
            page_size: Tokens in a page of these caches, which share whole pages only.
        """
        self._page_size = page_size
        self._last: tuple[Request, PrefixPath] | None = None
        self._lanes = [_Lane(size) for size in pool_tokens]
        self._output_len = float(FIRST_OUTPUT_LEN)
        self._routed: Counter[tuple[int, Reason]] = Counter(
            {(engine, reason): 0 for engine in range(len(self._lanes)) for reason in REASONS}
        )

    @property
    def loads(self) -> list[int]:
        """Of each engine, in prompt tokens."""
        return [lane.load for lane in self._lanes]

    @property
    def routed(self) -> Mapping[tuple[int, Reason], int]:
        """How many requests each engine has begun, and why it was given them."""
        return self._routed

    def route(self, request: Request, among: Sequence[int]) -> Routed:
        """Chooses one of these engines, of which there is at least one, and counts the request as theirs."""
        path = self._path(request)
        matched = {engine: self._lanes[engine].index.match(path) * BLOCK_TOKENS for engine in among}
        engine, reason = self._choose(matched)
        lane = self._lanes[engine]
        num_matched = min(matched[engine], _matchable(request)) // self._page_size * self._page_size
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
        lane.load += routed.prompt_work + routed.output_work
        lane.given += routed.prompt_work + routed.output_work
        lane.not_begun[routed.time] = routed
        return routed

    def begin(self, routed: Routed, cached_tokens: int) -> None:
        """The engine has told of a request for the first time; so many tokens of its prompt were cached.

        Fewer than were thought to be: the engine has dropped what the request did not find, and so has dropped what was
        used before that.
        """
        lane = self._lanes[routed.engine]
        lane.load -= routed.prompt_work
        routed.is_begun = True
        self._routed[routed.engine, routed.reason] += 1
        lane.not_begun.pop(routed.time, None)
        if routed.request.hold:
            lane.index.hold(routed.path)
        missing = cached_tokens // BLOCK_TOKENS  # the first block that was not there
        slack = max(BLOCK_TOKENS, self._page_size)  # less is no sign: a block or a page may be shared in part
        if routed.request.joined or cached_tokens + slack > routed.num_matched or missing >= len(routed.times):
            return
        if routed.computed_until is None or routed.times[missing] < routed.computed_until:
            lane.index.forget_until(routed.times[missing])

    def end(self, routed: Routed, output_ids: Sequence[int]) -> None:
        """A request is over, by itself or not: the engine has its prompt and its answer, or neither if it never began.

        Args:
            routed: The request, once.
            output_ids: All that it has generated.
        """
        lane = self._lanes[routed.engine]
        lane.load -= routed.output_work
        if not routed.is_begun:
            lane.load -= routed.prompt_work
            lane.not_begun.pop(routed.time, None)
            lane.index.undo(routed.path, routed.time, len(routed.times))
            return
        if routed.request.hold:
            lane.index.release(routed.path)
        if len(output_ids) > 1:
            lane.index.use(answered_path(routed.request, routed.path, output_ids))
        if output_ids:
            self._output_len += (len(output_ids) - self._output_len) / OUTPUT_MEMORY

    def forget(self, engine: int) -> None:
        """The engine's cache is empty, or the engine gone."""
        self._lanes[engine].index.clear()

    def check_integrity(self) -> None:
        """Asserts that indices are as they should be and no load is negative; for tests."""
        for lane in self._lanes:
            lane.index.check_integrity()
            assert lane.load >= 0

    def _path(self, request: Request) -> PrefixPath:
        """Where its prompt lies; worked out once for the `n` answers to a prompt, which come one behind the other."""
        if self._last is None or not _have_one_prompt(self._last[0], request):
            self._last = request, prefix_path(request)
        return self._last[1]

    def _choose(self, matched: Mapping[int, int]) -> tuple[int, Reason]:
        """One of the engines, given how many tokens each of them holds."""
        lanes = self._lanes
        order = sorted(matched, key=lambda engine: (lanes[engine].load, lanes[engine].given, engine))
        loads = {engine: lanes[engine].load for engine in order}
        least = order[0]

        def is_overloaded(engine: int) -> bool:
            gain = max(matched[engine] - matched[least], 0)
            return loads[engine] - loads[least] > MOVE_COST * gain + loads[least] // TOLERANCE

        able = [engine for engine in order if engine == least or not is_overloaded(engine)]
        chosen = max(able, key=lambda engine: matched[engine])  # the first of several, which has least to do
        if matched[chosen] < max(matched.values()):
            return chosen, "overload"
        return chosen, "prefix" if matched[chosen] else "load"


def _have_one_prompt(left: Request, right: Request) -> bool:
    """Whether two requests are of one prompt, as far as is seen without looking at its tokens."""
    return (
        left.input_ids is right.input_ids
        and left.media is right.media
        and left.namespace == right.namespace
        and left.joined is right.joined
        and left.position_jumps is right.position_jumps
    )


def _matchable(request: Request) -> int:
    """How many tokens of a prompt can come from a cache: the last one must run, and those that are scored."""
    if request.wants_prompt_logprobs:
        return max(request.logprob_start_len - 1, 0)
    return len(request.input_ids) - (request.sampling.max_new_tokens > 0)
