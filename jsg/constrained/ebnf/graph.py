"""Finds the rules that call each other in circles."""

from collections.abc import Collection, Mapping


def components(edges: Mapping[str, Collection[str]]) -> list[list[str]]:
    """The strongly connected components, each after all that it leads to.

    Tarjan's algorithm with a stack of its own: a chain of calls may be as long as the grammar.

    Args:
        edges: For each node where it leads to, among the nodes.
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    on_path: set[str] = set()
    result: list[list[str]] = []
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


def is_cyclic(component: Collection[str], edges: Mapping[str, Collection[str]]) -> bool:
    """Whether the rules of a component call themselves."""
    return len(component) > 1 or any(name in edges[name] for name in component)
