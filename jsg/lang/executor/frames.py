"""The streams and values of one run of a block."""

import asyncio
import dataclasses

from jsg.lang.graphs.nodes import AnyNode, Block
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable


@dataclasses.dataclass(slots=True, eq=False)
class Frame:
    """The streams and values of one run of a block. A loop makes a frame for each round.

    Attributes:
        outer: The frame of the block around.
        owned: The nodes whose values are in this frame.
        nodes: The nodes of the block, by stream.
        streams: The streams that its nodes extend, by number.
        drivers: The tasks that hand these streams their nodes.
        slots: The variables that its nodes set. Each is there as soon as its node was handed over.
        returned: For a stream, a future that is done when the stream has all its nodes.
    """

    outer: "Frame | None"
    owned: frozenset[int]
    nodes: dict[int, list[AnyNode]]
    streams: dict[int, Stream] = dataclasses.field(default_factory=dict)
    drivers: dict[int, asyncio.Task[None]] = dataclasses.field(default_factory=dict)
    slots: dict[tuple[int, str], asyncio.Future[Variable]] = dataclasses.field(default_factory=dict)
    returned: dict[int, asyncio.Future[None]] = dataclasses.field(default_factory=dict)

    def slot(self, node: int, name: str) -> asyncio.Future[Variable]:
        """Gives the variable that a node sets, once the node was handed over."""
        frame = self
        while node not in frame.owned:
            assert frame.outer is not None, "a graph that was checked reads only what is defined"
            frame = frame.outer
        slot = frame.slots.get((node, name))
        if slot is None:
            slot = frame.slots[node, name] = asyncio.get_running_loop().create_future()
        return slot

    def complete(self, number: int) -> asyncio.Future[None]:
        """Gives a future that is done when a stream has all its nodes."""
        if number not in self.returned:
            self.returned[number] = asyncio.get_running_loop().create_future()
        return self.returned[number]

    def outermost(self) -> "Frame":
        """Gives the frame of the whole graph, which has the streams of called programs that a value may keep."""
        frame = self
        while frame.outer is not None:
            frame = frame.outer
        return frame

    def define(self, node: int, name: str, variable: Variable) -> None:
        """Fills a slot. A second call does nothing."""
        slot = self.slot(node, name)
        if not slot.done():
            slot.set_result(variable)


def new_frame(block: Block, outer: Frame | None, *also_owned: int) -> Frame:
    """Makes the frame of a run of a block.

    Args:
        block: The block.
        outer: The frame of the block around.
        also_owned: Further nodes whose values are in the frame.
    """
    owned = frozenset((*(node.id for node in block.nodes), *also_owned))
    nodes: dict[int, list[AnyNode]] = {}
    for node in block.nodes:
        nodes.setdefault(node.stream, []).append(node)
    return Frame(outer, owned, nodes)


def text_len(stream: Stream) -> int:
    """Gives the number of characters that a stream has so far."""
    return stream.runner.transcript.num_chars
