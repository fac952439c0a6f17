"""A traced program as a graph, which prints, draws and becomes JSON."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from jsg.lang.graphs import codec, text
from jsg.lang.graphs.nodes import AnyNode, Argument, Block, Cond, Join, Value, walk

VERSION = 1
"""The version of the JSON form."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A traced program.

    Attributes:
        name: The name of the function.
        arguments: The arguments, all of which a run must give.
        block: The nodes, of which the first is the `Open` of stream 0; `outputs` are the variables of stream 0 at its
            end.
        returns: The value that the program returns.
    """

    name: str
    arguments: tuple[Argument, ...]
    block: Block
    returns: Value

    def nodes(self) -> Iterator[AnyNode]:
        """Gives all nodes. Those of a `cond` or `loop` come after it."""
        return walk(self.block)

    def perhaps_unset(self) -> frozenset[str]:
        """Gives the variables that a run may leave unset, because only one side of a `cond` sets them."""
        joins = (node.gathered for node in self.nodes() if isinstance(node, Join))
        conds = [node for node in self.nodes() if isinstance(node, Cond)]
        one_sided = (dict(node.then.outputs).keys() ^ dict(node.otherwise.outputs).keys() for node in conds)
        names = {name for node, some in zip(conds, one_sided, strict=True) for name in some - dict(node.before).keys()}
        names |= {one.name for gathered in joins for one in gathered if not one.is_sure}
        return frozenset(names & dict(self.block.outputs).keys())

    def __str__(self) -> str:
        """Gives one line for each node."""
        return text.to_text(self.name, self.arguments, self.block, self.returns)

    def to_dot(self) -> str:
        """Gives a drawing in the language of Graphviz."""
        return text.to_dot(self.block)

    def to_dict(self) -> dict[str, Any]:
        """Gives `{"jsg_graph": 1, "name", "arguments", "nodes", "outputs", "returns"}`, which `json.dumps` takes."""
        return {
            "jsg_graph": VERSION,
            "name": self.name,
            "arguments": codec.write(tuple[Argument, ...], self.arguments),
            **codec.write(Block, self.block),
            "returns": codec.write(Value, self.returns),
        }

    def to_json(self) -> str:
        """Gives the JSON text that `CompiledFunction.from_json` and `POST /v1/programs` take."""
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))
