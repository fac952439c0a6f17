"""`paged_decode` in interpret mode against attention by its definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_cases as cases
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.attention_block import Attended
from jsg.kernels_pallas.paged_decode import Sizes, paged_decode
from tests.kernels_pallas import definition
from tests.kernels_pallas.definition import named

EDGES = "decode-without-padding"
attend, check = (functools.partial(function, paged_decode) for function in (definition.attend, definition.check))


def sizes(splits: int, block_k: int) -> Sizes:
    return Sizes(splits, block_k, num_warps=4, num_stages=3)


@pytest.mark.parametrize(
    ("name", "splits", "block_k"),
    [("decode", 1, 64), ("decode", 4, 32), ("decode-pages-of-16", 2, 16), ("decode-window", 2, 16), (EDGES, 2, 16)],
)
def test_equals_the_definition(name: str, splits: int, block_k: int):
    check(named(name), sizes(splits, block_k))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.DECODE, ids=lambda case: case.name)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("block_k", [16, 64])
def test_equals_the_definition_in_the_whole_table(case: cases.Case, splits: int, block_k: int):
    check(case, sizes(splits, block_k))


MODEL_CASES = [
    ("llama-3-8b", "decode-pages-of-64", "bfloat16", None),
    ("gemma-2b", "decode-softcap", "bfloat16", "float8_e4m3fn"),
    ("phi-3-mini", "decode-pages-of-16", "float32", "float8_e5m2"),
]


@pytest.mark.parametrize(("model", "name", "dtype", "pool_dtype"), MODEL_CASES)
def test_equals_the_definition_with_the_heads_of_real_models(model: str, name: str, dtype: str, pool_dtype: str | None):
    check(cases.for_model(named(name), model), sizes(2, 32), dtype, pool_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("model", cases.MODELS)
@pytest.mark.parametrize("name", ["decode", "decode-pages-of-16"])
@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [("float32", None), ("bfloat16", None), ("bfloat16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2")],
)
def test_equals_the_definition_in_every_shape_and_type(model: str, name: str, dtype: str, pool_dtype: str | None):
    check(cases.for_model(named(name), model), sizes(2, 32), dtype, pool_dtype)


@pytest.mark.parametrize("splits", [1, 3])
def test_garbage_in_unused_pages_is_never_read_into_a_result(splits: int):
    case = named("decode-pages-of-16")
    arrays = cases.make(case)
    clean = attend(case, arrays, sizes(splits, 16))
    table = np.array(arrays.inputs.page_table)
    (stale,) = set(range(1, len(arrays.keys))) - set(table.flat)
    table[1:] = np.where(table[1:] == 0, stale, table[1:])
    arrays.keys[stale] = arrays.values[stale] = np.nan
    last_page = table[2, 1]  # of a row of 32 tokens of which the last is made one of the future
    arrays.keys[last_page, 15] = arrays.values[last_page, 15] = np.nan
    lens = arrays.inputs.single_kv_lens
    inputs = arrays.inputs._replace(page_table=jnp.asarray(table), single_kv_lens=lens.at[1].add(-1))
    shorter = attend(case, dataclasses.replace(arrays, inputs=inputs), sizes(splits, 16))
    assert np.isfinite(shorter.out).all()
    rows = np.array([0, 2, 3])
    np.testing.assert_array_equal(shorter.out[rows], clean.out[rows])
    np.testing.assert_array_equal(shorter.lse[rows], clean.lse[rows])


@pytest.mark.parametrize("window", [None, 20])
def test_a_key_that_is_not_a_number_reaches_who_sees_it_only(window: int | None):
    case = dataclasses.replace(named("decode"), window=window)
    arrays = cases.make(case)
    clean = attend(case, arrays, sizes(2, 32))
    for row, position in ((2, 120), (3, 40)):  # of 131 and 301 keys
        arrays.keys[np.asarray(arrays.inputs.page_table)[row + 1, position], 0, 1] = np.nan
    found = attend(case, arrays, sizes(2, 32))
    is_hit = np.zeros(found.lse.shape, bool)
    is_hit[[2] if window else [2, 3], case.heads // case.kv_heads :] = True
    assert np.isnan(found.out[is_hit]).all()
    assert np.isnan(found.lse[is_hit]).all()
    np.testing.assert_array_equal(found.out[~is_hit], clean.out[~is_hit])
    np.testing.assert_array_equal(found.lse[~is_hit], clean.lse[~is_hit])


def test_is_what_the_op_runs_for_a_decode_step():
    case = named("decode-without-padding")
    arrays = cases.make(case)
    no_tiles = {part: arrays.inputs.tile_rows[:0] for part in arrays.inputs._fields if part.startswith("tile_")}
    inputs = arrays.inputs._replace(**no_tiles)
    found = ops.paged_attention(
        jnp.asarray(arrays.queries),
        (jnp.asarray(arrays.keys), jnp.asarray(arrays.values)),
        inputs,
        scale=case.head_dim**-0.5,
        implementation="triton",
    )
    np.testing.assert_allclose(found, arrays.expected, atol=3e-6)


@pytest.mark.parametrize("head_dim", [40, 272])
def test_says_what_it_cannot_do(head_dim: int):
    case = cases.Case("no", ((3, 1),), head_dim=head_dim)
    with pytest.raises(NotImplementedError, match=r"but got (40|272); the implementation 'reference' takes any"):
        attend(case, cases.make(case), sizes(1, 16))


def test_refuses_an_8_bit_pool_that_its_offsets_do_not_reach():
    arrays = cases.make(named("decode-without-padding"))
    head_dim = arrays.queries.shape[2]
    pool = jax.ShapeDtypeStruct((2**31 // head_dim + 1, 1, 1, head_dim), "float8_e4m3fn")

    def run(keys: jax.Array, values: jax.Array) -> Attended:
        return paged_decode(
            jnp.asarray(arrays.queries), keys, values, arrays.inputs, scale=1.0, sizes=sizes(1, 16), interpret=True
        )

    with pytest.raises(NotImplementedError, match="2147483648 numbers of a pool of float8_e4m3fn"):
        jax.eval_shape(run, pool, pool)
