"""The kernels and the engine on an NVIDIA GPU itself: `make test-gpu`. Everywhere else these tests are left out."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_cases, attention_check
from bench.attention_cases import Case
from bench.device import encoder, experts
from bench.device.correctness import MAX_ERROR
from bench.device.plan import ACCELERATOR
from jsg.engine.device.devices import E4M3_CAPABILITY
from jsg.engine.device.executables import QUANTISED_OPTIONS
from jsg.engine.shapes import OTHER_ENCODE_SIZES
from jsg.kernels_pallas import cudnn_chunks, mosaic_chunks, ops, tuning
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.kernels_pallas.chunks import OwnAttention
from jsg.kernels_pallas.reference_threshold import sortable
from jsg.models.layers import project
from jsg.models.quantise import FORMS, STORED, quantise
from jsg.types import Request, SamplingParams
from tests.engine import small
from tests.kernels_pallas import test_chunks, test_few_bits_matmul

pytestmark = [
    pytest.mark.gpu,
    # Known: docs/packages/kernels_pallas.md, "The exit from a deprecated lowering".
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def gpu() -> None:
    if ops.target_platform() != "gpu":
        pytest.fail(f"JAX must run on a GPU, but runs on {ops.target_platform()}: set JAX_PLATFORMS=cuda")


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", attention_check.BATCHES, ids=lambda case: case.name)
def test_attention_equals_its_definition(case: Case, dtype: str):
    sizes = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim}
    assert attention_check.largest_error(case, dtype, **sizes) <= TOLERANCES[dtype]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("own", [cudnn_chunks.attend, mosaic_chunks.attend], ids=["cudnn", "mosaic"])
def test_chunks_taken_apart_equal_attention_by_definition(own: OwnAttention, head_dim: int):
    capability = tuning.target_capability() or (0, 0)
    if capability < (9, 0) or (own is mosaic_chunks.attend and capability != mosaic_chunks.CAPABILITY):
        pytest.skip("there is no such kernel for this card")
    case = dataclasses.replace(test_chunks.STEP, head_dim=head_dim)
    arrays = attention_cases.make(case, dtype="bfloat16")
    how = {"scale": head_dim**-0.5, "window": None, "softcap": None}
    run = jax.jit(functools.partial(test_chunks.kernel, own, **how))
    found = run(arrays.queries, arrays.keys, arrays.values, arrays.inputs)
    num_real = len(arrays.expected)
    np.testing.assert_allclose(found.out[:num_real].astype("float32"), arrays.expected, atol=TOLERANCES["bfloat16"])
    np.testing.assert_allclose(found.lse[:num_real], arrays.expected_lse, atol=1e-3)


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_rotation_and_write_equal_plain_jnp(pool_dtype: str):
    if pool_dtype == "float8_e4m3fn" and (tuning.target_capability() or E4M3_CAPABILITY) < E4M3_CAPABILITY:
        pytest.skip("the engine refuses e4m3 on this card")
    count, kv_heads, group, head_dim = 70, 2, 4, 64
    seeds = jax.random.split(jax.random.key(0), 2)
    qkv = jax.random.normal(seeds[0], (count, kv_heads, (group + 2) * head_dim), "float32").at[5, 0, -1].set(jnp.nan)
    angles = jax.random.uniform(seeds[1], (count, head_dim // 2), maxval=6.0)
    slots = jnp.asarray(np.r_[0, 16 + np.random.default_rng(0).permutation(160)[: count - 1]], jnp.int32)
    cache = (jnp.zeros((11, 16, kv_heads, head_dim), pool_dtype),) * 2
    write = jax.jit(ops.rotate_and_write, static_argnames="implementation")
    arguments = (qkv, jnp.cos(angles), jnp.sin(angles), slots, cache)
    found, expected = (jax.tree.leaves(write(*arguments, implementation=name)) for name in (None, "reference"))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.astype("float32"), other.astype("float32"), rtol=0.13, atol=1e-2)
    assert np.isnan(np.asarray(found[1], "float32")).any(), "the key of a value that is not finite is NaN"
    assert np.isfinite(np.asarray(found[2], "float32")).all()


def test_top_k_is_exact_and_top_p_nearly():
    logits = 3 * jax.random.normal(jax.random.key(0), (32, 128_256))
    ones = jnp.ones(32)
    find = jax.jit(ops.kept_threshold, static_argnames="implementation")
    for top_p, most in ((1.0, 0), (0.9, 1)):
        fields = (logits, ones, jnp.full(32, 50, jnp.int32), top_p * ones)
        kept = [sortable(logits) >= find(*fields, implementation=name)[0][:, None] for name in (None, "reference")]
        assert int(jnp.sum(kept[0] != kept[1], axis=-1).max()) <= most


@pytest.mark.parametrize(("num_experts", "chosen"), [(8, 2), (128, 8)])
@pytest.mark.parametrize("num_tokens", [1, 300, 5000])
def test_routes_equal_plain_jnp(num_tokens: int, num_experts: int, chosen: int):
    logits = jax.random.normal(jax.random.key(0), (num_tokens, num_experts))
    choose = jax.jit(ops.expert_routes, static_argnums=1, static_argnames="implementation")
    choice = ChoiceSpec(per_token=chosen)
    found, expected = (choose(logits, choice, implementation=name) for name in (None, "reference"))
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-5)
    assert [np.array_equal(*pair) for pair in zip(found[1:], expected[1:], strict=True)] == [True] * 3


@pytest.mark.parametrize("stored", STORED)
def test_products_with_kernels_in_8_bits(stored: str):
    """XLA's matmul with its options for them, then ours for experts, against float64."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (32, 512)).astype("bfloat16")
    made = quantise(jax.random.normal(keys[1], (256, 512)), "w", FORMS[stored])
    kernel = jax.tree.map(lambda part: jnp.asarray(part.T), made)
    exact = np.asarray(x, np.float64) @ (np.asarray(kernel.values, np.float64) * np.asarray(kernel.scale, np.float64))
    run = jax.jit(project).lower(x, kernel).compile(compiler_options=dict(QUANTISED_OPTIONS["gpu"]))
    np.testing.assert_allclose(run(x, kernel), exact, rtol=0, atol=2e-4)
    sizes = jnp.array([32], jnp.int32)
    grouped = ops.grouped_matmul(x, kernel.values[None], sizes, scale=kernel.scale[None], result="float32")
    np.testing.assert_allclose(grouped, exact, rtol=0, atol=2e-4)


@pytest.mark.parametrize("num_rows", [1, 32, 100, 300, 3000])
@pytest.mark.parametrize("name", test_few_bits_matmul.FORMS)
def test_products_with_kernels_in_few_bits(name: str, num_rows: int):
    x, kernel = test_few_bits_matmul.rows(num_rows), test_few_bits_matmul.made(test_few_bits_matmul.FORMS[name])
    found = test_few_bits_matmul.compiled()(x, kernel)
    np.testing.assert_allclose(found, test_few_bits_matmul.product(x, kernel), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["jsg", "awq", "mxfp4", "nvfp4", "w8a16", "blocks of fp8"])
def test_products_with_experts_in_few_bits(name: str):
    test_few_bits_matmul.test_experts(name)


@pytest.mark.parametrize("num_tokens", [8, 300])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(8, 4096, 14336), (8, 14336, 4096), (3, 200, 72)], ids=str)
def test_products_of_experts_equal_their_definition(shape: tuple[int, int, int], dtype: str, num_tokens: int):
    kernels = experts.make_kernels(shape, dtype, "none")
    logits = jax.random.normal(jax.random.key(0), (num_tokens, shape[0]))
    sizes = ops.expert_routes(logits, ChoiceSpec(per_token=2)).sizes
    rows = (shape[1] ** -0.5 * jax.random.normal(jax.random.key(1), (2 * num_tokens, shape[1]))).astype(dtype)
    found = ops.grouped_matmul(rows, kernels.values, sizes, result="float32", implementation="triton")
    assert experts.largest_error(found, rows, kernels, np.asarray(sizes)) <= 2e-4


@pytest.mark.parametrize("is_video", [False, True])
@pytest.mark.parametrize("count", OTHER_ENCODE_SIZES)
def test_tiles_are_encoded_together_as_they_are_alone_in_float32(tmp_path: pathlib.Path, count: int, is_video: bool):
    vision = encoder.Encoder(ACCELERATOR.images, "bfloat16", tmp_path)
    pixels = jax.random.normal(jax.random.key(0), (count, 3, vision.vision.image_size, vision.vision.image_size))
    rows = vision.rows(count, is_video=is_video)
    encode = vision.compile(vision.leaves, count, is_video=is_video)
    pool = encode(vision.leaves, vision.pool(count, "bfloat16"), pixels, rows)
    assert vision.error(pool[rows], pixels, is_video=is_video) <= MAX_ERROR["bfloat16"]


def test_deterministic_answers_are_the_same_alone_and_together(tmp_path: pathlib.Path, compile_cache_dir: str):
    core = small.make_core(small.write_model(tmp_path / "model"), compile_cache_dir, deterministic=True)
    plain = Request(rid="plain", input_ids=(2,), sampling=SamplingParams(max_new_tokens=20, ignore_eos=True))
    requests = [
        dataclasses.replace(plain, rid=str(count), input_ids=tuple(range(2, 2 + count))) for count in (3, 40, 70, 90)
    ]
    together = small.run(core, [(0, request) for request in requests])
    for request in requests:
        assert small.alone(core, request).token_ids == together[request.rid].token_ids
    core.close()
