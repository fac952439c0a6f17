"""The log-probabilities of tokens: of one as an object, of many as arrays.

A prompt may have half a million of them, and Python's garbage collector looks at each object that is alive: 0.1 s, in
which nobody gets a token. So those of a prompt stay arrays from the device to the client's JSON.
"""

import abc
import array
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, final, overload

ndarray = Any
"""NumPy's type: to import NumPy takes longer than everything that a command line needs of `jsg.types`."""
AT_ONCE = 2**9
"""Scores that an iteration makes objects of at a time."""
PACK = 2**6
"""Scores of a growing answer that are packed together: with 20 alternatives each, 0.1 ms."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token under the model's own distribution (before temperature, penalties and masks).

    Attributes:
        token_id: The token.
        logprob: Natural logarithm; None for the first prompt token, which nothing precedes.
        top: Pairs (token id, logprob) of the most likely tokens at this position, the likeliest first.
        chosen: Pairs (token id, logprob) of the ids in `Request.token_ids_logprob`, in their order.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    chosen: tuple[tuple[int, float], ...] = ()


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ScorePart:
    """The scores of tokens that follow one another, each with as many alternatives.

    Attributes:
        numbers: A row of 4-byte numbers for each token: its id, its log-probability, the ids of `top`, their
            log-probabilities, and those of `chosen`. Ids are int32, the others float32.
        num_top: The length of `top`.
        chosen: The ids of `chosen`.
        is_first: Whether this is the first token of a prompt, which has no log-probability.
    """

    numbers: bytes
    num_top: int = 0
    chosen: tuple[int, ...] = ()
    is_first: bool = False

    @classmethod
    def of(
        cls, ids: ndarray, logprobs: ndarray, top_ids: ndarray, top: ndarray, chosen_ids: Sequence[int], chosen: ndarray
    ) -> "ScorePart":
        """Takes copies of arrays with a row for each token: int32 ids, and float32 log-probabilities."""
        import numpy as np  # here: see `ndarray`

        columns = (ids[:, None], logprobs[:, None], top_ids, top, chosen)
        numbers = np.concatenate([column.view(np.int32) for column in columns], axis=1)
        return cls(numbers.tobytes(), top.shape[1], tuple(chosen_ids))

    @classmethod
    def first(cls, token_id: int) -> "ScorePart":
        """The first token of a prompt."""
        return cls(token_id.to_bytes(4, "little") + bytes(4), is_first=True)

    def __len__(self) -> int:
        return len(self.numbers) // (4 * self._width)

    @property
    def _width(self) -> int:
        return 2 + 2 * self.num_top + len(self.chosen)

    def between(self, start: int, stop: int) -> list[TokenLogprob]:
        """The scores from `start` to `stop` as objects, which are made anew each time."""
        import numpy as np  # here: see `ndarray`

        width, k, count = self._width, self.num_top, stop - start
        ints = np.frombuffer(self.numbers, np.int32, count * width, 4 * start * width).reshape(count, width)
        floats = ints.view(np.float32)
        logprobs: list[float | None] = [None] * count if self.is_first else floats[:, 1].tolist()
        top = zip(ints[:, 2 : 2 + k].tolist(), floats[:, 2 + k : 2 + 2 * k].tolist(), strict=True)
        tops = [tuple(zip(*pair, strict=True)) for pair in top] if k else [()] * count
        chosen = floats[:, 2 + 2 * k :].tolist()
        chosens = [tuple(zip(self.chosen, row, strict=True)) for row in chosen] if self.chosen else [()] * count
        return list(map(TokenLogprob, ints[:, 0].tolist(), logprobs, tops, chosens))


class _Scores(Sequence[TokenLogprob], abc.ABC):
    """Many scores. Whoever asks for some gets objects, which are made anew each time.

    It equals every sequence of the same scores.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprob]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprob | Sequence[TokenLogprob]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._between(places, places + 1)[0]
        if not places:
            return []
        low, high = min(places[0], places[-1]), max(places[0], places[-1]) + 1
        return self._between(low, high)[:: places.step]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    @abc.abstractmethod
    def _between(self, start: int, stop: int) -> list[TokenLogprob]:
        """Those from `start` to `stop`, of which only the parts are read that have them."""


@final
@dataclasses.dataclass(slots=True, eq=False)
class TokenScores(_Scores):
    """The scores of a prompt.

    Attributes:
        parts: One after the other, none empty.
    """

    parts: list[ScorePart] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def _between(self, start: int, stop: int) -> list[TokenLogprob]:
        found: list[TokenLogprob] = []
        ends = itertools.accumulate(map(len, self.parts))
        for part, end in zip(self.parts, ends, strict=True):
            begin = end - len(part)
            if begin < stop and start < end:
                found += part.between(max(start - begin, 0), min(stop - begin, len(part)))
        return found

    def __iter__(self) -> Iterator[TokenLogprob]:
        size = len(self)
        return itertools.chain.from_iterable(
            self._between(start, min(start + AT_ONCE, size)) for start in range(0, size, AT_ONCE)
        )


@final
class GrowingScores(_Scores):
    """The scores of an answer while it grows. They are packed: to free half a million objects takes 0.05 s."""

    __slots__ = ("_packs", "_rest")

    def __init__(self) -> None:
        """No scores."""
        self._packs: list[array.array[float]] = []  # of `PACK` scores each
        self._rest: list[TokenLogprob] = []

    def __iadd__(self, scored: Iterable[TokenLogprob]) -> Self:
        self._rest += scored
        while len(self._rest) >= PACK:
            self._packs.append(_packed(self._rest[:PACK]))
            del self._rest[:PACK]
        return self

    def __len__(self) -> int:
        return PACK * len(self._packs) + len(self._rest)

    def _between(self, start: int, stop: int) -> list[TokenLogprob]:
        first, last = start // PACK, -(-stop // PACK)
        found = list(itertools.chain.from_iterable(map(_unpacked, self._packs[first:last])))
        if last > len(self._packs):
            found += self._rest
        return found[start - first * PACK : stop - first * PACK]

    def __iter__(self) -> Iterator[TokenLogprob]:
        yield from itertools.chain.from_iterable(map(_unpacked, self._packs))
        yield from self._rest


def _packed(scored: Iterable[TokenLogprob]) -> "array.array[float]":
    """For each score: its token, its log-probability, the number of alternatives, and these. No value is rounded."""
    numbers = array.array("d")
    for score in scored:
        pairs = score.top + score.chosen
        logprob = math.inf if score.logprob is None else score.logprob
        numbers.extend((score.token_id, logprob, len(score.top), len(score.chosen)))
        numbers.extend([token for token, _ in pairs])
        numbers.extend([logprob for _, logprob in pairs])
    return numbers


def _unpacked(packed: "array.array[float]") -> Iterator[TokenLogprob]:
    numbers, place = packed.tolist(), 0
    while place < len(numbers):
        token, logprob, num_top, num_chosen = numbers[place : place + 4]
        ids, place = place + 4, place + 4 + 2 * int(num_top + num_chosen)
        half = (ids + place) // 2
        pairs = tuple(zip(map(int, numbers[ids:half]), numbers[half:place], strict=True))
        top, chosen = pairs[: int(num_top)], pairs[int(num_top) :]
        yield TokenLogprob(int(token), None if logprob == math.inf else logprob, top, chosen)
