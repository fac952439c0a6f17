"""`cond`, `loop`, their conditions and `unordered` in programs that are interpreted."""

import pytest

import jsg as sgl
from jsg.errors import ProgramError, RequestError, TraceError
from tests.lang.graph_programs import PNG, backend
from tests.lang.scripted import ScriptedBackend


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (sgl.equals(" yes\n", "yes"), True),
        (sgl.equals("yes", "no"), False),
        (sgl.contains("a yes b", "yes"), True),
        (sgl.contains("a", "ab"), False),
        (sgl.matches("abc", "[a-c]+"), True),
        (sgl.matches("abcd", "[a-c]+"), False),
        (sgl.matches("ünï", "[^a]{3}"), True),
        (sgl.not_(sgl.equals("a", "b")), True),
        (sgl.all_of(sgl.equals("a", "a"), sgl.equals("b", "c")), False),
        (sgl.all_of(), True),
        (sgl.any_of(sgl.equals("a", "a"), sgl.equals("b", "c")), True),
        (sgl.any_of(), False),
    ],
)
def test_conditions(condition, holds):
    @sgl.function
    def program(s):
        sgl.cond(s, condition, lambda s: s.extend("then"), lambda s: s.extend("otherwise"))

    assert program.run(backend=backend()).text() == ("then" if holds else "otherwise")
    assert program.compile().run(backend=backend()).text() == ("then" if holds else "otherwise")


def test_a_loop_runs_until_its_condition():
    answers = iter(["no", "yes", "no"])

    @sgl.function
    def program(s):
        sgl.loop(s, lambda s: s.extend(sgl.gen("x")), until=lambda s: sgl.equals(s["x"], "yes"), max_rounds=9)

    assert program.run(backend=ScriptedBackend(lambda prompt, gen: next(answers))).text() == "noyes"


def test_a_loop_without_a_condition_runs_all_rounds():
    @sgl.function
    def program(s):
        sgl.loop(s, lambda s: s.extend("x"), max_rounds=3)

    assert program.run(backend=backend()).text() == "xxx"


def test_wrong_use_is_an_error():
    @sgl.function
    def program(s, use):
        use(s)

    for use, message in (
        (lambda s: sgl.cond(s, True, lambda s: None), "a condition is made by equals"),
        (lambda s: sgl.loop(s, lambda s: None, max_rounds=0), "max_rounds must be"),
        (lambda s: sgl.loop(s, lambda s: None, max_rounds=10_000), "max_rounds must be"),
        (lambda s: sgl.loop(s, lambda s: None, until=lambda s: True, max_rounds=2), "a condition is made by equals"),
        (lambda s: sgl.equals(1, "a"), "a condition compares text, but got int"),
        (lambda s: sgl.matches("a", 1), "must be constant text"),
        (lambda s: sgl.not_("a"), "a condition is made by equals"),
    ):
        with pytest.raises(ProgramError, match=message):
            program.run(use, backend=backend())
    with pytest.raises(RequestError, match="pattern '\\(a' of matches"):
        program.run(lambda s: sgl.cond(s, sgl.matches("a", "(a"), lambda s: None), backend=backend())


def test_a_pattern_takes_time_that_is_linear_in_the_text():
    @sgl.function
    def program(s, text):
        sgl.cond(s, sgl.matches(text, "(a*)*b"), lambda s: s.extend("then"), lambda s: s.extend("otherwise"))

    assert program.run("a" * 3000, backend=backend()).text() == "otherwise"
    with pytest.raises(RequestError, match="reads 100000 bytes at most"):
        program.run("a" * 200_000, backend=backend())


def test_unordered_parts_are_appended_as_they_stand():
    @sgl.function
    def program(s, x):
        s += "(" + sgl.unordered("a", x, sgl.image(PNG)) + ")"

    assert program.run("X", backend=backend()).text() == f"(aX<image {len(PNG)}>)"


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda s, more: sgl.loop(s, more, until=True, max_rounds=2),
            "until must be a function .*until=lambda.*got True",
        ),
        (lambda s, more: sgl.loop(s, more, until=lambda s: True, max_rounds=2), "a condition is made by .* got bool"),
        (lambda s, more: sgl.loop(s, "more", max_rounds=2), "body must be a function .* got 'more'"),
        (lambda s, more: sgl.loop(s, more, max_rounds="2"), "max_rounds must be .* got '2'"),
        (lambda s, more: sgl.cond(s, sgl.equals("a", "a"), then="text"), "then must be a function .*def .*got 'text'"),
        (lambda s, more: sgl.cond(s, sgl.equals("a", "a"), more, "text"), "otherwise must be a function .*got 'text'"),
        (lambda s, more: sgl.cond(s, True, more), "a condition is made by .* got bool"),
    ],
)
def test_what_is_no_function_or_no_condition_is_refused_with_the_way_out(wrong, message, traced):
    @sgl.function
    def program(s):
        wrong(s, lambda s: s.extend("more"))

    with pytest.raises(TraceError if traced else ProgramError, match=message):
        program.compile() if traced else program.run(backend=ScriptedBackend())


def test_an_async_body_of_cond_is_refused_because_nothing_would_await_it():
    async def more(s): ...

    @sgl.function
    def program(s):
        sgl.cond(s, sgl.equals("a", "a"), more)

    with pytest.raises(ProgramError, match="then must be a plain function, but more is async"):
        program.run(backend=ScriptedBackend())
