"""The check that a graph is well-formed, which a graph from the network must pass before anything runs."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Never

from jsg.errors import GraphError, ProgramError
from jsg.lang.graphs import codec
from jsg.lang.graphs.graph import VERSION, Graph
from jsg.lang.graphs.nodes import (
    MAIN_STREAM,
    AnyNode,
    Argument,
    ArgumentRef,
    Block,
    Choose,
    Cond,
    Fork,
    Join,
    Loop,
    Media,
    Node,
    Open,
    Scope,
    StateValue,
    Turn,
    Value,
    ValueRef,
    Values,
    VariableValue,
    children,
    describe,
)
from jsg.lang.graphs.shapes import Shape, defined
from jsg.lang.words.nesting import Nesting, check_join

_FIELDS = {
    "name": str,
    "arguments": tuple[Argument, ...],
    "nodes": tuple[AnyNode, ...],
    "outputs": Values,
    "returns": Value,
}


def graph_from_json(source: str | bytes | Mapping[str, Any]) -> Graph:
    """Reads a graph from a JSON text, or from the value of one, and checks that it is well-formed (`check_graph`).

    Raises:
        GraphError: The text is not a graph, or the graph is not well-formed. The message names the node.
    """
    if isinstance(source, str | bytes):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise GraphError(f"a graph must be JSON: {error}", param="graph") from None
    location = codec.Location("graph")
    held = dict(source) if isinstance(source, Mapping) else {}
    if held.get("jsg_graph") != VERSION:
        location.fail(f"it must be an object with jsg_graph {VERSION}, the version of graphs that is understood here")
    location.check_keys(held, ("jsg_graph", *_FIELDS))
    name, arguments, *block, returns = (codec.read(kind, held[key], key, location) for key, kind in _FIELDS.items())
    graph = Graph(name=name, arguments=arguments, block=Block(*block), returns=returns)
    check_graph(graph)
    return graph


def check_graph(graph: Graph) -> None:
    """Raises GraphError, naming the node, unless the graph is well-formed.

    In a well-formed graph ids grow in program order, a node refers only to what was defined before it and is visible
    there, each stream is opened once and ends once, and turns and scopes are properly nested.
    """
    names = [argument.name for argument in graph.arguments]
    if len(set(names)) < len(names):
        raise GraphError("the arguments of a graph must have different names", param="graph")
    if not graph.block.nodes or not isinstance(graph.block.nodes[0], Open):
        raise GraphError("a graph must begin with a node of kind 'open'", param="graph")
    checker = _Checker(graph)
    checker.run_block(graph.block, None)
    checker.check_reads((graph.returns, graph.block.outputs), graph.block.nodes[-1])


@dataclasses.dataclass(slots=True)
class _Stream:
    """The state of a stream at the node under check."""

    block: int
    is_outermost: bool
    parent: int | None = None
    nesting: Nesting = Nesting()  # noqa: RUF009 - frozen
    is_ended: bool = False


class _Checker:
    """Checks a graph in program order."""

    def __init__(self, graph: Graph) -> None:
        self._kinds = {argument.name: argument.kind for argument in graph.arguments}
        self._streams: dict[int, _Stream] = {}
        self._shapes: dict[tuple[int, str], Shape] = {}
        self._blocks: list[int] = []
        self._num_blocks = 0
        self._last_id = -1

    def run_block(self, block: Block, holder: Cond | Loop | None) -> None:
        """Checks a block. The variables that it defines stay visible until the caller removes them."""
        self._num_blocks += 1
        self._blocks.append(self._num_blocks)
        held = self._streams[holder.stream] if holder else None
        outside = dataclasses.replace(held) if held else None
        if held is not None:
            held.block = self._num_blocks
        for node in block.nodes:
            self._check_node(node)
        if len({name for name, _ in block.outputs}) < len(block.outputs):
            self._fail("the outputs of a block must have different names", holder or block.nodes[-1])
        if holder is not None and held is not None and outside is not None:
            self.check_reads(block.outputs, holder)
            held.nesting.check_body(outside.nesting)
            held.block = outside.block
        self._blocks.pop()

    def _check_node(self, node: AnyNode) -> None:
        if node.id <= self._last_id:
            self._fail(f"ids must grow in program order, but {node.id} comes after {self._last_id}", node)
        self._last_id = node.id
        if isinstance(node, Open):
            if not self._streams and node.stream != MAIN_STREAM:
                self._fail(f"the first stream must be number {MAIN_STREAM}", node)
            self._open(node.stream, node)
            return
        self.check_reads(node.before if isinstance(node, Loop) else tuple(children(node)), node)
        try:
            self._take(node, self._live(node.stream, node))
        except ProgramError as error:  # the node breaks a rule of nesting
            self._fail(str(error), node)
        self._define(node, defined(node))

    def _take(self, node: AnyNode, stream: _Stream) -> None:
        match node:
            case Media():
                self._check_media(node)
            case Choose():
                self._check_choose(node)
            case Turn():
                stream.nesting = stream.nesting.turn(node.role, is_begin=node.is_begin)
            case Scope():
                stream.nesting = stream.nesting.scope(node.name, is_begin=node.is_begin)
            case Fork():
                if not node.branches or (node.offsets is not None and len(node.offsets) != len(node.branches)):
                    self._fail("a fork must have branches, and an offset for each or none", node)
                for branch in node.branches:
                    self._open(branch, node, node.stream, stream.nesting.fork())
            case Join():
                self._check_join(node)
            case Cond():
                self._check_cond(node)
            case Loop():
                self._check_loop(node)
            case _:
                pass

    def _check_media(self, node: Media) -> None:
        if isinstance(node.source, ArgumentRef):
            kind = "image" if node.num_frames is None else "video"
            if self._kinds.get(node.source.name) != kind:
                self._fail(f"no argument {node.source.name!r} of kind {kind} is declared", node)
        elif node.num_frames is not None:
            self._fail("num_frames belongs to the video itself", node)

    def _check_choose(self, node: Choose) -> None:
        number = len(node.choices)
        if not number:
            self._fail("there must be at least one choice", node)
        if (node.question is None) != (node.decision is None):
            self._fail("question and decision belong together", node)
        is_wrong = number < 2 or (node.decision == "predicate" and number > 2) or node.temperature <= 0
        if node.decision is not None and is_wrong:
            self._fail("a decision must have two choices or more, a predicate two, and a temperature above 0", node)

    def _check_join(self, node: Join) -> None:
        if not node.branches or len(set(node.branches)) < len(node.branches):
            self._fail("a join must name branches, each once", node)
        branches = [self._live(number, node) for number in node.branches]
        for number, branch in zip(node.branches, branches, strict=True):
            if branch.parent != node.stream:
                self._fail(f"stream {number} was not forked from stream {node.stream}", node)
        check_join([branch.nesting for branch in branches], node.mode)
        if node.gathered and node.mode != "gather_variable":
            self._fail("only gather_variable gathers variables", node)
        for branch in branches:
            branch.is_ended = True

    def _check_cond(self, node: Cond) -> None:
        for block in (node.then, node.otherwise):
            visible = dict(self._shapes)
            self.run_block(block, node)
            self._shapes = visible

    def _check_loop(self, node: Loop) -> None:
        if node.max_rounds < 1:
            self._fail(f"max_rounds must be at least 1, but got {node.max_rounds}", node)
        visible, shapes = dict(self._shapes), defined(node)
        self._define(node, {name: shapes[name] for name, _ in node.before})  # later rounds read the loop too
        self.run_block(node.body, node)
        self.check_reads(node.until, node)
        self._shapes = visible

    def check_reads(self, part: Any, node: Node) -> None:
        """Raises GraphError where a part of a node, apart from its blocks, reads something that is not visible."""
        match part:
            case tuple():
                for inner in children(part):
                    self.check_reads(inner, node)
            case Block():
                pass
            case ArgumentRef(name):
                if self._kinds.get(name) != "text" and not isinstance(node, Media):
                    self._fail(f"no argument {name!r} of kind text is declared", node)
            case ValueRef():
                self._check_ref(part, node)
            case VariableValue(ref):
                if (ref.node, ref.name) not in self._shapes or ref.index is not None:
                    self._fail(
                        f"it keeps {ref.name!r} of node {ref.node}, which is not defined where it can be seen", node
                    )
            case StateValue(stream, variables):
                self.check_reads(variables, node)
                if stream not in self._streams or not self._streams[stream].is_outermost:
                    self._fail(f"there is no stream {stream} outside of cond and loop", node)
            case _:
                for inner in children(part):
                    self.check_reads(inner, node)

    def _check_ref(self, ref: ValueRef, node: Node) -> None:
        if (ref.node, ref.name) not in self._shapes:
            self._fail(
                f"it reads {ref.name!r} of node {ref.node}, which does not define it before and where it can be seen",
                node,
            )
        shape = self._shapes[ref.node, ref.name]
        if shape is None and ref.index is None:
            return
        if shape is None or ref.index is None or not 0 <= ref.index < shape.length:
            self._fail(f"it reads {ref.name!r} of node {ref.node} by index {ref.index}, which it does not have", node)

    def _open(self, number: int, node: Node, parent: int | None = None, nesting: Nesting | None = None) -> None:
        if number in self._streams:
            self._fail(f"stream {number} exists already", node)
        self._streams[number] = _Stream(self._blocks[-1], len(self._blocks) == 1, parent, nesting or Nesting())

    def _live(self, number: int, node: Node) -> _Stream:
        stream = self._streams.get(number)
        if stream is None or stream.is_ended or stream.block != self._blocks[-1]:
            self._fail(f"stream {number} was not opened, has ended, or belongs to another block", node)
        return stream

    def _define(self, node: Node, shapes: dict[str, Shape]) -> None:
        self._shapes |= {(node.id, name): shape for name, shape in shapes.items()}

    def _fail(self, rule: str, node: Node) -> Never:
        raise GraphError(f"{describe(node)}: {rule}", param="graph")
