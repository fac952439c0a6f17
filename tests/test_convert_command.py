"""`jsg convert` as it is typed: what it says, its exit status, and what Ctrl-C leaves."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from safetensors.numpy import save_file

from jsg import cli
from jsg.models.config import ModelConfig
from jsg.models.loading import abstract_model, checkpoint_shapes
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs the command in this process, whose signal handlers it changes; gives its exit status and its stderr."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]

    def run(*arguments: str | pathlib.Path) -> tuple[int, str]:
        status = cli.main(["convert", *map(str, arguments)])
        captured = capsys.readouterr()
        assert captured.out == ""
        return status, captured.err

    yield run
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_which_of_two_checkpoints_is_an_option(tmp_path, convert):
    """Which the message names."""
    (tmp_path / "source").mkdir()
    write_checkpoint(tmp_path / "source", "llama_mha", random_tensors("llama_mha", 0))
    assert convert(tmp_path / "source", tmp_path / "both")[0] == 0
    write_checkpoint(tmp_path / "both", "llama_mha", random_tensors("llama_mha", 0))
    status, said = convert(tmp_path / "both", tmp_path / "made")
    assert status == 2 and "say which with --load-format" in said
    assert convert(tmp_path / "both", tmp_path / "made", "--load-format", "orbax")[0] == 0


def test_lines_without_a_terminal(tmp_path, convert):
    (tmp_path / "source").mkdir()
    write_checkpoint(tmp_path / "source", "llama_mha", random_tensors("llama_mha", 0))
    arguments = (tmp_path / "source", tmp_path / "made", "--tp-size", "2")
    status, said = convert(*arguments)
    lines = said.splitlines()
    assert status == 0 and 2 <= len(lines) <= 10
    assert all(line.startswith("convert: ") and line.endswith(" GB/s") for line in lines)
    status, said = convert(*arguments)
    assert status == 2
    assert said == "jsg: error: DST must not exist yet, but there is 'made'; remove it or take another name\n"


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_nothing(tmp_path, number, status):
    """In the middle of writing, which is seen by the first line."""
    source = tmp_path / "source"
    source.mkdir()
    config = VARIANTS["llama_mha"] | {"vocab_size": 65536, "hidden_size": 512}
    (source / "config.json").write_text(json.dumps(config))
    shapes = checkpoint_shapes(abstract_model(ModelConfig.from_directory(source), np.float32))
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, source / "model.safetensors")
    # Signals may be ignored where the tests run, and a child inherits that.
    child = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    child += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code = f"{child}from jsg.cli import main\nsys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "made")],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(number)
    rest = process.communicate(timeout=60)[1]
    assert first.startswith("convert: ")
    assert process.returncode == status, rest
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == [source]
