"""What several devices hold of a checkpoint: each its slices, which together are the parameters of one device."""

import functools
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import save_file

from jsg.conversion import orbax_writer
from jsg.conversion.convert import convert
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model, checkpoint_shapes
from tests.golden.variants import VARIANTS, WIDE, random_tensors, write_checkpoint
from tests.own_process import said

LARGE = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 8}
MIB = 2**20
ROUNDED = 8 * MIB
"""Pieces in float32 while they are rounded, of each thread."""


PIECES = {"piece_bytes": 600}
"""Pieces of a few rows, which end inside of heads where they may."""
INT8, INT4, FP8 = ({"quantization": name} for name in ("int8", "int4", "fp8"))
BFLOAT16 = {"dtype": "bfloat16"}

# A checkpoint of this variant; converted by `jsg convert` for so many devices, or not; and what is loaded of it.
Loads = tuple[str, int | None, list[dict[str, Any]]]


def run(count: int, options: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return {"count": count, "options": options or {}} | others


FAST: dict[str, Loads] = {
    "heads": ("llama_gqa_head_dim", None, [run(4), run(4, **PIECES)]),  # each of two is there twice
    "own": ("qwen2", None, [run(2)]),
    "bits": ("mixtral_three_of_five", None, [run(2, INT8, piece_bytes=3000)]),
    "4 bits": ("wide", None, [run(2, INT4, piece_bytes=3000)]),
    "experts": ("mixtral", None, [run(4, groups=2)]),
    "converted": ("llama_gqa_head_dim", 4, [run(2), run(4)]),
    "parts": ("phi3", None, [run(2), run(2, **PIECES)]),  # of fused tensors, in another order
}
SLOW: dict[str, Loads] = {
    "dummy": ("llama_biases", None, [run(2, {"load_format": "dummy"})]),
    "bfloat16": ("qwen3_biases", None, [run(4, BFLOAT16, **PIECES)]),
    "experts": ("mixtral", None, [run(2, groups=2), run(4, groups=4)]),
    "experts in 8 bits": ("mixtral", None, [run(4, INT8, groups=4)]),
    "4 bits": ("wide", None, [run(4, INT4, **PIECES)]),
    "experts in 4 bits": ("wide experts", None, [run(2, INT4, groups=2)]),
    "for one": ("llama_gqa_head_dim", 1, [run(2)]),
    "for four": ("llama_gqa_head_dim", 4, [run(2, INT8)]),
    "converted parts": ("phi3", 2, [run(2)]),
    "parts": ("glm4", None, [run(2, INT8), run(2, {"load_format": "dummy"})]),
}
LONG: dict[str, Loads] = {
    "bits": ("mixtral_three_of_five", None, [run(4, INT8, **PIECES)]),
    "fp8": ("mixtral", None, [run(2, FP8), run(2, FP8, **PIECES)]),
    "bfloat16": ("qwen3_biases", None, [run(4, BFLOAT16)]),
    "experts in 8 bits": ("mixtral", None, [run(4, FP8, groups=2)]),
    "experts in 4 bits": ("wide experts", None, [run(2, INT4, **PIECES)]),
    "4 bits for four": ("wide", 4, [run(2, INT4)]),
    "for one": ("llama_gqa_head_dim", 1, [run(4), run(2, INT8)]),
}
LOADS = {"fast": FAST, "slow": SLOW, "long": LONG}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What `shared_out.py` says, in one process, of the fast loads, of the slow ones or of the long ones."""

    def directory_of(variant: str, converted_for: int | None) -> str:
        directory = tmp_path_factory.mktemp(variant)
        with mock.patch.dict(VARIANTS, WIDE):
            write_checkpoint(directory, variant, random_tensors(variant, 0))
        if converted_for is None:
            return str(directory)
        with mock.patch.multiple(orbax_writer, PIECE_BYTES=1024, FILE_BYTES=4096):  # tensors of several files
            convert(directory, directory / "made", tp_size=converted_for)
        return str(directory / "made")

    @functools.cache
    def all_of(kind: str) -> dict[str, list[dict[str, Any]]]:
        loads = LOADS[kind]
        told = [
            {"directory": directory, **each}
            for variant, converted_for, runs in loads.values()
            for directory in [directory_of(variant, converted_for)]
            for each in runs
        ]
        results = said("tests.models.shared_out", told=told)
        assert len(results) == len(told)
        left = iter(results)
        return {name: list(itertools.islice(left, len(runs))) for name, (_, _, runs) in loads.items()}

    def load(name: str) -> list[dict[str, Any]]:
        kind, _, name = name.rpartition(": ")
        return all_of(kind or "fast")[name]

    return load


def slow(*names: str) -> list[Any]:
    return [pytest.param(f"slow: {name}", marks=pytest.mark.slow) for name in names]


def long(*names: str) -> list[Any]:
    return [pytest.param(f"long: {name}", marks=[pytest.mark.slow, pytest.mark.long]) for name in names]


@pytest.mark.parametrize("name", [*FAST, *slow(*SLOW), *long(*LONG)])
def test_devices_hold_what_one_would(loaded, name: str):
    """Bit for bit, also in 8 bits and of random weights, however tensors are cut and whoever wrote them.

    Other ways to load what the slow members load are long.
    """
    for result in loaded(name):
        assert result["differing"] == [] and result["num_shared_out"] > 4


@pytest.mark.parametrize("name", ["own", "experts", "converted", "parts", *slow("experts", "for one")])
def test_each_device_reads_its_part_only(loaded, name: str):
    first, *_ = loaded(name)
    assert first["numbers_read"] == first["numbers_held"]


@pytest.mark.parametrize("name", ["experts", *slow("experts")])
def test_groups_of_devices_hold_experts_of_their_own(loaded, name: str):
    """A device has no expert of another group, and of its group's its columns only."""
    runs = (SLOW if name.startswith("slow: ") else FAST)["experts"][2]
    for told, result in zip(runs, loaded(name), strict=True):
        count, groups = told["count"], told["groups"]
        parts, experts, columns = count // groups, 4 // groups, 96 * groups // count
        for device, spans in enumerate(result["spans"]["layers/0/mlp/gate"]):
            expert, column = device // parts * experts, device % parts * columns
            assert spans == [[expert, expert + experts], [0, 64], [column, column + columns]]


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="only Linux tells it there")
@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("llama_mha", "safetensors"),
        pytest.param("llama_mha", "orbax", marks=pytest.mark.long),
        pytest.param("mixtral", "safetensors", marks=pytest.mark.long),
        ("mixtral", "orbax"),
    ],
)
def test_the_host_holds_what_its_devices_hold_and_one_tensor(tmp_path: pathlib.Path, variant: str, kind: str):
    """On one device and on two, of a checkpoint for two; all experts of a layer are one parameter. In 8 bits too.

    Each model with the other kind of checkpoint is long.
    """
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS[variant] | LARGE))
    shapes = checkpoint_shapes(abstract_model(read_spec(tmp_path), np.float32))
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
        told = [{"directory": str(directory), "count": count, "options": options, "is_measured": True}]
        [result] = said("tests.models.shared_out", told=told)
        assert result["bytes"] > (150 if quantization == "none" else 40) * MIB
        beside = result["peak_bytes"] - result["bytes"]
        print(f"{variant} {kind} {count} {quantization}: {beside / MIB:.1f} MiB beside the shard")
        assert beside < largest + (0 if quantization == "none" else ROUNDED)
