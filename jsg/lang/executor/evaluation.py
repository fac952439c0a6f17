"""The values of a running graph. Each is made as soon as the values that it reads are known."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, assert_never

from jsg.constrained.text_patterns import TextPatterns, TextReader
from jsg.errors import RequestError
from jsg.lang.executor import conditions
from jsg.lang.executor.arguments import ArgumentValue
from jsg.lang.executor.frames import Frame, text_len
from jsg.lang.executor.reading import CalledState
from jsg.lang.graphs.nodes import (
    ArgumentRef,
    Condition,
    ConstantValue,
    DictValue,
    ListValue,
    Piece,
    StateValue,
    TextValue,
    TupleValue,
    Value,
    ValueRef,
    VariableValue,
)
from jsg.lang.streams.history import History
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable, joined_report

MATCH_COST = 64  # matching one character by a pattern takes as long as joining this many characters
_STEPS = 2000  # of matching by all programs of the process together, before other tasks run: less than a millisecond


_reading: set[TextReader] = set()  # those of all programs; each takes its part of `_STEPS`


class Evaluator:
    """Makes values, within a budget of text."""

    def __init__(
        self,
        arguments: Mapping[str, ArgumentValue],
        tasks: asyncio.TaskGroup,
        max_text: int | None,
        patterns: TextPatterns | None = None,
        history: History | None = None,
    ) -> None:
        """`patterns` are those of all conditions; with None they are compiled when they are needed."""
        self._arguments = arguments
        self._patterns = patterns
        self._tasks = tasks
        self._text_left = max_text
        self._history = history or History(is_watched=False)
        self._promised: set[Variable] = set()  # the variables that are not done

    @property
    def is_bounded(self) -> bool:
        """Whether the text has a budget."""
        return self._text_left is not None

    def promise(self, value: Value, frame: Frame) -> Variable:
        """Gives a variable that will hold a value. If the value is just another variable, gives that one."""
        slot = _whole_slot(value, frame)
        if slot is not None and slot.done() and not _becomes_text(value):
            return slot.result()
        return self.promised(lambda variable: self.follow(variable, value, frame))

    def promised(self, fill: Callable[[Variable], Coroutine[Any, Any, None]]) -> Variable:
        """Gives a variable that `fill` fills, in a task of its own."""
        variable = Variable()
        self._promised.add(variable)
        variable.when_done(lambda: self._promised.discard(variable))
        self._tasks.create_task(fill(variable))
        return variable

    def fail_promises(self, error: BaseException) -> None:
        """Fails the promised variables whose tasks were cancelled."""
        for variable in tuple(self._promised):
            variable.fail(error)

    async def follow(self, variable: Variable, value: Value, frame: Frame) -> None:
        """Fills a variable with a value, piece by piece where the value is another variable."""
        slot = _whole_slot(value, frame)
        if slot is None:
            await self.fulfil(variable, value, frame)
            return
        source = await slot
        async for piece in source.grow_async():
            variable.add(piece)
        if source.error is not None:
            variable.fail(source.error)
            return
        try:
            kept = source.now()
            _finish(variable, _as_text(kept, "") if _becomes_text(value) else kept, source.meta)
        except Exception as error:
            self._fail(variable, error)

    async def fulfil(self, variable: Variable, value: Value, frame: Frame) -> None:
        """Fills a variable with a value, or with the error that kept the value from being known."""
        try:
            _finish(variable, await self._value(value, frame), await _report(value, frame))
        except Exception as error:
            self._fail(variable, error)

    def _fail(self, variable: Variable, error: Exception) -> None:
        self._history.let_go(error)
        variable.fail(error)

    async def _value(self, value: Value, frame: Frame) -> Any:
        match value:
            case TextValue(pieces):
                ref = value.kept
                return await self.text(pieces, frame) if ref is None else await self._read(ref, frame)
            case ListValue(items):
                return [await self._value(item, frame) for item in items]
            case TupleValue(items):
                return tuple([await self._value(item, frame) for item in items])
            case DictValue(items):
                return {key: await self._value(item, frame) for key, item in items}
            case ConstantValue(constant):
                return constant
            case VariableValue(ref):
                return await self._read(ref, frame)
            case StateValue(number, outputs):
                variables = {name: self.promise(item, frame) for name, item in outputs}
                outermost = frame.outermost()
                await outermost.complete(number)
                return CalledState(outermost.streams[number], variables)
            case _:
                assert_never(value)

    async def text(self, pieces: Iterable[Piece], frame: Frame) -> str:
        """Gives the text of pieces, once all values are known. Raises the error of a value, or RequestError."""
        parts: list[str] = []
        for piece in pieces:
            match piece:
                case str():
                    parts.append(piece)
                case ArgumentRef(name) | ValueRef(name=name):
                    parts.append(_as_text(await self._read(piece, frame), name))
                case _:
                    assert_never(piece)
            self.charge(len(parts[-1]))
        return "".join(parts)

    async def _read(self, ref: ArgumentRef | ValueRef, frame: Frame) -> Any:
        if isinstance(ref, ArgumentRef):
            return self._arguments[ref.name]
        value = await (await frame.slot(ref.node, ref.name)).get()
        if ref.index is None:
            return value
        if not isinstance(value, list | tuple) or ref.index >= len(value):
            raise RequestError(f"the program reads item {ref.index} of {ref.name!r}, which has no such item here")
        return value[ref.index]

    def charge(self, num_chars: int) -> None:
        """Takes characters from the budget. Raises RequestError when none are left."""
        if self._text_left is not None:
            self._text_left -= num_chars
            if self._text_left < 0:
                raise RequestError(
                    "the program puts together more text than is allowed; append less, or loop less often"
                )

    async def charge_for(self, stream: Stream) -> None:
        """Takes the text of a stream from the budget."""
        self.charge(text_len(stream))

    async def holds(self, condition: Condition, frame: Frame) -> bool:
        """Says whether a condition holds, once all that it reads is known. Raises the same as `text`."""
        texts = {value: await self.text(value.pieces, frame) for value in conditions.texts_of(condition)}
        tests = [(texts[part.value], part.pattern) for part in conditions.matches_of(condition)]
        found = {test: await self._matches(*test) for test in tests}
        return conditions.holds(condition, texts.__getitem__, lambda text, pattern: found[text, pattern])

    async def _matches(self, text: str, pattern: str) -> bool:
        """Says whether a pattern matches a text. Other tasks run meanwhile. Raises RequestError."""
        self.charge(MATCH_COST * len(text))
        if self._patterns is None:
            reader = await asyncio.to_thread(conditions.reader_of, text, pattern)
        else:
            reader = conditions.reader_of(text, pattern, self._patterns)
        num_charged = 0
        _reading.add(reader)
        try:
            while (found := reader.read(max(1, _STEPS // len(_reading)))) is None:
                self.charge(reader.num_steps - num_charged)
                num_charged = reader.num_steps
                await asyncio.sleep(0)
        finally:
            _reading.discard(reader)
        return found


async def _report(value: Value, frame: Frame) -> dict[str, Any] | None:
    """Gives the report about a value that is made of variables of joined branches, all of which are done."""
    match value:
        case ListValue(items):
            return joined_report([await _report(item, frame) for item in items])
        case TextValue((ValueRef(node, name, None),)) | VariableValue(ValueRef(node, name)):
            return (await frame.slot(node, name)).meta
        case _:
            return None


def _finish(variable: Variable, value: Any, report: dict[str, Any] | None) -> None:
    if isinstance(value, str) and not variable.num_pieces:
        variable.add(value)
    variable.finish(value, report)


def _as_text(value: Any, name: str) -> str:
    """Gives a variable's value as text. Raises RequestError for lists and dictionaries, whose text has any length."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, int | float):
        return str(value)
    raise RequestError(f"a text reads {name!r}, which must be text or a number, but is a {type(value).__name__}")


def _whole_slot(value: Value, frame: Frame) -> asyncio.Future[Variable] | None:
    """Gives the slot of the variable that a value consists of, if it is just one."""
    match value:
        case TextValue((ValueRef(node, name, None),)) | VariableValue(ValueRef(node, name)):
            return frame.slot(node, name)
        case _:
            return None


def _becomes_text(value: Value) -> bool:
    return isinstance(value, TextValue) and value.is_text
