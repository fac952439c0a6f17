"""The arrays that a machine's kernels write to. They are small at first; one that a kernel calls full is enlarged."""

from typing import NamedTuple

import numpy as np

from jsg.constrained.jit import Ints1, Ints2, Longs1, Longs2
from jsg.constrained.limits import Limits
from jsg.constrained.tables import StaticTables

STOPPED, TOO_DEEP, DEAD, UNKNOWN = -(1 << 30), -2, -1, 0

# Indices of `counters`. The first of them count the used rows of each array that grows.
STATES, MEMBERS, ACTIONS, FRAMES, ENTRIES, DEPTHS, HEADS = range(7)
FULL, STAMP, LOWEST, FUEL, MAX_STACK, MAX_HEADS, FROZEN, FROZEN_DEPTH, OFF_BOUNDARY, FAILED = range(7, 17)
NEXT_COUNT, NEXT_MASK, CALLED = 17, 18, 19
NUM_COUNTERS = 20
OUT_OF_FUEL, TOO_MUCH_WORK = 7, 8
"""Values of `counters[FULL]` that name no array: nothing can be enlarged."""

FIRST, LENGTH, ENDS, IS_EXPANDED = range(4)
"""Columns of `states`: where the state's members begin, their number, how many of them are ENDs, and whether
`expand_plain` has filled the state's row of `trans`."""

PARENT, RETURN, FRAME_LOOP, COUNT, MASK, SIBLING, DEPTH, SLOT = range(8)
"""Columns of `frames`. FRAME_LOOP is -1 for a call; in a group it is -1 minus the END of the rule. SIBLING is the next
frame of the group, or -1."""

MAX_WORK = 1024
MOST_KEPT = 3
WITH_SEPARATOR, MISSING_ONLY = 1, 2


class Memory(NamedTuple):
    """Everything that a machine has made so far.

    Attributes:
        trans: int32[states, classes], what a state does on a class: UNKNOWN, DEAD, a state + 1, or
            -(index in `actions` + 2).
        states: int32[states, 4].
        members: int32[...], the positions of all states.
        actions: int32[...]: (target state or -1, number of entries, (kind, first list or loop, return state) of each).
        frames: int64[frames, 8].
        state_index, frame_index: int32[2^n], hash tables of numbers, -1 where free.
        entries: int64[2^n, 4], a hash table of (loop + 1, mask, flags, state) for `state_in_loop`.
        list_state: int32[lists], the state of each list or -1.
        marks: int64[positions], the stamp of the last set that each position was added to.
        gather: int32[positions], the set that is being made.
        work: int32[MAX_WORK + levels, 2], the heads that must still read the current byte; from MAX_WORK on (kind,
            argument) of each rule or loop that a byte may enter, or (frame, END) of each level of a group that may end.
        ended: int64[2^n, 5 + 2 * MOST_KEPT], what `end_group` found: (number of the call of a kernel, for which it
            holds, state, frame, OFF_BOUNDARY, number of heads, (state, frame) of each).
        heads: int32[rows, 1 + 2 * heads], in each row the number of heads, and (state, frame) of each.
        counters: int64[NUM_COUNTERS].
    """

    trans: Ints2
    states: Ints2
    members: Ints1
    actions: Ints1
    frames: Longs2
    state_index: Ints1
    frame_index: Ints1
    entries: Longs2
    list_state: Ints1
    marks: Longs1
    gather: Ints1
    work: Ints2
    ended: Longs2
    heads: Ints2
    counters: Longs1


_GROWING = {STATES: ("trans", "states"), MEMBERS: ("members",), ACTIONS: ("actions",), FRAMES: ("frames",)}
_INDEX_SLOTS = 4  # slots of a hash table for each entry, so that collisions are rare
_ROWS = 130  # rows of heads, enough for tokens of 128 bytes
_ENDED = 64
_HEADS = 32  # heads of a row, enough for nearly all grammars


def new_memory(static: StaticTables, limits: Limits) -> Memory:
    """The memory of a machine that has made nothing yet."""
    counters = np.zeros(NUM_COUNTERS, np.int64)
    counters[ACTIONS] = 2  # the first action enters nothing and leads nowhere
    counters[MAX_STACK] = limits.stack
    counters[MAX_HEADS] = min(_HEADS, limits.heads)
    counters[FUEL] = limits.mask_steps
    num_states = min(128, limits.states)
    actions = np.zeros(1024, np.int32)
    actions[0] = -1
    return Memory(
        trans=np.zeros((num_states, static.num_classes), np.int32),
        states=np.zeros((num_states, 4), np.int32),
        members=np.zeros(1024 + static.num_positions, np.int32),
        actions=actions,
        frames=np.zeros((128, 8), np.int64),
        state_index=_free_slots(num_states),
        frame_index=_free_slots(128),
        entries=np.zeros((64, 4), np.int64),
        list_state=np.full(len(static.list_start) - 1, -1, np.int32),
        marks=np.zeros(static.num_positions, np.int64),
        gather=np.zeros(static.num_positions, np.int32),
        work=np.zeros((MAX_WORK + static.num_levels, 2), np.int32),
        ended=np.zeros((_ENDED, 5 + 2 * MOST_KEPT), np.int64),
        heads=np.zeros((_ROWS, 1 + 2 * min(_HEADS, limits.heads)), np.int32),
        counters=counters,
    )


def num_bytes(memory: Memory) -> int:
    """How many bytes all arrays take."""
    return sum(array.nbytes for array in memory)


def enlarged(memory: Memory, which: int, limits: Limits, by: float = 2) -> Memory:
    """The same memory with more room in one of its arrays. The hash tables of states and frames are then empty.

    `by` is the factor. The table of entries and the rows and columns of heads are always doubled.
    """
    if which == ENTRIES:
        # The table is only a cache, so its contents are dropped.
        memory = memory._replace(entries=np.zeros((2 * len(memory.entries), 4), np.int64))
    elif which == DEPTHS:
        memory = memory._replace(heads=_longer(memory.heads, 2 * len(memory.heads)))
    elif which == HEADS:
        most = min(2 * int(memory.counters[MAX_HEADS]), limits.heads)
        heads = np.zeros((len(memory.heads), 1 + 2 * most), np.int32)
        heads[:, : memory.heads.shape[1]] = memory.heads
        memory = memory._replace(heads=heads)
        memory.counters[MAX_HEADS] = most
    else:
        names = _GROWING[which]
        size = int(by * len(getattr(memory, names[0])))
        size = min(size, limits.states) if which == STATES else size
        memory = memory._replace(**{name: _longer(getattr(memory, name), size) for name in names})
    return _without_indexes(memory)


def renewed(memory: Memory, static: StaticTables, limits: Limits, states: np.ndarray, frames: np.ndarray) -> Memory:
    """A new memory with only these states of `memory`, in this order, and these frames. Its hash tables are empty.

    The transitions of the states are not copied.
    """
    fresh = new_memory(static, limits)
    rows = memory.states[states]
    parts = [memory.members[first : first + length] for first, length, _, _ in rows.tolist()]
    members = np.concatenate(parts)
    rows[:, FIRST] = np.cumsum(rows[:, LENGTH]) - rows[:, LENGTH]
    rows[:, IS_EXPANDED] = 0
    room = min(2 * len(rows) + 128, limits.states)
    fresh = fresh._replace(
        trans=_longer(fresh.trans, room),
        states=_longer(rows, room),
        members=_longer(members, len(members) + len(fresh.members)),
        frames=_longer(frames, 2 * len(frames) + 128),
        heads=memory.heads,
    )
    fresh.counters[STATES], fresh.counters[MEMBERS], fresh.counters[FRAMES] = len(rows), len(members), len(frames)
    fresh.counters[MAX_HEADS], fresh.counters[FUEL] = memory.counters[MAX_HEADS], memory.counters[FUEL]
    return _without_indexes(fresh)


def _without_indexes(memory: Memory) -> Memory:
    return memory._replace(state_index=_free_slots(len(memory.states)), frame_index=_free_slots(len(memory.frames)))


def _free_slots(num_entries: int) -> np.ndarray:
    """An empty hash table for this number of entries. Its length is a power of two."""
    return np.full(1 << (_INDEX_SLOTS * num_entries - 1).bit_length(), -1, np.int32)


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    """The array, padded with zeros to `size` rows."""
    result = np.zeros((max(size, len(array)), *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result
