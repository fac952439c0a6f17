"""What files mean, beside transformers' own configuration classes, which need no PyTorch."""

import json
import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from jsg.errors import ModelError
from jsg.models.latent_spec import LatentSpec
from jsg.models.registry import ALIASES, FAMILIES
from jsg.models.spec import ModelSpec
from jsg.models.state_specs import ConvolutionSpec, DeltaSpec, MambaSpec
from jsg.window import Window
from tests.golden.variants import LLAMA
from tests.models.test_config import read

GONE = "absent"
ROPES = [
    {},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "type": "linear", "factor": 2, "attention_factor": None, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "truncate": None},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "rope_theta": 7e5},
    {"rope_type": "default", "rope_theta": 5e4},
    {"type": "linear", "factor": 2.0},
    {"factor": 2.0},
]
FIELDS: dict[str, list[Any]] = {
    "num_key_value_heads": [2, 4, None],
    "head_dim": [24, None],
    "max_position_embeddings": [300],
    "rms_norm_eps": [1e-4],
    "rope_theta": [333.0, 10**6],
    "original_max_position_embeddings": [64],
    "sliding_window": [None, 7],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 9],
    "layer_types": [None, ["full_attention"] * 2, ["sliding_attention", "full_attention"]],
    "tie_word_embeddings": [True, False],
    "rope_scaling": [None, *ROPES],
    "rope_parameters": [None, *ROPES],
    "num_experts": [3],
    "num_local_experts": [4],
    "is_causal": [True, False],
}


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e4, "original_max_position_embeddings": 128}
UNTRUNCATED = YARN | {"truncate": False}
OF_KINDS = {"full_attention": UNTRUNCATED, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
GROWING = YARN | {"llama_4_scaling_beta": 0.1}
UNREAD = frozenset({"num_mtp_layers", "num_nextn_predict_layers"})
LAYER_SHAPE = {"head_dim": 64, "num_key_value_heads": 1}

OWN_FIELDS: dict[str, dict[str, list[Any]]] = {
    "Cohere2ForCausalLM": {
        "layer_norm_eps": [1e-4],
        "sliding_window_pattern": [1, 2, 3],
        "logit_scale": [0.5],
    },
    "DeepseekV3ForCausalLM": {
        "first_k_dense_replace": [0, 1, 2],
        "n_routed_experts": [6],
        "q_lora_rank": [None, 24],
        "qk_nope_head_dim": [20],
        "qk_rope_head_dim": [16],
        "v_head_dim": [28],
        "norm_topk_prob": [None, False],
        "rope_interleave": [None, False],
    },
    "Ernie4_5_MoeForCausalLM": {
        "moe_layer_start_index": [0, 1],
        "moe_layer_end_index": [0, 1, -1],
        "moe_layer_interval": [2],
        "moe_num_experts": [5],
    },
    "Gemma4ForCausalLM": {
        "attention_k_eq_v": [True],
        "enable_moe_block": [True],
        "global_head_dim": [32],
        "num_global_key_value_heads": [2],
        "per_layer_config": [{}, {"1": LAYER_SHAPE}, {"00": {"head_dim": 32}, "01": LAYER_SHAPE}],
        "rope_parameters": [OF_KINDS],
    },
    "Gemma3ForCausalLM": {"rope_scaling": [UNTRUNCATED], "rope_parameters": [OF_KINDS]},
    "Glm4MoeForCausalLM": {
        "first_k_dense_replace": [0, 1, 2],
        "n_routed_experts": [6],
        "n_shared_experts": [0, 2],
        "routed_scaling_factor": [1.5],
    },
    "Glm4MoeLiteForCausalLM": {"head_dim": [24], "mlp_layer_types": [["sparse", "dense"]]},
    "GraniteMoeForCausalLM": {"num_local_experts": [3]},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": [["mamba", "attention"], ["full_attention", "linear_attention"]],
        "num_local_experts": [0, 3],
        "position_embedding_type": [None, "rope", "nope"],
        "time_step_limit": [[0.1, 2.0], [0.1, {"__float__": "Infinity"}]],
        "mamba_d_head": [64, "auto"],
        "mamba_n_groups": [2],
        "mamba_conv_bias": [False],
    },
    "Lfm2ForCausalLM": {
        "norm_eps": [1e-4],
        "head_dim": [24, 32],
        "layer_types": [["conv", "full_attention"], ["full_attention", "conv"]],
        "full_attn_idxs": [None, [1], [0, 1, 5]],
        "tie_embedding": [True, False],
        "block_ff_dim": [100],
        "block_auto_adjust_ff_dim": [True, False],
        "block_ffn_dim_multiplier": [1, 1.3],
        "block_multiple_of": [7, 64],
    },
    "Lfm2MoeForCausalLM": {
        "layer_types": [["conv", "full_attention"]],
        "tie_embedding": [True, False],
        "num_dense_layers": [0, 1, 2],
        "num_experts": [6],
        "norm_topk_prob": [False],
        "routed_scaling_factor": [1.5],
    },
    "KimiLinearForCausalLM": {
        "first_k_dense_replace": [0, 1, 2],
        "layer_types": [["full_attention", "linear_attention"], ["full_attention"] * 2],
        "linear_attn_config": [
            {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 3, "head_dim": 24, "short_conv_kernel_size": 3},
            {"full_attn_layers": [2, 1], "kda_layers": []},
        ],
        "linear_conv_kernel_dim": [3],
        "linear_head_dim": [24],
        "linear_num_heads": [3],
        "mlp_layer_types": [["sparse", "dense"]],
        "model_max_length": [300],
        "moe_renormalize": [None, False],
        "num_expert_group": [2],
        "num_local_experts": [9],
        "num_shared_experts": [0, 2],
        "q_lora_rank": [24],
        "qk_rope_head_dim": [15],
        "rope_parameters": [YARN],
        "v_head_dim": [28],
    },
    "Llama4ForCausalLM": {"no_rope_layers": [[], [0, 1]], "moe_layers": [[], [0]]},
    "Ministral3ForCausalLM": {"rope_parameters": [GROWING], "original_max_position_embeddings": [64]},
    "Mistral4ForCausalLM": {
        "norm_topk_prob": [None, False],
        "rope_interleave": [None, False],
        "original_max_position_embeddings": [64],
    },
    "NemotronHForCausalLM": {
        "layers_block_type": [["moe", "attention", "mlp", "mamba"], ["full_attention", "linear_attention"]],
        "hybrid_override_pattern": ["M-*E", "*"],
        "layer_norm_epsilon": [1e-4],
        "n_groups": [2],
        "use_conv_bias": [False],
        "time_step_min": [0.1],
        "time_step_limit": [[0.1, 2.0]],
        "norm_eps": [1e-3],
        "mamba_n_groups": [4],
        "mamba_d_conv": [3],
        "mamba_dt_limit": [[0.2, 3.0]],
        "mamba_conv_bias": [False],
        "n_routed_experts": [6],
        "routed_scaling_factor": [1.5],
    },
    "Olmo3ForCausalLM": {"rope_scaling": [UNTRUNCATED], "rope_parameters": [OF_KINDS]},
    "Qwen3MoeForCausalLM": {"num_experts": [3], "num_local_experts": [9]},
}
"""Fields that other families do not have."""
IN_ALL = {
    "Gemma4ForCausalLM": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "DeepseekV3ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 2},
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2},
    "Glm4MoeForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 24},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * 2, "mamba_n_heads": 2},
    "Glm4MoeLiteForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "Lfm2MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "KimiLinearForCausalLM": {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]},
    },
    "Mistral4ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "NemotronHForCausalLM": {"n_routed_experts": 4, "moe_intermediate_size": 32, "mamba_num_heads": 8},
    "Qwen3MoeForCausalLM": {"num_experts_per_tok": 2},
}
"""Fields that all files have. Without `head_dim` the two mean different things by GLM: see its family. With the default
numbers of experts, a file that names a small one would be refused."""


def small_file(architecture: str) -> dict[str, Any]:
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    file = {name: LLAMA[name] for name in kept} | IN_ALL.get(architecture, {})
    return file | {"architectures": [architecture], "model_type": FAMILIES[architecture].model_type}


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    architecture = draw(st.sampled_from(sorted(FAMILIES)))
    own = OWN_FIELDS.get(architecture, {})
    choices = {name: st.sampled_from([GONE, GONE, *values]) for name, values in {**FIELDS, **own}.items()}
    said = {name: value for name, value in draw(st.fixed_dictionaries(choices)).items() if value != GONE}
    return small_file(architecture) | said


@pytest.mark.slow
@hypothesis.settings(max_examples=600, suppress_health_check=list(hypothesis.HealthCheck), deadline=None)
@hypothesis.given(file=files())
def test_a_file_means_what_it_means_in_transformers_or_is_refused(tmp_path: Path, file: dict[str, Any]):
    compare(tmp_path, file)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_other_names_of_fields_are_those_of_transformers(architecture: str):
    """But for the layers behind the last, which nothing reads."""
    from transformers import AutoConfig

    family = FAMILIES[architecture]
    theirs = AutoConfig.for_model(family.model_type).attribute_map
    ours, theirs = ({frozenset(names) for names in each.items()} for each in (family.aliases, theirs))
    assert ours - {UNREAD, *NAMED_IN_CODE.get(architecture, ())} == theirs - {UNREAD}


NAMED_IN_CODE = {
    "NemotronHForCausalLM": {
        frozenset(names)
        for names in (
            ("attention_head_dim", "head_dim"),  # of the first published files; transformers 5.23 takes its default
            ("mamba_conv_bias", "use_conv_bias"),
            ("mamba_d_conv", "conv_kernel"),
            ("mamba_dt_limit", "time_step_limit"),
            ("mamba_n_groups", "n_groups"),
        )
    }
}
"""Other names of fields that code of transformers has, and not its table of them."""


@pytest.mark.slow
def test_models_without_their_head_have_the_names_of_transformers():
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    assert {MODEL_MAPPING_NAMES[family.model_type] for family in FAMILIES.values()} - ALIASES.keys() == set()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(OWN_FIELDS))
def test_each_field_of_its_own_means_what_it_means_in_transformers(tmp_path: Path, architecture: str):
    """None of these files is refused, nor the one without such a field."""
    file = small_file(architecture) | {"num_key_value_heads": LLAMA["num_attention_heads"]}
    assert compare(tmp_path, file)
    for name, values in OWN_FIELDS[architecture].items():
        for value in values:
            assert compare(tmp_path, file | {name: value}), (name, value)


def compare(directory: Path, file: dict[str, Any]) -> bool:
    """Compares what the file means in both places. Returns False if one of them refuses it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedConfig

    try:
        ours = read(directory, file)
    except ModelError:
        return False
    try:
        theirs = AutoConfig.for_model(**PreTrainedConfig._decode_special_floats(json.loads(json.dumps(file))))
        theirs.standardize_rope_params()
    except (KeyError, TypeError, ValueError, ZeroDivisionError, StrictDataclassError):  # nothing to compare with
        return False
    has_kinds = getattr(theirs, "is_heterogeneous", False)
    of_layers = [theirs.per_layer_config[i] if has_kinds else theirs for i in range(theirs.num_hidden_layers)]
    has_window = "sliding_attention" not in (getattr(theirs, "layer_types", None) or ()) or theirs.sliding_window
    if of_layers[0].num_key_value_heads is None or not has_window:  # of which transformers makes no model
        return False
    blocks = [layer.experts for layer in ours.layers if layer.experts is not None]
    with_keys = [i for i, layer in enumerate(ours.layers) if layer.attention.kv_shape is not None]
    attentions = [ours.layers[i].attention for i in with_keys]
    attention, of_layers = attentions[0], [of_layers[i] for i in with_keys]
    for layer, of in enumerate(ours.layers):
        if (found := of.attention.rope) is None:
            continue
        rope = theirs.rope_parameters
        rope = rope[theirs.layer_types[layer]] if "full_attention" in rope else rope
        assert (found.type, found.theta) == (rope["rope_type"], rope["rope_theta"])
        if found.type != "default":
            assert found.factor == rope.get("factor", 1.0)
        if found.type in ("yarn", "llama3"):
            assert found.original_max_position_embeddings == rope["original_max_position_embeddings"]
            assert found.truncate == bool(theirs.rope_parameters.get("truncate", True))
        assert found.is_interleaved == interleaves(theirs)
    if isinstance(attention, LatentSpec):  # of which one head of keys is kept
        assert (attention.heads, attention.query_rank) == (theirs.num_key_value_heads, theirs.q_lora_rank)
        assert (attention.plain_dim, attention.value_dim) == (theirs.qk_nope_head_dim, theirs.v_head_dim)
        assert (attention.rank, attention.rope_dim) == (theirs.kv_lora_rank, theirs.qk_rope_head_dim)
    else:
        assert [each.kv_heads for each in attentions] == [of.num_key_value_heads for of in of_layers]
        widths = [getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads for of in of_layers]
        assert [each.head_dim for each in attentions] == widths
    if theirs.model_type == "kimi_linear":
        sizes = theirs.linear_num_heads, theirs.linear_head_dim, theirs.linear_conv_kernel_dim
        linear = [layer.attention for layer in ours.layers if isinstance(layer.attention, DeltaSpec)]
        assert all((mixer.heads, mixer.key_dim, mixer.taps) == sizes for mixer in linear)
        assert with_keys == [layer for layer, kind in enumerate(theirs.layer_types) if kind == "full_attention"]
        assert ours.max_position_embeddings == theirs.max_position_embeddings
    for layer, kind in zip(ours.layers, getattr(theirs, "layer_types", None) or (), strict=False):
        mamba = layer.attention
        assert bool(mamba.state_shapes) == (kind in ("linear_attention", "conv"))
        assert (layer.experts is not None) == (kind == "moe") or theirs.model_type != "nemotron_h"
        if isinstance(mamba, MambaSpec):
            shape = (
                mamba.heads,
                mamba.key_heads,
                mamba.key_dim,
                mamba.value_dim,
                mamba.taps,
                mamba.has_bias,
                mamba.steps,
            )
            assert shape == scan_of(theirs)
    if theirs.model_type in ("ministral3", "mistral4"):
        scale, rope = attention.query_scale, theirs.rope_parameters
        assert (scale.beta, scale.length) == (rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
    if hasattr(theirs, "conv_L_cache"):
        assert with_keys == [i for i, kind in enumerate(theirs.layer_types) if kind == "full_attention"]
        short = [layer.attention for layer in ours.layers if isinstance(layer.attention, ConvolutionSpec)]
        assert {(each.taps, each.has_bias) for each in short} <= {(theirs.conv_L_cache, theirs.conv_bias)}
        assert {mlp.inner for mlp in (layer.mlp for layer in ours.layers) if mlp not in blocks} <= {inner(theirs)}
    names = ("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps")
    eps = next(getattr(theirs, name) for name in names if hasattr(theirs, name))
    assert (ours.final_norm.eps, ours.tie_word_embeddings) == (eps, theirs.tie_word_embeddings)
    if hasattr(theirs, "logit_scale"):
        assert ours.logit_factor == theirs.logit_scale
    assert tuple(layer.experts.count if layer.experts else 0 for layer in ours.layers) == experts(theirs)
    if hasattr(theirs, "n_shared_experts") and theirs.model_type != "nemotron_h":  # whose has a width of its own
        shared = {0 if mlp.shared is None else mlp.shared.inner // mlp.inner for mlp in blocks}
        assert shared <= {theirs.n_shared_experts}
    if hasattr(theirs, "n_shared_experts") or theirs.model_type == "lfm2_moe":
        assert {mlp.router.choice.factor for mlp in blocks} <= {theirs.routed_scaling_factor}
        assert {mlp.router.choice.is_renormed for mlp in blocks} <= {bool(theirs.norm_topk_prob)}
    assert ours.layer_windows == windows(theirs, ours)
    return True


def scan_of(theirs: Any) -> tuple[Any, ...]:
    """The shape of a layer of Mamba-2."""
    if theirs.model_type == "nemotron_h":
        names = "mamba_num_heads n_groups ssm_state_size mamba_head_dim conv_kernel use_conv_bias"
    else:
        names = "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_conv_bias"
    return (*(getattr(theirs, name) for name in names.split()), tuple(theirs.time_step_limit))


def interleaves(theirs: Any) -> bool:
    """Whether rope turns neighbours together, as the models of these families take it from a configuration."""
    pairs = "cohere2 deepseek_v2 ernie4_5 ernie4_5_moe glm4 llama4_text".split()
    return theirs.model_type in pairs or bool(getattr(theirs, "rope_interleave", False))


def inner(theirs: Any) -> int:
    """The width of a block of LFM2, as its model takes it from a configuration."""
    if not getattr(theirs, "block_auto_adjust_ff_dim", False):
        return theirs.intermediate_size
    width, step = int(2 * theirs.intermediate_size / 3), theirs.block_multiple_of
    return step * math.ceil(int(theirs.block_ffn_dim_multiplier * width) / step)


def experts(theirs: Any) -> tuple[int, ...]:
    """How many each layer has, as the models of these families take them from a configuration."""
    names = ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts")
    count = next(filter(None, (getattr(theirs, name, None) for name in names)), 0)
    layers = range(theirs.num_hidden_layers)
    match theirs.model_type:
        case "nemotron_h":
            return tuple(count if kind == "moe" else 0 for kind in theirs.layer_types)
        case "gemma4_text":
            return (count * theirs.enable_moe_block,) * len(layers)
        case "glm4_moe_lite" | "kimi_linear":
            return tuple(count if kind == "sparse" else 0 for kind in theirs.mlp_layer_types)
        case "llama4_text":
            return tuple(count if layer in theirs.moe_layers else 0 for layer in layers)
        case "lfm2_moe":
            return tuple(count if layer >= theirs.num_dense_layers else 0 for layer in layers)
        case "glm4_moe" | "deepseek_v2" | "deepseek_v3" | "mistral4":
            return tuple(count if layer >= theirs.first_k_dense_replace else 0 for layer in layers)
        case "ernie4_5_moe":
            of = range(theirs.moe_layer_start_index, theirs.moe_layer_end_index + 1)
            return tuple(
                count if layer in of and (layer + 1) % theirs.moe_layer_interval == 0 else 0 for layer in layers
            )
    return (count,) * len(layers)


def windows(theirs: Any, ours: ModelSpec) -> tuple[Window | None, ...]:
    """Those of each layer, as the models of these families take them from a configuration."""
    match theirs.model_type:
        case "llama" | "lfm2" | "lfm2_moe" | "granitemoehybrid" | "nemotron_h":
            return (None,) * len(ours.layer_windows)
        case "mistral" | "mixtral" | "qwen3_moe":
            return (theirs.sliding_window and Window(theirs.sliding_window),) * ours.num_layers
        case "llama4_text":
            chunk = Window(theirs.attention_chunk_size, is_aligned=True)
            return tuple(chunk if kind == "chunked_attention" else None for kind in theirs.layer_types)
    if getattr(theirs, "layer_types", None) is None:  # a family without windows
        return (None,) * ours.num_layers
    kinds = [kind for kind in theirs.layer_types if kind != "linear_attention"]
    return tuple(Window(theirs.sliding_window) if kind == "sliding_attention" else None for kind in kinds)
