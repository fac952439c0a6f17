"""What a trace refuses, each with the line of the program."""

import inspect

import pytest

import jsg as sgl
from jsg.errors import TraceError
from jsg.lang.graphs.nodes import Append, ArgumentRef
from tests.lang.graph_programs import backend

FILE = "test_tracer_errors.py"


@pytest.mark.parametrize(
    ("look", "what"),
    [
        (lambda x: bool(x), "tested"),
        (lambda x: "yes" if x else "no", "tested"),
        (lambda x: x == "yes", "compared"),
        (lambda x: {"yes": 1}.__contains__(x), "looked up"),
        (lambda x: ["yes"].count(x), "compared"),
        (lambda x: x in ("yes", "no"), "compared"),
        (lambda x: "a" in x, "searched"),
        (lambda x: len(x), "measured"),
        (lambda x: int(x), "made a number"),
        (lambda x: float(x), "made a number"),
        (lambda x: x[0], "indexed"),
        (lambda x: list(x), "gone through"),
        (lambda x: x.strip(), r"asked for \.strip"),
        (lambda x: {x: 1}, "looked up"),
        (lambda x: f"{x:>10}", "formatted as '>10'"),
        (lambda x: x * 2, "calculated with"),
    ],
)
def test_looking_at_a_value_is_an_error_that_names_the_line(look, what):
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        look(s["x"])

    line = inspect.getsourcelines(look)[1]
    with pytest.raises(TraceError, match=rf"the variable 'x' is {what} at {FILE}:{line}; .*jsg\.cond"):
        program.trace()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.strip(),
        lambda text: text.lower(),
        lambda text: text.upper(),
        lambda text: text.replace("e", "E"),
        lambda text: text.replace("\n", " "),
        lambda text: text.replace(",", ";"),
        lambda text: text[:40],
        lambda text: text[40:],
        lambda text: text[::-1],
        lambda text: " ".join(text.split()),
        lambda text: text.split(",")[0],
        lambda text: repr(text),
        lambda text: text.encode("unicode_escape").decode(),
        lambda text: text.title(),
    ],
)
def test_text_with_a_value_in_it_that_was_changed_is_an_error(change):
    @sgl.function
    def program(s, x):
        s += change("".join([f"{x}"]))  # text that Python made itself, which does not look after its value

    with pytest.raises(TraceError, match=rf"changed by a string method at {FILE}:\d+ or before"):
        program.trace()


def test_text_around_values_may_be_changed():
    @sgl.function
    def program(s, x):
        s += "\n".join(line.strip() for line in ("  one ", f"{x}!")[:1]) + f"  {x} end  ".rstrip()

    graph = program.trace()
    assert [node.pieces for node in graph.nodes() if isinstance(node, Append)] == [("one  ", ArgumentRef("x"), " end")]


def test_an_error_of_the_body_names_the_line_in_the_body():
    @sgl.function
    def program(s, x):
        s += sgl.gen("y")
        return ", ".join([s["y"]])

    line = inspect.getsourcelines(program.func)[1] + 3
    with pytest.raises(TraceError, match=rf"raised TypeError at {FILE}:{line}: .*Traced found"):
        program.trace()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda s, x: s["nope"], "the variable 'nope' is not set"),
        (lambda s, x: s.messages(), r"a state has no \.messages"),
        (lambda s, x: s.text_iter(), r"a state has no \.text_iter"),
        (lambda s, x: s.fork(0), "at least 1"),
        (lambda s, x: s.fork(x), "that is known"),
        (lambda s, x: s.extend(sgl.gen("y", regex=f"{x}+")), "must be constant"),
        (lambda s, x: s.extend(sgl.gen("y", stop=[f"{x}"])), "must be constant"),
        (lambda s, x: s.set_var("y", object()), "but got object"),
        (lambda s, x: s.set_var("y", {f"{x}": 1}), "text that holds a value of a run is looked up"),
        (lambda s, x: s.set_var("y", {f"a {x}": 1}), "keys are not constant"),
        (lambda s, x: s.user("a" + sgl.user_begin()), "turns do not nest"),
        (lambda s, x: s.extend(sgl.assistant_end()), "assistant ends, but no turn is open"),
        (lambda s, x: s.extend(sgl.image(x) + f"{x}"), "used as image and as text"),
        (lambda s, x: s.extend(sgl.gen("p")).extend(sgl.image(s["p"])), "known or an argument, not a variable"),
    ],
)
def test_what_a_graph_cannot_say_is_an_error_that_names_the_line(body, message):
    @sgl.function
    def program(s, x):
        body(s, x)

    line = inspect.getsourcelines(body)[1]
    with pytest.raises(TraceError, match=rf"{message}.*{FILE}:{line}"):
        program.trace()


def test_branches_of_a_trace_that_opened_turns_do_not_join_side_by_side():
    @sgl.function
    def program(s, q):
        forks = s.fork(2)
        forks[0] += "text"
        sgl.cond(forks[1], sgl.equals(q, "a"), lambda s: s.user("more"))
        forks.join("concate_and_append")

    line = inspect.getsourcelines(program.func)[1] + 5
    with pytest.raises(TraceError, match=rf"branch 1 opened or closed a turn.*{FILE}:{line}"):
        program.trace()


def test_a_branch_of_a_trace_is_not_replaced_by_another_state():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks[1] += "text"
        forks[0] = s

    with pytest.raises(TraceError, match="a branch cannot be replaced"):
        program.trace()


def test_a_joined_branch_takes_no_more():
    @sgl.function
    def program(s):
        forks = s.fork(1)
        forks.join()
        forks[0].extend("more")

    with pytest.raises(TraceError, match="a branch that was joined is extended"):
        program.trace()


def test_parameters_that_a_graph_cannot_take_are_errors():
    @sgl.function
    def many(s, *args):
        pass

    @sgl.function
    def one(s, x):
        pass

    with pytest.raises(TraceError, match=r"takes \*args, which a graph cannot"):
        many.trace()
    with pytest.raises(TraceError, match="one has no parameter 'y'"):
        one.compile(y=1)


def test_bodies_of_cond_and_loop_extend_only_the_state_they_are_given():
    @sgl.function
    def other(s, x):
        forks = s.fork(1)
        sgl.cond(s, sgl.equals(x, "a"), lambda s: forks[0].extend("b"))

    @sgl.function
    def unclosed(s, x):
        sgl.cond(s, sgl.equals(x, "a"), lambda s: s.extend(sgl.user_begin()))

    with pytest.raises(TraceError, match="extends another state than the one it is given"):
        other.trace()
    with pytest.raises(TraceError, match="must close the turns and scopes that it opens"):
        unclosed.trace()


def test_a_variable_without_one_shape_cannot_be_read_but_returned():
    @sgl.function
    def reads(s, x):
        s["v"] = "text"
        sgl.cond(s, sgl.equals(x, "a"), lambda s: s.set_var("v", ["one", "two"]))
        s += f"{s['v']}"

    @sgl.function
    def keeps(s, x):
        s["v"] = "text"
        sgl.cond(s, sgl.equals(x, "a"), lambda s: s.set_var("v", ["one", "two"]))

    with pytest.raises(TraceError, match="'v' is a list on one way"):
        reads.trace()
    compiled = keeps.compile()
    assert compiled.run("a", backend=backend())["v"] == ["one", "two"]
    assert compiled.run("b", backend=backend())["v"] == "text"


def test_a_loop_must_keep_the_shape_of_what_it_reads():
    @sgl.function
    def program(s):
        s["v"] = "text"

        def body(s):
            s += f"{s['v']}"
            s["v"] = ["one", "two"]

        sgl.loop(s, body, max_rounds=2)

    with pytest.raises(TraceError, match="reads 'v', whose shape its body changes"):
        program.trace()


@pytest.mark.parametrize(
    ("look", "what"),
    [
        (lambda s, q: str(s["a"]).strip() == "yes", r"asked for \.strip"),
        (lambda s, q: f"{q}" == "yes", "compared"),
        (lambda s, q: f"{q}" != "yes", "compared"),
        (lambda s, q: "yes" == f"{q}", "compared"),  # noqa: SIM300 - the other way round
        (lambda s, q: f"{q}" in ["yes", "no"], "compared"),
        (lambda s, q: "q: " + q == "q: yes", "compared"),
        (lambda s, q: q + "!" == "yes!", "compared"),
        (lambda s, q: q + q == "yesyes", "compared"),
        (lambda s, q: f"{q}" + "!" == "yes!", "compared"),
        (lambda s, q: "the " + f"{q}" == "the yes", "compared"),
        (lambda s, q: f"{q!s}" > "a", "compared"),
        (lambda s, q: "y" in str(q), "searched"),
        (lambda s, q: len(str(q)), "measured"),
        (lambda s, q: bool(str(q)), "tested"),
        (lambda s, q: list(str(q)), "gone through"),
        (lambda s, q: str(q)[0], "indexed"),
        (lambda s, q: int(str(q)), "made a number"),
        (lambda s, q: float(str(q)), "made a number"),
        (lambda s, q: str(q) * 2, "calculated with"),
        (lambda s, q: str(q) % (), "used as a format"),
        (lambda s, q: f"{q!s:>10}", "formatted as '>10'"),
        (lambda s, q: {"x": 1}.get(str(q)), "looked up"),
        (lambda s, q: str(s.text()).endswith("yes"), r"asked for \.endswith"),
        (lambda s, q: s["kept"] == "yes!", "compared"),
        (lambda s, q: s["kept"].startswith("yes"), r"asked for \.startswith"),
        (lambda s, q: s["joined"] == "yes!", "compared"),
    ],
)
def test_looking_into_text_that_is_a_value_is_an_error_that_names_the_line(look, what):
    @sgl.function
    def program(s, q):
        s += sgl.gen("a")
        s["kept"] = f"{s['a']}!"
        s["joined"] = s["a"] + "!"
        look(s, q)

    line = inspect.getsourcelines(look)[1]
    with pytest.raises(TraceError, match=rf"is {what} at {FILE}:{line}; .*jsg\.cond"):
        program.trace()


def test_whether_a_loop_has_set_a_variable_cannot_be_asked_in_its_body():
    @sgl.function
    def program(s):
        def body(s):
            s += sgl.gen("w")
            s["all"] = s["all"] + s["w"] if "all" in s else s["w"]

        sgl.loop(s, body, max_rounds=2)

    line = inspect.getsourcelines(program.func)[1] + 4
    with pytest.raises(TraceError, match=rf"whether 'all' is set is asked at {FILE}:{line} in the body of a loop"):
        program.trace()


def test_whether_an_outer_loop_has_set_a_variable_cannot_be_asked_in_a_branch_of_an_inner_one():
    @sgl.function
    def program(s):
        def inner(s):
            branch = s.fork()[0]
            branch += "again" if "x" in branch else "first"

        def outer(s):
            sgl.loop(s, inner, max_rounds=2)
            s["x"] = "1"

        sgl.loop(s, outer, max_rounds=2)

    with pytest.raises(TraceError, match="whether 'x' is set is asked at"):
        program.trace()


def test_whether_a_variable_is_set_can_be_asked_where_every_way_says_the_same():
    @sgl.function
    def program(s, q):
        s["x"] = "1"

        def body(s):
            s += "x" if "x" in s else "no x"
            s += "y" if "y" in s else "no y"
            s["x"], s["w"] = "2", "3"
            s += "w" if "w" in s else "no w"

        sgl.loop(s, body, until=lambda s: sgl.equals("w" if "w" in s else "no w", "no"), max_rounds=2)
        sgl.cond(s, sgl.equals(q, "a"), lambda s: s.set_var("z", "1"), lambda s: s.set_var("z", "2"))
        sgl.cond(s, sgl.equals(q, "a"), lambda s: s.set_var("x", "5"))
        s += " ".join(name for name in "xywz" if name in s)

    assert program.compile().run("a", backend=backend()).text() == program.run("a", backend=backend()).text()


def test_whether_one_way_has_set_a_variable_cannot_be_asked():
    def one_sided(s, q):
        sgl.cond(s, sgl.equals(q, "a"), lambda s: s.set_var("v", "1"))

    def within(s, q):
        sgl.cond(s, sgl.equals(q, "a"), lambda s: one_sided(s, q), lambda s: s.set_var("v", "1"))

    def in_branch(s, q):
        branches = s.fork(2)
        one_sided(branches[0], q)
        branches.join()

    def in_loop(s, q):
        sgl.loop(s, lambda s: one_sided(s, q), max_rounds=2)

    def before_fork(s, q):
        one_sided(s, q)
        s.fork()[0].extend("yes" if "v" in s.fork()[0] else "no")

    for way in (one_sided, within, in_branch, in_loop, before_fork):

        @sgl.function
        def program(s, q, way=way):
            way(s, q)
            s += "yes" if "v" in s else "no"

        with pytest.raises(TraceError, match=rf"whether 'v' is set depends on the way .* at {FILE}:\d+"):
            program.trace()

    @sgl.function
    def sets_it_afterwards(s, q):
        one_sided(s, q)
        s["v"] = "2"
        s += "yes" if "v" in s else "no"

    assert sets_it_afterwards.compile().run("b", backend=backend()).text() == "yes"


def test_a_state_cannot_be_kept_in_itself():
    @sgl.function
    def inner(s):
        s += "inner"

    @sgl.function
    def itself(s):
        s["v"] = [s]

    @sgl.function
    def by_another(s):
        t = inner()
        t["s"] = s
        s["t"] = t

    @sgl.function
    def by_a_branch(s):
        branches = s.fork(2)
        branches[0]["v"] = s
        branches.join()

    for program in (itself, by_another, by_a_branch):
        with pytest.raises(TraceError, match="a state cannot be kept in itself, as it is at"):
            program.trace()
