"""A traced program as a graph: its arguments, its nodes, what it returns. It prints, draws and becomes JSON."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from jsg.lang.graphs import codec, text
from jsg.lang.graphs.nodes import AnyNode, Argument, Block, Value, walk

VERSION = 1
"""Of the JSON."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A traced program.

    Attributes:
        name: Of the function.
        arguments: What a run must give, all of them.
        block: The nodes; the first is the `Open` of stream 0; `outputs` are the variables of stream 0 at its end.
        returns: What the program returned.
    """

    name: str
    arguments: tuple[Argument, ...]
    block: Block
    returns: Value

    def nodes(self) -> Iterator[AnyNode]:
        """All nodes, those within `cond` and `loop` behind the node that holds them."""
        return walk(self.block)

    def __str__(self) -> str:
        """One node a line."""
        return text.to_text(self.name, self.arguments, self.block, self.returns)

    def to_dot(self) -> str:
        """A drawing in Graphviz' language."""
        return text.to_dot(self.block)

    def to_dict(self) -> dict[str, Any]:
        """What `json.dumps` takes: `{"jsg_graph": 1, "name", "arguments", "nodes", "outputs", "returns"}`."""
        return {
            "jsg_graph": VERSION,
            "name": self.name,
            "arguments": codec.write(tuple[Argument, ...], self.arguments),
            **codec.write(Block, self.block),
            "returns": codec.write(Value, self.returns),
        }

    def to_json(self) -> str:
        """As `from_json` of a compiled program reads it, and as `POST /v1/programs` takes it."""
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))
