"""Where drafts are copied from: the newest longest repeat, as a search of every place finds it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jsg.sched.drafts.sources import (
    LONGEST,
    MOST_NAMESPACES,
    MOST_PLACES,
    PAST_TOKENS,
    SEPARATOR,
    Memories,
    Memory,
    copied,
    last_repeat,
)

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def _equal(text: list[int], place: int, tail: list[int]) -> int:
    """How many tokens before a place equal the end of the tail."""
    most = min(place, len(tail), LONGEST)
    return next((n for n in range(most) if text[place - 1 - n] != tail[-1 - n]), most)


@given(text=TOKENS, tail=TOKENS)
def test_the_newest_of_the_longest_repeats_is_found(text: list[int], tail: list[int]):
    lengths = {place: _equal(text, place, tail) for place in range(1, len(text) + 1)}
    longest = max(lengths.values())
    newest = max(place for place, length in lengths.items() if length == longest)
    found = last_repeat(np.array(text, np.int32), np.array(tail, np.int32))
    assert found == ((newest, longest) if longest else (0, 0))


def test_of_many_places_only_the_newest_are_compared():
    """So a text of equal tokens takes no longer than another one, whoever sends it."""
    text = np.array([8, 9, *[7, 9] * MOST_PLACES], np.int32)
    tail = np.array([8, 9], np.int32)
    assert last_repeat(text, tail) == (len(text), 1) and last_repeat(text[:-2], tail) == (2, 2)


def test_what_goes_on_to_the_end_of_the_text_repeats_itself():
    text = np.array([9, 1, 2, 3], np.int32)
    assert copied(text, 1, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert copied(text, 1, 2) == [1, 2] and copied(text, 4, 2) == []


@given(outputs=st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=5))
def test_past_outputs_are_the_last_ones_and_never_run_into_each_other(outputs: list[list[int]]):
    memory, said = Memory(), [*range(10, 10 + PAST_TOKENS - 32)]
    memory.outputs = np.array(said, np.int32)
    for output in outputs:
        memory.add(np.array(output, np.int32))
        said += [*output, SEPARATOR]
        text = memory.outputs
        assert text.tolist() == said[-PAST_TOKENS:] and text.dtype == np.int32
        assert copied(text, len(text) - 1 - len(output), 99) == output, "a copy ends with its output"


def test_namespaces_have_values_of_their_own_and_the_oldest_is_dropped():
    memories = Memories()
    memories.of("a").add(np.array([1], np.int32))
    assert memories.of("b").outputs.tolist() == [] and memories.of("a").outputs.tolist() == [1, SEPARATOR]
    for number in range(MOST_NAMESPACES - 1):
        memories.of(str(number))
    assert "a" in memories and "b" not in memories and len(memories) == MOST_NAMESPACES
