import functools
import json
import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from jsg.errors import ModelError
from jsg.models.block_spec import AttentionSpec, FeedForwardSpec, NormSpec, RopeSpec
from jsg.models.config import read_spec
from jsg.models.families import kimi_linear
from jsg.models.family import Family
from jsg.models.registry import FAMILIES
from jsg.models.rope import attention_factor
from jsg.models.rope_fields import ROPE_FIELDS
from jsg.models.spec import LayerSpec, ModelSpec
from jsg.sources import MAX_JSON_BYTES, Fields
from jsg.window import Window
from tests.golden.variants import LLAMA, VARIANTS

QWEN = VARIANTS["qwen2"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def read(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(directory)


def test_a_plain_llama(tmp_path):
    layer = LayerSpec(
        before_attention=NormSpec(name="input_layernorm", eps=1e-5),
        attention=AttentionSpec(heads=4, kv_heads=4, head_dim=16, scale=0.25, rope=RopeSpec()),
        before_mlp=NormSpec(name="post_attention_layernorm", eps=1e-5),
        mlp=FeedForwardSpec(inner=160),
    )
    assert read(tmp_path, LLAMA) == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        layers=(layer, layer),
        final_norm=NormSpec(name="model.norm", eps=1e-5),
        max_position_embeddings=512,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_both_generations_of_rope_fields_mean_the_same(tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    base = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    old = {**base, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {**base, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    assert read(tmp_path, old) == read(tmp_path, new)
    assert read(tmp_path, new).layers[0].attention.rope == RopeSpec(type="llama3", theta=5e5, **scaling)


BARE = {
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", *["attention"] * 31], "position_embedding_type": "rope"}
}
"""Fields whose defaults make no model with keys, or one without rope."""


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fields_that_a_file_lacks_have_the_defaults_of_its_family(tmp_path, architecture):
    """Bare files; the heads are many and wide, so that no two defaults agree by chance."""
    bare = {"architectures": [architecture], **BARE.get(architecture, {})}
    config = read(tmp_path, bare)
    kv_heads, theta, eps, context_len, windows, bos = {
        "LlamaForCausalLM": (32, 1e4, 1e-6, 2048, {None}, 1),
        "Llama4ForCausalLM": (8, 5e5, 1e-5, 131072, {None, Window(8192, is_aligned=True)}, 1),
        "MistralForCausalLM": (8, 1e4, 1e-6, 131072, {4096}, 1),
        "MixtralForCausalLM": (8, 1e6, 1e-5, 131072, {None}, 1),
        "Qwen2ForCausalLM": (32, 1e4, 1e-6, 32768, {None}, None),
        "Qwen2MoeForCausalLM": (16, 1e4, 1e-6, 32768, {None}, None),
        "Qwen3ForCausalLM": (32, 1e4, 1e-6, 32768, {None}, None),
        "Qwen3MoeForCausalLM": (4, 1e4, 1e-6, 32768, {None}, None),
        "MinistralForCausalLM": (8, 1e4, 1e-6, 131072, {4096}, 1),
        "Ministral3ForCausalLM": (8, 1e6, 1e-5, 262144, {None}, 1),
        "SeedOssForCausalLM": (8, 1e4, 1e-6, 524288, {None}, 0),
        "Olmo2ForCausalLM": (32, 1e4, 1e-5, 2048, {None}, None),
        "SmolLM3ForCausalLM": (4, 2e6, 1e-6, 32768, {None}, 128000),
        "GptOssForCausalLM": (8, 1.5e5, 1e-5, 131072, {None, 128}, None),
        "GraniteForCausalLM": (32, 1e4, 1e-6, 2048, {None}, 1),
        "Phi3ForCausalLM": (32, 1e4, 1e-5, 4096, {None}, 1),
        "Ernie4_5ForCausalLM": (2, 5e5, 1e-5, 131072, {None}, 1),
        "Cohere2ForCausalLM": (64, 1e4, 1e-5, 8192, {4096, None}, 5),
        "Glm4ForCausalLM": (2, 1e4, 1.5625e-7, 131072, {None}, None),
        "Gemma2ForCausalLM": (4, 1e4, 1e-6, 8192, {4096, None}, 2),
        "Gemma3ForCausalLM": (4, 1e4, 1e-6, 131072, {4096, None}, 2),
        "Gemma4ForCausalLM": (4, 1e4, 1e-6, 131072, {512, None}, 2),
        "Olmo3ForCausalLM": (32, 5e5, 1e-5, 2048, {4096, None}, None),
        "Exaone4ForCausalLM": (32, 1e4, 1e-5, 2048, {4096, None}, 0),
        "HunYuanDenseV1ForCausalLM": (32, 1e4, 1e-5, 2048, {None}, 1),
        "GraniteMoeForCausalLM": (32, 1e4, 1e-6, 2048, {None}, 1),
        "GraniteMoeHybridForCausalLM": (32, 1e4, 1e-6, 2048, {None}, 1),
        "NemotronHForCausalLM": (8, None, 1e-5, 4096, {None}, 1),
        "OlmoeForCausalLM": (16, 1e4, 1e-5, 4096, {None}, None),
        "DeepseekV2ForCausalLM": (1, 1e4, 1e-6, 2048, {None}, 1),
        "DeepseekV3ForCausalLM": (1, 1e4, 1e-6, 4096, {None}, 0),
        "Glm4MoeLiteForCausalLM": (1, 1e4, 1e-5, 202752, {None}, 0),
        "Mistral4ForCausalLM": (1, 1e4, 1e-6, 1048576, {None}, 1),
        "Glm4MoeForCausalLM": (8, 1e4, 1e-5, 131072, {None}, None),
        "MiniMaxM2ForCausalLM": (8, 5e6, 1e-6, 196608, {None}, 200034),
        "Ernie4_5_MoeForCausalLM": (4, 5e5, 1e-5, 131072, {None}, 1),
        "Lfm2ForCausalLM": (8, 1e6, 1e-5, 128000, {None}, 1),
        "Lfm2MoeForCausalLM": (8, 1e6, 1e-5, 128000, {None}, 1),
        "KimiLinearForCausalLM": (1, None, 1e-5, 1048576, {None}, 163584),
        "Qwen3NextForCausalLM": (2, 1e4, 1e-6, 32768, {None}, None),
        "Qwen3_5ForCausalLM": (4, 1e4, 1e-6, 32768, {None}, None),
        "Qwen3_5MoeForCausalLM": (2, 1e4, 1e-6, 32768, {None}, None),
    }[architecture]
    attention = first_attention(config)
    found = attention.rope and attention.rope.theta
    assert (attention.kv_heads, found, config.final_norm.eps) == (kv_heads, theta, eps)
    assert (config.max_position_embeddings, set(config.layer_windows), config.bos_token_id) == (
        context_len,
        {Window(window) if isinstance(window, int) else window for window in windows},
        bos,
    )
    family_head_dim = FAMILIES[architecture].defaults.get("head_dim")
    half = read(tmp_path, {**bare, "hidden_size": 64 * attention.heads})
    assert first_attention(half).head_dim == (family_head_dim or 64)


def first_attention(spec):
    """That of the first layer with keys and values."""
    return next(layer.attention for layer in spec.layers if layer.attention.kv_shape is not None)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_defaults_of_families_are_those_of_transformers(architecture):
    from transformers import AutoConfig

    family = FAMILIES[architecture]
    theirs = AutoConfig.for_model(family.model_type)
    names = "layer_types full_attn_idxs no_rope_layers per_layer_config moe_layers mlp_layer_types"
    derived = {"moe_layer_end_index": -1} | dict.fromkeys(names.split())
    values, ours = theirs.to_dict() | derived, dict(family.defaults)
    if "rope_theta" not in ours and "rope_parameters" not in ours:
        assert getattr(theirs, "rope_parameters", None) is None  # no position turns anything
        theirs.rope_parameters = {"rope_theta": None}
    elif "full_attention" not in ours.get("rope_parameters", {}):
        ours["rope_theta"] = ours.pop("rope_parameters", {}).get("rope_theta", ours["rope_theta"])
    values |= {name: value for name, value in theirs.rope_parameters.items() if name in ours}
    values["rope_theta"] = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)["rope_theta"]
    if "rope_local_base_freq" in ours:
        values["rope_local_base_freq"] = theirs.rope_parameters["sliding_attention"]["rope_theta"]
        values["sliding_window_pattern"] = theirs._sliding_window_pattern
    in_code = "sliding_window_pattern full_attention_interval output_gate_type hidden_act first_k_dense_replace"
    for name in in_code.split():
        values.setdefault(name, ours.get(name))
    if "use_sliding_window" in family.defaults:  # their configuration has applied the switch already
        values["sliding_window"] = type(theirs).sliding_window
    if "hybrid_override_pattern" in ours:  # and written the layers as a list
        values |= {name: ours[name] for name in ("hybrid_override_pattern", "layers_block_type", "num_hidden_layers")}
        assert ours["hybrid_override_pattern"] == theirs.hybrid_override_pattern
    if "mamba_d_head" in ours:  # and computed the width
        values["mamba_d_head"] = type(theirs).mamba_d_head
    derived = {"num_key_value_heads": theirs.num_attention_heads, "head_dim": 128, "global_head_dim": 512}
    derived |= {"num_experts_per_tok": 6}
    for name, value in ours.items():
        theirs_too = values[name] if name in values else getattr(theirs, name, None)  # some have two names there
        assert (theirs_too or derived.get(name)) == (value or derived.get(name)), name


def test_a_family_reads_what_it_declares_and_nothing_else(tmp_path, monkeypatch):
    """Of the variants of each family, all files together, also with the switch of windows on."""
    seen: dict[str, set[str]] = {}
    get, spec_of = Fields.get, Family.read

    def read_family(family: Family, architecture: str, config: Fields) -> ModelSpec:
        names = seen.setdefault(architecture, set())
        with monkeypatch.context() as patch:
            patch.setattr(Fields, "get", lambda fields, name, *default: names.add(name) or get(fields, name, *default))
            return spec_of(family, architecture, config)

    monkeypatch.setattr(Family, "read", read_family)
    for variant in VARIANTS.values():
        read(tmp_path, variant)
        family = FAMILIES.get(variant["architectures"][0])  # None for a wrapper, whose text half is one of them
        if family is not None and "use_sliding_window" in family.defaults:
            read(tmp_path, {**variant, "use_sliding_window": True})
    assert seen.keys() == FAMILIES.keys()
    for architecture, names in seen.items():
        family = FAMILIES[architecture]
        assert family.defaults.keys() - names == set(), f"{architecture} has defaults of fields that it does not read"
        undeclared = names - {
            *family.defaults,
            *family.only,
            *family.ignored.split(),
            *family.aliases,
            *ROPE_FIELDS,
            *READ_FOR_ALL,
        }
        assert undeclared == set(), f"{architecture} reads fields that it would refuse"


READ_FOR_ALL = (
    "attention_bias",  # refused in no family, and off where it is absent
    "mlp_bias",
    "alpha",
    "pad_token_id",
    "auto_map",
    "is_causal",
    "model_type",
    "rope_parameters",
    "rope_scaling",
    "chunk_size",
    "local_size",
    "llama_4_scaling_beta",
    *kimi_linear.SIZES,
    *kimi_linear.LAYERS,
)


def test_a_null_is_no_absence(tmp_path):
    mistral = {**VARIANTS["mistral_window"], "num_key_value_heads": None, "sliding_window": None, "head_dim": None}
    config = read(tmp_path, mistral)
    assert (config.layers[0].attention.kv_heads, config.layers[0].attention.head_dim, any(config.layer_windows)) == (
        4,
        16,
        False,
    )
    for name in ("rms_norm_eps", "max_position_embeddings", "hidden_act", "is_causal", "vocab_size", "rope_theta"):
        with pytest.raises(ModelError, match=rf"{name} must .* but is absent or null"):
            read(tmp_path, {**LLAMA, name: None})
    with pytest.raises(ModelError, match="head_dim must"):
        read(tmp_path, {**VARIANTS["qwen3"], "head_dim": None})


def test_rope_scaling_hides_rope_parameters(tmp_path):
    """Users add the first to files in which transformers 5 wrote the second."""
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    base = {name: value for name, value in LLAMA.items() if name != "rope_theta"} | new
    both = read(tmp_path, {**base, "rope_scaling": YARN})
    assert (both.layers[0].attention.rope.type, both.layers[0].attention.rope.theta, both.max_position_embeddings) == (
        "yarn",
        1e4,
        512,
    )
    assert "10000 and not 500000" in both.notes[0]
    for rope_theta in ({"rope_theta": 5e5}, {"rope_scaling": {**YARN, "rope_theta": 5e5}}):
        config = read(tmp_path, {**base, "rope_scaling": YARN, **rope_theta})
        assert (config.layers[0].attention.rope.type, config.layers[0].attention.rope.theta, config.notes) == (
            "yarn",
            5e5,
            (),
        )
    assert read(tmp_path, {**base, "rope_scaling": {}}).layers[0].attention.rope == RopeSpec(theta=5e5)
    hidden = read(tmp_path, {**LLAMA, "rope_theta": 77.0, **new})
    assert (hidden.layers[0].attention.rope.theta, hidden.notes) == (5e5, ())


def test_longrope_has_one_list_for_all_texts(tmp_path):
    """The long one, as in transformers for texts beyond the original context, unless all are within it."""
    model = read(tmp_path, VARIANTS["phi3_longrope"])
    long = model.layers[0].attention.rope
    assert (long.factors, long.rotated) == ((1.0, 1.1, 1.5, 2.5, 4.0, 6.0), 12)
    assert long.attention_factor == math.sqrt(1 + math.log(512 / 32) / math.log(32))
    assert model.for_context(33) == model
    (rope,) = {layer.attention.rope for layer in model.for_context(32).layers}
    assert (rope.factors, rope.attention_factor) == ((1.5,) * 6, long.attention_factor)
    for name in ("su", "yarn", "longrope"):
        scaling = {**VARIANTS["phi3_longrope"]["rope_scaling"], "type": name}
        assert read(tmp_path, {**VARIANTS["phi3_longrope"], "rope_scaling": scaling}) == model
    with pytest.raises(ModelError, match="rope_type must be default or longrope, but is 'linear'"):
        read(tmp_path, {**VARIANTS["phi3_longrope"], "rope_scaling": {"type": "linear", "factor": 2.0}})


@pytest.mark.parametrize("place", ["beside", "within"])
def test_a_share_of_a_head_is_turned_where_a_family_can(tmp_path, place: str):
    """A share in the dictionary counts more than one beside it, and one of an odd number is refused."""
    rope = {"rope_type": "default", "rope_theta": 1e4}

    def rotated(share: float) -> int | None:
        fields = {"partial_rotary_factor": share} if place == "beside" else {"partial_rotary_factor": 0.125}
        own = {"rope_parameters": {**rope, "partial_rotary_factor": share}} if place == "within" else {}
        return read(tmp_path, {**VARIANTS["glm4"], **fields, **own}).layers[0].attention.rope.rotated

    assert [rotated(share) for share in (0.5, 0.25, 1.0)] == [8, 4, None]
    for share in (0.2, 1.5, 0.01):
        with pytest.raises(ModelError, match="partial_rotary_factor must"):
            rotated(share)


def test_an_original_context_beside_the_dictionary_counts_more(tmp_path):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for scaling, name in ((YARN, "rope_scaling"), ({**llama3, "original_max_position_embeddings": 99}, "rope_scaling")):
        config = read(tmp_path, {**LLAMA, name: scaling, "original_max_position_embeddings": 64})
        assert config.layers[0].attention.rope.original_max_position_embeddings == 64
    assert (
        read(tmp_path, {**LLAMA, "rope_scaling": llama3}).layers[0].attention.rope.original_max_position_embeddings
        == 512
    )
    for variant, length in (("ministral3", 64), ("ministral3_window", None)):  # where positions scale
        file = VARIANTS[variant]
        growth = read(tmp_path, {**file, "original_max_position_embeddings": 64}).layers[0].attention.query_scale
        assert growth.length == (length or file["rope_parameters"]["original_max_position_embeddings"])
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}, "original_max_position_embeddings": 64}
    assert read(tmp_path, {**LLAMA, **linear}).layers[0].attention.rope == RopeSpec(type="linear", factor=2.0)


def test_scales_of_yarn(tmp_path):
    def rope(**fields: Any) -> RopeSpec:
        return read(tmp_path, {**LLAMA, "rope_scaling": {**YARN, **fields}}).layers[0].attention.rope

    assert rope(mscale=2.0).attention_factor is None
    both = {"mscale": 2.0, "mscale_all_dim": 0.5}
    assert rope(**both).attention_factor == pytest.approx((0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert rope(**both, attention_factor=1.5).attention_factor == 1.5
    assert rope(mscale=0.7, mscale_all_dim=0).attention_factor is None
    assert (rope(finetuned=True).truncate, rope(truncate=False).truncate) == (True, False)
    assert not rope(truncate=None).truncate  # a null is false, as in transformers
    olmo = read(tmp_path, {**VARIANTS["olmo3"], "rope_scaling": {**YARN, "truncate": False}})
    assert {layer.attention.rope.truncate for layer in olmo.layers} == {True}
    assert olmo.notes[-1] == "truncate has no effect in the rope of full_attention, as in transformers"


def test_a_factor_of_attention_as_deepseek_publishes_it(tmp_path):
    """DeepSeek-R1-0528-Qwen3-8B: its factor takes that of yarn away, and transformers does not know it."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = read(tmp_path, {**VARIANTS["qwen3"], "rope_scaling": {**scaling, "attn_factor": 0.8782488562869419}})
    assert attention_factor(config.layers[0].attention.rope) == pytest.approx(1.0)
    assert "attn_factor = 0.878249" in config.notes[0]
    both = read(tmp_path, {**LLAMA, "rope_scaling": {**scaling, "attention_factor": 1.5, "attn_factor": 2.0}})
    assert attention_factor(both.layers[0].attention.rope) == 3.0
    plain = read(tmp_path, {**LLAMA, "rope_scaling": {**scaling, "attn_factor": 1.0}})
    assert attention_factor(plain.layers[0].attention.rope) == attention_factor(RopeSpec(type="yarn", factor=4.0))
    assert not plain.notes


def test_dual_chunk_attention_ends_the_context_at_its_first_chunk(tmp_path):
    """Qwen2.5-7B-Instruct-1M. Within one chunk it is plain attention."""
    chunks = {"chunk_size": 300, "local_size": 44, "original_max_position_embeddings": 300}
    config = read(tmp_path, {**QWEN, "dual_chunk_attention_config": chunks})
    assert (config.max_position_embeddings, len(config.notes)) == (256, 1)
    chunks["chunk_size"] = 1024
    config = read(tmp_path, {**QWEN, "dual_chunk_attention_config": chunks})
    assert (config.max_position_embeddings, len(config.notes)) == (512, 0)
    for broken in ({}, {"chunk_size": 300, "local_size": 300}):
        with pytest.raises(ModelError, match=r"dual_chunk_attention_config.*|_size must"):
            read(tmp_path, {**QWEN, "dual_chunk_attention_config": {"local_size": 1, **broken}})
    with pytest.raises(ModelError, match="no field 'dual_chunk_attention_config'"):
        read(tmp_path, {**LLAMA, "dual_chunk_attention_config": chunks})


def test_python_code_of_a_model_is_noted(tmp_path):
    own = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    assert "never run" in read(tmp_path, {**LLAMA, "auto_map": own}).notes[0]
    assert not read(tmp_path, {**LLAMA, "auto_map": {"AutoConfig": "x.X", "AutoTokenizer": ["x.T", None]}}).notes
    for broken in ("x", 5):
        with pytest.raises(ModelError, match="auto_map must be an object"):
            read(tmp_path, {**LLAMA, "auto_map": broken})


def test_other_names_of_architectures_and_of_fields(tmp_path):
    for name in ("LlamaModel", "LLaMAForCausalLM"):
        assert read(tmp_path, {**LLAMA, "architectures": [name]}) == read(tmp_path, LLAMA)
    assert read(tmp_path, {**VARIANTS["mixtral"], "num_experts": 3}).layers[0].mlp.count == 3


def test_fields_without_effect_are_no_reason(tmp_path):
    """Of files that people publish."""
    silent: dict[str, Any] = {
        "_name_or_path": "x",
        "attention_dropout": 0.1,
        "auto_map": {"AutoConfig": "x"},
        "is_llama_config": True,
        "max_sequence_length": 2048,
        "output_router_logits": True,
        "pretraining_tp": 2,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
        "transformers_version": "4.31.0",
        "unsloth_fixed": True,
        "use_cache": True,
        "use_mrope": False,
        "residual_multiplier": None,
        "adapters": {"adapters": {}, "config_map": {}, "fusions": {"on": False}},
        "nested": functools.reduce(lambda inner, _: {"x": inner}, range(800), {}),
    }
    assert read(tmp_path, {**LLAMA, **silent}) == read(tmp_path, LLAMA)
    names = (
        "sequence_length max_context_length model_max_length max_model_len n_ctx context_window_size seq_len "
        "tensor_parallel_output virtual_pp_degree use_flash_attention_2 use_flash_attn use_fused_rms_norm "
        "use_fused_rope fuse_attention_qkv recompute_granularity peft_version base_model pipeline_tag processor_class "
        "min_p "
        "renormalize_logits "
        "router_aux_loss_coef router_z_loss_coef loss_type aux_loss_alpha layerdrop hidden_dropout_rate "
        "attention_probs_dropout_prob pad_token decoder_start_token_id output_hidden_states initializer_factor"
    )
    assert read(tmp_path, {**LLAMA, **dict.fromkeys(names.split(), 2)}) == read(tmp_path, LLAMA)
    assert read(tmp_path, {**LLAMA, "residual_multiplier": 1.0, "rope_scaling_factor": 1}) == read(tmp_path, LLAMA)


@pytest.mark.parametrize(
    "name",
    "num_experts_per_token experts_per_token output_multiplier output_multiplier_scale rope_version residual_coef "
    "transformers_weights use_class_token use_fused_scale flash_scale alibi rotary_dim logit_scale attention_sink_size "
    "attention_chunk_size scale_emb norm_topk_prob moe_intermediate_size num_shared_experts norm_type clip_qkv "
    "final_logit_softcapping use_parallel_residual lora_alpha mrope_section v_head_dim use_logn_attn causal_window "
    "draft_vocab_size rope_condense_ratio per_token_scale".split(),
)
def test_a_field_that_may_change_answers_passes_no_pattern(tmp_path, name: str):
    with pytest.raises(ModelError, match=f"no field {name!r}"):
        read(tmp_path, {**LLAMA, name: 2})


def test_a_factor_of_one_that_stands_for_another_scale_is_refused(tmp_path):
    """Granite's factor of attention replaces the usual one, so 1 is none that changes nothing."""
    with pytest.raises(ModelError, match="no field 'attention_multiplier'"):
        read(tmp_path, {**LLAMA, "attention_multiplier": 1.0})
    with pytest.raises(ModelError, match="no field 'no_rope_layers'"):
        read(tmp_path, {**LLAMA, "no_rope_layers": [0, 0]})


@pytest.mark.parametrize(
    ("rope", "context_len"),
    [
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_context_length_counts_rope_scaling(tmp_path, rope, context_len):
    assert read(tmp_path, {**LLAMA, "rope_scaling": rope}).max_position_embeddings == context_len


def test_windows_of_mistral_and_qwen(tmp_path):
    mistral = {**VARIANTS["mistral_window"], "use_sliding_window": False}
    assert read(tmp_path, mistral).layer_windows == (Window(32),) * 2  # the switch is Qwen's
    assert "no such switch" in read(tmp_path, mistral).notes[0]
    qwen = {**QWEN, "sliding_window": 32, "max_window_layers": 1}
    assert read(tmp_path, {**qwen, "use_sliding_window": False}).layer_windows == (None, None)
    without_switch = {name: value for name, value in qwen.items() if name != "use_sliding_window"}
    assert read(tmp_path, without_switch).layer_windows == (None, None)
    switched = read(tmp_path, {**qwen, "use_sliding_window": True})
    assert (switched.layer_windows, any(switched.layer_windows)) == ((None, Window(32)), True)
    named = {**qwen, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    assert read(tmp_path, named).layer_windows == (Window(32), None)


def test_llama_has_no_window(tmp_path):
    config = read(tmp_path, {**LLAMA, "sliding_window": 32})
    assert (config.layer_windows, len(config.notes)) == ((None, None), 1)
    assert not read(tmp_path, {**LLAMA, "sliding_window": 32, "use_sliding_window": False}).notes
    named = read(tmp_path, {**LLAMA, "layer_types": ["sliding_attention", "full_attention"]})
    assert (named.layer_windows, len(named.notes)) == ((None, None), 1)
    assert not read(tmp_path, {**LLAMA, "layer_types": ["full_attention"] * 2}).notes
    with pytest.raises(ModelError, match="layer_types"):
        read(tmp_path, {**LLAMA, "layer_types": ["chunked_attention", "full_attention"]})


def test_end_tokens_of_both_files_count(tmp_path):
    config = read(tmp_path, {**LLAMA, "eos_token_id": 9}, {"eos_token_id": [7, 9, 8]})
    assert config.eos_token_ids == (9, 7, 8)


def test_kv_bytes(tmp_path):
    assert read(tmp_path, {**LLAMA, "num_key_value_heads": 2}).kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": ["A", "B"]}, "architectures"),
        ({"architectures": ["MambaForCausalLM"], "hidden_size": None}, r"one of Llama, .*ForCausalLM.* names 'Mamba"),
        ({"hidden_size": None}, "hidden_size must be an integer"),
        ({"model_type": "mistral"}, "model_type must be llama"),
        ({"is_causal": False}, "is_causal must be true"),
        ({"residual_multiplier": 0.22}, r"no field 'residual_multiplier'.* 0\.22"),
        ({"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        ({"no_rope_layers": [1] * 9000}, "no_rope_layers"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"num_local_experts": 4}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": "512"}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"intermediate_size": 10**400}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide 4"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type must be one of .* but is 'dynamic'"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7}}, "long_factor must be a list of .* of 8 pairs"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [0.0] * 8}}, "short_factor must be a list"),
        ({"rope_scaling": {**LONGROPE, "short_factor": None}}, "short_factor must be a list"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "extrapolation_factor": 1.0}}, "extrapolation_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1] * 2000}, "eos_token_id"),
    ],
)
def test_what_is_wrong_or_unsupported_is_refused_by_name(tmp_path, change, named):
    with pytest.raises(ModelError, match=named) as error:
        read(tmp_path, {**LLAMA, **change})
    assert str(tmp_path) not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sliding_window": -1}, "sliding_window"),
        ({"max_window_layers": None}, "max_window_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ],
)
def test_windows_that_are_wrong_are_refused(tmp_path, change, named):
    with pytest.raises(ModelError, match=named):
        read(tmp_path, {**VARIANTS["qwen2_window"], **change})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(tmp_path)


def test_a_missing_and_a_huge_config_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"must have config\.json"):
        read_spec(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match="at most"):
        read_spec(tmp_path)


JSON_VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)


@hypothesis.settings(max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    variant=st.sampled_from(sorted(VARIANTS)),
    name=st.sampled_from(sorted({name for config in VARIANTS.values() for name in config})),
    value=JSON_VALUES,
)
def test_any_value_of_any_field_is_read_or_refused(tmp_path, variant, name, value):
    try:
        config = read(tmp_path, {**VARIANTS[variant], name: value})
    except ModelError:
        return
    assert first_attention(config).heads % first_attention(config).kv_heads == 0
    assert config.kv_bytes_per_token(2) > 0


GLM_MOE = VARIANTS["glm4_moe"]
MINIMAX = VARIANTS["minimax_m2"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (GLM_MOE | {"n_group": 5}, "n_group must divide 12 experts into groups of at least two, but is 5"),
        (GLM_MOE | {"n_group": 12}, "n_group must divide 12 experts into groups of at least two, but is 12"),
        (GLM_MOE | {"topk_group": 5}, r"topk_group must be an integer in \[1, 4\]"),
        (GLM_MOE | {"num_experts_per_tok": 7}, "topk_group must be groups of at least 7 experts, but is 2"),
        (
            MINIMAX | {"scoring_func": "softmax"},
            "scoring_func must be 'sigmoid', the only supported value, but is 'soft",
        ),
        (MINIMAX | {"attn_type_list": [1, 0]}, "attn_type_list must be 1 for each layer"),
        (MINIMAX | {"attn_type_list": 1}, "attn_type_list must be 1 for each layer"),
        (MINIMAX | {"model_type": ["minimax_m2"]}, "model_type must be minimax_m2"),
        (MINIMAX | {"shared_intermediate_size": 64}, "no field 'shared_intermediate_size'"),
        (VARIANTS["deepseek_v2"] | {"topk_method": None}, "topk_method must be 'greedy', .* is absent or null"),
        (VARIANTS["granitemoe"] | {"num_experts": 3}, "no field 'num_experts'"),
        (VARIANTS["llama4"] | {"no_rope_layers": [1] * 99, "layer_types": None}, "no_rope_layers must be a number for"),
        (VARIANTS["ernie4_5_moe"] | {"use_bias": True}, "use_bias must be False, the only supported value"),
    ],
)
def test_a_router_that_is_another_is_refused(tmp_path, file: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, file)


@pytest.mark.parametrize(("variant", "field"), [("gpt_oss", "attention_bias"), ("qwen2_moe", "qkv_bias")])
def test_a_null_switch_is_off(tmp_path, variant: str, field: str):
    """Where an absent one is true, as in transformers."""
    assert read(tmp_path, VARIANTS[variant] | {field: True}).layers[0].attention.qkv_bias
    assert not read(tmp_path, VARIANTS[variant] | {field: None}).layers[0].attention.qkv_bias
    nulls = {"rope_interleave": None, "norm_topk_prob": None}
    layer = read(tmp_path, VARIANTS["deepseek_v3"] | nulls).layers[-1]
    assert not (layer.attention.rope.is_interleaved or layer.experts.router.choice.is_renormed)


def test_layers_behind_the_last_are_not_read(tmp_path):
    """They predict later tokens. As many as the file says; the next one is a tensor too many."""
    names = read(tmp_path, GLM_MOE | {"num_nextn_predict_layers": 2}).names
    found = [names.is_unread(f"model.layers.{layer}.mlp.experts.0.up_proj.weight") for layer in range(6)]
    assert found == [False, False, False, True, True, False]
    assert not read(tmp_path, GLM_MOE | {"num_nextn_predict_layers": 0}).names.is_unread("model.layers.3.norm.weight")
    ernie = read(tmp_path, VARIANTS["ernie4_5_moe"]).names
    assert ernie.is_unread("model.mtp_block.0.mlp.up_proj.weight") and not ernie.is_unread("model.norm.weight")
