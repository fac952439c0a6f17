"""A state shows itself: `repr`, HTML, `keys`, `usage`, `timeline`."""

import threading

import pytest

import jsg as sgl
from jsg.errors import ProgramError, RequestError
from jsg.lang.program import gantt
from tests.lang.graph_programs import run_here
from tests.lang.scripted import Gate, ScriptedBackend
from tests.lang.test_remote_graph import GraphServer

WHERE = ("plain", "here", "server")


@sgl.function
def called(s):
    s += "c" + sgl.gen("inner")


@sgl.function
def program(s):
    s += "<b>p</b>" + sgl.gen("a")
    s += sgl.select("b", ["x", "y"])
    forks = s.fork(2)
    forks += sgl.gen("c")
    forks.join()
    s["d"] = called()["inner"]


def ran(where, backend=None, of=program):
    backend = backend or GraphServer(lambda prompt, gen: "A")
    state = of.run(backend=backend) if where == "plain" else of.compile().run(backend=backend, where=where)
    state._everything().wait_done(30)
    return state


@pytest.mark.parametrize("where", WHERE)
def test_usage_and_timeline_cover_branches_and_called_programs(where):
    state = ran(where)
    usage = state.usage()
    assert usage == ran("here").usage() == run_here(state.ausage())
    assert usage["calls"] == 5 and usage["completion_tokens"] == 5
    timeline = state.timeline()
    assert sorted((call["name"], call["kind"]) for call in timeline) == [
        *[("a", "gen"), ("b", "select"), ("c", "gen"), ("c", "gen"), ("inner", "gen")]
    ]
    assert timeline == run_here(state.atimeline())
    assert sum(call["prompt_tokens"] or 0 for call in timeline) == usage["prompt_tokens"]
    assert all(0 <= call["start_s"] <= call["end_s"] and call["error"] is None for call in timeline)


@pytest.mark.parametrize("where", WHERE)
def test_keys_are_the_names_of_the_variables_and_a_state_becomes_a_dict(where):
    state = ran(where)
    assert state.keys() == list(state) == ["a", "b", "c", "d"]
    assert dict(state) == {"a": "A", "b": "x", "c": ["A", "A"], "d": "A"}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("word", "names"), [("yes", ["a", "b"]), ("no", ["a", "c"])])
def test_a_variable_of_the_way_not_taken_is_none_of_the_state(where, word, names):
    @sgl.function
    def branching(s):
        s += "p" + sgl.gen("a")
        sgl.cond(s, sgl.equals(s["a"], "yes"), lambda s: s.set_var("b", "B"), lambda s: s.set_var("c", "C"))

    state = ran(where, GraphServer(lambda prompt, gen: word), branching)
    assert state.keys() == list(state) == names and list(dict(state)) == names
    assert [name in state for name in "abc"] == [name in names for name in "abc"]
    assert "UnknownVariableError" not in repr(state) + state._repr_html_()


@pytest.mark.parametrize("where", WHERE)
def test_a_state_is_printed_and_what_it_holds_is_escaped_in_html(where):
    state = ran(where)
    assert str(state) == repr(state)
    assert "State done, '<b>p</b>Ax' a='A' b='x' c=['A', 'A'] d='A'>" in repr(state)
    page = state._repr_html_()
    assert "&lt;b&gt;p&lt;/b&gt;Ax" in page and "<b>p" not in page
    assert "calls: 5" in page and "<td>a</td><td>&#x27;A&#x27;</td>" in page


@pytest.mark.parametrize("where", WHERE)
def test_a_failed_state_shows_its_error_and_the_call_that_failed(where):
    def fail(prompt, gen):
        raise RequestError("no <i>")

    @sgl.function
    def failing(s):
        s += sgl.gen("a")

    state = ran(where, GraphServer(fail), failing)
    assert "State failed: RequestError: no <i>, " in repr(state) and "a=<RequestError>" in repr(state)
    assert "no &lt;i&gt;" in state._repr_html_()
    assert [(call["name"], call["error"]) for call in state.timeline()] == [("a", "RequestError")]
    assert state.usage()["calls"] == 0 and isinstance(state.error(), RequestError)


@pytest.mark.parametrize("where", WHERE)
async def test_showing_waits_for_nothing_also_where_a_loop_runs(where):
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return "A"

    backend = GraphServer(answer)
    state = (
        program.run(backend=backend, stream=True)
        if where == "plain"
        else program.compile().run(backend=backend, where=where)
    )
    gate.wait_reached()
    shown = repr(state), state._repr_html_(), state.keys()
    with pytest.raises(ProgramError, match="event loop"):
        state.usage()
    gate.open()
    assert (await state.ausage())["calls"] == 5
    line, page, _ = shown
    assert "State running, " in line and "running" in page


def test_a_long_text_is_cut_in_one_line():
    @sgl.function
    def long(s):
        s += "x" * 10_000 + sgl.gen("a")
        for i in range(20):
            s[f"v{i}"] = ["y" * 1000] * 100

    state = long.run(backend=ScriptedBackend("A"))
    state.sync()
    assert len(repr(state)) < 1500 and "and 13 more" in repr(state)


def test_a_program_may_count_its_own_calls():
    @sgl.function
    def counting(s):
        s += sgl.gen("a")
        before = s.usage()["calls"]
        s += sgl.gen("b")
        return before, s.usage()["calls"], len(s.timeline())

    assert counting.run(backend=ScriptedBackend("A")).ret_value == (1, 2, 2)


def test_a_program_shows_its_name_and_its_parameters():
    def capital(s, country="France"): ...

    assert repr(sgl.function(capital)).endswith("<locals>.capital(s, country='France')>")


@pytest.mark.parametrize("where", ["here", "server"])
def test_the_variables_of_a_run_are_read_before_its_way_is_known(where):
    gate = Gate()

    async def late(prompt, gen):
        await gate.passed()
        return gen.name.upper()

    @sgl.function
    def branching(s):
        s += "p" + sgl.gen("a")
        sgl.cond(s, sgl.equals(s["a"], "A"), lambda s: s.set_var("b", "B"), lambda s: s.set_var("c", "C"))

    state = branching.compile().run(backend=GraphServer(late), where=where)
    opening = threading.Timer(0.02, gate.open)
    opening.start()
    assert dict(state) == {"a": "A", "b": "B"}
    opening.join()


@pytest.mark.parametrize("where", WHERE)
def test_a_trace_is_a_page_with_a_bar_for_each_call(where, tmp_path):
    """It runs no script, and what a program or a model wrote is text in it."""
    state = ran(where)
    file = sgl.trace_to_html(state, tmp_path / "trace.html")
    page = file.read_text(encoding="utf-8")
    assert page.count('<i class="run"') == len(state.timeline()) == 5
    assert f"cached tokens: {state.usage()['cached_tokens']}" in page
    assert "&lt;b&gt;p&lt;/b&gt;" in page and "<b>" not in page and "<script" not in page


def test_a_trace_divides_the_tokens_of_a_call_and_marks_what_failed(tmp_path):
    call = {"name": "<x>", "kind": "gen", "start_s": 1.0, "end_s": 2.0, "error": None}
    tokens = {"prompt_tokens": 8, "cached_tokens": 6, "completion_tokens": 2}
    nothing = dict.fromkeys(tokens)
    failed = {"name": None, "kind": "gen", "start_s": 2.0, "end_s": None, "error": "AbortedError"}
    page = "".join(gantt._chart([call | tokens, failed | nothing]))
    for bar in (
        '<i class="run" style="left:50.00%;width:50.00%">',
        '<i class="cached" style="left:0.00%;width:60.00%">',
        '<i class="computed" style="left:60.00%;width:20.00%">',
        '<i class="made" style="left:80.00%;width:20.00%">',
        '<i class="failed" style="left:100.00%;width:0.00%">',
    ):
        assert bar in page
    assert "<x>" not in page and "6 / 8" in page and "- / -" in page and "AbortedError" in page


def test_a_trace_of_a_run_without_calls_is_a_page_too(tmp_path):
    @sgl.function
    def silent(s):
        s += "nothing"

    page = sgl.trace_to_html(ran("plain", of=silent), str(tmp_path / "trace.html")).read_text(encoding="utf-8")
    assert "calls: 0" in page and '<i class="run"' not in page
