"""Chunks whose own keys are seen apart, against attention by its definition."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench import attention_cases as cases
from bench.attention_cases import Case
from jsg.kernels_pallas import chunks, cudnn_chunks, mosaic_chunks, ops
from jsg.kernels_pallas.attention_block import Attended
from jsg.kernels_pallas.inputs import AttentionInputs, Chunks
from jsg.kernels_pallas.ragged_paged_attention import Sizes
from jsg.window import Window
from tests.kernels_pallas import definition

SMALL = Sizes(block_m=32, block_k=32, num_warps=4, num_stages=3)
STEP = Case("step", ((40, 1), (200, 1), (70, 131), (3, 20), (0, 150), (9, 127)), page_size=16)
TAKEN = {3: (2, 131, 70), 5: (153, 150, 0)}
"""Request row of each chunk that is long enough → its first packed token, tokens and cached tokens."""


def by_xla(queries: jax.Array, keys: jax.Array, values: jax.Array, of: Chunks, *, scale: float) -> Attended:
    """JAX's own attention, with a mask for who sees whom. What belongs to no chunk is NaN."""
    is_in, at = chunks.within(of.starts, of.lens, len(queries))
    key = jnp.arange(len(keys))[None, :, None] - of.places
    is_seen = (is_in[:, None] & (key >= 0) & (key <= at[:, None])).any(axis=-1)
    out, lse = jax.nn.dot_product_attention(
        *(x[None] for x in (queries, keys, values)),
        mask=is_seen[None, None],
        scale=scale,
        implementation="xla",
        return_residual=True,
    )
    is_own = is_in.any(axis=1)[:, None]
    return Attended(jnp.where(is_own[..., None], out[0], jnp.nan), jnp.where(is_own, lse[0], jnp.nan))


def like_cudnn(queries: jax.Array, keys: jax.Array, values: jax.Array, **how: Any) -> Any:
    """What cuDNN makes of packed sequences: results, and the log-sum-exp of each sequence, head and token of it."""
    assert how["mask_type"].name == "PADDING_CAUSAL" and how["return_residual"]
    places = [how[name] for name in ("q_offsets", "q_seqlen", "kv_offsets", "kv_seqlen")]
    shapes = queries.shape, (places[1].shape[1], queries.shape[2], queries.shape[1])
    found = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.pure_callback(functools.partial(_one_by_one, how["scale"]), found, queries, keys, values, *places)


def _one_by_one(scale: float, queries: jax.Array, keys: jax.Array, values: jax.Array, *places: jax.Array) -> Any:
    (query,), (key,), (value,) = map(np.asarray, (queries, keys, values))
    out, stats = np.full_like(query, np.nan), np.full((places[1].size, query.shape[1], len(query)), np.nan, np.float32)
    key, value = (np.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    for i, (first, length, first_key, key_length) in enumerate(zip(*(np.asarray(x)[0] for x in places), strict=False)):
        assert key_length == length and first + length <= len(query) and first_key + length <= len(key)
        tokens, own = slice(first, first + length), slice(first_key, first_key + length)
        scores = scale * np.einsum("qnh,snh->nqs", query[tokens], key[own])
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        stats[i, :, :length] = lse = np.log(np.exp(scores).sum(axis=-1))
        out[tokens] = np.einsum("nqs,snh->qnh", np.exp(scores - lse[..., None]), value[own])
    return out[None], stats


def kernel(own: chunks.OwnAttention, queries: jax.Array, keys, values, inputs: AttentionInputs, **how: Any) -> Attended:
    """`chunks.paged_attention` as `definition` calls kernels."""
    assert how.pop("window") is None and how.pop("softcap") is None
    inputs = inputs._replace(chunks=chunks.list_chunks(inputs, len(queries)))
    return chunks.paged_attention(queries, keys, values, inputs, own=own, **how)


def test_the_first_chunks_that_are_long_enough_are_taken():
    arrays = cases.make(STEP)
    found = jax.device_get(chunks.list_chunks(arrays.inputs, len(arrays.queries)))
    assert found is not None and len(found.lens) == 4
    assert {
        row: (start, length, position) for row, start, length, position, _ in zip(*found, strict=True) if length
    } == TAKEN
    assert found.places.tolist()[:2] == [0, 136], "at multiples of 8"
    assert chunks.list_chunks(arrays.inputs, 127) is None


@pytest.mark.parametrize(("own", "has_sinks"), [(by_xla, True), (cudnn_chunks.attend, False)], ids=["xla", "cudnn"])
def test_own_keys_and_cached_ones_are_joined(
    own: chunks.OwnAttention, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cudnn_chunks.cudnn, "dot_product_attention", like_cudnn)
    case = dataclasses.replace(STEP, has_sinks=has_sinks)
    arrays = definition.with_garbage(cases.make(case), key=np.nan, value=1e30)
    definition.check_arrays(functools.partial(kernel, own), case, arrays, SMALL)


@pytest.fixture
def mosaic(monkeypatch: pytest.MonkeyPatch) -> Iterator[chunks.OwnAttention]:
    """The Mosaic kernel in an interpreter that notices accesses of warp groups that no barrier orders.

    With small blocks even a short chunk has more of them than there are in shared memory.
    """
    monkeypatch.setattr(mosaic_chunks, "BLOCK_K", 64)
    params = plgpu.InterpretGPUParams(detect_races=True)
    yield functools.partial(mosaic_chunks.attend, interpret=params)
    assert not gpu_callbacks.get_races().races_found


def test_the_mosaic_kernel(mosaic: chunks.OwnAttention):
    case = dataclasses.replace(STEP, heads=2, kv_heads=1, head_dim=64)
    arrays = cases.make(case, dtype="bfloat16")
    seen_from = 2 + 90  # the packed token whose key is NaN
    row, start = 3, 2
    position = 70 + seen_from - start
    arrays.keys[np.asarray(arrays.inputs.page_table)[row, position // 16], position % 16] = np.nan
    is_nan = np.zeros(len(arrays.expected), bool)
    is_nan[seen_from : start + 131] = True
    found = definition.attend(functools.partial(kernel, mosaic), case, arrays, SMALL)
    out, lse = (np.asarray(x, np.float32)[: len(is_nan)] for x in found)
    assert np.isnan(out[is_nan]).all() and np.isnan(lse[is_nan]).all()
    np.testing.assert_allclose(out[~is_nan], arrays.expected[~is_nan], atol=2e-2)
    np.testing.assert_allclose(lse[~is_nan], arrays.expected_lse[~is_nan], atol=1e-5)


def test_nothing_is_taken_apart_until_a_table_says_so(monkeypatch: pytest.MonkeyPatch):
    arrays = cases.make(STEP)
    monkeypatch.setattr(ops, "best_implementation", lambda: "triton")
    assert ops.chunks_of(arrays.inputs, len(arrays.queries)) is None
    monkeypatch.setattr(chunks, "chosen", lambda _: "mosaic")
    of = ops.chunks_of(arrays.inputs, len(arrays.queries))
    assert of is not None
    monkeypatch.setattr(ops, "best_implementation", lambda: "native")
    assert ops.chunks_of(arrays.inputs, len(arrays.queries)) is None

    monkeypatch.setattr(mosaic_chunks, "attend", by_xla)
    monkeypatch.setattr(mosaic_chunks, "target_capability", lambda: mosaic_chunks.CAPABILITY)
    queries = jnp.zeros((4, 2, 64), jnp.bfloat16)
    plain = {"window": None, "softcap": None}
    assert chunks.taken_by("mosaic", queries, plain) is by_xla
    assert chunks.taken_by("cudnn", queries, plain) is None, "XLA would leave it without a plan here"
    for refused, how in (
        (queries.astype("float32"), plain),
        (queries[..., :32], plain),
        (queries, plain | {"window": Window(8)}),
        (queries, plain | {"softcap": 5.0}),
    ):
        assert chunks.taken_by("mosaic", refused, how) is None
