import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jsg.conversion.convert import convert
from jsg.errors import ModelError
from jsg.models.config import read_spec
from jsg.models.decoder import Decoder
from jsg.models.llava import build_model
from jsg.models.loading import abstract_model, load_model, resolve_dtype
from jsg.models.registry import FAMILIES
from jsg.models.spec import ModelSpec
from tests.golden.variants import VARIANTS, random_tensors, variant_shapes, write_checkpoint
from tests.models.sizes import num_parameters

BIASED = "llama_biases"


def checkpoint(directory: Path, variant: str = BIASED) -> dict[str, np.ndarray]:
    tensors = random_tensors(variant, seed=1)
    write_checkpoint(directory, variant, tensors)
    return tensors


def load(directory: Path, **options) -> nnx.Module:
    return load_model(directory, read_spec(directory), **options)


def leaves(model: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def assert_same(first: nnx.Module, second: nnx.Module) -> None:
    for one, other in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_joint_kernels_hold_per_kv_head_its_queries_its_key_and_its_value(tmp_path):
    tensors = checkpoint(tmp_path)
    qkv = load(tmp_path).layers[0].attention.qkv
    q, k, v = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    kernel = np.asarray(qkv.kernel[...])
    assert kernel.shape == (64, 2, 4 * 16)
    np.testing.assert_array_equal(kernel[:, 1, :16], q[32:48].T)  # query head 2, the first of kv head 1
    np.testing.assert_array_equal(kernel[:, 1, 32:48], k[16:].T)
    np.testing.assert_array_equal(kernel[:, 0, 48:], v[:16].T)
    np.testing.assert_array_equal(qkv.bias[1, 48:], tensors["model.layers.0.self_attn.v_proj.bias"][16:])


def shard(directory: Path, tensors: dict[str, np.ndarray], num_shards: int = 3) -> dict[str, str]:
    """Replaces the single file by shards and an index; returns tensor → file."""
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def test_shards_load_as_one_file_does(tmp_path):
    tensors = checkpoint(tmp_path)
    single = load(tmp_path)
    shard(tmp_path, tensors)
    assert_same(single, load(tmp_path))


def test_a_model_survives_its_files(tmp_path):
    checkpoint(tmp_path)
    model = load(tmp_path)
    before = leaves(model)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    for one, other in zip(before, leaves(model), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_every_stored_type_is_cast_to_the_asked_one(tmp_path, stored):
    tensors = {name: tensor.astype(stored) for name, tensor in checkpoint(tmp_path, "llama_tied").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for dtype in (jnp.float32, jnp.bfloat16):
        model = load(tmp_path, dtype=dtype)
        assert {leaf.dtype for leaf in leaves(model)} == {jnp.dtype(dtype)}
        expected = tensors["model.embed_tokens.weight"].astype(np.float32).astype(dtype)
        np.testing.assert_array_equal(model.embedding.table[...], expected)


def test_known_superfluous_tensors_are_ignored(tmp_path):
    tensors = checkpoint(tmp_path, "llama_tied")
    plain = load(tmp_path)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    assert_same(plain, load(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"must hold model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"model.layers.1.self_attn.o_proj.bias": None}, r"must hold model\.layers\.1\.self_attn\.o_proj\.bias"),
        ({"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}, "q_norm"),
        ({"model.layers.2.input_layernorm.weight": np.ones(64, np.float32)}, r"layers\.2"),
        ({"lm_head.weight": np.ones((512, 32), np.float32)}, r"lm_head\.weight must have the shape \[512, 64\]"),
        ({"lm_head.weight": np.ones((64, 512), np.float32)}, r"lm_head\.weight must have the shape"),
        ({"model.norm.weight": np.ones(64, np.int32)}, r"model\.norm\.weight must be one of F32"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_tensor_name(tmp_path, change, named):
    tensors = checkpoint(tmp_path) | change
    save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -8])
def test_a_truncated_file_is_refused(tmp_path, keep):
    checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors must be a whole safetensors file") as error:
        load(tmp_path)
    assert str(tmp_path) not in str(error.value)


def test_an_unreadable_file_is_refused_without_its_path(tmp_path):
    files = shard(tmp_path, checkpoint(tmp_path))
    unreadable = tmp_path / files["lm_head.weight"]
    unreadable.unlink()
    unreadable.mkdir()
    with pytest.raises(ModelError, match=unreadable.name) as error:
        load(tmp_path)
    assert str(tmp_path) not in str(error.value)


def test_no_checkpoint_is_refused(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"must have model\.safetensors or"):
        load(tmp_path)


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", ""])
def test_an_index_cannot_name_files_elsewhere(tmp_path, target):
    files = shard(tmp_path, checkpoint(tmp_path))
    index = {"weight_map": {**files, "lm_head.weight": target}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="must name safetensors files beside itself"):
        load(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    tensors = checkpoint(tmp_path)
    files = shard(tmp_path, tensors)
    (tmp_path / files["lm_head.weight"]).unlink()
    with pytest.raises(ModelError, match="is missing"):
        load(tmp_path)
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, tmp_path / files["lm_head.weight"])
    with pytest.raises(ModelError, match="disagree about the tensor"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        load(tmp_path)


def test_progress_counts_every_parameter(tmp_path):
    tensors = checkpoint(tmp_path)
    seen = []
    model = load(tmp_path, progress=lambda *counts: seen.append(counts))
    total = len(leaves(model))
    assert [(done, every) for done, every, _ in seen] == [(done, total) for done in range(1, total + 1)]
    num_bytes = [read for _, _, read in seen]
    assert num_bytes == sorted(num_bytes) and num_bytes[0] > 0
    assert num_bytes[-1] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    "variant",
    [
        name if name in (BIASED, "qwen3", "mixtral") else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(VARIANTS)
    ],
)
def test_abstract_models_allocate_nothing_and_count_the_checkpoint(tmp_path, variant):
    write_checkpoint(tmp_path, variant, {"x": np.zeros(1, np.float32)})
    config = read_spec(tmp_path)
    state = nnx.state(abstract_model(config, jnp.bfloat16))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    names = config.names
    shapes = {names.here(name): shape for name, shape in variant_shapes(variant).items()}
    assert num_parameters(config) == sum(
        math.prod(shape) for name, shape in shapes.items() if not names.is_unread(name)
    )


def dummy(config: ModelSpec, seed: int = 0) -> Decoder:
    return load_model(None, config, load_format="dummy", seed=seed)


def test_dummy_weights_depend_on_seed_and_name_only(tmp_path):
    checkpoint(tmp_path)
    config = read_spec(tmp_path)
    model, again, other = dummy(config), dummy(config), dummy(config, seed=1)
    assert_same(model, again)
    assert not np.array_equal(model.head[...], other.head[...])
    assert not np.array_equal(model.layers[0].mlp.down.kernel[...], model.layers[1].mlp.down.kernel[...])


def test_dummy_weights_are_those_of_a_checkpoint_of_the_same_names(tmp_path):
    """Untied, the head changes nothing of what the others draw: order and neighbours do not matter."""
    checkpoint(tmp_path, "llama_mha")
    config = read_spec(tmp_path)
    one, other = dummy(config), dummy(dataclasses.replace(config, tie_word_embeddings=True))
    assert other.head is None
    np.testing.assert_array_equal(one.embedding.table[...], other.embedding.table[...])
    np.testing.assert_array_equal(one.layers[1].mlp.gate_up.kernel[...], other.layers[1].mlp.gate_up.kernel[...])


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"one of Llama, .*MambaForCausalLM"):
        load(tmp_path)


def test_a_family_is_one_record(tmp_path, monkeypatch):
    checkpoint(tmp_path, "llama_mha")
    text = (tmp_path / "config.json").read_text().replace("LlamaForCausalLM", "NewForCausalLM")
    (tmp_path / "config.json").write_text(text)
    monkeypatch.setitem(FAMILIES, "NewForCausalLM", FAMILIES["LlamaForCausalLM"])
    assert isinstance(load(tmp_path), Decoder)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path, caplog, is_equal):
    """The two differ in the last number, so that all of them are compared."""
    tensors = random_tensors("llama_tied", seed=1)
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 0 if is_equal else 0.25
    write_checkpoint(tmp_path, "llama_tied", {**tensors, "lm_head.weight": head})
    for kind in ("safetensors", "orbax"):
        directory = tmp_path if kind == "safetensors" else tmp_path / "made"
        if kind == "orbax":
            convert(tmp_path, directory)
        model = load(directory)
        assert (model.head is None) == is_equal
        assert is_equal or np.array_equal(model.head[...], head.T)
    assert ("which is used" in caplog.text) != is_equal and len(caplog.records) == (0 if is_equal else 3)


def test_zeros_without_eval_shape(tmp_path):
    checkpoint(tmp_path, "llama_mha")
    model = build_model(read_spec(tmp_path), jnp.float32)
    assert not any(leaf.any() for leaf in leaves(model))


@pytest.mark.parametrize(
    ("name", "platform", "dtype"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "gpu", "bfloat16"),
        ("auto", "tpu", "bfloat16"),
        ("float16", "cpu", "float16"),
    ],
)
def test_dtype_auto(name, platform, dtype):
    assert resolve_dtype(name, platform) == jnp.dtype(dtype)
