"""`jsg convert` as it is typed: what it says, its exit status, and what Ctrl-C leaves."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from jsg.models.config import ModelConfig
from jsg.models.loading import abstract_model, checkpoint_shapes
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint

ROOT = pathlib.Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def command(*arguments: str | pathlib.Path) -> list[str]:
    return [sys.executable, "-m", "jsg.cli", "convert", *map(str, arguments)]


def test_which_of_two_checkpoints_is_an_option(tmp_path):
    """Which the message names."""
    (tmp_path / "source").mkdir()
    write_checkpoint(tmp_path / "source", "llama_mha", random_tensors("llama_mha", 0))
    for arguments, status in (
        (("source", "both"), 0),
        (("both", "made"), 2),
        (("both", "made", "--load-format", "orbax"), 0),
    ):
        done = subprocess.run(
            command(*arguments), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT
        )
        assert done.returncode == status, done.stderr
        assert ("say which with --load-format" in done.stderr) == (status == 2)
        if arguments[1] == "both":
            write_checkpoint(tmp_path / "both", "llama_mha", random_tensors("llama_mha", 0))


def test_lines_without_a_terminal(tmp_path):
    (tmp_path / "source").mkdir()
    write_checkpoint(tmp_path / "source", "llama_mha", random_tensors("llama_mha", 0))
    arguments = (tmp_path / "source", tmp_path / "made", "--tp-size", "2")
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert 2 <= len(lines) <= 10
    assert all(line.startswith("convert: ") and line.endswith(" GB/s") for line in lines)
    again = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 2
    assert again.stderr == "jsg: error: DST must not exist yet, but there is 'made'; remove it or take another name\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
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
        [sys.executable, "-c", code, *command(source, tmp_path / "made")[3:]],
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
