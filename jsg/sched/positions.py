"""Where tokens stand for the model, and how the radix tree tells a token from the same one at another position.

A token's index is its place in the row of pages; its position is what its keys were rotated by. They differ behind a
position jump and behind branches. Keys and values hold for one position only, so what is cached is found by tokens and
positions together: a token whose position is not its index has a word of its own in the tree. So has a token of an
image, which is the same placeholder whatever the image shows.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence, Set

import numpy as np

from jsg.cache.radix import RadixCache
from jsg.errors import QueueFullError
from jsg.media import MediaInput
from jsg.types import CacheReport, Request

WORDS = 2**31
"""Negative words, which no token has."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Of a request whose positions are not all equal to their indices, or that has tokens of images.

    Attributes:
        positions: int32, of every token that it has or will have.
        key: int32, what its tokens are found by in the radix tree; meaningless where it is not cached.
        first_word: What -1 - token is for an output token of id 0, to which the id is added; 0 for a plain token.
    """

    positions: np.ndarray
    key: np.ndarray
    first_word: int = 0

    def put(self, index: int, token: int) -> None:
        """Notes an output token."""
        self.key[index] = ~(self.first_word + token) if self.first_word else token


def positions_of(request: Request, size: int) -> np.ndarray | None:
    """int64 [size]: the position of each token of a request, those to come included; None where all are indices.

    Each branch of a joined prompt goes on from the prefix, and what is behind the branches from the largest of them.
    """
    if not request.position_jumps and not request.joined:
        return None
    jumps = np.zeros(size, np.int64)
    for index, extra in request.position_jumps:
        if index < size:  # the last may be for new tokens, where none is to come
            jumps[index] = extra
    first, *_, last = request.joined or (size, size)
    positions = np.empty(size, np.int64)

    def fill(start: int, end: int, position: int) -> int:
        """Counts on from a position; returns the one behind."""
        positions[start:end] = position + np.arange(end - start) + np.cumsum(jumps[start:end])
        return int(positions[end - 1]) + 1 if end > start else position

    behind_prefix = fill(0, first, 0)
    ends = [fill(start, end, behind_prefix) for start, end in itertools.pairwise(request.joined)]
    fill(last, size, max((behind_prefix, *ends)))
    return positions


class PositionWords:
    """The words of tokens whose position is so much larger than their index.

    Shift number s of token t is word -1 - (s * vocabulary + t). A number is given to each shift in use; where they run
    out, those that no live request has are given anew, once nothing is cached any more but what live requests lock.

    Invariant: every word in the tree is that of a shift in `_numbers`.
    """

    def __init__(self, vocab_size: int, cache: RadixCache, num_words: int = WORDS):
        self._vocab_size = vocab_size
        self._cache = cache
        self._limit = num_words // vocab_size
        self._numbers: dict[int, int] = {}
        self._next = 1
        self._free: list[int] = []
        self._users: Counter[int] = Counter()

    def acquire(self, shifts: Sequence[int]) -> None:
        """Gives each shift a number until `release`.

        Raises:
            QueueFullError: Live requests have all numbers. Nothing was changed, and nothing evicted.
        """
        new = [shift for shift in dict.fromkeys(shifts) if shift not in self._numbers]
        if len(self._numbers) + len(new) >= self._limit:
            kept = self._users.keys() | set(shifts)
            if len(kept) >= self._limit:
                raise QueueFullError("too many different position jumps are in use; try again later")
            self._recycle(kept)
        for shift in new:
            if not self._free:
                self._free.append(self._next)
                self._next += 1
            self._numbers[shift] = self._free.pop()
        self._users.update(shifts)

    def _recycle(self, kept: Set[int]) -> None:
        """Takes the numbers back of all shifts but these. What remains cached is locked by live requests."""
        self._cache.evict(self._cache.num_evictable)
        self._numbers = {shift: number for shift, number in self._numbers.items() if shift in kept}
        used = set(self._numbers.values())
        self._free = [number for number in range(1, self._next) if number not in used]

    def release(self, shifts: Sequence[int]) -> None:
        """A request that acquired them is gone. What it cached stays."""
        for shift in shifts:
            self._users[shift] -= 1
            if not self._users[shift]:
                del self._users[shift]

    def layout(self, request: Request, tokens: np.ndarray, positions: np.ndarray | None) -> Layout | None:
        """Positions and key of a request whose prompt is known; None where they are indices and tokens.

        Args:
            request: The request. The shifts of its cached tokens must have been acquired.
            tokens: int32, its prompt, with room for its output.
            positions: Those of all its tokens where they are not indices (see `positions_of`).
        """
        if positions is None:
            return media_layout(tokens, request.media) if request.media else None
        num_keyed = request.joined[0] if request.joined else len(request.input_ids)
        key = tokens.copy()
        key[:num_keyed] = self._key(tokens[:num_keyed], positions[:num_keyed], 0)
        number = self._numbers.get(int(positions[-1]) - len(positions) + 1, 0)
        return Layout(positions.astype(np.int32), key, number * self._vocab_size)

    def branch_layout(self, whole: Layout, tokens: np.ndarray, num_prefix: int, start: int, end: int) -> Layout | None:
        """How the prefix of a joined request and one of its branches are cached; None where positions are indices."""
        positions = cut(whole.positions, num_prefix, start, end)
        key_behind = self._key(tokens[num_prefix:], positions[num_prefix:], num_prefix)
        key = np.concatenate([whole.key[:num_prefix], key_behind])
        return Layout(positions, key) if (key < 0).any() else None

    def _key(self, tokens: np.ndarray, positions: np.ndarray, first_index: int) -> np.ndarray:
        """int32: the words of tokens that begin at an index; those whose position is their index are plain."""
        indices = np.arange(first_index, first_index + len(tokens))
        shifts, which = np.unique(positions - indices, return_inverse=True)
        numbers = np.array([self._numbers[shift] if shift else 0 for shift in shifts.tolist()], np.int64)[which]
        return np.where(numbers > 0, ~(tokens + numbers * self._vocab_size), tokens).astype(np.int32)

    def readable(self, report: CacheReport) -> CacheReport:
        """A report in which words are the tokens that they stand for; those of images stand for none."""
        words = [word for word in report.cached_continuations if word < self._vocab_size]
        tokens = [~word % self._vocab_size if word < 0 else word for word in words]
        return dataclasses.replace(report, cached_continuations=tuple(dict.fromkeys(tokens)))


def media_layout(tokens: np.ndarray, media: Sequence[MediaInput]) -> Layout:
    """How a request with images is cached: under their words, at positions that are indices."""
    key = tokens.copy()
    for item in media:
        key[item.start : item.end] = item.words
    return Layout(np.arange(len(tokens), dtype=np.int32), key)


def shifts_of(positions: np.ndarray) -> list[int]:
    """By how much positions exceed their indices, each once, in order of size, without 0."""
    return [shift for shift in np.unique(positions - np.arange(len(positions))).tolist() if shift]


def spans(request: Request) -> list[tuple[int, int]]:
    """Where each branch that has tokens begins and ends; where none has, the empty one behind the prefix."""
    pairs = [(start, end) for start, end in itertools.pairwise(request.joined) if start < end]
    return pairs or [(request.joined[0], request.joined[0])]


def cut(values: np.ndarray, num_prefix: int, start: int, end: int) -> np.ndarray:
    """Those of the prefix and of one branch."""
    return np.concatenate([values[:num_prefix], values[start:end]])


def cached_shifts(request: Request, positions: np.ndarray | None) -> list[int]:
    """By how much the positions of what is cached of a request exceed their indices in the tree; each once."""
    if positions is None:
        return []
    if not request.joined:
        return shifts_of(positions)
    starts = np.array(request.joined)
    num_prefix, end = request.joined[0], request.joined[-1]
    before = np.repeat(starts[:-1] - num_prefix, np.diff(starts))  # tokens in the row but not in the path
    excess = positions[:end] - np.arange(end)
    excess[num_prefix:] += before
    return [shift for shift in np.unique(excess).tolist() if shift]
