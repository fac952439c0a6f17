"""Async programs, and text as it comes."""

import asyncio
import sys
import threading
import time
from typing import Any

import pytest

import jsg as sgl
from jsg.errors import AbortedError, JsgError, ProgramError, UnknownVariableError
from tests.lang.scripted import Gate, ScriptedBackend


def test_an_async_program_reads_by_awaiting():
    @sgl.function
    async def program(s, q):
        s += sgl.user(q)
        async with s.assistant():
            s += sgl.gen("a")
        forks = s.fork(2)
        forks += sgl.gen("b")
        forks.join()
        assert await s.aget("b") == ["A", "A"]
        assert await s.atext() == f"[user]{q}[/user][assistant]A[/assistant]"
        assert (await s.amessages())[1] == {"role": "assistant", "content": "A"}
        assert (await s.aget_meta_info("a"))["completion_tokens"] == 1
        await s.settle()
        assert await s.aerror() is None
        with pytest.raises(UnknownVariableError):
            await s.aget("c")
        return await s.aget("a")

    async def main():
        state = await program.arun("hi", backend=ScriptedBackend("A"))
        assert state.ret_value == state["a"] == "A"  # all is known: reading needs no await
        both = await asyncio.gather(*(program(q, backend=ScriptedBackend("A")) for q in "xy"))
        return [await state.atext() for state in both]

    assert asyncio.run(main()) == [f"[user]{q}[/user][assistant]A[/assistant]" for q in "xy"]
    assert program.run("hi", backend=ScriptedBackend("A")).ret_value == "A"


async def test_run_of_an_async_program_inside_a_loop_says_what_to_write():
    @sgl.function
    async def program(s):
        s += "x"

    with pytest.raises(ProgramError, match="arun"):
        program.run(backend=ScriptedBackend())


async def test_arun_of_a_plain_program_leaves_the_loop_free():
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return "late"

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        return s["x"], threading.current_thread() is threading.main_thread()

    task = asyncio.create_task(program.arun(backend=ScriptedBackend(answer)))
    await asyncio.sleep(0)
    gate.open()  # which a loop that is blocked could not do
    assert ((await task).ret_value) == ("late", False)


@pytest.mark.parametrize("is_async", [False, True])
async def test_cancelling_the_task_of_arun_aborts_the_program(is_async):
    gate = Gate()
    reached = asyncio.Event()
    loops = []

    async def answer(prompt, gen):
        loops[0].call_soon_threadsafe(reached.set)
        await gate.passed()
        return "late"

    async def body(s):
        s += sgl.gen("x")
        forks = s.fork(1)
        forks += sgl.gen("y")
        await s.aget("x")

    def plain_body(s):
        s += sgl.gen("x")
        s["x"]

    backend = ScriptedBackend(answer)
    program = sgl.function(body if is_async else plain_body)

    loops.append(asyncio.get_running_loop())
    task = asyncio.create_task(program.arun(backend=backend))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while backend.num_open:
        await asyncio.sleep(0.001)
    assert "x" in [gen.name for gen in backend.aborted]


async def test_errors_of_async_bodies_and_of_plain_ones_leave_arun():
    @sgl.function
    async def program(s):
        raise ValueError("mine")

    @sgl.function
    def plain(s):
        raise ValueError("mine, too")

    with pytest.raises(ValueError, match=r"^mine$"):
        await program.arun(backend=ScriptedBackend())
    with pytest.raises(ValueError, match="too"):
        await plain.arun(backend=ScriptedBackend())


# Streaming


def stepwise() -> tuple[ScriptedBackend, list[Gate]]:
    """Says "a", "b", "c", each when its gate is open."""
    gates = [Gate(), Gate(), Gate()]

    class Stepwise(ScriptedBackend):
        def open(self, *, num_api_spec_tokens=None):
            session = super().open()
            generate = session.generate

            async def slow(gen):
                index = 0
                async for piece in generate(gen):
                    await gates[index].passed()
                    yield piece
                    index += 1

            session.generate = slow
            return session

    return Stepwise(lambda prompt, gen: ["a", "b", "c"]), gates


def test_f21_text_iter_gives_text_as_it_comes_without_spinning():
    backend, gates = stepwise()

    @sgl.function
    def program(s):
        s += "p" + sgl.gen("x") + "q"

    state = program.run(backend=backend, stream=True)
    pieces, everything = state.text_iter("x"), state.text_iter()
    assert next(everything) == "p"
    for gate, expected in zip(gates, "abc", strict=True):
        gate.wait_reached()
        gate.open()
        assert next(pieces) == expected and next(everything) == expected
    assert list(pieces) == [] and list(everything) == ["q"]
    assert list(state.text_iter("x")) == ["a", "b", "c"]  # again, from the beginning


def test_f21_waiting_for_text_takes_no_processor_time():
    """A reader that spins runs thousands of lines while others have the processor."""
    backend, gates = stepwise()
    used = []

    @sgl.function
    def program(s):
        s += sgl.gen("x")

    def read(name: str) -> None:
        lines = []

        def trace(_frame: Any, event: str, _value: Any) -> Any:
            lines.append(event)
            return trace

        sys.settrace(trace)
        assert "".join(state.text_iter(name)) == "abc"
        sys.settrace(None)
        used.append(len(lines))

    state = program.run(backend=backend, stream=True)
    readers = [threading.Thread(target=read, args=(name,)) for name in ("x", None)]
    for reader in readers:
        reader.start()
    gates[0].wait_reached()
    for _ in range(100):
        time.sleep(0)  # lets the readers run
    for gate in gates:
        gate.open()
    for reader in readers:
        reader.join()
    assert max(used) < 1000, used


async def test_f21_a_hundred_async_readers_park_no_threads():
    backend, gates = stepwise()

    @sgl.function
    def program(s):
        s += sgl.gen("x")

    state = await program.arun(backend=backend, stream=True)

    async def read():
        return [pair async for pair in state.text_async_iter("x", return_meta_data=True)]

    readers = [asyncio.create_task(read()) for _ in range(100)]
    before = threading.active_count()
    for gate in gates:
        gate.open()
        await asyncio.sleep(0)
        assert threading.active_count() <= before
    for result in await asyncio.gather(*readers):
        assert [text for text, _ in result] == ["a", "b", "c", ""]
        assert result[-1][1]["completion_tokens"] == 3 and result[0][1] == {}
    assert [piece async for piece in state.text_async_iter()] == ["a", "b", "c"]


def test_a_stream_may_be_read_before_the_program_sets_the_variable():
    gate = Gate()

    @sgl.function
    def program(s):
        s += "p"
        asyncio.run(gate.passed())
        s += sgl.gen("x")

    state = program.run(backend=ScriptedBackend(lambda p, g: ["a", "b"]), stream=True)
    assert "x" not in state
    gate.wait_reached()
    opener = threading.Thread(target=gate.open)
    pieces = state.text_iter("x")
    opener.start()
    assert list(pieces) == ["a", "b"] and state["x"] == "ab"
    opener.join()


def test_a_stream_of_a_failing_body_ends_with_its_error():
    @sgl.function
    def program(s):
        s += "p"
        s.sync()
        raise ValueError("mine")

    for name in (None, "x"):
        state = program.run(backend=ScriptedBackend(), stream=True)
        with pytest.raises(ValueError, match="mine"):
            list(state.text_iter(name))
        assert isinstance(state.error(), ValueError)


def test_text_iter_inside_the_program_ends_where_it_was_called():
    @sgl.function
    def program(s):
        s += "p" + sgl.gen("x")
        seen = "".join(s.text_iter())
        s += "q"
        return seen

    assert program.run(backend=ScriptedBackend(lambda p, g: ["a", "b"])).ret_value == "pab"


def test_streaming_an_async_program():
    @sgl.function
    async def program(s):
        s += "p" + sgl.gen("x")
        return "".join([piece async for piece in s.text_async_iter()])

    async def main():
        state = await program.arun(backend=ScriptedBackend(lambda p, g: ["a", "b"]), stream=True)
        assert [piece async for piece in state.text_async_iter()] == ["p", "a", "b"]
        with pytest.raises(ProgramError, match="name of a variable"):
            [piece async for piece in state.text_async_iter(return_meta_data=True)]
        return state.ret_value

    assert asyncio.run(main()) == "pab"
    state = program.run(backend=ScriptedBackend(lambda p, g: ["a", "b"]), stream=True)
    assert "".join(state.text_iter()) == "pab"


def test_a_cancelled_stream_ends_its_readers():
    backend, gates = stepwise()

    @sgl.function
    def program(s):
        s += sgl.gen("x")

    state = program.run(backend=backend, stream=True)
    gates[0].wait_reached()
    gates[0].open()
    pieces = state.text_iter("x")
    assert next(pieces) == "a"
    state.cancel()
    with pytest.raises(AbortedError):
        list(pieces)


def test_an_error_behind_some_text_comes_behind_that_text():
    class Cut(ScriptedBackend):
        def open(self, *, num_api_spec_tokens=None):
            session = super().open()
            generate = session.generate

            async def cut(gen):
                async for piece in generate(gen):
                    yield piece
                    raise JsgError("cut")

            session.generate = cut
            return session

    @sgl.function
    def program(s):
        s += sgl.gen("x")

    state = program.run(backend=Cut(lambda p, g: ["a", "b"]))
    pieces = state.text_iter("x")
    assert next(pieces) == "a"
    with pytest.raises(JsgError, match="cut"):
        next(pieces)


def test_get_meta_info_has_a_time_out():
    backend, gates = stepwise()

    @sgl.function
    def program(s):
        s += sgl.gen("x")

    state = program.run(backend=backend)
    with pytest.raises(TimeoutError, match=r"about 'x' was not known within 0\.01 s$"):
        state.get_meta_info("x", timeout=0.01)
    for gate in gates:
        gate.open()
    assert state.get_meta_info("x", timeout=30)["completion_tokens"] == 3


def test_the_time_out_of_get_meta_info_counts_while_the_name_is_not_set_yet():
    backend, gates = stepwise()
    go = threading.Event()

    @sgl.function
    def program(s):
        s += "p"
        assert go.wait(30)
        s += sgl.gen("x")

    state = program.run(stream=True, backend=backend)
    with pytest.raises(TimeoutError):
        state.get_meta_info("x", timeout=0.01)
    assert not state._stream._expected
    go.set()
    for gate in gates:
        gate.open()
    assert state.get_meta_info("x", timeout=30)["completion_tokens"] == 3


async def test_a_cancelled_read_of_a_name_that_is_not_set_leaves_nothing():
    go = threading.Event()

    @sgl.function
    def program(s):
        assert go.wait(30)
        s += sgl.gen("x")

    state = program.run(stream=True, backend=ScriptedBackend("A"))

    task = asyncio.create_task(state.aget("x"))
    while not state._stream._expected:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not state._stream._expected
    go.set()
    assert await state.aget("x") == "A"
