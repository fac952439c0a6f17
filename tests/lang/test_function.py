"""`function`, `bind`, batches."""

import asyncio
import inspect
import threading

import pytest

import jsg as sgl
from jsg.errors import AbortedError, JsgError, ProgramError
from jsg.lang.program.run_args import RunArgs
from jsg.lang.words.ir import SamplingArgs
from tests.lang.scripted import Gate, ScriptedBackend


@sgl.function
def echo(s, q, mark="?"):
    """Repeats."""
    s += q + mark
    s += sgl.gen("a")
    return q


def echoing() -> ScriptedBackend:
    return ScriptedBackend(lambda prompt, gen: f"<{prompt}>")


def test_the_first_parameter_is_s():
    with pytest.raises(ProgramError, match=r"must be named s, but .*wrong has state"):

        @sgl.function
        def wrong(state): ...

    with pytest.raises(ProgramError, match="has none"):
        sgl.function(lambda: None)
    assert echo.__name__ == "echo" and echo.__doc__ == "Repeats."


def test_with_and_without_parentheses():
    @sgl.function()
    def plain(s): ...

    @sgl.function(num_api_spec_tokens=8)
    def speculating(s): ...

    assert plain.num_api_spec_tokens is None and speculating.num_api_spec_tokens == 8
    with pytest.raises(ProgramError, match="at least 1"):
        sgl.function(num_api_spec_tokens=0)(lambda s: None)


def test_calling_is_running():
    assert echo("x", backend=echoing())["a"] == "<x?>"
    assert echo.run(q="x", mark="!", backend=echoing())["a"] == "<x!>"


def test_arguments_that_do_not_fit_are_refused_before_anything_runs():
    backend = echoing()
    with pytest.raises(ProgramError, match="unexpected keyword argument 'nonsense'"):
        echo.run("x", nonsense=1, backend=backend)
    with pytest.raises(ProgramError, match="missing a required argument: 'q'"):
        echo.run(backend=backend)
    for batch in ([("x",), ()], [{"q": "x"}, {"p": "x"}], [("x",), ("a", "b", "c")]):
        with pytest.raises(ProgramError, match="item 1 of the batch"):
            echo.run_batch(batch, backend=backend)
    with pytest.raises(ProgramError, match="item 0 is a str"):
        echo.run_batch(["x"], backend=backend)
    assert backend.opened_with == []


def test_f13_bind_keeps_num_api_spec_tokens():
    @sgl.function(num_api_spec_tokens=32)
    def program(s, q, a="a", b="b"):
        s += q + a + b + sgl.gen("x")

    bound = program.bind(a="A").bind(b="B")
    backend = echoing()
    assert bound.num_api_spec_tokens == 32
    assert bound.run("q", backend=backend)["x"] == "<qAB>" and backend.opened_with == [32]
    assert bound.run("q", a="!", backend=backend)["x"] == "<q!B>"
    assert program.run("q", backend=backend)["x"] == "<qab>"
    assert [s["x"] for s in bound.run_batch([("q",), {"q": "p", "b": "."}], backend=backend)] == ["<qAB>", "<pA.>"]
    with pytest.raises(ProgramError, match="has no parameter c"):
        program.bind(c=1)


def test_run_arguments_are_checked():
    with pytest.raises(JsgError, match="temperature must be a number"):
        echo.run("x", temperature="hot", backend=echoing())
    with pytest.raises(ProgramError, match="run_batch has no argument q"):
        echo.run_batch([("x",)], q=1, backend=echoing())


def test_a_parameter_of_the_program_is_not_taken_for_an_argument_of_the_run():
    for name in RunArgs.__annotations__:

        def body(s, **given):
            s += sgl.gen("a")
            return given

        parameters = [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in ("s", name)]
        body.__signature__ = inspect.Signature(parameters)
        program = sgl.function(body)
        backend = echoing()
        states = [
            program.run(**{name: "mine"}, backend=backend),
            asyncio.run(program.arun(**{name: "mine"}, backend=backend)),
            *program.run_batch([{name: "mine"}], backend=backend),
            program.bind(**{name: "mine"}).run(backend=backend),
        ]
        assert [state.ret_value for state in states] == [{name: "mine"}] * 4
        assert all(call.what.args == SamplingArgs(max_tokens=128, temperature=1.0) for call in backend.calls)
        with pytest.raises(ProgramError, match=f"run_batch has no argument {name}"):
            program.run_batch([{}], **{name: "mine"}, backend=backend)


# Batches


def test_a_batch_gives_its_states_in_order_at_their_end():
    backend = echoing()
    batch = [{"q": f"q{i}"} if i % 2 else (f"q{i}",) for i in range(300)]
    for states in (
        echo.run_batch(batch, backend=backend),
        list(echo.run_batch(batch, backend=backend, generator_style=True, num_threads=2)),
    ):
        assert [state["a"] for state in states] == [f"<q{i}?>" for i in range(300)]
        assert [state.ret_value for state in states] == [f"q{i}" for i in range(300)]
        backend.wait_closed()
    assert echo.run_batch([], backend=backend) == []


def test_what_fails_in_an_item_stays_with_its_state():
    @sgl.function
    def program(s, i):
        if i == 1:
            raise ValueError("mine")
        s += str(i) + sgl.gen("x")

    def answer(prompt, gen):
        if prompt == "2":
            raise JsgError("no")
        return "A"

    states = program.run_batch([(i,) for i in range(4)], backend=ScriptedBackend(answer))
    assert [type(state.error()) for state in states] == [type(None), ValueError, JsgError, type(None)]
    assert states[0]["x"] == states[3]["x"] == "A"
    with pytest.raises(ValueError, match="mine"):
        states[1]["x"]
    with pytest.raises(JsgError, match="no"):
        states[2]["x"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_no_more_than_num_threads_run_at_a_time(is_async, reads):
    live, peak = 0, 0

    async def answer(prompt, gen):
        nonlocal live, peak
        live += 1
        peak = max(peak, live)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        live -= 1
        return "A"

    def body(s):
        s += sgl.gen("x")
        if reads:
            s["x"]

    async def async_body(s):
        s += sgl.gen("x")
        if reads:
            await s.aget("x")

    program = sgl.function(async_body if is_async else body)
    backend = ScriptedBackend(answer)
    states = program.run_batch([()] * 50, num_threads=3, backend=backend)
    assert [state["x"] for state in states] == ["A"] * 50
    assert 1 < peak <= 3 and backend.max_open <= 3


def test_all_of_a_batch_is_under_way_at_once_where_it_may_be():
    gate = Gate()
    num_waiting = 0

    async def answer(prompt, gen):
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 96:
            gate.open()
        await asyncio.wait_for(gate.passed(), 30)  # opened by the last one
        return "A"

    states = echo.run_batch([("x",)] * 96, backend=ScriptedBackend(answer))
    assert [state["a"] for state in states] == ["A"] * 96


def test_an_iterator_gives_the_first_state_while_others_run():
    gate = Gate()

    async def answer(prompt, gen):
        if prompt != "q0?":
            await gate.passed()
        return prompt

    states = echo.run_batch([(f"q{i}",) for i in range(3)], generator_style=True, backend=ScriptedBackend(answer))
    assert next(states)["a"] == "q0?"
    gate.open()
    assert [state["a"] for state in states] == ["q1?", "q2?"]


def test_closing_the_iterator_cancels_the_rest():
    gate = Gate()

    async def answer(prompt, gen):
        if prompt != "q0?":
            await gate.passed()
        return prompt

    backend = ScriptedBackend(answer)
    states = echo.run_batch([(f"q{i}",) for i in range(9)], generator_style=True, num_threads=4, backend=backend)
    assert next(states)["a"] == "q0?"
    gate.wait_reached()
    states.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "jsg-batch"]
    assert len(backend.opened_with) <= 6


def test_an_iterator_does_not_run_far_ahead_of_its_reader():
    backend = echoing()
    states = echo.run_batch([("x",)] * 2000, generator_style=True, num_threads=4, backend=backend)
    next(states)
    states.close()
    assert len(backend.opened_with) < 300


def test_batches_of_async_programs_and_of_tasks():
    @sgl.function
    async def program(s, q):
        s += q + sgl.gen("a")
        return await s.aget("a")

    async def main():
        listed = await program.arun_batch([("x",), ("y",)], backend=echoing())
        plain = await echo.arun_batch([("x",), ("y",)], backend=echoing())
        one_by_one = await program.arun_batch([("x",), ("y",)], backend=echoing(), generator_style=True)
        return listed, plain, [state async for state in one_by_one]

    listed, plain, one_by_one = asyncio.run(main())
    assert [state.ret_value for state in listed] == [state["a"] for state in one_by_one] == ["<x>", "<y>"]
    assert [state["a"] for state in plain] == ["<x?>", "<y?>"]
    assert [s.ret_value for s in program.run_batch([("x",)], backend=echoing())] == ["<x>"]


async def test_cancelling_the_task_of_a_batch_aborts_it():
    gate = Gate()
    backend = ScriptedBackend(lambda prompt, gen: waiting())

    async def waiting():
        await gate.passed()
        return "A"

    task = asyncio.create_task(echo.arun_batch([("x",)] * 3, backend=backend))
    while len(backend.calls) < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while backend.num_open:
        await asyncio.sleep(0.001)
    assert len(backend.aborted) == 3


def test_num_threads_is_checked():
    for wrong in (0, -1, True, "many", 1.5):
        with pytest.raises(ProgramError, match="num_threads"):
            echo.run_batch([("x",)], num_threads=wrong, backend=echoing())


def test_the_progress_bar_counts_to_the_end_and_stays_out_of_the_output(capsys):
    echo.run_batch([("x",)] * 7, backend=echoing(), progress_bar=True)
    shown = capsys.readouterr()
    assert "7/7" in shown.err and not shown.out


def test_a_batch_inside_a_program_runs_on_its_backend():
    @sgl.function
    def outer(s):
        return [state["a"] for state in echo.run_batch([("x",), ("y",)])]

    assert outer.run(backend=echoing()).ret_value == ["<x?>", "<y?>"]


def test_cancelling_a_program_aborts_the_batch_that_runs_inside_it():
    gate, has_ended = Gate(), threading.Event()
    errors = []

    async def answer(prompt, gen):
        await gate.passed()
        return "A"

    @sgl.function
    def outer(s):
        errors.extend(state.error() for state in echo.run_batch([("x",)] * 5, num_threads=3))
        has_ended.set()

    backend = ScriptedBackend(answer)
    state = outer.run(stream=True, backend=backend)
    gate.wait_reached(3)
    state.cancel()
    assert has_ended.wait(30)
    assert [type(error) for error in errors] == [AbortedError] * 5
    backend.wait_closed()
    assert len(backend.aborted) == len(backend.calls) == 3, "the other two asked nothing"


def test_f20_a_batch_runs_the_body_once_per_item_with_its_own_arguments_only():
    seen = []

    @sgl.function
    def program(s, q):
        seen.append(q)
        s += "constant text " * 20 + q + sgl.gen("x")

    program.run_batch([{"q": f"q{i}"} for i in range(5)], backend=echoing())
    assert sorted(seen) == [f"q{i}" for i in range(5)]


def test_a_batch_inside_a_traced_program_is_traced():
    @sgl.function
    def outer(s, q):
        for state in echo.run_batch([(q,), {"q": "y", "mark": "!"}], temperature=0.5):
            s += state["a"]

    compiled = outer.compile()
    backend = echoing()
    assert compiled.run(q="x", backend=backend).text() == "<x?><y!>"
    assert {call.what.args.temperature for call in backend.calls} == {0.5}


def test_a_parameter_of_the_program_is_its_own_in_a_trace_too():
    @sgl.function
    def inner(s, seed):
        s += f"{seed}" + sgl.gen("a")

    @sgl.function
    def outer(s):
        s += inner(seed=7, temperature=0.5)["a"]

    backend = echoing()
    assert outer.compile().run(backend=backend).text() == "<7>"
    assert [(call.what.args.seed, call.what.args.temperature) for call in backend.calls] == [(None, 0.5)]
