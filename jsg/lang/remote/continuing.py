"""Continues the prompt of a session by calls of an API; with speculation, ahead of the program."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, final

from jsg.errors import BackendError
from jsg.lang.remote.ahead import Ahead, GenCut, Taken, Unit, UnitReader, could_be_shared, shared_settings
from jsg.lang.remote.arguments import Unsupported, normalised
from jsg.lang.remote.caller import Caller, Collector, Reply
from jsg.lang.remote.wire import Bill, Call, ModelPrompt, Token, cost_of
from jsg.lang.words.backend import Piece, with_answers
from jsg.lang.words.ir import SamplingArgs
from jsg.processing.stop_strings import StopFinder, StopMatcher, find_stops
from jsg.types import SamplingParams


@final
class Continuer:
    """Makes the calls of one session. All that speculation knows is here, so programs never meet.

    Attributes:
        ahead: What the model wrote after the prompt, for gens to come.
    """

    def __init__(self, caller: Caller, unsupported: Unsupported, num_ahead: int | None, ahead: Ahead | None = None):
        self.caller = caller
        self.unsupported = unsupported
        self.num_ahead = num_ahead
        self.ahead = ahead
        self._is_blind = False

    def copy(self) -> "Continuer":
        """A copy for a branch of a fork, without the text sampled ahead, with which all branches would be the same."""
        keeps = self.ahead is not None and self.ahead.settings.temperature == 0.0
        return Continuer(self.caller, self.unsupported, self.num_ahead, self.ahead if keeps else None)

    def extended(self, text: str) -> None:
        """Notes that the program appended a constant."""
        self.ahead = self.ahead.behind(text) if self.ahead is not None else None

    def broke_off(self) -> None:
        """Drops the text ahead, because the turn ended or the program continued in a way that the model did not."""
        self.ahead = None

    async def generate(self, prompt: ModelPrompt, given: SamplingArgs) -> AsyncGenerator[Piece]:
        """Does what `Session.generate` says, after `prompt`."""
        args = normalised(given)
        taken = None if self.ahead is None else self.ahead.take(args)
        if taken is not None:
            self.caller.meter.count_saving(taken.rest.prompt_tokens + taken.num_before)
            self.ahead = taken.rest
            yield Piece(taken.text, saved_meta(taken))
            return
        self.ahead = None
        runs_ahead = self.num_ahead is not None and could_be_shared(args)
        pieces = self._generate_ahead(prompt, args) if runs_ahead else self._generate_alone(prompt, args)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _generate_ahead(self, prompt: ModelPrompt, args: SamplingArgs) -> AsyncGenerator[Piece]:
        """Asks for more than the gen needs, without its stop."""
        assert args.max_tokens is not None and self.num_ahead is not None
        tells = self.caller.api.abilities.reports_tokens and not self._is_blind
        # Where the API does not report tokens, only the limit of the gen itself can be honoured.
        asked = max(args.max_tokens, self.num_ahead) if tells else args.max_tokens
        call = Call(prompt=prompt, args=dataclasses.replace(args, max_tokens=asked, stop=None), wants_tokens=tells)
        reader, collector = UnitReader(), Collector()
        cut = GenCut(StopMatcher(args.stop or ()), args.max_tokens)
        units: list[Unit] = []
        num_shown = 0
        async with contextlib.aclosing(self.caller.stream(call)) as deltas:
            async for delta in deltas:
                collector.push(delta)
                new = reader.push(delta)
                units += new
                shown = "".join([cut.push(unit) for unit in new])
                if shown and (cut.num_tokens is not None or asked == args.max_tokens):
                    num_shown += len(shown)
                    yield Piece(shown)
        reply = collector.reply(collector.bill)
        ahead = ahead_of(reply, units, args, asked)
        if cut.num_tokens is None and ahead.total_tokens > args.max_tokens < cut.num_bytes:
            # The answer is longer than the gen allows, and no report says where the rest begins.
            if num_shown:
                raise BackendError(f"{self.caller.api.name} told only some of its tokens apart; use another dialect")
            self._is_blind = True
            async with contextlib.aclosing(self._generate_alone(prompt, args)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        self.ahead = dataclasses.replace(ahead, position=len(cut.text))
        meta = meta_of(reply.bill, cut.finish or reply.finish, cut.matched)
        if cut.num_tokens is not None:
            meta["completion_tokens"] = cut.num_tokens
        yield Piece(cut.text[num_shown:], meta)

    async def _generate_alone(self, prompt: ModelPrompt, args: SamplingArgs) -> AsyncGenerator[Piece]:
        """Asks for just what the gen needs."""
        args, make_finder = self._split_stops(args)
        args = self._with_reports(args)
        top = args.top_logprobs_num or 0
        call = Call(prompt=prompt, args=args, wants_tokens=bool(args.return_logprob), num_alternatives=top)
        others = [] if self.caller.api.abilities.has_n else self._ask_others(call)
        if others:
            call = dataclasses.replace(call, args=dataclasses.replace(args, n=None))
        collectors = [Collector() for _ in range(call.args.n or 1)]
        cut = GenCut(make_finder(), None)
        try:
            async with contextlib.aclosing(self.caller.stream(call)) as deltas:
                async for delta in deltas:
                    collectors[delta.index].push(delta)
                    if delta.index == 0 and delta.text and (shown := cut.push(Unit(delta.text, None))):
                        yield Piece(shown)
                    if cut.finish is not None and len(collectors) == 1:
                        break
            more = [reply for replies in await asyncio.gather(*others) for reply in replies]
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        bill = next((one.bill for one in collectors if one.bill is not None), None)
        replies = [*(one.reply(bill) for one in collectors), *more]
        meta = self._meta(args, replies[0], cut)
        if cut.finish is not None and len(collectors) == 1:
            meta["completion_tokens"] = None  # the call was ended before the API reported it
        if others:
            meta |= cost_of(reply.bill for reply in (replies[0], *more))
        cuts = [_cut(reply.text, make_finder()) for reply in replies[1:]]
        first = self._meta(args, replies[0], cut)
        metas = [first, *(self._meta(args, reply, other) for reply, other in zip(replies[1:], cuts, strict=True))]
        yield Piece(cut.flush(), with_answers(metas) | meta, tuple(other.text for other in cuts))

    def _with_reports(self, args: SamplingArgs) -> SamplingArgs:
        """Removes reports that the API does not have. Raises UnsupportedError where that is an error."""
        can = self.caller.api.abilities
        if args.return_logprob and not can.reports_tokens:
            self.unsupported.leave_out("return_logprob", "the API reports none")
            return dataclasses.replace(args, return_logprob=None, top_logprobs_num=None)
        if (args.top_logprobs_num or 0) > can.max_alternatives:
            remedy = f"the API reports at most {can.max_alternatives}, not {args.top_logprobs_num}; ask for fewer"
            self.unsupported.leave_out("top_logprobs_num", remedy)
            return dataclasses.replace(args, top_logprobs_num=None)
        return args

    def _split_stops(self, args: SamplingArgs) -> tuple[SamplingArgs, Callable[[], StopFinder]]:
        """Gives the arguments with the stops that the API takes, and a maker of finders for the other stops."""
        can, stops, patterns = self.caller.api.abilities, args.stop or (), args.stop_regex or ()
        taken = tuple(stop for stop in stops if can.takes_blank_stops or stop.strip())[: can.max_stops]
        args = dataclasses.replace(args, stop=taken or None)
        own = () if len(taken) == len(stops) else stops
        if not patterns or can.takes_stop_regex:
            return args, lambda: StopMatcher(own)
        from jsg.constrained.stop_patterns import stop_patterns

        make = stop_patterns(SamplingParams(stop_regex=patterns))
        return dataclasses.replace(args, stop_regex=None), lambda: find_stops(own, make)

    def _ask_others(self, call: Call) -> "list[asyncio.Task[list[Reply]]]":
        """Starts the calls for the second and further answers of an API that gives one answer a call."""
        one = dataclasses.replace(call, args=dataclasses.replace(call.args, n=None))
        return [asyncio.create_task(self.caller.collect(one)) for _ in range((call.args.n or 1) - 1)]

    def _meta(self, args: SamplingArgs, reply: Reply, cut: GenCut) -> dict[str, Any]:
        meta = meta_of(reply.bill, cut.finish or reply.finish, cut.matched or reply.matched)
        if args.return_logprob and reply.tokens is not None:
            starts = itertools.accumulate((len(token.text) for token in reply.tokens), initial=0)
            own = [token for token, start in zip(reply.tokens, starts, strict=False) if start < len(cut.text)]
            meta |= logprobs_meta(own if cut.finish else reply.tokens, with_top=bool(args.top_logprobs_num))
        return meta


def ahead_of(reply: Reply, units: Sequence[Unit], args: SamplingArgs, asked: int) -> Ahead:
    """Gives the text of a call for `asked` tokens, which had the arguments of a gen."""
    return Ahead(
        units=tuple(units),
        finish=reply.finish,
        total_tokens=reply.bill.completion_tokens if reply.bill else asked,
        settings=shared_settings(args),
        prompt_tokens=reply.bill.prompt_tokens if reply.bill else 0,
    )


def meta_of(bill: Bill | None, finish: str, matched: str | None) -> dict[str, Any]:
    """Gives the report about a gen. Counts are None where the call was ended before the API reported them."""
    counts = dataclasses.asdict(bill) if bill else dict.fromkeys(f.name for f in dataclasses.fields(Bill))
    return {**counts, "finish_reason": {"type": finish} | ({"matched": matched} if matched else {}), "api_calls": 1}


def saved_meta(taken: Taken) -> dict[str, Any]:
    """Gives the report about a gen that needed no call."""
    meta = meta_of(Bill(0, taken.num_tokens or 0, 0), taken.finish, taken.matched)
    return {**meta, "completion_tokens": taken.num_tokens, "api_calls": 0}


def logprobs_meta(tokens: Sequence[Token], *, with_top: bool) -> dict[str, Any]:
    """Gives logprobs in the published form, without token ids, which such APIs do not report."""
    meta: dict[str, Any] = {"output_token_logprobs": [[token.logprob, None, token.text] for token in tokens]}
    if with_top:
        meta["output_top_logprobs"] = [
            [[logprob, None, text] for text, logprob in token.top.items()] for token in tokens
        ]
    return meta


def _cut(text: str, finder: StopFinder) -> GenCut:
    cut = GenCut(finder, None)
    cut.push(Unit(text, None))
    return cut
