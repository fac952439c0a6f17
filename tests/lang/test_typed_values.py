"""Variables that are no text: interpreted, compiled and posted programs leave the same values of the same types."""

import pytest
from hypothesis import HealthCheck, given, settings

import jsg as sgl
from jsg.errors import GraphError, ProgramError, TraceError, UnknownVariableError
from jsg.lang.executor.compiled import CompiledFunction
from tests.lang.graph_programs import GraphServer, backend
from tests.lang.typed_programs import ARGUMENTS, PLANS, QUESTIONS, shown, ways

NEVER, ALWAYS = sgl.equals("a", "b"), sgl.equals("a", "a")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS, QUESTIONS, ARGUMENTS)
def test_every_way_to_run_a_program_leaves_the_same_values_of_the_same_types(plan, q, n):
    try:
        (_, expected), *others = ways(plan, q=q, n=n)
    except TraceError:
        return  # a trace says what it cannot keep
    for way, found in others:
        assert found == expected, way


def agreed(program, *args, **kwargs):
    """What the program returns, which each way to run it has returned."""
    expected = program.run(*args, backend=backend(), **kwargs).ret_value
    for where in ("here", "server"):
        for stream in (False, True):
            state = program.compile().run(*args, backend=GraphServer(), where=where, stream=stream, **kwargs)
            assert shown(state.ret_value) == shown(expected), (where, stream)
    return expected


def test_items_of_a_list_keep_their_types_in_conds_and_loops():
    @sgl.function
    def program(s):
        s["x"], s["kept"] = [None, 1, True, 2.0, "t"], []

        def keep(s):
            s["kept"] = [*s["x"]]
            s["last"] = s["x"][1]
            s["text"] = f"{s['x'][0]}"

        sgl.cond(s, ALWAYS, keep)
        sgl.loop(s, lambda s: s.set_var("x", [*s["x"][:2], False, 0.5, None]), max_rounds=2)
        return s["x"], s["kept"], s["last"], s["text"]

    assert agreed(program) == ([None, 1, False, 0.5, None], [None, 1, True, 2.0, "t"], 1, "None")


def test_what_an_f_string_makes_text_is_text():
    @sgl.function
    def program(s, n):
        s["x"] = 1
        sgl.cond(s, ALWAYS, lambda s: s.set_var("x", None))
        s["y"] = f"{s['x']}"
        return s["x"], s["y"], [f"{s['x']}", s["x"]], n, f"{n}"

    assert agreed(program, 3) == (None, "None", ["None", None], 3, "3")


@pytest.mark.parametrize("value", [(1, 2), {"k": (None, [1])}, [[1], (2,)], [], ()])
def test_a_variable_that_a_cond_may_set_keeps_its_type(value):
    @sgl.function
    def program(s):
        for name, condition in (("set", ALWAYS), ("unset", NEVER)):
            sgl.cond(s, condition, lambda s, name=name: s.set_var(name, value))
        return 0

    interpreted = program.run(backend=backend())
    for where in ("here", "server"):
        state = program.compile().run(backend=GraphServer(), where=where)
        assert shown(state["set"]) == shown(interpreted["set"])
        with pytest.raises(UnknownVariableError):
            state["unset"]
        assert state.keys() == interpreted.keys() == ["set"]


def joining(before, sets):
    """A program with a branch for each condition of `sets`, under which the branch sets `x`."""

    @sgl.function
    def program(s):
        if before is not None:
            s["x"] = before
        forks = s.fork(len(sets))
        for index, condition in enumerate(sets):
            sgl.cond(forks[index], condition, lambda s, index=index: s.set_var("x", index))
        forks[0]["y"] = 1
        forks.join()
        return {"y": s["y"]}

    return program


@pytest.mark.parametrize("before", [None, "was"])
@pytest.mark.parametrize(
    ("sets", "joined"), [([NEVER, ALWAYS], [None, 1]), ([ALWAYS, ALWAYS], [0, 1]), ([NEVER, NEVER], None)]
)
def test_a_join_has_what_each_branch_has_set_the_way_it_went(before, sets, joined):
    program = joining(before, sets)
    states = [program.run(backend=backend())]
    states += [program.compile().run(backend=GraphServer(), where=where) for where in ("here", "server")]
    for state in states:
        assert state.ret_value == {"y": [1, *[None] * (len(sets) - 1)]}
        if joined is None and before is None:
            with pytest.raises(UnknownVariableError):
                state["x"]
        else:
            assert state["x"] == (before if joined is None else joined)


def test_a_join_that_surely_makes_a_list_can_be_read():
    @sgl.function
    def program(s):
        s["x"] = "was"
        forks = s.fork(3)
        sgl.cond(forks[0], NEVER, lambda s: s.set_var("x", "v"))
        forks[1]["x"] = "w"
        forks.join()
        s += f"{s['x'][0]} and {s['x'][1]}"
        return [*s["x"], s.text()]

    assert agreed(program) == [None, "w", None, "None and w"]


def test_joins_within_branches_and_rounds_are_joined_too():
    @sgl.function
    def program(s):
        def inner(s):
            forks = s.fork(2)
            sgl.cond(forks[0], ALWAYS, lambda s: s.set_var("x", 1))
            forks.join()

        outer = s.fork(2)
        sgl.loop(outer[0], inner, max_rounds=2)
        sgl.cond(outer[1], NEVER, inner)
        outer.join()
        s["kept"] = s["x"]
        return s["kept"]

    assert agreed(program) == [[1, None], None]


def test_a_loop_keeps_what_an_earlier_round_has_set():
    @sgl.function
    def program(s):
        s["i"] = ""

        def body(s):
            s["i"] = s["i"] + "i"
            sgl.cond(s, sgl.equals(s["i"], "ii"), lambda s: s.set_var("found", [None, 7]))
            sgl.cond(s, sgl.contains(s["i"], "ii"), lambda s: s.set_var("copy", s["found"][1]))

        sgl.loop(s, body, max_rounds=4)
        return s["found"], s["copy"]

    assert agreed(program) == ([None, 7], 7)


def test_a_list_on_some_ways_only_cannot_be_put_into_text():
    @sgl.function
    def program(s, use):
        forks = s.fork(2)
        sgl.cond(forks[0], ALWAYS, lambda s: s.set_var("x", [1]), lambda s: s.set_var("x", 1))
        forks[1]["x"] = "w"
        forks.join()
        s["kept"] = s["x"][0]
        use(s, s["x"][0])

    assert program.compile(use=lambda s, x: None).run(backend=backend())["kept"] == [1]
    uses = (lambda s, x: s.extend(f"{x}"), lambda s, x: s.extend(x), lambda s, x: "a" + x, lambda s, x: x == 1)
    for use in uses:
        with pytest.raises(TraceError):
            program.compile(use=use)


def test_a_change_in_place_within_a_body_is_refused_because_a_graph_would_lose_it():
    @sgl.function
    def program(s):
        s["xs"] = [1]
        sgl.cond(s, ALWAYS, lambda s: s["xs"].append(2))

    assert program.run(backend=backend())["xs"] == [1, 2]
    with pytest.raises(TraceError, match=r"changes 'xs' in place .*; set it to a new value"):
        program.compile()


def test_the_answers_of_a_gen_come_as_a_list_where_only_one_way_has_several():
    @sgl.function
    def program(s):
        s["x"] = "was"
        sgl.cond(s, ALWAYS, lambda s: s.extend(sgl.gen("x", n=2)))

    answers = program.run(backend=backend())["x"]
    assert len(answers) == 2
    for stream in (False, True):
        assert program.compile().run(backend=GraphServer(), stream=stream)["x"] == answers


def test_arguments_keep_their_types_and_json_has_no_endless_numbers():
    @sgl.function
    def program(s, n):
        s["n"] = n
        return [n]

    for value in (0, True, 2.0, 2**70, "3"):
        assert shown(agreed(program, value)) == shown([value])
    with pytest.raises(ProgramError, match="must be a finite number, but 'n' is inf; give it as text, or"):
        program.compile().run(float("inf"), backend=GraphServer())


def test_a_made_text_can_be_followed():
    @sgl.function
    def program(s, q):
        s["x"], s["y"] = f"{q}!", f"{q}"

    for state in (program.run("why", backend=backend()), program.compile().run("why", backend=backend())):
        assert ["".join(state.text_iter(name)) for name in "xy"] == ["why!", "why"]


def test_only_a_join_that_gathers_names_variables():
    graph = joining(None, [ALWAYS]).compile()
    source = graph.to_json().replace('"gather_variable"', '"concate_and_append"')
    with pytest.raises(GraphError, match="only gather_variable gathers variables"):
        CompiledFunction.from_json(source)
