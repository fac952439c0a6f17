"""`--fp8-products`: rows are rounded to e4m3 where kernels are, each by itself."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jsg.engine.child.protocol import Progress
from jsg.engine.device import fp8_kernels
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import Form
from jsg.kernels_pallas.inputs import Fp8Kernel
from jsg.models.config import read_spec
from jsg.models.loading import load_model
from jsg.models.tensor_parallel import AXES
from tests.engine import small
from tests.engine.shared_out import answers
from tests.engine.test_kv_dtype import score
from tests.golden.variants import random_tokens
from tests.models.fp8_reference import CONFIGS, KINDS, write_model


def kernels_of(model: nnx.Module, kind: type) -> list:
    values = (node.get_value() for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param))
    return [value for value in values if isinstance(value, kind)]


@pytest.mark.parametrize(
    ("form", "taken"),
    [
        (Form("e4m3"), True),
        (Form("e4m3", 128, "bfloat16"), True),
        (Form("e4m3", 24), False),
        (Form("int8"), False),
        (Form("e2m1", 16, "float8_e4m3fn"), False),
    ],
    ids=str,
)
def test_kernels_in_e4m3_are_taken(form: Form, taken: bool):
    assert fp8_kernels.takes(form) == taken


def test_a_kernel_has_its_inputs_last_and_the_same_numbers(small_model: pathlib.Path):
    config = read_spec(small_model)
    before, after = (load_model(None, config, load_format="dummy", quantization="fp8") for _ in range(2))
    fp8_kernels.lay_out(after)
    of_before, of_after = kernels_of(before, Quantised), kernels_of(after, Fp8Kernel)
    assert len(of_before) == len(of_after) > 0 and not kernels_of(after, Quantised)
    for old, new in zip(of_before, of_after, strict=True):
        np.testing.assert_array_equal(np.moveaxis(np.asarray(new.values), -1, old.axis), old.values)
        np.testing.assert_array_equal(new.scale, old.scale)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_shape_of_a_kernel_is_laid_out_with_its_sharding(axis: int):
    """As devices share out outputs or inputs of a kernel, so they do afterwards."""
    mesh = AbstractMesh((1, 2), AXES)
    spec: list[tuple[str, ...] | None] = [None, None]
    spec[axis] = AXES
    with jax.sharding.use_abstract_mesh(mesh):
        values = jax.ShapeDtypeStruct((64, 32), jnp.float8_e4m3fn, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    whole = jax.ShapeDtypeStruct((1, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, None)))
    made = fp8_kernels._laid_out(Quantised(values, whole, Form("e4m3")))
    assert made.values.shape == (32, 64) and made.values.sharding == NamedSharding(mesh, PartitionSpec(*spec[::-1]))
    assert made.scale.shape == (1, 32) and made.scale.sharding == whole.sharding


def test_an_engine_answers_nearly_as_with_long_rows(core_of, small_model: pathlib.Path, compile_cache_dir: str):
    """And says that its products are in e4m3. A token's score does not depend on the tokens beside it."""
    prompts = np.random.default_rng(0).integers(2, small.VOCAB, (4, 150))
    expected, _ = score(core_of(**small.DETERMINISTIC), prompts)
    told: list[Progress] = []
    knobs = {**small.DETERMINISTIC, "quantization": "fp8", "fp8_products": "on"}
    core = small.make_core(small_model, compile_cache_dir, report=told.append, **knobs)
    assert ", kernels in fp8, products in e4m3, " in next(each for each in told if each.stage == "plan").text
    found, _ = score(core, prompts)
    again, _ = score(core, prompts[2:])
    np.testing.assert_array_equal(found[len(found) // 2 :], again)
    off = np.abs(found - expected)
    assert 0 < off.mean() < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("shape", CONFIGS)
def test_two_devices_round_their_own_parts_of_rows(tmp_path: pathlib.Path, compile_cache_dir: str, shape: str):
    """Scores of a prompt and its answer are those of the definition, with one device and with two.

    Where a kernel has a scale for each block, two devices round in the same groups as one. Means are compared, because
    of so many numbers one may be so near a tie that it is rounded apart, which changes later scores by up to 0.04.
    """
    runs, expected = [], []
    for kind in KINDS:
        written = write_model(tmp_path / kind, shape, kind)
        run = {"variant": shape, "directory": str(written.directory), "cache_dir": compile_cache_dir, "num_new": 8}
        run |= {"num_requests": 2, "knobs": {"fp8_products": "on", **small.DETERMINISTIC}}
        for count in (1, 2):
            runs.append({**run, "tp_size": count})
            expected.append((written, count))
    for answer, (written, count) in zip(answers(runs), expected, strict=True):
        assert ", products in e4m3" in answer["plan"]
        tokens = [*random_tokens(shape, 0, 100), *answer["tokens"]["scored"]]
        found = [*answer["prompt_logprobs"], *answer["logprobs"]]
        own, other, unrounded = (
            np.abs(found - scores_of(logits, tokens)[-len(found) :]).mean()
            for logits in (
                written.logits(tokens, count),
                written.logits(tokens, 3 - count),
                written.logits(tokens, round_rows=False),
            )
        )
        assert own < 4e-3 and own < unrounded / 2, (written.directory.name, count)
        assert (own < other / 2) == (written.block is None), (written.directory.name, count)


def scores_of(logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    """The log-probability of each token after the first."""
    scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return scores[np.arange(len(tokens) - 1), tokens[1:]]
