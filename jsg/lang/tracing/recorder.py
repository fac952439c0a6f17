"""The record of a trace under way: its nodes, blocks, numbers and symbols."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jsg.errors import TraceError
from jsg.lang.graphs.nodes import AnyNode, ArgumentKind, ArgumentRef, Piece
from jsg.lang.tracing.symbols import ADVICE, Symbols, Traced, program_line
from jsg.lang.words.ir import Symbol

MAX_NODES = 100_000  # ends the trace of a body that appends without end


@dataclasses.dataclass(slots=True)
class _OpenBlock:
    """A block that is being traced.

    Attributes:
        nodes: Its nodes so far.
        streams: The streams that may be extended in it.
    """

    nodes: list[AnyNode]
    streams: set[int]


class Recorder:
    """The record of one trace. It numbers nodes and streams, and knows the current block.

    Attributes:
        symbols: The symbols.
        arguments: The kinds of the arguments, by name.
    """

    def __init__(self) -> None:
        self.symbols = Symbols()
        self.arguments: dict[str, ArgumentKind] = {}
        self._kinds_used: dict[str, ArgumentKind] = {}
        self._blocks = [_OpenBlock([], set())]
        self._num_nodes = 0
        self._num_streams = 0
        self._num_groups = 0

    @property
    def nodes(self) -> list[AnyNode]:
        """The nodes of the outermost block."""
        return self._blocks[0].nodes

    def next_id(self) -> int:
        """Gives the id of a new node."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise TraceError(f"the program has more than {MAX_NODES} nodes at {program_line()}; use jsg.loop")
        return self._num_nodes - 1

    def next_group(self) -> int:
        """Gives the number of a new `unordered` group."""
        self._num_groups += 1
        return self._num_groups - 1

    def new_stream(self) -> int:
        """Gives the number of a new stream, which may be extended in the current block."""
        self._num_streams += 1
        self._blocks[-1].streams.add(self._num_streams - 1)
        return self._num_streams - 1

    def emit(self, node: AnyNode) -> None:
        """Adds a node to the current block."""
        if node.stream not in self._blocks[-1].streams:
            raise TraceError(
                f"the body of a cond or loop extends another state than the one it is given, at {node.line}; fork "
                "within the body, or call cond on that state"
            )
        self._blocks[-1].nodes.append(node)

    def block(self, stream: int, body: Callable[[], object]) -> tuple[AnyNode, ...]:
        """Gives the nodes that `body` appends in a block that extends `stream`."""
        if stream not in self._blocks[-1].streams:
            raise TraceError(
                f"a cond or loop within a body must be on the state that the body is given, at {program_line()}"
            )
        self._blocks.append(_OpenBlock([], {stream}))
        try:
            body()
            return tuple(self._blocks[-1].nodes)
        finally:
            self._blocks.pop()

    def media_argument(self, symbol: Symbol, kind: ArgumentKind) -> ArgumentRef:
        """Gives the argument of `image(symbol)` or `video(symbol)`, and notes its kind."""
        ref = symbol.ref if isinstance(symbol, Traced) else None
        if not isinstance(ref, ArgumentRef):
            raise TraceError(f"an {kind} must be known or an argument, not a variable, at {program_line()}")
        self._use(ref, kind)
        self.arguments[ref.name] = kind
        return ref

    def pieces(self, value: Any) -> tuple[Piece, ...]:
        """Gives the pieces of a text, as `Symbols.pieces` does, and notes its arguments as texts."""
        pieces = self.symbols.pieces(value)
        for piece in pieces:
            if isinstance(piece, ArgumentRef):
                self._use(piece, "text")
        return pieces

    def constant(self, text: str, what: str) -> str:
        """Gives the text. Raises TraceError where it holds a value of a run."""
        if self.symbols.is_symbolic(text):
            raise TraceError(f"{what} must be constant in a program that is traced, at {program_line()}; {ADVICE}")
        return text

    def _use(self, ref: ArgumentRef, kind: ArgumentKind) -> None:
        if self._kinds_used.setdefault(ref.name, kind) != kind:
            raise TraceError(
                f"the argument {ref.name!r} is used as {self._kinds_used[ref.name]} and as {kind}, at {program_line()}"
            )
