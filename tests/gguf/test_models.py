"""A GGUF file is the model that it was made of: the same records, and the same numbers as its checkpoint."""

import dataclasses
import logging
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from jsg.conversion.convert import convert
from jsg.engine.device.panels import lay_out
from jsg.engine.dry_run import weight_bytes
from jsg.errors import ModelError
from jsg.gguf import folder
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import Form
from jsg.models.checkpoint import open_checkpoint
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model, load_model, with_kept
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import AXES
from jsg.sources import resolve_model
from tests.gguf.models import made, write_twin
from tests.golden.variants import random_tokens
from tests.models.paged import PagedModel, load_directory

SAME = "wide llama_biases mixtral gemma3 phi3_longrope".split()
MORE = "llama_tied llama_linear_rope llama_yarn_rope mistral_window qwen2 qwen3 qwen3_moe phi3".split()
MAX_DIFFERENCE = 5e-5
FORMS = {
    "Q8_0": Form("int8", 32, "float16"),
    "Q4_0": Form("int4", 32, "float16"),
    "Q4_K": Form("uint4", 32, "int8", has_zero=True, has_factor=True, has_step=True, block=256),
    "Q5_K": Form("int8", 32, "int8", has_zero=True, has_factor=True, has_step=True, block=256),
    "Q6_K": Form("int8", 16, "int8", has_factor=True, block=256),
}
"""Types whose numbers are kept in 8 or 4 bits, and how."""


def parameters(model: nnx.Module) -> list[np.ndarray]:
    """The numbers of each parameter, also of those in few bits."""
    values = [node.get_value() for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)]
    restored = iter(restore([x for x in values if isinstance(x, Quantised)]))
    return [np.asarray(next(restored) if isinstance(x, Quantised) else x) for x in values]


@jax.jit
def restore(kernels: list[Quantised]) -> list[jax.Array]:
    return [kernel.restored(np.float32) for kernel in kernels]


def kept(model: nnx.Module) -> dict[str, Form]:
    """How parameters are kept in few bits, by the first of their tensors."""
    params = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)]
    params = [param for param in params if isinstance(param.get_value(), Quantised)]
    return {param.get_metadata("origin").sources[0].name: param.get_value().form for param in params}


def in_float32(spec: ModelSpec) -> str:
    """The records with numbers as a GGUF file has them."""
    return re.sub(r"\d+\.\d{7,}", lambda number: str(np.float32(number[0])), repr(dataclasses.replace(spec, notes=())))


@pytest.mark.parametrize("variant", [*SAME, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_each_architecture_is_its_checkpoint(variant: str, tmp_path: Path):
    model = made(variant)
    directory = resolve_model(str(model.write(tmp_path / "m.gguf")))
    twin = write_twin(tmp_path / "twin", variant, model)
    spec = read_spec(directory)
    assert in_float32(spec) == in_float32(read_spec(twin))
    for ours, theirs in zip(*(parameters(load_model(each, spec)) for each in (directory, twin)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_factors_of_frequencies_give_the_logits_of_llama_3(tmp_path: Path):
    model = made("llama3_rope_v4")
    directories = (
        resolve_model(str(model.write(tmp_path / "m.gguf"))),
        write_twin(tmp_path / "t", "llama3_rope_v4", model),
    )
    tokens = random_tokens("llama3_rope_v4", 0, 100)
    ours, theirs = (PagedModel(*load_directory(each)).extend({0: tokens})[0] for each in directories)
    assert np.abs(ours - theirs).max() < MAX_DIFFERENCE


def test_a_file_a_directory_with_one_and_split_files_are_the_same_model(tmp_path: Path):
    model = made("qwen2")
    whole = resolve_model(str(model.write(tmp_path / "one" / "m.gguf")))
    (tmp_path / "one" / "mmproj-F16.gguf").touch()  # what makes pictures rows, which jsg does not read
    first, second, _ = model.write_split(tmp_path / "split", 3)
    ways = [resolve_model(str(path)) for path in (tmp_path / "one", tmp_path / "split", second)]
    assert ways[0] == whole and ways[1] == ways[2] != whole
    spec = read_spec(whole)
    assert read_spec(ways[1]) == spec
    for ours, theirs in zip(*(parameters(load_model(each, spec)) for each in (whole, ways[1])), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    first.unlink()
    with pytest.raises(ModelError, match="must have all of them, but m-00001"):
        resolve_model(str(tmp_path / "split"))


def test_of_several_files_one_must_be_named(tmp_path: Path):
    model = made("qwen2")
    for name in ("b-Q8_0", "a-Q4_K"):
        path = model.write(tmp_path / f"{name}.gguf")
    with pytest.raises(ModelError, match="name the file in place of"):
        resolve_model(str(tmp_path))
    assert read_spec(resolve_model(str(path))).vocab_size == 512
    (tmp_path / "model.safetensors").touch()  # other weights count more
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_directory_is_made_once_and_again_when_the_file_changes(tmp_path: Path, home: Path):
    path = made("qwen2").write(tmp_path / "m.gguf")
    first = resolve_model(str(path))
    assert first.is_relative_to(home / ".cache" / "jsg" / "gguf") and resolve_model(str(path)) == first
    assert oct((home / ".cache" / "jsg").stat().st_mode)[-3:] == "700"
    os.utime(path, (1, 1))
    second = resolve_model(str(path))
    assert second != first and first.is_dir()
    path.unlink()
    other = resolve_model(str(made("qwen3").write(tmp_path / "other.gguf")))
    assert not first.exists() and not second.exists() and other.is_dir()


def test_without_a_home_the_directory_is_temporary(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    path = made("qwen2").write(tmp_path / "m.gguf")
    monkeypatch.setenv("HOME", str(path))  # a file, in which nothing can be made, even by root
    gone: list[tuple[object, ...]] = []
    monkeypatch.setattr(folder.atexit, "register", lambda *arguments, **_: gone.append(arguments))
    directory = resolve_model(str(path))
    assert read_spec(directory).vocab_size == 512
    (remove, root) = gone[0]
    remove(root)
    assert not directory.exists()


def test_others_must_not_write_to_the_cache(tmp_path: Path, home: Path):
    cache = home / ".cache" / "jsg" / "gguf"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    path = made("qwen2").write(tmp_path / "m.gguf")
    assert not resolve_model(str(path)).is_relative_to(home)


def test_a_converted_model_has_the_restored_numbers(tmp_path: Path):
    source = resolve_model(str(made("qwen3").write(tmp_path / "m.gguf")))
    convert(source, tmp_path / "new")
    spec = read_spec(tmp_path / "new")
    assert spec == read_spec(source)
    for ours, theirs in zip(*(parameters(load_model(each, spec)) for each in (tmp_path / "new", source)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with open_checkpoint(source) as before, open_checkpoint(tmp_path / "new") as after:
        assert before.forms() and not after.forms()
        assert {after.listed()[name].dtype for name in before.forms()} == {"F32"}
    with pytest.raises(ModelError, match=r"kernels are not in few bits, but those of SRC are; convert the one"):
        convert(source, tmp_path / "few", quantization="int8")


def test_the_log_says_what_restoring_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    directory = resolve_model(str(made("wide").write(tmp_path / "m.gguf")))
    with caplog.at_level(logging.INFO):
        load_model(directory, read_spec(directory), dtype="bfloat16")
    (said,) = [record.message for record in caplog.records if "few bits" in record.message]
    assert re.fullmatch(
        r"\d+ kernels in few bits \(0.00 GB\) are restored to bfloat16 as they are read, .* 0.00 GB", said
    )


@pytest.mark.parametrize(("kind", "form"), FORMS.items())
def test_numbers_with_a_scale_of_their_group_are_kept(kind: str, form: Form, tmp_path: Path):
    """As they are in the file, in all products and on several devices, and the memory plan counts them so."""
    model = made(
        "wide", kind_of=lambda stored, length: kind if length % (256 if kind.endswith("_K") else 32) == 0 else "F16"
    )
    directory = resolve_model(str(model.write(tmp_path / "m.gguf")))
    twin = write_twin(tmp_path / "twin", "wide", model)
    spec = with_kept(directory, read_spec(directory))
    ours, theirs = load_model(directory, spec), load_model(twin, read_spec(twin))
    assert set(kept(ours).values()) == {form} and len(kept(ours)) == (3 if kind.endswith("_K") else 12)
    for here, there in zip(parameters(ours), parameters(theirs), strict=True):
        np.testing.assert_array_equal(here, there)
    planned, _ = weight_bytes(spec, np.dtype(np.float32), "none", 1, 1)
    assert planned == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(ours)))
    lay_out(ours)
    tokens = random_tokens("wide", 0, 40)
    logits = [PagedModel(read_spec(directory), each).extend({0: tokens})[0] for each in (ours, theirs)]
    assert np.abs(logits[0] - logits[1]).max() < MAX_DIFFERENCE


def test_q4_k_m_is_kept(tmp_path: Path):
    """All kernels, also that of queries and keys in Q4_K and values in Q6_K, which have one form in 8 bits."""
    most = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "attn_output.weight": "Q8_0"}
    model = made("wider", lambda name, _: most.get(name.split(".", 2)[-1], "Q4_K"))
    directory = resolve_model(str(model.write(tmp_path / "m.gguf")))
    twin = write_twin(tmp_path / "twin", "wider", model)
    ours, theirs = (load_model(each, with_kept(each, read_spec(each))) for each in (directory, twin))
    joined = Form("int8", 16, "int8", has_zero=True, has_factor=True, has_step=True, block=256)
    last = {name.rpartition(".")[0].rpartition(".")[2]: form for name, form in kept(ours).items()}
    assert last == {
        "q_proj": joined,
        "o_proj": FORMS["Q8_0"],
        "gate_proj": FORMS["Q4_K"],
        "down_proj": FORMS["Q6_K"],
    }
    for here, there in zip(parameters(ours), parameters(theirs), strict=True):
        np.testing.assert_array_equal(here, there)


def test_what_devices_cannot_share_out_in_whole_blocks_is_restored(tmp_path: Path):
    model = made("wider", lambda name, length: "Q4_K" if length == 512 else "Q8_0")
    directory = resolve_model(str(model.write(tmp_path / "m.gguf")))
    spec = with_kept(directory, read_spec(directory))
    for count, has_blocks in ((1, True), (2, True), (4, False)):
        mesh = None if count == 1 else AbstractMesh((1, count), AXES)
        names = kept(abstract_model(spec, np.dtype("bfloat16"), "none", mesh))
        assert any("down_proj" in name for name in names) == has_blocks
        assert any("o_proj" in name for name in names)


def test_layers_in_other_bits_are_traced_by_themselves(tmp_path: Path):
    model = made("wide")
    directory, twin = resolve_model(str(model.write(tmp_path / "m.gguf"))), write_twin(tmp_path / "twin", "wide", model)
    ours, theirs = load_directory(directory), load_directory(twin)
    found = {name.split(".")[2]: form for name, form in kept(ours[1]).items() if "down_proj" in name}
    assert found == {"0": FORMS["Q4_K"], "1": FORMS["Q5_K"], "2": FORMS["Q6_K"]}
    tokens = random_tokens("wide", 0, 40)
    logits = [PagedModel(*each).extend({0: tokens})[0] for each in (ours, theirs)]
    assert np.abs(logits[0] - logits[1]).max() < MAX_DIFFERENCE
