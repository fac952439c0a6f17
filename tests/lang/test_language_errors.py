"""Mistakes that people make: the error says the form that they wanted."""

import asyncio

import pytest

import jsg as sgl
from jsg.errors import ConfigError, ProgramError, RequestError
from jsg.lang.http.runtime import serve_arguments
from tests.lang.scripted import ScriptedBackend


@sgl.function
async def asking(s, q):
    s += q + sgl.gen("a")


@sgl.function
def plain(s, q):
    s += q + sgl.gen("a")


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: plain.run_batch({"q": "x"}), ProgramError, r"write run_batch\(\[\{\.\.\.\}\]\)"),
        (lambda: plain.compile().run_batch({"q": "x"}), ProgramError, r"write run_batch\(\[\{\.\.\.\}\]\)"),
        (lambda: plain.run_batch([], temprature=0), ProgramError, "did you mean temperature"),
        (lambda: sgl.gen("a", tools=[]), RequestError, "tools belong to chats: send them to POST /v1/chat/completions"),
        (lambda: sgl.gen("a", temprature=0), RequestError, "did you mean temperature"),
        (lambda: sgl.Engine(max_runing_requests=2), ConfigError, "did you mean max_running_requests"),
        (lambda: serve_arguments({"max_requests_per_keys": 2}), ConfigError, "did you mean max_requests_per_key"),
        (lambda: sgl.OpenAI("m", api_key="k", max_calls=0), ConfigError, "max_calls must be a number of at least 1"),
    ],
)
def test_a_mistake_is_named_with_the_form(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_a_turn_that_has_appended_itself_is_refused_with_both_forms():
    @sgl.function
    def program(s):
        s += s.user("text")

    with pytest.raises(TypeError, match=r"write s\.user\(\.\.\.\) alone, or s \+= sgl\.user\(\.\.\.\)"):
        program.run(backend=ScriptedBackend())


@pytest.mark.parametrize(
    "use",
    [
        lambda state: state["a"],
        lambda state: state.text(),
        lambda state: state.ret_value,
        lambda state: f"{state}",
    ],
)
async def test_a_state_that_was_not_awaited_says_so(use):
    for state in (asking("x", backend=ScriptedBackend()), plain.arun("x", backend=ScriptedBackend())):
        with pytest.raises(ProgramError, match="must be awaited: write await"):
            use(state)
        assert (await state)["a"] == "answer"


def test_a_variable_that_was_not_awaited_is_not_written_into_a_prompt():
    @sgl.function
    async def program(s):
        s += sgl.gen("a")
        answer = s.aget("a")
        with pytest.raises(ProgramError, match="must be awaited: write await"):
            s += f"It was {answer}"
        with pytest.raises((TypeError, ProgramError), match="await it"):
            s += answer
        s += await answer
        return await asyncio.gather(s.atext(), asyncio.create_task(s.aget("a")))

    assert program.run(backend=ScriptedBackend()).ret_value == ["answeranswer", "answer"]
