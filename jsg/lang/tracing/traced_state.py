"""The state that a traced body is given: it records what is appended, and has no values."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Never, Self, final

from jsg.errors import ProgramError, TraceError
from jsg.lang.graphs.nodes import (
    AnyNode,
    Append,
    Assign,
    Block,
    Choose,
    Cond,
    Condition,
    ConstantValue,
    DictValue,
    Fork,
    Gathered,
    Generate,
    Join,
    ListValue,
    Loop,
    Media,
    Piece,
    ReadText,
    Scope,
    StateValue,
    TextValue,
    TupleValue,
    Turn,
    Value,
    ValueRef,
    VariableValue,
    refs,
)
from jsg.lang.graphs.shapes import OPAQUE, Shape, defined, merged_shapes, shape_of
from jsg.lang.program.branches import Extendable, ProgramStateGroup
from jsg.lang.program.reading import Readable, What
from jsg.lang.streams.variables import Variable
from jsg.lang.tracing.recorder import Recorder
from jsg.lang.tracing.symbols import ADVICE, Mixed, Traced, TracedText, merge_pieces, plain, program_line, traced
from jsg.lang.words.ir import (
    Expr,
    ExprList,
    Gen,
    Image,
    MediaOf,
    RoleBegin,
    RoleEnd,
    SamplingArgs,
    Select,
    SeparateReasoning,
    Symbol,
    Text,
    VarScopeBegin,
    VarScopeEnd,
    Video,
    parts_of,
)
from jsg.lang.words.layered import LayeredDict
from jsg.lang.words.nesting import JoinMode, Nesting, check_join

Part = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class OrderFree(Expr):
    """Parts of text, pictures and videos that mean the same in any order."""

    parts: tuple[Expr, ...]


@final
class TracedState(Readable, Extendable):
    """The state of a stream of a traced program. It has the methods of `ProgramState` that need no value.

    Attributes:
        stream: The number of its stream.
        variables: The results of reads: symbols, lists of symbols, or values that the program set.
        ret_value: The value that the program of this stream returned.
    """

    def __init__(self, recorder: Recorder, stream: int, parent: "TracedState | None" = None) -> None:
        self.stream = stream
        self.variables = parent.variables.fork() if parent else LayeredDict[Any]()
        self.ret_value: Any = None
        self._recorder = recorder
        self._nesting = parent._nesting.fork() if parent else Nesting()
        # Variables set since the beginning of the stream or of the current block, and whether each way sets them.
        self._set: dict[str, bool] = {}
        # Variables that only one way through the program sets; and names for which `in` was False, with the lines.
        self._perhaps: set[str] = set(parent._perhaps) if parent else set()
        self._missed: dict[str, str] = parent._missed if parent else {}
        # In the body of a loop, the variables that the round before leaves, and the names of those that were read.
        self._carried: dict[str, Any] = parent._carried if parent else {}
        self._looked_at: set[str] = parent._looked_at if parent else set()
        self._is_written = False
        self._is_joined = False

    # Appending

    def extend(self, value: Any) -> Self:
        """Records text or an expression; does the same as `+=`."""
        try:
            self._append(value)
        except ProgramError as error:
            raise traced(error) from None
        return self

    __iadd__ = extend

    def _append(self, value: Any, part: Part | None = None) -> None:
        text: list[Expr] = []
        for item in parts_of(value):
            if isinstance(item, Text | Symbol):
                text.append(item)
                continue
            self._append_text(text, part)
            text = []
            if part is not None and not isinstance(item, Image | Video | MediaOf):
                raise TraceError(f"the parts of unordered() must be text and media, at {program_line()}")
            self._append_item(item, part)
        self._append_text(text, part)

    def _append_text(self, items: list[Expr], part: Part | None) -> None:
        pieces: list[Piece] = [piece for item in items for piece in self._recorder.pieces(item)]
        if pieces:
            self._emit(Append, pieces=merge_pieces(pieces), part=part)

    def _append_item(self, item: Expr, part: Part | None, reasoning: str | None = None) -> None:
        match item:
            case Gen():
                self._generate(item, reasoning)
            case Select():
                self._choose(item)
            case Image() | Video():
                self._emit(Media, source=item, part=part)
            case MediaOf(symbol, num_frames):
                kind = "image" if num_frames is None else "video"
                source = self._recorder.media_argument(symbol, kind)
                self._emit(Media, source=source, num_frames=num_frames, part=part)
            case RoleBegin(role) | RoleEnd(role):
                is_begin = isinstance(item, RoleBegin)
                self._nesting = self._nesting.turn(role, is_begin=is_begin)
                self._emit(Turn, role=role, is_begin=is_begin)
            case VarScopeBegin(name):
                self._nesting = self._nesting.scope(self._constant(name, "the name of a scope"), is_begin=True)
                self._emit(Scope, name=name, is_begin=True)
            case VarScopeEnd(name):
                self._nesting = self._nesting.scope(name, is_begin=False)
                self._set_by(self._emit(Scope, name=name, is_begin=False))
            case SeparateReasoning(body, model_type):
                for inner in parts_of(body):
                    if isinstance(inner, Gen):
                        self._append_item(inner, None, model_type)
                    else:
                        self._append(inner)
            case OrderFree(parts):
                group = self._recorder.next_group()
                for number, one in enumerate(parts):
                    self._append(one, (group, number))
            case _:
                raise TraceError(f"a traced program cannot append {type(item).__name__}, at {program_line()}")

    def _generate(self, gen: Gen, reasoning: str | None) -> None:
        for value in (gen.name, *_texts_of(gen.args)):
            if value is not None:
                self._constant(value, "an argument of gen")
        self._set_by(self._emit(Generate, name=gen.name, args=gen.args, reasoning=reasoning))

    def _choose(self, select: Select) -> None:
        if select.name is not None:
            self._constant(select.name, "the name of a select")
        node = self._emit(
            Choose,
            name=select.name,
            choices=tuple(TextValue(self._recorder.pieces(choice)) for choice in select.choices),
            method=select.method,
            temperature=select.temperature,
            seed=select.seed,
            question=None if select.question is None else TextValue(self._recorder.pieces(select.question)),
            decision=select.decision,
        )
        self._set_by(node)

    # Variables

    def __contains__(self, name: str) -> bool:
        if name in self._perhaps:
            raise TraceError(
                f"whether {name!r} is set depends on the way that the program takes, so it cannot be asked at "
                f"{program_line()}; set it before the cond, or on both ways"
            )
        if name not in self.variables:
            self._missed.setdefault(name, program_line())
        return name in self.variables

    def set_var(self, name: str, value: Any) -> None:
        """Sets a variable; does the same as `s[name] = value`."""
        self._constant(name, "the name of a variable")
        with self._written():
            node = self._emit(Assign, name=name, value=value_of(value, self._recorder))
        match value:
            case Mixed():
                pass
            case ExprList():
                value = self._symbol(node.id, name)
            case str() if self._recorder.symbols.is_symbolic(value):
                value = TracedText(plain(value))
        self._define(name, value)

    # A read gives at once a symbol, a list of symbols, or a value that the program set.

    def _known(self, name: str) -> Variable | None:
        if name not in self.variables:
            return None
        value = self.variables[name]
        if name in self._carried and value is self._carried[name]:
            self._looked_at.add(name)  # a body may do no more than ask for its type
        return _given(value)

    def _expected(self, name: str) -> contextlib.AbstractContextManager[Variable]:
        raise TraceError(f"the variable {name!r} is not set at {program_line()}")

    def _read(self, what: What) -> Variable:
        return _given(self._symbol(self._emit(ReadText).id, "") if what == "text" else None)

    def _wait(self, variable: Variable, timeout: float | None = None) -> Any:
        return variable.now()

    async def _get(self, variable: Variable) -> Any:
        return variable.now()

    def __await__(self) -> Iterator[Any]:
        """Gives itself: in a trace a called program has nothing to wait for."""
        yield from ()
        return self

    async def aret_value(self) -> Any:
        """Gives `ret_value`."""
        return self.ret_value

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceError(f"a state has no .{name} while a program is traced, at {program_line()}; {ADVICE}")

    # Forks

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> "ProgramStateGroup[TracedState]":
        """Makes branches that continue from here."""
        if isinstance(size, Symbol) or size < 1:
            raise TraceError(f"fork takes a number of at least 1 that is known, at {program_line()}")
        branches = tuple(self._recorder.new_stream() for _ in range(size))
        offsets = None if position_ids_offset is None else tuple(position_ids_offset)
        self._emit(Fork, branches=branches, offsets=offsets)
        states = [TracedState(self._recorder, number, self) for number in branches]
        return ProgramStateGroup(states, lambda mode: self._join(states, mode))

    def _join(self, branches: "Sequence[TracedState]", mode: JoinMode) -> None:
        if any(branch._is_joined for branch in branches):
            raise TraceError(f"a branch is joined a second time, at {program_line()}")
        try:
            check_join([branch._nesting for branch in branches], mode)
        except ProgramError as error:
            raise traced(error) from None
        names = dict.fromkeys(name for branch in branches for name in branch._set if mode == "gather_variable")
        values = {
            name: [branch.variables[name] if name in branch._set else None for branch in branches] for name in names
        }
        gathered = tuple(
            Gathered(
                name,
                is_sure=any(branch._set.get(name) for branch in branches),
                is_flat=shape_of(value_of(values[name], self._recorder)) != OPAQUE,
            )
            for name in names
        )
        node = self._emit(Join, branches=tuple(branch.stream for branch in branches), mode=mode, gathered=gathered)
        for branch in branches:
            branch._is_joined = True
        shapes = defined(node)
        for name, is_sure in ((one.name, one.is_sure) for one in gathered):
            if all(branch._set.get(name, True) for branch in branches):
                self._define(name, values[name])
                continue
            exists = is_sure or self._is_sure(name)
            self._define(name, self._readable(node.id, name, shapes[name]), is_sure=is_sure)
            if not exists:
                self._perhaps.add(name)

    # Blocks

    def cond(self, condition: Condition, then: Callable[..., object], otherwise: Callable[..., object] | None) -> None:
        """Does what `control.cond` says."""
        number, line = self._recorder.next_id(), program_line()
        before, perhaps_before = self.variables, self._perhaps
        blocks: list[Block] = []
        sure: list[set[str]] = []
        always: set[str] | None = None  # what each side sets, whichever way it goes
        for body in (then, otherwise or _nothing):
            self.variables, self._perhaps = before.fork(), set(perhaps_before)
            block, _, changed = self._block(body)
            blocks.append(block)
            set_here = {name for name, is_always in changed.items() if is_always}
            always = set_here if always is None else always & set_here
            sure.append(self.variables.keys() - self._perhaps)
        self.variables, self._perhaps = before, perhaps_before
        names = dict.fromkeys(name for block in blocks for name, _ in block.outputs)
        kept = tuple((name, value_of(before[name], self._recorder)) for name in names if name in before)
        node = Cond(
            id=number,
            stream=self.stream,
            line=line,
            condition=condition,
            then=blocks[0],
            otherwise=blocks[1],
            before=kept,
        )
        self._check_alive()
        self._recorder.emit(node)
        self._set_by(node, always)
        self._perhaps = self.variables.keys() - (sure[0] & sure[1])
        self._keep_unset(node)

    def loop(self, body: Callable[..., object], until: Callable[..., Condition] | None, max_rounds: int) -> None:
        """Does what `control.loop` says."""
        number, line = self._recorder.next_id(), program_line()
        before = {name: value_of(value, self._recorder) for name, value in self.variables.items()}
        outer, missed_outside, around = self.variables, self._missed, (self._carried, self._looked_at)
        shapes = merged_shapes(before.items())
        readable = {name: self._readable(number, name, shape) for name, shape in shapes.items()}
        self.variables = LayeredDict(readable)
        self._missed, self._carried, self._looked_at = {}, readable, set()
        block, condition, set_there = self._block(body, until)
        perhaps = set(self._perhaps)
        self.variables, missed, self._missed = outer, self._missed, missed_outside
        looked_at, (self._carried, self._looked_at) = self._looked_at, around
        changed = dict(block.outputs)
        for name, asked_at in missed.items():
            if name in changed:
                raise TraceError(
                    f"whether {name!r} is set is asked at {asked_at} in the body of a loop, which sets it, so the "
                    "answer changes from round to round; set it before the loop"
                )
            missed_outside.setdefault(name, asked_at)
        carried = {ref.name for ref in refs((block, condition)) if isinstance(ref, ValueRef) and ref.node == number}
        carried |= looked_at
        kept = tuple((name, value) for name, value in before.items() if name in changed or name in carried)
        after = merged_shapes(block.outputs, kept)
        for name in sorted(carried):
            if name in changed and after[name] != shapes[name]:
                raise TraceError(f"the loop at {line} reads {name!r}, whose shape its body changes from round to round")
        node = Loop(
            id=number, stream=self.stream, line=line, body=block, until=condition, max_rounds=max_rounds, before=kept
        )
        self._check_alive()
        self._recorder.emit(node)
        for name in changed:
            self._define(name, self._readable(number, name, after[name]), is_sure=set_there[name])
        self._perhaps = perhaps
        self._keep_unset(node)

    def _block(
        self, body: Callable[..., object], until: Callable[..., Condition] | None = None
    ) -> tuple[Block, Condition | None, dict[str, bool]]:
        """Gives the block that `body` appends, the condition after it, and what it sets, as in `_set`.

        `variables` are then those at its end.
        """
        outer, before = self._set, self._nesting
        kept = {name: value_of(value, self._recorder) for name, value in self.variables.items() if _can_change(value)}
        self._set = {}
        condition: list[Condition] = []

        def run() -> None:
            body(self)
            if until is not None:
                condition.append(until(self))

        nodes = self._recorder.block(self.stream, run)
        try:
            self._nesting.check_body(before)
        except ProgramError as error:
            raise traced(error) from None
        outputs = tuple((name, value_of(self.variables[name], self._recorder)) for name in self._set)
        set_here, self._set = self._set, outer
        for name, value in kept.items():
            if name not in set_here and value_of(self.variables[name], self._recorder) != value:
                raise TraceError(
                    f"the body of a cond or loop changes {name!r} in place at {program_line()}, which a graph cannot "
                    f"keep; set it to a new value: s[{name!r}] = [*s[{name!r}], ...]"
                )
        return Block(nodes, outputs), condition[0] if condition else None, set_here

    def outputs(self) -> tuple[tuple[str, Value], ...]:
        """Gives the values of all variables."""
        with self._written():
            return tuple((name, value_of(value, self._recorder)) for name, value in self.variables.items())

    # Notes

    def _emit(self, kind: Callable[..., AnyNode], **fields: Any) -> AnyNode:
        self._check_alive()
        node = kind(id=self._recorder.next_id(), stream=self.stream, line=program_line(), **fields)
        self._recorder.emit(node)
        return node

    def _set_by(self, node: AnyNode, sure: Collection[str] | None = None) -> None:
        for name, shape in defined(node).items():
            self._define(name, self._readable(node.id, name, shape), is_sure=sure is None or name in sure)

    def _check_alive(self) -> None:
        if self._is_joined:
            raise TraceError(f"a branch that was joined is extended at {program_line()}; fork again")

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Surrounds the writing of a state's values. It refuses a state that contains itself, which would never end."""
        if self._is_written:
            raise TraceError(f"a state cannot be kept in itself, as it is at {program_line()}")
        self._is_written = True
        try:
            yield
        finally:
            self._is_written = False

    def _define(self, name: str, value: Any, *, is_sure: bool = True) -> None:
        self.variables[name] = value
        self._set[name] = is_sure or self._set.get(name, False)
        self._perhaps.discard(name)

    def _keep_unset(self, node: AnyNode) -> None:
        """Keeps of empty lists that perhaps are not set what says so; longer ones have items that say it."""
        for name in defined(node).keys() & self._perhaps:
            if type(self.variables[name]) in (list, tuple) and not self.variables[name]:
                self.variables[name] = Mixed(ValueRef(node.id, name))

    def _is_sure(self, name: str) -> bool:
        return name in self.variables and name not in self._perhaps

    def _symbol(self, node: int, name: str, index: int | None = None) -> Traced:
        return self._recorder.symbols.symbol(ValueRef(node, name, index))

    def _readable(self, node: int, name: str, shape: Shape) -> Any:
        if shape is None:
            return self._symbol(node, name)
        if shape == OPAQUE:
            return Mixed(ValueRef(node, name))
        items = [self._symbol(node, name, index) for index in range(shape.length)]
        return tuple(items) if shape.is_tuple else items

    def _constant(self, text: str, what: str) -> str:
        return self._recorder.constant(text, what)


def value_of(value: Any, recorder: Recorder) -> Value:
    """Gives a value that a program keeps or returns, in the form of a graph.

    Raises:
        TraceError: A graph has no such values.
    """
    match value:
        case Mixed():
            return VariableValue(value.ref)
        case None | bool() | int() | float():
            return ConstantValue(value)
        case Traced():
            return TextValue(recorder.pieces(value))
        case str() | ExprList():
            pieces = recorder.pieces(value)
            return TextValue(pieces, is_text=len(pieces) == 1 and not isinstance(pieces[0], str))
        case list() | tuple():
            kind = ListValue if isinstance(value, list) else TupleValue
            return kind(tuple(value_of(item, recorder) for item in value))
        case dict() if all(isinstance(key, str) and not recorder.symbols.is_symbolic(key) for key in value):
            return DictValue(tuple((key, value_of(item, recorder)) for key, item in value.items()))
        case TracedState():
            return StateValue(value.stream, value.outputs())
    what = "a dictionary whose keys are not constant text" if isinstance(value, dict) else type(value).__name__
    raise TraceError(
        f"a graph can keep and return text, numbers, lists, dictionaries and states, but got {what} at {program_line()}"
    )


def _given(value: Any) -> Variable:
    variable = Variable()
    variable.finish(value)
    return variable


def _texts_of(args: SamplingArgs) -> Iterator[str]:
    for value in args.given().values():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, str):
                yield one


def _can_change(value: Any) -> bool:
    return type(value) in (list, dict) or (type(value) is tuple and any(map(_can_change, value)))


def _nothing(state: TracedState) -> None:
    """The second body of a `cond` without `otherwise`; it appends nothing."""
