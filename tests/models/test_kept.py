"""Published kernels stay in their few bits, and a model computes with them what it computes with restored ones."""

import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jsg.config import EngineConfig
from jsg.engine import dry_run
from jsg.engine.device import fp8_kernels
from jsg.engine.device.cards import NAMES
from jsg.engine.device.panels import lay_out
from jsg.engine.dry_run import weight_bytes
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.inputs import Panels
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model, load_model, with_kept
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import AXES
from tests.golden.variants import VARIANTS, random_tensors
from tests.models.packers import FORMS, Form, fp8, write, write_packed
from tests.models.paged import PagedModel

WIDE = {"wide": {**VARIANTS["llama_mha"], "hidden_size": 128, "intermediate_size": 256}}
BLOCKS = Form({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8((128, 128), "_scale_inv"))
CASES = {
    **{name: form for name, form in FORMS.items() if name != "block" and not name.startswith("fp8")},
    "blocks of 128": BLOCKS,
}
FAST = ("awq",)
PROMPT = list(range(20, 50))


def written(directory: Path, variant: str, form: Form) -> tuple[Path, Path]:
    """The directories of a checkpoint whose projections are packed, and of one with what they mean."""
    with mock.patch.dict(VARIANTS, WIDE):
        config, tensors = VARIANTS[variant], random_tensors(variant, 1)
    there, plain = directory / "kept", directory / "plain"
    restored = write_packed(there, config, form, tensors)
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    write(plain / "model.safetensors", restored)
    return there, plain


def params(model: nnx.Module) -> dict[tuple[Any, ...], Any]:
    return {path: node.get_value() for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)}


def answer(config: ModelSpec, model: nnx.Module) -> tuple[np.ndarray, list[int]]:
    """The logits of a prompt and of the likeliest tokens after it, and these tokens."""
    paged, tokens = PagedModel(config, model), []
    logits = [paged.extend({1: PROMPT})[1]]
    for _ in range(6):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(paged.decode({1: tokens[-1]})[1][None])
    return np.concatenate(logits), tokens


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in CASES])
def test_a_kept_model_computes_what_the_restored_one_computes(tmp_path: Path, name: str):
    there, plain_there = written(tmp_path, "wide", CASES[name])
    config = with_kept(there, read_spec(there))
    plain, model = load_model(plain_there, read_spec(plain_there)), load_model(there, config)
    kept = {path: value for path, value in params(model).items() if isinstance(value, Quantised)}
    has_order = next(iter(kept.values())).form.has_order
    assert len(kept) == (2 if has_order else 4) * config.num_layers
    restore = jax.jit(lambda kept: {path: value.restored(jnp.float32) for path, value in kept.items()})
    for path, value in restore(kept).items():
        rounding = 2e-7 if kept[path].form.has_factor else 0
        np.testing.assert_allclose(value, params(plain)[path], rtol=rounding, err_msg=str(path))
    expected, tokens = answer(config, plain)
    lay_out(model)
    assert len(kept) == sum(isinstance(value, Panels) and value.form is not None for value in params(model).values())
    found, chosen = answer(config, model)
    np.testing.assert_allclose(found, expected, atol=5e-5)
    assert chosen == tokens


@pytest.mark.parametrize("name", ["w4a16 zeros", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_experts_are_kept_too(tmp_path: Path, name: str):
    there, plain_there = written(tmp_path, "mixtral", FORMS[name])
    config = with_kept(there, read_spec(there))
    plain, model = load_model(plain_there, read_spec(plain_there)), load_model(there, config)
    kept = [path for path, value in params(model).items() if isinstance(value, Quantised)]
    assert len(kept) == 5 * config.num_layers and sum("down" in path for path in kept) == config.num_layers
    expected, tokens = answer(config, plain)
    lay_out(model)
    assert len(kept) == sum(isinstance(value, Panels) and value.form is not None for value in params(model).values())
    found, chosen = answer(config, model)
    np.testing.assert_allclose(found, expected, atol=5e-5)
    assert chosen == tokens


def test_what_is_made_of_several_forms_is_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Each of the projections that are joined has an order of its own."""
    there, _ = written(tmp_path, "wide", FORMS["gptq order"])
    with caplog.at_level(logging.INFO, "jsg.models.loading"):
        load_model(there, read_spec(there))
    num_layers = read_spec(there).num_layers
    assert f"{5 * num_layers} kernels in few bits" in caplog.text


def test_the_plan_counts_what_is_held(tmp_path: Path):
    there, _ = written(tmp_path, "wide", FORMS["awq"])
    config = with_kept(there, read_spec(there))
    loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(load_model(there, config))))
    total, restored = weight_bytes(config, jnp.dtype(jnp.float32), "none", 1, 1)
    assert total == loaded and restored == 4 * 128 * 2 * 256


def test_the_plan_restores_no_kernel_in_e4m3_where_rows_are_rounded_to_it(tmp_path: Path):
    there, _ = written(tmp_path, "wide", BLOCKS)
    config = with_kept(there, read_spec(there))
    laid_out = load_model(there, config)
    fp8_kernels.lay_out(laid_out)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(laid_out)))
    assert weight_bytes(config, jnp.dtype(jnp.float32), "none", 1, 1) == (held, 4 * 256 * 128)
    assert weight_bytes(config, jnp.dtype(jnp.float32), "none", 1, 1, rounds_rows=True) == (held, 0)
    with mock.patch.object(dry_run, "largest_step_bound", wraps=dry_run.largest_step_bound) as bound:
        dry_run._fits(EngineConfig(model_path=str(there)), there, config, None)
    restored = {name: call.kwargs["restored_bytes"] for name, call in zip(NAMES, bound.call_args_list, strict=True)}
    assert restored["h200"] == restored["a100_80gb"] == 0  # the latter reads e4m3 as it is, for rows of 16 bits


def test_devices_share_out_whole_groups(tmp_path: Path):
    there, _ = written(tmp_path, "wide", FORMS["awq"])
    config = with_kept(there, read_spec(there)).over_devices(2)
    mesh = jax.sharding.AbstractMesh((1, 2), AXES)
    down = abstract_model(config, jnp.float32, mesh=mesh).layers[0].mlp.down.kernel.get_value()
    parts = (down.values, down.scale, down.zero)
    assert [part.sharding.shard_shape(part.shape)[0] for part in parts] == [64, 4, 4]
    with jax.sharding.use_abstract_mesh(mesh):  # in which `jsg compile --target` traces
        assert abstract_model(config, jnp.float32, mesh=mesh).layers[0].mlp.down.kernel.get_value() == down
        abstract_model(config, jnp.float32, "int8", mesh)
    wrong = jax.sharding.AbstractMesh((1, 16), AXES)
    restored = abstract_model(config, jnp.float32, mesh=wrong).layers[0].mlp.down.kernel.get_value()
    assert restored.dtype == jnp.float32 and restored.sharding.shard_shape(restored.shape)[0] == 16


def test_kernels_may_be_rounded_again(tmp_path: Path):
    there, plain_there = written(tmp_path, "wide", FORMS["awq"])
    made, plain = (load_model(each, read_spec(each), quantization="int8") for each in (there, plain_there))
    for path, value in params(plain).items():
        jax.tree.map(np.testing.assert_array_equal, params(made)[path], value)
