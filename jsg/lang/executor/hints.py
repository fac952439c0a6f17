"""Prefixes that a graph has computed ahead, and how long they are kept.

A hint is a stream of its own, whose prompt is a beginning of other streams' prompts and which nobody else extends; or,
while a stream waits for a value, that stream's own prompt as it stands. Neither changes what a stream says.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from jsg.lang.backend import PromptItem
from jsg.lang.executor.evaluation import NOTHING
from jsg.lang.executor.frames import Frame, Gate, Tasks
from jsg.lang.graphs.graph import Fork
from jsg.lang.graphs.optimise import (
    MIN_SHARED,
    ArgumentValue,
    Optimisations,
    common_prefix,
    prefix_size,
    shared_by_calls,
    static_prefix,
)
from jsg.lang.ir import Expr, ExprList
from jsg.lang.streams.ops import Place
from jsg.lang.streams.stream import Stream


class Hints:
    """The hints of one run.

    Attributes:
        streams: Those that were opened for hints.
    """

    def __init__(
        self,
        options: Optimisations,
        arguments: Mapping[str, ArgumentValue],
        tasks: Tasks,
        open_stream: Callable[[], Stream],
        hinted: Mapping[str, int],
    ) -> None:
        """`hinted`: programs whose common prefix somebody else has had computed, and its size."""
        self.streams: list[Stream] = []
        self._options = options
        self._arguments = arguments
        self._tasks = tasks
        self._open_stream = open_stream
        self._hinted = hinted
        # Characters since a model call or a hint; less than 0 while all is within a prefix that was hinted.
        self._unhinted: dict[Stream, int] = {}

    def send_for_calls(self, frame: Frame) -> None:
        """Sends what the programs that a block calls begin with, and has their streams wait for it."""
        if not self._options.share_prefixes:
            return
        for program, (numbers, prefix) in shared_by_calls(frame.block, [self._arguments]).items():
            if program in self._hinted:
                continue
            hint = self._open_stream()
            gate = self._send(hint, prefix)
            for number in numbers:
                frame.gates[number] = gate
            self._tasks.spawn(self._release_calls(hint, numbers, frame))

    def send_for_branches(self, node: Fork, stream: Stream, frame: Frame, place: Place) -> Stream | None:
        """Sends what all branches of a fork begin with; to be called before the fork. Gives the stream of the hint."""
        if not self._options.share_prefixes or len(node.branches) < 2 or node.offsets is not None:
            return None  # at another position nothing is in common
        prompts = [static_prefix(frame.nodes.get(number, ()), self._arguments) for number in node.branches]
        prefix = common_prefix(prompts)
        if not prefix:
            return None
        (hint,) = stream.fork(1, None, place)
        gate = self._send(hint, prefix)
        for number in node.branches:
            frame.gates[number] = gate
        return hint

    def begin(self, number: int, program: str | None, stream: Stream, frame: Frame, place: Place) -> None:
        """Notes a stream that was opened or forked (`program` None); has it wait for its gate."""
        gate = frame.gates.get(number)
        self._unhinted[stream] = -self._hinted.get(program, 0) if program is not None else 0
        if gate is not None:
            stream.append_later(_waiter(gate), (), place)
            self._unhinted[stream] = -gate.size

    def appended(self, stream: Stream, size: int) -> None:
        """Notes that a stream was extended."""
        self._unhinted[stream] += size

    def computed(self, stream: Stream) -> None:
        """Notes that a stream's prompt is computed up to here."""
        self._unhinted[stream] = 0

    def waits(self, stream: Stream) -> None:
        """Has a stream's prompt computed as it stands, while it waits for a value, where that is worth a request."""
        if self._options.prefetch and self._unhinted[stream] >= MIN_SHARED:
            self._unhinted[stream] = 0
            stream.hint()

    async def release(
        self, hint: Stream, users: Sequence[Stream], drivers: Sequence[asyncio.Task[None] | None]
    ) -> None:
        """Gives a prefix back when those have ended that began with it.

        Args:
            hint: The stream of the hint.
            users: Those that began with it.
            drivers: The tasks that extend them.
        """
        if not self._options.release_early or not self._options.parallel:
            return  # with the program
        await _finished(drivers)
        for user in users:
            with contextlib.suppress(Exception):
                await user.read("nothing").get()
        hint.close()

    async def _release_calls(self, hint: Stream, numbers: Sequence[int], frame: Frame) -> None:
        await _finished([frame.drivers.get(number) for number in numbers])
        await self.release(hint, [frame.streams[number] for number in numbers if number in frame.streams], ())

    def _send(self, hint: Stream, prefix: Sequence[PromptItem]) -> Gate:
        self.streams.append(hint)
        hint.append(ExprList(tuple(prefix)))
        hint.hint()
        return Gate(hint.read("nothing"), prefix_size(prefix))


def _waiter(gate: Gate) -> Callable[[], Awaitable[Expr]]:
    async def make() -> Expr:
        with contextlib.suppress(Exception):  # a hint that failed is only a lost hint
            await gate.variable.get()
        return NOTHING

    return make


async def _finished(drivers: Iterable[asyncio.Task[None] | None]) -> None:
    tasks = [driver for driver in drivers if driver is not None]
    if tasks:
        await asyncio.wait(tasks)
