r"""The text that a model wrote beyond a gen, and the later gens that it answers.

It answers a gen only with what a call for this gen could have given: the answer begins where a token begins, its tokens
are counted, it ends at the stop of the gen, and all other arguments of the gen are those of the call.

    prompt of the call │ what the model wrote, in units whose borders are borders of tokens
    ───────────────────┼──────────┬────┬──────────┬─────┬──────
    Name:              │  Ada Lov │el  │ ace\nBo  │rn:  │ 1815\n ...
                          gen       ▲ stop "\n"     the constant "\nBorn:" is skipped
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable
from typing import final

from jsg.lang.remote.wire import Delta
from jsg.lang.words.ir import GEN, SamplingArgs
from jsg.processing.stop_strings import StopFinder, StopMatcher


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Text between two borders of tokens.

    Attributes:
        text: The text, which is not empty.
        num_tokens: The number of its tokens; None where the API does not report them.
    """

    text: str
    num_tokens: int | None


@final
class UnitReader:
    """Reads units from the deltas of a call."""

    def __init__(self) -> None:
        self._num_pending = 0

    def push(self, delta: Delta) -> list[Unit]:
        """Gives the units of new text. Tokens that are part of a character make one unit with the rest of it."""
        if delta.tokens is None:
            return [Unit(delta.text, None)] if delta.text else []
        units: list[Unit] = []
        position = 0
        for num_read, token in enumerate(delta.tokens):
            if not token.text or not delta.text.startswith(token.text, position):
                self._num_pending += len(delta.tokens) - num_read
                break
            units.append(Unit(token.text, self._take(1)))
            position += len(token.text)
        if position < len(delta.text):
            units.append(Unit(delta.text[position:], self._take(0)))
        return units

    def _take(self, num_tokens: int) -> int:
        total, self._num_pending = self._num_pending + num_tokens, 0
        return total


@final
class GenCut:
    """Ends a gen where a call for it would have ended: at the first stop text, or after its last token.

    Attributes:
        finish: "stop" or "length" once the gen has ended.
        matched: The stop text or stop pattern that ended it.
        num_tokens: The tokens of its units; None where a unit does not say them.
        num_bytes: The bytes of its text, at least as many as its tokens.
    """

    def __init__(self, finder: StopFinder, max_tokens: int | None):
        self.finish: str | None = None
        self.matched: str | None = None
        self.num_tokens: int | None = 0
        self.num_bytes = 0
        self._finder = finder
        self._max_tokens = max_tokens
        self._text: list[str] = []
        self._num_shown = 0

    @property
    def text(self) -> str:
        """The text of the gen so far."""
        return "".join(self._text)

    def push(self, unit: Unit) -> str:
        """Takes a unit. Gives the new text that belongs to the gen, whatever text follows."""
        if self.finish is not None:
            return ""
        if not self._counts(unit):
            self.finish = "length"
            return self.flush()
        for char in unit.text:
            self._text.append(char)
            self.num_bytes += len(char.encode("utf-8", "surrogatepass"))
            if found := self._finder.advance(char):
                self.finish, self.matched = "stop", self._finder.pattern or "".join(self._text[-found:])
                del self._text[-found:]
                return self._show(len(self._text))
        if self.num_tokens is not None and self.num_tokens == self._max_tokens:
            self.finish = "length"
        return self.flush() if self.finish else self._show(len(self._text) - self._finder.held_len)

    def flush(self) -> str:
        """Gives the text that was held back as the possible beginning of a stop text."""
        return self._show(len(self._text))

    def _counts(self, unit: Unit) -> bool:
        """Counts the tokens of a unit; False where the gen has no room for them."""
        if unit.num_tokens is None or self.num_tokens is None:
            self.num_tokens = None
            return True
        if self._max_tokens is not None and self.num_tokens + unit.num_tokens > self._max_tokens:
            return False
        self.num_tokens += unit.num_tokens
        return True

    def _show(self, end: int) -> str:
        shown = "".join(self._text[self._num_shown : end])
        self._num_shown = max(self._num_shown, end)
        return shown


def could_be_shared(args: SamplingArgs) -> bool:
    """Says whether one call may answer a gen with these arguments and others.

    It may not if the sampler's state begins anew with each call (penalties, a seed), if the end or the form of the
    answer belongs to one call, or if the gen asks for a report.
    """
    settings = shared_settings(args).given()
    return all(GEN[name].is_stateless or (name == "seed" and args.temperature == 0.0) for name in settings)


def shared_settings(args: SamplingArgs) -> SamplingArgs:
    """Gives the arguments in which gens of one call must agree: all but those that say where they end."""
    return dataclasses.replace(args, max_tokens=None, stop=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """The answer to a gen.

    Attributes:
        text: The text.
        num_tokens: The tokens of a call for this gen; None where the API does not report them.
        finish: "stop", "length", or the API's own word.
        matched: The stop text that ended the gen.
        num_before: The known tokens of the call's answer before this text.
        rest: The text that is left for other gens.
    """

    text: str
    num_tokens: int | None
    finish: str
    matched: str | None
    num_before: int
    rest: "Ahead"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The text that a model wrote after a prompt.

    Attributes:
        units: The whole text.
        finish: Why it ends: "stop" (the model ended by itself), "length", or the API's own word.
        total_tokens: The largest number of tokens that it can have.
        settings: The arguments of the call, see `shared_settings`.
        prompt_tokens: The tokens of the call's prompt.
        position: How many of its characters the prompt of the session has so far.
    """

    units: tuple[Unit, ...]
    finish: str
    total_tokens: int
    settings: SamplingArgs
    prompt_tokens: int
    position: int = 0

    @property
    def left(self) -> str:
        """The text that the prompt does not have yet."""
        return "".join(unit.text for unit in self.units)[self.position :]

    @property
    def written(self) -> str:
        """The text that the prompt has."""
        return "".join(unit.text for unit in self.units)[: self.position]

    def behind(self, text: str) -> "Ahead | None":
        """Gives this text after `text` is appended to the prompt; None where the model wrote something else."""
        if not self.left.startswith(text):
            return None
        return dataclasses.replace(self, position=self.position + len(text))

    def take(self, args: SamplingArgs, *, needs_border: bool = True) -> Taken | None:
        """Gives the answer to a gen at this position; None where the gen needs a call of its own.

        Args:
            args: The normalised arguments of the gen.
            needs_border: Whether the answer must begin where a token begins, as in a call of its own.
        """
        borders = list(itertools.accumulate((len(unit.text) for unit in self.units), initial=0))
        before = bisect.bisect_right(borders, self.position) - 1
        inside = self.position - borders[before]
        if shared_settings(args) != self.settings or args.max_tokens is None or (inside and needs_border):
            return None
        units = list(self.units[before:])
        if inside:
            units[0] = Unit(units[0].text[inside:], units[0].num_tokens)
        cut = GenCut(StopMatcher(args.stop or ()), args.max_tokens)
        for unit in units:
            cut.push(unit)
        if cut.finish is None and self.finish != "stop":
            return None
        if cut.num_tokens is None and self.total_tokens > args.max_tokens < cut.num_bytes:
            return None
        return Taken(
            text=cut.text,
            num_tokens=cut.num_tokens,
            finish=cut.finish or self.finish,
            matched=cut.matched,
            num_before=sum_known(self.units[:before]),
            rest=dataclasses.replace(self, position=self.position + len(cut.text)),
        )


def sum_known(units: Iterable[Unit]) -> int:
    """Sums up the tokens of units, as far as they are known."""
    return sum(unit.num_tokens or 0 for unit in units)
