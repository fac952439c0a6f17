"""`python -m tests.lang.made_up_node`: adds a kind of node, and prints as JSON what is done with it by who knows none.

It runs in a process of its own, because the modules of the language read the kinds of nodes when they are loaded.
"""

import dataclasses
import json

from jsg.lang.graphs import nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remark(nodes.Node):
    """Says something of a variable."""

    __module__ = nodes.__name__  # where kinds of nodes stand

    words: str
    about: nodes.ValueRef


def main() -> None:
    nodes.AnyNode |= Remark  # pyright: ignore[reportAttributeAccessIssue] - before the modules that read it are loaded
    from jsg.errors import GraphError
    from jsg.lang.executor.beginning import _is_constant
    from jsg.lang.executor.compiled import constant_prefix
    from jsg.lang.executor.limits import ProgramLimits, check_limits
    from jsg.lang.graphs.check import graph_from_json
    from jsg.lang.graphs.graph import Graph
    from jsg.lang.graphs.reorder import reorder
    from jsg.lang.graphs.shapes import defined

    def graph_about(number: int) -> Graph:
        made = (
            nodes.Open(id=0, stream=0, line="p:1", program="p"),
            nodes.Assign(id=1, stream=0, line="p:2", name="a", value=nodes.TextValue(("b",))),
            Remark(id=2, stream=0, line="p:3", words="good", about=nodes.ValueRef(number, "a", None)),
            nodes.Append(id=3, stream=0, line="p:4", pieces=("c",)),
        )
        block = nodes.Block(made, ())  # pyright: ignore[reportArgumentType]
        return Graph(name="p", arguments=(), block=block, returns=nodes.ConstantValue(None))

    graph = graph_about(1)
    check_limits(graph, {}, ProgramLimits(nodes=4))
    try:
        refused = str(graph_from_json(graph_about(0).to_dict()))
    except GraphError as error:
        refused = str(error)
    print(
        json.dumps(
            {
                "json": graph.to_dict()["nodes"][2],
                "is read": graph_from_json(graph.to_dict()) == reorder(graph) == graph,
                "refused": refused,
                "text": str(graph).splitlines()[3].split(),
                "is drawn": "n1 -> n2" in graph.to_dot(),
                "sets": defined(graph.block.nodes[2]),
                "is of each run": not _is_constant(graph.block.nodes[2], ()),
                "ends what is known": len(constant_prefix(graph.block.nodes)),
            }
        )
    )


if __name__ == "__main__":
    main()
