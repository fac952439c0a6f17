"""Small random checkpoints of every family and variant, the same to the last bit wherever they are made.

Needs numpy and safetensors only: the recorder runs this beside PyTorch, the tests run it beside JAX. Weights are raw
Philox bits scaled by exact arithmetic, so they do not depend on the numpy version.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.golden.other_families import OTHERS, VOCAB

SHAPES = Path(__file__).parent / "data" / "shapes.json"
"""Names and shapes of the tensors of the variants in `OTHERS`, as transformers saves them."""
HYBRIDS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
NORMS_ADD_ONE = ("gemma2", "gemma3", "gemma3_text", *HYBRIDS)
"""`model_type` of families whose norms scale by 1 + the weight."""
UNSCALED = ("gemma4", "gemma4_text")
"""`model_type` of families that learn the scale of scores in the norms of queries."""
NORMS = tuple("norm.weight norm_f.weight layer_norm1.weight layer_norm2.weight layer_scalar router.scale".split())
NORMS += ("expert_scale",)
"""The ends of names of what scales."""

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def _transformers_5(config: dict[str, Any], **rope: Any) -> dict[str, Any]:
    """The same config with the field names of transformers 5."""
    new = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")}
    return {
        **new,
        "rope_parameters": {"rope_theta": config["rope_theta"], "rope_type": "default", **rope},
        "dtype": "float32",
    }


_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_QWEN2 = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 64,
    "max_window_layers": 2,
}
_QWEN3 = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 1000000.0,
    "attention_bias": False,
}
_MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}

_MIXTRAL = {
    **_MISTRAL,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}

_SAID_BY_DEFAULTS = ("rms_norm_eps", "rope_theta", "use_sliding_window", "max_window_layers", "hidden_act")

VARIANTS: dict[str, dict[str, Any]] = {
    "llama_mha": LLAMA,
    "llama_gqa_head_dim": {**LLAMA, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3},
    "llama_tied": _transformers_5({**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama3_rope_v4": {**LLAMA, "num_key_value_heads": 2, "rope_scaling": {"rope_type": "llama3", **_LLAMA3_ROPE}},
    "llama3_rope_v5": _transformers_5(
        {**LLAMA, "num_key_value_heads": 2, "rope_theta": 500000.0}, rope_type="llama3", **_LLAMA3_ROPE
    ),
    "llama_linear_rope": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_yarn_rope": _transformers_5(
        {**LLAMA, "rope_theta": 1000.0}, rope_type="yarn", factor=4.0, original_max_position_embeddings=128
    ),
    "llama_two_ropes": {
        **LLAMA,
        "original_max_position_embeddings": 64,
        "rope_theta": 1000.0,
        "rope_parameters": {"rope_theta": 77.0, "rope_type": "default"},
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "truncate": False},
    },
    "llama_biases": {**LLAMA, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "mistral_window": _transformers_5({**_MISTRAL, "sliding_window": 32}),
    "mistral_no_window": {**_MISTRAL, "sliding_window": None},
    "mixtral": _MIXTRAL,
    "mixtral_three_of_five": _transformers_5({**_MIXTRAL, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen2": _QWEN2,
    "qwen2_window": {**_QWEN2, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen2_silent": {name: value for name, value in _QWEN2.items() if name not in _SAID_BY_DEFAULTS},
    "qwen3": _QWEN3,
    "qwen3_biases": _transformers_5({**_QWEN3, "attention_bias": True}),
    **OTHERS,
}

WIDE: dict[str, dict[str, Any]] = {
    "wide": {**VARIANTS["llama_gqa_head_dim"], "intermediate_size": 256},
    "wider": {**VARIANTS["llama_gqa_head_dim"], "hidden_size": 256, "intermediate_size": 512},
    "wide experts": {**VARIANTS["mixtral"], "intermediate_size": 128},
    "even experts": {**VARIANTS["granitemoe"], "num_local_experts": 6},
}
"""Of these, which are not recorded, several devices can share out the inputs in groups of 32, or the experts."""

ROPES: dict[str, dict[str, Any]] = {
    "llama_2": {**LLAMA, "head_dim": 128},
    "llama_3_1": {**LLAMA, "head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072,
                  "rope_scaling": {"rope_type": "llama3", **_LLAMA3_ROPE, "original_max_position_embeddings": 8192}},
    "llama_3_2": {**LLAMA, "head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072,
                  "rope_scaling": {"rope_type": "llama3", **_LLAMA3_ROPE, "factor": 32.0,
                                   "original_max_position_embeddings": 8192}},
    "vicuna_16k": {**LLAMA, "head_dim": 128, "max_position_embeddings": 4096,
                   "rope_scaling": {"type": "linear", "factor": 4.0}},
    "yi": {**LLAMA, "head_dim": 128, "rope_theta": 5000000.0},
    "qwen_2_5_yarn": {**LLAMA, "head_dim": 128, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
                      "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "deepseek_scales": {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                                                  "original_max_position_embeddings": 4096, "truncate": False}},
    "no_room_between": {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0,
                                                  "original_max_position_embeddings": 4}},
}  # fmt: skip
"""The ropes of published models, and two odd ones; recorded as frequencies, without weights."""


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the Hugging Face checkpoint of this config holds."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    query_dim, kv_dim = heads * head_dim, config["num_key_value_heads"] * head_dim
    family = config["model_type"]
    attention_bias = config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        experts = [f"block_sparse_moe.experts.{expert}" for expert in range(config.get("num_local_experts", 0))]
        feed_forward = [("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
        if experts:
            shapes[f"{prefix}.block_sparse_moe.gate.weight"] = (len(experts), width)
            feed_forward = [(f"{expert}.w1", f"{expert}.w3", f"{expert}.w2") for expert in experts]
        for name, out_dim, in_dim, bias in (
            ("self_attn.q_proj", query_dim, width, attention_bias or family == "qwen2"),
            ("self_attn.k_proj", kv_dim, width, attention_bias or family == "qwen2"),
            ("self_attn.v_proj", kv_dim, width, attention_bias or family == "qwen2"),
            ("self_attn.o_proj", width, query_dim, attention_bias),
            *((name, inner, width, config.get("mlp_bias", False)) for names in feed_forward for name in names[:2]),
            *((names[2], width, inner, config.get("mlp_bias", False)) for names in feed_forward),
        ):
            shapes[f"{prefix}.{name}.weight"] = (out_dim, in_dim)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (out_dim,)
        norms = {"input_layernorm": width, "post_attention_layernorm": width}
        if family == "qwen3":
            norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        shapes |= {f"{prefix}.{name}.weight": (dim,) for name, dim in norms.items()}
    return shapes


def variant_shapes(variant: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a variant."""
    if variant == "even experts":  # five of something else there are not
        odd = variant_shapes("granitemoe")
        return {name: tuple(6 if size == 5 else size for size in shape) for name, shape in odd.items()}
    if variant not in OTHERS:
        return tensor_shapes(VARIANTS[variant])
    return {name: tuple(shape) for name, shape in json.loads(SHAPES.read_text())[variant].items()}


def random_tensors(variant: str, seed: int) -> dict[str, np.ndarray]:
    """Weights scaled so that logits have a standard deviation of about 1."""
    tensors = {
        name: random_tensor(f"{seed} {variant} {name}", name, shape) for name, shape in variant_shapes(variant).items()
    }
    if VARIANTS[variant]["model_type"] in NORMS_ADD_ONE:
        # Of Gemma not those of what blocks add, which is twice as large so: else a tied head would repeat its input.
        plain = (".linear_attn.",) if VARIANTS[variant]["model_type"] in HYBRIDS else (".post_",)
        shifted = [name for name in tensors if name.endswith(NORMS) and not any(part in name for part in plain)]
        tensors |= {name: tensors[name] - np.float32(1) for name in shifted}
    if VARIANTS[variant]["model_type"] in UNSCALED:
        tensors |= {name: tensors[name] / np.float32(4) for name in tensors if name.endswith("q_norm.weight")}
    return tensors


def random_numbers(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform float64 numbers with a mean of 0 and a standard deviation of 1."""
    bits = np.random.Philox(key=int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    uniform = (bits.random_raw(int(np.prod(shape))) >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0  # in [-1, 1)
    return uniform.reshape(shape) * 3**0.5


def random_tensor(key: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A projection keeps the size of what it is given; norms scale by about 1; biases are small.

    Those of choices of experts are so small that no expert is left out.
    """
    uniform = random_numbers(key, shape)
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        values = 0.04 * uniform
    elif len(shape) == 3:  # the kernels of all experts, in either order of their axes
        values = uniform * shape[-1] ** -0.5
    elif len(shape) > 1:
        values = uniform * math.prod(shape[1:]) ** -0.5
    elif name.endswith(NORMS):
        values = 1.0 + 0.2 * uniform
    else:
        values = 0.2 * uniform
    return values.astype(np.float32)


def random_tokens(variant: str, seed: int, count: int) -> list[int]:
    """Token ids of a prompt."""
    bits = np.random.Philox(key=int.from_bytes(hashlib.sha256(f"{seed} {variant}".encode()).digest()[:8], "little"))
    return [int(value) for value in bits.random_raw(count) % np.uint64(VOCAB)]


def weights_sha256(tensors: dict[str, np.ndarray]) -> str:
    """Over names, shapes and values, in the order of the names; how a file lays them out does not matter."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].shape}".encode())
        digest.update(tensors[name].astype("<f4").tobytes())
    return digest.hexdigest()


def write_checkpoint(directory: Path, variant: str, tensors: dict[str, np.ndarray]) -> None:
    """A model directory as Hugging Face lays it out."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(VARIANTS[variant], indent=1))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
