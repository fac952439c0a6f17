"""The part of a stream on the event loop: one task at a time executes its ops on its session."""

import asyncio
import collections
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal, assert_never, cast

from jsg.errors import AbortedError
from jsg.lang.streams.history import History
from jsg.lang.streams.loop import Loop
from jsg.lang.streams.ops import Close, ExprOp, Mark, Place
from jsg.lang.streams.transcript import Said, Transcript
from jsg.lang.streams.variables import Variable
from jsg.lang.words.backend import BlockSession, CopySession, Piece, Session
from jsg.lang.words.decisions import Decision, items_of
from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, Select, Text, VarScopeBegin, VarScopeEnd, Video
from jsg.speech.answers.thoughts import Thoughts, ThoughtSplitter, split_thoughts

logger = logging.getLogger(__name__)

_NOTE = "in the program: "
_TURN = 100  # ops that run without a wait before other tasks run


@dataclasses.dataclass(frozen=True, slots=True)
class Fork:
    """Starts the children with the prompt as it is here."""

    children: "Sequence[Runner]"
    offsets: tuple[int, ...] | None
    place: Place | None


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Appends the text of the branches, when each has come to the join, and ends the branches."""

    branches: "Sequence[Runner]"
    arrivals: Sequence[Variable]
    place: Place | None


What = Literal["nothing", "text", "turns", "size"]
Op = ExprOp | Fork | Join | Mark | Close


class Runner:
    """Executes ops in the order in which they were pushed.

    Invariants: a call of the session begins only when the call before has ended. After a `failure` no op uses the
    session, each op fails its variables, and the session is closed as soon as the current op has released it.

    Attributes:
        failure: The error that ended it early.
        transcript: The text and the turns of its prompt.
    """

    def __init__(
        self,
        loop: Loop,
        open_session: Callable[[], Session] | None,
        history: History | None = None,
        transcript: Transcript | None = None,
    ):
        """`open_session` makes the session when the first op needs it; None for a child, which a fork gives one."""
        self.loop = loop
        self._history = history or History(is_watched=False)
        self.failure: BaseException | None = None
        self.transcript = transcript or Transcript()
        self._open = open_session
        self._session: Session | None = None
        self._queue: collections.deque[Op] = collections.deque()
        self._block: list[ExprOp] = []
        self._task: asyncio.Task[None] | None = None
        self._is_at_work = False
        self._num_ops = 0
        self._has_begun = open_session is not None
        self._has_ended = False

    def copies(self) -> tuple[Session, Transcript]:
        """Gives a session and a transcript that begin as its own, which has no branches, are now."""
        [copied] = self.transcript.fork(1)
        return cast(CopySession, self._live()).copy(), copied

    # From any thread.

    def push(self, ops: Iterable[Op]) -> None:
        """Queues ops. May be called from any thread."""
        self._queue.extend(ops)
        self.loop.post(self._wake)

    def read(self, what: What) -> Variable:
        """Gives a variable that is done when all is done that was pushed so far; at once where all has ended.

        Args:
            what: Its value: all text, the `transcript.Turn`s, the number of pieces of text, or None for "nothing".
        """
        variable = Variable()
        # In this order, because a failure is set before the log ends, and both on another thread.
        if self.transcript.log.is_done and self.failure is None:
            variable.finish(self._read(what))
        elif self.failure is not None and not (self._task or self._queue or self._session or self._block):
            variable.fail(self.failure)
        else:
            self.push([Mark(what, variable)])
        return variable

    def wanted(self) -> None:
        """Looks again whether anybody waits for a variable."""
        self.loop.post(self._wake)

    def cancel(self, error: BaseException) -> None:
        """Ends it with `error`, and aborts what it has under way."""
        self.loop.post(lambda: self._cancel(error))

    # On the loop.

    def _cancel(self, error: BaseException) -> None:
        if self._has_ended or self.failure is not None:
            return
        self._set_failure(error)
        self.transcript.log.fail(error)
        if self._task is None:
            self._wake()
        elif self._is_at_work:  # a task that has not begun would end without a look at the failure
            self._task.cancel()

    def _begin(self, session: Session, transcript: Transcript) -> None:
        """Starts a child. Readers may follow its log already, so the log stays and gets the text of the fork."""
        self._session = session
        self._has_begun = True
        log = self.transcript.log
        for piece in transcript.log.pieces():
            log.add(piece)
        transcript.log = log
        self.transcript = transcript
        self._wake()

    def _wake(self) -> None:
        if self._task is not None:
            return
        if self._has_work():
            self._task = self.loop.loop.create_task(self._run())

    def _has_work(self) -> bool:
        if self.failure is not None:
            return bool(self._queue or self._session or self._block)
        return self._has_begun and (bool(self._queue) or self._is_block_wanted())

    async def _run(self) -> None:
        self._is_at_work = True
        try:
            # Nothing is awaited between the last look and the end, so a later push finds no task and wakes one.
            while self._has_work():
                await self._attempt(self._queue.popleft() if self._queue else None)
        finally:
            self._task = None
            self._is_at_work = False

    async def _attempt(self, op: Op | None) -> None:
        """Executes an op, or the block where `op` is None. An error ends the stream."""
        try:
            if self.failure is not None:
                await self._close_session()  # first, so that it is closed before a reader sees a failed variable
                self._drop_block(self.failure)
                _fail_op(op, self.failure)
            else:
                self._num_ops += 1
                if self._num_ops % _TURN == 0:
                    await asyncio.sleep(0)
                await self._execute(op)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            self._fail(op, self.failure or AbortedError("the call was cancelled"))
        except Exception as error:
            self._fail(op, error)
        if isinstance(op, Mark):
            self.transcript.log.touch()  # readers of the text up to a mark have to look at the mark

    def _fail(self, op: Op | None, error: BaseException) -> None:
        if op is not None and op.place is not None and not isinstance(error, asyncio.CancelledError):
            note(error, op.place)
        self._set_failure(error)
        self._drop_block(error)
        _fail_op(op, error)
        self.transcript.log.fail(error)

    def _set_failure(self, error: BaseException) -> None:
        self.failure = error
        self._history.failed(error)
        self._history.let_go(error)

    def _drop_block(self, error: BaseException) -> None:
        block, self._block = self._block, []
        for op in block:
            _fail_op(op, error)

    async def _close_session(self) -> None:
        session, self._session = self._session, None
        self._open = None
        if session is not None:
            try:
                await session.close()
            except Exception:  # the answers are there, so this is no error of the program
                logger.warning("closing the session of a program failed", exc_info=True)

    def _is_block_wanted(self) -> bool:
        return any(variable.is_wanted for op in self._block for variable in op.variables)

    async def _execute(self, op: Op | None) -> None:
        match op:
            case ExprOp(Text() | Gen() | VarScopeBegin() | VarScopeEnd(), make=None) if self._collects():
                self._block.append(op)
                return
        if self._block:
            await self._execute_block()
        match op:
            case None:
                pass
            case ExprOp() if op.make is not None:
                expr = await op.make()
                assert isinstance(expr, Select) == isinstance(op.expr, Select), "readers of a variable would wait"
                if expr is not None:
                    self._queue.appendleft(dataclasses.replace(op, expr=expr, make=None))
            case ExprOp():
                await self._execute_expr(op)
            case Fork(children, offsets):
                await self._fork(children, offsets)
            case Join(branches, arrivals):
                await self._join(branches, arrivals)
            case Mark(read, variable):
                variable.finish(self._read(read))
            case Close():
                self._has_ended = True
                await self._close_session()
                self.transcript.log.finish(None)
            case _:
                assert_never(op)

    async def _execute_expr(self, op: ExprOp) -> None:
        match op.expr:
            case Gen():
                reply = _Reply(op, self.transcript)
                with self._history.calling(op) as (call,):
                    async with contextlib.aclosing(cast(Any, self._live().generate(op.expr))) as pieces:
                        async for piece in cast(AsyncIterator[Piece], pieces):
                            reply.add(piece)
                    call.meta = reply.meta
                reply.finish()
            case Select(question=str(question)):
                await self._decide(op, op.expr, question)
            case Select():
                with self._history.calling(op) as (call,):
                    selection = await self._live().select(op.expr)
                    call.meta = selection.meta
                self.transcript.write(selection.choice)
                self.transcript.add(Said(selection.choice))
                (variable,) = op.variables
                variable.add(selection.choice)
                variable.finish(selection.choice, {"probabilities": selection.probabilities, **selection.meta})
            case VarScopeBegin() | VarScopeEnd():
                self._cross_scope(op)
            case item:
                await self._extend(item)

    async def _decide(self, op: ExprOp, select: Select, question: str) -> None:
        """Asks a question in a branch, which ends with the answer: the prompt stays as it is."""
        transcript, kind = self.transcript, select.decision
        assert kind is not None, "a question has a kind"
        is_begun = bool(transcript.log.num_pieces) if transcript.role is None else transcript.is_turn_begun
        with self._history.calling(op) as (call,):
            [branch] = await self._live().fork(1)
            try:
                for item in items_of(question, transcript.role, has_turns=transcript.has_turns, is_begun=is_begun):
                    await branch.extend(item)
                selection = await branch.select(dataclasses.replace(select, temperature=0.0))
            finally:
                await branch.close()
            call.meta = selection.meta
        decision = Decision.of(kind, selection, select.temperature)
        label = select.choices[decision.best]
        (variable,) = op.variables
        variable.add(label)
        variable.finish(label, {**selection.meta, **decision.report()})

    def _cross_scope(self, op: ExprOp) -> None:
        match op.expr:
            case VarScopeBegin(name):
                self.transcript.open_scope(name)
            case VarScopeEnd(name):
                (variable,), text = op.variables, self.transcript.close_scope(name)
                if text:
                    variable.add(text)
                variable.finish(text)
            case _:
                raise AssertionError(f"not the border of a scope: {op.expr}")

    def _live(self) -> Session:
        if self._session is None:
            assert self._open is not None, "used after its end"
            self._session = self._open()
        return self._session

    def _read(self, what: What) -> Any:
        match what:
            case "text":
                return self.transcript.text()
            case "turns":
                return self.transcript.snapshot()
            case "size":
                return self.transcript.log.num_pieces
        return None

    async def _extend(self, item: Text | RoleBegin | RoleEnd | Image | Video) -> None:
        text = await self._live().extend(item)
        match item:
            case RoleBegin(role):
                self.transcript.open_turn(role)
            case RoleEnd():
                self.transcript.close_turn()
            case Text() | Image() | Video():
                self.transcript.add(item)
        self.transcript.write(text)

    async def _fork(self, children: "Sequence[Runner]", offsets: tuple[int, ...] | None) -> None:
        sessions = await self._live().fork(len(children), offsets)
        transcripts = self.transcript.fork(len(children))
        for child, session, transcript in zip(children, sessions, transcripts, strict=True):
            child._begin(session, transcript)

    async def _join(self, branches: "Sequence[Runner]", arrivals: Sequence[Variable]) -> None:
        for arrival in arrivals:
            await arrival.get()
        for branch in branches:
            if branch.failure is not None:  # it was cancelled after it had come to the join
                raise branch.failure
        await self._live().join([branch._live() for branch in branches])
        for branch in branches:
            self.transcript.write(branch.transcript.text(branch.transcript.fork_len))
            for content in branch.transcript.new_content():
                self.transcript.add(content)
            branch.push([Close()])

    # Blocks, for a session that needs the whole turn at once.

    def _collects(self) -> bool:
        return self.transcript.role == "assistant" and getattr(self._live(), "wants_blocks", False)

    async def _execute_block(self) -> None:
        block = tuple(self._block)  # `_block` stays until it is done, so that a failure finds it
        try:
            pieces = iter(await self._call_block(block))
        except Exception as error:
            if block[0].place is not None:
                note(error, block[0].place)
            raise
        self._block = []
        for op in block:
            match op.expr:
                case Text(text):
                    self.transcript.add(op.expr)
                    self.transcript.write(text)
                case Gen():
                    reply = _Reply(op, self.transcript)
                    reply.add(next(pieces))
                    reply.finish()
                case _:
                    self._cross_scope(op)

    async def _call_block(self, block: Sequence[ExprOp]) -> Sequence[Piece]:
        items = [op.expr for op in block if isinstance(op.expr, Text | Gen)]
        if gens := [op for op in block if isinstance(op.expr, Gen)]:
            with self._history.calling(*gens) as calls:
                pieces = await cast(BlockSession, self._live()).generate_block(items)
                for call, piece in zip(calls, pieces, strict=True):
                    call.meta = piece.meta
            return pieces
        for item in items:
            await self._live().extend(cast(Text, item))
        return ()


class _Reply:
    """Writes the pieces of a continuation into the transcript, the variable of the answer and that of its reasoning.

    Attributes:
        meta: The report of the backend, which comes with the last piece.
    """

    def __init__(self, op: ExprOp, transcript: Transcript):
        self._op = op
        self._transcript = transcript
        self._splitter = None if op.markers is None else ThoughtSplitter(Thoughts.of(op.markers))
        self._answer: list[str] = []
        self._reasoning: list[str] = []
        self.meta: dict[str, Any] = {}
        self._others: tuple[str, ...] = ()

    def add(self, piece: Piece) -> None:
        if piece.text:
            self._transcript.write(piece.text)
            reasoning, answer = ("", piece.text) if self._splitter is None else self._splitter.feed(piece.text)
            self._share(reasoning, answer)
        if piece.meta is not None:
            self.meta, self._others = piece.meta, piece.others

    def finish(self) -> None:
        if self._splitter is not None:
            self._share(*self._splitter.finish())
        answer, reasoning = "".join(self._answer), "".join(self._reasoning)
        self._transcript.add(Said(answer, reasoning))
        answers, reasonings = [answer], [reasoning]
        for other in self._others:
            reasoning, answer = ("", other) if self._op.markers is None else split_thoughts(self._op.markers, other)
            answers.append(answer)
            reasonings.append(reasoning)
        is_list = isinstance(self._op.expr, Gen) and (self._op.expr.args.n or 1) > 1
        for variable, texts in zip(self._op.variables, (answers, reasonings), strict=False):
            variable.finish(texts if is_list else texts[0], self.meta)

    def _share(self, reasoning: str, answer: str) -> None:
        if reasoning:
            self._reasoning.append(reasoning)
            for variable in self._op.variables[1:]:
                variable.add(reasoning)
        if answer:
            self._answer.append(answer)
            self._op.variables[0].add(answer)


def variables_of(op: Op) -> Sequence[Variable]:
    """The variables that would never be done if the op were not executed."""
    match op:
        case ExprOp():
            return op.variables
        case Mark():
            return (op.variable,)
        case Fork() | Join() | Close():
            return ()


def note(error: BaseException, place: Place) -> None:
    """Notes the program's statement on an error, but only the first statement, where the error happened."""
    if not any(text.startswith(_NOTE) for text in getattr(error, "__notes__", ())):
        error.add_note(f"{_NOTE}{place[0]}:{place[1]}")


def _fail_op(op: Op | None, error: BaseException) -> None:
    if op is None:
        return
    for variable in variables_of(op):
        variable.fail(error)
    match op:
        case Fork(children):
            for child in children:
                child._cancel(error)
        case Join(branches):
            for branch in branches:
                branch.push([Close()])
