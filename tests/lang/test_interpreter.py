"""Programs as the interpreter runs them, on a scripted backend."""

import pytest

import jsg as sgl
from jsg.errors import JsgError, ProgramError, UnknownVariableError
from jsg.lang.words.ir import Gen
from tests.lang.scripted import Gate, ScriptedBackend, numbered

PNG = b"\x89PNG\r\n\x1a\n" + b"."
JPEG = b"\xff\xd8\xff" + b"." * 5
MP4 = b"\0\0\0\x18ftypmp42"


def test_a_program_extends_its_prompt_and_reads_what_the_model_wrote():
    @sgl.function
    def ask(s, question):
        s += "Q: " + question + "\nA:"
        s += sgl.gen("answer", max_tokens=8, stop="\n")
        return s["answer"].upper()

    backend = ScriptedBackend(lambda prompt, gen: [" fo", "ur"])
    state = ask.run("2+2?", backend=backend)

    assert state.ret_value == " FOUR" and state["answer"] == state.get_var("answer") == " four"
    assert state.text() == "Q: 2+2?\nA: four"
    assert backend.prompts() == ["Q: 2+2?\nA:"]
    (call,) = backend.calls
    assert call.what.args.max_tokens == 8 and call.what.args.stop == ("\n",) and call.what.args.temperature == 1.0
    assert state.get_meta_info("answer")["completion_tokens"] == 2
    backend.wait_closed()
    assert state.error() is None


def test_a_gen_returns_at_once_and_reading_waits():
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return "late"

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        assert "x" in s and "y" not in s
        gate.wait_reached()  # the body goes on while the model has not answered
        gate.open()
        s["y"] = s["x"] + "!"

    assert program.run(backend=ScriptedBackend(answer))["y"] == "late!"


def test_turns_nest_the_same_in_every_spelling():
    @sgl.function
    def spelled(s, way):
        if way == 0:
            s += sgl.user("hi") + sgl.assistant(sgl.gen("x"))
        elif way == 1:
            s.user("hi")
            s.assistant(sgl.gen("x"))
        elif way == 2:
            with s.user():
                s += "hi"
            with s.assistant():
                s += sgl.gen("x")
        else:
            s += sgl.user_begin() + "hi" + sgl.user_end()
            s += sgl.assistant_begin()
            s.extend(sgl.gen("x")).extend(sgl.assistant_end())

    for way in range(4):
        state = spelled.run(way, backend=ScriptedBackend("yo"))
        assert state.text() == "[user]hi[/user][assistant]yo[/assistant]"
        assert state.messages() == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def test_turns_cannot_be_nested():
    @sgl.function
    def nested(s):
        with s.user():
            with pytest.raises(ProgramError, match="assistant begins inside of user"):
                s += sgl.assistant(sgl.gen("x"))
            with pytest.raises(ProgramError, match="system ends, but user is open"):
                s += sgl.system_end()
            s += "still open"
        with pytest.raises(ProgramError, match="user ends, but no turn is open"):
            s += sgl.user_end()

    state = nested.run(backend=ScriptedBackend())
    assert state.text() == "[user]still open[/user]" and "x" not in state


def test_an_expression_that_breaks_a_rule_appends_nothing():
    @sgl.function
    def program(s):
        with pytest.raises(ProgramError):
            s += sgl.gen("x") + sgl.user_end()
        with pytest.raises(TypeError, match="NoneType"):
            s += None

    backend = ScriptedBackend()
    state = program.run(backend=backend)
    assert "x" not in state and state.text() == "" and backend.calls == []


def test_var_scope_captures_the_text_between():
    @sgl.function
    def program(s):
        s += "a"
        with s.var_scope("all"):
            s += "b"
            with s.var_scope("inner"):
                s += sgl.gen("x")
            s += sgl.user("c")
        s += "d"
        with pytest.raises(ProgramError, match="is open already"), s.var_scope("twice"), s.var_scope("twice"):
            pass

    state = program.run(backend=ScriptedBackend("X"))
    assert state["all"] == "bX[user]c[/user]" and state["inner"] == "X"
    assert list(state.text_iter("all")) == ["bX[user]c[/user]"]


def test_a_program_inside_another_is_a_stream_of_its_own_on_the_same_backend():
    gate = Gate()

    async def answer(prompt, gen):
        if gen.name == "tip":
            await gate.passed()
        return f"<{prompt}>"

    @sgl.function
    def expand(s, tip):
        s += "expand " + tip
        s += sgl.gen("tip")

    @sgl.function
    def outline(s):
        states = [expand(tip) for tip in ("a", "b")]  # both run at once: none is read yet
        gate.wait_reached()
        gate.open()
        for state in states:
            s += state["tip"]

    backend = ScriptedBackend(answer)
    assert outline.run(backend=backend).text() == "<expand a><expand b>"


def test_variables_of_the_program_are_not_text():
    @sgl.function
    def program(s):
        s["n"] = 3
        s.set_var("m", [1])
        s += "text"
        assert s["n"] == 3

    state = program.run(backend=ScriptedBackend())
    assert state.text() == "text" and state["m"] == [1] and "n" in state
    with pytest.raises(UnknownVariableError, match="not set by a call of the model"):
        state.get_meta_info("n")
    with pytest.raises(ProgramError, match="only text can be iterated"):
        list(state.text_iter("m"))
    state["later"] = "after the end"  # no text, so nothing that has ended
    assert list(state.text_iter("later")) == [state["later"]]


def test_several_continuations_are_a_list_and_the_program_goes_on_in_the_first():
    @sgl.function
    def program(s):
        s += "p" + sgl.gen("x", n=3) + "q"

    state = program.run(backend=numbered())
    assert state["x"] == ["1", "2", "3"] and state.text() == "p1q"


def test_select_becomes_the_variable_and_tells_probabilities():
    @sgl.function
    def program(s):
        s += "which? " + sgl.select("x", ["a", "b"]) + "!" + sgl.gen("y", choices=["c", "d"], temperature=0.5)

    backend = ScriptedBackend(choose=lambda prompt, select: select.choices[-1])
    state = program.run(backend=backend)
    assert state["x"] == "b" and state["y"] == "d" and state.text() == "which? b!d"
    assert state.get_meta_info("x")["probabilities"] == (0.0, 1.0)
    assert [call.what.temperature for call in backend.calls] == [0.0, 0.5]


def test_defaults_of_the_run_give_way_to_those_of_a_gen():
    @sgl.function
    def program(s):
        s += sgl.gen("x") + sgl.gen("y", max_tokens=2, stop=["b"], temperature=0.0)

    backend = ScriptedBackend()
    program.run(backend=backend, max_new_tokens=7, stop=["a"], temperature=0.5, top_p=1.0, top_k=-1, seed=1).sync()
    first, second = (call.what.args for call in backend.calls)
    assert (first.max_tokens, first.stop, first.temperature, first.seed) == (7, ("a",), 0.5, 1)
    assert (second.max_tokens, second.stop, second.temperature, second.seed) == (2, ("b",), 0.0, 1)
    assert first.top_p is None and first.top_k is None  # neutral: nothing is asked of a backend that cannot do it


# Faults of names


def test_f9_unnamed_gens_do_not_collide():
    @sgl.function
    def program(s):
        s += sgl.gen() + "," + sgl.gen() + "," + sgl.select(choices=["a"])

    state = program.run(backend=numbered())
    assert state.text() == "1,2,a" and None not in state
    with pytest.raises(UnknownVariableError):
        state[None]


def test_f22_a_variable_submitted_twice_is_never_read_stale():
    gates = {"1": Gate(), "2": Gate()}

    async def answer(prompt, gen):
        which = str(1 + prompt.count("answer"))
        await gates[which].passed()
        return "answer" + which

    @sgl.function
    def program(s):
        s += sgl.gen("x") + sgl.gen("x")
        gates["1"].open()
        gates["2"].wait_reached()  # the first one is done, the second is not
        assert not s._stream.variable("x").is_done
        gates["2"].open()
        assert s["x"] == "answer2"

    program.run(backend=ScriptedBackend(answer)).sync()


def test_in_is_true_once_the_program_has_submitted_a_name():
    @sgl.function
    def program(s):
        assert "x" not in s
        s += sgl.gen("x")
        assert "x" in s and 3 not in s

    program.run(backend=ScriptedBackend()).sync()


# Pictures


def test_f8_several_pictures_keep_their_order_and_their_type(tmp_path):
    path = tmp_path / "a.dat"
    path.write_bytes(JPEG)

    @sgl.function
    def program(s):
        s += sgl.user("one " + sgl.image(PNG) + " two " + sgl.image(str(path)) + sgl.video(MP4, 8) + " three")
        s += sgl.assistant(sgl.gen("x"))

    backend = ScriptedBackend("A")
    state = program.run(backend=backend)
    assert state.text() == "[user]one <image 9> two <image 8><video 12/8> three[/user][assistant]A[/assistant]"
    message, reply = state.messages()
    assert [part["type"] for part in message["content"]] == "text image_url text image_url video_url text".split()
    urls = [next(iter(part.values())) for part in message["content"]]
    assert urls[0] == "text" and message["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert message["content"][3]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert message["content"][4]["video_url"]["url"].startswith("data:video/mp4;base64,")
    assert reply == {"role": "assistant", "content": "A"}
    assert [type(item).__name__ for item in backend.calls[0].items][1:7] == "Text Image Text Image Video Text".split()


# Reasoning


def test_reasoning_is_told_from_the_answer_also_while_it_streams():
    @sgl.function
    def program(s):
        s += sgl.assistant("say: " + sgl.separate_reasoning(sgl.gen("x"), model_type="qwen3"))

    state = program.run(backend=ScriptedBackend(lambda p, g: ["<th", "ink>\nI", " see", "</thi", "nk>", "\n\n4", "2"]))
    assert state["x"] == "42" and state["x_reasoning_content"] == "I see"
    assert list(state.text_iter("x")) == ["4", "2"] and list(state.text_iter("x_reasoning_content")) == ["I", " see"]
    assert state.text() == "[assistant]say: <think>\nI see</think>\n\n42[/assistant]"  # what the model goes on behind
    assert state.messages() == [{"role": "assistant", "content": "say: 42", "reasoning_content": "I see"}]


# Backends that want whole turns


def test_a_turn_of_the_assistant_goes_to_the_backend_whole():
    @sgl.function
    def program(s):
        s += sgl.user("go")
        with s.assistant():
            s += "Name: " + sgl.gen("name", stop="\n") + "\nAge: "
            with s.var_scope("scope"):
                s += sgl.gen("age") + "."
        assert s["age"] == "2"

    backend = ScriptedBackend(lambda prompt, gen: str(prompt.count(":")), wants_blocks=True)
    state = program.run(backend=backend)
    assert state["name"] == "1" and state["scope"] == "2."
    assert state.text() == "[user]go[/user][assistant]Name: 1\nAge: 2.[/assistant]"
    assert [call.kind for call in backend.calls] == ["block"]
    assert state.messages()[1]["content"] == "Name: 1\nAge: 2."


def test_a_block_ends_where_somebody_waits():
    @sgl.function
    def program(s):
        s += sgl.assistant_begin() + "a" + sgl.gen("x")
        assert s["x"] == "A"
        s += "b" + sgl.gen("y")
        assert s.text().endswith("bA")
        s += sgl.assistant_end()
        s += sgl.gen("z")  # outside of a turn

    backend = ScriptedBackend("A", wants_blocks=True)
    program.run(backend=backend).sync()
    assert [call.kind for call in backend.calls] == ["block", "block", "generate"]
    assert [item for call in backend.calls[:2] for item in call.what if isinstance(item, Gen)][1].name == "y"


def test_a_failing_block_fails_its_variables_and_names_the_line():
    def fail(prompt, gen):
        raise JsgError("no")

    @sgl.function
    def program(s):
        s += sgl.assistant("a" + sgl.gen("x"))

    state = program.run(backend=ScriptedBackend(fail, wants_blocks=True))
    with pytest.raises(JsgError, match="no") as caught:
        state["x"]
    assert "test_interpreter.py:" in caught.value.__notes__[0]


def test_speculation_is_asked_of_the_session():
    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += sgl.gen("x")

    backend = ScriptedBackend()
    program.run(backend=backend).sync()
    assert backend.opened_with == [64]
