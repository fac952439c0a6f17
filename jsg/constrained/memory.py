"""The arrays that a machine's kernels write to: made small, enlarged when a kernel says that one is full."""

import numpy as np

from jsg.constrained.kernels import (
    ACTIONS,
    DEPTHS,
    ENTRIES,
    FRAMES,
    FUEL,
    MAX_CALLS,
    MAX_HEADS,
    MAX_STACK,
    MAX_WORK,
    MEMBERS,
    NUM_COUNTERS,
    STATES,
    Memory,
)
from jsg.constrained.limits import Limits
from jsg.constrained.tables import StaticTables

_INDEX_SLOTS = 4  # of a hash table for each entry: few collisions
_ROWS = 130  # of heads: tokens of 128 bytes


def new_memory(static: StaticTables, limits: Limits) -> Memory:
    """The memory of a machine that has made nothing yet."""
    counters = np.zeros(NUM_COUNTERS, np.int64)
    counters[ACTIONS] = 2  # the first action enters nothing and leads nowhere
    counters[MAX_STACK] = limits.stack
    counters[MAX_HEADS] = limits.heads
    counters[FUEL] = limits.walk
    num_states = min(128, limits.states)
    actions = np.zeros(1024, np.int32)
    actions[0] = -1
    return Memory(
        trans=np.zeros((num_states, static.num_classes), np.int32),
        states=np.zeros((num_states, 3), np.int32),
        members=np.zeros(1024 + static.num_positions, np.int32),
        actions=actions,
        frames=np.zeros((128, 7), np.int64),
        state_index=_free_slots(num_states),
        frame_index=_free_slots(128),
        entries=np.zeros((64, 4), np.int64),
        list_state=np.full(len(static.list_start) - 1, -1, np.int32),
        marks=np.zeros(static.num_positions, np.int64),
        gather=np.zeros(static.num_positions, np.int32),
        calls=np.zeros((MAX_CALLS, 2), np.int32),
        work=np.zeros((MAX_WORK, 2), np.int32),
        heads=np.zeros((_ROWS, 1 + 2 * limits.heads), np.int32),
        counters=counters,
    )


def enlarged(memory: Memory, which: int, most_states: int) -> Memory:
    """The same memory with twice the room in one of its parts; hash tables of states and frames are empty then."""
    if which == STATES:
        size = min(2 * len(memory.states), most_states)
        memory = memory._replace(trans=_longer(memory.trans, size), states=_longer(memory.states, size))
    elif which == MEMBERS:
        memory = memory._replace(members=_longer(memory.members, 2 * len(memory.members)))
    elif which == ACTIONS:
        memory = memory._replace(actions=_longer(memory.actions, 2 * len(memory.actions)))
    elif which == FRAMES:
        memory = memory._replace(frames=_longer(memory.frames, 2 * len(memory.frames)))
    elif which == ENTRIES:
        # Only a memo: what is forgotten is found again.
        memory = memory._replace(entries=np.zeros((2 * len(memory.entries), 4), np.int64))
        memory.counters[ENTRIES] = 0
    elif which == DEPTHS:
        memory = memory._replace(heads=_longer(memory.heads, 2 * len(memory.heads)))
    return _without_indexes(memory)


def with_frames(memory: Memory, frames: np.ndarray) -> Memory:
    """The same memory with these frames instead of its own; its hash tables are empty then."""
    memory.counters[FRAMES] = len(frames)
    return _without_indexes(memory._replace(frames=_longer(frames, max(128, 2 * len(frames)))))


def _without_indexes(memory: Memory) -> Memory:
    return memory._replace(state_index=_free_slots(len(memory.states)), frame_index=_free_slots(len(memory.frames)))


def _free_slots(num_entries: int) -> np.ndarray:
    """An empty hash table for so many entries; its length is a power of two."""
    return np.full(1 << (_INDEX_SLOTS * num_entries - 1).bit_length(), -1, np.int32)


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    """The array, with zeros after it up to a number of rows."""
    result = np.zeros((size, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result
