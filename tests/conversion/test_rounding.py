"""What `jsg convert --quantization` writes: what `jsg serve --quantization` computes with, as others read it."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jsg.conversion import safetensors_writer
from jsg.conversion.convert import convert
from jsg.errors import ConfigError, ModelError
from jsg.kernels_pallas.few_bits import Quantised
from jsg.models.checkpoint import open_checkpoint
from jsg.models.config import read_spec
from jsg.models.loading import load_model, parameters
from jsg.models.quantise import FORMS, quantise
from tests.conversion import rounded_reference
from tests.golden.families import one_of_each
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint
from tests.golden.vision_variants import vision_tensors, write_vision_checkpoint
from tests.models import packers
from tests.models.paged import PagedModel, load_directory

FAST = "mixtral"
DIFFERENT = ("deepseek_v3", "gemma3", "gpt_oss", "lfm2_moe", "nemotron_h", "phi3", "qwen2_moe", "qwen3_5_moe")
"""Families whose kernels have least in common."""


def mark_of(variant: str) -> Any:
    return () if variant == FAST else pytest.mark.slow if variant in DIFFERENT else pytest.mark.long


def write(directory: Path, variant: str) -> Path:
    directory.mkdir()
    if variant.startswith("llava"):
        write_vision_checkpoint(directory, variant, vision_tensors(variant, 0))
    else:
        write_checkpoint(directory, variant, random_tensors(variant, 0))
    return directory


def section_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def values(directory: Path, **options: Any) -> list[Any]:
    return [param.get_value() for param in parameters(load_model(directory, read_spec(directory), **options))]


def assert_same(source: Path, made: Path, quantization: str) -> None:
    """The model of the source, rounded as it is loaded, is the one that was written: to the bit and to the product."""
    for first, second in zip(values(source, quantization=quantization), values(made), strict=True):
        for leaf, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert leaf.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))
        if isinstance(first, Quantised) and first.shape[first.axis] != first.form.group:
            assert first.form == second.form


@pytest.mark.parametrize("variant", [pytest.param(name, marks=mark_of(name)) for name in one_of_each()])
def test_every_family_is_the_model_that_serve_rounds(tmp_path: Path, variant: str):
    source = write(tmp_path / "source", variant)
    for quantization in FORMS:
        made = tmp_path / quantization
        refusal = ""
        try:
            convert(source, made, quantization=quantization)
        except ModelError as error:
            refusal = str(error)
        if refusal:
            assert "needs a tensor for each expert" in refusal or "multiple of 32" in refusal
            assert not made.exists()
        else:
            assert_same(source, made, quantization)


def test_numbers_mean_what_the_form_says(tmp_path: Path):
    """Taken out of their words one by one, each is what rounding a kernel by itself gives."""
    tensors = random_tensors("llama_mha", 0)
    source = write(tmp_path / "source", "llama_mha")
    for quantization, bits in {"int4": 4, "int8": 8, "fp8": None}.items():
        convert(source, tmp_path / quantization, quantization=quantization)
        with open_checkpoint(tmp_path / quantization) as checkpoint:
            held = {name: tensor.read((slice(None),) * len(tensor.shape)) for name, _, tensor in checkpoint.stored()}
        kernels = [name.removesuffix("_scale") for name in held if name.endswith("_scale")]
        assert len(kernels) == 14
        for name in kernels[:2] + kernels[-3:]:
            rows, columns = tensors[name].shape
            if bits is None:
                numbers = held[name].astype(np.float64)
            else:
                assert held[f"{name}_shape"].tolist() == [rows, columns]
                words, per_word = held[f"{name}_packed"].view(np.uint32), 32 // bits
                numbers = np.empty((rows, columns))
                for column in range(columns):
                    shifted = words[:, column // per_word] >> np.uint32(column % per_word * bits)
                    numbers[:, column] = (shifted % (1 << bits)).astype(np.float64) - (1 << bits - 1)
            scale = held[f"{name}_scale"].astype(np.float64)
            made = quantise(tensors[name], name, FORMS[quantization])
            turned = jax.tree.map(lambda part: np.ascontiguousarray(np.asarray(part).T), made)
            meant = np.asarray(jax.jit(Quantised.restored, static_argnums=1)(turned, "float32")).T
            found = numbers * scale.repeat(columns // scale.shape[1], 1)
            np.testing.assert_array_equal(found.astype(np.float32), meant)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in rounded_reference.MODELS],
)
def test_transformers_computes_the_same(tmp_path: Path, variant: str):
    """Numbers as compressed-tensors restores them, and logits of transformers, recorded by `rounded_reference.py`."""
    with np.load(rounded_reference.RECORD) as file:
        record = dict(file)
    note = json.loads(str(record.pop("note")))
    rounded_reference.write(tmp_path / variant, variant)
    for quantization in rounded_reference.QUANTIZATIONS:
        case, tokens = f"{variant} {quantization}", rounded_reference.tokens(variant)
        convert(tmp_path / variant, tmp_path / case, quantization=quantization)
        with open_checkpoint(tmp_path / case, read_spec(tmp_path / case).names) as checkpoint:
            found = {name: rounded_reference.digest(checkpoint.read(name)) for name in note[case]}
        assert found == note[case] and len(found) >= 14, case
        config, model = load_directory(tmp_path / case)
        logits = PagedModel(config, model).extend({0: tokens})[0][:, rounded_reference.COLUMNS]
        np.testing.assert_allclose(logits, record[case], rtol=0, atol=5e-5, err_msg=case)


def test_what_is_not_rounded_is_listed_and_kept(tmp_path: Path):
    """Heads, embeddings, routers and towers, by the names of the file; a tower as one pattern, wherever it is."""
    mixed = convert_of(tmp_path, "mixtral")
    routers = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]
    assert sorted(section_of(mixed)["ignore"]) == ["lm_head", "model.embed_tokens", *routers]
    tied = section_of(convert_of(tmp_path, "llama_tied"))
    assert sorted(tied["ignore"]) == ["lm_head", "model.embed_tokens"], "a tied head is a module without a tensor"
    assert tied["config_groups"]["group_0"]["targets"] == ["Linear"]
    seeing = convert_of(tmp_path, "llava")
    towers = [rf"re:(.*\.)?{part}\..*" for part in ("vision_tower", "multi_modal_projector")]
    listed = section_of(seeing)["ignore"]
    assert set(towers) < set(listed) and len(listed) == 5, listed
    before, after = load_file(tmp_path / "llava source" / "model.safetensors"), load_file(seeing / "model.safetensors")
    kept = [name for name in before if name in after]
    assert any("vision_tower" in name for name in kept)
    for name in kept:
        np.testing.assert_array_equal(before[name], after[name])
    packed = {name.removesuffix("_packed") for name in after if name.endswith("_packed")}
    assert set(before) == packed | set(kept) and all("proj" in name for name in packed)
    assert_same(tmp_path / "llava source", seeing, "int8")


def convert_of(tmp_path: Path, variant: str) -> Path:
    source = write(tmp_path / f"{variant} source", variant)
    convert(source, tmp_path / variant, quantization="int8")
    return tmp_path / variant


def test_experts_in_one_tensor_get_a_tensor_each(tmp_path: Path):
    """By the names of checkpoints that have them so."""
    source = write(tmp_path / "source", "qwen3_moe")
    tensors = load_file(source / "model.safetensors")
    names = [name for name in tensors if ".experts." in name]
    assert names
    stacked = {name: tensor for name, tensor in tensors.items() if name not in names}
    for layer in sorted({name.partition(".experts.")[0] for name in names}):
        count = len({name.split(".")[5] for name in names if name.startswith(layer)})
        gate, up, down = (
            np.stack([tensors[f"{layer}.experts.{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        stacked |= {f"{layer}.experts.gate_up_proj": np.concatenate([gate, up], 1), f"{layer}.experts.down_proj": down}
    save_file(stacked, source / "model.safetensors")
    convert(source, tmp_path / "int8", quantization="int8")
    held = load_file(tmp_path / "int8" / "model.safetensors")
    assert {name.removesuffix("_packed") for name in held if ".experts." in name and name.endswith("_packed")} == {
        *names
    }
    assert_same(source, tmp_path / "int8", "int8")


def test_large_models_are_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safetensors_writer, "SHARD_BYTES", 50_000)
    monkeypatch.setattr(safetensors_writer, "PIECE_NUMBERS", 1000)
    source, done = write(tmp_path / "source", "llama_mha"), list[int]()
    total = convert(source, tmp_path / "made", quantization="int4", progress=lambda at, of: done.append(at))
    assert done[-1] == total and done == sorted(done) and len(done) > 100
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "made").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files and index["metadata"]["total_size"] == total
    assert_same(source, tmp_path / "made", "int4")


def test_what_cannot_be_rounded_is_refused(tmp_path: Path):
    source = write(tmp_path / "source", "llama_mha")
    with pytest.raises(ConfigError, match=r"not cut for devices, but got --tp-size 2; leave it out"):
        convert(source, tmp_path / "made", quantization="int8", tp_size=2)
    form = packers.FORMS["fp8"]
    packers.write_packed(tmp_path / "published", VARIANTS["llama_mha"], form, random_tensors("llama_mha", 0))
    with pytest.raises(ModelError, match=r"kernels are not in few bits, but those of SRC are; convert the one"):
        convert(tmp_path / "published", tmp_path / "made", quantization="int8")
    with pytest.raises(ModelError, match=r"a tensor for each expert, but model.layers.0.mlp.experts.down_proj has"):
        convert(write(tmp_path / "stacks", "gpt_oss"), tmp_path / "made", quantization="int8")
    assert not (tmp_path / "made").exists()


def test_scales_that_are_not_those_of_convert_are_refused(tmp_path: Path):
    """Products believe that bfloat16 holds each number times its scale, where `producer` says jsg."""
    convert(write(tmp_path / "source", "llama_mha"), tmp_path / "made", quantization="int4")
    file = tmp_path / "made" / "model.safetensors"
    held = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    held[name].view(np.uint16)[3, 0] |= 1
    save_file(held, file)
    with pytest.raises(
        ModelError, match=r"scales of model.layers.1.mlp.up_proj.weight must have five significant bits"
    ):
        load_model(tmp_path / "made", read_spec(tmp_path / "made"))
