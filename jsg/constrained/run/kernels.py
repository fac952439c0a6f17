"""The inner loops over bytes: they read texts, walk over the token trie, and find out what may come next.

As in `steps.py`, a row of `Memory.heads` holds the heads at one place of the text, and nothing allocates. A kernel that
returns STOPPED asks its caller to enlarge the array that is full and to call it again. Steps are paid for as in
`states.py`.
"""

import numpy as np

from jsg.constrained.jit import (
    Bytes1,
    GivenBytes1,
    GivenInts1,
    GivenShorts2,
    GivenWords1,
    Ints1,
    Ints2,
    Kernels,
    Shorts1,
    Words1,
    compiled,
    inner,
)
from jsg.constrained.run.levels import ended_levels, finished_state, may_finish
from jsg.constrained.run.memory import (
    COUNT,
    DEAD,
    DEPTHS,
    ENDS,
    FAILED,
    FIRST,
    FRAME_LOOP,
    FUEL,
    FULL,
    HEADS,
    MASK,
    OFF_BOUNDARY,
    PARENT,
    RETURN,
    SIBLING,
    STOPPED,
    TOO_MUCH_WORK,
    UNKNOWN,
    Memory,
)
from jsg.constrained.run.states import expand_plain, is_out_of_fuel, mixed
from jsg.constrained.run.steps import step_heads, step_row
from jsg.constrained.tables import ARGUMENT, BRANCH_BIT, END_SEPARATOR, KIND, StaticTables

_VISIT_STEPS = 8
"""Steps that a visit to a node of a trie costs."""
_MOST_TEXT_STEPS = 600_000
"""The most steps for each head to find out whether all ordinary text may come. A walk takes two or three million, and
both take more if the head is in a group."""
_MOST_GROUPED = 16


@compiled
def advance(t: StaticTables, m: Memory, data: GivenBytes1) -> int:
    """Reads bytes from the heads in row 0. Returns the row with the heads then, -1 if there are none, or STOPPED."""
    row = 0
    for k in range(len(data)):
        number = step_heads(t, m, row, int(t.classes[data[k]]), 1 - row)
        if number == STOPPED:
            return STOPPED
        if number == 0:
            return -1
        row = 1 - row
    return row


# -- Questions about the heads in row 0


@compiled
def is_accepting(t: StaticTables, m: Memory) -> int:
    """Whether the text may end here: 0, 1 or STOPPED. It may if all open levels of some head may end, one by one."""
    for k in range(m.heads[0, 0]):
        state, frame = m.heads[0, 1 + 2 * k], int(m.heads[0, 2 + 2 * k])
        while m.states[state, ENDS] > 0:
            m.counters[FUEL] -= 5 * m.states[state, ENDS] + 5
            if is_out_of_fuel(m):
                return STOPPED
            if frame < 0:
                return 1
            if m.frames[frame, SIBLING] >= 0:
                state = finished_state(t, m, ended_levels(t, m, state, int(frame)))
                if state == STOPPED:
                    return STOPPED
                if state < 0:
                    break
                frame = m.frames[frame, PARENT]
                continue
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
    return 0


@compiled
def possible_classes(t: StaticTables, m: Memory, most: int, out: Bytes1) -> int:
    """Marks in uint8[classes] the classes that may come next. Returns their number, at most `most`, or STOPPED."""
    found = 0
    for klass in range(t.sets.shape[1]):
        number = step_heads(t, m, 0, klass, 1)
        if number == STOPPED:
            return STOPPED
        out[klass] = number > 0
        found += number > 0
        if found == most:
            break
    return found


@compiled
def expand_heads(t: StaticTables, m: Memory) -> int:
    """Calls `expand_plain` for the states of the heads. Returns 0, or STOPPED."""
    for k in range(m.heads[0, 0]):
        if expand_plain(t, m, m.heads[0, 1 + 2 * k]) == STOPPED:
            return STOPPED
    return 0


@inner
def add_tokens(tokens: GivenInts1, begin: int, end: int, mask: Words1) -> None:
    """Sets the bits of some tokens of a trie."""
    for k in range(begin, end):
        token = tokens[k]
        mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)


@compiled
def walk(
    t: StaticTables,
    m: Memory,
    byte: GivenBytes1,
    depth: GivenWords1,
    skip: GivenInts1,
    token_start: GivenInts1,
    tokens: GivenInts1,
    first: GivenInts1,
    first_byte: GivenBytes1,
    mask: Words1,
) -> int:
    """Sets the bit of every token of a trie that may come next. Returns 0, or STOPPED. Row d is for depth d."""
    heads, trans, classes, rows, counters = m.heads, m.trans, t.classes, len(m.heads), m.counters
    for child in range(len(first)):
        counters[FUEL] -= 1
        if heads[0, 0] == 1 and trans[heads[0, 1], classes[first_byte[child]]] == DEAD:
            continue
        # All nodes from `begin` to `node` can be reached. Their tokens are neighbours, so they are added together.
        node = begin = int(first[child])
        end = skip[node]
        while node < end:
            row, klass = int(depth[node]), int(classes[byte[node]])
            if row >= rows:
                counters[FULL] = DEPTHS
                return STOPPED
            counters[FUEL] -= _VISIT_STEPS
            if is_out_of_fuel(m):
                return STOPPED
            code = UNKNOWN
            if heads[row - 1, 0] == 1:
                code = trans[heads[row - 1, 1], klass]
                if code == UNKNOWN:
                    if expand_plain(t, m, heads[row - 1, 1]) == STOPPED:
                        return STOPPED
                    code = trans[heads[row - 1, 1], klass]
            if code > 0:
                heads[row, 0] = 1
                heads[row, 1] = code - 1
                heads[row, 2] = heads[row - 1, 2]
                node += 1
                continue
            number = 0
            if code != DEAD:
                number = step_row(t, m, row - 1, klass, row)
                if number == STOPPED:
                    return STOPPED
            if number > 0:
                node += 1
                continue
            add_tokens(tokens, token_start[begin], token_start[node], mask)
            node = begin = int(skip[node])
        add_tokens(tokens, token_start[begin], token_start[node], mask)
    return 0


@inner
def copy_heads(source: Ints2, row: int, target: Ints2, target_row: int, column: int) -> None:
    """Copies the heads of a row of one array into a row of another, from a column on."""
    for k in range(1 + 2 * source[row, 0]):
        target[target_row, column + k] = source[row, k]


@inner
def find_node(m: Memory, nodes: Ints2, slots: Ints1, size: int, spelled: int) -> int:
    """Adds a node to `nodes` unless it is there: the heads in row 1 and the state `spelled` of the characters.

    `slots` int32[2^n] is a hash table of the nodes. Returns the number of nodes.
    """
    nodes[size, 0] = spelled
    copy_heads(m.heads, 1, nodes, size, 1)
    length, total = 2 + 2 * m.heads[1, 0], 0
    m.counters[FUEL] -= 4 * length
    for k in range(length):
        total += mixed(int(nodes[size, k]) * 64 + k)
    slot = mixed(total & 0xFFFFFFF) & (len(slots) - 1)
    while slots[slot] >= 0:
        same, k = slots[slot], 0
        while k < length and nodes[same, k] == nodes[size, k]:
            k += 1
        m.counters[FUEL] -= k
        if k == length:
            return size
        slot = (slot + 1) & (len(slots) - 1)
    slots[slot] = size
    return size + 1


@inner
def most_text_steps(m: Memory) -> int:
    """The most steps to find out whether all ordinary text may come after the heads in row 0."""
    ways = m.heads[0, 0]
    for k in range(m.heads[0, 0]):
        frame = np.int64(m.heads[0, 2 + 2 * k])
        while frame >= 0 and ways < _MOST_GROUPED * m.heads[0, 0]:
            frame = m.frames[frame, SIBLING]
            ways += frame >= 0
    return ways * _MOST_TEXT_STEPS


@inner
def has_too_many_ways(m: Memory) -> bool:
    """Whether a text has more heads than there is room for; `nodes` has none for them, either."""
    return m.counters[FULL] in (HEADS, TOO_MUCH_WORK)


@compiled
def spell(t: StaticTables, chars: GivenShorts2, starts: Ints1, spelled: Ints1) -> int:
    """Translates a set of characters to a grammar's classes of bytes, in the form for `accepts_all`.

    `chars` int16[states, 256] is as in `Slice.chars`. `starts` has room for states + 1 numbers, and `spelled` for as
    many as `chars` has entries. Returns how many of `spelled` are used.
    """
    size = 0
    for state in range(len(chars)):
        starts[state] = size
        for byte in range(256):
            after = int(chars[state, byte])
            if after >= 0:
                step, k = after * 256 + int(t.classes[byte]), size - 1
                while k >= starts[state] and spelled[k] != step:
                    k -= 1
                if k < starts[state]:
                    spelled[size] = step
                    size += 1
    starts[len(chars)] = size
    return size


@compiled
def accepts_all(t: StaticTables, m: Memory, starts: GivenInts1, spelled: GivenInts1, nodes: Ints2, slots: Ints1) -> int:
    """Proves that every text of at most `counters[FROZEN]` characters of a set may come next.

    The set is an automaton: from its state s, for each i from `starts[s]` to `starts[s + 1]`, bytes of class
    `spelled[i] & 255` lead to its state `spelled[i] >> 8`. State 0 is a boundary between characters. A node is a state
    of the automaton with heads, and a row of `nodes` int32[..., 2 + 2 * heads]. Returns the number of nodes, 0 if some
    text may not come or the proof needs too many heads, nodes or steps, or STOPPED.
    """
    for slot in range(len(slots)):
        slots[slot] = -1
    copy_heads(m.heads, 0, m.heads, 1, 0)
    done, size, least = 0, find_node(m, nodes, slots, 0, 0), m.counters[FUEL] - most_text_steps(m)
    while done < size:
        if m.counters[FUEL] < least:
            return 0
        m.counters[OFF_BOUNDARY] = nodes[done, 0] != 0
        is_single, before = nodes[done, 1] == 1, -1
        for k in range(1 + 2 * nodes[done, 1]):
            m.heads[0, k] = nodes[done, 1 + k]
        if is_out_of_fuel(m) or (is_single and expand_plain(t, m, nodes[done, 2]) == STOPPED):
            return STOPPED
        m.counters[FUEL] -= 2 * (starts[nodes[done, 0] + 1] - starts[nodes[done, 0]])
        for i in range(starts[nodes[done, 0]], starts[nodes[done, 0] + 1]):
            klass, after = spelled[i] & 255, spelled[i] >> 8
            code = m.trans[nodes[done, 2], klass] if is_single else UNKNOWN
            if code > 0:
                if code * 256 + after == before:
                    continue
                before = code * 256 + after
                m.heads[1, 0] = 1
                m.heads[1, 1] = code - 1
                m.heads[1, 2] = nodes[done, 3]
            else:
                number = step_heads(t, m, 0, klass, 1) if code != DEAD else 0
                if number == STOPPED and not has_too_many_ways(m):
                    return STOPPED
                if number <= 0 or m.counters[FAILED]:
                    return 0
            if size == len(nodes):
                return 0
            size = find_node(m, nodes, slots, size, after)
        done += 1
    return size


@compiled
def text_room(
    t: StaticTables, m: Memory, starts: GivenInts1, spelled: GivenInts1, nodes: Ints2, slots: Ints1, most: int
) -> int:
    """Finds the largest n up to `most` such that every text of n characters may come next. Returns 2 * n, or STOPPED.

    It returns 2 * n + 1 if no longer text may come. Each round reads one character. The arguments are as for
    `accepts_all`; nodes after the character of this round have -1 for the state of the characters. If there are too
    many heads, nodes or steps, the search ends as if some text could not come.
    """
    nodes[0, 0] = 0
    copy_heads(m.heads, 0, nodes, 0, 1)
    first, room, least = 1, 0, m.counters[FUEL] - most_text_steps(m)
    while room < most:
        for slot in range(len(slots)):
            slots[slot] = -1
        size, done = first, 0
        some, others = False, False  # whether some texts can continue, and whether others cannot
        while done < size:
            if nodes[done, 0] >= 0:
                for k in range(1 + 2 * nodes[done, 1]):
                    m.heads[0, k] = nodes[done, 1 + k]
                for i in range(starts[nodes[done, 0]], starts[nodes[done, 0] + 1]):
                    after = spelled[i] >> 8
                    number = step_heads(t, m, 0, spelled[i] & 255, 1)
                    if number == STOPPED:
                        return 2 * room if has_too_many_ways(m) else STOPPED
                    some = some or number > 0
                    others = others or number == 0
                    if (some and others) or size == len(nodes) or m.counters[FUEL] < least:
                        return 2 * room
                    if number > 0:
                        size = find_node(m, nodes, slots, size, after if after > 0 else -1)
            done += 1
        if others:
            return 2 * room + 1
        room += 1
        # The nodes after the character begin the next round. If this round began with the same nodes, every later
        # round will be like it.
        after = 0
        is_same = first == 1
        for i in range(first, size):
            if nodes[i, 0] < 0:
                for k in range(1, 2 + 2 * nodes[i, 1]):
                    is_same = is_same and after == 0 and nodes[0, k] == nodes[i, k]
                    nodes[after, k] = nodes[i, k]
                nodes[after, 0] = 0
                after += 1
        if is_same:
            return 2 * most
        first = after
    return 2 * room


@compiled
def forced_run(t: StaticTables, m: Memory, only_byte: Shorts1, least: int, out: Bytes1) -> int:
    """Writes the forced bytes to `out`. Returns their number, or STOPPED. Row 0 then has the heads after them.

    `only_byte` int16[classes] is the byte of each class that has a single byte, else -1. The kernel ends early when
    less than `least` fuel is left.
    """
    for place in range(len(out)):
        if m.counters[FUEL] < least:
            return place
        ends = is_accepting(t, m)
        if ends != 0:
            return STOPPED if ends == STOPPED else place
        is_single, state, only = m.heads[0, 0] == 1, m.heads[0, 1], -1
        m.counters[FUEL] -= len(only_byte)
        if is_single and expand_plain(t, m, state) == STOPPED:
            return STOPPED
        for klass in range(len(only_byte)):
            if is_single and m.trans[state, klass] == DEAD:
                continue
            number = step_heads(t, m, 0, klass, 1)
            if number == STOPPED:
                return STOPPED
            if number > 0:
                if only >= 0 or only_byte[klass] < 0:
                    return place
                only = klass
        if only < 0:
            return place
        if step_heads(t, m, 0, only, 1) == STOPPED:
            return STOPPED
        copy_heads(m.heads, 1, m.heads, 0, 0)
        out[place] = only_byte[only]
    return len(out)


run = Kernels(StaticTables, Memory)
"""Runs any kernel. It is made last, when all functions that it compiles are there."""
