"""Where the nodes of one run of a block keep their streams and values."""

import asyncio
import dataclasses

from jsg.lang.graphs.nodes import AnyNode, Block
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable


@dataclasses.dataclass(slots=True, eq=False)
class Frame:
    """What the nodes of one run of a block have: their streams and values. A loop makes one for each round.

    Attributes:
        outer: That of the block around.
        owned: Nodes whose values are found here.
        nodes: Of the block, by stream.
        streams: Those that its nodes extend, by number.
        drivers: The tasks that do so.
        slots: The variables that its nodes set, as soon as a node was handed to its stream.
        returned: What waits for a stream to be there and to have all its nodes.
    """

    outer: "Frame | None"
    owned: frozenset[int]
    nodes: dict[int, list[AnyNode]]
    streams: dict[int, Stream] = dataclasses.field(default_factory=dict)
    drivers: dict[int, asyncio.Task[None]] = dataclasses.field(default_factory=dict)
    slots: dict[tuple[int, str], asyncio.Future[Variable]] = dataclasses.field(default_factory=dict)
    returned: dict[int, asyncio.Future[None]] = dataclasses.field(default_factory=dict)

    def slot(self, node: int, name: str) -> asyncio.Future[Variable]:
        """The variable that a node sets, once the node was handed to its stream."""
        frame = self
        while node not in frame.owned:
            assert frame.outer is not None, "a graph that was checked reads only what is defined"
            frame = frame.outer
        slot = frame.slots.get((node, name))
        if slot is None:
            slot = frame.slots[node, name] = asyncio.get_running_loop().create_future()
        return slot

    def complete(self, number: int) -> asyncio.Future[None]:
        """Done when a stream has all its nodes."""
        if number not in self.returned:
            self.returned[number] = asyncio.get_running_loop().create_future()
        return self.returned[number]

    def outermost(self) -> "Frame":
        """That of the whole graph, where the streams of called programs are that may be kept."""
        frame = self
        while frame.outer is not None:
            frame = frame.outer
        return frame

    def define(self, node: int, name: str, variable: Variable) -> None:
        """Fills a slot; a second time it does nothing."""
        slot = self.slot(node, name)
        if not slot.done():
            slot.set_result(variable)


def new_frame(block: Block, outer: Frame | None, *also_owned: int) -> Frame:
    """The frame of a run of a block.

    Args:
        block: The block.
        outer: That of the block around.
        also_owned: Further nodes whose values are found in it.
    """
    owned = frozenset((*(node.id for node in block.nodes), *also_owned))
    nodes: dict[int, list[AnyNode]] = {}
    for node in block.nodes:
        nodes.setdefault(node.stream, []).append(node)
    return Frame(outer, owned, nodes)


def text_len(stream: Stream) -> int:
    """Characters that a stream has so far."""
    return sum(map(len, stream.log.pieces_between(0)))
