"""Kernels that make states and frames, and find out what a state does on a byte. Equal states and frames are made once.

A *state* is a set of positions that may come next on one level; END positions come first. A *frame* is one level that
is open below the state. The frames form a tree whose root, the bottom of every stack, is -1. Equal frames have one
number, so equal stacks have one number too. Levels that one byte entered may be a *group*: frames with one parent, of
which each names the next. The positions of a state then belong to any level of the group (`groups.py`).

Nothing here allocates. If an array is full, a kernel writes its number into `counters[FULL]` and returns STOPPED;
`machine.py` enlarges the array and calls the kernel again. Everything made until then is valid and is kept.

Work is paid for in steps of `counters[FUEL]`, each of a nanosecond or two. A loop that could be long stops when no
steps are left. Short work only pays and does not stop, because such a loop stops soon after it.
"""

from jsg.constrained.jit import compiled, inner
from jsg.constrained.run.memory import (
    ACTIONS,
    COUNT,
    DEAD,
    DEPTH,
    ENDS,
    ENTRIES,
    FIRST,
    FRAME_LOOP,
    FRAMES,
    FUEL,
    FULL,
    IS_EXPANDED,
    LENGTH,
    MASK,
    MAX_STACK,
    MAX_WORK,
    MEMBERS,
    MISSING_ONLY,
    OUT_OF_FUEL,
    PARENT,
    RETURN,
    SIBLING,
    SLOT,
    STAMP,
    STATES,
    STOPPED,
    TOO_DEEP,
    UNKNOWN,
    WITH_SEPARATOR,
    Memory,
)
from jsg.constrained.tables import (
    ARGUMENT,
    BRANCH_BIT,
    BRANCH_LIST,
    BRANCHES,
    BRANCHES_END,
    BYTE,
    EMPTY_SEPARATOR,
    FOLLOW,
    KIND,
    LINK,
    LOOP,
    NO_SEPARATOR,
    REQUIRED,
    SEPARATOR,
    SEPARATOR_KIND,
    SET,
    StaticTables,
)

_NOWHERE, _SEVERAL = -1, -2
_FRAME_STEPS = 10


@inner
def is_out_of_fuel(m: Memory) -> bool:
    """Whether no steps are left. The kernel must then return STOPPED."""
    if m.counters[FUEL] >= 0:
        return False
    m.counters[FULL] = OUT_OF_FUEL
    return True


@inner
def gather_list(t: StaticTables, m: Memory, number: int, size: int) -> int:
    """Adds the positions of a list to the set in `gather`. Returns its new size."""
    stamp = m.counters[STAMP]
    m.counters[FUEL] -= 2 * (t.list_start[number + 1] - t.list_start[number])
    for k in range(t.list_start[number], t.list_start[number + 1]):
        position = t.list_items[k]
        if m.marks[position] != stamp:
            m.marks[position] = stamp
            m.gather[size] = position
            size += 1
    return size


@inner
def gather_state(m: Memory, state: int, size: int) -> int:
    """Adds the positions of a state to the set in `gather`. Returns its new size."""
    stamp, begin = m.counters[STAMP], m.states[state, FIRST]
    m.counters[FUEL] -= 2 * m.states[state, LENGTH]
    for k in range(begin, begin + m.states[state, LENGTH]):
        position = m.members[k]
        if m.marks[position] != stamp:
            m.marks[position] = stamp
            m.gather[size] = position
            size += 1
    return size


@inner
def mixed(value: int) -> int:
    """A hash in [0, 2^32). Values that differ little have very different hashes."""
    product = (int(value) * 2654435761) & 0xFFFFFFFF
    return product ^ (product >> 15)


@inner
def make_state(t: StaticTables, m: Memory, size: int) -> int:
    """The number of the state whose positions are in `gather` and have the current stamp, or STOPPED.

    The positions that a link stands for take its place. Its mark stays, so it is followed once.
    """
    counters, stamp = m.counters, m.counters[STAMP]
    k = 0
    while k < size:
        position = m.gather[k]
        if t.positions[position, KIND] == LINK:
            size -= 1
            m.gather[k] = m.gather[size]
            size = gather_list(t, m, t.positions[position, FOLLOW], size)
        else:
            k += 1
    counters[FUEL] -= 6 * size + 20
    if is_out_of_fuel(m):
        return STOPPED
    total, ends = size, 0
    for k in range(size):
        position = m.gather[k]
        total += mixed(int(position) + 1)
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
            counters[FUEL] -= same
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


@inner
def join_states(t: StaticTables, m: Memory, state: int, other: int) -> int:
    """The state with the positions of both states, or STOPPED."""
    m.counters[STAMP] += 1
    return make_state(t, m, gather_state(m, other, gather_state(m, state, 0)))


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
def gather_loop(t: StaticTables, m: Memory, loop: int, mask: int, flags: int, size: int) -> int:
    """Adds the positions that `state_in_loop` speaks of to the set in `gather`. Returns its new size."""
    if flags & WITH_SEPARATOR and t.loops[loop, SEPARATOR_KIND] != NO_SEPARATOR:
        size = gather_list(t, m, t.loops[loop, SEPARATOR], size)
        if t.loops[loop, SEPARATOR_KIND] != EMPTY_SEPARATOR:
            return size
    for branch in range(t.loops[loop, BRANCHES], t.loops[loop, BRANCHES_END]):
        bit = t.branches[branch, BRANCH_BIT]
        is_missing = (bit & t.loops[loop, REQUIRED]) != 0
        if bit & mask == 0 and (is_missing or not flags & MISSING_ONLY):
            size = gather_list(t, m, t.branches[branch, BRANCH_LIST], size)
    return size


@inner
def state_in_loop(t: StaticTables, m: Memory, loop: int, mask: int, flags: int) -> int:
    """The state in which the next item of a loop begins or, with WITH_SEPARATOR, the separator before it.

    `mask` has the bits of the items that occurred and may not be repeated. With MISSING_ONLY only required items may
    come.
    """
    kind = t.loops[loop, SEPARATOR_KIND]
    if flags & WITH_SEPARATOR and kind != EMPTY_SEPARATOR:
        if kind != NO_SEPARATOR:
            return state_of_list(t, m, t.loops[loop, SEPARATOR])
        flags -= WITH_SEPARATOR
    begin, end = t.loops[loop, BRANCHES], t.loops[loop, BRANCHES_END]
    if end - begin == 1 and flags == 0:
        state = int(m.list_state[t.branches[begin, BRANCH_LIST]])
        return state if state >= 0 else state_of_list(t, m, t.branches[begin, BRANCH_LIST])
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
    state = make_state(t, m, gather_loop(t, m, loop, mask, flags, 0))
    if state >= 0:
        m.entries[slot, 0] = loop + 1
        m.entries[slot, 1] = mask
        m.entries[slot, 2] = flags
        m.entries[slot, 3] = state
        m.counters[ENTRIES] += 1
    return state


@inner
def follow_all(t: StaticTables, m: Memory, state: int, klass: int, kind: int, argument: int) -> int:
    """The state after those positions of a state that allow the class and have this kind and argument; -1 if none."""
    found, only, size = 0, -1, 0
    begin = m.states[state, FIRST]
    m.counters[FUEL] -= 4 * m.states[state, LENGTH]
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
                if is_out_of_fuel(m):
                    return STOPPED
            elif follow != only:
                only = follow
                found += 1
    return make_state(t, m, size)


@inner
def expand(t: StaticTables, m: Memory, state: int, klass: int) -> int:
    """Finds out what a state does on a class of bytes. Stores the entry of `trans` and returns it, or STOPPED.

    Positions that call the same rule become one entry. It returns to the positions that may follow any of them.
    """
    begin, num_calls = m.states[state, FIRST], 0
    m.counters[FUEL] -= 2 * m.states[state, LENGTH] + 20
    for k in range(begin + m.states[state, ENDS], begin + m.states[state, LENGTH]):
        position = m.members[k]
        kind = t.positions[position, KIND]
        if kind == BYTE or t.sets[t.positions[position, SET], klass] == 0:
            continue
        argument, known = t.positions[position, ARGUMENT], False
        for i in range(num_calls):
            if m.work[MAX_WORK + i, 0] == kind and m.work[MAX_WORK + i, 1] == argument:
                known = True
                break
            m.counters[FUEL] -= 1
        if is_out_of_fuel(m):
            return STOPPED
        if not known:
            m.work[MAX_WORK + num_calls, 0] = kind
            m.work[MAX_WORK + num_calls, 1] = argument
            num_calls += 1
    target = follow_all(t, m, state, klass, BYTE, 0)
    if target == STOPPED:
        return STOPPED
    if num_calls == 0 and m.states[state, ENDS] == 0:
        code = target + 1 if target >= 0 else DEAD
    elif num_calls == 0 and target < 0:
        code = -2  # the first action, which does nothing: only the ENDs count
    else:
        place = m.counters[ACTIONS]
        if place + 2 + 3 * num_calls > len(m.actions):
            m.counters[FULL] = ACTIONS
            return STOPPED
        for i in range(num_calls):
            back = follow_all(t, m, state, klass, m.work[MAX_WORK + i, 0], m.work[MAX_WORK + i, 1])
            if back == STOPPED:
                return STOPPED
            m.actions[place + 2 + 3 * i] = m.work[MAX_WORK + i, 0]
            m.actions[place + 3 + 3 * i] = m.work[MAX_WORK + i, 1]
            m.actions[place + 4 + 3 * i] = back
        m.actions[place] = target
        m.actions[place + 1] = num_calls
        m.counters[ACTIONS] += 2 + 3 * num_calls
        code = -(place + 2)
    m.trans[state, klass] = code
    return code


@inner
def expand_plain(t: StaticTables, m: Memory, state: int) -> int:
    """Fills a state's row of `trans` for all classes that lead nowhere or, by bytes, to a single list.

    Returns 0, or STOPPED. A walk asks for most classes, and finding them one by one takes ten times as long.
    """
    if m.states[state, IS_EXPANDED] != 0:
        return 0
    begin, num_classes, is_plain = m.states[state, FIRST], t.sets.shape[1], m.states[state, ENDS] == 0
    m.counters[FUEL] -= (m.states[state, LENGTH] + 4) * num_classes
    if is_out_of_fuel(m):
        return STOPPED
    for klass in range(num_classes):
        m.work[klass, 0] = _NOWHERE
    for k in range(begin + m.states[state, ENDS], begin + m.states[state, LENGTH]):
        position = m.members[k]
        held = t.positions[position, SET]
        follow = t.positions[position, FOLLOW] if t.positions[position, KIND] == BYTE else _SEVERAL
        for klass in range(num_classes):
            if t.sets[held, klass] != 0:
                found = m.work[klass, 0]
                m.work[klass, 0] = follow if found in (_NOWHERE, follow) else _SEVERAL
    for klass in range(num_classes):
        follow = m.work[klass, 0]
        if m.trans[state, klass] != UNKNOWN or follow == _SEVERAL:
            continue
        if follow == _NOWHERE:
            m.trans[state, klass] = DEAD if is_plain else -2  # the first action, which does nothing: only ENDs count
        elif is_plain:
            target = state_of_list(t, m, follow)
            if target == STOPPED:
                return STOPPED
            m.trans[state, klass] = target + 1
    m.states[state, IS_EXPANDED] = 1
    return 0


# -- Frames


@inner
def frame_slot(m: Memory, parent: int, back: int, loop: int, count: int, mask: int, sibling: int) -> int:
    """The slot of `frame_index` that has the frame, or the free slot for it."""
    slots = len(m.frame_index) - 1
    slot = mixed((mixed(parent + 2) + mixed(back * 3 + 1) + mixed(loop + 7) + 5 * mixed(sibling + 2)) & 0xFFFFFFF)
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
            and row[SIBLING] == sibling
        ):
            break
        slot = (slot + 1) & slots
    return slot


@inner
def make_frame(m: Memory, parent: int, back: int, loop: int, count: int, mask: int, sibling: int) -> int:
    """The number of the frame; TOO_DEEP if the stack would exceed its limit, or STOPPED."""
    depth = 1 if parent < 0 else m.frames[parent, DEPTH] + 1
    if depth > m.counters[MAX_STACK]:
        return TOO_DEEP
    slot = frame_slot(m, parent, back, loop, count, mask, sibling)
    frame = m.frame_index[slot]
    m.counters[FUEL] -= _FRAME_STEPS
    if frame >= 0:
        return frame
    frame = m.counters[FRAMES]
    if frame >= len(m.frames):
        m.counters[FULL] = FRAMES
        return STOPPED
    m.counters[FUEL] -= _FRAME_STEPS
    m.frames[frame, PARENT] = parent
    m.frames[frame, RETURN] = back
    m.frames[frame, FRAME_LOOP] = loop
    m.frames[frame, COUNT] = count
    m.frames[frame, MASK] = mask
    m.frames[frame, SIBLING] = sibling
    m.frames[frame, DEPTH] = depth
    m.frames[frame, SLOT] = slot
    m.frame_index[slot] = frame
    m.counters[FRAMES] += 1
    return frame


@compiled
def forget_frames(m: Memory, keep: int) -> None:
    """Forgets all frames except the first `keep`, the newest first, which restores the hash table as it was."""
    for frame in range(m.counters[FRAMES] - 1, keep - 1, -1):
        m.frame_index[m.frames[frame, SLOT]] = -1
    m.counters[FRAMES] = keep


@compiled
def rebuild_indexes(m: Memory) -> None:
    """Fills the hash tables of states and frames, which are empty after an array was enlarged."""
    for state in range(m.counters[STATES]):
        begin, size = m.states[state, FIRST], m.states[state, LENGTH]
        total = int(size)
        for k in range(begin, begin + size):
            total += mixed(int(m.members[k]) + 1)
        slot = mixed(total & 0xFFFFFFF) & (len(m.state_index) - 1)
        while m.state_index[slot] >= 0:
            slot = (slot + 1) & (len(m.state_index) - 1)
        m.state_index[slot] = state
    for frame in range(m.counters[FRAMES]):
        row = m.frames[frame]
        slot = frame_slot(m, row[PARENT], row[RETURN], row[FRAME_LOOP], row[COUNT], row[MASK], row[SIBLING])
        m.frame_index[slot] = frame
        row[SLOT] = slot
