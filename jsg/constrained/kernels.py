"""The inner loops over bytes: steps, walks over the token trie, questions about what may come next.

A *head* is a state and the frame below it: one way to read a text. A row of `Memory.heads` holds those of one place.
As in `states.py` nothing allocates, and STOPPED means: enlarge what is full and call again.
"""

import numpy as np

from jsg.constrained.jit import (
    Bytes1,
    GivenBytes1,
    GivenInts1,
    GivenWords1,
    Ints1,
    Ints2,
    Shorts1,
    Words1,
    compiled,
    inlined,
    inner,
)
from jsg.constrained.memory import (
    COUNT,
    DEAD,
    DEPTH,
    DEPTHS,
    DROPPED,
    ENDS,
    FAILED,
    FIRST,
    FRAME_LOOP,
    FROZEN,
    FROZEN_DEPTH,
    FUEL,
    FULL,
    LENGTH,
    LOWEST,
    MASK,
    MAX_HEADS,
    MAX_WORK,
    MISSING_ONLY,
    OFF_BOUNDARY,
    OUT_OF_FUEL,
    PARENT,
    RETURN,
    STOPPED,
    TOO_DEEP,
    UNKNOWN,
    VISITS,
    WITH_SEPARATOR,
    Memory,
)
from jsg.constrained.states import expand, expand_plain, make_frame, mixed, state_in_loop, state_of_list
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

# -- Steps


@inlined
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


@inlined
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


@inlined
def may_finish(t: StaticTables, loop: int, count: int, mask: int) -> bool:
    """A loop may end after so many items."""
    required = t.loops[loop, REQUIRED]
    return count >= t.loops[loop, MIN] and mask & required == required


@inlined
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


@inlined
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


@inlined
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


@inlined
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


@inlined
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


@inlined
def step_row(t: StaticTables, m: Memory, source: int, klass: int, row: int) -> int:
    """All heads of a row by a byte of a class, into another row; returns how many come out, or STOPPED."""
    m.heads[row, 0] = 0
    for k in range(m.heads[source, 0]):
        if step(t, m, m.heads[source, 1 + 2 * k], m.heads[source, 2 + 2 * k], klass, row) == STOPPED:
            return STOPPED
    return m.heads[row, 0]


@inner
def step_heads(t: StaticTables, m: Memory, source: int, klass: int, row: int) -> int:
    """The same as `step_row`, for loops that are not so hot: one copy of it is compiled for all of them."""
    return step_row(t, m, source, klass, row)


@compiled
def advance(t: StaticTables, m: Memory, data: GivenBytes1) -> int:
    """Reads bytes from the heads in row 0; returns the row with those after them (-1: not possible), or STOPPED."""
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
        number = step_heads(t, m, 0, klass, 1)
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
    """Sets the bit of every token of a trie that may come next; returns 0, or STOPPED. Row d is for depth d."""
    heads, trans, classes, rows = m.heads, m.trans, t.classes, len(m.heads)
    node, visits = 1, 0
    while node < len(byte):
        row, klass = int(depth[node]), int(classes[byte[node]])
        if row >= rows:
            m.counters[FULL] = DEPTHS
            return STOPPED
        visits += heads[row - 1, 0]
        if visits > m.counters[FUEL]:
            m.counters[FULL] = OUT_OF_FUEL
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


@inlined
def copy_heads(source: Ints2, row: int, target: Ints2, target_row: int, column: int) -> None:
    """Copies the heads of a row of one array into a row of another, from a column on."""
    for k in range(1 + 2 * source[row, 0]):
        target[target_row, column + k] = source[row, k]


@inlined
def add_node(m: Memory, nodes: Ints2, size: int, spelled: int) -> int:
    """Adds row 1 of the heads with a state of the characters to `nodes`, once; returns how many there are."""
    nodes[size, 0] = spelled
    copy_heads(m.heads, 1, nodes, size, 1)
    same, k = 0, 0
    while True:
        k = 0
        while k < 2 + 2 * m.heads[1, 0] and nodes[same, k] == nodes[size, k]:
            k += 1
        if k == 2 + 2 * m.heads[1, 0]:
            break
        same += 1
    return size + 1 if same == size else size


@inlined
def find_node(m: Memory, nodes: Ints2, slots: Ints1, size: int, spelled: int) -> int:
    """The same as `add_node` with a hash table of nodes, `slots` int32[2^n]."""
    nodes[size, 0] = spelled
    copy_heads(m.heads, 1, nodes, size, 1)
    length, total = 2 + 2 * m.heads[1, 0], 0
    for k in range(length):
        total += mixed(int(nodes[size, k]) * 64 + k)
    slot = mixed(total & 0xFFFFFFF) & (len(slots) - 1)
    while slots[slot] >= 0:
        same, k = slots[slot], 0
        while k < length and nodes[same, k] == nodes[size, k]:
            k += 1
        if k == length:
            return size
        slot = (slot + 1) & (len(slots) - 1)
    slots[slot] = size
    return size + 1


@compiled
def accepts_all(t: StaticTables, m: Memory, starts: GivenInts1, spelled: GivenInts1, nodes: Ints2, slots: Ints1) -> int:
    """How many nodes it takes to see that every text of at most `counters[FROZEN]` of some characters may come next.

    The characters are an automaton: from its state s, for each i from `starts[s]` to `starts[s + 1]`, bytes of class
    `spelled[i] & 255` lead to its state `spelled[i] >> 8`; state 0 is a boundary between characters. A node, a row of
    `nodes` int32[..., 2 + 2 * heads], is a state of it and heads. Returns 0 where it is not so, or takes too many.
    """
    for slot in range(len(slots)):
        slots[slot] = -1
    copy_heads(m.heads, 0, m.heads, 1, 0)
    done, size = 0, find_node(m, nodes, slots, 0, 0)
    while done < size:
        m.counters[OFF_BOUNDARY] = nodes[done, 0] != 0
        is_single, before = nodes[done, 1] == 1, -1
        for k in range(1 + 2 * nodes[done, 1]):
            m.heads[0, k] = nodes[done, 1 + k]
        if is_single and expand_plain(t, m, nodes[done, 2]) == STOPPED:
            return STOPPED
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
                if number == STOPPED:
                    return STOPPED
                if number == 0 or m.counters[FAILED]:
                    return 0
            if size == len(nodes):
                return 0
            size = find_node(m, nodes, slots, size, after)
        done += 1
    return size


@compiled
def text_room(t: StaticTables, m: Memory, starts: GivenInts1, spelled: GivenInts1, nodes: Ints2, most: int) -> int:
    """Twice the number of characters, at most `most`, of which every text may come next; one more if no longer one may.

    One character a round. Arguments are as for `accepts_all`; heads behind the character of this round have -1 for a
    state of the characters. Too many ways to follow end it as if some text could not come.
    """
    nodes[0, 0] = 0
    copy_heads(m.heads, 0, nodes, 0, 1)
    first, room = 1, 0
    while room < most:
        size, done = first, 0
        some, others = False, False  # whether some texts can go on, and others cannot
        while done < size:
            if nodes[done, 0] >= 0:
                for k in range(1 + 2 * nodes[done, 1]):
                    m.heads[0, k] = nodes[done, 1 + k]
                for i in range(starts[nodes[done, 0]], starts[nodes[done, 0] + 1]):
                    after = spelled[i] >> 8
                    number = step_heads(t, m, 0, spelled[i] & 255, 1)
                    if number == STOPPED:
                        return STOPPED
                    some = some or number > 0
                    others = others or number == 0
                    if (some and others) or size == len(nodes):
                        return 2 * room
                    if number > 0:
                        size = add_node(m, nodes, size, after if after > 0 else -1)
            done += 1
        if others:
            return 2 * room + 1
        room += 1
        # What is behind the character becomes the next round. Where that is what this round began with, so are all.
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
def forced_run(t: StaticTables, m: Memory, only_byte: Shorts1, out: Bytes1) -> int:
    """Writes the bytes that must come next one after another; returns how many, or STOPPED. Row 0 is then behind them.

    `only_byte` int16[classes] is the byte of a class that has no other, else -1.
    """
    for place in range(len(out)):
        if is_accepting(t, m):
            return place
        only = -1
        for klass in range(len(only_byte)):
            number = step_heads(t, m, 0, klass, 1)
            if number == STOPPED:
                return STOPPED
            if number > 0:
                if only >= 0 or only_byte[klass] < 0:
                    return place
                only = klass
        if only < 0:
            return place
        step_heads(t, m, 0, only, 1)
        copy_heads(m.heads, 1, m.heads, 0, 0)
        out[place] = only_byte[only]
    return len(out)
