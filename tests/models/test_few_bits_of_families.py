"""Models of each family with kernels in few bits, beside the same with what these mean."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jsg.errors import ModelError
from jsg.kernels_pallas.few_bits import Quantised
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model, load_model, with_own_head
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import AXES
from tests.golden.families import covering, mark, one_of_each
from tests.golden.variants import LLAMA, VARIANTS, random_tensor, random_tensors, tensor_shapes
from tests.models.packers import FORMS, MXFP4, Form, packed, write, write_packed
from tests.models.paged import PagedModel
from tests.own_process import said

SMALL = {**LLAMA, "num_key_value_heads": 2, "intermediate_size": 96}
ORDERED = ("w4a16 order", "gptq order", "gptq 8 bits")
CHANNEL = Form(FORMS["w4a16 channel"].config, packed(4, 0))
"""It takes any number of inputs."""


def written(directory: Path, config: dict[str, Any], form: Form, tensors: dict[str, np.ndarray]) -> tuple[Path, Path]:
    """The directories of a packed model, and of one with what its tensors mean."""
    whole = write_packed(directory / "packed", config, form, tensors)
    (directory / "whole").mkdir()
    (directory / "whole" / "config.json").write_text(json.dumps(config))
    write(directory / "whole" / "model.safetensors", whole)
    return directory / "packed", directory / "whole"


def restoring(packed_model: Path, whole: Path) -> ModelSpec:
    """The model of a packed checkpoint, which is not told which kernels it can keep in few bits."""
    return dataclasses.replace(with_own_head(whole, read_spec(whole)), names=read_spec(packed_model).names)


@jax.jit
def restore(kernels: list[Quantised]) -> list[jax.Array]:
    return [kernel.restored(np.float32) for kernel in kernels]


def values(directory: Path, spec: ModelSpec) -> list[np.ndarray]:
    """What parameters mean."""
    model = load_model(directory, spec, compares_head=False)
    params = [node.get_value() for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)]
    restored = iter(restore([value for value in params if isinstance(value, Quantised)]))
    return [np.asarray(next(restored) if isinstance(value, Quantised) else value) for value in params]


def assert_same(packed_model: Path, whole: Path) -> None:
    """Restored kernels are equal to the bit; of kept ones the order of factors may differ."""
    wanted = values(whole, with_own_head(whole, read_spec(whole)))
    for one, other in zip(values(packed_model, restoring(packed_model, whole)), wanted, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
    for one, other in zip(
        values(packed_model, with_own_head(packed_model, read_spec(packed_model))), wanted, strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-7, atol=0)


def small_tensors() -> dict[str, np.ndarray]:
    return {name: random_tensor(name, name, shape) for name, shape in tensor_shapes(SMALL).items()}


VARIANTS_OF_FORMS = [("mixtral", "fp8"), ("phi3", "w4a16 channel"), ("gpt_oss", "mxfp4"), ("llama4", "fbgemm")]
SLOW = covering(one_of_each())


@pytest.mark.parametrize(
    ("variant", "form"),
    [
        *VARIANTS_OF_FORMS,
        *(
            pytest.param(variant, form, marks=mark(variant, (), SLOW))
            for variant in one_of_each()
            for form in ("fp8", "w4a16 channel")
            if (variant, form) not in VARIANTS_OF_FORMS
        ),
    ],
)
def test_a_model_in_few_bits_is_the_one_with_what_these_mean(tmp_path: Path, variant: str, form: str) -> None:
    """Fused projections, reordered heads, experts by themselves and in stacks."""
    chosen = {**FORMS, "w4a16 channel": CHANNEL, "mxfp4": MXFP4}[form]
    assert_same(*written(tmp_path, VARIANTS[variant], chosen, random_tensors(variant, 0)))


def test_biases_of_zeros_that_gptq_adds_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ wrote one for each module."""
    zeros = {f"model.layers.0.self_attn.{name}_proj.bias": np.zeros(64, np.float16) for name in "qo"}
    packed_model, _ = written(tmp_path / "zeros", SMALL, FORMS["gptq"], small_tensors() | zeros)
    load_model(packed_model, read_spec(packed_model))
    for form, biases in (("gptq", {name: bias + 1 for name, bias in zeros.items()}), ("awq", zeros)):
        packed_model, _ = written(tmp_path / form, SMALL, FORMS[form], small_tensors() | biases)
        with pytest.raises(ModelError, match=r"holds '.*o_proj\.bias', which this architecture does not have"):
            load_model(packed_model, read_spec(packed_model))


def test_what_restoring_costs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Progress counts the bytes of the file."""
    packed_model, whole = written(tmp_path, SMALL, FORMS["w4a16"], small_tensors())
    read_bytes = []
    with caplog.at_level(logging.INFO):
        spec = restoring(packed_model, whole)
        load_model(packed_model, spec, compares_head=False, progress=lambda *counts: read_bytes.append(counts[2]))
    assert "14 kernels in few bits (0.00 GB) are restored to float32 as they are read" in caplog.text
    file_bytes = (packed_model / "model.safetensors").stat().st_size
    assert 0.9 * file_bytes < read_bytes[-1] <= file_bytes


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_restored_model(tmp_path: Path, form: str) -> None:
    logits = []
    for directory in written(tmp_path, SMALL, FORMS[form], small_tensors()):
        spec = read_spec(directory)
        logits.append(PagedModel(spec, load_model(directory, spec)).extend({0: list(range(1, 30))})[0])
    assert np.isfinite(logits[0]).all() and np.abs(logits[0] - logits[1]).max() <= 5e-5


def test_kernels_whose_groups_devices_cannot_share_out_are_restored(tmp_path: Path) -> None:
    """Those that are divided along their outputs are kept."""
    config = {**SMALL, "num_hidden_layers": 1}
    tensors = {name: random_tensor(name, name, shape) for name, shape in tensor_shapes(config).items()}
    directory, _ = written(tmp_path, config, FORMS["w4a16"], tensors)
    spec = with_own_head(directory, read_spec(directory))
    kept = []
    for devices in (1, 2):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1] * devices).reshape(1, -1), AXES)
        params = nnx.iter_graph(abstract_model(spec, np.float32, mesh=mesh))
        values_of = [node.get_value() for _, node in params if isinstance(node, nnx.Param)]
        kept.append(sum(isinstance(value, Quantised) for value in values_of))
    assert kept[0] == kept[1] + 1  # `down_proj` has three groups


@pytest.mark.slow
def test_two_devices_hold_their_own_slices(tmp_path: Path) -> None:
    """Restored ones are cut in words and in groups, and columns may have another order; kept ones in whole groups.

    Two devices restore a kernel with an order that one keeps.
    """
    uneven = {**SMALL, "intermediate_size": 160, "num_attention_heads": 10, "head_dim": 16}
    even = {**uneven, "intermediate_size": 128, "num_attention_heads": 8}
    runs = []
    for form in FORMS:
        for name, config in (("uneven", uneven), *([] if form in ORDERED else [("even", even)])):
            tensors = {name: random_tensor(name, name, shape) for name, shape in tensor_shapes(config).items()}
            directory, _ = written(tmp_path / form / name, config, FORMS[form], tensors)
            options = {"compares_head": name == "even"}
            runs.append({"directory": str(directory), "count": 2, "options": options})
    for run, result in zip(runs, said("tests.models.shared_out", told=runs), strict=True):
        assert result["differing"] == [] and result["num_shared_out"] > 8, run
        assert run["options"]["compares_head"] or result["numbers_read"] == result["numbers_held"], run
