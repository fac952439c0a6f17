"""What a trace under way has noted: nodes in their blocks, the numbers it gave out, and its symbols."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jsg.errors import TraceError
from jsg.lang.graphs.nodes import AnyNode, ArgumentKind, ArgumentRef, Piece
from jsg.lang.ir import Symbol
from jsg.lang.tracing.symbols import ADVICE, Symbols, Traced, program_line

MAX_NODES = 100_000  # a body that appends without end is not traced to the end of memory


@dataclasses.dataclass(slots=True)
class _OpenBlock:
    """A block that is being traced.

    Attributes:
        nodes: So far.
        streams: Those that may be extended in it.
    """

    nodes: list[AnyNode]
    streams: set[int]


class Recorder:
    """One trace under way: numbers nodes and streams, and knows in which block the body stands.

    Attributes:
        symbols: Its symbols.
        arguments: Kinds of the arguments, by name.
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
        """Of the outermost block."""
        return self._blocks[0].nodes

    def next_id(self) -> int:
        """A node's number."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise TraceError(f"the program has more than {MAX_NODES} nodes at {program_line()}; use jsg.loop")
        return self._num_nodes - 1

    def next_group(self) -> int:
        """A number for the parts of one `unordered`."""
        self._num_groups += 1
        return self._num_groups - 1

    def new_stream(self) -> int:
        """A stream that may be extended in the block at hand."""
        self._num_streams += 1
        self._blocks[-1].streams.add(self._num_streams - 1)
        return self._num_streams - 1

    def emit(self, node: AnyNode) -> None:
        """Adds a node to the block at hand."""
        if node.stream not in self._blocks[-1].streams:
            raise TraceError(
                f"the body of a cond or loop extends another state than the one it is given, at {node.line}; fork "
                "within the body, or call cond on that state"
            )
        self._blocks[-1].nodes.append(node)

    def block(self, stream: int, body: Callable[[], object]) -> tuple[AnyNode, ...]:
        """The nodes of what `body` appends, as a block that extends `stream`."""
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
        """The argument behind `image(symbol)`, which a run will give as such."""
        ref = symbol.ref if isinstance(symbol, Traced) else None
        if not isinstance(ref, ArgumentRef):
            raise TraceError(f"an {kind} must be known or an argument, not a variable, at {program_line()}")
        self._use(ref, kind)
        self.arguments[ref.name] = kind
        return ref

    def pieces(self, value: Any) -> tuple[Piece, ...]:
        """A text in pieces, see `Symbols.pieces`."""
        pieces = self.symbols.pieces(value)
        for piece in pieces:
            if isinstance(piece, ArgumentRef):
                self._use(piece, "text")
        return pieces

    def constant(self, text: str, what: str) -> str:
        """Text that must not hold a value of a run."""
        if self.symbols.is_symbolic(text):
            raise TraceError(f"{what} must be constant in a program that is traced, at {program_line()}; {ADVICE}")
        return text

    def _use(self, ref: ArgumentRef, kind: ArgumentKind) -> None:
        if self._kinds_used.setdefault(ref.name, kind) != kind:
            raise TraceError(
                f"the argument {ref.name!r} is used as {self._kinds_used[ref.name]} and as {kind}, at {program_line()}"
            )
