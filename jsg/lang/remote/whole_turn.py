"""Speculation on a chat API that always begins a turn: a call gives the whole turn, which the program must match."""

import dataclasses
from collections.abc import Sequence
from typing import final

from jsg.errors import BackendError, UnsupportedError
from jsg.lang.remote.ahead import Ahead, Taken, UnitReader, could_be_shared, shared_settings
from jsg.lang.remote.arguments import normalised
from jsg.lang.remote.caller import Reply
from jsg.lang.remote.continuing import Continuer, ahead_of, meta_of, saved_meta
from jsg.lang.remote.wire import Bill, Call, Message
from jsg.lang.words.backend import Piece
from jsg.lang.words.ir import Gen, SamplingArgs, Text

NUM_TRIES = 3
"""The number of calls for one turn before it is an error that no answer has the form of the program."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Miss:
    """Why an answer does not fit the program, and whether it was only too short."""

    reason: str
    is_short: bool = False


@final
class WholeTurn:
    """Answers the gens of the open turn of the assistant by calls that ask for the whole turn.

    What the model wrote beyond them stays in `Continuer.ahead`.
    """

    def __init__(self, continuer: Continuer) -> None:
        self._continuer = continuer

    async def generate(
        self, conversation: tuple[Message, ...], begun: str, items: Sequence[Text | Gen]
    ) -> Sequence[Piece]:
        """Answers the gens in `items`.

        Args:
            conversation: All turns before the open one.
            begun: The text of the open turn.
            items: The rest of the turn. The model need not have written constants after the last gen.

        Raises:
            UnsupportedError: The gens cannot share a call.
            BackendError: The model did not write the constants.
        """
        gens = [normalised(item.args) for item in items if isinstance(item, Gen)]
        if not gens:
            for item in items:
                self._continuer.extended(item.text if isinstance(item, Text) else "")
            return []
        self._check(gens)
        ahead = self._continuer.ahead
        if ahead is not None and not isinstance(known := self._match(ahead, items), _Miss):
            return self._pieces(known, None, 0)
        first_gen = next(number for number, item in enumerate(items) if isinstance(item, Gen))
        is_constant = not begun
        begun += "".join(item.text for item in items[:first_gen] if isinstance(item, Text))
        items = items[first_gen:]
        asked = max(self._continuer.num_ahead or 0, *(args.max_tokens or 0 for args in gens))
        missed: list[tuple[str, int]] = []
        while True:
            reply, ahead = await self._ask(conversation, gens[0], asked)
            start = _start(ahead, begun, is_constant=is_constant)
            found = _miss_at(ahead, begun) if start is None else self._match(start, items)
            if not isinstance(found, _Miss):
                return self._pieces(found, reply, len(missed) + 1)
            is_stuck = gens[0].temperature == 0.0 and (reply.text, asked) in missed
            missed.append((reply.text, asked))
            if is_stuck or len(missed) == NUM_TRIES:
                break
            if found.is_short:
                asked = max(asked, self._enough(begun, items))
        raise BackendError(
            f"{self._name} was asked {len(missed)} times for a whole turn and did not write what the program "
            f"prescribes: {found.reason}. Show the form in an example turn, or use a backend that goes on in a turn "
            "that has begun"
        )

    @property
    def _name(self) -> str:
        return self._continuer.caller.api.name

    def _check(self, gens: Sequence[SamplingArgs]) -> None:
        """Raises UnsupportedError where gens cannot share a call."""
        odd = next((args for args in gens if shared_settings(args) != shared_settings(gens[0])), None)
        if odd is not None:
            names = [f.name for f in dataclasses.fields(odd) if f.name not in ("max_tokens", "stop")]
            differing = [name for name in names if getattr(odd, name) != getattr(gens[0], name)]
            raise UnsupportedError(
                f"{self._name} answers a whole turn with one call, so its gens must agree in all but max_tokens and "
                f"stop, but they differ in {', '.join(differing)}; put them into turns of their own"
            )
        if not could_be_shared(gens[0]):
            raise UnsupportedError(
                f"{self._name} answers a whole turn with one call, so its gens can have no penalties, seed, logprobs, "
                "n, dtype, regex, json_schema, ebnf, stop_regex, stop_token_ids or min_tokens; leave them out, or put "
                "each gen at the beginning of its turn"
            )

    async def _ask(self, conversation: tuple[Message, ...], args: SamplingArgs, asked: int) -> tuple[Reply, Ahead]:
        """Asks for a turn of `asked` tokens; gives the answer."""
        caller = self._continuer.caller
        tells = caller.api.abilities.reports_tokens
        settings = dataclasses.replace(args, max_tokens=asked, stop=None)
        (reply,) = await caller.collect(Call(prompt=conversation, args=settings, wants_tokens=tells))
        reader = UnitReader()
        units = [unit for delta in reply.deltas for unit in reader.push(delta)]
        return reply, ahead_of(reply, units, args, asked)

    def _match(self, ahead: Ahead, items: Sequence[Text | Gen]) -> "list[Taken] | _Miss":
        """Finds the answers of the gens in the text that the model wrote."""
        answers: list[Taken] = []
        num_gens = sum(isinstance(item, Gen) for item in items)
        for item in items:
            if isinstance(item, Gen):
                taken = ahead.take(normalised(item.args), needs_border=False)
                if taken is None:
                    is_short = ahead.finish == "length"
                    return _Miss(f"the end of the gen behind {ahead.written[-80:]!r} cannot be told", is_short)
                answers.append(taken)
                ahead = taken.rest
            elif len(answers) < num_gens:
                if (behind := ahead.behind(item.text)) is None:
                    return _miss_at(ahead, item.text)
                ahead = behind
            elif (behind := ahead.behind(item.text)) is not None:
                ahead = behind
            else:
                self._continuer.ahead = None
                return answers
        self._continuer.ahead = ahead
        return answers

    def _pieces(self, answers: Sequence[Taken], reply: Reply | None, num_calls: int) -> list[Piece]:
        pieces: list[Piece] = []
        for number, taken in enumerate(answers):
            if number == 0 and reply is not None:
                bill = dataclasses.replace(reply.bill or Bill(), completion_tokens=taken.num_tokens or 0)
                meta = meta_of(bill, taken.finish, taken.matched)
                meta |= {"completion_tokens": taken.num_tokens, "api_calls": num_calls}
            else:
                self._continuer.caller.meter.count_saving(taken.rest.prompt_tokens + taken.num_before)
                meta = saved_meta(taken)
            pieces.append(Piece(taken.text, meta))
        return pieces

    @staticmethod
    def _enough(begun: str, items: Sequence[Text | Gen]) -> int:
        """Gives the most tokens that the turn can have, as a token of a constant has at least one byte."""
        constants = begun + "".join(item.text for item in items if isinstance(item, Text))
        gens = [normalised(item.args) for item in items if isinstance(item, Gen)]
        return len(constants.encode()) + sum(args.max_tokens or 0 for args in gens)


def _start(ahead: Ahead, begun: str, *, is_constant: bool) -> Ahead | None:
    """Gives the rest of the text after the beginning of the turn, where chat models leave out white space.

    Where the turn begins with white space only, its position is unknown unless nothing precedes that constant.
    """
    bare = begun.lstrip()
    if (start := ahead.behind(begun)) is not None or ahead.left[:1].isspace():
        return start
    return ahead.behind(bare) if bare or is_constant else None


def _miss_at(ahead: Ahead, expected: str) -> _Miss:
    wrote = f"it wrote {ahead.left[:80]!r}" if ahead.left else "nothing was left: give the gen before it a stop"
    is_short = ahead.finish == "length" and expected.startswith(ahead.left)
    return _Miss(f"expected {expected[:80]!r}, but {wrote}", is_short)
