"""The inner loops over bytes: states made when first met, steps, walks over the token trie. Compiled by numba.

A *state* is a set of positions that may come next on one level, END positions first. A *head* is a state and the frame
above it; the frames form a tree towards the bottom, -1. Equal frames are one, so equal stacks are equal numbers.

Nothing here allocates. Where an array is full a kernel stops, writes which into `counters[FULL]` and returns STOPPED;
`machine.py` enlarges it and calls again: what was made up to there is kept and is never wrong.

All kernels are in one file, because numba's cache sees only changes of the file that a function is in.
"""

from typing import NamedTuple

import numpy as np

from jsg.constrained.jit import (
    Bytes1,
    GivenBytes1,
    GivenInts1,
    GivenShorts2,
    GivenWords1,
    Ints1,
    Ints2,
    Longs1,
    Longs2,
    Shorts1,
    Words1,
    compiled,
    inner,
)
from jsg.constrained.tables import (
    ARGUMENT,
    BRANCH_BIT,
    BRANCH_LIST,
    BRANCHES,
    BRANCHES_END,
    BYTE,
    CALL,
    EMPTY_SEPARATOR,
    END_SEPARATOR,
    FOLLOW,
    KIND,
    LOOP,
    MAX,
    MIN,
    NO_SEPARATOR,
    NUM_REQUIRED,
    ONCE,
    REQUIRED,
    SEPARATOR,
    SEPARATOR_KIND,
    SET,
    UNBOUNDED,
    StaticTables,
)

STOPPED, TOO_DEEP, DEAD, UNKNOWN = -(1 << 30), -2, -1, 0

# Places in `counters`. First what is used of each array that grows, in the order of GROWING in machine.py.
STATES, MEMBERS, ACTIONS, FRAMES, ENTRIES, DEPTHS = range(6)
FULL, STAMP, LOWEST, VISITS, FUEL, MAX_STACK, MAX_HEADS, DROPPED, FROZEN, FROZEN_DEPTH, OFF_BOUNDARY, FAILED = range(
    6, 18
)
NUM_COUNTERS = 18
OUT_OF_FUEL, TOO_MANY_CALLS = 6, 7
"""Values of `counters[FULL]` beside the arrays: nothing can be enlarged."""

FIRST, LENGTH, ENDS = range(3)
"""Columns of `states`: where its members begin, how many they are, how many of them are ENDs."""

PARENT, RETURN, FRAME_LOOP, COUNT, MASK, DEPTH, SLOT = range(7)
"""Columns of `frames`. FRAME_LOOP is -1 for a call."""

MAX_CALLS = 1024
MAX_WORK = 256
WITH_SEPARATOR, MISSING_ONLY = 1, 2


class Memory(NamedTuple):
    """What a machine has made so far.

    Attributes:
        trans: int32[states, classes]: UNKNOWN, DEAD, a state + 1, or -(place in `actions` + 2).
        states: int32[states, 3].
        members: int32[...], positions.
        actions: int32[...]: (target state or -1, number of entries, (kind, first list or loop, return state) of each).
        frames: int64[frames, 7].
        state_index, frame_index: int32[2^n], hash tables of numbers, -1 where free.
        entries: int64[2^n, 4]: (loop + 1, mask, flags, state), a hash table.
        list_state: int32[lists], the state of each list or -1.
        marks: int64[positions], the stamp of the last set that a position was put into.
        gather: int32[positions], the set that is being made.
        calls: int32[MAX_CALLS, 2], (kind, argument) of what a byte may enter.
        work: int32[MAX_WORK, 2], heads that one byte still has to be read by.
        heads: int32[rows, 1 + 2 * heads], their number and (state, frame) of each; the last row is for trying.
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
    calls: Ints2
    work: Ints2
    heads: Ints2
    counters: Longs1


# -- States


@inner
def gather_list(t: StaticTables, m: Memory, number: int, size: int) -> int:
    """Adds the positions of a list to the set that is being made; returns its new size."""
    stamp = m.counters[STAMP]
    for k in range(t.list_start[number], t.list_start[number + 1]):
        position = t.list_items[k]
        if m.marks[position] != stamp:
            m.marks[position] = stamp
            m.gather[size] = position
            size += 1
    return size


@inner
def mixed(value: int) -> int:
    """A number in [0, 2^32) that differs much where values differ little."""
    value = (np.int64(value) * 2654435761) & 0xFFFFFFFF
    return value ^ (value >> 15)


@inner
def make_state(t: StaticTables, m: Memory, size: int) -> int:
    """The number of the state whose positions are in `gather` and bear the current stamp."""
    counters, stamp = m.counters, m.counters[STAMP]
    total, ends = size, 0
    for k in range(size):
        position = m.gather[k]
        total += mixed(np.int64(position) + 1)
        if t.positions[position, KIND] > LOOP:
            m.gather[k], m.gather[ends] = m.gather[ends], position
            ends += 1
    slot = mixed(total & 0xFFFFFFF) & (len(m.state_index) - 1)
    while m.state_index[slot] >= 0:
        state = m.state_index[slot]
        if m.states[state, LENGTH] == size:
            begin, same = m.states[state, FIRST], 0
            while same < size and m.marks[m.members[begin + same]] == stamp:
                same += 1
            if same == size:
                return state
        slot = (slot + 1) & (len(m.state_index) - 1)
    state, begin = counters[STATES], counters[MEMBERS]
    if state >= len(m.states):
        counters[FULL] = STATES
        return STOPPED
    if begin + size > len(m.members):
        counters[FULL] = MEMBERS
        return STOPPED
    for k in range(size):
        m.members[begin + k] = m.gather[k]
    m.states[state, FIRST] = begin
    m.states[state, LENGTH] = size
    m.states[state, ENDS] = ends
    m.state_index[slot] = state
    counters[STATES] += 1
    counters[MEMBERS] += size
    return state


@compiled
def state_of_list(t: StaticTables, m: Memory, number: int) -> int:
    """The state of the positions in a list."""
    state = m.list_state[number]
    if state < 0:
        m.counters[STAMP] += 1
        state = make_state(t, m, gather_list(t, m, number, 0))
        if state >= 0:
            m.list_state[number] = state
    return state


@inner
def state_in_loop(t: StaticTables, m: Memory, loop: int, mask: int, flags: int) -> int:
    """The state in which the next item of a loop, or with WITH_SEPARATOR the separator before it, begins.

    `mask` holds the items that may not be repeated and were there; with MISSING_ONLY only required ones may come.
    """
    kind = t.loops[loop, SEPARATOR_KIND]
    if flags & WITH_SEPARATOR and kind != EMPTY_SEPARATOR:
        if kind != NO_SEPARATOR:
            return state_of_list(t, m, t.loops[loop, SEPARATOR])
        flags -= WITH_SEPARATOR
    begin, end = t.loops[loop, BRANCHES], t.loops[loop, BRANCHES_END]
    if end - begin == 1 and flags == 0:
        return state_of_list(t, m, t.branches[begin, BRANCH_LIST])
    slots = len(m.entries) - 1
    slot = (mixed(loop * 4 + flags) + mixed(mask & 0xFFFFFFF) + mixed((mask >> 28) & 0xFFFFFFF)) + ((mask >> 56) & 255)
    slot &= slots
    while m.entries[slot, 0] != 0:
        if m.entries[slot, 0] == loop + 1 and m.entries[slot, 1] == mask and m.entries[slot, 2] == flags:
            return m.entries[slot, 3]
        slot = (slot + 1) & slots
    if 2 * m.counters[ENTRIES] >= len(m.entries):
        m.counters[FULL] = ENTRIES
        return STOPPED
    m.counters[STAMP] += 1
    size = 0
    if flags & WITH_SEPARATOR:
        size = gather_list(t, m, t.loops[loop, SEPARATOR], size)
    for branch in range(begin, end):
        bit = t.branches[branch, BRANCH_BIT]
        is_missing = (bit & t.loops[loop, REQUIRED]) != 0
        if bit & mask == 0 and (is_missing or not flags & MISSING_ONLY):
            size = gather_list(t, m, t.branches[branch, BRANCH_LIST], size)
    state = make_state(t, m, size)
    if state >= 0:
        m.entries[slot, 0] = loop + 1
        m.entries[slot, 1] = mask
        m.entries[slot, 2] = flags
        m.entries[slot, 3] = state
        m.counters[ENTRIES] += 1
    return state


@inner
def follow_all(t: StaticTables, m: Memory, state: int, klass: int, kind: int, argument: int) -> int:
    """The state after the positions of a state that hold the class and are of this kind and argument; -1 if none."""
    found, only = 0, -1
    begin = m.states[state, FIRST]
    for phase in range(2):
        size = 0
        if phase == 1:
            if found == 0:
                return -1
            if found == 1:
                return state_of_list(t, m, only)
            m.counters[STAMP] += 1
        for k in range(begin + m.states[state, ENDS], begin + m.states[state, LENGTH]):
            position = m.members[k]
            if t.sets[t.positions[position, SET], klass] == 0 or t.positions[position, KIND] != kind:
                continue
            if kind != BYTE and t.positions[position, ARGUMENT] != argument:
                continue
            follow = t.positions[position, FOLLOW]
            if phase == 1:
                size = gather_list(t, m, follow, size)
            elif follow != only:
                only = follow
                found += 1
    return make_state(t, m, size)


@inner
def expand(t: StaticTables, m: Memory, state: int, klass: int) -> int:
    """Works out what a state does on a class of bytes; returns and keeps its entry of `trans`.

    Positions that call the same rule become one entry that returns to all that may follow any of them.
    """
    begin, num_calls = m.states[state, FIRST], 0
    for k in range(begin + m.states[state, ENDS], begin + m.states[state, LENGTH]):
        position = m.members[k]
        kind = t.positions[position, KIND]
        if kind == BYTE or t.sets[t.positions[position, SET], klass] == 0:
            continue
        argument, known = t.positions[position, ARGUMENT], False
        for i in range(num_calls):
            if m.calls[i, 0] == kind and m.calls[i, 1] == argument:
                known = True
                break
        if not known:
            if num_calls == MAX_CALLS:
                m.counters[FULL] = TOO_MANY_CALLS
                return STOPPED
            m.calls[num_calls, 0] = kind
            m.calls[num_calls, 1] = argument
            num_calls += 1
    target = follow_all(t, m, state, klass, BYTE, 0)
    if target == STOPPED:
        return STOPPED
    if num_calls == 0 and m.states[state, ENDS] == 0:
        code = target + 1 if target >= 0 else DEAD
    elif num_calls == 0 and target < 0:
        code = -2  # the first action: nothing but the ENDs
    else:
        place = m.counters[ACTIONS]
        if place + 2 + 3 * num_calls > len(m.actions):
            m.counters[FULL] = ACTIONS
            return STOPPED
        for i in range(num_calls):
            back = follow_all(t, m, state, klass, m.calls[i, 0], m.calls[i, 1])
            if back == STOPPED:
                return STOPPED
            m.actions[place + 2 + 3 * i] = m.calls[i, 0]
            m.actions[place + 3 + 3 * i] = m.calls[i, 1]
            m.actions[place + 4 + 3 * i] = back
        m.actions[place] = target
        m.actions[place + 1] = num_calls
        m.counters[ACTIONS] += 2 + 3 * num_calls
        code = -(place + 2)
    m.trans[state, klass] = code
    return code


# -- Frames


@inner
def frame_slot(m: Memory, parent: int, back: int, loop: int, count: int, mask: int) -> int:
    """Where in `frame_index` a frame is, or would be."""
    slots = len(m.frame_index) - 1
    slot = mixed((mixed(parent + 2) + mixed(back * 3 + 1) + mixed(loop + 7)) & 0xFFFFFFF)
    slot += mixed(count & 0xFFFFFFF) + mixed((mask & 0xFFFFFFF) ^ ((mask >> 32) & 0xFFFFFFF))
    slot &= slots
    while m.frame_index[slot] >= 0:
        row = m.frames[m.frame_index[slot]]
        if (
            row[PARENT] == parent
            and row[RETURN] == back
            and row[COUNT] == count
            and row[FRAME_LOOP] == loop
            and row[MASK] == mask
        ):
            break
        slot = (slot + 1) & slots
    return slot


@inner
def make_frame(m: Memory, parent: int, back: int, loop: int, count: int, mask: int) -> int:
    """The number of the frame; TOO_DEEP where the stack would be."""
    depth = 1 if parent < 0 else m.frames[parent, DEPTH] + 1
    if depth > m.counters[MAX_STACK]:
        return TOO_DEEP
    slot = frame_slot(m, parent, back, loop, count, mask)
    frame = m.frame_index[slot]
    if frame >= 0:
        return frame
    frame = m.counters[FRAMES]
    if frame >= len(m.frames):
        m.counters[FULL] = FRAMES
        return STOPPED
    m.frames[frame, PARENT] = parent
    m.frames[frame, RETURN] = back
    m.frames[frame, FRAME_LOOP] = loop
    m.frames[frame, COUNT] = count
    m.frames[frame, MASK] = mask
    m.frames[frame, DEPTH] = depth
    m.frames[frame, SLOT] = slot
    m.frame_index[slot] = frame
    m.counters[FRAMES] += 1
    return frame


@compiled
def forget_frames(m: Memory, keep: int) -> None:
    """Forgets all frames but the first `keep`. Last in, first out: so the hash table is as it was before them."""
    for frame in range(m.counters[FRAMES] - 1, keep - 1, -1):
        m.frame_index[m.frames[frame, SLOT]] = -1
    m.counters[FRAMES] = keep


@compiled
def rebuild_indexes(m: Memory) -> None:
    """Fills empty hash tables of states and frames after they became larger."""
    for state in range(m.counters[STATES]):
        begin, size = m.states[state, FIRST], m.states[state, LENGTH]
        total = np.int64(size)
        for k in range(begin, begin + size):
            total += mixed(np.int64(m.members[k]) + 1)
        slot = mixed(total & 0xFFFFFFF) & (len(m.state_index) - 1)
        while m.state_index[slot] >= 0:
            slot = (slot + 1) & (len(m.state_index) - 1)
        m.state_index[slot] = state
    for frame in range(m.counters[FRAMES]):
        row = m.frames[frame]
        slot = frame_slot(m, row[PARENT], row[RETURN], row[FRAME_LOOP], row[COUNT], row[MASK])
        m.frame_index[slot] = frame
        row[SLOT] = slot


# -- Steps


@inner
def add_head(m: Memory, row: int, state: int, frame: int) -> None:
    """Adds a head to a row, once; where the row is full the head is dropped."""
    number = m.heads[row, 0]
    for k in range(number):
        if m.heads[row, 1 + 2 * k] == state and m.heads[row, 2 + 2 * k] == frame:
            return
    if number == m.counters[MAX_HEADS]:
        m.counters[DROPPED] += 1
        return
    m.heads[row, 1 + 2 * number] = state
    m.heads[row, 2 + 2 * number] = frame
    m.heads[row, 0] = number + 1


@inner
def add_work(m: Memory, size: int, state: int, frame: int) -> int:
    """Adds a head that the byte has still to be read by, once; returns how many there are."""
    for k in range(size):
        if m.work[k, 0] == state and m.work[k, 1] == frame:
            return size
    if size == MAX_WORK:
        m.counters[DROPPED] += 1
        return size
    m.work[size, 0] = state
    m.work[size, 1] = frame
    return size + 1


@inner
def may_finish(t: StaticTables, loop: int, count: int, mask: int) -> bool:
    """A loop may end after so many items."""
    required = t.loops[loop, REQUIRED]
    return count >= t.loops[loop, MIN] and mask & required == required


@inner
def next_flags(t: StaticTables, loop: int, count: int, mask: int) -> int:
    """Flags for the next item of a loop after so many, or -1 where none may come.

    The slots that are left must do for the required items that are missing: where they just do, only these may come.
    """
    left = t.loops[loop, MAX] - count
    if left <= 0 or (t.loops[loop, ONCE] != 0 and mask & t.loops[loop, ONCE] == t.loops[loop, ONCE]):
        return -1
    if left > t.loops[loop, NUM_REQUIRED]:
        return 0
    missing = 0
    for branch in range(t.loops[loop, BRANCHES], t.loops[loop, BRANCHES_END]):
        if t.branches[branch, BRANCH_BIT] & t.loops[loop, REQUIRED] & ~mask:
            missing += 1
    return MISSING_ONLY if missing == left else 0


@inner
def turn(t: StaticTables, m: Memory, size: int, frame: int, branch: int) -> int:
    """An item of a loop has ended: adds what may come after it. Returns the size of the work, or STOPPED."""
    loop, count, mask = m.frames[frame, FRAME_LOOP], m.frames[frame, COUNT], m.frames[frame, MASK]
    frozen = m.counters[FROZEN]
    bit = t.branches[branch, BRANCH_BIT]
    if may_finish(t, loop, count + 1, mask | bit):
        size = add_work(m, size, m.frames[frame, RETURN], m.frames[frame, PARENT])
    if frozen > 0:
        # One item per character at most: where so many fit, and none excludes another, the count may stay as it is.
        needed = frozen + 1 if m.frames[frame, DEPTH] <= m.counters[FROZEN_DEPTH] else frozen
        if m.counters[OFF_BOUNDARY] or bit or t.loops[loop, REQUIRED] or t.loops[loop, MAX] - count < needed:
            m.counters[FAILED] = 1
            return size
    else:
        count += 1
        if t.loops[loop, MAX] == UNBOUNDED and count > t.loops[loop, MIN]:
            count = t.loops[loop, MIN]
        mask |= bit
    flags = next_flags(t, loop, count, mask)
    if flags < 0:
        return size
    state = state_in_loop(t, m, loop, mask, flags | WITH_SEPARATOR)
    if state == STOPPED:
        return STOPPED
    after = make_frame(m, m.frames[frame, PARENT], m.frames[frame, RETURN], loop, count, mask)
    if after == STOPPED:
        return STOPPED
    return add_work(m, size, state, after)


@inner
def end_level(t: StaticTables, m: Memory, size: int, state: int, frame: int) -> int:
    """The level of a state may end here: adds what may come after it. Returns the size of the work, or STOPPED."""
    depth = 0 if frame < 0 else m.frames[frame, DEPTH]
    if depth < m.counters[LOWEST]:
        m.counters[LOWEST] = depth
    if frame < 0:
        return size
    loop = m.frames[frame, FRAME_LOOP]
    if loop < 0:
        return add_work(m, size, m.frames[frame, RETURN], m.frames[frame, PARENT])
    begin = m.states[state, FIRST]
    for k in range(begin, begin + m.states[state, ENDS]):
        position = m.members[k]
        if t.positions[position, KIND] == END_SEPARATOR:
            mask = m.frames[frame, MASK]
            flags = next_flags(t, loop, m.frames[frame, COUNT], mask)
            item = state_in_loop(t, m, loop, mask, flags)
            if item == STOPPED:
                return STOPPED
            size = add_work(m, size, item, frame)
        else:
            size = turn(t, m, size, frame, t.positions[position, ARGUMENT])
        if size == STOPPED:
            return STOPPED
    return size


@inner
def enter(t: StaticTables, m: Memory, size: int, frame: int, action: int) -> int:
    """Adds the rule or loop of an action's entry. Returns the size of the work, or STOPPED."""
    number, back = m.actions[action + 1], m.actions[action + 2]
    if m.actions[action] == CALL:
        state = state_of_list(t, m, number)
        is_tail = m.states[back, LENGTH] == 1 and m.members[m.states[back, FIRST]] == 0
        # Nothing is left to do after the call: its end is the end of the caller.
        above = frame if is_tail else make_frame(m, frame, back, -1, 0, 0)
    else:
        state = state_in_loop(t, m, number, 0, next_flags(t, number, 0, 0))
        above = make_frame(m, frame, back, number, 0, 0)
    if state == STOPPED or above == STOPPED:
        return STOPPED
    return size if above == TOO_DEEP else add_work(m, size, state, above)


@inner
def step(t: StaticTables, m: Memory, state: int, frame: int, klass: int, row: int) -> int:
    """Adds to a row of heads what a head becomes by a byte of a class; returns 0, or STOPPED."""
    size = add_work(m, 0, state, frame)
    done = 0
    while done < size:
        state, frame = m.work[done, 0], m.work[done, 1]
        done += 1
        code = m.trans[state, klass]
        if code == UNKNOWN:
            code = expand(t, m, state, klass)
            if code == STOPPED:
                return STOPPED
        if code > 0:
            add_head(m, row, code - 1, frame)
        elif code < DEAD:
            action = -code - 2
            if m.actions[action] >= 0:
                add_head(m, row, m.actions[action], frame)
            for k in range(m.actions[action + 1]):
                size = enter(t, m, size, frame, action + 2 + 3 * k)
                if size == STOPPED:
                    return STOPPED
            if m.states[state, ENDS] > 0:
                size = end_level(t, m, size, state, frame)
                if size == STOPPED:
                    return STOPPED
    return 0


@inner
def step_row(t: StaticTables, m: Memory, source: int, klass: int, row: int) -> int:
    """All heads of a row by a byte of a class, into another row; returns how many come out, or STOPPED."""
    m.heads[row, 0] = 0
    for k in range(m.heads[source, 0]):
        if step(t, m, m.heads[source, 1 + 2 * k], m.heads[source, 2 + 2 * k], klass, row) == STOPPED:
            return STOPPED
    return m.heads[row, 0]


@compiled
def advance(t: StaticTables, m: Memory, data: GivenBytes1) -> int:
    """Reads bytes from the heads in row 0; returns the row with those after them (-1: not possible), or STOPPED."""
    row = 0
    for k in range(len(data)):
        number = step_row(t, m, row, t.classes[data[k]], 1 - row)
        if number == STOPPED:
            return STOPPED
        if number == 0:
            return -1
        row = 1 - row
    return row


# -- Questions about the heads in row 0


@compiled
def is_accepting(t: StaticTables, m: Memory) -> bool:
    """The text may end here: from some head one level after another may end, down to the bottom."""
    for k in range(m.heads[0, 0]):
        state, frame = m.heads[0, 1 + 2 * k], np.int64(m.heads[0, 2 + 2 * k])
        while m.states[state, ENDS] > 0:
            if frame < 0:
                return True
            loop = m.frames[frame, FRAME_LOOP]
            ends = loop < 0
            begin = m.states[state, FIRST]
            for i in range(begin, begin + m.states[state, ENDS]):
                position = m.members[i]
                if loop >= 0 and t.positions[position, KIND] != END_SEPARATOR:
                    bit = t.branches[t.positions[position, ARGUMENT], BRANCH_BIT]
                    ends = ends or may_finish(t, loop, m.frames[frame, COUNT] + 1, m.frames[frame, MASK] | bit)
            if not ends:
                break
            state, frame = m.frames[frame, RETURN], m.frames[frame, PARENT]
    return False


@compiled
def possible_classes(t: StaticTables, m: Memory, most: int, out: Bytes1) -> int:
    """Marks in uint8[classes] what may come next; returns how many, at most `most`, or STOPPED."""
    found = 0
    for klass in range(t.sets.shape[1]):
        number = step_row(t, m, 0, klass, 1)
        if number == STOPPED:
            return STOPPED
        out[klass] = number > 0
        found += number > 0
        if found == most:
            break
    return found


@compiled
def walk(
    t: StaticTables,
    m: Memory,
    byte: GivenBytes1,
    depth: GivenWords1,
    skip: GivenInts1,
    token_start: GivenInts1,
    tokens: GivenInts1,
    mask: Words1,
) -> int:
    """Sets the bit of every token of a trie that may come next; returns 0, or STOPPED. Row d is for nodes of depth d."""
    heads, trans, classes, rows = m.heads, m.trans, t.classes, len(m.heads)
    node, visits = 1, 0
    while node < len(byte):
        row, klass = np.int64(depth[node]), classes[byte[node]]
        if row >= rows:
            m.counters[FULL] = DEPTHS
            return STOPPED
        visits += heads[row - 1, 0]
        if visits > m.counters[FUEL]:
            m.counters[FULL] = OUT_OF_FUEL
            return STOPPED
        code = trans[heads[row - 1, 1], klass] if heads[row - 1, 0] == 1 else UNKNOWN
        if code > 0:
            heads[row, 0] = 1
            heads[row, 1] = code - 1
            heads[row, 2] = heads[row - 1, 2]
        elif code == DEAD:
            node = skip[node]
            continue
        else:
            number = step_row(t, m, row - 1, klass, row)
            if number == STOPPED:
                return STOPPED
            if number == 0:
                node = skip[node]
                continue
        for k in range(token_start[node], token_start[node + 1]):
            token = tokens[k]
            mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
        node += 1
    m.counters[VISITS] = visits
    return 0


@inner
def copy_heads(source: Ints2, row: int, target: Ints2, target_row: int, column: int) -> None:
    """Copies the heads of a row of one array into a row of another, from a column on."""
    for k in range(1 + 2 * source[row, 0]):
        target[target_row, column + k] = source[row, k]


@inner
def is_repeated(t: StaticTables, chars: GivenShorts2, state: int, byte: int) -> bool:
    """The byte before is of the same class and leads to the same state of characters."""
    return byte > 0 and t.classes[byte - 1] == t.classes[byte] and chars[state, byte - 1] == chars[state, byte]


@compiled
def accepts_all(t: StaticTables, m: Memory, chars: GivenShorts2, nodes: Ints2) -> int:
    """1 where every text that an automaton of characters spells may come next, as far as `counters[FROZEN]` characters.

    `chars` int16[states, 256] has -1 for what is not spelled; state 0 is a boundary between characters. It explores pairs
    of a state of it and heads, which are kept in `nodes`, int32[..., 2 + 2 * heads]. 0: it is not so, or not known.
    """
    nodes[0, 0] = 0
    copy_heads(m.heads, 0, nodes, 0, 1)
    done, size = 0, 1
    while done < size:
        m.counters[OFF_BOUNDARY] = nodes[done, 0] != 0
        for byte in range(256):
            spelled, klass = chars[nodes[done, 0], byte], t.classes[byte]
            if spelled < 0 or is_repeated(t, chars, nodes[done, 0], byte):
                continue
            for k in range(1 + 2 * nodes[done, 1]):
                m.heads[0, k] = nodes[done, 1 + k]
            number = step_row(t, m, 0, klass, 1)
            if number == STOPPED:
                return STOPPED
            if number == 0 or m.counters[FAILED]:
                return 0
            if size == len(nodes):
                return 0
            # A new node, unless there is one that equals it.
            nodes[size, 0] = spelled
            copy_heads(m.heads, 1, nodes, size, 1)
            same = 0
            while True:
                k = 0
                while k < 2 + 2 * number and nodes[same, k] == nodes[size, k]:
                    k += 1
                if k == 2 + 2 * number:
                    break
                same += 1
            if same == size:
                size += 1
        done += 1
    return 1


@compiled
def forced_run(t: StaticTables, m: Memory, only_byte: Shorts1, out: Bytes1) -> int:
    """Writes the bytes that must come next one after another; returns how many, or STOPPED. Row 0 is then behind them.

    `only_byte` int16[classes] is the byte of a class that has no other, else -1.
    """
    for place in range(len(out)):
        if is_accepting(t, m):
            return place
        only = -1
        for klass in range(len(only_byte)):
            number = step_row(t, m, 0, klass, 1)
            if number == STOPPED:
                return STOPPED
            if number > 0:
                if only >= 0 or only_byte[klass] < 0:
                    return place
                only = klass
        if only < 0:
            return place
        step_row(t, m, 0, only, 1)
        copy_heads(m.heads, 1, m.heads, 0, 0)
        out[place] = only_byte[only]
    return len(out)
