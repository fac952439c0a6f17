"""Each example: what it finds is right, and what it prints is what it found.

The fast tests run on a scripted model, and the slow ones repeat them on the embedded model.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

import jsg
from jsg.lang.program.defaults import as_backend
from tests.examples.conftest import EXAMPLES
from tests.lang.scripted import ScriptedBackend

Example = Callable[[str], ModuleType]
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ("common", "dspy_rag"))
embedded = pytest.mark.parametrize("model", [pytest.param("embedded", marks=pytest.mark.slow)], indirect=True)
"""For what only a model with a cache can show."""
PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_prints_what_it_found(example: Example, name: str, capsys: pytest.CaptureFixture[str]):
    example(name).main()
    shown = capsys.readouterr().out
    assert WORDS_SHOWN[name] <= set(shown.replace(",", " ").split())


WORDS_SHOWN = {
    "essay_judge": {"A", '"red"}', "F", "None"},
    "few_shot": {"down", "narrow"},
    "json_extraction": {"'Nina'", "54"},
    "llm_judge": {"geography:", "points:", "Anna", "Ben"},
    "multi_turn_chat": {"system:", "assistant:", "Oslo.", "Nina."},
    "parallel_document_qa": {"Oslo.", "Cairo.", "Lima.", "Rome."},
    "rag": {"Cairo.", "Lima.", "Athens."},
    "react_agent": {"8052.", "Lima."},
    "self_consistency": {"15", "17"},
    "skeleton_of_thought": {"Paris.", "Tokyo.", "Nairobi."},
    "tree_of_thought": {"20", "=", "+"},
}


def test_few_shot_finds_opposites(example: Example):
    found = example("few_shot").opposites(["up", "fast", "happy", "early", "strong", "wide"])
    assert found == {
        "up": "down", "fast": "slow", "happy": "sad", "early": "late", "strong": "weak", "wide": "narrow",
    }  # fmt: skip


@embedded
def test_few_shot_computes_the_list_once(example: Example):
    module = example("few_shot")
    jsg.flush_cache()
    states = module.opposite.run_batch([{"word": word} for word in module.WORDS])
    metas = [state.get_meta_info("answer") for state in states]
    shared = min(meta["prompt_tokens"] for meta in metas) - 8  # a word and an arrow are fewer tokens than that
    assert sum(meta["cached_tokens"] >= shared for meta in metas) >= len(metas) - 1


def test_chat_remembers(example: Example):
    state = example("multi_turn_chat").chat.run(["My name is Nina.", "I live in Oslo.", "Where do I live?"])
    assert state["answer_0"] == "Hello, Nina! How can I help you?"
    assert state["answer_2"] == "You live in Oslo."
    assert [message["role"] for message in state.messages()] == ["system", *["user", "assistant"] * 3]


@embedded
def test_chat_finds_earlier_turns_in_the_cache(example: Example):
    jsg.flush_cache()
    state = example("multi_turn_chat").chat.run(["My name is Nina.", "I live in Oslo.", "Where do I live?"])
    metas = [state.get_meta_info(f"answer_{turn}") for turn in range(3)]
    for before, after in itertools.pairwise(metas):
        # All tokens of the turn before but the last, which was sampled but never computed.
        assert after["cached_tokens"] >= before["prompt_tokens"] + before["completion_tokens"] - 1


def test_json_extraction_gives_the_records(example: Example):
    module = example("json_extraction")
    assert module.records(module.TEXTS) == [
        {"name": "Nina", "age": 36, "city": "Oslo"},
        {"name": "Oscar", "age": 54, "city": "Cairo"},
        {"name": "Emma", "age": 27, "city": "Lima"},
    ]


def test_f23_programs_with_one_grammar_do_not_disturb_each_other(example: Example):
    module = example("json_extraction")
    names = ["Nina", "Oscar", "Emma", "Felix", "Clara", "Hugo"]
    texts = [f"My name is {name}. I live in Oslo. I am {30 + age} years old." for age, name in enumerate(names)]
    found = module.records(texts)  # all at once, each somewhere else in the same grammar
    assert [record["name"] for record in found] == names
    assert found == [module.records([text])[0] for text in texts]


def test_self_consistency_believes_the_majority(example: Example):
    answer, votes = example("self_consistency").vote.run("What is 7 + 8?", num_samples=9).ret_value
    assert answer == "15"
    assert sum(votes.values()) == 9 and votes["15"] == max(votes.values())


def test_tree_of_thought_reaches_the_target(example: Example):
    module = example("tree_of_thought")
    path = module.search.run().ret_value
    assert sum(path) == module.TARGET and set(path) <= set(module.NUMBERS)


def test_skeleton_is_written_out_point_by_point(example: Example):
    guide = example("skeleton_of_thought").travel_guide.run("Peru Egypt").ret_value
    assert guide == "Peru. The capital of Peru is Lima.\nEgypt. The capital of Egypt is Cairo."


def test_judge_believes_the_right_answer(example: Example):
    module = example("llm_judge")
    report = module.judge.run(module.ANSWERS).ret_value
    right = {"geography": "Anna", "arithmetic": "Anna", "counting": "Ben", "manners": "Anna"}
    assert {topic: max(beliefs, key=beliefs.__getitem__) for topic, beliefs in report.items()} == right
    for beliefs in report.values():
        assert sum(beliefs.values()) == pytest.approx(1)


def test_essay_judge_grades_by_what_the_picture_shows(example: Example):
    module = example("essay_judge")
    grade, summary = module.judge.run(module.PICTURE, module.SHOWN, module.ESSAY).ret_value
    assert grade == "A"
    assert json.loads(summary) == {"name": "Nina", "city": "Oslo", "color": "red"}
    wrong_color = module.ESSAY.replace("red", "green")
    assert module.judge.run(module.PICTURE, module.SHOWN, wrong_color).ret_value[0] == "B"


def test_essay_judge_asks_nothing_more_about_another_place(example: Example):
    module = example("essay_judge")
    state = module.judge.run(module.PICTURE, module.SHOWN, module.ESSAY.replace("Oslo", "Rome"))
    assert state.ret_value == ("F", None) and state["city"] == "Rome"
    assert "summary" not in state


def test_essay_judge_shows_the_picture_first(example: Example):
    """On a backend that takes pictures, the program is the same."""
    module = example("essay_judge")
    said = {"color": "red", "thing": "a hat", "name": "Nina"}
    summary = '{"name": "Nina", "city": "Oslo", "color": "red"}'
    answers = {module.DIMENSIONS[topic]: answer for topic, answer in said.items()}
    backend = ScriptedBackend(answers | {"as JSON.": summary})
    state = module.judge.run(jsg.image(PNG), module.SHOWN, module.ESSAY, backend=backend)
    assert state.ret_value == ("B", summary)
    calls = backend.prompts("generate") + backend.prompts("select")
    assert len(calls) == 5
    assert all(prompt.startswith(f"[user]<image {len(PNG)}>[/user]") for prompt in calls)


def test_react_agent_looks_up_only_what_it_does_not_know(example: Example):
    module = example("react_agent")
    for name, code in module.PHONE_BOOK.items():
        state = module.agent.run(f"What is the phone number of {name}?")
        assert state.ret_value == f"The code of {name} is {code}." and state["action_0"] == name
    state = module.agent.run("What is the capital of Peru?")
    assert state.ret_value == "The capital of Peru is Lima." and "action_0" not in state


def test_rag_answers_from_what_it_retrieved(example: Example):
    module = example("rag")
    assert len(module.DOCUMENTS) == 8
    assert module.retrieve("Where does Oscar live?")[0] == "Oscar lives in Rome."
    assert len(module.retrieve("Where does Oscar live?")) == 3
    names = [document.split()[0] for document in module.DOCUMENTS]
    assert module.answers([f"Where does {name} live?" for name in names]) == module.DOCUMENTS


def test_documents_are_read_side_by_side(example: Example):
    module = example("parallel_document_qa")
    for name, document in module.DOCUMENTS.items():
        state = module.ask.run(list(module.DOCUMENTS.values()), f"Where does {name} live?")
        assert state["answer"] == document.strip()


@embedded
def test_f3_documents_that_were_read_are_not_read_again(example: Example, engine: jsg.Engine):
    module = example("parallel_document_qa")
    documents = list(module.DOCUMENTS.values())
    module.ask.run(documents, "Where does Tom live?").sync()
    before = engine.get_server_info()
    meta = module.ask.run(documents, "Where does Anna live?").get_meta_info("answer")
    after = engine.get_server_info()
    branch_tokens = after["branch_tokens"] - before["branch_tokens"]
    assert branch_tokens > 0
    assert after["branch_tokens_computed"] == before["branch_tokens_computed"]
    assert meta["cached_tokens"] >= branch_tokens


@pytest.mark.parametrize(
    ("arguments", "kind"), [(["--url", "http://127.0.0.1:1"], "RuntimeEndpoint"), (["--openai", "m"], "OpenAI")]
)
def test_the_command_line_names_the_backend(
    example: Example, arguments: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["example", *arguments])
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    used = []
    example("common").run(lambda: used.append(type(as_backend(None)).__name__))
    assert used == [kind]


@pytest.mark.slow
def test_an_example_runs_from_a_checkout():
    done = subprocess.run(
        [sys.executable, "examples/few_shot.py"], cwd=EXAMPLES.parent, capture_output=True, text=True, check=True
    )
    assert "fast -> slow" in done.stdout
