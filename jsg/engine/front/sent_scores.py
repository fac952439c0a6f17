"""The scores of a prompt as the engine has sent them."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import final, overload

import msgspec

from jsg.engine.child.protocol import PromptScores
from jsg.types import TokenLogprob

_DECODER = msgspec.msgpack.Decoder(tuple[TokenLogprob, ...])


@final
class SentScores(Sequence[TokenLogprob]):
    """Scores that stay encoded. Whoever asks for some gets objects, which are made anew each time.

    There may be half a million at once, and Python's garbage collector looks at each object that is alive: 0.1 s, in
    which nobody gets a token.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._ends: list[int] = []

    def add(self, part: PromptScores) -> None:
        """Takes the part behind those before it."""
        self._ends.append(len(self) + part.count)
        self._parts.append(part.encoded)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[TokenLogprob]:
        return itertools.chain.from_iterable(map(_DECODER.decode, self._parts))

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprob]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | Sequence[TokenLogprob]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._between(places, places + 1)[0]
        if places.step != 1:
            return tuple(self)[index]
        return self._between(places.start, places.stop)

    def _between(self, start: int, stop: int) -> Sequence[TokenLogprob]:
        """Those from `start` to `stop`, of which only the parts are read that have them."""
        if start >= stop:
            return ()
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._ends, stop)
        before = self._ends[first - 1] if first else 0
        read = itertools.chain.from_iterable(map(_DECODER.decode, self._parts[first : last + 1]))
        return tuple(itertools.islice(read, start - before, stop - before))
