"""What several devices hold of a checkpoint: each its slices, which together are the parameters of one device."""

import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jsg.models.config import ModelConfig
from jsg.models.convert import convert
from jsg.models.loading import abstract_model, checkpoint_shapes
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint
from tests.own_process import said

LARGE = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 8}
MIB = 2**20
COMPILED = 64 * MIB
"""What XLA compiles to round numbers to 8 bits, of any model: dozens of programs that stay."""


def loaded(directory: pathlib.Path, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    """What `shared_out.py` says of loading this checkpoint."""
    return said("tests.models.shared_out", str(directory), told=runs)


PIECES, SENT = {"piece_bytes": 600}, {"is_sent": True}
"""Pieces of a few rows, which end inside of heads where they may; and what accelerators do."""


@pytest.mark.parametrize(
    ("variant", "count", "options", "runs"),
    [
        ("llama_gqa_head_dim", 4, {}, [{}, PIECES, SENT]),  # two key-value heads: each is there twice
        ("llama_biases", 2, {"load_format": "dummy"}, [{}, SENT]),
        ("mixtral_three_of_five", 4, {"quantization": "int8"}, [PIECES, SENT]),
        pytest.param("mixtral", 2, {"quantization": "fp8"}, [{}, PIECES, SENT], marks=pytest.mark.slow),
        pytest.param("qwen3_biases", 4, {"dtype": "bfloat16"}, [{}, PIECES, SENT], marks=pytest.mark.slow),
    ],
)
def test_devices_hold_what_one_would(
    tmp_path: pathlib.Path, variant: str, count: int, options: dict[str, Any], runs: list[dict[str, Any]]
):
    """Bit for bit, also in 8 bits and of random weights, however tensors are cut."""
    write_checkpoint(tmp_path, variant, random_tensors(variant, 0))
    for result in loaded(tmp_path, *({"count": count, "options": options} | run for run in runs)):
        assert result["differing"] == []
        assert result["num_shared_out"] > 4


def test_each_device_reads_its_part_only(tmp_path: pathlib.Path):
    write_checkpoint(tmp_path, "qwen2", random_tensors("qwen2", 0))
    [result] = loaded(tmp_path, {"count": 2, "options": {}})
    assert result["differing"] == []
    assert result["numbers_read"] == result["numbers_held"]


def test_groups_of_devices_hold_experts_of_their_own(tmp_path: pathlib.Path):
    """Bit for bit; a device reads no expert of another group, and of its group's its columns only."""
    write_checkpoint(tmp_path, "mixtral", random_tensors("mixtral", 0))
    cases = ((2, 2), (4, 4), (4, 2))
    told = [{"count": count, "groups": groups, "options": {}} for count, groups in cases]
    for (count, groups), result in zip(cases, loaded(tmp_path, *told), strict=True):
        assert result["differing"] == []
        assert result["numbers_read"] == result["numbers_held"]
        parts, experts, columns = count // groups, 4 // groups, 96 * groups // count
        for device, spans in enumerate(result["spans"]["layers/0/mlp/gate"]):
            expert, column = device // parts * experts, device % parts * columns
            assert spans == [[expert, expert + experts], [0, 64], [column, column + columns]]


@pytest.mark.slow
def test_so_do_they_in_8_bits(tmp_path: pathlib.Path):
    """Of whole experts a device can tell the scales alone; those of one that a group shares, all its devices have."""
    write_checkpoint(tmp_path, "mixtral", random_tensors("mixtral", 0))
    runs = [{"count": 4, "groups": 4, "options": {"quantization": "int8"}}]
    runs += [{"count": 4, "groups": 2, "options": {"quantization": "fp8"}}]
    whole, shared = loaded(tmp_path, *runs)
    assert whole["differing"] == shared["differing"] == []


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="only Linux tells it there")
@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
@pytest.mark.parametrize("variant", ["llama_mha", "mixtral"])
def test_the_host_holds_what_its_devices_hold_and_one_tensor(tmp_path: pathlib.Path, variant: str, kind: str):
    """On one device and on two, of a checkpoint for two; all experts of a layer are one parameter. In 8 bits too."""
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS[variant] | LARGE))
    shapes = checkpoint_shapes(abstract_model(ModelConfig.from_directory(tmp_path), np.float32))
    rng = np.random.default_rng(0)
    save_file(
        {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    directory = tmp_path
    if kind == "orbax":
        directory = tmp_path / "made"
        convert(tmp_path, directory, tp_size=2)
    largest = 4 * max(np.prod(shape) for shape in shapes.values())
    for count, quantization in itertools.product((1, 2), ("none", "int8")):
        options = {"quantization": quantization}
        [result] = loaded(directory, {"count": count, "options": options, "is_measured": True})
        assert result["bytes"] > (150 if quantization == "none" else 40) * MIB
        beside = result["peak_bytes"] - result["bytes"]
        print(f"{variant} {kind} {count} {quantization}: {beside / MIB:.1f} MiB beside the shard")
        assert beside < largest + (0 if quantization == "none" else COMPILED)
