"""Streams without threads, as a graph executor uses them: everything on the loop that runs."""

import asyncio
import contextvars
import threading
from unittest import mock

import pytest

from jsg.errors import AbortedError, JsgError, ProgramError, UnknownVariableError
from jsg.lang.streams.loop import running_loop
from jsg.lang.streams.ops import ExprOp
from jsg.lang.streams.stream import Stream
from jsg.lang.words.ir import Gen, RoleBegin, RoleEnd, SamplingArgs, Select, Symbol, Text, VarScopeBegin, VarScopeEnd
from tests.lang.scripted import Gate, ScriptedBackend


def root(backend: ScriptedBackend, defaults: SamplingArgs | None = None) -> Stream:
    return Stream(running_loop(), lambda: backend.open(), defaults)


async def test_the_example_of_the_docstring():
    backend = ScriptedBackend(lambda prompt, gen: ["<", gen.name, ">"])

    before = threading.active_count()
    stream = root(backend, SamplingArgs(max_tokens=5))
    stream.append(Text("Q: ") + Gen("answer"))
    branches = stream.fork(2)
    branches[0].append(Gen("a"))

    async def make():
        return Text(await stream.variable("answer").get())

    branches[1].append(Text(""), make=make)
    branches[1].append(Gen("b"))
    assert stream.join(branches) == ["a", "b"]
    assert [piece async for piece in stream.variable("answer").follow_async()] == ["<", "answer", ">"]
    assert await stream.variable("b").get() == [None, "<b>"]
    assert await stream.variable("a").get() == ["<a>", None]
    assert await stream.read("text").get() == "Q: <answer>"
    stream.close()
    await stream.log.get()
    assert threading.active_count() == before
    await asyncio.gather(*(branch.log.get() for branch in branches))
    assert backend.prompts() == ["Q: ", "Q: <answer>", "Q: <answer><answer>"] and backend.num_open == 0
    assert all(call.what.args.max_tokens == 5 for call in backend.calls if call.kind == "generate")


async def test_what_comes_later_keeps_its_place():
    gate = Gate()

    stream = root(ScriptedBackend("A"))

    async def make():
        await gate.passed()
        return Select("x", ("late", "later"), "token_trie")

    async def make_nothing():
        return None

    stream.append(Select("x", (), "token_trie"), make=make)
    stream.append(Text(""), make=make_nothing)
    stream.append("then" + Gen("y"))
    gate.open()
    assert (await stream.read("text").get(), await stream.variable("x").get()) == ("latethenA", "late")


async def test_an_error_of_what_comes_later_ends_the_stream():
    stream = root(ScriptedBackend())

    async def make():
        raise JsgError("no")

    stream.append(Select("x", ("a", "b"), "token_trie"), ("program.py", 3), make)
    stream.append(Gen("y"))
    for name in "xy":
        with pytest.raises(JsgError, match="no") as caught:
            await stream.variable(name).get()
        assert caught.value.__notes__ == ["in the program: program.py:3"]


async def test_symbols_belong_to_traces():
    stream = root(ScriptedBackend())
    with pytest.raises(ProgramError, match="'q' is known only to the trace"):
        stream.append(Symbol("q"))
    with pytest.raises(UnknownVariableError, match="has set none"):
        stream.variable("x")


async def test_cancelling_aborts_and_closes():
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return "late"

    backend = ScriptedBackend(answer)

    stream = root(backend)
    stream.append(Gen("x"))
    (branch,) = stream.fork()
    branch.append(Gen("y"))
    while not backend.calls:
        await asyncio.sleep(0)
    stream.cancel()
    for one, name in ((stream, "x"), (branch, "y")):
        with pytest.raises(AbortedError):
            await one.variable(name).get()
        with pytest.raises(AbortedError):
            await one.read("text").get()
    with pytest.raises(AbortedError):
        stream.append("more")
    assert len(backend.aborted) == 1 and backend.num_open == 0


async def test_cancelling_before_the_first_step_ends_it():
    backend = ScriptedBackend()

    stream = root(backend)
    stream.append(Gen("x"))
    await asyncio.sleep(0)
    assert stream.runner._task is not None and backend.opened_with == []  # it is there, but has not begun
    stream.runner._cancel(AbortedError("now"))
    with pytest.raises(AbortedError):
        await asyncio.wait_for(stream.variable("x").get(), 10)
    assert backend.calls == []


def test_a_loop_that_ends_leaves_no_session_open():
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return "late"

    backend = ScriptedBackend(answer)

    async def main():
        stream = root(backend)
        stream.append(Gen("x"))
        while not backend.calls:
            await asyncio.sleep(0)
        return stream  # asyncio.run cancels its task

    stream = asyncio.run(main())
    assert isinstance(stream.runner.failure, AbortedError) and backend.num_open == 0


async def test_a_session_that_does_not_close_fails_nothing(caplog):
    class Stuck(ScriptedBackend):
        def open(self, *, num_api_spec_tokens=None):
            session = super().open()

            async def close():
                raise JsgError("stuck")

            session.close = close
            return session

    stream = root(Stuck("A"))
    stream.append(Gen("x"))
    stream.close()
    await stream.log.get()
    assert (await stream.variable("x").get()) == "A"
    assert "closing the session of a program failed" in caplog.text


async def test_a_name_can_be_expected_before_it_is_set():
    stream = root(ScriptedBackend("A"))
    early, never = stream.expect("x"), stream.expect("y")
    stream.append(Gen("x"))
    assert await (await early.get()).get() == "A"
    assert await (await stream.expect("x").get()).get() == "A"
    stream.close()
    for expected in (never, stream.expect("z")):
        with pytest.raises(UnknownVariableError, match="ended without"):
            await expected.get()


async def test_who_follows_the_text_up_to_a_mark_is_told_of_it_though_no_text_comes():
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return ""

    backend = ScriptedBackend(answer)

    stream = root(backend)
    stream.append("p" + Gen("x"))
    mark = stream.read("size")

    async def follow():
        return [piece async for piece in stream.log.follow_async(mark)]

    task = asyncio.create_task(follow())
    while not backend.calls or not stream.log._on_change:
        await asyncio.sleep(0)
    gate.open()
    assert (await asyncio.wait_for(task, 10)) == ["p"]


class Failing(ScriptedBackend):
    """Fails each gen, and closes a session when `gate` was passed."""

    def __init__(self, gate):
        super().__init__(mock.Mock(side_effect=JsgError("no")))
        self._gate = gate

    def open(self, *, num_api_spec_tokens=None):
        session = super().open()
        close = session.close

        async def slow():
            await self._gate.passed()
            await close()

        session.close = slow
        return session


async def test_who_waits_on_a_failed_stream_is_told_when_its_session_is_closed():
    gate = Gate()
    backend = Failing(gate)
    stream = root(backend)
    stream.append(Gen("x"))
    reading = asyncio.create_task(stream.read("nothing").get())
    while not gate._num_reached:
        await asyncio.sleep(0)
    assert not reading.done()
    gate.open()
    with pytest.raises(JsgError, match="no"):
        await reading
    assert backend.num_open == 0


async def test_a_session_is_closed_by_a_task_that_is_not_being_cancelled_any_more():
    gate = Gate()
    cancelling = []

    class Watching(ScriptedBackend):
        def open(self, *, num_api_spec_tokens=None):
            session = super().open()

            async def close():
                cancelling.append(asyncio.current_task().cancelling())

            session.close = close
            return session

    async def answer(prompt, gen):
        await gate.passed()
        return "late"

    backend = Watching(answer)

    stream = root(backend)
    stream.append(Gen("x"))
    while not backend.calls:
        await asyncio.sleep(0)
    stream.cancel()
    while not cancelling:
        await asyncio.sleep(0)
    assert cancelling == [0]  # what a closing session awaits could take it for a cancellation of its own


async def test_what_is_pushed_while_a_failed_stream_closes_its_session_is_answered():
    gate = Gate()

    backend = Failing(gate)
    stream = root(backend)
    stream.append(Gen("x"))
    with pytest.raises(JsgError, match="no"):
        await stream.variable("x").get()
    while not gate._num_reached:
        await asyncio.sleep(0)
    late = stream.read("nothing")
    stream.close()
    for _ in range(3):
        await asyncio.sleep(0)  # the op comes while the session closes
    gate.open()
    with pytest.raises(JsgError, match="no"):
        await asyncio.wait_for(late.get(), 10)
    assert not stream.runner._queue
    assert backend.num_open == 0


async def test_a_stream_runs_outside_of_the_context_of_who_appends():
    contexts = []
    asker = contextvars.ContextVar("asker", default="nobody")

    def answer(prompt, gen):
        contexts.append(asker.get())
        return "A"

    asker.set("the loop")
    stream = root(ScriptedBackend(answer))
    stream.append(Gen("x"))
    await stream.variable("x").get()

    def append():
        asker.set("a thread")
        stream.append(Gen("y"))

    await asyncio.to_thread(append)
    await stream.variable("y").get()
    assert contexts == ["nobody"] * 2


async def test_who_gives_up_expecting_a_name_leaves_nothing():
    stream = root(ScriptedBackend("A"))
    first, second = stream.expect("x"), stream.expect("x")
    stream.forget(first)
    stream.append(Gen("x"))
    assert await (await second.get()).get() == "A" and not first.is_done
    stream.forget(second)  # that is done: nothing happens
    assert not stream._expected


async def test_a_cancelled_stream_says_so_at_once():
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return "late"

    stream = root(ScriptedBackend(answer))
    stream.append(Gen("x"))
    stream.cancel()  # the runner, on this loop, cannot know yet
    with pytest.raises(AbortedError):
        stream.append("more")
    with pytest.raises(AbortedError):
        stream.fork()
    with pytest.raises(AbortedError):
        await stream.expect("never").get()


async def test_scopes_do_not_count_as_extending_the_prompt():
    stream = root(ScriptedBackend())
    stream.append("p")
    branches = stream.fork(2)
    for branch in branches:
        branch.append("d")
    stream.append(VarScopeBegin("docs"))
    stream.join(branches, "concate_and_append")
    stream.append(VarScopeEnd("docs"))
    assert await stream.variable("docs").get() == "dd"
    late = stream.fork(1)
    stream.append(VarScopeBegin("more") + Text("text"))
    with pytest.raises(ProgramError, match="extended after the fork"):
        stream.join(late, "concate_and_append")


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        (None, RoleBegin("user") + Text("d") + RoleEnd("user")),
        (None, RoleBegin("user") + Text("d")),
        ("user", RoleEnd("user")),
        ("user", RoleEnd("user") + RoleBegin("user")),
    ],
)
async def test_branches_that_opened_or_closed_turns_do_not_join_side_by_side(before, inside):
    backend = ScriptedBackend()

    stream = root(backend)
    stream.append("p" if before is None else RoleBegin(before) + "p")
    branches = stream.fork(2)
    branches[0].append("d")
    branches[1].append(inside)
    with pytest.raises(ProgramError, match="branch 1 opened or closed a turn"):
        stream.join(branches, "concate_and_append")
    stream.join(branches)  # nothing of it was done
    stream.close()
    await stream.ended.get()
    assert backend.num_open == 0


def test_a_branch_that_was_cancelled_does_not_join_though_its_runner_has_not_heard_of_that():
    event = asyncio.Event()
    has_begun = False

    async def answer(prompt, gen):
        await event.wait()
        return "A"

    async def work():
        nonlocal has_begun
        has_begun = True
        await event.wait()

    backend = ScriptedBackend(answer)

    async def main():
        stream = root(backend)
        stream.append("p")
        (branch,) = stream.fork()
        branch.append(Gen("x"))
        while not backend.prompts():
            await asyncio.sleep(0)
        stream.runner.push([ExprOp(Text(""), None, make=work)])
        while not has_begun:
            await asyncio.sleep(0)
        event.set()  # both runners are at work, the branch's first, before the loop takes the calls of the cancel
        branch.cancel()
        stream.join([branch], "concate_and_append")
        with pytest.raises(AbortedError, match="was cancelled"):
            await stream.read("text").get()

    asyncio.run(main())
    assert "join" not in [call.kind for call in backend.calls] and backend.num_open == 0
