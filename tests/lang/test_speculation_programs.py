"""Whole programs on remote backends, by the interpreter: as users write them."""

import threading
from collections.abc import Iterator

import pytest

import jsg as sgl
from jsg.errors import BackendError, UnsupportedError
from jsg.lang.streams.loop import shared_loop
from tests.lang.wire_servers import Fault, Parrot, WireServer

PAGE = "Name: Ada Lovelace\nBorn: 1815\nField: mathematics\n"
TOKENS = ["Name", "Ada", " Love", "lace", "Born", " 18", "15", "Field", "mathe", "matics", ":"]
ARTICLE = "Augusta Ada King, Countess of Lovelace, was an English mathematician and writer. " * 12


@pytest.fixture
def wire() -> Iterator[WireServer]:
    with WireServer(Parrot(PAGE, TOKENS)).running() as server:
        yield server


@pytest.fixture
def closing() -> Iterator[list]:
    backends: list = []
    yield backends
    for backend in backends:
        shared_loop().submit(backend.close()).result(30)


def test_the_papers_extraction_needs_a_third_of_the_input_tokens(wire, closing):
    def extract(s, page):
        s += page + "\n"
        s += "Name:" + sgl.gen("name", stop="\n", max_tokens=16) + "\n"
        s += "Born:" + sgl.gen("born", stop="\n", max_tokens=16) + "\n"
        s += "Field:" + sgl.gen("field", stop="\n", max_tokens=16) + "\n"

    backend = sgl.OpenAI("toy", base_url=wire.openai_url, api="completions")
    closing.append(backend)
    spent = []
    for ahead in (None, 64):
        before = wire.prompt_tokens
        program = sgl.function(num_api_spec_tokens=ahead)(extract) if ahead else sgl.function(extract)
        state = program.run(page=ARTICLE, temperature=0, backend=backend)
        assert (state["name"], state["born"], state["field"]) == (" Ada Lovelace", " 1815", " mathematics")
        assert state.text() == f"{ARTICLE}\n{PAGE}"
        assert state.get_meta_info("field")["api_calls"] == (0 if ahead else 1)
        assert state.usage()["calls"] == (1 if ahead else 3) and len(state.timeline()) == 3
        spent.append(wire.prompt_tokens - before)
    assert spent[1] * 3 <= spent[0]
    assert backend.usage().saved_calls == 2


@pytest.mark.parametrize("kind", ["chat", "chat that goes on", "Anthropic"])
def test_a_turn_of_several_gens(wire, closing, kind):
    @sgl.function(num_api_spec_tokens=64)
    def extract(s):
        s += sgl.system("You extract.") + sgl.user("Who?")
        s += sgl.assistant("Name:" + sgl.gen("name", stop="\n") + "\nBorn:" + sgl.gen("born", stop="\n"))
        s += sgl.user("Thanks.")

    match kind:
        case "Anthropic":
            backend = sgl.Anthropic("toy", base_url=wire.url)
        case _:
            dialect = "jsg" if kind == "chat that goes on" else None
            backend = sgl.OpenAI("toy", base_url=wire.openai_url, dialect=dialect)
    closing.append(backend)
    state = extract.run(temperature=0, max_new_tokens=40, backend=backend)
    assert (state["name"], state["born"]) == (" Ada Lovelace", " 1815")
    assert state.messages()[2] == {"role": "assistant", "content": "Name: Ada Lovelace\nBorn: 1815"}
    assert len(wire.requests) == state.usage()["calls"] == 1


def test_f17_a_batch_of_sixteen_at_once(wire, closing):
    @sgl.function(num_api_spec_tokens=64)
    def count(s, number):
        s += sgl.user(f"#{number}#")
        s += sgl.assistant("A:" + sgl.gen("a", stop="\n") + "\nB:" + sgl.gen("b", stop="\n"))

    def answer(body):
        number = body["messages"][0]["content"].split("#")[1]
        return f"A: {number}-1\nB: {number}-2\n"

    wire.answer = answer
    backend = sgl.OpenAI("toy", base_url=wire.openai_url)
    closing.append(backend)
    states = count.run_batch([{"number": n} for n in range(32)], num_threads=16, temperature=0.7, backend=backend)
    assert [(state["a"], state["b"]) for state in states] == [(f" {n}-1", f" {n}-2") for n in range(32)]
    assert (backend.usage().calls, backend.usage().saved_calls) == (32, 32)


def test_a_failure_is_raised_at_the_read_with_its_line(wire, closing):
    @sgl.function
    def program(s):
        s += "Name:"
        s += sgl.gen("name", stop="\n")

    wire.faults = [Fault(401)]
    backend = sgl.OpenAI("toy", base_url=wire.openai_url, api="completions")
    closing.append(backend)
    state = program.run(backend=backend)
    with pytest.raises(BackendError, match="HTTP 401") as caught:
        state["name"]
    assert any("test_speculation_programs.py" in note for note in caught.value.__notes__)


def test_pieces_of_a_gen_are_read_as_they_come(wire, closing):
    @sgl.function
    def program(s):
        s += sgl.user("Who?") + sgl.assistant(sgl.gen("name", stop="\n"))

    backend = sgl.Anthropic("toy", base_url=wire.url)
    closing.append(backend)
    pieces = list(program.run(temperature=0, stream=True, backend=backend).text_iter("name"))
    assert "".join(pieces) == "Name: Ada Lovelace"


def test_a_choice_in_a_program(wire, closing):
    @sgl.function
    def program(s):
        s += sgl.user("Well?")
        s += sgl.assistant(sgl.select("answer", ["yes", "no"]))
        s += sgl.user("Why?") + sgl.assistant(sgl.gen("why", stop="\n"))

    for backend in (
        sgl.OpenAI("toy", base_url=wire.openai_url, dialect="openai"),
        sgl.Anthropic("toy", base_url=wire.url),
    ):
        closing.append(backend)
        state = program.run(temperature=0, backend=backend)
        assert state["answer"] in ("yes", "no") and state["why"] == "Name: Ada Lovelace"


def test_branches_and_their_join(wire, closing):
    @sgl.function
    def program(s):
        s += "x"
        branches = s.fork(3)
        branches += lambda i: f"({i})" + sgl.gen("line", max_tokens=1)
        branches.join()

    backend = sgl.OpenAI("toy", base_url=wire.openai_url, api="completions")
    closing.append(backend)
    state = program.run(temperature=0, backend=backend)
    assert state["line"] == ["Name"] * 3


def test_what_a_backend_cannot_do_is_raised_where_it_is_read(wire, closing):
    @sgl.function
    def program(s):
        s += sgl.user("Who?")
        s += sgl.assistant("Name:" + sgl.gen("name"))

    backend = sgl.OpenAI("toy", base_url=wire.openai_url)
    closing.append(backend)
    state = program.run(backend=backend)
    with pytest.raises(UnsupportedError, match="num_api_spec_tokens"):
        state["name"]


def test_threads_do_not_grow_with_programs(wire, closing):
    @sgl.function
    def program(s):
        s += "Name:" + sgl.gen("name", stop="\n")

    backend = sgl.OpenAI("toy", base_url=wire.openai_url, api="completions")
    closing.append(backend)
    program.run(backend=backend)["name"]
    before = threading.active_count()
    states = program.run_batch([{}] * 40, num_threads=16, temperature=0, backend=backend)
    assert {state["name"] for state in states} == {" Ada Lovelace"}
    assert threading.active_count() <= before + 17
