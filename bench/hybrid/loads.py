"""Loads for the prefix cache of a hybrid: what requests share, and what a front end knows of that.

A load is a sequence of waves. The requests of a wave arrive together, and the next wave arrives when they have ended.
Texts are random tokens; an answer ends with EOS.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from bench.sched import VOCAB

EOS = VOCAB - 1


class Asked(NamedTuple):
    """A request and its answer. The last three fields are those of `jsg.types.Request`."""

    prompt: np.ndarray
    answer: np.ndarray
    snapshot_at: tuple[int, ...] = ()
    turn_end: int = 0
    hold: bool = False


Wave = list[Asked]


class Texts:
    """Draws tokens, the same each time."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def behind(self, text: np.ndarray | None, num_tokens: int) -> np.ndarray:
        """So many new tokens behind a text."""
        new = self._rng.integers(0, EOS, num_tokens).astype(np.int32)
        return new if text is None else np.concatenate([text, new])

    def answer(self, num_tokens: int) -> np.ndarray:
        return np.append(self.behind(None, num_tokens - 1), np.int32(EOS))


def chats(*, drops_thoughts: bool, users: int = 32, turns: int = 10) -> Iterator[Wave]:
    """Conversations that take turns, eight at a time.

    An answer begins with four tokens of the template, of which one that drops thoughts repeats two.
    """
    texts = Texts()
    system, tail = texts.behind(None, 100), texts.behind(None, 4)
    histories = [system for _ in range(users)]
    for turn in range(turns * users // 8):
        wave = []
        for user in range(turn * 8 % users, turn * 8 % users + 8):
            prompt, answer = np.concatenate([texts.behind(histories[user], 200), tail]), texts.answer(50)
            turn_end = len(prompt) - 2 if drops_thoughts else len(prompt)
            wave.append(Asked(prompt, answer, turn_end=turn_end))
            kept = texts.behind(None, 30) if drops_thoughts else answer
            histories[user] = np.concatenate([prompt[:turn_end], kept])
        yield wave


def shared(prefix: int, own: int, count: int, size: int, *, is_announced: bool = False) -> Iterator[Wave]:
    """Requests with one common prefix, so many at a time."""
    texts = Texts()
    common, points = texts.behind(None, prefix), (prefix,) if is_announced else ()
    for _ in range(count // size):
        yield [Asked(texts.behind(common, own), texts.answer(30), points) for _ in range(size)]


def shrinking(prefixes: tuple[int, int], length: int, count: int) -> Iterator[Wave]:
    """Requests with a common prefix, one after another, then as many that have only the beginning of it."""
    texts = Texts()
    common = texts.behind(None, max(prefixes))
    for prefix in np.repeat(prefixes, count):
        yield [Asked(texts.behind(common[:prefix], length - prefix), texts.answer(30))]


def tree_of_thought(problems: int = 4, depth: int = 4, branching: int = 3) -> Iterator[Wave]:
    """Each thought goes on in several ways. A program announces where they part."""
    texts = Texts()
    level = [texts.behind(None, 300) for _ in range(problems)]
    for _ in range(depth):
        nodes = [node for node in level for _ in range(branching)]
        wave = [Asked(texts.behind(node, 30), texts.answer(50), (len(node),)) for node in nodes]
        yield from (wave[first : first + 16] for first in range(0, len(wave), 16))
        level = [np.concatenate([asked.prompt, asked.answer]) for asked in wave]


def forks(programs: int = 32, width: int = 8) -> Iterator[Wave]:
    """A program sends what its branches share ahead of them, as a hold."""
    texts = Texts()
    for stem in (texts.behind(None, 400) for _ in range(programs)):
        yield [Asked(stem, stem[:0], hold=True)]
        yield [Asked(texts.behind(stem, 20), texts.answer(50)) for _ in range(width)]


LOADS: dict[str, tuple[Callable[[], Iterator[Wave]], int, float]] = {
    "32 chats of 10 turns, text kept": (partial(chats, drops_thoughts=False), 64, 0.99),
    "32 chats of 10 turns, thoughts dropped": (partial(chats, drops_thoughts=True), 64, 0.99),
    "64 requests, 512 shared": (partial(shared, 512, 64, 64, 16), 64, 0.99),
    "64 requests, 512 shared, announced": (partial(shared, 512, 64, 64, 16, is_announced=True), 64, 0.99),
    "tree of thought, 4 x 3^4": (tree_of_thought, 256, 0.85),
    "fork of 8": (forks, 64, 0.99),
    "few-shot x 200, 800 shared": (partial(shared, 800, 60, 200, 20), 64, 0.99),
}
"""Each with a number of states, and the part that these should reach of the hit rate of a model without states."""
