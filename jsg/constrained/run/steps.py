"""Kernels that find out which heads a head becomes when it reads a byte. All other kernels read bytes through them.

A *head* is a state and the frame below it: one way to read a text. A row of `Memory.heads` has the heads at one place
of the text. As in `states.py`, nothing allocates, and STOPPED asks the caller to enlarge the array that is full and to
call again.
"""

from jsg.constrained.jit import inlined, inner
from jsg.constrained.run.memory import (
    COUNT,
    DEAD,
    DEPTH,
    DROPPED,
    ENDS,
    FAILED,
    FIRST,
    FRAME_LOOP,
    FROZEN,
    FROZEN_DEPTH,
    FUEL,
    LENGTH,
    LOWEST,
    MASK,
    MAX_HEADS,
    MAX_WORK,
    MISSING_ONLY,
    OFF_BOUNDARY,
    PARENT,
    RETURN,
    STOPPED,
    TOO_DEEP,
    UNKNOWN,
    WITH_SEPARATOR,
    Memory,
)
from jsg.constrained.run.states import expand, is_out_of_fuel, join_states, make_frame, state_in_loop, state_of_list
from jsg.constrained.tables import (
    ARGUMENT,
    BRANCH_BIT,
    BRANCHES,
    BRANCHES_END,
    CALL,
    END_SEPARATOR,
    KIND,
    MAX,
    MIN,
    NUM_REQUIRED,
    ONCE,
    REQUIRED,
    UNBOUNDED,
    StaticTables,
)

_ITEM_STEPS = 12
"""Steps that one head costs for one byte."""
_MOST_JOINED = 1024
"""The most positions of a joined state. Each join makes a state, so thousands of joins take quadratic time."""


@inlined
def add_head(t: StaticTables, m: Memory, row: int, state: int, frame: int) -> int:
    """Adds a head to a row. It is joined with a head of the same frame, unless the two have many positions.

    If the row is full, the head is dropped. Returns 0, or STOPPED.
    """
    number = m.heads[row, 0]
    m.counters[FUEL] -= number >> 2
    for k in range(number):
        if m.heads[row, 2 + 2 * k] == frame:
            other = m.heads[row, 1 + 2 * k]
            if other == state:
                return 0
            if m.states[other, LENGTH] + m.states[state, LENGTH] <= _MOST_JOINED:
                joined = join_states(t, m, other, state)
                if joined == STOPPED:
                    return STOPPED
                m.heads[row, 1 + 2 * k] = joined
                return 0
    if number == m.counters[MAX_HEADS]:
        m.counters[DROPPED] += 1
        return 0
    m.heads[row, 1 + 2 * number] = state
    m.heads[row, 2 + 2 * number] = frame
    m.heads[row, 0] = number + 1
    return 0


@inlined
def add_work(m: Memory, size: int, state: int, frame: int) -> int:
    """Adds a head that must still read the byte, unless it is already there. Returns the number of such heads."""
    m.counters[FUEL] -= size >> 2
    for k in range(size):
        if m.work[k, 0] == state and m.work[k, 1] == frame:
            return size
    if size == MAX_WORK:
        m.counters[DROPPED] += 1
        return size
    m.work[size, 0] = state
    m.work[size, 1] = frame
    return size + 1


@inlined
def may_finish(t: StaticTables, loop: int, count: int, mask: int) -> bool:
    """Whether a loop may end after `count` items, of which `mask` has the bits."""
    required = t.loops[loop, REQUIRED]
    return count >= t.loops[loop, MIN] and mask & required == required


@inlined
def next_flags(t: StaticTables, m: Memory, loop: int, count: int, mask: int) -> int:
    """The flags for the next item of a loop after `count` items; -1 if no further item may come.

    The items up to the maximum must suffice for the required items that are missing. If all of them are needed for
    that, only missing items may come.
    """
    left = t.loops[loop, MAX] - count
    if left <= 0 or (t.loops[loop, ONCE] != 0 and mask & t.loops[loop, ONCE] == t.loops[loop, ONCE]):
        return -1
    if left > t.loops[loop, NUM_REQUIRED]:
        return 0
    missing = 0
    m.counters[FUEL] -= t.loops[loop, BRANCHES_END] - t.loops[loop, BRANCHES]
    for branch in range(t.loops[loop, BRANCHES], t.loops[loop, BRANCHES_END]):
        if t.branches[branch, BRANCH_BIT] & t.loops[loop, REQUIRED] & ~mask:
            missing += 1
    return MISSING_ONLY if missing == left else 0


@inlined
def turn(t: StaticTables, m: Memory, size: int, frame: int, branch: int) -> int:
    """Adds the heads that may come after an item of a loop has ended. Returns the size of the work, or STOPPED."""
    loop, count, mask = m.frames[frame, FRAME_LOOP], m.frames[frame, COUNT], m.frames[frame, MASK]
    frozen = m.counters[FROZEN]
    bit = t.branches[branch, BRANCH_BIT]
    if may_finish(t, loop, count + 1, mask | bit):
        size = add_work(m, size, m.frames[frame, RETURN], m.frames[frame, PARENT])
    if frozen > 0:
        # Each character ends at most one item. If the loop has room for them all, the count need not change.
        needed = frozen + 1 if m.frames[frame, DEPTH] <= m.counters[FROZEN_DEPTH] else frozen
        if m.counters[OFF_BOUNDARY] or bit or t.loops[loop, REQUIRED] or t.loops[loop, MAX] - count < needed:
            m.counters[FAILED] = 1
            return size
    else:
        count += 1
        if t.loops[loop, MAX] == UNBOUNDED and count > t.loops[loop, MIN]:
            count = t.loops[loop, MIN]
        mask |= bit
    flags = next_flags(t, m, loop, count, mask)
    if flags < 0:
        return size
    state = state_in_loop(t, m, loop, mask, flags | WITH_SEPARATOR)
    if state == STOPPED:
        return STOPPED
    after = make_frame(m, m.frames[frame, PARENT], m.frames[frame, RETURN], loop, count, mask)
    if after == STOPPED:
        return STOPPED
    return add_work(m, size, state, after)


@inlined
def end_level(t: StaticTables, m: Memory, size: int, state: int, frame: int) -> int:
    """Adds the heads after the level of a state, which may end here. Returns the size of the work, or STOPPED."""
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
            flags = next_flags(t, m, loop, m.frames[frame, COUNT], mask)
            item = state_in_loop(t, m, loop, mask, flags)
            if item == STOPPED:
                return STOPPED
            size = add_work(m, size, item, frame)
        else:
            size = turn(t, m, size, frame, t.positions[position, ARGUMENT])
        if size == STOPPED:
            return STOPPED
    return size


@inlined
def enter(t: StaticTables, m: Memory, size: int, frame: int, action: int) -> int:
    """Adds a head in the rule or loop that an action enters. Returns the size of the work, or STOPPED."""
    number, back = m.actions[action + 1], m.actions[action + 2]
    if m.actions[action] == CALL:
        state = state_of_list(t, m, number)
        is_tail = m.states[back, LENGTH] == 1 and m.members[m.states[back, FIRST]] == 0
        # If nothing follows the call in the caller, the end of the call is the end of the caller.
        above = frame if is_tail else make_frame(m, frame, back, -1, 0, 0)
    else:
        state = state_in_loop(t, m, number, 0, next_flags(t, m, number, 0, 0))
        above = make_frame(m, frame, back, number, 0, 0)
    if state == STOPPED or above == STOPPED:
        return STOPPED
    return size if above == TOO_DEEP else add_work(m, size, state, above)


@inlined
def step(t: StaticTables, m: Memory, state: int, frame: int, klass: int, row: int) -> int:
    """Adds to a row the heads that a head becomes by reading a byte of a class. Returns 0, or STOPPED."""
    size = add_work(m, 0, state, frame)
    done = 0
    while done < size:
        state, frame = m.work[done, 0], m.work[done, 1]
        done += 1
        m.counters[FUEL] -= _ITEM_STEPS
        if is_out_of_fuel(m):
            return STOPPED
        code = m.trans[state, klass]
        if code == UNKNOWN:
            code = expand(t, m, state, klass)
            if code == STOPPED:
                return STOPPED
        if code > 0:
            if add_head(t, m, row, code - 1, frame) == STOPPED:
                return STOPPED
        elif code < DEAD:
            action = -code - 2
            if m.actions[action] >= 0 and add_head(t, m, row, m.actions[action], frame) == STOPPED:
                return STOPPED
            for k in range(m.actions[action + 1]):
                size = enter(t, m, size, frame, action + 2 + 3 * k)
                if size == STOPPED:
                    return STOPPED
            if m.states[state, ENDS] > 0:
                size = end_level(t, m, size, state, frame)
                if size == STOPPED:
                    return STOPPED
    return 0


@inlined
def step_row(t: StaticTables, m: Memory, source: int, klass: int, row: int) -> int:
    """Lets all heads of a row read a byte of a class, into another row. Returns that row's size, or STOPPED."""
    m.heads[row, 0] = 0
    for k in range(m.heads[source, 0]):
        if step(t, m, m.heads[source, 1 + 2 * k], m.heads[source, 2 + 2 * k], klass, row) == STOPPED:
            return STOPPED
    return m.heads[row, 0]


@inner
def step_heads(t: StaticTables, m: Memory, source: int, klass: int, row: int) -> int:
    """`step_row` as a function that is not inlined, for loops in which the cost of a call does not matter."""
    return step_row(t, m, source, klass, row)
