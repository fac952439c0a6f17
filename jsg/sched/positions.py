"""The positions of tokens, and how the radix tree distinguishes a token from the same one at another position.

The index of a token is its place in the row, and its position says how its key is rotated. The two differ after a
position jump and after branches. A cached key is right for one position only, so the tree finds it by token
and position together: a token whose position is larger than its index is another word in the tree. The tokens of an
image are one placeholder whatever the image shows, so the tree has the words of the image in their place.

What follows the branches of a joined prompt sees several paths of the tree at once. So it is a path of its own, in a
namespace that names all that comes before it.
"""

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence, Set

import numpy as np

from jsg.cache.radix import RadixCache
from jsg.cache_report import CacheReport, EvictionCause
from jsg.errors import QueueFullError
from jsg.media import MediaInput
from jsg.types import Request

WORDS = 2**31
"""How many negative numbers there are for words. Tokens are not negative."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Positions and key of a request, if these are not simply indices and tokens.

    Attributes:
        positions: int32, the position of every token that the request has or will have.
        key: int32, the words by which the radix tree finds its tokens.
        first_word: Output token t has the word -1 - (`first_word` + t), or the word t if `first_word` is 0.
        namespace: For a joined request, the namespace of what follows its branches; else None.
    """

    positions: np.ndarray
    key: np.ndarray
    first_word: int = 0
    namespace: str | None = None

    def put(self, index: int, token: int) -> None:
        """Notes an output token."""
        self.key[index] = ~(self.first_word + token) if self.first_word else token


def positions_of(request: Request, size: int) -> np.ndarray | None:
    """int64 [size]: the positions of all tokens that a request has or will have; None if these are the indices.

    Each branch of a joined prompt goes on from the prefix. What follows the branches goes on from the largest position.
    """
    if not request.position_jumps and not request.joined:
        return None
    jumps = np.zeros(size, np.int64)
    for index, extra in request.position_jumps:
        if index < size:  # the last jump may be for output that never comes
            jumps[index] = extra
    first, *_, last = request.joined or (size, size)
    positions = np.empty(size, np.int64)

    def fill(start: int, end: int, position: int) -> int:
        """Counts on from a position; returns the next one."""
        positions[start:end] = position + np.arange(end - start) + np.cumsum(jumps[start:end])
        return int(positions[end - 1]) + 1 if end > start else position

    behind_prefix = fill(0, first, 0)
    ends = [fill(start, end, behind_prefix) for start, end in itertools.pairwise(request.joined)]
    fill(last, size, max((behind_prefix, *ends)))
    return positions


class PositionWords:
    """The words of tokens whose position is not their index.

    The shift of a token is its position minus its index in its path of the tree. Each shift in use has a number s, and
    token t is then word -1 - (s * vocabulary + t). When numbers run out, everything is evicted that no live request has
    locked, and the numbers of shifts that no live request has are given to other shifts.

    Invariant: every word in the tree is that of a shift in `_numbers`.
    """

    def __init__(self, vocab_size: int, cache: RadixCache):
        self._vocab_size = vocab_size
        self._cache = cache
        self._limit = WORDS // vocab_size
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
        """Takes back the numbers of all shifts but those in `kept`. Live requests have locked what stays cached."""
        self._cache.evict(self._cache.num_evictable, EvictionCause.POSITIONS)
        self._numbers = {shift: number for shift, number in self._numbers.items() if shift in kept}
        used = set(self._numbers.values())
        self._free = [number for number in range(1, self._next) if number not in used]

    def release(self, shifts: Sequence[int]) -> None:
        """Gives back shifts that a request acquired. What the request has cached stays."""
        for shift in shifts:
            self._users[shift] -= 1
            if not self._users[shift]:
                del self._users[shift]

    def layout(self, request: Request, tokens: np.ndarray, positions: np.ndarray | None) -> Layout | None:
        """Positions and key of a new request; None if these are its indices and tokens.

        Args:
            request: The request. The shifts of its cached tokens must have been acquired.
            tokens: int32, its prompt, with room for its output.
            positions: The positions of all its tokens, if they are not the indices (see `positions_of`).
        """
        if positions is None:
            return media_layout(tokens, request.media) if request.media else None
        shifts, num_prompt = _shifts(request, positions), len(request.input_ids)
        key = tokens.copy()
        key[:num_prompt] = self._words(tokens[:num_prompt], shifts[:num_prompt])
        first_word = self._numbers.get(int(shifts[-1]), 0) * self._vocab_size
        namespace = _namespace_behind(request, tokens, positions) if request.joined else None
        return Layout(positions.astype(np.int32), key, first_word, namespace)

    def _words(self, tokens: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        """int32: the words of tokens with these shifts. The word is the token if its shift is 0."""
        values, which = np.unique(shifts, return_inverse=True)
        numbers = np.array([self._numbers[shift] if shift else 0 for shift in values.tolist()], np.int64)[which]
        return np.where(numbers > 0, ~(tokens + numbers * self._vocab_size), tokens).astype(np.int32)

    def readable(self, report: CacheReport) -> CacheReport:
        """The report with tokens in place of words. Words of images are no tokens."""
        words = [word for word in report.cached_continuations if word < self._vocab_size]
        tokens = [~word % self._vocab_size if word < 0 else word for word in words]
        return dataclasses.replace(report, cached_continuations=tuple(dict.fromkeys(tokens)))


def media_layout(tokens: np.ndarray, media: Sequence[MediaInput]) -> Layout:
    """The layout of a request with images. Positions are indices, and the key has the words of its images."""
    key = tokens.copy()
    for item in media:
        key[item.start : item.end] = item.words
    return Layout(np.arange(len(tokens), dtype=np.int32), key)


def branch_layout(whole: Layout, num_prefix: int, start: int, end: int) -> Layout | None:
    """Positions and key of the prefix and one branch; None if these are indices and tokens."""
    key = cut(whole.key, num_prefix, start, end)
    return Layout(cut(whole.positions, num_prefix, start, end), key) if (key < 0).any() else None


def spans(request: Request) -> list[tuple[int, int]]:
    """Begin and end of each branch that has tokens, or of one empty branch if none has tokens."""
    pairs = [(start, end) for start, end in itertools.pairwise(request.joined) if start < end]
    return pairs or [(request.joined[0], request.joined[0])]


def cut(values: np.ndarray, num_prefix: int, start: int, end: int) -> np.ndarray:
    """The values of the prefix, and then those of one branch."""
    return np.concatenate([values[:num_prefix], values[start:end]])


def cached_shifts(request: Request, positions: np.ndarray | None) -> list[int]:
    """The shifts of a request's tokens, each once and without 0."""
    return [] if positions is None else [shift for shift in np.unique(_shifts(request, positions)).tolist() if shift]


def _shifts(request: Request, positions: np.ndarray) -> np.ndarray:
    """int64: by how much the position of each token is larger than its index in its path of the tree.

    The path of a branch lacks the branches before it. What follows the branches has a path of its own, and its
    namespace names the first position.
    """
    shifts = positions - np.arange(len(positions))
    if request.joined:
        starts = np.array(request.joined)
        first, last = starts[0], starts[-1]
        shifts[first:last] += np.repeat(starts[:-1] - first, np.diff(starts))
        shifts[last:] -= shifts[last]
    return shifts


def _namespace_behind(request: Request, tokens: np.ndarray, positions: np.ndarray) -> str:
    """The namespace in which the tree has what follows the branches of a joined request.

    Keys and values there depend on all tokens before them, on their positions, and on where each branch begins. A
    digest names all these, and the first position after the branches.
    """
    last = request.joined[-1]
    digest = hashlib.blake2b(np.array([len(request.joined), *request.joined], np.int64).tobytes(), digest_size=16)
    digest.update(tokens[:last].tobytes())
    digest.update(positions[: last + 1].tobytes())
    return f"{request.namespace}/{digest.hexdigest()}"
