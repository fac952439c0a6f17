"""What a graph saves: streams run side by side, prefixes are released early, and unordered parts are sorted."""

import pytest

import jsg as sgl
from jsg.errors import ConfigError, ProgramError, TraceError
from jsg.lang.executor.compiled import constant_prefix
from jsg.lang.graphs.reorder import reorder, varying_arguments
from jsg.lang.words.ir import Text
from tests.lang.graph_programs import PNG, CountingBackend, backend, two_gens

LONG = "This is a long instruction, of the kind that stands before every question that a program asks. " * 3


def outcome(program, items=None, **arguments):
    """The calls of a run or a batch, and its results."""
    where = CountingBackend()
    compiled = program.compile()
    states = compiled.run_batch([arguments] if items is None else items, backend=where)
    texts = [state.text() for state in states]
    assert [state.error() for state in states] == [None] * len(states)
    return where, texts


@sgl.function
def judge(s, essay):
    s += "Judge this essay: " + essay + "\n"
    forks = s.fork(4)
    for i in range(4):
        forks[i] += LONG + f"Dimension {i}: " + sgl.gen("verdict")
    forks.join()
    s += " ".join(f"{verdict}" for verdict in s["verdict"]) + sgl.gen("summary")


@sgl.function
def tip(s, topic):
    s += LONG + f"Expand {topic}: " + sgl.gen("more")
    return s["more"]


def test_branches_run_side_by_side():
    where, texts = outcome(judge, essay="short")
    assert where.max_running == 4
    assert texts[0] == judge.run(essay="short", backend=backend()).text()


def test_a_node_runs_as_soon_as_its_sources_are_there():
    @sgl.function
    def program(s, x):
        s += x + sgl.gen("slow") + sgl.gen("slower")
        other = tip("independent")
        s += f"{other.ret_value}"

    where, _ = outcome(program, x="x")
    assert where.max_running == 2
    assert where.calls[:2] in (
        ["x", LONG + "Expand independent: "],
        [LONG + "Expand independent: ", "x"],
    ), "the called program does not wait for what stands before its call"


def test_prefixes_are_given_back_before_the_program_ends():
    log = outcome(judge, essay="short")[0].log
    last_call = max(i for i, (kind, _) in enumerate(log) if kind == "call")
    closed = [prompt for kind, prompt in log[:last_call] if kind == "close"]
    assert len(closed) == 4, "the branches' sessions are closed while the summary still has to be written"


@sgl.function
def template(s, question, style):
    s += sgl.unordered(f"Question: {question}\n", f"Style: {style}\n", LONG + "\n", sgl.image(PNG) + "a picture\n")
    s += "Answer: " + sgl.gen("answer")


@sgl.function
def ordered(s, question, style):
    s += f"Question: {question}\n" + f"Style: {style}\n" + LONG + "\n" + sgl.image(PNG) + "a picture\n"
    s += "Answer: " + sgl.gen("answer")


def test_only_parts_that_the_program_calls_unordered_are_moved():
    plain, _ = outcome(ordered, question="why?", style="short")
    moved, texts = outcome(template, question="why?", style="short")
    picture = f"<image {len(PNG)}>a picture\n"
    assert plain.calls == [f"Question: why?\nStyle: short\n{LONG}\n{picture}Answer: "]
    assert moved.calls == [f"{LONG}\n{picture}Question: why?\nStyle: short\nAnswer: "]
    assert texts[0].startswith(moved.calls[0])
    interpreted = template.run(question="why?", style="short", backend=backend())
    assert interpreted.text().startswith(plain.calls[0]), "an interpreter does not know what will be constant"


def test_in_a_batch_arguments_that_are_the_same_come_before_those_that_differ():
    items = [{"question": f"why {i}?", "style": "short and to the point"} for i in range(4)]
    moved, _ = outcome(template, items)
    assert all(
        f"a picture\nStyle: short and to the point\nQuestion: why {i}" in call for i, call in enumerate(moved.calls)
    )


def test_parts_that_read_variables_come_last():
    @sgl.function
    def program(s, x):
        s += sgl.gen("v")
        s += sgl.unordered(f"{s['v']};", f"{x};", "constant;", "another;")

    graph = program.trace()
    order = [
        str(node).partition("pieces=")[2][:12] for node in reorder(graph).nodes() if type(node).__name__ == "Append"
    ]
    assert [text[2:5] for text in order] == ["con", "ano", "rgu", "alu"]
    assert reorder(reorder(graph)) == reorder(graph)
    ids = [node.id for node in reorder(graph).nodes()]
    assert ids == sorted(ids)


def test_parts_of_more_than_one_node_stay_together():
    @sgl.function
    def program(s, x):
        s += sgl.unordered(f"{x}" + sgl.image(PNG) + " mine", sgl.image(PNG) + "constant")

    where = backend()
    picture = f"<image {len(PNG)}>"
    assert program.compile().run("X", backend=where).text() == f"{picture}constantX{picture} mine"


def test_varying_arguments_are_those_that_differ():
    graph = template.trace()
    runs = [{"question": "a", "style": "s"}, {"question": "b", "style": "s"}]
    assert varying_arguments(graph.arguments, runs) == {"question"}


def test_a_constant_prefix_ends_before_what_only_a_run_knows():
    @sgl.function
    def program(s, x):
        with s.user():
            s["kept"] = "constant"
            s += sgl.image(PNG) + "a " + x
        s += "b"

    @sgl.function
    def constant(s):
        with s.user():
            s += "a"
        s += "b" + sgl.gen("y") + "c"

    known = constant_prefix(program.trace().block.nodes)
    assert [type(item).__name__ for item in known] == ["RoleBegin", "Image", "Text"]
    assert known[-1] == Text("a ")
    known = constant_prefix(constant.trace().block.nodes)
    assert [type(item).__name__ for item in known] == ["RoleBegin", "Text", "RoleEnd", "Text"]


def test_cache_computes_the_constant_beginning_and_runs_nothing():
    where = CountingBackend()
    tip.cache(where)
    assert where.log == [(kind, LONG + "Expand ") for kind in ("hint", "close")]
    with pytest.raises(ConfigError, match="needs a backend that keeps prefixes"):
        tip.cache(backend())


def test_cache_takes_what_comes_before_the_first_value_that_the_body_reads():
    @sgl.function
    def reading(s, question):
        s += LONG + sgl.gen("tool", choices=["a", "b"])
        if s["tool"] == "a":
            s += question

    @sgl.function
    def branching(s, style):
        if style == "a":
            s += LONG

    where = CountingBackend()
    reading.cache(where)
    assert where.log == [(kind, LONG) for kind in ("hint", "close")]
    with pytest.raises(TraceError, match="'style' is compared"):
        branching.cache(where)


def test_an_argument_that_is_gone_is_refused_by_name():
    compiled = two_gens.compile()
    for run in (
        lambda: compiled.run("x", backend=backend(), optimisations=None),
        lambda: compiled.run_batch([{"x": "x"}], backend=backend(), optimisations=None),
    ):
        with pytest.raises(ProgramError, match=r"no optimisations any more.*prefetch gained nothing and are gone"):
            run()
