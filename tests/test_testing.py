"""The scripted backend for the tests of users: every form of a script, every way to run, and errors that teach."""

import asyncio
import json
import threading

import pytest

import jsg as sgl
from jsg import testing
from jsg.errors import BackendError, ScriptError
from jsg.lang.words.backend import Piece
from jsg.testing import ScriptedBackend


@sgl.function
def capital(s, country):
    s += f"The capital of {country} is" + sgl.gen("city", max_tokens=4, stop=".")


@sgl.function
def chat(s, first, second):
    s += sgl.user(first) + sgl.assistant(sgl.gen("a"))
    s += sgl.user(second) + sgl.assistant("So: " + sgl.gen("b"))


CITIES = {"France is": " Paris.", "Peru is": [" Li", "ma"]}


def test_one_answer_for_all_calls_or_one_after_the_other():
    assert capital.run("Peru", backend=ScriptedBackend(" Lima"))["city"] == " Lima"
    with ScriptedBackend(["one", "two"]) as backend:
        state = chat.run("x", "y", backend=backend)
        assert (state["a"], state["b"]) == ("one", "two")


def test_it_names_its_model_as_other_backends_do():
    backend = ScriptedBackend("x")
    assert backend.model_info == sgl.get_server_info(backend) == {"model_path": "scripted"}


def test_a_mapping_knows_the_end_of_the_prompt_with_and_without_the_markers_of_turns():
    script = {"": "any", "is x?": "an x", "What is x?": "the longest counts", "[assistant]So: ": "y"}
    with ScriptedBackend(script) as backend:
        state = chat.run("What is x?", "And y?", backend=backend)
        assert (state["a"], state["b"]) == ("the longest counts", "y")
        assert chat.run("?", "?", backend=backend)["a"] == "any"
        assert chat.run("That is x?", "?", backend=backend)["a"] == "an x"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_sees_prompt_and_gen(is_async):
    def answer(prompt, gen):
        return f"{gen.name} {gen.args.temperature} behind {len(prompt)}"

    async def answer_later(prompt, gen):
        await asyncio.sleep(0)
        return answer(prompt, gen)

    backend = ScriptedBackend(answer_later if is_async else answer)
    assert (
        chat.run("x", "y", backend=backend, temperature=0.5)["a"] == f"a 0.5 behind {len('[user]x[/user][assistant]')}"
    )


def test_every_way_to_run_gives_the_same():
    async def run():
        state = await capital.arun("France", backend=ScriptedBackend(CITIES))
        return state["city"], "".join([piece async for piece in state.text_async_iter("city")])

    backend = ScriptedBackend(CITIES)
    states = capital.run_batch([("France",), ("Peru",)], backend=backend)
    assert [state["city"] for state in states] == [" Paris", " Lima"]
    backend.check()
    assert capital.compile().run("France", backend=backend)["city"] == " Paris"
    assert asyncio.run(run()) == (" Paris", " Paris")
    state = capital.run("Peru", backend=backend, stream=True)
    assert list(state.text_iter("city")) == [" Li", "ma"]


def test_text_streams_token_by_token_and_ends_as_a_model_ends():
    @sgl.function
    def program(s):
        s += "p" + sgl.gen("long", max_tokens=2) + sgl.gen("stopped", stop="\n") + sgl.gen("found", stop_regex=r"\d+")

    with ScriptedBackend(["a  b c d", "one two\nthree", [" 1", "2", "3."]]) as backend:
        state = program.run(backend=backend)
        assert state.text() == "pa  bone two " and list(state.text_iter("long")) == ["a", "  b"]
        metas = [state.get_meta_info(name) for name in ("long", "stopped", "found")]
        assert metas[0] == {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": 2},
        }
        assert metas[1]["finish_reason"] == {"type": "stop", "matched": "\n"} and metas[1]["completion_tokens"] == 2
        assert metas[2]["finish_reason"] == {"type": "stop", "matched": r"\d+"} and metas[2]["prompt_tokens"] == 3
        assert state.usage() == {"calls": 3, "prompt_tokens": 6, "completion_tokens": 5, "cached_tokens": 0}


def test_several_continuations_take_several_answers():
    @sgl.function
    def program(s):
        s += "p" + sgl.gen("x", n=2)

    with ScriptedBackend(["a", "b"]) as backend:
        assert program.run(backend=backend)["x"] == ["a", "b"]


def test_choices_are_scripted_too():
    @sgl.function
    def program(s):
        s += "which?" + sgl.select("x", ["a", "b"])

    for choices in ("b", ["b"], {"which?": "b"}, lambda prompt, select: select.choices[-1]):
        with ScriptedBackend(choices=choices) as backend:
            state = program.run(backend=backend)
            assert state["x"] == "b" and state.get_meta_info("x")["probabilities"] == (0.0, 1.0)
    with pytest.raises(ScriptError, match=r"'c', which is none of the choices 'a', 'b'"):
        program.run(backend=ScriptedBackend(choices="c"))["x"]
    with pytest.raises(ScriptError, match=r"of choices the script has none for the select 'x'.*give choices="):
        program.run(backend=ScriptedBackend("c"))["x"]


def test_an_exception_is_raised_where_the_variable_is_read():
    backend = ScriptedBackend({"France is": BackendError("down"), "Peru is": " Lima"})
    france, peru = capital.run_batch([("France",), ("Peru",)], backend=backend)
    with pytest.raises(BackendError, match="down"):
        france["city"]
    assert peru["city"] == " Lima"


def test_a_call_without_an_answer_shows_the_end_of_its_prompt():
    prompt = "x" * 500 + "the end"
    for script, advice in (
        ([], "all 0 that it has were taken; add one"),
        ({"Peru is": "a"}, "its ends of prompts are 'Peru is'; add one"),
        (None, "give answers= to ScriptedBackend"),
    ):
        backend = ScriptedBackend(script)
        with pytest.raises(ScriptError, match=f"the gen 'city', whose prompt ends with '…x+the end is'; .*{advice}"):
            capital.run(prompt, backend=backend)["city"]
        with pytest.raises(ScriptError, match="the gen 'city'"):
            backend.check()  # also where the program caught it


def test_what_is_left_over_is_shown():
    for script in (["a", "b"], {"France is": "a", "Peru is": "b"}):
        with pytest.raises(ScriptError, match=r"still has: answers '(b|Peru is)'"), ScriptedBackend(script) as backend:
            assert capital.run("France", backend=backend)["city"] == "a"
    with pytest.raises(ValueError, match="mine"), ScriptedBackend(["a"]):
        raise ValueError("mine")  # an error of the test is shown before


def test_an_answer_has_the_form_that_its_gen_asks_for():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    @sgl.function
    def program(s):
        s += "p" + sgl.gen("x", json_schema=schema, max_tokens=3) + sgl.gen_int("y")

    state = program.run(backend=ScriptedBackend(['{"a": 1}', "12"]))
    assert json.loads(state["x"]) == {"a": 1} and int(state["y"]) == 12
    assert program.run(backend=ScriptedBackend([['{"a"', ":", "1", "}"], "12"]))["x"] == '{"a":1', "cut by max_tokens"
    with pytest.raises(ScriptError, match=r"which the json_schema of its gen does not allow behind '{\"a\": '"):
        program.run(backend=ScriptedBackend(['{"a": "one"}', "12"]))["x"]
    with pytest.raises(ScriptError, match="is only the beginning of a text that the json_schema"):
        program.run(backend=ScriptedBackend(['{"a": 1', "12"]))["x"]


def test_a_piece_adds_to_the_report():
    @sgl.function
    def program(s):
        s += "p" + sgl.gen("x", return_logprob=True)

    scores = [[-0.5, 7, None]]
    state = program.run(backend=ScriptedBackend(Piece("a", {"output_token_logprobs": scores})))
    meta = state.get_meta_info("x")
    assert meta["output_token_logprobs"] == scores and meta["completion_tokens"] == 1
    with pytest.raises(ScriptError, match="has no output_token_logprobs"):
        program.run(backend=ScriptedBackend("a"))["x"]


def test_calls_and_aborts_are_noted():
    backend = ScriptedBackend("A")
    chat.run("x", "y", backend=backend, temperature=0).sync()
    assert [(call.kind, call.what.name, call.what.args.temperature) for call in backend.calls] == [
        ("generate", "a", 0.0),
        ("generate", "b", 0.0),
    ]
    assert backend.calls[1].prompt.endswith("[user]y[/user][assistant]So: ")

    reached = threading.Event()

    async def never(prompt, gen):
        reached.set()
        await asyncio.Future()

    backend = ScriptedBackend(never)
    state = capital.run("France", backend=backend)
    reached.wait()
    state.cancel()
    state.error()
    assert [gen.name for gen in backend.aborted] == ["city"]


def test_branches_and_pictures():
    @sgl.function
    def program(s):
        s += sgl.image(b"\x89PNG\r\n\x1a\n") + "Look: "
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("x")
        forks.join()

    with ScriptedBackend({"Look: 0": "zero", "Look: 1": "one"}) as backend:
        assert program.run(backend=backend)["x"] == ["zero", "one"]
    assert backend.calls[0].prompt.startswith("<image 8>Look: ")


@pytest.mark.parametrize("script", [3, iter(["x"]), {"is": 3}.items(), TimeoutError])
@pytest.mark.parametrize("name", ["answers", "choices"])
def test_what_is_no_script_is_refused_at_once(name, script):
    with pytest.raises(ScriptError, match=rf"{name} must be a text, .* a list .*, but got a {type(script).__name__}"):
        ScriptedBackend(**{name: script})


@pytest.mark.parametrize("said", [None, 3, TimeoutError, ["a", 3]])
def test_what_is_no_answer_is_named_with_its_call(said):
    backend = ScriptedBackend(lambda prompt, gen: said)
    with pytest.raises(ScriptError, match=r"which is no answer: .*; it is said to the gen 'city'"):
        capital.run("Peru", backend=backend)["city"]
    with pytest.raises(ScriptError, match="which is no answer"):
        backend.check()


def test_what_a_script_does_is_linear_in_the_length_of_the_program(monkeypatch: pytest.MonkeyPatch):
    written, work = testing.written, []
    monkeypatch.setattr(testing, "written", lambda item: work.append(1) or written(item))

    @sgl.function
    def long(s, size):
        for number in range(size):
            s += f"question {number}?" + sgl.gen("a", max_tokens=4)

    done = []
    for size in (100, 400):
        work.clear()
        script = {f"question {number}?": "yes" for number in range(size)}
        with ScriptedBackend(script) as backend:
            long.run(size, backend=backend).sync()
        done.append(len(work))
        assert backend.calls[-1].prompt.endswith(f"yesquestion {size - 1}?")
        assert backend.calls[1].prompt == "question 0?yesquestion 1?"
    assert done[1] <= 5 * done[0]


def test_the_tokens_of_a_scripted_prompt_are_counted_as_its_text_is_read():
    @sgl.function
    def program(s, parts):
        for part in parts:
            s += part
        s += sgl.gen("a")

    for parts in (["a b", "c ", " d"], ["", " ", "x", "y z "], ["a", "  ", "  "], ["one"]):
        state = program.run(parts, backend=ScriptedBackend("x"))
        assert state.get_meta_info("a")["prompt_tokens"] == len(testing.tokens_of("".join(parts)))
