"""Batches read their input as they go."""

import asyncio
import collections
import itertools
import sys
import threading
import types

import pytest

import jsg as sgl
from jsg.errors import ProgramError
from jsg.lang.program.batch import texts_of
from tests.lang.scripted import Gate, ScriptedBackend


@sgl.function
def plain(s, q):
    s += f"{q}" + sgl.gen("a")


@sgl.function
async def in_task(s, q):
    s += f"{q}" + sgl.gen("a")
    await s.aget("a")


PROGRAMS = [plain, in_task, plain.compile()]


def echoing() -> ScriptedBackend:
    return ScriptedBackend(lambda prompt, gen: f"<{prompt}>")


def items(drawn: list[int], numbers=range(300)):
    for number in numbers:
        drawn.append(number)
        yield {"q": number}


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_endless_input_is_drawn_only_as_far_as_runs_have_room(program):
    drawn: list[int] = []
    states = program.run_batch(items(drawn, itertools.count()), generator_style=True, num_threads=4, backend=echoing())
    assert [next(states)["a"] for _ in range(3)] == ["<0>", "<1>", "<2>"]
    states.close()
    assert len(drawn) <= 3 + 256 + 1  # the window, and a draw that was under way
    assert drawn == list(range(len(drawn)))


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_item_is_drawn_before_a_worker_is_free(program):
    gate, drawn = Gate(), []

    async def answer(prompt, gen):
        await gate.passed()
        return f"<{prompt}>"

    def open_then():
        gate.wait_reached(3)
        seen.append(len(drawn))
        gate.open()

    seen: list[int] = []
    opener = threading.Thread(target=open_then)
    opener.start()
    states = program.run_batch(items(drawn, range(20)), num_threads=3, backend=ScriptedBackend(answer))
    opener.join()
    assert [state["a"] for state in states] == [f"<{i}>" for i in range(20)]
    assert seen == [3]


def test_an_input_that_is_slow_holds_up_no_state():
    gate = Gate()

    def slow():
        yield ["first"]
        asyncio.run(gate.passed())
        yield ["second"]

    states = plain.run_batch(slow(), generator_style=True, backend=echoing())
    assert next(states)["a"] == "<first>"  # while the second item is awaited
    gate.open()
    assert [state["a"] for state in states] == ["<second>"]


def collected(program, batch, way):
    """The answers that came before the error, and the error."""
    answers: list[str] = []

    async def main():
        async for state in await program.arun_batch(batch, generator_style=True, backend=echoing()):
            answers.append(state["a"])

    try:
        if way == "sync":
            for state in program.run_batch(batch, generator_style=True, backend=echoing()):
                answers.append(state["a"])
        else:
            asyncio.run(main())
    except Exception as error:
        return answers, error
    return answers, None


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_error_of_the_input_comes_behind_the_states_before_it(program, way):
    def broken():
        yield from items([], range(3))
        raise ValueError("mine")

    answers, error = collected(program, broken(), way)
    assert answers == ["<0>", "<1>", "<2>"] and isinstance(error, ValueError)
    misfit = ({"q": 1} if i < 2 else {"r": 1} for i in range(9))
    answers, error = collected(program, misfit, way)
    assert answers == ["<1>", "<1>"] and isinstance(error, ProgramError) and "'q'" in str(error)
    answers, error = collected(program, ({"q": 1} for _ in range(0)), way)
    assert (answers, error) == ([], None)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_list_is_checked_before_anything_runs_and_what_is_no_input_is_named(program):
    backend = echoing()
    for wrong, message in (([{"q": 1}, 5], "item 1 is a int"), (5, "another iterable of arguments, but got a int")):
        with pytest.raises(ProgramError, match=message):
            program.run_batch(wrong, backend=backend)
    with pytest.raises(ProgramError, match="item 0 is a str"):
        program.run_batch({"q": 1}, backend=backend)  # one item instead of a list of items
    assert backend.calls == []


def test_the_progress_bar_of_an_input_of_unknown_size_counts(capsys):
    plain.run_batch(items([], range(7)), backend=echoing(), progress_bar=True)
    assert "7/?" in capsys.readouterr().err


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("generator_style", [False, True])
def test_a_batch_that_would_stop_a_running_loop_is_an_error_and_runs_nothing(program, generator_style):
    async def main():
        program.run_batch([("x",)], generator_style=generator_style, backend=backend)

    backend = echoing()
    with pytest.raises(ProgramError, match=r"would stop the event loop that runs here: .*await program\.arun_batch"):
        asyncio.run(main())

    @sgl.function
    async def calling(s):
        program.run_batch([("x",)], generator_style=generator_style, backend=backend)

    with pytest.raises(ProgramError, match="would stop the event loop"):
        calling.run(backend=backend)
    assert backend.calls == []


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_cell_of_a_notebook_may_wait_for_a_batch(program, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: object()))

    assert [state["a"] for state in program.run_batch([("x",), ("y",)], backend=echoing())] == ["<x>", "<y>"]


def test_texts_are_found_among_many_values_of_arguments_and_in_those_that_contain_themselves():
    loop: list = ["in"]
    loop.append(loop)
    assert texts_of((("a", 1, ""), {"x": {"y": ["b", ("c",)]}, "z": loop})) == {"a", "b", "c", "in"}
    assert texts_of((([*range(10**6)],), {"x": "kept"})) == {"kept"}


class Lazy(collections.UserDict):
    """A row of a dataset that decodes what it holds when it is asked for."""

    def values(self):
        raise OSError("no such picture")


class Odd(str):
    """A text that is in no set."""

    __hash__ = None


def test_arguments_that_are_looked_at_for_texts_are_taken_as_they_are():
    @sgl.function
    def typed(s, q):
        s += type(q).__name__ + sgl.gen("a")

    states = typed.run_batch([{"q": Lazy()}, {"q": Odd("a")}], backend=echoing())
    assert [state["a"] for state in states] == ["<Lazy>", "<Odd>"]
    assert texts_of((Odd("a"), Lazy())) == {"a"}
