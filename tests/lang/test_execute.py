"""Graphs that run: their results are those of the interpreted program, wherever and in whatever order they run."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings

import jsg as sgl
from jsg.errors import AbortedError, ProgramError, RequestError, UnknownVariableError
from jsg.lang.executor.compiled import CompiledFunction
from jsg.lang.executor.limits import ProgramLimits
from tests.lang.graph_programs import PLANS, backend, branches, planned, post, run_here, two_gens, until
from tests.lang.scripted import Gate, ScriptedBackend


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS)
def test_a_compiled_program_says_what_the_interpreted_one_says(plan):
    interpreted = planned.run(q="why", plan=plan, backend=backend())
    expected = (interpreted.text(), {name: interpreted[name] for name in "abc"}, interpreted.messages())
    returned = [interpreted["a"], {"b": interpreted["b"]}, interpreted.text()]
    compiled = planned.compile(plan=plan)
    sent = CompiledFunction.from_json(compiled.to_json())
    assert sent.graph == compiled.graph
    for runs in (compiled, sent):
        where = backend()
        state = runs.run(q="why", backend=where)
        assert state.error() is None
        assert (state.text(), {name: state[name] for name in "abc"}, state.messages()) == expected
        assert state.ret_value == returned
        assert where.num_open == 0, "every session is closed when the program has ended"


def after(gate):
    """A backend on which all prompts but those that begin with "0" wait at a gate."""

    async def slow(prompt, gen):
        if not prompt.startswith("0"):
            await gate.passed()
        return "x"

    return ScriptedBackend(slow)


def test_reading_waits_and_text_comes_as_it_grows():
    gate = Gate()

    async def slow(prompt, gen):
        if gen.name == "second":
            await gate.passed()
        return ["one ", "two ", "three"] if gen.name == "first" else ["four"]

    state = two_gens.compile().run("x: ", backend=ScriptedBackend(slow))
    assert list(state.text_iter("first")) == ["one ", "two ", "three"] and state["first"] == "one two three"
    pieces = state.text_iter()
    assert "".join(next(pieces) for _ in range(4)) == "x: one two three"
    gate.open()
    assert "".join(pieces) == " then four"
    assert state.text() == "x: one two three then four"
    assert state.get_meta_info("second")["completion_tokens"] == 1
    assert state.usage() == {"calls": 2, "prompt_tokens": 8, "completion_tokens": 4, "cached_tokens": 0}
    assert "first" in state and "third" not in state
    with pytest.raises(UnknownVariableError, match="at its end it has 'first', 'second'"):
        state["third"]


async def test_states_are_read_in_tasks():
    state = await two_gens.compile().arun("x: ", backend=backend())
    assert await state.aget("first") == state["first"] and await state.atext() == state.text()
    assert await state.amessages() == [] and await state.aret_value() is None
    assert await state.aerror() is None and (await state.aget_meta_info("first"))["completion_tokens"] == 2
    pairs = [pair async for pair in state.text_async_iter("first", return_meta_data=True)]
    assert "".join(text for text, _ in pairs) == state["first"]
    assert pairs[-1][1]["completion_tokens"] == 2
    assert "".join([piece async for piece in state.text_async_iter()]) == state.text()


def test_what_fails_in_a_branch_stays_there_and_names_its_line():
    def fail(prompt, gen):
        if prompt == "x1 ":
            raise RequestError("no such thing")
        return "fine"

    @sgl.function
    def program(s, x):
        s += x
        forks = s.fork(2)
        forks += lambda i: f"{i} " + sgl.gen("part")
        forks.join()
        s["first"] = f"{s['part'][0]}!"
        s["second"] = f"{s['part'][1]}!"
        s += sgl.gen("own")

    state = program.compile().run("x", backend=ScriptedBackend(fail))
    assert state["own"] == "fine" and state["first"] == "fine!"
    for name in ("second", "part"):
        with pytest.raises(RequestError, match="no such thing") as caught:
            state[name]
    assert any("test_execute.py:" in note for note in caught.value.__notes__)
    assert state.error() is None, "the program's own prompt is whole"


def test_what_fails_in_the_program_fails_what_needs_it():
    def fail(prompt, gen):
        raise RequestError("no such thing")

    where = ScriptedBackend(fail)
    state = two_gens.compile().run("x", backend=where)
    with pytest.raises(RequestError, match="no such thing"):
        state["second"]
    with pytest.raises(RequestError, match="no such thing"):
        state.text()
    assert isinstance(state.error(), RequestError)
    assert len(where.calls) == 1 and where.num_open == 0


def test_cancelling_aborts_what_runs():
    gate = Gate()

    async def forever(prompt, gen):
        await gate.passed()
        return "never"

    where = ScriptedBackend(forever)
    state = branches.compile().run("x", backend=where)
    gate.wait_reached()
    state.cancel()
    with pytest.raises(AbortedError):
        state["part"]
    assert isinstance(state.error(), AbortedError)
    assert run_here(until(lambda: where.num_open == 0 and len(where.aborted) >= 1))
    gate.open()


async def test_a_cancelled_task_cancels_its_program():
    gate = Gate()

    async def forever(prompt, gen):
        await gate.passed()
        return "never"

    where = ScriptedBackend(forever)

    task = asyncio.create_task(branches.compile().arun("x", backend=where))
    await asyncio.to_thread(gate.wait_reached)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert run_here(until(lambda: where.num_open == 0))
    gate.open()


def test_a_batch_gives_states_in_order_and_keeps_failures_apart():
    def sometimes(prompt, gen):
        if "2" in prompt:
            raise RequestError("two is refused")
        return prompt.upper()

    compiled = two_gens.compile()
    states = compiled.run_batch([{"x": f"x{i}"} for i in range(20)], backend=ScriptedBackend(sometimes), num_threads=3)
    assert [state.error() is None for state in states] == ["2" not in f"x{i}" for i in range(20)]
    assert states[3]["first"] == "X3"
    ordered = compiled.run_batch([("a",), ("b",)], backend=backend(), generator_style=True)
    assert [next(ordered).text()[:1], next(ordered).text()[:1]] == ["a", "b"] and list(ordered) == []


def test_a_batch_runs_as_many_at_a_time_as_asked():
    where = ScriptedBackend(lambda prompt, gen: "x")
    two_gens.compile().run_batch([{"x": "q"}] * 30, backend=where, num_threads=4)
    assert where.max_open <= 4 and where.num_open == 0

    async def main():
        return await two_gens.compile().arun_batch([{"x": "q"}] * 30, backend=where, num_threads=4)

    assert len(asyncio.run(main())) == 30
    assert where.max_open <= 4


def test_leaving_a_batch_early_cancels_the_rest():
    gate = Gate()
    where = after(gate)
    states = two_gens.compile().run_batch(
        [{"x": str(i)} for i in range(5)], backend=where, generator_style=True, num_threads=2
    )
    assert next(states).text() == "0x then x"
    states.close()
    assert run_here(until(lambda: where.num_open == 0))
    gate.open()


def test_a_batch_of_tasks_gives_a_state_while_others_run():
    gate = Gate()
    where = after(gate)
    items = [{"x": str(i)} for i in range(5)]

    async def main():
        async with asyncio.timeout(30):
            states = await two_gens.compile().arun_batch(items, backend=where, generator_style=True, num_threads=2)
            assert isinstance(states, AsyncIterator)
            texts = [await (await anext(states)).atext()]
            gate.open()
            return texts + [await state.atext() async for state in states]

    assert asyncio.run(main()) == [f"{i}x then x" for i in range(5)]
    assert where.num_open == 0 and where.max_open == 2


def test_leaving_a_batch_of_tasks_early_cancels_the_rest():
    gate = Gate()
    where = after(gate)
    items = [{"x": str(i)} for i in range(5)]

    async def main(leave):
        states = await two_gens.compile().arun_batch(items, backend=where, generator_style=True, num_threads=2)
        async with contextlib.aclosing(states):
            assert await (await anext(states)).atext() == "0x then x"
            if leave:
                return
            waiting = asyncio.ensure_future(anext(states))
            await asyncio.to_thread(gate.wait_reached)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    for leave in (True, False):
        asyncio.run(main(leave))
        assert run_here(until(lambda: where.num_open == 0))
    gate.open()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "needs the argument 'x'"),
        (("a", "b"), {}, "takes 1 arguments, but got 2"),
        (("a",), {"x": "b"}, "was given 'x' twice"),
        (("a",), {"y": "b"}, "takes x, but got 'y'; what was a constant"),
        (([],), {}, "is text or a number in a compiled program, but got list"),
        (("a",), {"where": "there"}, "where must be"),
    ],
)
def test_wrong_arguments_are_errors_at_the_call(args, kwargs, message):
    with pytest.raises(ProgramError, match=message):
        two_gens.compile().run(*args, backend=backend(), **kwargs)


def test_a_name_that_is_the_programs_is_not_for_the_gens():
    seen = []

    @sgl.function
    def program(s, seed, stop):
        s += f"{seed} {stop} " + sgl.gen("x", max_tokens=2)

    def note(prompt, gen):
        seen.append((gen.args.seed, gen.args.stop, gen.args.temperature))
        return "fine"

    compiled, where = program.compile(), ScriptedBackend(note)
    assert compiled.run(seed=3, stop="end", temperature=0.5, backend=where).text() == "3 end fine"
    (state,) = compiled.run_batch([{"seed": 4, "stop": "no"}], temperature=0.5, backend=where)
    assert state.text() == "4 no fine"
    (state,) = run_here(compiled.arun_batch([{"seed": 5, "stop": "no"}], temperature=0.5, backend=where))
    assert state["x"] == "fine"
    assert seen == [(None, None, 0.5)] * 3
    with pytest.raises(ProgramError, match="run_batch has no argument seed"):
        compiled.run_batch([{"stop": "no"}], seed=3, backend=where)


def test_numbers_are_written_as_text():
    assert two_gens.compile().run(1.5, backend=backend()).text().startswith("1.5<")


def test_run_arguments_reach_the_gens_that_say_nothing():
    seen = {}

    def look(prompt, gen):
        seen[gen.name] = gen.args
        return "x"

    @sgl.function
    def inner(s):
        s += sgl.gen("inner")

    @sgl.function
    def program(s):
        s += sgl.gen("own", temperature=0.25) + sgl.gen("given")
        inner()
        inner.run(max_new_tokens=3)

    program.compile().run(backend=ScriptedBackend(look), temperature=0, max_new_tokens=7).sync()
    assert (seen["own"].temperature, seen["own"].max_tokens) == (0.25, 7)
    assert (seen["given"].temperature, seen["given"].max_tokens) == (0, 7)


def test_a_called_program_takes_nothing_from_its_callers_run():
    seen = []

    def look(prompt, gen):
        seen.append((prompt, gen.args.temperature, gen.args.max_tokens))
        return "x"

    @sgl.function
    def inner(s, x):
        s += x + sgl.gen("inner")

    @sgl.function
    def program(s):
        inner("plain ")
        inner.run("given ", max_new_tokens=3)

    program.run(backend=ScriptedBackend(look), temperature=0, max_new_tokens=7).sync()
    assert run_here(until(lambda: len(seen) == 2))
    interpreted, seen[:] = sorted(seen), []
    program.compile().run(backend=ScriptedBackend(look), temperature=0, max_new_tokens=7).sync()
    assert sorted(seen) == interpreted == [("given ", 1.0, 3), ("plain ", 1.0, 128)]


def test_a_returned_state_can_be_read():
    @sgl.function
    def inner(s, x):
        with s.user():
            s += x
        s += sgl.gen("y")

    @sgl.function
    def program(s, x):
        return [inner(x), inner("constant")]

    first, second = program.compile().run("argument", backend=backend()).ret_value
    assert first.text().startswith("[user]argument[/user]<")
    assert second.messages() == [{"role": "user", "content": "constant"}]
    assert first["y"] in first.text() and first.usage()["calls"] == 1


def test_what_a_called_program_returned_is_kept_where_the_program_keeps_it():
    @sgl.function
    def inner(s, x):
        s += x + sgl.gen("y")
        return f"{s['y']}!"

    @sgl.function
    def program(s, x):
        called = inner(x)
        s["kept"] = {"state": called, "returned": called.ret_value}

    interpreted = program.run("a", backend=backend())["kept"]
    kept = program.compile().run("a", backend=backend())["kept"]
    assert kept["returned"] == interpreted["returned"] == interpreted["state"].ret_value
    assert kept["state"]["y"] == interpreted["state"]["y"]
    for read in (lambda: kept["state"].ret_value, lambda: run_here(kept["state"].aret_value())):
        with pytest.raises(ProgramError, match=r"no ret_value; keep or return the state's \.ret_value itself"):
            read()


def test_a_condition_matches_patterns():
    @sgl.function
    def program(s, x):
        sgl.cond(s, sgl.matches(x, "[a-z]+[0-9]*"), lambda s: s.extend("word"), lambda s: s.extend("other"))

    compiled = program.compile()
    assert [compiled.run(x, backend=backend()).text() for x in ("abc1", "abc!", "")] == ["word", "other", "other"]
    assert [program.run(x, backend=backend()).text() for x in ("abc1", "abc!", "")] == ["word", "other", "other"]


def test_a_variable_that_the_way_taken_does_not_set_is_an_error_at_the_read():
    @sgl.function
    def program(s, x):
        sgl.cond(s, sgl.equals(x, "a"), lambda s: s.set_var("v", "set"))

    compiled = program.compile()
    assert compiled.run("a", backend=backend())["v"] == "set"
    with pytest.raises(UnknownVariableError, match="nothing set 'v' the way the program went"):
        compiled.run("b", backend=backend())["v"]


def test_a_loop_ends_at_its_condition_or_its_bound():
    answers = iter(["no", "no", "done", "no"] + ["no"] * 10)

    @sgl.function
    def program(s):
        s["count"] = ""

        def body(s):
            s += sgl.gen("verdict", max_tokens=1) + ";"
            s["count"] = f"{s['count']}i"

        sgl.loop(s, body, until=lambda s: sgl.equals(s["verdict"], " done "), max_rounds=5)
        return s["count"]

    compiled = program.compile()
    where = ScriptedBackend(lambda prompt, gen: next(answers))
    first = compiled.run(backend=where)
    assert (first.text(), first["verdict"], first.ret_value) == ("no;no;done;", "done", "iii")
    second = compiled.run(backend=where)
    assert (second.text(), second.ret_value) == ("no;" * 5, "iiiii")


def test_only_text_can_be_iterated_here_as_in_a_program():
    @sgl.function
    def program(s):
        s["list"] = ["a", "b"]

    for state in (program.compile().run(backend=backend()), program.run(backend=backend())):
        with pytest.raises(ProgramError, match="only text can be iterated, but 'list' is a list"):
            list(state.text_iter("list"))


def test_a_loop_reads_what_it_does_not_set_in_every_round():
    @sgl.function
    def program(s, x):
        s["kept"] = f"<{x}>"
        s["count"] = ""

        def body(s):
            s += f"{s['kept']}{s['count']} "
            s["count"] = f"{s['count']}i"

        sgl.loop(s, body, max_rounds=3)
        s += f"{s['kept']}{s['count']}"

    assert program.run("x", backend=backend()).text() == "<x> <x>i <x>ii <x>iii"
    assert program.compile().run("x", backend=backend()).text() == "<x> <x>i <x>ii <x>iii"


@sgl.function
def helper(s, q):
    s += f"H {q}" + sgl.gen("h", max_tokens=2)
    s["quoted"] = f"<{s['h']}>"


def test_a_called_state_can_be_kept_within_cond_and_loop():
    @sgl.function
    def program(s, q):
        t = helper(q)

        def keep(s):
            s["kept"] = t

        sgl.cond(s, sgl.contains(q, "zzz"), keep, lambda s: sgl.loop(s, keep, max_rounds=2))
        s += "end"

    for q in ("x", "zzz"):
        state = program.compile().run(q=q, backend=backend())
        interpreted = program.run(q=q, backend=backend())
        run_here(asyncio.wait_for(state.settle(), 10))
        assert state["kept"].text() == interpreted["kept"].text()
        assert state["kept"]["quoted"] == interpreted["kept"]["quoted"]


def test_a_called_state_that_is_kept_can_be_read_here_and_sent():
    @sgl.function
    def outer(s, q):
        s["inner"] = helper(q)
        s += "outer"

    @sgl.function
    def program(s, q):
        s["kept"] = [helper(q), "text"]
        s["outer"] = outer(q)

    async def main(state):
        return [(await state.aget("kept"))[0].text(), await (await state.aget("outer")).aget("inner")]

    state = program.compile().run(q="x", backend=backend())
    interpreted = program.run(q="x", backend=backend())
    assert state["kept"][0]["h"] == interpreted["kept"][0]["h"] and state["kept"][1] == "text"
    assert state["outer"]["inner"].text() == interpreted["outer"]["inner"].text()
    text, inner = asyncio.run(main(state))
    assert text == inner.text() == interpreted["kept"][0].text()

    _, result = asyncio.run(post(program.trace(), backend(), {"q": "x"}, limits=ProgramLimits()))
    sent = {"text": text, "variables": {"h": inner["h"], "quoted": inner["quoted"]}}
    assert result["variables"] == {
        "kept": [sent, "text"],
        "outer": {"text": "outer", "variables": {"inner": sent}},
    }
    assert json.loads(json.dumps(result)) == result


def test_a_called_state_that_was_cancelled_fails_all_that_it_promised():
    gate = Gate()

    async def slow(prompt, gen):
        await gate.passed()

    @sgl.function
    def program(s, q):
        return helper(q)

    state = program.compile().run(q="x", backend=ScriptedBackend(slow))
    returned = state.ret_value
    gate.wait_reached()
    state.cancel()
    state.sync()
    for name in ("h", "quoted"):
        with pytest.raises(AbortedError):
            run_here(asyncio.wait_for(returned.aget(name), 10))
