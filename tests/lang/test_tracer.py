"""Tracing: what a body appends becomes a graph; what it cannot know is an error that names the line."""

import asyncio
import inspect
import threading

import pytest

import jsg as sgl
from jsg.errors import TraceError
from jsg.lang.graphs.nodes import (
    Append,
    Argument,
    ArgumentRef,
    Fork,
    Generate,
    Join,
    ListValue,
    Media,
    Open,
    StateValue,
    TextValue,
    ValueRef,
)
from jsg.lang.tracing import scope
from tests.lang.graph_programs import PNG, backend

FILE = "test_tracer.py"


def kinds(graph):
    return [type(node).__name__ for node in graph.nodes()]


def test_text_with_values_is_split_into_pieces():
    @sgl.function
    def program(s, question, number):
        s += "Q: " + question + f" ({number}, {question})\n"
        s += sgl.gen("answer", max_tokens=3)
        s += "%s and %s" % (s["answer"], "constant")  # noqa: UP031
        s += "{}.".format(s["answer"])

    graph = program.trace()
    question, number, answer = ArgumentRef("question"), ArgumentRef("number"), ValueRef(2, "answer")
    assert [node.pieces for node in graph.nodes() if isinstance(node, Append)] == [
        ("Q: ", question, " (", number, ", ", question, ")\n"),
        (answer, " and constant"),
        (answer, "."),
    ]
    assert graph.arguments == (Argument("question", "text"), Argument("number", "text"))
    assert dict(graph.block.outputs) == {"answer": TextValue((answer,))}


def test_every_node_names_its_line():
    @sgl.function
    def program(s):
        s += "one"
        s += sgl.gen("x")

    start = inspect.getsourcelines(program.func)[1]
    assert [node.line for node in program.trace().nodes()] == [f"{FILE}:{start + offset}" for offset in (0, 2, 3)]


def test_f20_a_body_runs_once_and_running_the_graph_does_not_run_it():
    effects = []

    @sgl.function
    def program(s, x):
        effects.append("effect")
        s += f"{x}" + sgl.gen("y")

    compiled = program.compile()
    assert effects == ["effect"]
    compiled.run_batch([{"x": "1"}, {"x": "2"}], backend=backend())
    assert effects == ["effect"]


def test_f20_a_batch_runs_the_body_with_its_own_arguments_only():
    seen = []

    @sgl.function
    def program(s, x):
        seen.append(x)
        s += "a prefix that is long enough to be worth a request of its own, or so they say " + x + sgl.gen("y")

    program.run_batch([{"x": "1"}, {"x": "2"}], backend=backend())
    assert sorted(seen) == ["1", "2"]


def test_f20_pictures_forks_and_joins_are_traced():
    @sgl.function
    def program(s, photo):
        s += "Look: " + sgl.image(photo) + sgl.image(PNG)
        forks = s.fork(2, position_ids_offset=[0, 10])
        forks += [sgl.gen("a"), "no " + sgl.gen("a") + sgl.gen("b")]
        forks.join()
        for a in s["a"]:
            s += f"- {a}\n"
        s["count"] = len(s["b"])
        parts = s.fork(2)
        parts += lambda i: f"part {i}"
        parts.join("concate_and_append")

    graph = program.trace()
    assert graph.arguments == (Argument("photo", "image"),)
    media = [node for node in graph.nodes() if isinstance(node, Media)]
    assert media[0].source == ArgumentRef("photo") and media[1].source.data == PNG
    forks = [node for node in graph.nodes() if isinstance(node, Fork)]
    assert [fork.branches for fork in forks] == [(1, 2), (3, 4)]
    assert forks[0].offsets == (0, 10)
    assert [node.mode for node in graph.nodes() if isinstance(node, Join)] == ["gather_variable", "concate_and_append"]
    outputs = dict(graph.block.outputs)
    first, second = (node.id for node in graph.nodes() if isinstance(node, Generate) and node.name == "a")
    assert outputs["a"] == ListValue((TextValue((ValueRef(first, "a"),)), TextValue((ValueRef(second, "a"),))))
    assert outputs["count"].value == 2


def test_f20_traces_in_two_threads_do_not_meet():
    barrier = threading.Barrier(2)
    graphs = {}

    @sgl.function
    def program(s, name):
        s += name
        barrier.wait(30)
        s += sgl.gen("x")
        barrier.wait(30)

    def work(number):
        graphs[number] = program.compile(name=f"constant {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(2):
        assert kinds(graphs[number].graph) == ["Open", "Append", "Generate"]
        assert f"constant {number}" in str(graphs[number])
    assert scope.active() is None


async def test_a_trace_in_one_task_is_not_seen_by_another():
    inside = asyncio.Event()

    async def tracing():
        @sgl.function
        def program(s):
            s += "x"
            inside.set()

        program.trace()

    async def other():
        await inside.wait()
        return scope.active()

    assert ((await asyncio.gather(other(), tracing()))[0]) is None


def test_async_bodies_are_traced():
    @sgl.function
    async def program(s, x):
        async with s.user():
            s += x
        s += sgl.gen("y")
        s += await s.aget("y")
        return await s.aget("y")

    graph = program.trace()
    assert kinds(graph) == ["Open", "Turn", "Append", "Turn", "Generate", "Append"]
    assert graph.returns == TextValue((ValueRef(4, "y"),))


def test_an_async_body_that_waits_for_something_else_cannot_be_traced():
    @sgl.function
    async def program(s):
        await asyncio.sleep(0)

    with pytest.raises(TraceError, match="program awaits something that is not part of the program"):
        program.trace()


def test_called_programs_are_streams_of_their_own():
    @sgl.function(num_api_spec_tokens=7)
    def inner(s, x):
        s += x + sgl.gen("y")
        return s["y"]

    @sgl.function
    def program(s, x):
        first = inner(x)
        second = inner.run(x="constant", temperature=0, max_new_tokens=9)
        s += f"{first['y']} {second.ret_value}"
        return first

    graph = program.trace()
    opens = [node for node in graph.nodes() if isinstance(node, Open)]
    assert [(node.stream, node.program, node.num_api_spec_tokens) for node in opens] == [
        (0, "program", None),
        (1, "inner", 7),
        (2, "inner", 7),
    ]
    assert opens[1].defaults is None
    assert (opens[2].defaults.temperature, opens[2].defaults.max_tokens) == (0, 9)
    assert graph.returns == StateValue(1, (("y", TextValue((ValueRef(3, "y"),))),))


def test_constants_and_defaults_are_seen_by_the_body():
    @sgl.function
    def program(s, topics, count=2, style="short"):
        for topic in topics[:count]:
            s += f"{topic} {style} " + sgl.gen(topic)

    graph = program.compile(topics=["a", "b", "c"]).graph
    assert graph.arguments == ()
    assert [node.name for node in graph.nodes() if isinstance(node, Generate)] == ["a", "b"]
    bound = program.bind(style="long").compile(topics=["a"])
    assert "'a long '" in str(bound)


def test_text_that_is_a_value_can_be_put_together_kept_and_given_on():
    @sgl.function
    def inner(s, text):
        s += text + "|" + sgl.gen("i", max_tokens=2)

    @sgl.function
    def program(s, q):
        s += str(q) + " " + sgl.gen("a", max_tokens=2)
        s["kept"] = f"{s['a']}!"
        s["more"] = f"{s['kept']}?" + str(q)
        s += s["kept"] + s["more"] + f"{s['more']}"
        s += "" + f"{q}" + "."
        s += inner(f"{q}").text()
        s += sgl.select("b", [f"{q}", "no"])
        return f"{s['kept']}"

    interpreted = program.run(q="why", backend=backend())
    compiled = program.compile().run(q="why", backend=backend())
    assert compiled.text() == interpreted.text()
    assert compiled.ret_value == interpreted.ret_value == interpreted["kept"] == compiled["kept"]
    assert compiled["more"] == interpreted["more"]


async def test_a_task_that_a_traced_body_began_is_not_part_of_the_trace():
    tasks = []

    @sgl.function
    def other(s):
        s += "o" + sgl.gen("z", max_tokens=1)

    @sgl.function
    async def program(s, q):
        async def later():
            return (scope.active(), await (await other.arun(backend=backend())).atext())

        tasks.append(asyncio.get_running_loop().create_task(later()))
        s += q

    program.trace()
    tracing, text = await tasks[0]
    assert tracing is None
    assert text.startswith("o<")
