"""Kernels in few bits: what each number becomes, which parameters are quantised, and how little the answers change."""

import itertools
import json
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from bench.device.shapes import MIXTRAL_8X7B, MIXTRAL_8X22B
from bench.shapes import LLAMA_8B, write_model
from jsg.conversion.convert import convert
from jsg.errors import ModelError
from jsg.kernels_pallas.few_bits import Quantised
from jsg.models import loading
from jsg.models.checkpoint import Checkpoint
from jsg.models.config import read_spec
from jsg.models.layers import project
from jsg.models.loading import abstract_model, load_model
from jsg.models.quantise import BYTES_PER_NUMBER, FORMS, STORED, quantise
from jsg.models.registry import FAMILIES
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import AXES
from jsg.sources import resolve_model
from tests.golden.families import covering, mark, one_of_each
from tests.golden.record import DATA
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint
from tests.golden.vision_variants import VISION_VARIANTS
from tests.models.paged import PagedModel
from tests.models.sizes import num_parameters
from tests.models.specs import changed
from tests.parity import Parity

LIMIT = {"int8": 127.0, "fp8": 448.0}
IN_NUMPY = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}
CHANNELS, WIDTH = 7, 40


def projection() -> np.ndarray:
    """Channels of very different sizes, of which one is zero and one nearly."""
    numbers = np.random.default_rng(0).normal(size=(CHANNELS, WIDTH)).astype(np.float32)
    return numbers * np.array([1, 1e-3, 1e4, 0, 1e-44, 3e-38, 1e36], np.float32)[:, None]


@pytest.mark.parametrize("name", STORED)
def test_no_number_is_off_by_more_than_half_a_step(name: str):
    tensor = projection()
    values, scale = (np.asarray(part) for part in quantise(tensor, "w", FORMS[name])[:2])
    normal = [0, 1, 2, 6]
    assert values.dtype == IN_NUMPY[name] and scale.dtype == np.float32 and scale.shape == (CHANNELS, 1)
    np.testing.assert_allclose(scale[normal, 0], np.abs(tensor[normal]).max(1) / LIMIT[name], rtol=2e-7)
    assert np.isfinite(scale).all() and (scale > 0).all() and not values[3].any()

    restored = values.astype(np.float64) * scale
    steps = np.full_like(restored, 0.5) if name == "int8" else np.maximum(np.abs(tensor / scale) / 16, 2**-10)
    error = np.abs(restored - tensor)
    assert (error <= (1 + 1e-6) * steps * scale)[normal].all()
    assert error[3:6].max() < np.finfo(np.float32).tiny, "what is not normal may become zero"
    assert (np.abs(values[normal].astype(np.float32)).max(1) == LIMIT[name]).all(), "the range is used to its end"


@pytest.mark.parametrize("name", STORED)
def test_ties_go_to_even(name: str):
    """Channels whose scale is 1: the numbers are their own steps."""
    numbers = {"int8": [127, 0.5, 1.5, -2.5, 126.5], "fp8": [448, 17, 19, -17, 2**-10]}[name]
    kept = {"int8": [127, 0, 2, -2, 126], "fp8": [448, 16, 20, -16, 0]}[name]
    values, scale, *_ = quantise(jnp.array([numbers]), "w", FORMS[name])
    assert scale.tolist() == [[1]] and values.astype(np.float32).tolist() == [kept]


def test_every_e4m3_number_is_rounded_as_numpy_rounds_it():
    numbers = np.concatenate([np.linspace(-448, 448, 3001, dtype=np.float32), np.geomspace(1e-4, 448, 3000)])
    values, *_ = quantise(jnp.asarray(numbers[None], jnp.float32), "w", FORMS["fp8"])
    expected = numbers.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(values)[0].view(np.uint8), expected.view(np.uint8))


def restored(kernel: Quantised) -> np.ndarray:
    return np.asarray(jax.jit(Quantised.restored, static_argnums=1)(kernel, "float32"), np.float64)


def test_in_4_bits_no_number_is_off_by_more_than_half_a_step():
    """Of its group's scale, whichever side has the larger numbers; the scale leaves bfloat16 room for each product."""
    tensor = np.repeat(projection(), 4, 1)[:, :128].reshape(CHANNELS, 4, 32)
    tensor[0, :2] = [[0, 7.25, -8, *[-0.5] * 29], [8, -7, 1.5, 2.5, *[0.0] * 28]]
    made = quantise(tensor.reshape(CHANNELS, 128), "w", FORMS["int4"])
    values, scale, *_ = made
    assert values.shape == (CHANNELS, 64) and scale.shape == (CHANNELS, 4) and scale.dtype == jnp.bfloat16
    kernel = jax.tree.map(lambda part: jnp.asarray(part.T), made)
    assert kernel.shape == (128, CHANNELS)
    found, steps = restored(kernel).T.reshape(tensor.shape), np.abs(np.asarray(scale, np.float64))[..., None]
    normal = [0, 1, 2, 6]
    assert (np.abs(found - tensor) <= (1 + 1e-6) / 2 * steps)[normal].all()
    above, below = tensor.max(2), -tensor.min(2)
    least = np.maximum(np.maximum(above, below) / 8, np.minimum(above, below) / 7)[..., None]
    assert (steps <= (1 + 1 / 16) * least)[normal].all(), "a step is no longer than it must be"
    assert np.abs(found - tensor)[3:6].max() < np.finfo(np.float32).tiny, "what is not normal may become zero"
    assert found[0, :2, :4].tolist() == [[0, 7 * 1.0625, -8 * 1.0625, 0], [8, -7, 2, 2]], "ties go to even"
    np.testing.assert_array_equal(restored(kernel), np.asarray(kernel.restored(jnp.bfloat16), np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BYTES_PER_NUMBER)
def test_a_product_is_that_with_the_kernel_it_stands_for(name: str, dtype: str):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 64), np.float32)).astype(dtype)
    made = quantise(rng.standard_normal((6 * 8, 64), np.float32), "w", FORMS[name])
    kernel = jax.tree.map(lambda part: jnp.asarray(part.T.reshape(-1, 6, 8)), made)
    exact = np.tensordot(np.asarray(x, np.float64), restored(kernel), 1)
    found = project(x, kernel)
    assert found.shape == (5, 6, 8) and found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found), exact, rtol=0, atol=2e-5)
    assert project(x, kernel, jnp.bfloat16).dtype == jnp.bfloat16


def config_of(variant: str, directory: pathlib.Path, seed: int = 1) -> ModelSpec:
    write_checkpoint(directory, variant, random_tensors(variant, seed))
    return read_spec(directory)


def params(model: nnx.Module) -> dict[str, object]:
    return {
        ".".join(map(str, path)): node.get_value()
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Param)
    }


def num_bytes(model: nnx.Module) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize(
    ("variant", "name", "per_layer"),
    [
        ("llama_biases", "int8", 4),
        ("llama_biases", "int4", 4),
        *(pytest.param("mixtral", name, 5, marks=pytest.mark.slow) for name in ("int8", "int4")),
        pytest.param("gpt_oss", "int8", 5, marks=pytest.mark.slow),
    ],
)
def test_projections_and_experts_are_quantised_and_nothing_else(tmp_path, variant: str, name: str, per_layer: int):
    config = config_of(variant, tmp_path)
    plain, small = (abstract_model(config, jnp.bfloat16, each) for each in ("none", name))
    found = params(small)
    quantised = {path for path, value in found.items() if isinstance(value, Quantised)}
    assert len(quantised) == per_layer * config.num_layers
    kept = "norm", "bias", "router", "embedding", "head"
    assert not [path for path in quantised if any(word in path for word in kept)]
    saved = 0
    for value in (found[path] for path in quantised):
        scale_bytes = 4 * value.scale.size if name == "int8" else 0  # a group's part of it is in the bytes of a number
        saved += (2 - BYTES_PER_NUMBER[name]) * np.prod(value.shape) - scale_bytes
    assert num_bytes(small) == num_bytes(plain) - saved
    assert num_parameters(config) == sum(value.size for value in params(plain).values())
    loaded = params(load_model(tmp_path, config, dtype=jnp.bfloat16, quantization=name))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), loaded) == jax.tree.map(lambda x: (x.shape, x.dtype), found)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_channels_stand_where_their_kernels_do(tmp_path, name: str):
    """Joint kernels and stacks of experts: each column beside its own scale, and each group of its inputs."""
    config = config_of("mixtral", tmp_path)
    plain, small = (params(load_model(tmp_path, config, quantization=each)) for each in ("none", name))
    numbers = jax.jit(lambda kernels: {path: kernel.restored(jnp.float32) for path, kernel in kernels.items()})(
        {path: value for path, value in small.items() if isinstance(value, Quantised)}
    )
    for path, value in small.items():
        if path in numbers:
            axis = -2 if value.scale.ndim == 3 and "mlp" in path else 0
            steps = np.abs(np.asarray(value.scale, np.float32))
            if name == "int8":
                np.testing.assert_allclose(steps, np.abs(plain[path]).max(axis, keepdims=True) / 127, rtol=2e-7)
            steps = steps.repeat(value.shape[axis] // steps.shape[axis], axis)
            assert (np.abs(np.asarray(numbers[path]) - plain[path]) <= 0.501 * steps).all()
        else:
            np.testing.assert_array_equal(value, plain[path])


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_one_tensor_is_read_at_a_time_where_pieces_are_no_help(tmp_path, monkeypatch, kind: str):
    """Of safetensors there is none; of columns of chunks a scale needs all."""
    config, directory = config_of("mixtral", tmp_path), tmp_path
    monkeypatch.setattr(loading.os, "cpu_count", lambda: 4)
    if kind == "orbax":
        directory = tmp_path / "made"
        convert(tmp_path, directory, tp_size=2)
    reading, most = set[int](), 0
    read, two_read = Checkpoint.read, threading.Event()

    def spy(self: Checkpoint, name: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        nonlocal most
        if not name.endswith("w2.weight"):  # the experts' down projections
            return read(self, name, slices)
        reading.add(threading.get_ident())
        most = max(most, len(reading))
        if most > 1:
            two_read.set()
        two_read.wait(0.01 if kind == "orbax" else 30)  # where nobody else may read, nobody comes
        numbers = read(self, name, slices)
        reading.discard(threading.get_ident())
        return numbers

    monkeypatch.setattr(Checkpoint, "read", spy)
    load_model(directory, config, quantization="int8")
    assert most == 1 if kind == "orbax" else most > 1


@pytest.mark.parametrize(("width", "num_devices"), [(100, 1), (96, 2)])
def test_inputs_that_are_not_whole_groups_are_refused(tmp_path, width: int, num_devices: int):
    config = changed(config_of("llama_mha", tmp_path), mlp={"inner": width})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1] * num_devices).reshape(1, -1), AXES)
    name = re.escape("model.layers.0.mlp.down_proj.weight")
    with pytest.raises(ModelError, match=f"--quantization int4 needs .*{width}.*{name}|{name} has {width}; int8"):
        abstract_model(config, jnp.float32, "int4", mesh)
    assert abstract_model(config, jnp.float32, "int8", mesh)


def test_what_encodes_images_stays_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VISION_VARIANTS["llava"]))
    model = abstract_model(read_spec(tmp_path), jnp.float32, "int8")
    in_8_bits = {path for path, value in params(model).items() if isinstance(value, Quantised)}
    assert len(in_8_bits) == 4 * 2 and all(path.startswith("text.") for path in in_8_bits)


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "models.md"
PUBLISHED = {"Llama 3 8B": LLAMA_8B, "Mixtral 8x7B": MIXTRAL_8X7B, "Mixtral 8x22B": MIXTRAL_8X22B}
UNITS = {"GB": 1e9, "MB": 1e6}


@pytest.mark.parametrize(
    "name",
    [
        "the embedded model",
        *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED),
    ],
)
def test_the_page_says_what_weights_take(tmp_path, name: str):
    """Nothing is allocated: these are the bytes that the memory plan counts."""
    directory = write_model(tmp_path, PUBLISHED[name]) if name in PUBLISHED else resolve_model("tiny")
    config = read_spec(directory)
    plain, small, same, smallest = (abstract_model(config, jnp.bfloat16, each) for each in ("none", *BYTES_PER_NUMBER))
    assert num_bytes(small) == num_bytes(same)
    whole = [value for value in params(small).values() if not isinstance(value, Quantised)]
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} | ")]
    shown = re.findall(r"([\d.]+) ([GM]B)", row)
    counted = *map(num_bytes, (plain, small, smallest)), 2 * sum(value.size for value in whole)
    assert shown == [(f"{count / UNITS[unit]:.2f}", unit) for count, (_, unit) in zip(counted, shown, strict=True)]


@pytest.mark.parametrize("number", [np.nan, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.inf, -np.inf))])
def test_a_number_that_is_not_finite_is_refused_by_the_tensor_name(tmp_path, number: float):
    config, tensors = config_of("mixtral", tmp_path), random_tensors("mixtral", seed=1)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    tensors[name][3, 4] = number
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} must hold finite numbers to be quantised"):
        load_model(tmp_path, config, quantization="fp8")
    assert load_model(tmp_path, config)


def test_dummy_weights_are_those_of_the_unquantised_model_rounded(tmp_path):
    config = config_of("llama_mha", tmp_path)
    plain, small = (
        load_model(None, config, load_format="dummy", seed=3, quantization=name) for name in ("none", "fp8")
    )
    kernel, exact = small.layers[1].mlp.down.kernel.get_value(), np.asarray(plain.layers[1].mlp.down.kernel[...])
    error = np.abs(kernel.values.astype(jnp.float32) * kernel.scale - exact)
    assert 0 < error.max() <= np.abs(exact).max() / 15


MAX_DIVERGENCE = {"int8": 5e-4, "fp8": 0.03, "int4": 0.1}


OTHERWISE = {
    "minimax_m2": "minimax_m2_many",
    "qwen3_5_moe": "qwen3_5_moe_around",
    "qwen3_next": "qwen3_next_mixed",
}
"""First variants in which a token chooses another expert in int8 → those that stand for their families."""

FEW_BITS = [
    *itertools.product(["llama_gqa_head_dim", "mixtral"], ["fp8", "int8", "int4"]),
    *((variant, "int8") for variant in one_of_each(FAMILIES) if variant not in ("llama_mha", "mixtral", *OTHERWISE)),
    *((variant, "int8") for variant in OTHERWISE.values()),
]
"""Every family in int8, and two in all forms. A model around a text model has the kernels of that. With the first
variant of MiniMax-M2 one token of eight chooses another expert, and the mean is 2.9e-3. With that of Qwen3.5-MoE it is
0.027, because states remember the token."""


SLOW = {"llama_gqa_head_dim", "mixtral", *OTHERWISE.values(), *covering(one_of_each(FAMILIES))}


@pytest.mark.parametrize(
    ("variant", "name"),
    [pytest.param(*case, marks=() if case == ("mixtral", "int8") else mark(case[0], (), SLOW)) for case in FEW_BITS],
)
def test_next_tokens_are_hardly_less_likely(tmp_path, parity: Parity, variant: str, name: str):
    """The mean divergence of the next token's distribution from that which Hugging Face's float32 model gave."""
    with np.load(DATA / f"{variant}.npz", allow_pickle=False) as recorded:
        tokens, positions, logits = (recorded[key] for key in ("tokens", "whole_positions", "whole_logits"))
        seed = json.loads(str(recorded["note"]))["seed"]
    config = config_of(variant, tmp_path, seed)
    paged = PagedModel(config, load_model(tmp_path, config, quantization=name))
    found = paged.extend({0: tokens.tolist()})[0][positions]
    expected, found = (jax.nn.log_softmax(jnp.asarray(part)) for part in (logits, found))
    divergence = np.asarray((jnp.exp(expected) * (expected - found)).sum(-1))
    assert divergence.mean() > 0
    parity(name, VARIANTS[variant], "KL", float(divergence.mean()), MAX_DIVERGENCE[name])
