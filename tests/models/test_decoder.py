import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jsg.cache.pool import make_pool, make_states
from jsg.kernels_pallas.activation import ClampedGate
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.models import decoder
from jsg.models.block_spec import (
    AttentionSpec,
    BesideSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentExpertsSpec,
    LayerInputSpec,
    NormSpec,
    QueryKeyNormSpec,
    QueryScaleSpec,
    RopeSpec,
    RouterSpec,
    StackSpec,
)
from jsg.models.decoder import Decoder, Layer
from jsg.models.inputs import ForwardInputs
from jsg.models.latent_spec import LatentSpec
from jsg.models.layers import RMSNorm, project
from jsg.models.loading import load_model
from jsg.models.spec import LayerSpec, ModelSpec
from jsg.models.state_specs import ConvolutionSpec, DeltaSpec
from jsg.window import Window
from tests.models.paged import NUM_ROWS, PagedModel

TOKENS = list(range(100, 190))


LAYER = LayerSpec(
    before_attention=NormSpec(name="input_layernorm", eps=1e-6),
    attention=AttentionSpec(
        heads=4,
        kv_heads=2,
        head_dim=32,
        scale=32**-0.5,
        rope=RopeSpec(),
        query_scale=QueryScaleSpec(beta=0.1, length=64),
        qk_norm=QueryKeyNormSpec(eps=1e-6),
        qkv_bias=True,
        output_bias=True,
        sinks="self_attn.sinks",
    ),
    after_attention=NormSpec(name="post_self_attn_layernorm", eps=1e-6),
    before_mlp=NormSpec(name="post_attention_layernorm", eps=1e-6),
    mlp=FeedForwardSpec(inner=96),
    after_mlp=NormSpec(name="post_mlp_layernorm", eps=1e-6),
)


def config(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(
        architecture="of this test",
        vocab_size=300,
        hidden_size=64,
        layers=layers or (LAYER, LAYER),
        final_norm=NormSpec(name="model.norm", eps=1e-6),
        max_position_embeddings=512,
    )


@pytest.fixture(scope="module")
def model() -> nnx.Module:
    return load_model(None, config(), load_format="dummy", seed=3)


@pytest.fixture(scope="module")
def paged(model) -> PagedModel:
    return PagedModel(config(), model, page_size=2)


def test_dummy_logits_have_a_std_of_about_one(paged):
    paged.reset()
    logits = paged.extend({0: TOKENS})[0]
    assert logits.dtype == np.float32 and 0.8 < logits.std() < 1.25
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
    assert rounded.dtype == np.float32 and np.abs(rounded - exact).max() < 0.15
    assert not np.array_equal(rounded, rounded.astype(jnp.bfloat16))  # the head is not rounded


EXPERTS = ExpertsSpec(
    count=4,
    inner=96,
    router=RouterSpec(choice=ChoiceSpec(per_token=2), choice_bias="mlp.bias"),
    gate="mlp.experts.{expert}.gate_proj",
    up="mlp.experts.{expert}.up_proj",
    down="mlp.experts.{expert}.down_proj",
    stack=StackSpec(),
    has_bias=True,
    activation=ClampedGate(limit=7.0, slope=1.5),
    shared=FeedForwardSpec(inner=64),
    shared_gate="mlp.shared_expert_gate",
    latent=LatentExpertsSpec(width=24, into="mlp.into", out="mlp.out"),
)
NORM = NormSpec(name="norm", eps=1e-6)
BESIDE = BesideSpec(
    experts=dataclasses.replace(EXPERTS, router=dataclasses.replace(EXPERTS.router, norm=NORM)),
    before=NORM,
    after=NORM,
    after_block=NORM,
)
OWN_INPUT = LayerInputSpec(count=200, width=8, vocab_size=300, norm=NORM, table_norm=NORM)
LATENT = LatentSpec(
    heads=4,
    query_rank=24,
    rank=32,
    plain_dim=16,
    rope_dim=16,
    value_dim=24,
    scale=32**-0.5,
    rope=RopeSpec(),
    query_scale=QueryScaleSpec(beta=0.1, length=64),
    query_norm=NormSpec(name="self_attn.q_a_layernorm", eps=1e-6),
    norm=NormSpec(name="self_attn.kv_a_layernorm", eps=1e-6),
)
DELTA = DeltaSpec(
    key_heads=2,
    heads=4,
    key_dim=16,
    value_dim=16,
    taps=4,
    eps=1e-6,
    gate_rank=8,
    projections=("q_proj", "k_proj", "v_proj"),
    gates=("b_proj",),
)
OTHER: dict[str, Any] = {
    "key_heads": 4,
    "key_dim": 32,
    "taps": 2,
    "shared_gate": "another",
    "into": "another",
    "out": "another",
    "gate_rank": 16,
    "module": "another",
    "gates": ("another",),
    "convolutions": ("a", "b", "c"),
    "activation": "gelu_tanh",
    "query_rank": 16,
    "rank": 48,
    "kv_source": 0,
    "scalar": "another",
    "beside": BESIDE,
    "own_input": OWN_INPUT,
    "norm": NORM,
    "input_factor": 0.5,
    "expert_scale": "another",
    "width": 4,
    "vocab_size": 400,
    "plain_dim": 8,
    "rope_dim": 8,
    "value_dim": 8,
    "limit": 3.0,
    "slope": 1.0,
    # A value that no record below has, for each field that is neither a switch nor a record itself.
    "name": "another",
    "query": "another",
    "key": "another",
    "output": "another",
    "sinks": "another",
    "gate": "another.{expert}",
    "up": "another.{expert}",
    "down": "another.{expert}",
    "projections": ("a", "b", "c"),
    "eps": 0.5,
    "scale": 0.5,
    "beta": 0.2,
    "length": 32,
    "offset": 3,
    "residual_factor": 0.5,
    "window": Window(9),
    "softcap": 5.0,
    "type": "linear",
    "theta": 77.0,
    "factor": 3.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 99,
    "beta_fast": 40.0,
    "beta_slow": 2.0,
    "attention_factor": 1.5,
    "rotated": 16,
    "factors": (2.0,) * 16,
    "short_factors": (2.0,) * 16,
    "suffix": "",
    "bias_suffix": "",
    "heads": 8,
    "kv_heads": 4,
    "kv_repeats": 2,
    "head_dim": 16,
    "inner": 32,
    "count": 5,
    "per_token": 1,
    "score": "sigmoid",
    "groups": 2,
    "kept_groups": 2,
    "masked_score": 0.0,
    "channels": 32,
    "least_sum": 1e-3,
    "added_sum": 1e-3,
    "choice_bias": "another",
    "choice_bias_axes": 2,
}


def changed_in_one(record: Any) -> Iterator[Any]:
    """Copies of a record that differ in one field each, however deep it is."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            inner = changed_in_one(value)
        else:
            inner = iter([not value if isinstance(value, bool) else OTHER[field.name]])
        for other in inner:
            yield dataclasses.replace(record, **{field.name: other})


KINDS = (
    LAYER,
    dataclasses.replace(LAYER, mlp=EXPERTS),
    dataclasses.replace(LAYER, attention=LATENT),
    dataclasses.replace(LAYER, attention=ConvolutionSpec(channels=64, taps=3, has_bias=False)),
    dataclasses.replace(LAYER, attention=DELTA),
    pytest.param(dataclasses.replace(LAYER, beside=BESIDE, own_input=OWN_INPUT), marks=pytest.mark.slow),
)


@pytest.mark.parametrize(
    "first", KINDS, ids=lambda layer: "-".join(type(part).__name__ for part in (layer.attention, *layer.blocks))
)
def test_layers_that_differ_in_one_switch_are_traced_apart(monkeypatch, first: LayerSpec):
    """Each field of each record, so that a new one is in it. Equal layers are traced once.

    All of them are layers of one model, for a model takes long to make.
    """
    traced = []

    def trace(layer: Layer, x: Any, inputs: Any, turn: Any, cache: Any, own: Any) -> tuple[Any, Any]:
        traced.append(layer.spec)
        return x, cache

    monkeypatch.setattr(Layer, "__call__", trace)
    others = list(changed_in_one(first))
    spec = config(first, *others, copy.deepcopy(first), copy.deepcopy(others[-1]))
    decoder._run_layer.clear_cache()  # of traces of other tests
    jax.eval_shape(lambda: forward(spec))
    assert traced == [first, *others]


def forward(spec: ModelSpec) -> jax.Array:
    """The hidden states of two tokens."""
    none = jnp.zeros(1, jnp.int32)
    attention = AttentionInputs(none[None], none, none, none, none, none, none, jnp.int32(0))
    tokens = jnp.zeros(2, jnp.int32)
    pool = make_pool(spec.kv_shapes, 2, 1, jnp.float32)
    pool = pool._replace(states=make_states(spec.state_shapes, 2, jnp.float32))
    return Decoder(spec, jnp.float32)(ForwardInputs(tokens, tokens, tokens, attention), pool)[0]


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


@pytest.mark.parametrize(("adds_one", "is_centred"), [(False, False), (True, False), (False, True)])
def test_a_wide_norm_rounds_once(adds_one: bool, is_centred: bool):
    spec = NormSpec(name="norm", eps=1e-6, is_wide=True, adds_one=adds_one, is_centred=is_centred)
    norm, x = RMSNorm(spec, "", 64, jnp.bfloat16), 0.5 + jax.random.normal(jax.random.key(1), (40, 64))
    norm.weight.set_value((not adds_one) + jax.random.normal(jax.random.key(2), (64,), jnp.bfloat16) / 3)
    x = x.astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact -= exact.mean(-1, keepdims=True) if is_centred else 0
    exact *= (np.asarray(norm.weight[...], np.float64) + adds_one) / np.sqrt(
        np.square(exact).mean(-1, keepdims=True) + 1e-6
    )
    nearest = jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16)
    assert (norm(x) == nearest).mean() > 0.99
    norm.is_wide = False
    assert (norm(x) == nearest).mean() < 0.9
