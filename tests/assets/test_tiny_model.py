"""The embedded model: its files load as described, its split is respected, and it scores as its README says."""

import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from jsg.speech.prompts.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "jsg" / "assets" / "tiny"
EXAMPLE = ROOT / "examples" / "tiny_model"
MODULES = ("words", "tasks", "tokenizer", "model", "evaluate", "train")
SURE_TASKS = ("greeting", "capitals", "counting", "json_extraction")
MARGIN = 0.03


@pytest.fixture(scope="module")
def example():
    """The modules of examples/tiny_model, importable for as long as this file's tests run."""
    pytest.importorskip("optax")
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


@pytest.fixture(scope="module")
def stated_scores():
    """Task → score, from the table in the README."""
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) % \|", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    return {task: float(score) / 100 for task, score in rows}


def test_the_folder_is_small_enough():
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 8_000_000


def test_every_parameter_has_the_shape_that_the_config_says(example):
    config = example.model.load_model(ASSETS)[1]
    expected = {name: value.shape for name, value in example.model.init_params(config).items()}
    with safe_open(ASSETS / "model.safetensors", "numpy") as tensors:
        assert {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()} == expected  # noqa: SIM118
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_any_text_survives_the_tokenizer(tokenizer):
    text = "Grüße, 世界! \t\r\n\x00 0123 {\"a\": ['b', 1.5e-3]}  🙂 <b>"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_word_has_the_same_tokens_wherever_it_stands(tokenizer):
    word = tokenizer.encode("Brondal").ids
    for text in (" Brondal", '"Brondal"', "\nBrondal,"):
        tokens = tokenizer.encode(text).ids
        assert word in [tokens[start : start + len(word)] for start in range(len(tokens))]


def test_the_chat_template_writes_what_training_wrote(example, tokenizer):
    source = json.loads((ASSETS / "tokenizer_config.json").read_text())["chat_template"]
    template = ChatTemplate(source, bos_token="<|begin|>", eos_token="<|end|>")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": " Hi\n"}]
    for generate in (True, False):
        rendered = template.render(messages, add_generation_prompt=generate)
        assert rendered == example.tokenizer.render_chat(messages, add_generation_prompt=generate)
    end_id = tokenizer.token_to_id("<|end|>")
    assert end_id in json.loads((ASSETS / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.slow
def test_no_held_out_combination_is_in_the_training_text(example):
    tasks, rng = example.tasks, random.Random(5)
    held_out = {case.combination for task in tasks.EVALUATED for case in tasks.held_out_cases(task)}
    turns = [tasks.training_turn(rng) for _ in range(8000)]
    turns += [tasks.training_completion(rng) for _ in range(2000)]
    turns += [turn for _ in range(1000) for turn in tasks.few_shot(rng, False, 5).turns]
    trained = {f"{turn.task}|{turn.phrasing}|{turn.item}" for turn in turns}
    assert not trained & held_out
    assert not [turn for turn in turns if tasks.is_held_out(turn.task, turn.phrasing, turn.item)]


@pytest.mark.slow
def test_no_training_row_asks_a_held_out_question(example, tokenizer):
    tasks = example.tasks
    writer = example.train.RowWriter(tokenizer, random.Random(6))
    rows = [tokenizer.decode(writer.row(512)[0], skip_special_tokens=False) for _ in range(400)]
    asked = set(re.findall(r"<\|user\|>(.*?)<\|end\|><\|assistant\|>", "".join(rows), re.DOTALL))
    assert len(asked) > 3000
    # "Hello! Hi!" is two phrasings that read the same, and a recall question does not contain the value it asks for.
    for task in tasks.EVALUATED:
        for case in tasks.held_out_cases(task):
            if task not in ("few_shot", "completion", "recall", "small_talk"):
                assert case.prompt[-1]["content"] not in asked


@pytest.mark.slow
def test_evaluated_values_of_open_tasks_are_never_trained_on(example, tokenizer):
    tasks = example.tasks
    writer = example.train.RowWriter(tokenizer, random.Random(8))
    trained = set()
    for _ in range(400):
        row = tokenizer.decode(writer.row(512)[0], skip_special_tokens=False)
        text = row.rpartition(" ")[0]  # the last word may be cut
        trained |= {word.lower() for word in re.findall(r"[A-Za-z]+|\d+", text)}
    for case in tasks.held_out_cases("json_extraction"):
        values = json.loads(case.answer).values()
        assert not {str(value).lower() for value in values} & trained


@pytest.mark.slow
def test_at_least_200_cases_a_task(example):
    for task in example.tasks.EVALUATED:
        cases = example.tasks.held_out_cases(task)
        assert len({case.combination for case in cases}) == len(cases) >= 200
    assert cases == example.tasks.held_out_cases(task)


def test_the_readme_states_every_task(example, stated_scores):
    assert set(stated_scores) == set(example.tasks.EVALUATED)


@pytest.mark.slow
def test_the_engine_reaches_the_stated_scores(example, stated_scores):
    import jsg

    config = json.loads((ASSETS / "tokenizer_config.json").read_text())
    template = ChatTemplate(config["chat_template"], bos_token=config["bos_token"], eos_token=config["eos_token"])
    sampling = {"temperature": 0, "max_new_tokens": example.evaluate.MAX_NEW_TOKENS}

    with jsg.Engine() as engine:

        def complete(prompts):
            raw = isinstance(prompts[0], str)
            texts = prompts if raw else [template.render(messages) for messages in prompts]
            outputs = engine.generate(texts, sampling_params=sampling | ({"stop": ["\n"]} if raw else {}))
            return [output["text"] for output in outputs]

        scores = example.evaluate.evaluate(complete)
    too_low = {task: score for task, score in scores.items() if score < stated_scores[task] - MARGIN}
    assert not too_low
    assert all(scores[task] >= 0.9 for task in SURE_TASKS), scores
