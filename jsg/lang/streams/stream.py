"""A stream: one prompt of a program, which a task of its own extends op by op.

Code without threads, such as the run of a graph on a server, uses a stream on the running loop:

    stream = Stream(running_loop(), lambda: backend.open())
    stream.append(Text("Q: ") + Gen("answer"))          # nothing here waits ...
    branches = stream.fork(2)
    branches[0].append(Gen("a"))
    branches[1].append(Text(""), make=make_text)        # awaits `make_text()` when it is its turn
    branches[1].append(Gen("b"))
    names = stream.join(branches)                       # `a` and `b` are lists now
    value = await stream.variable("a").get()            # ... but this waits, and
    async for piece in stream.variable("answer").follow_async(): ...
    text = await stream.read("text").get()              # all text that was appended up to here
    stream.close()                                      # its session ends after what was appended; or stream.cancel()

Any thread may call any method. Appending makes the variables at once, in program order, so that a name that is set
twice is never read stale, and a fork knows the variables of its parent before they are computed. An error ends a
stream: all variables that it would set later, and later reads of its text, raise the error.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jsg.errors import AbortedError, ProgramError, UnknownVariableError
from jsg.lang.streams.history import History
from jsg.lang.streams.loop import Loop
from jsg.lang.streams.ops import Close, ExprOp, Make, Mark, Place
from jsg.lang.streams.runner import Fork, Join, Runner, What
from jsg.lang.streams.transcript import Transcript
from jsg.lang.streams.variables import Variable, gather, known
from jsg.lang.words.backend import Session
from jsg.lang.words.ir import (
    REASONING_SUFFIX,
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
from jsg.speech.answers.thoughts import Markers, markers_of

_ENDED = "the program to which this state belongs has ended; append to it inside the program"
_JOINED = "this branch was joined; fork again to go on from there"


class Stream:
    """One prompt of a program.

    Attributes:
        variables: The variable that each name means now, in program order, whether it is done or not.
        assigned: The variables that were set since the fork; all variables of a stream that is no fork.
        nesting: The open turn and scopes.
        history: What happened in the run, which notes the failures of its streams.
        ended: Is done when the stream and all its forks have ended.
        runner: Executes the ops.
    """

    def __init__(
        self,
        loop: Loop,
        open_session: Callable[[], Session] | None,
        defaults: SamplingArgs | None = None,
        parent: "Stream | None" = None,
        history: History | None = None,
        transcript: Transcript | None = None,
    ):
        """`open_session` is called when the first op needs a session. A fork has None, and a `parent`."""
        self.history = parent.history if parent is not None else history or History(is_watched=False)
        self.runner = Runner(loop, open_session, self.history, transcript)
        self.variables = LayeredDict[Variable]() if parent is None else parent.variables.fork()
        self.assigned: dict[str, Variable] = {}
        self.nesting = Nesting() if parent is None else parent.nesting.fork()
        self._defaults = defaults
        self._end: str | None = None
        self._cancelled: BaseException | None = None
        self._is_closed = False
        self._expected: dict[Variable, str] = {}
        self._children: set[Stream] = set()
        self._num_appended = 0
        self._forked_at = 0 if parent is None else parent._num_appended
        self._parent = parent
        self.ended = Variable()
        self.log.when_done(self._check_ended)

    # Appending.

    def append(self, value: "Expr | str", place: Place | None = None, make: Make | None = None) -> None:
        """Appends an expression; waits for nothing.

        Args:
            value: The expression.
            place: The program's statement, which errors name.
            make: Makes the expression when everything before is done, on the loop. Until then `value`, which is a
                single text or select, says which variable it sets.

        Raises:
            ProgramError: The expression breaks a rule; nothing of it was appended.
        """
        self._check_open()
        draft = _Draft(self, place, self.nesting, make)
        for part in parts_of(value):
            draft.add(part)
        self.nesting = draft.nesting
        for name, variable in draft.created:
            self.bind(name, variable)
        self._push(draft.ops)

    def set(self, name: str, value: Any) -> None:
        """Sets a variable to a known value. Raises ProgramError in a branch that was joined."""
        if self._end == _JOINED:
            raise ProgramError(_JOINED)
        self.bind(name, known(value))

    def bind(self, name: str, variable: Variable) -> None:
        """Lets a name mean a variable from here on."""
        self.variables[name] = variable
        self.assigned[name] = variable
        for expected, wanted in tuple(self._expected.items()):
            if wanted == name:
                self.forget(expected)
                expected.finish(variable)

    def fork(self, size: int = 1, offsets: Sequence[int] | None = None, place: Place | None = None) -> "list[Stream]":
        """Makes streams that begin as this one is now; waits for nothing.

        Args:
            size: The number of streams.
            offsets: For each stream a number by which the positions of its own text are shifted.
            place: The program's statement.
        """
        self._check_open()
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ProgramError(f"fork takes a number of branches of at least 1, but got {size!r}")
        if offsets is not None and len(offsets) != size:
            raise ProgramError(f"position_ids_offset needs one number per branch, {size}, but has {len(offsets)}")
        children = [Stream(self.runner.loop, None, self._defaults, self) for _ in range(size)]
        for child in children:
            self._children.add(child)
        runners = tuple(child.runner for child in children)
        self.runner.push([Fork(runners, None if offsets is None else tuple(offsets), place)])
        return children

    def copy(self, defaults: SamplingArgs, history: History) -> "Stream":
        """Gives a stream of another run that begins as this one is now. All ops must be done, and none forked it."""
        session, transcript = self.runner.copies()
        copied = Stream(self.runner.loop, lambda: session, defaults, history=history, transcript=transcript)
        copied.nesting = self.nesting
        return copied

    def join(
        self, branches: "Sequence[Stream]", mode: JoinMode = "gather_variable", place: Place | None = None
    ) -> list[str]:
        """Joins branches into this stream; waits for nothing. The branches end.

        Args:
            branches: Forks of this stream.
            mode: "gather_variable": each name that a branch set becomes a list, None where a branch did not set it.
                "concate_and_append": what each branch appended is appended here, side by side.
            place: The program's statement.

        A branch that was cancelled is joined like one that failed: a variable that it lacks raises the error.

        Returns:
            The names that were set.

        Raises:
            ProgramError: A branch belongs to another stream, has ended, or has an open scope. With "concate_and_append"
                also: this stream was extended after the fork, or a branch opened or closed a turn.
        """
        self._check_open()
        for branch in branches:
            if branch._parent is not self:
                raise ProgramError("only branches that were forked from a state can be joined into it")
            if branch._end == _JOINED or branch._cancelled is None:
                branch._check_open()
        check_join([branch.nesting for branch in branches], mode)
        match mode:
            case "gather_variable":
                names = list(dict.fromkeys(name for branch in branches for name in branch.assigned))
                for name in names:
                    self.bind(name, gather([branch.assigned.get(name) for branch in branches]))
                for branch in branches:
                    branch.close(_JOINED)
                    branch._end = _JOINED  # also where it was cancelled
                return names
            case "concate_and_append":
                if any(branch._forked_at != self._num_appended for branch in branches):
                    raise ProgramError(
                        "concate_and_append puts the branches behind the prompt that they share, but the state was "
                        "extended after the fork; join first and extend then"
                    )
                arrivals = [branch._arrive() for branch in branches]
                self._push([Join(tuple(branch.runner for branch in branches), arrivals, place)])
                return []

    def _arrive(self) -> Variable:
        arrival = Variable()
        self._end = _JOINED
        if self._cancelled is not None:  # its runner may hear of the cancel only after the mark
            arrival.fail(self._cancelled)
        self.runner.push([Mark("nothing", arrival)])
        self._disappoint(None)
        self._close_forks()
        return arrival

    # Reading.

    def variable(self, name: str) -> Variable:
        """Gives the variable that a name means now. Raises UnknownVariableError where nothing so far sets the name."""
        variable = self.variables.get(name)
        if variable is None:
            raise UnknownVariableError(f"the program has not set a variable {name!r}; {self._known()}")
        return variable

    def expect(self, name: str, error: BaseException | None = None) -> Variable:
        """Gives a variable whose value will be the `Variable` of a name, as soon as something sets the name.

        Args:
            name: The name.
            error: The error where the stream has ended without the name; by default UnknownVariableError.
        """
        expected = Variable()
        self._expected[expected] = name
        # After the entry above, because a thread that sets the name, or ends the stream, just before has not seen it.
        if name in self.variables:
            self.forget(expected)
            expected.finish(self.variables[name])
        elif self._end is not None:
            self._disappoint(error or self._cancelled)
        return expected

    def forget(self, expected: Variable) -> None:
        """Says that nobody waits any more for a variable of `expect`, which may never be done then."""
        self._expected.pop(expected, None)

    def read(self, what: What) -> Variable:
        """Gives a variable that is done when all that was appended so far is done.

        Args:
            what: Its value: all text, the `transcript.Turn`s, the number of pieces of text, or None for "nothing".
        """
        return self.runner.read(what)

    @property
    def log(self) -> Variable:
        """All text as it grows. It is done when the stream has ended."""
        return self.runner.transcript.log

    # Ending.

    def close(self, reason: str = _ENDED, error: BaseException | None = None) -> None:
        """Ends the stream and its forks after all that was appended. Variables stay readable. A second call is void.

        Args:
            reason: The message of the error for a later `append`.
            error: The error for those who wait for a name.
        """
        self.release(reason, error)
        self._close_forks()

    def _close_forks(self) -> None:
        # What is closed has no new forks, so branches that are joined into each other are each looked at once.
        self._is_closed = True
        for fork in self.forks(lambda stream: stream._is_closed):
            fork.release()
            fork._is_closed = True

    def release(self, reason: str = _ENDED, error: BaseException | None = None) -> None:
        """Does the same as `close`, but lets the forks go on."""
        if self._end is None:
            self._end = reason
            self.runner.push([Close()])
            self._disappoint(error)

    def cancel(self, error: BaseException | None = None) -> None:
        """Aborts what the stream and its forks have under way. Reads raise `error`, or an AbortedError."""
        error = error or AbortedError("the program was cancelled")
        for stream in (self, *self.forks(lambda stream: stream._cancelled is not None)):
            stream._cancelled = stream._cancelled or error
            stream._end = stream._end or _ENDED
            stream.runner.cancel(error)
            stream._disappoint(error)

    def forks(self, is_left_out: "Callable[[Stream], bool]" = lambda _: False) -> "Iterator[Stream]":
        """Gives its forks, and theirs, that have not ended or have forks that have not. Forks may be thousands deep.

        Args:
            is_left_out: Says of which fork neither it nor what it has forked is given.
        """
        waiting = list(self._children)
        while waiting:
            fork = waiting.pop()
            if not is_left_out(fork):
                yield fork
                waiting.extend(fork._children)

    def _check_ended(self) -> None:
        """Ends it, and all above it of which it was the last fork."""
        stream = self
        while stream is not None and stream.log.is_done and not stream._children:
            parent = stream._parent
            if parent is not None:
                parent._children.discard(stream)
            stream.ended.finish(None)
            stream = parent

    def _push(self, ops: Sequence[Any]) -> None:
        if ops:
            # The border of a scope leaves the prompt as it is.
            if not all(isinstance(op, ExprOp) and isinstance(op.expr, VarScopeBegin | VarScopeEnd) for op in ops):
                self._num_appended += 1
            self.runner.push(ops)

    def _disappoint(self, error: BaseException | None) -> None:
        for expected, name in tuple(self._expected.items()):
            self.forget(expected)
            expected.fail(error or UnknownVariableError(f"the program ended without {name!r}; {self._known()}"))

    def _known(self) -> str:
        return f"it has {', '.join(map(repr, self.variables))}" if self.variables else "it has set none"

    def _check_open(self) -> None:
        if self._end is not None:
            for error in (self._cancelled, self.runner.failure):
                if isinstance(error, AbortedError) and self._end != _JOINED:
                    raise error
            raise ProgramError(self._end)


class _Draft:
    """The ops of one expression, and the nesting after it. It is dropped where a part breaks a rule."""

    def __init__(self, stream: Stream, place: Place | None, nesting: Nesting, make: Make | None):
        self.ops: list[ExprOp] = []
        self.created: list[tuple[str, Variable]] = []
        self.nesting = nesting
        self._wanted = stream.runner.wanted
        self._defaults = stream._defaults
        self._place = place
        self._make = make

    def add(self, part: Expr, markers: Markers | None = None) -> None:
        match part:
            case Text() | Image() | Video():
                self._push(part)
            case Gen(name, args):
                if self._defaults is not None:
                    part = Gen(name, args.over(self._defaults))
                reasoning = ()
                if markers is not None:
                    part = dataclasses.replace(part, markers=markers)
                if markers is not None and name is not None:
                    reasoning = (self._variable(name + REASONING_SUFFIX),)
                self._push(part, self._variable(name), *reasoning, markers=markers)
            case Select(name):
                self._push(part, self._variable(name))
            case RoleBegin(role) | RoleEnd(role):
                self.nesting = self.nesting.turn(role, is_begin=isinstance(part, RoleBegin))
                self._push(part)
            case VarScopeBegin(name):
                self.nesting = self.nesting.scope(name, is_begin=True)
                self._push(part)
            case VarScopeEnd(name):
                self.nesting = self.nesting.scope(name, is_begin=False)
                self._push(part, self._variable(name))
            case SeparateReasoning(body, model_type):
                for item in parts_of(body):
                    self.add(item, markers_of(model_type))
            case ExprList(items):
                for item in items:
                    self.add(item, markers)
            case Symbol(name) | MediaOf(Symbol(name)):
                raise ProgramError(f"{name!r} is known only to the trace that it comes from")
            case _:
                raise ProgramError(f"a state cannot be extended by {type(part).__name__}")

    def _push(self, expr: Any, *variables: Variable, markers: Markers | None = None) -> None:
        self.ops.append(ExprOp(expr, self._place, variables, markers, self._make))

    def _variable(self, name: str | None) -> Variable:
        variable = Variable(self._wanted)
        if name is not None:
            self.created.append((name, variable))
        return variable
