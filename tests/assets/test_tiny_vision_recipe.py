"""The recipe of `examples/tiny_vision`: the commands of its README run through, and write a folder that jsg loads."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jsg.engine.media_reader import ModelMediaReader
from jsg.processing.tokenizer import load_tokenizer
from tests.assets.test_tiny_vision import ASSETS, EXAMPLE, ROOT
from tests.models.paged import load_directory

SHORTER = {
    "train_tower.py": ("--steps", "2", "--images", "4"),
    "train_vision.py": ("--steps", "2"),
    "evaluate_vision.py": ("--count", "2", "--kinds", "shape", "count"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands write, at two steps each."""
    pytest.importorskip("optax")
    place = tmp_path_factory.mktemp("recipe")
    commands = re.findall(r"^python (examples/tiny_vision/(\w+\.py) .*)$", (EXAMPLE / "README.md").read_text(), re.M)
    assert [name for _, name in commands] == list(SHORTER)
    for command, name in commands:
        words = [word.replace("/tmp/", f"{place}/") for word in shlex.split(command)]
        ended = subprocess.run(
            [sys.executable, *words, *SHORTER[name]], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
        assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^(\w+) +[\d.]+%$", ended.stdout, re.M) == ["shape", "count"]
    return place / "tiny-vision"


@pytest.mark.slow
@pytest.mark.long
def test_its_output_has_the_files_of_the_shipped_model(folder):
    assert {path.name for path in folder.iterdir()} == {path.name for path in ASSETS.iterdir()}
    for path in folder.iterdir():
        is_trained = path.name == "model.safetensors"
        assert is_trained is (path.read_bytes() != (ASSETS / path.name).read_bytes()), path.name


@pytest.mark.slow
@pytest.mark.long
def test_jsg_loads_it(folder):
    config, model = load_directory(folder)
    assert config.vision is not None and model.vision is not None
    reader = ModelMediaReader.of_model(folder, load_tokenizer(folder))
    assert reader is not None and set(reader.placeholders) == {"image"}
