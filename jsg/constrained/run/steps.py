"""Kernels that find out which heads a head becomes when it reads a byte. All other kernels read bytes through them.

A *head* is a state and the frame below it: one way to read a text. A row of `Memory.heads` has the heads at one place
of the text. As in `states.py`, nothing allocates, and STOPPED asks the caller to enlarge the array that is full and to
call again.
"""

from jsg.constrained.jit import inner
from jsg.constrained.run.levels import add_work, end_level, enter
from jsg.constrained.run.memory import DEAD, ENDS, FUEL, FULL, HEADS, LENGTH, MAX_HEADS, STOPPED, UNKNOWN, Memory
from jsg.constrained.run.states import expand, is_out_of_fuel, join_states
from jsg.constrained.tables import StaticTables

_ITEM_STEPS = 12
"""Steps that one head costs for one byte."""
_MOST_JOINED = 1024
"""The most positions of a joined state. Each join makes a state, so thousands of joins take quadratic time."""


@inner
def add_head(t: StaticTables, m: Memory, row: int, state: int, frame: int) -> int:
    """Adds a head to a row. It is joined with a head of the same frame, unless the two have many positions.

    Returns 0, or STOPPED.
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
        m.counters[FULL] = HEADS
        return STOPPED
    m.heads[row, 1 + 2 * number] = state
    m.heads[row, 2 + 2 * number] = frame
    m.heads[row, 0] = number + 1
    return 0


@inner
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
            if m.actions[action + 1] > 0:
                size = enter(t, m, size, frame, action)
                if size == STOPPED:
                    return STOPPED
            if m.states[state, ENDS] > 0:
                size = end_level(t, m, size, state, frame)
                if size == STOPPED:
                    return STOPPED
    return 0


@inner
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
