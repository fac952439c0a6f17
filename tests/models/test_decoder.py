import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jsg.models.config import ModelConfig, RopeConfig
from jsg.models.layers import project
from jsg.models.loading import load_model
from tests.models.paged import NUM_ROWS, PagedModel

TOKENS = list(range(100, 190))


def config(**changes) -> ModelConfig:
    shape = {
        "architecture": "Qwen3ForCausalLM",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(),
        "layer_windows": (None, None),
        "attention_bias": True,
    }
    return ModelConfig(**{**shape, **changes})


@pytest.fixture(scope="module")
def model() -> nnx.Module:
    return load_model(None, config(), load_format="dummy", seed=3)


@pytest.fixture(scope="module")
def paged(model) -> PagedModel:
    return PagedModel(config(), model, page_size=2)


def test_dummy_logits_have_a_std_of_about_one(paged):
    paged.reset()
    logits = paged.extend({0: TOKENS})[0]
    assert logits.dtype == np.float32
    assert 0.8 < logits.std() < 1.25
    assert len({int(row.argmax()) for row in logits}) > 20


def test_chunks_neighbours_and_decoding_change_nothing(paged):
    paged.reset()
    whole = paged.extend({0: TOKENS})[0]
    paged.reset()
    first = paged.extend({2: TOKENS[:65], 1: TOKENS[3:20]})[2]
    second = paged.extend({1: TOKENS[20:40], 2: TOKENS[65:80]})[2]
    third = [paged.decode({1: 5, 2: token})[2] for token in TOKENS[80:]]
    np.testing.assert_allclose(np.concatenate([first, second, third]), whole, atol=2e-5)


def test_bfloat16_agrees_with_float32(paged, model):
    paged.reset()
    exact = paged.extend({0: TOKENS})[0]
    graph, state = nnx.split(model)
    halved = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    rounded = PagedModel(config(), halved, page_size=2, dtype=jnp.bfloat16).extend({0: TOKENS})[0]
    assert rounded.dtype == np.float32
    assert np.abs(rounded - exact).max() < 0.15
    assert not np.array_equal(rounded, rounded.astype(jnp.bfloat16))  # the head is not rounded


def test_only_the_slots_of_real_tokens_and_the_dump_are_written(paged):
    paged.reset()
    paged.extend({1: TOKENS[:9]})
    pages = set(np.flatnonzero(np.asarray(paged.pool.layers[1][0]).any(axis=(1, 2, 3))))
    assert pages - {0} == set(paged.page_table[1, :5])
    assert not set(paged.page_table[[0, 2]].ravel()) & pages
    assert NUM_ROWS == 3


def test_a_bfloat16_matmul_converts_no_kernel_on_cpu():
    x, kernel = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    compiled = jax.jit(project).lower(x, kernel).compile()
    assert "f32[512,1024]" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 1024
