"""Kernels that enter rules and loops and end them: what a head that has not yet read the byte may become.

    enter      a byte begins rules or loops: a frame for each, the state in which they begin
    end        a level may end: back to what called it, or on to the next item of its loop

If a byte may begin several rules or loops, they are entered together, as a *group* of frames: the head stays one head,
and its state has positions of all these levels. So the alternatives of a union are one way to read a text until they
differ in more than their content, however many there are. Each level has its own END, which says where the group
returns to. A loop is in a group at most once, because its positions do not say which of two counts they belong to.

A call after which its caller ends opens no frame: it returns to where the caller returns.
"""

from jsg.constrained.jit import inner
from jsg.constrained.run.memory import (
    CALLED,
    COUNT,
    DEPTH,
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
    MAX_WORK,
    MISSING_ONLY,
    MOST_KEPT,
    NEXT_COUNT,
    NEXT_MASK,
    OFF_BOUNDARY,
    PARENT,
    RETURN,
    SIBLING,
    STAMP,
    STOPPED,
    TOO_DEEP,
    TOO_MUCH_WORK,
    WITH_SEPARATOR,
    Memory,
)
from jsg.constrained.run.states import (
    gather_list,
    gather_loop,
    gather_state,
    make_frame,
    make_state,
    mixed,
    state_in_loop,
    state_of_list,
)
from jsg.constrained.tables import (
    ARGUMENT,
    BRANCH_BIT,
    BRANCHES,
    BRANCHES_END,
    CALL,
    END_BRANCH,
    END_RULE,
    END_SEPARATOR,
    FIRST_END,
    KIND,
    MAX,
    MIN,
    NO_SEPARATOR,
    NUM_REQUIRED,
    ONCE,
    REQUIRED,
    SEPARATOR_KIND,
    UNBOUNDED,
    StaticTables,
)


@inner
def add_work(m: Memory, size: int, state: int, frame: int) -> int:
    """Adds a head that must still read the byte, unless it is already there. Returns their number, or STOPPED."""
    m.counters[FUEL] -= size >> 2
    for k in range(size):
        if m.work[k, 0] == state and m.work[k, 1] == frame:
            return size
    if size == MAX_WORK:
        m.counters[FULL] = TOO_MUCH_WORK
        return STOPPED
    m.work[size, 0] = state
    m.work[size, 1] = frame
    return size + 1


@inner
def may_finish(t: StaticTables, loop: int, count: int, mask: int) -> bool:
    """Whether a loop may end after `count` items, of which `mask` has the bits."""
    required = t.loops[loop, REQUIRED]
    return count >= t.loops[loop, MIN] and mask & required == required


@inner
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


@inner
def next_item(t: StaticTables, m: Memory, frame: int, branch: int) -> int:
    """The flags for the item of a loop after an item that ends; -1 if none may come.

    `counters` NEXT_COUNT and NEXT_MASK then say what its frame has.
    """
    loop, count, mask = m.frames[frame, FRAME_LOOP], m.frames[frame, COUNT], m.frames[frame, MASK]
    frozen = m.counters[FROZEN]
    bit = t.branches[branch, BRANCH_BIT]
    if frozen > 0:
        # Each character ends at most one item. If the loop has room for them all, the count need not change.
        needed = frozen + 1 if m.frames[frame, DEPTH] <= m.counters[FROZEN_DEPTH] else frozen
        if m.counters[OFF_BOUNDARY] or bit or t.loops[loop, REQUIRED] or t.loops[loop, MAX] - count < needed:
            m.counters[FAILED] = 1
            return -1
    else:
        count += 1
        if t.loops[loop, MAX] == UNBOUNDED and count > t.loops[loop, MIN]:
            count = t.loops[loop, MIN]
        mask |= bit
    m.counters[NEXT_COUNT], m.counters[NEXT_MASK] = count, mask
    return next_flags(t, m, loop, count, mask)


@inner
def turn(t: StaticTables, m: Memory, size: int, frame: int, branch: int) -> int:
    """Adds the heads that may come after an item of a loop has ended. Returns the size of the work, or STOPPED."""
    loop, mask = m.frames[frame, FRAME_LOOP], m.frames[frame, MASK]
    if may_finish(t, loop, m.frames[frame, COUNT] + 1, mask | t.branches[branch, BRANCH_BIT]):
        size = add_work(m, size, m.frames[frame, RETURN], m.frames[frame, PARENT])
    flags = next_item(t, m, frame, branch) if size != STOPPED else -1
    if flags < 0:
        return size
    state = state_in_loop(t, m, loop, m.counters[NEXT_MASK], flags | WITH_SEPARATOR)
    if state == STOPPED:
        return STOPPED
    parent, back = m.frames[frame, PARENT], m.frames[frame, RETURN]
    after = make_frame(m, parent, back, loop, m.counters[NEXT_COUNT], m.counters[NEXT_MASK], -1)
    if after == STOPPED:
        return STOPPED
    return add_work(m, size, state, after)


@inner
def ended_levels(t: StaticTables, m: Memory, state: int, frame: int) -> int:
    """Writes which levels of a group may end in a state: (frame, END) of each, into `work`. Returns their number."""
    m.counters[STAMP] += 1
    stamp, begin, found = m.counters[STAMP], m.states[state, FIRST], 0
    m.counters[FUEL] -= m.states[state, ENDS]
    for k in range(begin, begin + m.states[state, ENDS]):
        m.marks[m.members[k]] = stamp
    while frame >= 0:
        loop = m.frames[frame, FRAME_LOOP]
        first, end = -1 - loop, -loop
        if loop >= 0:
            first = t.loops[loop, FIRST_END]
            end = first + t.loops[loop, BRANCHES_END] - t.loops[loop, BRANCHES]
            end += t.loops[loop, SEPARATOR_KIND] != NO_SEPARATOR
        m.counters[FUEL] -= 2 + end - first
        for position in range(first, end):
            if m.marks[position] == stamp:
                m.work[MAX_WORK + found, 0] = frame
                m.work[MAX_WORK + found, 1] = position
                found += 1
        frame = m.frames[frame, SIBLING]
    return found


@inner
def finished_state(t: StaticTables, m: Memory, found: int) -> int:
    """The state to which the levels of `ended_levels` return if they may be left; -1 if none may, or STOPPED."""
    m.counters[STAMP] += 1
    size = 0
    for k in range(found):
        frame, end = m.work[MAX_WORK + k, 0], m.work[MAX_WORK + k, 1]
        loop, argument = m.frames[frame, FRAME_LOOP], t.positions[end, ARGUMENT]
        if loop >= 0:
            if t.positions[end, KIND] != END_BRANCH:
                continue
            mask = m.frames[frame, MASK] | t.branches[argument, BRANCH_BIT]
            if not may_finish(t, loop, m.frames[frame, COUNT] + 1, mask):
                continue
        size = gather_state(m, m.frames[frame, RETURN], size)
    return make_state(t, m, size) if size > 0 else -1


@inner
def add_ended(m: Memory, size: int, slot: int, state: int, frame: int) -> int:
    """Adds a head after a group's level, and notes it in a row of `ended` if there is room."""
    number = m.ended[slot, 4]
    m.ended[slot, 4] = number + 1
    if number < MOST_KEPT:
        m.ended[slot, 5 + 2 * number] = state
        m.ended[slot, 6 + 2 * number] = frame
    return STOPPED if state == STOPPED else add_work(m, size, state, frame)


@inner
def end_group(t: StaticTables, m: Memory, size: int, state: int, frame: int) -> int:
    """`end_level` for a group. The heads do not depend on the byte, and a walk asks for them again and again."""
    call, boundary = m.counters[CALLED], m.counters[OFF_BOUNDARY]
    slot = mixed((state * 31 + frame) & 0xFFFFFFF) & (len(m.ended) - 1)
    row = m.ended[slot]
    if row[0] == call and row[1] == state and row[2] == frame and row[3] == boundary and row[4] <= MOST_KEPT:
        for k in range(row[4]):
            size = add_work(m, size, row[5 + 2 * k], row[6 + 2 * k])
            if size == STOPPED:
                return STOPPED
        return size
    row[0], row[4] = -1, 0
    found, parent = ended_levels(t, m, state, frame), m.frames[frame, PARENT]
    after = finished_state(t, m, found)
    if after != -1:
        size = add_ended(m, size, slot, after, parent)
    m.counters[STAMP] += 1
    total = 0
    for k in range(found):
        one, end = m.work[MAX_WORK + k, 0], m.work[MAX_WORK + k, 1]
        loop, mask = m.frames[one, FRAME_LOOP], m.frames[one, MASK]
        if loop < 0:
            m.work[MAX_WORK + k, 0] = -1
        elif t.positions[end, KIND] == END_SEPARATOR:
            m.work[MAX_WORK + k, 0] = -1
            total = gather_loop(t, m, loop, mask, next_flags(t, m, loop, m.frames[one, COUNT], mask), total)
    after, last = frame, 0
    while size != STOPPED:
        if total > 0:
            size = add_ended(m, size, slot, make_state(t, m, total), after)
        if last < 0 or size == STOPPED:
            break
        # The next items, as a group that has each loop once. If a loop goes on in two ways, there are two groups.
        m.counters[STAMP] += 1
        total, after, last = 0, -1, -1
        for k in range(found - 1, -1, -1):
            one = m.work[MAX_WORK + k, 0]
            if one in (-1, last):
                continue
            m.work[MAX_WORK + k, 0], last = -1, one
            flags, loop = (
                next_item(t, m, one, t.positions[m.work[MAX_WORK + k, 1], ARGUMENT]),
                m.frames[one, FRAME_LOOP],
            )
            if flags < 0:
                continue
            count, mask = m.counters[NEXT_COUNT], m.counters[NEXT_MASK]
            after = make_frame(m, parent, m.frames[one, RETURN], loop, count, mask, after)
            if after == STOPPED:
                return STOPPED
            total = gather_loop(t, m, loop, mask, flags | WITH_SEPARATOR, total)
    if size != STOPPED and not (m.counters[FROZEN] and m.counters[FAILED]):
        row[0], row[1], row[2], row[3] = call, state, frame, boundary
    return size


@inner
def end_level(t: StaticTables, m: Memory, size: int, state: int, frame: int) -> int:
    """Adds the heads after the level of a state, which may end here. Returns the size of the work, or STOPPED."""
    depth = 0 if frame < 0 else m.frames[frame, DEPTH]
    if depth < m.counters[LOWEST]:
        m.counters[LOWEST] = depth
    if frame < 0:
        return size
    if m.frames[frame, SIBLING] >= 0:
        return end_group(t, m, size, state, frame)
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


@inner
def is_tail_call(t: StaticTables, m: Memory, action: int) -> bool:
    """Whether an action calls a rule after which nothing but the end of its caller comes."""
    back = m.actions[action + 2]
    if m.actions[action] != CALL or m.states[back, ENDS] != m.states[back, LENGTH]:
        return False
    k = m.states[back, FIRST]
    end = k + m.states[back, LENGTH]
    while k < end and t.positions[m.members[k], KIND] == END_RULE:
        k += 1
    return k == end


@inner
def enter_some(t: StaticTables, m: Memory, size: int, frame: int, actions: int, is_tail: bool) -> int:
    """Adds a head in those rules and loops that are tail calls, or in the others. Returns as `enter` does."""
    begin, end, found = actions + 2, actions + 2 + 3 * m.actions[actions + 1], 0
    for action in range(begin, end, 3):
        found += is_tail_call(t, m, action) == is_tail
    if found == 0:
        return size
    above, parent = -1, frame
    if is_tail and (frame < 0 or m.frames[frame, SIBLING] < 0):
        above, begin = frame, end
    elif is_tail:
        parent = m.frames[frame, PARENT]
    for action in range(end - 3, begin - 1, -3):
        if is_tail_call(t, m, action) != is_tail:
            continue
        number, back = int(m.actions[action + 1]), int(m.actions[action + 2])
        if is_tail:
            back = finished_state(t, m, ended_levels(t, m, back, frame))
            if back == STOPPED:
                return STOPPED
        if m.actions[action] == CALL:
            number = -1 - int(t.rule_ends[number]) if found > 1 else -1
        above = make_frame(m, parent, back, number, 0, 0, above)
        if above < 0:
            return STOPPED if above == STOPPED else size
    m.counters[STAMP] += 1
    total = 0
    for action in range(actions + 2, end, 3):
        if is_tail_call(t, m, action) == is_tail:
            number = m.actions[action + 1]
            if m.actions[action] == CALL:
                total = gather_list(t, m, number, total)
            else:
                total = gather_loop(t, m, number, 0, next_flags(t, m, number, 0, 0), total)
    state = make_state(t, m, total)
    return STOPPED if state == STOPPED else add_work(m, size, state, above)


@inner
def enter(t: StaticTables, m: Memory, size: int, frame: int, actions: int) -> int:
    """Adds the heads in the rules and loops that a byte enters. Returns the size of the work, or STOPPED."""
    action = actions + 2
    is_tail = is_tail_call(t, m, action)
    if m.actions[actions + 1] > 1 or (is_tail and frame >= 0 and m.frames[frame, SIBLING] >= 0):
        size = enter_some(t, m, size, frame, actions, False)
        return STOPPED if size == STOPPED else enter_some(t, m, size, frame, actions, True)
    number, back = m.actions[action + 1], m.actions[action + 2]
    if m.actions[action] == CALL:
        state = state_of_list(t, m, number)
        above = frame if is_tail else make_frame(m, frame, back, -1, 0, 0, -1)
    else:
        state = state_in_loop(t, m, number, 0, next_flags(t, m, number, 0, 0))
        above = make_frame(m, frame, back, number, 0, 0, -1)
    if state == STOPPED or above == STOPPED:
        return STOPPED
    return size if above == TOO_DEEP else add_work(m, size, state, above)
