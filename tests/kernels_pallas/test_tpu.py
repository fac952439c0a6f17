"""Attention on a TPU: its results in TPU interpret mode, and its lowering for a TPU, which needs no TPU."""

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from bench import attention_cases as cases
from bench.device.shapes import MIXTRAL_8X7B
from bench.shapes import LLAMA_8B, write_model
from jsg.cache.pool import KVPool, copy_slots, make_pool
from jsg.engine.device import step
from jsg.engine.shapes import ROW_MULTIPLE
from jsg.kernels_pallas import ops, tpu, tpu_write
from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.kernels_pallas.reference_write import keys_and_values
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model, load_model
from jsg.sched.buckets import BucketKey, make_buckets
from jsg.window import Window
from tests.kernels_pallas.definition import QUICKLY, with_garbage, with_room
from tests.models import paged
from tests.models.paged import PagedModel
from tests.models.test_decoder import LAYER, TOKENS, config

TPU = AbstractMesh(
    (1,),
    ("tensor",),
    (AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="TPU v5 lite", num_cores=None, platform="tpu"),
)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch):
    """The kernel in TPU interpret mode, whose memory is NaN before it is written."""
    monkeypatch.setattr(tpu, "KEY_BLOCK", 64)  # so that a sequence has several
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        yield


def for_tpu(case: cases.Case) -> cases.Case:
    """The case with a page size and a head_dim that the kernel takes."""
    return dataclasses.replace(case, page_size=16, head_dim=case.head_dim if case.head_dim % 64 == 0 else 64)


def named(name: str) -> cases.Case:
    return for_tpu(next(case for case in cases.CASES if case.name == name))


def by_head(arrays: cases.Arrays) -> np.ndarray:
    """The pool for a TPU with the keys and values of a case."""
    keys, values = (each.swapaxes(1, 2) for each in (arrays.keys, arrays.values))
    if keys.shape[-1] % 128:
        return np.concatenate([keys, values], axis=-1)[:, :, None]
    return np.stack([keys, values], axis=2)


def abstract(case: cases.Case) -> tuple:
    """Queries, pool and inputs of the case's shapes, for a trace."""
    columns, tokens = -(-max(old + new for old, new in case.rows) // case.page_size), len(case.rows)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((tokens + 1, columns), (tokens,), (0,), ())]
    inputs = AttentionInputs(integers[0], *integers[1:2] * 2, *integers[2:3] * 4, integers[3])
    queries = jax.ShapeDtypeStruct((tokens, case.heads, case.head_dim), jnp.float32)
    shape = [(case.kv_heads, case.head_dim)]
    pool = jax.eval_shape(lambda: make_pool(shape, columns + 1, case.page_size, jnp.float32, is_by_head=True))
    return queries, pool.layers[0], inputs


@functools.cache
def compiled(**static: float | None) -> Callable[..., jax.Array]:
    def run(queries: jax.Array, pool: jax.Array, inputs: AttentionInputs, sinks: jax.Array | None) -> jax.Array:
        return ops.paged_attention(queries, (pool,), inputs, **static, sinks=sinks, implementation="tpu")

    return jax.jit(run, compiler_options=QUICKLY)


def attend(case: cases.Case, arrays: cases.Arrays) -> np.ndarray:
    run = compiled(scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap)
    return np.asarray(run(arrays.queries, by_head(arrays), arrays.inputs, arrays.sinks).astype(jnp.float32))


FAST = {"mixed"}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("case", "singles"),
    [
        pytest.param(c, singles, marks=() if c.name in FAST and singles else pytest.mark.slow, id=f"{c.name}-{name}")
        for c in map(for_tpu, cases.CASES)
        if not c.shared
        for singles, name in ((True, "singles"), (False, "tiles"))
    ],
)
def test_equals_naive_attention(case: cases.Case, singles: bool):
    arrays = with_room(cases.make(case, singles=singles))
    out = attend(case, arrays)
    np.testing.assert_allclose(out[: len(arrays.expected)], arrays.expected, atol=2e-6)
    assert not out[len(arrays.expected) :].any(), "padding tokens give zero"


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3.2-1b", "qwen2.5-7b", "gemma-2b"])
def test_heads_of_real_models(model: str):
    case = for_tpu(cases.for_model(named("extend"), model))
    arrays = with_room(cases.make(case))
    np.testing.assert_allclose(attend(case, arrays)[: len(arrays.expected)], arrays.expected, atol=3e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"], ids=["bf16", "e4m3", "e5m2"])
def test_smaller_types_of_pool(pool_dtype: str):
    case = dataclasses.replace(named("window"), rows=((300, 1), (140, 20)), page_size=32, kv_heads=1)
    arrays = with_room(cases.make(case, dtype="bfloat16", pool_dtype=pool_dtype))
    np.testing.assert_allclose(attend(case, arrays)[: len(arrays.expected)], arrays.expected, atol=0.02)


@pytest.mark.usefixtures("interpreted")
def test_garbage_in_unused_pages_is_never_read_into_a_result():
    case = named("mixed")
    arrays = with_room(cases.make(case))
    clean = attend(case, arrays)
    np.testing.assert_array_equal(attend(case, with_garbage(arrays, key=np.nan, value=np.nan)), clean)


@pytest.mark.usefixtures("interpreted")
def test_a_key_that_is_not_finite_reaches_the_tokens_that_see_it_only():
    case = named("mixed")  # 65 tokens after 10 from packed token 2 on
    arrays = with_room(cases.make(case))
    clean, page = attend(case, arrays), arrays.inputs.page_table[3, 30 // case.page_size]
    arrays.keys[page, 30 % case.page_size] = np.nan
    found, sees = attend(case, arrays), np.zeros(len(clean), bool)
    sees[2 + 20 : 2 + 65] = True  # from position 30 on
    assert np.isnan(found[sees]).all()
    np.testing.assert_array_equal(found[~sees], clean[~sees])


@pytest.mark.usefixtures("interpreted")
def test_keys_that_no_token_of_a_tile_sees_are_neither_copied_nor_multiplied(monkeypatch: pytest.MonkeyPatch):
    """Those after the tile, and those before its window: exactly the pages and the blocks of the others are visited."""
    case, visits, block = named("sinks"), collections.Counter[str](), tpu.KEY_BLOCK
    assert case.window is not None
    arrays, copy, attend_block = with_room(cases.make(case)), pltpu.make_async_copy, tpu._attend_block

    def counted(what: str, do: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            jax.debug.callback(lambda: visits.update([what]))
            do(*args)

        return run

    def make_copy(source: Any, target: Any, semaphore: Any) -> Any:
        made = copy(source, target, semaphore)
        is_page = source.shape == by_head(arrays).shape[1:]  # no other copy is from such an array
        return SimpleNamespace(start=counted("page", made.start) if is_page else made.start, wait=made.wait)

    monkeypatch.setattr(pltpu, "make_async_copy", make_copy)
    monkeypatch.setattr(tpu, "_attend_block", counted("block", attend_block))
    compiled.cache_clear()
    out = attend(case, arrays)
    np.testing.assert_allclose(out[: len(arrays.expected)], arrays.expected, atol=2e-6)
    inputs, expected = jax.tree.map(np.asarray, arrays.inputs), collections.Counter[str]()
    tiles = [
        *zip(inputs.tile_positions, inputs.tile_lens, strict=True),
        *((end - 1, 1) for end in inputs.single_kv_lens),
    ]
    for position, num_tokens in tiles:
        seen = np.arange(position + num_tokens)[max(0, case.window.first(position)) :]
        if num_tokens and position >= 0:
            expected.update(page=len({*(seen // case.page_size)}), block=len({*(seen // block)}))
    assert visits == expected


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"page_size": 12}, "pages of a multiple of 8 tokens, but got 12"),
        ({"head_dim": 80}, "heads of a multiple of 64 numbers, but got 80"),
        ({"page_size": 1024, "heads": 32, "kv_heads": 32, "head_dim": 128}, "25165824 bytes for heads and pages, not"),
    ],
    ids=["page", "head_dim", "memory"],
)
def test_what_it_cannot_do_is_refused_by_name_and_left_to_the_reference(change: dict, rule: str):
    shapes = abstract(dataclasses.replace(named("decode"), **change))
    with pytest.raises(NotImplementedError, match=rule):
        jax.eval_shape(functools.partial(ops.paged_attention, scale=1.0, implementation="tpu"), *shapes)
    with jax.sharding.use_abstract_mesh(TPU):
        attend = jax.jit(functools.partial(ops.paged_attention, scale=1.0))
        text = attend.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call" not in text


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_reference_reads_the_pool_that_the_kernel_wants(head_dim: int):
    arrays = cases.make(dataclasses.replace(named("mixed"), head_dim=head_dim))
    for found, expected in zip(
        keys_and_values((jax.device_put(by_head(arrays)),)), (arrays.keys, arrays.values), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_pages_are_larger_on_a_tpu_unless_somebody_says():
    assert ops.default_page_size() == 1
    with jax.sharding.use_abstract_mesh(TPU):
        assert ops.default_page_size() == 64


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("head_dim", "pool_dtype"), [(64, "bfloat16"), (128, "float32"), (256, "float8_e4m3fn")], ids=str
)
def test_rotate_and_write_puts_tokens_side_by_side_for_each_head(
    head_dim: int, pool_dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """A chunk that begins and ends inside of granules, single tokens, and tokens that are not written."""
    monkeypatch.setattr(tpu_write, "TOKEN_BLOCK", 64)
    rng = np.random.default_rng(0)
    slots = np.concatenate([[300, 0, 70, 97], np.arange(133, 192), np.arange(448, 497), [0, 5]])
    shapes = (len(slots), 3, 4 * head_dim), *[(len(slots), head_dim // 2)] * 2
    qkv, cos, sin = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    qkv = qkv.at[7, 1].set(jnp.inf)
    write, pools = jax.jit(ops.rotate_and_write, static_argnames="implementation", compiler_options=QUICKLY), []
    for implementation in ("reference", "tpu"):
        pool = make_pool([(3, head_dim)], 8, 64, jnp.dtype(pool_dtype), is_by_head=implementation == "tpu")
        pool = jax.tree.map(lambda x: x.at[1:].set(1), pool)
        queries, cache = write(qkv, cos, sin, jnp.asarray(slots), pool.layers[0], implementation=implementation)
        pools.append((pool._replace(layers=(cache,)), queries))
    (apart, expected), (joined, found) = pools
    np.testing.assert_array_equal(found, expected)
    assert joined.page_size == apart.page_size == 64
    copied = [copy_slots(pool, jnp.array([70, 140]), jnp.array([80, 447])) for pool in (joined, apart)]
    for found, wanted in zip(keys_and_values(copied[0].layers[0]), copied[1].layers[0], strict=True):
        np.testing.assert_array_equal(found[1:].astype(jnp.float32), wanted[1:].astype(jnp.float32))
        assert not found[0].any(), "nothing is written to the dump"


@pytest.mark.slow
def test_a_model_has_the_logits_that_it_has_on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """With a window in one of its layers: chunks, of which one follows what is cached, and steps of one token."""
    every = dataclasses.replace(LAYER.attention, head_dim=128, scale=128**-0.5)
    layers = [dataclasses.replace(LAYER, attention=dataclasses.replace(every, window=w)) for w in (None, Window(24))]
    spec = config(*layers)
    model = load_model(None, spec, load_format="dummy", seed=3)

    def logits() -> list[np.ndarray]:
        of = PagedModel(spec, model, page_size=32)
        steps = [of.extend({0: TOKENS, 2: TOKENS[:7]}), of.extend({0: TOKENS[:5], 1: TOKENS[:40]})]
        return [row for step in (*steps, of.decode({0: 5, 1: 6, 2: 7})) for row in step.values()]

    expected = logits()
    request.getfixturevalue("interpreted")
    monkeypatch.setitem(ops.BEST, "cpu", "tpu")
    monkeypatch.setattr(paged, "make_pool", functools.partial(make_pool, is_by_head=True))
    for found, wanted in zip(logits(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


# What follows lowers forward passes of published shapes with few layers.

CONTEXT, MAX_RUNNING, NUM_LAYERS, NUM_PAGES = 8192, 256, 2, 2560
BUCKETS = make_buckets(MAX_RUNNING, 8192, row_multiple=ROW_MULTIPLE["tpu"])

Lower = Callable[..., jax.stages.Lowered]
"""Lowers the forward pass of a bucket, under a mesh, for arrays that do not exist."""


def make_lower(directory: pathlib.Path, shape: dict[str, Any], quantization: str = "none") -> Lower:
    """For a model with 8 key-value heads of 128 numbers."""
    config = read_spec(write_model(directory, shape | {"num_hidden_layers": NUM_LAYERS}))
    graph, state = nnx.split(abstract_model(config, jnp.bfloat16, quantization))
    leaves, tree = jax.tree.flatten(state)
    page_size = tpu.PAGE_SIZE

    def new_pool() -> KVPool:
        is_by_head = ops.is_pool_by_head("tpu")
        return make_pool([(8, 128)] * NUM_LAYERS, NUM_PAGES, page_size, jnp.bfloat16, is_by_head=is_by_head)

    def lower(key: BucketKey, mesh: AbstractMesh):
        def merge(leaves):
            return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

        tables = ((MAX_RUNNING + 1, CONTEXT // page_size), (MAX_RUNNING + 1,), (sum(step.packed_sizes(key)),))
        int32s = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in tables]
        arguments = (tuple(leaves), jax.eval_shape(new_pool), *int32s)
        forward = jax.jit(functools.partial(step.forward, merge, key), donate_argnums=(1, 2))
        with jax.sharding.use_abstract_mesh(mesh):
            return forward.trace(*arguments).lower(lowering_platforms=("tpu",))

    return lower


@pytest.fixture(scope="module")
def lower(tmp_path_factory: pytest.TempPathFactory) -> Lower:
    """For Llama 3 8B."""
    return make_lower(tmp_path_factory.mktemp("model"), LLAMA_8B)


def check_lowered(text: str, key: BucketKey) -> None:
    """Attention is lowered once for all layers, and what a step changes is donated."""
    assert text.count("call @_run_layer(") == NUM_LAYERS
    for name in ("write_by_head", "attention_of_1", *(["attention_of_16", "attention_of_64"] if key.num_tiles else [])):
        assert text.count(f'kernel_name = "{name}"') == 1, "once for all layers"
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
    check_lowered(lower(key, TPU).as_text(), key)


@pytest.mark.parametrize(
    ("key", "quantization"),
    [(BUCKETS.decode[1], "int8"), pytest.param(BUCKETS.extend[0], "none", marks=pytest.mark.slow)],
    ids=str,
)
def test_a_model_with_experts_lowers_for_a_tpu(tmp_path: pathlib.Path, key: BucketKey, quantization: str):
    """Its products with the kernels of experts are one operation each, XLA's own or a kernel that reads 8 bits."""
    text = make_lower(tmp_path, MIXTRAL_8X7B, quantization)(key, TPU).as_text()
    check_lowered(text, key)
    product = '"chlo.ragged_dot"(' if quantization == "none" else 'kernel_name = "grouped_matmul"'
    assert text.count(product) == 3, "gate, up and down, once for all layers"
    assert ("tensor<8x4096x14336xbf16>" in text) == (quantization == "none")
