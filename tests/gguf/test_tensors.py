"""The numbers of each type are those of its formula, bit for bit, and only what is asked for is restored."""

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from jsg.errors import ModelError
from jsg.gguf.container import read_container
from jsg.kernels_pallas.few_bits import Quantised, zeros
from jsg.models.checkpoint import Checkpoint
from jsg.models.gguf_tensors import FORMS, GgufTensor
from jsg.models.published.record import KeptForm
from tests.gguf.writer import CODES, container, rounded

SHAPE = (6, 512)
CUTS = [
    (slice(None), slice(None)),
    (slice(1, 4), slice(70, 300)),
    (slice(5, 6), slice(255, 257)),
    (slice(2, 2), slice(9)),
]


def written(path: Path, kind: str) -> tuple[GgufTensor, bytes, np.ndarray]:
    numbers = np.random.default_rng(len(kind)).standard_normal(SHAPE).astype(np.float32)
    numbers[3] = 0  # a scale of 0
    data, restored = rounded(numbers, kind)
    path.write_bytes(container({"general.architecture": "llama"}, {"t": (kind, SHAPE, data)}))
    place = read_container(path).tensors["t"]
    raw = np.frombuffer(path.read_bytes()[place.start :][: place.nbytes], np.uint8)
    return GgufTensor("t", raw.reshape(SHAPE[0], -1), place), data, restored


@pytest.mark.parametrize("kind", CODES)
def test_restored_numbers_are_those_of_the_formula(kind: str, tmp_path: Path):
    tensor, _, restored = written(tmp_path / "m.gguf", kind)
    assert tensor.shape == SHAPE
    for cut in CUTS:
        numbers = tensor.read(cut)
        assert str(numbers.dtype) == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
        np.testing.assert_array_equal(numbers.astype(np.float32), restored[cut])


@pytest.mark.parametrize("kind", CODES)
def test_the_package_of_llama_cpp_restores_the_same(kind: str, tmp_path: Path):
    tensor, data, _ = written(tmp_path / "m.gguf", kind)
    raw = np.frombuffer(data, {"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)).reshape(SHAPE[0], -1)
    theirs = dequantize(raw, GGMLQuantizationType[kind])
    np.testing.assert_array_equal(tensor.read(CUTS[0]).astype(np.float32), theirs)


def test_scales_that_are_not_finite_are_refused(tmp_path: Path):
    """The last two bytes of a block of Q6_K are its scale, and the first two of the others."""
    for kind in ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"):
        for bad in (np.nan, np.inf):
            data = bytearray(rounded(np.ones(SHAPE, np.float32), kind)[0])
            at = 208 if kind == "Q6_K" else 0
            data[at : at + 2] = np.float16(bad).tobytes()
            (tmp_path / "m.gguf").write_bytes(container({"general.architecture": "llama"}, {"t": (kind, SHAPE, data)}))
            place = read_container(tmp_path / "m.gguf").tensors["t"]
            tensor = GgufTensor("t", np.frombuffer(data, np.uint8).reshape(SHAPE[0], -1), place)
            for read in (tensor.read, lambda cut, tensor=tensor, kind=kind: tensor.kept(cut, FORMS[kind])):
                with pytest.raises(ModelError, match="the scales of t must be finite"):
                    read((slice(0, 1), slice(0, 256)))


@pytest.mark.parametrize(
    ("kind", "other"), [*((kind, kind) for kind in FORMS), *itertools.product(("Q4_K", "Q5_K", "Q6_K"), repeat=2)]
)
def test_kept_numbers_mean_the_same_bits_in_each_form(kind: str, other: str, tmp_path: Path):
    """Also in the form that they have in one kernel with numbers of another type."""
    tensor, _, restored = written(tmp_path / "m.gguf", kind)
    form = KeptForm(FORMS[kind], "", is_turned=False).joined(KeptForm(FORMS[other], "", is_turned=False))
    assert form is not None
    kept = tensor.kept((slice(1, 4), slice(256, 512)), form.form)
    made = Quantised(kept.numbers, kept.scale, form.form, *kept[2:])
    declared = jax.eval_shape(lambda: zeros(form.form, (3, 256), 1))
    assert [each.shape for each in jax.tree.leaves(declared)] == [each.shape for each in jax.tree.leaves(made)]
    found = jax.tree.map(lambda here, there: jnp.asarray(here, there.dtype), made, declared).restored(jnp.float32)
    np.testing.assert_array_equal(found, restored[1:4, 256:512])


def test_other_forms_are_not_joined():
    assert FORMS["Q8_0"].joined(FORMS["Q4_K"]) is None
    assert FORMS["Q4_K"].joined(dataclasses.replace(FORMS["Q6_K"], block=128)) is None


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K"])
def test_the_progress_counts_the_bytes_of_the_file(kind: str, tmp_path: Path):
    tensor, data, _ = written(tmp_path / "m.gguf", kind)
    checkpoint = Checkpoint({"t": tensor})
    checkpoint.read("t")
    assert checkpoint.num_bytes_read == len(data)


def test_pieces_are_rows_of_a_mebibyte_when_they_are_restored(tmp_path: Path):
    tensor, _, _ = written(tmp_path / "m.gguf", "Q4_K")
    assert tensor.piece() == (0, (2**20 - 2**14) // (512 * 4))
