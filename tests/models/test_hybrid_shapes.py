"""Files of hybrids of linear and full attention: what published ones keep, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jsg.engine.problems import find_problems
from jsg.errors import ModelError
from jsg.models.block_spec import AttentionSpec, ExpertsSpec
from jsg.models.latent_spec import LatentSpec
from jsg.models.state_specs import DeltaSpec
from tests.golden.compare import MAX_DIFFERENCE, Recorded
from tests.golden.variants import random_tensors, write_checkpoint
from tests.models.paged import PagedModel, load_directory
from tests.models.published import PUBLISHED
from tests.models.sizes import num_parameters
from tests.models.test_config import read

ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "layer_types": None,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_parameters": ROPE,
}
EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "mlp_only_layers": []}
EXPERTS |= {"shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001}
MODELS = {
    # Width, inner width, layers, heads, key-value heads, value heads; MiB of states of a request, KiB of a token.
    "0.8B": (1024, 3584, 24, 8, 2, 16, 18, 12),
    "9B": (4096, 12288, 32, 16, 4, 32, 48, 32),
    "27B": (5120, 17408, 64, 24, 4, 48, 144, 64),
    "35B-A3B": (2048, None, 40, 16, 2, 32, 60, 20),
}


def text_half(name: str) -> dict[str, Any]:
    width, inner, layers, heads, kv_heads, values, *_ = MODELS[name]
    fields = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    fields |= {"num_key_value_heads": kv_heads, "linear_num_value_heads": values, **TEXT}
    return fields | EXPERTS | {"model_type": "qwen3_5_moe_text"} if inner is None else fields


@pytest.mark.parametrize("name", MODELS)
def test_what_published_models_keep(tmp_path: Path, name: str):
    is_sparse, num_layers = MODELS[name][1] is None, MODELS[name][2]
    kind = "Qwen3_5Moe" if is_sparse else "Qwen3_5"
    text = {key: value for key, value in text_half(name).items() if value is not None}
    whole = {
        "text_config": text,
        "vision_config": {"depth": 27},
        "image_token_id": 248056,
        "tie_word_embeddings": False,
    }
    spec = read(tmp_path, {"architectures": [f"{kind}ForConditionalGeneration"], **whole})
    mib, kib = MODELS[name][-2:]
    matrices = sum(shapes[1].num_bytes(2) for shapes in spec.state_shapes)
    assert matrices == mib * 2**20
    assert matrices < spec.state_bytes(2) < 1.05 * matrices, "inputs of the convolution are few"
    assert spec.kv_bytes_per_token(2) == kib * 2**10
    assert [isinstance(layer.attention, DeltaSpec) for layer in spec.layers] == [True, True, True, False] * (
        num_layers // 4
    )
    assert isinstance(spec.layers[0].mlp, ExpertsSpec) == is_sparse
    held = ["model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"]
    assert all(spec.names.is_unread(spec.names.here(tensor)) for tensor in held)


KIMI = PUBLISHED["kimi-linear-48b-a3b"].file


def test_what_kimi_linear_keeps(tmp_path: Path):
    """Latent rows of seven layers beside states of twenty."""
    spec = read(tmp_path, KIMI)
    matrices = sum(shapes[1].num_bytes(2) for shapes in spec.state_shapes)
    assert (matrices, spec.kv_bytes_per_token(2)) == (40 * 2**20, 7 * 576 * 2)
    assert matrices < spec.state_bytes(2) < 1.06 * matrices
    full = [layer for layer, of in enumerate(spec.layers) if isinstance(of.attention, LatentSpec)]
    assert full == [3, 7, 11, 15, 19, 23, 26]
    assert [of.experts is None for of in spec.layers] == [True] + [False] * 26
    assert spec.max_position_embeddings == 2**20


def test_the_names_that_published_files_of_kimi_linear_have(tmp_path: Path):
    """A block without experts has that of other families. transformers writes the name of those with experts."""
    golden = Recorded("kimi_linear")
    tensors = random_tensors("kimi_linear", golden.note["seed"])
    written, published = "model.layers.0.block_sparse_moe.", "model.layers.0.mlp."
    assert f"{written}gate_proj.weight" in tensors
    write_checkpoint(tmp_path, "kimi_linear", {name.replace(written, published): x for name, x in tensors.items()})
    paged = PagedModel(*load_directory(tmp_path))
    assert golden.difference(paged.extend({1: golden.tokens})[1]) <= MAX_DIFFERENCE
    spec, problems = find_problems(tmp_path, [file.name for file in tmp_path.iterdir()], "auto")
    assert spec is not None and problems == []


GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "num_hidden_layers": 40,
    "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 9, "attention"]
    + [*["mamba"] * 9, "attention"] * 2
    + ["mamba"] * 4,
    "init_method": "mup",
    "mamba_chunk_size": 256,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "normalization_function": "rmsnorm",
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
}
GRANITES = {
    # Width, inner width, shared width, experts, heads, key-value heads, heads of Mamba; MiB, KiB; millions of numbers.
    "h-micro": (2048, 8192, 8192, 0, 32, 8, 64, 72, 8, 3191),
    "h-tiny": (1536, 512, 1024, 64, 12, 4, 48, 54, 8, 6939),
    "h-small": (4096, 768, 1536, 72, 32, 8, 128, 144, 16, 32207),
}


def granite(name: str) -> dict[str, Any]:
    names = "hidden_size intermediate_size shared_intermediate_size num_local_experts num_attention_heads"
    names += " num_key_value_heads mamba_n_heads"
    return GRANITE | dict(zip(names.split(), GRANITES[name], strict=False)) | {"num_experts_per_tok": 10}


@pytest.mark.parametrize("name", GRANITES)
def test_what_granite_keeps(tmp_path: Path, name: str):
    spec = read(tmp_path, granite(name))
    mib, kib, millions = GRANITES[name][-3:]
    assert sum(shapes[1].num_bytes(2) for shapes in spec.state_shapes) == mib * 2**20
    assert spec.kv_bytes_per_token(2) == kib * 2**10 and len(spec.state_shapes) == 36
    assert round(num_parameters(spec) / 1e6) == millions


def test_an_infinite_step_as_transformers_5_writes_it(tmp_path: Path):
    """Every Granite 4 that it saved has this, such as a fine-tuned one."""
    spec = read(tmp_path, granite("h-tiny") | {"time_step_limit": [0.25, {"__float__": "Infinity"}]})
    assert spec.layers[0].attention.steps == (0.25, float("inf"))
    for wrong in ({"__float__": "NaN"}, {"__float__": 1}, {"__float__": "Infinity", "x": 1}):
        with pytest.raises(ModelError, match="time_step_limit must be the smallest and the largest step"):
            read(tmp_path, granite("h-tiny") | {"time_step_limit": [0.25, wrong]})


NEMOTRONS: dict[str, tuple[str, dict[str, Any], int, int, int, int]] = {
    # Layers, fields; layers with states, MiB of states, KiB of a token, millions of numbers.
    "h-8b": ("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", {"hidden_size": 4096}, 24, 96, 16, 8101),
    "nano-9b-v2": (
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        {"hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40, "mamba_head_dim": 80},
        27,
        135,
        16,
        8888,
    ),
    "3-nano-30b-a3b": (
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        {
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "num_key_value_heads": 2,
            "mamba_num_heads": 64,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "routed_scaling_factor": 2.5,
        },
        23,
        46,
        6,
        31578,
    ),
    "3-super-120b-a12b": (  # as many layers of each kind, in another order
        "MEMEMEMEM*E" * 8,
        {
            "hidden_size": 4096,
            "num_key_value_heads": 2,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "moe_latent_size": 1024,
            "moe_intermediate_size": 2688,
            "moe_shared_expert_intermediate_size": 5376,
            "routed_scaling_factor": 5.0,
            "num_nextn_predict_layers": 1,
            "mtp_hybrid_override_pattern": "*E",
        },
        40,
        160,
        8,
        120_669,
    ),
}


def nemotron(name: str) -> dict[str, Any]:
    pattern, fields, *_ = NEMOTRONS[name]
    written = {"chunk_size": 128, "time_step_limit": [0.0, float("inf")], "num_query_groups": 8, "rms_norm_eps": 1e-5}
    written |= {"norm_eps": 1e-5, "partial_rotary_factor": 1.0, "rope_theta": 10000, "mamba_ssm_cache_dtype": "float32"}
    kind = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "time_step_rank": 256}
    return {**kind, **written, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), **fields}


@pytest.mark.parametrize("name", NEMOTRONS)
def test_what_nemotron_keeps(tmp_path: Path, name: str):
    pattern, _, num_states, mib, kib, millions = NEMOTRONS[name]
    spec = read(tmp_path, nemotron(name))
    assert (spec.num_layers, len(spec.state_shapes), len(spec.kv_shapes)) == (
        len(pattern),
        num_states,
        pattern.count("*"),
    )
    assert sum(shapes[1].num_bytes(2) for shapes in spec.state_shapes) == mib * 2**20
    assert spec.kv_bytes_per_token(2) == kib * 2**10
    assert round(num_parameters(spec) / 1e6) == millions
    assert not any("num_hidden_layers" in note for note in spec.notes)


def test_a_list_of_layers_counts_more_than_their_number(tmp_path: Path):
    file = nemotron("h-8b") | {"layers_block_type": ["mamba", "attention", "mlp"]}
    spec = read(tmp_path, file)
    assert spec.num_layers == 3
    assert any("num_hidden_layers has no effect" in note for note in spec.notes)


def test_other_names_of_fields_of_nemotron(tmp_path: Path):
    """Of the first published files, and those that transformers takes besides its own."""
    plain = nemotron("h-8b") | {"head_dim": 64, "n_groups": 4, "conv_kernel": 3, "time_step_limit": [0.1, 1]}
    other = nemotron("h-8b") | {"attention_head_dim": 64, "mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_dt_min": 0.01}
    other |= {"mamba_conv_bias": False, "mamba_expand": 3, "mamba_chunk_size": 64, "mamba_dt_limit": [0.1, 1.0]}
    assert read(tmp_path, other) == read(tmp_path, plain | {"use_conv_bias": False})


def test_the_range_of_steps_in_training_is_no_bound_of_steps(tmp_path: Path):
    """As in the code that NVIDIA publishes with its checkpoints, which all have this limit."""
    spec = read(tmp_path, nemotron("h-8b") | {"time_step_min": 0.001, "time_step_max": 0.1})
    assert spec.layers[0].attention.steps == (0.0, float("inf"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hybrid_override_pattern": "M-M-"}, "with attention in at least one layer"),
        ({"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern must be made of M, "),
        ({"layers_block_type": ["mamba", "sliding_attention"]}, "layers_block_type must be made of mamba, "),
        ({"layers_block_type": "M*"}, "layers_block_type must be made of mamba, "),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act must be 'relu2'"),
        ({"use_bias": True}, "use_bias must be False"),
        ({"n_groups": 7}, "n_groups must divide 128 heads"),
        ({"residual_in_fp32": True}, "residual_in_fp32 must be False"),
    ],
)
def test_what_is_refused_of_nemotron(tmp_path: Path, fields: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        read(tmp_path, nemotron("h-8b") | fields)


def test_a_group_is_repeated_for_each_device_and_several_are_shared_out(tmp_path: Path):
    spec = read(tmp_path, granite("h-tiny"))
    mamba = spec.over_devices(4).layers[0].attention
    assert (mamba.key_heads, mamba.group_repeats, spec.layers[0].attention.key_heads) == (4, 4, 1)
    with pytest.raises(ModelError, match="the heads of Mamba layers of the model, which is 48, but got 32"):
        spec.layers[0].attention.over_devices(32)
    three = read(tmp_path, granite("h-tiny") | {"mamba_n_groups": 3})
    with pytest.raises(ModelError, match="the groups of heads of Mamba layers of the model, which is 3, but got 2"):
        three.over_devices(2)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"linear_attn_config": {"gate": "x"}},
            "linear_attn_config: Kimi Linear's linear attention has no field 'gate'",
        ),
        ({"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1]}}, "have each layer from 1 to 27"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "have each layer from 1 to 27"),
        ({"linear_attn_config": {"head_dim": "x"}}, r"linear_head_dim must be an integer in \[1, "),
        (
            {"linear_attn_config": {"short_conv_kernel_size": 1}},
            r"linear_conv_kernel_dim must be an integer in \[2, 16",
        ),
        ({"layer_types": ["linear_attention"] * 27}, "at least one of them full_attention"),
        ({"mla_use_nope": False}, "mla_use_nope must be True"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be 'sigmoid'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 27 of dense or sparse"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be 32"),
    ],
)
def test_what_is_refused_of_kimi_linear(tmp_path: Path, fields: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        read(tmp_path, KIMI | fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": None}, "layer_types must be 40 of mamba or attention or "),
        ({"layer_types": ["mamba"] * 40}, "layer_types must be attention in at least one layer"),
        ({"mamba_d_head": 32}, "mamba_d_head must give 48 heads 3072 numbers"),
        ({"mamba_n_groups": 7}, "mamba_n_groups must divide 48 heads"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias must be False"),
        ({"mamba_d_conv": 1}, "mamba_d_conv must be an integer in"),
        ({"time_step_limit": [1, 0.5]}, "time_step_limit must be the smallest and the largest step"),
        ({"time_step_limit": None}, "time_step_limit must be the smallest and the largest step"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type must be rope or nope"),
    ],
)
def test_what_is_refused_of_granite(tmp_path: Path, fields: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        read(tmp_path, granite("h-tiny") | fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype must be 'float32'"),
        ({"attn_output_gate": False}, "attn_output_gate must be True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type must be swish or silu"),
        ({"layer_types": ["linear_attention"] * 24}, "at least one of them full_attention"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer_types must be 24 of"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads must be a multiple of 16 key heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be above 1"),
        ({"linear_gate": "x"}, "'linear_gate'"),
    ],
)
def test_what_is_refused(tmp_path: Path, fields: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        read(tmp_path, {"architectures": ["Qwen3_5ForCausalLM"], **text_half("0.8B"), **fields})


def test_layers_of_lfm2_keep_three_inputs_of_each_channel(tmp_path: Path):
    spec = read(tmp_path, PUBLISHED["lfm2-1.2b"].file)
    full = [i for i, layer in enumerate(spec.layers) if isinstance(layer.attention, AttentionSpec)]
    assert full == [2, 5, 8, 10, 12, 14] and {layer.mlp.inner for layer in spec.layers} == {8192}
    assert (spec.state_bytes(2), spec.kv_bytes_per_token(2)) == (10 * 3 * 2048 * 2, 12 * 2**10)
    with pytest.raises(ModelError, match="hidden_size of the model, which is 2048, but got 3"):
        spec.layers[0].over_devices(3, 1)
    sparse = read(tmp_path, PUBLISHED["lfm2-8b-a1b"].file)
    assert [layer.experts is not None for layer in sparse.layers] == [False] * 2 + [True] * 22


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"conv_L_cache": 1}, r"conv_L_cache must be an integer in \[2, 16\]"),
        ({"layer_types": ["conv"] * 16}, "at least one of them full_attention"),
        ({"layer_types": ["linear_attention"] * 16}, "layer_types must be 16 of conv or full_attention"),
        ({"full_attn_idxs": 3}, "full_attn_idxs must be a list of the layers with attention"),
        ({"conv_bias": 1}, "conv_bias must be true or false"),
        ({"block_multiple_of": 0}, "block_multiple_of"),
        ({"rms_norm_eps": 1e-5}, "no field 'rms_norm_eps'"),
    ],
)
def test_what_is_refused_of_lfm2(tmp_path: Path, fields: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        read(tmp_path, PUBLISHED["lfm2-1.2b"].file | fields)


def test_both_names_of_a_tied_head_count_also_around_a_text_half(tmp_path: Path):
    text = PUBLISHED["lfm2-vl-450m"].file
    whole = {"architectures": ["Lfm2VlForConditionalGeneration"], "text_config": text | {"tie_embedding": True}}
    for said in ({"tie_embedding": False}, {"tie_word_embeddings": False}):
        assert not read(tmp_path, text | said).tie_word_embeddings
        # The head of the text half is not there in the whole.
        assert not read(tmp_path, whole | said).tie_word_embeddings
    assert read(tmp_path, whole).tie_word_embeddings


def test_devices_share_out_key_heads(tmp_path: Path):
    spec = read(tmp_path, {"architectures": ["Qwen3_5ForCausalLM"], **text_half("27B"), "linear_num_key_heads": 6})
    with pytest.raises(ModelError, match="linear_num_key_heads of the model, which is 6, but got 4"):
        spec.over_devices(4)


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same checkpoint with the experts of a layer in one tensor, as the published ones have them."""
    made, number = {name: x for name, x in tensors.items() if ".experts." not in name}, 0
    layers = {name.split(".mlp.experts.")[0] for name in tensors if ".mlp.experts." in name}
    for layer in layers:
        number = len({name for name in tensors if name.startswith(f"{layer}.mlp.experts.") and "down" in name})
        each = {
            kind: [tensors[f"{layer}.mlp.experts.{i}.{kind}_proj.weight"] for i in range(number)]
            for kind in ("gate", "up", "down")
        }
        made[f"{layer}.mlp.experts.gate_up_proj"] = np.stack(
            [np.concatenate(both) for both in zip(each["gate"], each["up"], strict=True)]
        )
        made[f"{layer}.mlp.experts.down_proj"] = np.stack(each["down"])
    return made


def test_experts_in_one_tensor_and_layers_that_are_passed_over(tmp_path: Path):
    golden = Recorded("qwen3_5_moe_around")
    tensors = stacked(random_tensors("qwen3_5_moe_around", golden.note["seed"]))
    tensors |= {
        "mtp.fc.weight": np.ones((2, 2), np.float32),
        "mtp.layers.0.mlp.experts.down_proj": np.ones((1, 2, 2), np.float32),
    }
    write_checkpoint(tmp_path, "qwen3_5_moe_around", tensors)
    assert not any(".experts.0." in name for name in tensors)
    paged = PagedModel(*load_directory(tmp_path))
    assert golden.difference(paged.extend({1: golden.tokens})[1]) <= MAX_DIFFERENCE
    spec, problems = find_problems(tmp_path, [file.name for file in tmp_path.iterdir()], "auto")
    assert spec is not None and problems == []
