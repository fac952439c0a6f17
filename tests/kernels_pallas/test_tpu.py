"""JAX's TPU kernel behind our op: its results in TPU interpret mode, and its lowering for a TPU, which needs no TPU."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as library
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from bench import attention_cases as cases
from bench.device.shapes import MIXTRAL_8X7B
from bench.shapes import LLAMA_8B, write_model
from jsg.cache.pool import KVPool, make_pool
from jsg.engine.device import step
from jsg.kernels_pallas import ops, reference, tpu
from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.kernels_pallas.reference_write import keys_and_values
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model
from jsg.sched.buckets import BucketKey, make_buckets
from jsg.window import Window
from tests.kernels_pallas.definition import QUICKLY, with_garbage, with_room

TPU = AbstractMesh(
    (1,),
    ("tensor",),
    (AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="TPU v5 lite", num_cores=None, platform="tpu"),
)


class Block:
    """Keys and values that were fetched, as an array that answers to what the kernel asks of a ref."""

    def __init__(self, values: jax.Array):
        self._values = values
        self.dtype = values.dtype

    def reshape(self, *shape: int) -> "Block":
        return Block(self._values.reshape(shape))

    def bitcast(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Neighbours in the second-last axis become one number, the first in its lowest bits, as a TPU packs them."""
        packing = jnp.dtype(dtype).itemsize // self.dtype.itemsize
        rows, width = self._values.shape
        packed = self._values.reshape(rows // packing, packing, width).swapaxes(1, 2)
        return jax.lax.bitcast_convert_type(packed, dtype)

    def __getitem__(self, index: tuple[slice, ...]) -> jax.Array:
        return self._values[index]


def wait_and_load(copies: library.MultiPageAsyncCopyDescriptor) -> Block:
    for copy in copies._async_copies:
        copy.wait()
    return Block(copies._vmem_buf[...])


def masked_store(ref: jax.Array, value: jax.Array, *, mask: jax.Array) -> None:
    ref[...] = jnp.where(mask, value, ref[...])


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch):
    """TPU interpret mode, which fills fresh memory with NaN, and two ways around what it cannot do in jax 0.11.2.

    It knows no reshape and no bitcast of a ref, and takes some masked stores for out of bounds.
    """
    monkeypatch.setattr(library.MultiPageAsyncCopyDescriptor, "wait", wait_and_load)
    monkeypatch.setattr(pltpu, "store", masked_store)
    monkeypatch.setattr(tpu, "KEY_BLOCK", 64)  # so that a sequence has several
    with pltpu.force_tpu_interpret_mode():
        yield


def for_tpu(case: cases.Case) -> cases.Case:
    """The case with a head_dim, a page size and a number of heads that the kernel takes."""
    kv_heads = 4 if case.kv_heads == 3 else case.kv_heads
    heads = case.heads // case.kv_heads * kv_heads
    return dataclasses.replace(case, head_dim=128, page_size=16, heads=heads, kv_heads=kv_heads)


def named(name: str) -> cases.Case:
    return for_tpu(next(case for case in cases.CASES if case.name == name))


def interleaved(arrays: cases.Arrays) -> jax.Array:
    pages, page_size, heads, head_dim = arrays.keys.shape
    return jnp.stack([arrays.keys, arrays.values], axis=3).reshape(pages, page_size, 2 * heads, head_dim)


def abstract(case: cases.Case) -> tuple:
    """Queries, pool and inputs of the case's shapes, for a trace."""
    columns, tokens = -(-max(old + new for old, new in case.rows) // case.page_size), len(case.rows)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((tokens + 1, columns), (tokens,), (0,), ())]
    inputs = AttentionInputs(integers[0], *integers[1:2] * 2, *integers[2:3] * 4, integers[3])
    queries = jax.ShapeDtypeStruct((tokens, case.heads, case.head_dim), jnp.float32)
    pool = jax.ShapeDtypeStruct((columns + 1, case.page_size, 2 * case.kv_heads, case.head_dim), jnp.float32)
    return queries, (pool,), inputs


@functools.cache
def compiled(**static: float | None) -> Callable[..., jax.Array]:
    def run(queries: jax.Array, pool: jax.Array, inputs: AttentionInputs) -> jax.Array:
        return ops.paged_attention(queries, (pool,), inputs, **static, implementation="tpu")

    return jax.jit(run, compiler_options=QUICKLY)


def attend(case: cases.Case, arrays: cases.Arrays) -> np.ndarray:
    run = compiled(scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap)
    return np.asarray(run(arrays.queries, interleaved(arrays), arrays.inputs).astype(jnp.float32))


LONG = ("decode-mha", "decode-8-kv-heads", "decode-pages-of-24", "decode-window", "decode-softcap")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("singles", [True, False], ids=["singles", "tiles"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c,
            marks=() if c.name == "mixed" else [pytest.mark.slow, *([pytest.mark.long] if c.name in LONG else [])],
            id=c.name,
        )
        for c in map(for_tpu, cases.CASES)
        if not c.shared and not c.has_sinks and not (c.window and c.window.is_aligned)
    ],
)
def test_equals_naive_attention(case: cases.Case, singles: bool):
    """Steps of decoding that differ in one number from another case are long."""
    arrays = with_room(cases.make(case, singles=singles))
    out = attend(case, arrays)
    np.testing.assert_allclose(out[: len(arrays.expected)], arrays.expected, atol=2e-6)
    assert not out[len(arrays.expected) :].any(), "padding tokens give zero"


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float8_e4m3fn"], ids=["bf16", "fp8"])
def test_smaller_types_of_pool(pool_dtype: str):
    case = named("window")
    arrays = with_room(cases.make(case, dtype="bfloat16", pool_dtype=pool_dtype))
    np.testing.assert_allclose(attend(case, arrays)[: len(arrays.expected)], arrays.expected, atol=0.02)


@pytest.mark.usefixtures("interpreted")
def test_garbage_in_unused_pages_is_never_read_into_a_result():
    case = named("mixed")
    arrays = with_room(cases.make(case))
    clean = attend(case, arrays)
    np.testing.assert_array_equal(attend(case, with_garbage(arrays, key=np.nan, value=np.nan)), clean)


sequences_of = jax.jit(tpu.sequences_of, compiler_options=QUICKLY)


def test_sequences_join_the_tiles_of_a_row():
    # Rows of 41, 201, 75 and 3 tokens, of which 1, 1, 65 and 3 are new.
    inputs = with_room(cases.make(named("mixed"))).inputs
    sequences = sequences_of(inputs)
    assert sequences.num_sequences.tolist() == [4]
    assert sequences.num_tokens == 70
    assert sequences.kv_lens[:4].tolist() == [41, 201, 75, 3]
    assert sequences.starts.tolist() == [0, 1, 2, 67, 70, *[70] * (len(sequences.kv_lens) - 4)]
    np.testing.assert_array_equal(sequences.pages[:4], inputs.page_table[1:5])


def test_a_step_without_tokens_has_a_sequence_all_the_same():
    sequences = sequences_of(with_room(cases.make(named("nothing"))).inputs)
    assert sequences.num_tokens == 0
    assert (sequences.num_sequences.tolist(), sequences.kv_lens[0], sequences.starts[1]) == ([1], 1, 1)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"head_dim": 64}, "head_dim of 128, but got 64"),
        ({"heads": 6, "kv_heads": 3}, "multiple of 8 words, but got 6"),
        ({"page_size": 1024}, "at most 512 tokens, but got 1024"),
        ({"page_size": 1, "rows": ((270_000, 1),)}, "page table in scalar memory"),
        ({"has_sinks": True}, "knows no sinks"),
        ({"window": Window(8, is_aligned=True)}, "windows that end with each token only"),
    ],
    ids=["head_dim", "heads", "page", "page_table", "sinks", "aligned"],
)
def test_what_it_cannot_do_is_refused_by_name_and_left_to_the_reference(change: dict, rule: str):
    case = dataclasses.replace(named("decode"), **{"rows": ((5, 1),)} | change)
    shapes, sinks = abstract(case), jnp.zeros(case.heads) if case.has_sinks else None
    how = {"scale": 1.0, "sinks": sinks, "window": case.window}
    with pytest.raises(NotImplementedError, match=rule):
        jax.eval_shape(functools.partial(ops.paged_attention, **how, implementation="tpu"), *shapes)
    with jax.sharding.use_abstract_mesh(TPU):
        attend = jax.jit(functools.partial(ops.paged_attention, **how))
        text = attend.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call" not in text


def test_the_reference_reads_the_pool_that_the_kernel_wants(monkeypatch: pytest.MonkeyPatch):
    case, given = named("mixed"), []

    def attention(queries: jax.Array, keys: jax.Array, values: jax.Array, *_: Any, **__: Any) -> jax.Array:
        given.extend([keys, values])
        return queries

    monkeypatch.setattr(reference, "paged_attention", attention)
    arrays = cases.make(case)
    pool = interleaved(arrays)
    ops.paged_attention(jnp.asarray(arrays.queries), (pool,), arrays.inputs, scale=1.0, implementation="reference")
    for found, expected in zip(given, (arrays.keys, arrays.values), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_pages_are_larger_on_a_tpu_unless_somebody_says():
    assert ops.default_page_size(257, 8192) == 1
    with jax.sharding.use_abstract_mesh(TPU):
        assert ops.default_page_size(257, 8192) == 64


def test_a_smaller_page_would_leave_no_room_for_the_page_table():
    for rows, context_len, page_size in ((257, 8192, 64), (257, 32_768, 64), (257, 131_072, 256), (9, 8192, 64)):
        assert tpu.smallest_page_size(rows, context_len) == page_size
        if page_size > 64:
            assert 4 * rows * context_len / (page_size / 2) > 2**20 * 15 / 16


def test_rotate_and_write_puts_keys_and_values_side_by_side():
    rng = np.random.default_rng(0)
    qkv, cos, sin = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, 2, 32), (5, 4), (5, 4)))
    slots = jnp.array([17, 3, 30, 0, 0])
    apart = jnp.zeros((4, 8, 2, 8)), jnp.zeros((4, 8, 2, 8))
    write = jax.jit(ops.rotate_and_write, compiler_options=QUICKLY)
    queries, joined = write(qkv, cos, sin, slots, (jnp.zeros((4, 8, 4, 8)),))
    expected_queries, expected = write(qkv, cos, sin, slots, apart)
    np.testing.assert_array_equal(queries, expected_queries)
    assert np.any(expected[0][2, 1]), "slot 17 is written"
    for found, wanted in zip(keys_and_values(joined), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(joined[0][:, :, 2], expected[0][:, :, 1], "key of head 1 after value of head 0")


# What follows lowers, or compiles where `libtpu` is installed, forward passes of published shapes with few layers.

CONTEXT, MAX_RUNNING, NUM_LAYERS, NUM_PAGES = 8192, 256, 2, 2560
BUCKETS = make_buckets(MAX_RUNNING, 8192)

Lower = Callable[..., jax.stages.Lowered]
"""Lowers the forward pass of a bucket, under a mesh, for arrays that do not exist."""


def make_lower(directory: pathlib.Path, shape: dict[str, Any], quantization: str = "none") -> Lower:
    """For a model with 8 key-value heads of 128 numbers."""
    config = read_spec(write_model(directory, shape | {"num_hidden_layers": NUM_LAYERS}))
    graph, state = nnx.split(abstract_model(config, jnp.bfloat16, quantization))
    leaves, tree = jax.tree.flatten(state)
    page_size = tpu.smallest_page_size(MAX_RUNNING + 1, CONTEXT)

    def new_pool() -> KVPool:
        is_interleaved = ops.is_pool_interleaved("tpu")
        return make_pool([(8, 128)] * NUM_LAYERS, NUM_PAGES, page_size, jnp.bfloat16, is_interleaved=is_interleaved)

    def lower(key: BucketKey, mesh: AbstractMesh, sharding: jax.sharding.Sharding | None = None):
        def merge(leaves):
            return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

        def placed(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        tables = ((MAX_RUNNING + 1, CONTEXT // page_size), (MAX_RUNNING + 1,), (sum(step.packed_sizes(key)),))
        int32s = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in tables]
        arguments = jax.tree.map(placed, (tuple(leaves), jax.eval_shape(new_pool), *int32s))
        forward = jax.jit(functools.partial(step.forward, merge, key), donate_argnums=(1, 2))
        with jax.sharding.use_abstract_mesh(mesh):
            return forward.trace(*arguments).lower(lowering_platforms=("tpu",))

    return lower


@pytest.fixture(scope="module")
def lower(tmp_path_factory: pytest.TempPathFactory) -> Lower:
    """For Llama 3 8B."""
    return make_lower(tmp_path_factory.mktemp("model"), LLAMA_8B)


def check_lowered(text: str) -> None:
    """One attention kernel for all layers, and what a step changes is donated."""
    assert text.count("call @_run_layer(") == NUM_LAYERS
    assert text.count("call @ragged_paged_attention(") == text.count("@tpu_custom_call") == 1, "one for all layers"
    assert text.count("tf.aliasing_output") == NUM_LAYERS + 1, "the pool of each layer, and the page table"


ENDS = (BUCKETS.decode[0], BUCKETS.decode[-1], BUCKETS.extend[-1])


@pytest.mark.parametrize(
    "key",
    [
        *(pytest.param(key, id=str(key)) for key in (BUCKETS.decode[1], BUCKETS.extend[0])),
        *(
            pytest.param(key, marks=[pytest.mark.slow, *([] if key in ENDS else [pytest.mark.long])], id=str(key))
            for key in BUCKETS.all
            if key not in (BUCKETS.decode[1], BUCKETS.extend[0])
        ),
    ],
)
def test_every_bucket_lowers_for_a_tpu_with_the_kernel_and_the_pool_donated(key: BucketKey, lower):
    """What lies between the smallest and the largest bucket is long."""
    check_lowered(lower(key, TPU).as_text())


@pytest.mark.parametrize(
    ("key", "quantization"),
    [
        (BUCKETS.decode[1], "int8"),
        *(
            pytest.param(key, quantization, marks=pytest.mark.slow)
            for key, quantization in (
                (BUCKETS.decode[1], "none"),
                (BUCKETS.extend[0], "none"),
                (BUCKETS.extend[0], "int8"),
            )
        ),
    ],
    ids=str,
)
def test_a_model_with_experts_lowers_for_a_tpu(tmp_path: pathlib.Path, key: BucketKey, quantization: str):
    """Its products with the kernels of experts are one operation each: what becomes of them is up to XLA."""
    text = make_lower(tmp_path, MIXTRAL_8X7B, quantization)(key, TPU).as_text()
    check_lowered(text)
    assert text.count('"chlo.ragged_dot"(') == 3, "gate, up and down, once for all layers"
    assert ("tensor<8x4096x14336xi8>) -> tensor<8x4096x14336xbf16>" in text) == (quantization == "int8")


@pytest.fixture
def no_compile_cache():
    """A program for a device that is not here can be written to the cache, but not read back."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def tpu_mesh(monkeypatch: pytest.MonkeyPatch, no_compile_cache: None) -> Callable[[str], jax.sharding.Mesh]:
    """One device of a topology that can be compiled for."""
    pytest.importorskip("libtpu", reason="compiling for a TPU needs no TPU, but libtpu: pip install '.[tpu]'")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # with these three it looks for nothing in the network
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")

    def make(topology: str) -> jax.sharding.Mesh:
        device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
        return jax.sharding.Mesh(np.array([device]), ("tensor",), axis_types=(AxisType.Auto,))

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "key"),
    [("v5e:2x2", BUCKETS.decode[-1]), ("v5e:2x2", BUCKETS.extend[-1]), ("v6e:2x2", BUCKETS.decode[0])],
    ids=str,
)
def test_compiles_for_a_tpu_in_place(topology: str, key: BucketKey, lower: Lower, tpu_mesh):
    mesh = tpu_mesh(topology)
    compiled = lower(key, mesh.abstract_mesh, NamedSharding(mesh, PartitionSpec())).compile()
    pools, text = f"[{NUM_PAGES},64,16,128]", compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes >= NUM_LAYERS * 2 * NUM_PAGES * 64 * 16 * 128
    assert pools in text
    assert not re.findall(rf"{re.escape(pools)}\S* (?:copy|copy-start|convert|transpose)\(", text)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_products_of_experts_are_kernels_on_a_tpu(tmp_path: pathlib.Path, quantization: str, tpu_mesh):
    """XLA's own, which compute a row with its expert only; of experts in 8 bits they read a copy in bfloat16."""
    mesh, key = tpu_mesh("v5e:2x2"), BUCKETS.decode[-1]
    lowered = make_lower(tmp_path, MIXTRAL_8X7B, quantization)(
        key, mesh.abstract_mesh, NamedSharding(mesh, PartitionSpec())
    )
    text = lowered.compile().as_text()
    assert len(re.findall(r"%ragged-dot-none\S* = \S+ custom-call\(", text)) == 3 * NUM_LAYERS
    assert f"[{key.num_tokens * 2},{8 * 4096}]" not in text, "no row stands there for every expert"
    copies = re.findall(r"= bf16\[8,(?:4096,14336|14336,4096)\]\S* convert\(", text)
    assert len(copies) == (3 * NUM_LAYERS if quantization == "int8" else 0)
