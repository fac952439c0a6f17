"""The embedded vision model: its files are complete, its split is respected, and it answers held-out cases."""

import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from jsg.processing.media.pixel_config import read_pixel_config
from jsg.processing.media.processor import PixelProcessor
from jsg.speech.prompts.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "jsg" / "assets" / "tiny-vision"
EXAMPLE = ROOT / "examples" / "tiny_vision"
OWN = ("scenes", "questions", "tower", "vocabulary", "train_tower", "train_vision", "evaluate_vision")
MARGIN = 0.04
MODULES = (*OWN, "words", "phrasings", "tasks", "tokenizer", "model", "train")


@pytest.fixture(scope="module")
def example():
    """The modules of examples/tiny_vision, importable for as long as this file's tests run."""
    pytest.importorskip("optax")
    sys.path.insert(0, str(EXAMPLE))
    before = list(sys.path)
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in OWN})
    finally:
        sys.path[:] = [path for path in before if path != str(EXAMPLE)]
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


@pytest.fixture(scope="module")
def stated_scores():
    """Kind → score, from the table in the README."""
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) % \|", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    return {kind: float(score) / 100 for kind, score in rows}


def test_the_folder_is_small_enough():
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 10_000_000


def test_every_parameter_has_the_shape_that_the_configs_say(example):
    tower_config, text_config = example.tower.load_model(ASSETS)[2]
    expected = example.tower.init_tower(tower_config, text_config.dim)
    text = example.tower.text_model.init_params(text_config)
    expected |= {"language_model." + name: value for name, value in text.items()}
    with safe_open(ASSETS / "model.safetensors", "numpy") as tensors:
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        assert shapes == {name: value.shape for name, value in expected.items()}
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_the_tokenizer_is_the_text_models_with_more_words(example, tokenizer):
    old = Tokenizer.from_file(str(ASSETS.parent / "tiny" / "tokenizer.json"))
    assert example.vocabulary.extended(old).to_str() == tokenizer.to_str()
    kept = "My favorite color is teal. Extract name and city as JSON: 1234, Grüße, 世界!"
    assert tokenizer.encode(kept).ids == old.encode(kept).ids
    assert tokenizer.encode("a red circle").tokens == ["a", "Ġred", "Ġcircle"]
    shown = "There is an orange triangle in the bottom left. Count the crosses."
    assert tokenizer.decode(tokenizer.encode(shown).ids) == shown
    assert tokenizer.token_to_id("<image>") == json.loads((ASSETS / "config.json").read_text())["image_token_id"]


def test_the_chat_template_writes_what_training_wrote(example, tokenizer):
    config = json.loads((ASSETS / "tokenizer_config.json").read_text())
    template = ChatTemplate(config["chat_template"], bos_token="<|begin|>", eos_token="<|end|>")
    parts = [{"type": "image"}, {"type": "text", "text": "What shape is red?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A star."}]
    rendered = template.render(messages, add_generation_prompt=False)
    assert rendered == "<|user|><image>What shape is red?<|end|><|assistant|>A star.<|end|>"
    assert template.render(messages[:1]) == "<|user|><image>What shape is red?<|end|><|assistant|>"


def test_training_names_and_shows_no_held_out_combination(example):
    questions, scenes, rng = example.questions, example.scenes, random.Random(5)
    assert {color for color, _, _ in scenes.HELD_OUT} == set(scenes.COLORS)
    named = [f"{color} {kind} {scenes.PLACES[cell]}" for color, kind, cell in sorted(scenes.HELD_OUT)]
    recolored = [example.train_tower.with_any_colors(rng, questions.training_scene(rng)) for _ in range(300)]
    assert not [shape for scene in recolored for shape in scene.shapes if shape.is_held_out]
    for _ in range(3000):
        scene = questions.training_scene(rng)
        assert not [shape for shape in scene.shapes if shape.is_held_out]
        for question in questions.training_questions(rng, scene):
            text = question.prompt + question.answer
            assert not [name for name in named if name in text], text


def test_every_case_shows_a_held_out_combination(example):
    for kind in example.questions.KINDS:
        cases = example.questions.held_out_cases(kind, 50)
        assert cases == example.questions.held_out_cases(kind, 50)
        assert len({case.question.answer for case in cases}) > 1
        assert all(any(shape.is_held_out for shape in case.scene.shapes) for case in cases)


def test_a_branch_sees_the_picture_and_itself(example):
    visible = example.train_vision.visible_tokens(np.array([[0, 0, 1, 1, 2]]))
    expected = ["10000", "11000", "11100", "11110", "11001"]
    assert ["".join(str(int(seen)) for seen in row) for row in visible[0]] == expected


def test_pixels_are_those_of_training(example):
    config = example.tower.TowerConfig()
    processor = PixelProcessor(read_pixel_config(ASSETS))
    scene = example.scenes.random_scene(random.Random(3), 4)
    for picture in (example.scenes.draw(scene, 60), example.scenes.draw(scene, 150).resize((200, 130))):
        tiles = processor.image(np.asarray(picture))
        np.testing.assert_allclose(tiles.pixels, example.tower.preprocess(picture, config)[None], atol=1e-3)


@pytest.mark.slow
def test_the_engine_reaches_the_stated_scores(example, stated_scores):
    import jsg

    with jsg.Engine("tiny-vision") as engine:

        def complete(prompts):
            texts = [f"<|user|><image>{question}<|end|><|assistant|>" for _, question in prompts]
            pictures = [picture for picture, _ in prompts]
            sampling = {"temperature": 0, "max_new_tokens": example.evaluate_vision.MAX_NEW_TOKENS}
            return [output["text"] for output in engine.generate(texts, sampling, image_data=pictures)]

        scores = example.evaluate_vision.evaluate(complete)
    assert min(scores.values()) >= 0.9, scores
    assert all(score >= stated_scores[kind] - MARGIN for kind, score in scores.items()), scores


def test_the_readme_states_every_kind(example, stated_scores):
    assert set(stated_scores) == set(example.questions.KINDS) and min(stated_scores.values()) >= 0.9
