"""Orders the parts of each `unordered` group so that prompts have the longest common prefix.

Constants come first, then arguments (in a batch first those that are equal in all runs), then variables. Nothing else
moves: whether a constant may move before an argument depends on what the text means, which only the program knows.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import AnyNode, Append, Argument, Block, Cond, Loop, Media, ValueRef, refs


def reorder(graph: Graph, varying: Collection[str] = ()) -> Graph:
    """Gives the graph with the parts of each unordered group in that order.

    Args:
        graph: The graph.
        varying: The arguments that differ between the runs of a batch; they come after the other arguments.
    """
    return dataclasses.replace(graph, block=_reorder_block(graph.block, frozenset(varying)))


def varying_arguments(arguments: Iterable[Argument], runs: Sequence[Mapping[str, object]]) -> frozenset[str]:
    """Gives the names of the arguments that are not written alike in all runs, as 1 and 1.0 are not."""

    def written(run: Mapping[str, object], name: str) -> object:
        value = run[name]
        return str(value) if isinstance(value, int | float) else value

    names = (argument.name for argument in arguments)
    return frozenset(name for name in names if any(written(run, name) != written(runs[0], name) for run in runs))


def _reorder_block(block: Block, varying: frozenset[str]) -> Block:
    nodes: list[AnyNode] = []
    for key, members in itertools.groupby(block.nodes, _group_of):
        run = [_reorder_inner(node, varying) for node in members]
        if key is None:
            nodes += run
            continue
        parts = [list(part) for _, part in itertools.groupby(run, _part_of)]
        parts.sort(key=lambda part: max(_rank(node, varying) for node in part))  # stable: equals stay as written
        ids = [node.id for node in run]
        moved = itertools.chain.from_iterable(parts)
        nodes += [dataclasses.replace(node, id=number) for number, node in zip(ids, moved, strict=True)]
    return dataclasses.replace(block, nodes=tuple(nodes))


def _reorder_inner(node: AnyNode, varying: frozenset[str]) -> AnyNode:
    if not isinstance(node, Cond | Loop):
        return node
    fields = ((field.name, getattr(node, field.name)) for field in dataclasses.fields(node))
    blocks = {name: _reorder_block(value, varying) for name, value in fields if isinstance(value, Block)}
    return dataclasses.replace(node, **blocks)


def _part_of(node: AnyNode) -> tuple[int, int] | None:
    return node.part if isinstance(node, Append | Media) else None


def _group_of(node: AnyNode) -> tuple[int, int] | None:
    part = _part_of(node)
    return None if part is None else (node.stream, part[0])


def _rank(node: AnyNode, varying: frozenset[str]) -> int:
    return max((3 if isinstance(ref, ValueRef) else 2 if ref.name in varying else 1 for ref in refs(node)), default=0)
