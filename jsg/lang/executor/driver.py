"""Hands the nodes of a graph to their streams.

A task for each stream hands over its nodes in program order. A text that needs a value of another stream waits in the
queue of its stream. The task itself waits only for the conditions of `cond` and `loop` and for branches to be joined.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Never, assert_never

from jsg.errors import UnknownVariableError
from jsg.lang.executor.arguments import ArgumentValue, known_media, known_text
from jsg.lang.executor.evaluation import Evaluator
from jsg.lang.executor.frames import Frame, new_frame
from jsg.lang.graphs.nodes import (
    MAIN_STREAM,
    AnyNode,
    Append,
    Assign,
    Choose,
    Cond,
    Fork,
    Generate,
    Join,
    Loop,
    Media,
    Node,
    Open,
    ReadText,
    Scope,
    Turn,
    ValueRef,
)
from jsg.lang.graphs.shapes import defined
from jsg.lang.streams.ops import ExprOp, Make, Place
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable, gather
from jsg.lang.words.ir import (
    REASONING_SUFFIX,
    Expr,
    Gen,
    RoleBegin,
    RoleEnd,
    Select,
    SeparateReasoning,
    Text,
    VarScopeBegin,
    VarScopeEnd,
)

type Pace = Callable[[], Awaitable[None]]

_TURN = 100  # nodes that are handed over before other tasks run


class Driver:
    """Hands over the nodes of one run.

    Attributes:
        streams: All streams that the graph opened.
        values: Every variable that a node set, in the order in which the nodes were handed over.
    """

    def __init__(
        self,
        main: Stream,
        submitted: Variable,
        open_stream: Callable[[Open], Stream],
        arguments: Mapping[str, ArgumentValue],
        tasks: asyncio.TaskGroup,
        evaluator: Evaluator,
        concatenated: frozenset[int],
        pace: Pace | None = None,
    ) -> None:
        """Prepares the run.

        Args:
            main: The program's own stream.
            submitted: Is set when the own stream has all its nodes.
            open_stream: Makes the stream of a program that the program calls.
            arguments: The arguments of the run.
            tasks: The tasks of the run; all end before it does.
            evaluator: Makes the values of the run.
            concatenated: Branches of "concate_and_append" joins, which end them.
            pace: Returns when the next node may be handed over; None lets other tasks run every `_TURN` nodes.
        """
        self.streams: list[Stream] = [main]
        self.values: list[tuple[AnyNode, Variable]] = []
        self._main = main
        self._submitted = submitted
        self._open_stream = open_stream
        self._arguments = arguments
        self._tasks = tasks
        self._evaluator = evaluator
        self._concatenated = concatenated
        self._pace = pace
        self._forked: dict[Stream, list[asyncio.Task[None]]] = {}
        self._num_steps = 0

    # Blocks and streams

    async def run_block(self, frame: Frame, holder: int | None) -> None:
        """Hands the nodes of a block to their streams. Returns when the stream `holder` has all of its nodes."""
        for number, nodes in frame.nodes.items():
            if isinstance(nodes[0], Open):
                frame.drivers[number] = self._tasks.create_task(self._drive(number, frame))
        for node in frame.nodes.get(holder, ()) if holder is not None else ():
            await self._step(node, frame)

    async def _drive(self, number: int, frame: Frame) -> None:
        """Hands a stream its nodes, and closes it after the last one. It ends early where the run is cancelled."""
        with contextlib.suppress(
            asyncio.CancelledError
        ):  # else the task keeps the traceback, whose frames have the task
            await self._drive_to_end(number, frame)

    async def _drive_to_end(self, number: int, frame: Frame) -> None:
        for node in frame.nodes.get(number, ()):
            await self._step(node, frame)
        stream = frame.streams[number]
        frame.complete(number).set_result(None)
        if stream is self._main:
            self._submitted.finish(None)
        if forked := self._forked.get(stream):
            await asyncio.wait(forked)
        if number not in self._concatenated:
            stream.close()  # nobody needs its prefix any more

    # Nodes

    async def _step(self, node: AnyNode, frame: Frame) -> None:
        """Hands a node to its stream. An error of the node ends the stream there."""
        await (self._pace or self._pause)()
        try:
            await self._hand_over(node, frame)
        except Exception as error:
            for name in defined(node) or ([_own_name(node)] if isinstance(node, Generate | Choose) else ()):
                self._define(node, name, _failed(error), frame, is_bound=True)
            with contextlib.suppress(Exception):  # the stream may have ended already
                frame.streams[node.stream].append(Text(""), place_of(node), _raiser(error))

    async def _pause(self) -> None:
        self._num_steps += 1
        if self._num_steps % _TURN == 0:
            await asyncio.sleep(0)

    async def _hand_over(self, node: AnyNode, frame: Frame) -> None:
        if isinstance(node, Open):
            self._open(node, frame)
            return
        stream, place = frame.streams[node.stream], place_of(node)
        match node:
            case Append():
                self._append(node, stream, frame)
            case Media() | Turn():
                stream.append(known_item(node, self._arguments), place)
            case Generate():
                self._generate(node, stream, frame)
            case Choose():
                self._choose(node, stream, frame)
            case Scope(name=name, is_begin=is_begin):
                stream.append(VarScopeBegin(name) if is_begin else VarScopeEnd(name), place)
                if not is_begin:
                    self._define(node, name, stream.variable(name), frame)
            case ReadText():
                if self._evaluator.is_bounded:  # not with `append`, after which branches could no longer be joined
                    stream.runner.push([ExprOp(Text(""), place, make=lambda: self._evaluator.charge_for(stream))])
                self._define(node, "", stream.read("text"), frame)
            case Assign(name=name, value=value):
                self._define(node, name, self._evaluator.promise(value, frame), frame, is_bound=True)
            case Fork():
                self._fork(node, stream, frame)
            case Join():
                await self._join(node, stream, frame)
            case Cond():
                await self._cond(node, stream, frame)
            case Loop():
                await self._loop_rounds(node, stream, frame)
            case _:
                assert_never(node)

    def _open(self, node: Open, frame: Frame) -> None:
        if node.stream == MAIN_STREAM:
            stream = self._main
        else:
            stream = self._open_stream(node)
            self.streams.append(stream)
        frame.streams[node.stream] = stream

    def _append(self, node: Append, stream: Stream, frame: Frame) -> None:
        start = next((i for i, piece in enumerate(node.pieces) if isinstance(piece, ValueRef)), len(node.pieces))
        text, pieces = known_text(node.pieces[:start], self._arguments), node.pieces[start:]
        if text:
            stream.append(text, place_of(node))
        if not pieces:
            return

        async def make() -> Text | None:
            text = await self._evaluator.text(pieces, frame)
            return Text(text) if text else None

        stream.append(Text(""), place_of(node), make)

    def _generate(self, node: Generate, stream: Stream, frame: Frame) -> None:
        name = _own_name(node)
        expr: Expr = Gen(name, node.args)
        if node.reasoning is not None:
            expr = SeparateReasoning(expr, node.reasoning)
        stream.append(expr, place_of(node))
        if node.reasoning is not None and node.name is not None:
            self._define(node, name + REASONING_SUFFIX, stream.variable(name + REASONING_SUFFIX), frame)
        self._define(node, name, stream.variable(name), frame)

    def _choose(self, node: Choose, stream: Stream, frame: Frame) -> None:
        name = _own_name(node)

        def select(texts: Sequence[str]) -> Select:
            choices, question = texts[: len(node.choices)], None if node.question is None else texts[-1]
            return Select(name, tuple(choices), node.method, node.temperature, node.seed, question, node.decision)

        async def make() -> Select:
            return select([await self._evaluator.text(text.pieces, frame) for text in node.texts])

        if any(isinstance(piece, ValueRef) for text in node.texts for piece in text.pieces):
            stream.append(select([""] * len(node.texts)), place_of(node), make)
        else:
            stream.append(select([known_text(text.pieces, self._arguments) for text in node.texts]), place_of(node))
        self._define(node, name, stream.variable(name), frame)

    def _fork(self, node: Fork, stream: Stream, frame: Frame) -> None:
        place = place_of(node)
        branches = stream.fork(len(node.branches), node.offsets, place)
        self.streams += branches
        for number, branch in zip(node.branches, branches, strict=True):
            frame.streams[number] = branch
            frame.drivers[number] = self._tasks.create_task(self._drive(number, frame))
        # The stream ends after its branches, because its end would end them too.
        self._forked.setdefault(stream, []).extend(frame.drivers[number] for number in node.branches)

    async def _join(self, node: Join, stream: Stream, frame: Frame) -> None:
        branches = [frame.streams[number] for number in node.branches]
        drivers = [frame.drivers[number] for number in node.branches if number in frame.drivers]
        if node.mode == "concate_and_append":
            await asyncio.wait(drivers)
            stream.join(branches, node.mode, place_of(node))
            return
        if not all(one.is_sure for one in node.gathered):  # only then must the stream itself wait for conditions
            await asyncio.wait(drivers)
        for name, is_sure in ((one.name, one.is_sure) for one in node.gathered):
            if is_sure or any(name in branch.assigned for branch in branches):
                fill = functools.partial(_gather, name, branches, drivers)
                self._define(node, name, self._evaluator.promised(fill), frame, is_bound=True)
            else:
                self._define(node, name, _kept(stream, name), frame)

    async def _cond(self, node: Cond, stream: Stream, frame: Frame) -> None:
        block = node.then if await self._evaluator.holds(node.condition, frame) else node.otherwise
        inner = new_frame(block, frame)
        inner.streams[node.stream] = stream
        await self.run_block(inner, node.stream)
        set_here, before = dict(block.outputs), dict(node.before)
        for name in defined(node):
            if name in set_here:
                variable = self._evaluator.promise(set_here[name], inner)
            elif name in before:
                variable = self._evaluator.promise(before[name], frame)
            else:
                variable = _kept(stream, name)
            self._define(node, name, variable, frame)

    async def _loop_rounds(self, node: Loop, stream: Stream, frame: Frame) -> None:
        carried = {name: self._evaluator.promise(value, frame) for name, value in node.before}
        for _ in range(node.max_rounds):
            await asyncio.sleep(0)  # otherwise a body without a call of the model would block the event loop
            inner = new_frame(node.body, frame, node.id)
            inner.streams[node.stream] = stream
            for name, variable in carried.items():
                inner.define(node.id, name, variable)
            await self.run_block(inner, node.stream)
            carried = carried | {name: self._evaluator.promise(value, inner) for name, value in node.body.outputs}
            if node.until is not None and await self._evaluator.holds(node.until, inner):
                break
        for name, variable in carried.items():
            self._define(node, name, variable, frame)

    def _define(self, node: AnyNode, name: str, variable: Variable, frame: Frame, *, is_bound: bool = False) -> None:
        """Fills a slot. With `is_bound` the name means this variable on the stream of the node from here on."""
        self.values.append((node, variable))
        frame.define(node.id, name, variable)
        if is_bound and node.stream in frame.streams:
            frame.streams[node.stream].bind(name, variable)


async def _gather(
    name: str, branches: Sequence[Stream], drivers: Sequence[asyncio.Task[None]], variable: Variable
) -> None:
    """Fills a variable with the list of the values of branches that have set a name."""
    if drivers:
        await asyncio.wait(drivers)
    found = [branch.assigned.get(name) for branch in branches]
    variable.finish_as(gather(found) if any(found) else _unset(name))


def _kept(stream: Stream, name: str) -> Variable:
    """Gives the variable that a name meant before: also one that an earlier round of a loop has set."""
    return stream.variables.get(name) or _unset(name)


def _unset(name: str) -> Variable:
    return _failed(UnknownVariableError(f"nothing set {name!r} the way the program went"))


def known_item(node: AnyNode, arguments: Mapping[str, ArgumentValue]) -> Expr:
    """Gives what a node appends that reads arguments only."""
    match node:
        case Media():
            return known_media(node, arguments)
        case Turn(role=role, is_begin=is_begin):
            return RoleBegin(role) if is_begin else RoleEnd(role)
        case Append(pieces=pieces):
            return Text(known_text(pieces, arguments))
        case _:
            raise AssertionError(f"not known before the run: {node}")


def place_of(node: Node) -> Place:
    """Gives file name and line in the form that `Stream` takes."""
    name, _, line = node.line.rpartition(":")
    return Place(name, int(line), node.id) if line.isdecimal() else Place(node.line, 0, node.id)


def _own_name(node: Generate | Choose) -> str:
    return node.name or f"(node {node.id})"


def _failed(error: BaseException) -> Variable:
    variable = Variable()
    variable.fail(error)
    return variable


def _raiser(error: BaseException) -> Make:
    async def make() -> Never:
        raise error

    return make
