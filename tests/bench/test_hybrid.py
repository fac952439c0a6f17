"""The loads of `bench.hybrid`: what a model with states finds cached, beside one without."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from bench.hybrid.hits import hit_rate, play
from bench.hybrid.loads import Asked, Texts, Wave, chats, forks, shared, shrinking, tree_of_thought

LOADS = {
    "text kept": (partial(chats, drops_thoughts=False, users=16, turns=3), 40),
    "thoughts dropped": (partial(chats, drops_thoughts=True, users=16, turns=3), 26),
    "one wave after another": (partial(shared, 64, 32, 16, 8), 12),
    "announced": (partial(shared, 64, 32, 16, 8, is_announced=True), 12),
    "forks": (partial(forks, 2, 4), 8),
    "tree": (partial(tree_of_thought, 1, 3, 2), 40),
}


@pytest.mark.parametrize(("load", "num_states"), LOADS.values(), ids=LOADS)
def test_with_a_few_states_as_much_is_cached_as_without_any_need_of_them(
    load: Callable[[], Iterator[Wave]], num_states: int
):
    """One for each conversation or place where requests part, and some for those that come and go."""
    best = hit_rate(play(load(), None))
    assert best > 0.5
    assert hit_rate(play(load(), num_states)) >= 0.999 * best and hit_rate(play(load(), 0)) == 0


def test_a_shorter_shared_prefix_is_found_from_the_second_request_on():
    """The first leaves a state where it parts from what is cached."""
    found = play(shrinking((160, 120), 220, 4), 4)
    assert [cached for _, cached in found] == [0, 0, 160, 160, 0, 120, 120, 120]


@pytest.mark.parametrize("drops", [False, True])
def test_some_of_too_many_conversations_find_their_state(drops: bool):
    """Of 16 in turns with 8 states. The least recently used state would always be gone before it is needed."""
    load = partial(chats, drops_thoughts=drops, users=16, turns=4)
    assert hit_rate(play(load(), 8)) >= 0.3 * hit_rate(play(load(), None))


def test_who_comes_back_alone_finds_its_state_again():
    """Those that took the place of it are not used any more, and yield after a few turns."""

    def load() -> Iterator[Wave]:
        texts, said = Texts(), np.empty(0, np.int32)
        for index in (1, 2, 3, 4, *[0] * 9):
            prompt = texts.behind(None, 100) if index else texts.behind(said, 40)
            answer = texts.answer(10)
            yield [Asked(prompt, answer, turn_end=len(prompt))]
            if index in (0, 1):
                said = np.concatenate([prompt, answer])

    best = [cached for _, cached in play(load(), None)]
    assert [cached for _, cached in play(load(), 2)][-4:] == best[-4:] and min(best[-4:]) > 0


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_shared_prefix_is_found_again_after_a_flood_of_others(is_announced: bool):
    """Though its state went, and though those of the flood and of others between are newer than it was."""

    def load() -> Iterator[Wave]:
        texts = Texts()
        common, points = texts.behind(None, 100), (100,) if is_announced else ()
        for is_shared in (True, *[False] * 10, *[True, False] * 7):
            prompt = texts.behind(common if is_shared else None, 40)
            yield [Asked(prompt, texts.answer(10), points if is_shared else (), turn_end=len(prompt))]

    found = [cached for length, cached in play(load(), 6) if length == 140]
    assert found[-4:] == [100] * 4
