"""Files of hybrids of linear and full attention: what published ones keep, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jsg.engine.problems import find_problems
from jsg.errors import ModelError
from jsg.models.block_spec import ExpertsSpec
from jsg.models.delta_spec import DeltaSpec
from jsg.models.latent_spec import LatentSpec
from tests.golden.compare import MAX_DIFFERENCE, Recorded
from tests.golden.variants import random_tensors, write_checkpoint
from tests.models.paged import PagedModel, load_directory
from tests.models.published import PUBLISHED
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
