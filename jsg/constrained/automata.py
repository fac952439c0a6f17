"""Algorithms on deterministic automata and on graphs.

An automaton is given by its rows. The row of a state has its target for each column, or `DEAD` where there is none, and
state 0 is the start. The caller decides what a column stands for, such as a set of characters or a digit.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set

DEAD = -1
Rows = Sequence[tuple[int, ...]]


def explore[State: Hashable, Label](
    start: State, steps: Callable[[State], Iterable[tuple[Label, State]]], count: Callable[[int], None] | None = None
) -> tuple[list[State], list[list[tuple[Label, int]]]]:
    """The states that steps lead to from the start, in the order in which they are met, and the edges of each.

    `count` is called with the number of states each time that there is one more. It may raise.
    """
    numbers = {start: 0}
    order = [start]
    edges: list[list[tuple[Label, int]]] = []
    for state in order:  # `order` grows while it is walked.
        row: list[tuple[Label, int]] = []
        for label, target in steps(state):
            number = numbers.get(target)
            if number is None:
                number = numbers[target] = len(order)
                order.append(target)
                if count is not None:
                    count(len(order))
            row.append((label, number))
        edges.append(row)
    return order, edges


def live_states(rows: Rows, accepting: Iterable[int]) -> list[int]:
    """States on a way from the start to an accepting one, in the order in which they are reached."""
    sources: dict[int, list[int]] = {0: []}  # of the states that are reached, in that order
    for state in (order := [0]):
        for target in set(rows[state]):
            if target in sources:
                sources[target].append(state)
            elif target != DEAD:
                sources[target] = [state]
                order.append(target)
    useful = [state for state in accepting if state in sources]
    seen = set(useful)
    for state in useful:  # `useful` grows while it is walked.
        for source in sources[state]:
            if source not in seen:
                seen.add(source)
                useful.append(source)
    return [state for state in order if state in seen]


def keep_states(rows: Rows, accepting: Set[int], kept: Sequence[int]) -> tuple[Rows, frozenset[int]]:
    """The automaton of these states alone, numbered in this order."""
    numbers = {state: number for number, state in enumerate(kept)}
    return (
        [tuple([numbers.get(target, DEAD) for target in rows[state]]) for state in kept],
        frozenset(numbers[state] for state in accepting if state in numbers),
    )


def merge_equivalent(rows: Rows, accepting: Set[int]) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
    """The smallest automaton of the same texts. All states must be live."""
    block = _coarsest(rows, accepting)
    examples: dict[int, int] = {}
    for state, number in enumerate(block):
        examples.setdefault(number, state)
    order = sorted(examples.values())
    numbers = {block[state]: number for number, state in enumerate(order)}
    merged = [tuple([DEAD if target == DEAD else numbers[block[target]] for target in rows[state]]) for state in order]
    return tuple(merged), frozenset(numbers[block[state]] for state in accepting)


def _coarsest(rows: Rows, accepting: Set[int]) -> list[int]:
    """The number of the class of equivalent states that each state is in."""
    order = targets_first(rows)
    return _coarsest_of_any(rows, accepting) if order is None else _coarsest_of_finite(rows, accepting, order)


def targets_first(rows: Rows) -> list[int] | None:
    """The states, each after all that its edges lead to; None where there is a cycle."""
    sources: list[list[int]] = [[] for _ in rows]
    waiting: list[int] = []
    for state, row in enumerate(rows):
        targets = set(row) - {DEAD}
        waiting.append(len(targets))
        for target in targets:
            sources[target].append(state)
    order = [state for state, count in enumerate(waiting) if count == 0]
    for state in order:  # `order` grows while it is walked.
        for source in sources[state]:
            waiting[source] -= 1
            if waiting[source] == 0:
                order.append(source)
    return order if len(order) == len(rows) else None


def _coarsest_of_finite(rows: Rows, accepting: Set[int], order: Iterable[int]) -> list[int]:
    """The classes of an automaton without a cycle, in time linear in its edges.

    States with equal rows are equivalent, and each state is numbered after its targets.
    """
    numbers: dict[tuple[bool, tuple[int, ...]], int] = {}
    block = [0] * len(rows)
    for state in order:
        row = tuple([DEAD if target == DEAD else block[target] for target in rows[state]])
        block[state] = numbers.setdefault((state in accepting, row), len(numbers))
    return block


def _coarsest_of_any(rows: Rows, accepting: Set[int]) -> list[int]:
    """The classes of any automaton (Hopcroft's algorithm).

    All states are live, so equivalent states lack the same edges. The first classes are made by whether a state accepts
    and which edges it lacks, so no dead state is needed.
    """
    count = len(rows)
    sources: list[dict[int, list[int]]] = [{} for _ in rows[0]]
    signature: dict[tuple[bool, tuple[bool, ...]], list[int]] = {}
    for state, row in enumerate(rows):
        signature.setdefault((state in accepting, tuple([t == DEAD for t in row])), []).append(state)
        for i, target in enumerate(row):
            if target != DEAD:
                sources[i].setdefault(target, []).append(state)
    blocks = [set(states) for states in signature.values()]
    block = [0] * count
    for number, states in enumerate(blocks):
        for state in states:
            block[state] = number
    waiting = list(range(len(blocks)))
    is_waiting = [True] * len(blocks)
    while waiting:
        splitter = waiting.pop()
        is_waiting[splitter] = False
        splitter_states = tuple(blocks[splitter])
        for by_target in sources:
            hit: dict[int, list[int]] = {}
            for target in splitter_states:
                for source in by_target.get(target, ()):
                    hit.setdefault(block[source], []).append(source)
            for number, states in hit.items():
                if len(states) == len(blocks[number]):
                    continue
                fresh = len(blocks)
                blocks[number].difference_update(states)
                blocks.append(set(states))
                for state in states:
                    block[state] = fresh
                is_waiting.append(False)
                smaller = fresh
                if not is_waiting[number] and len(blocks[number]) < len(states):
                    smaller = number
                waiting.append(smaller)
                is_waiting[smaller] = True
    return block


def components[Node: Hashable](edges: Mapping[Node, Collection[Node]]) -> list[list[Node]]:
    """The strongly connected components, each after all that it leads to.

    Tarjan's algorithm with a stack of its own: a chain of calls may be as long as the grammar.

    Args:
        edges: For each node where it leads to, among the nodes.
    """
    order: dict[Node, int] = {}
    lowest: dict[Node, int] = {}
    path: list[Node] = []
    on_path: set[Node] = set()
    result: list[list[Node]] = []
    for root in edges:
        if root in order:
            continue
        order[root] = lowest[root] = len(order)
        path.append(root)
        on_path.add(root)
        todo = [(root, iter(edges[root]))]
        while todo:
            node, targets = todo[-1]
            target = next(targets, None)
            if target is None:
                todo.pop()
                if todo:
                    caller = todo[-1][0]
                    lowest[caller] = min(lowest[caller], lowest[node])
                if lowest[node] == order[node]:
                    start = len(path) - 1
                    while path[start] != node:
                        start -= 1
                    result.append(path[start:])
                    on_path.difference_update(path[start:])
                    del path[start:]
            elif target not in order:
                order[target] = lowest[target] = len(order)
                path.append(target)
                on_path.add(target)
                todo.append((target, iter(edges[target])))
            elif target in on_path:
                lowest[node] = min(lowest[node], order[target])
    return result


def is_cyclic[Node: Hashable](component: Collection[Node], edges: Mapping[Node, Collection[Node]]) -> bool:
    """Whether a way leads from the nodes of a component back to them."""
    return len(component) > 1 or any(node in edges[node] for node in component)
