"""The metadata of each architecture as the fields of `config.json`, and its tensors by their names for transformers."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jsg.errors import ModelError
from jsg.gguf.container import Container, bytes_of, mapped

_SHARED = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GEMMA3 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN_NAMES = {"gemma3": _GEMMA3, "phi3": {"ffn_up": "mlp.gate_up_proj"}}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that scale positions, which `config.json` has as lists."""
_LAYERS_OF_GEMMA_27B = 62
"""The only Gemma 3 whose scores are scaled by the width divided by the heads. llama.cpp knows it by this number too."""


def name_of(stored: str, architecture: str, *, has_experts: bool) -> str:
    """The name for transformers of a stored tensor, with braces for the expert; an unknown one as it is."""
    names = _SHARED | _OWN_NAMES.get(architecture, _MIXTRAL if architecture == "llama" and has_experts else {})
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)(\.weight|\.bias)", stored)
    if found is None or found[2] not in names:
        return stored
    return f"model.layers.{found[1]}.{names[found[2]]}{found[3]}" if found[1] else f"{names[found[2]]}{found[3]}"


class Metadata:
    """The entries of one architecture, each asked for by its name without the architecture's.

    Attributes:
        architecture: The name.
        shapes: Shape of each tensor by its stored name.
        factors: What scales positions, by its stored name.
    """

    def __init__(
        self, entries: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, list[float]]
    ):
        architecture = entries.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in CONFIGS:
            known = ", ".join(CONFIGS)
            raise ModelError(
                f"a GGUF file must be of one of the architectures {known}, but is of {architecture!r}; take the "
                "checkpoint in safetensors that it was made of"
            )
        self.architecture = architecture
        self.shapes, self.factors, self._entries = shapes, factors, entries
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value; lists of numbers as lists."""
        self._asked.add(name := f"{self.architecture}.{key}")
        value = self._entries.get(name, default)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def need(self, key: str) -> Any:
        """The value. Raises ModelError if there is none."""
        if (value := self.get(key)) is None:
            raise ModelError(
                f"the metadata of a GGUF file must have {self.architecture}.{key}, but this has not; convert the model "
                "again with a newer llama.cpp"
            )
        return value

    def has(self, tensor: str) -> bool:
        """Whether a tensor exists, in the file or in its first layer."""
        return tensor in self.shapes or f"blk.0.{tensor}" in self.shapes

    def refuse_others(self) -> None:
        """Raises ModelError for an entry of the architecture that was not asked for and is not off."""
        for name, value in self._entries.items():
            is_own = name.startswith(f"{self.architecture}.") and name not in self._asked
            if is_own and (isinstance(value, list | np.ndarray) or value not in (0, "", "none")):
                raise ModelError(
                    f"jsg cannot know whether {name} in the metadata of this GGUF file changes the answers, but it is "
                    f"{str(value)[:80]}; take the checkpoint in safetensors that it was made of"
                )


def read_metadata(containers: Sequence[tuple[Path, Container]]) -> Metadata:
    """The metadata of a model, whose first file has it, with what its tensors say."""
    shapes, factors = {}, {}
    for path, container in containers:
        shapes |= {name: place.shape for name, place in container.tensors.items()}
        for name in container.tensors.keys() & set(FACTORS):
            place = container.tensors[name]
            blocks = bytes_of(mapped(path), place).reshape(-1, place.block.nbytes)
            factors[name] = [float(str(number)) for number in place.block.restore(blocks).reshape(-1)]
    return Metadata(containers[0][1].metadata, shapes, factors)


def config_of(metadata: Metadata) -> dict[str, Any]:
    """The fields of `config.json`. Raises ModelError for an entry that is missing or not supported."""
    heads, width = metadata.need("attention.head_count"), metadata.need("embedding_length")
    plain = width // heads if type(heads) is type(width) is int and heads else None
    head_dim = metadata.get("attention.key_length", plain)
    if metadata.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            "queries and values must be of one width, but attention.key_length and attention.value_length differ; "
            "take the checkpoint in safetensors that the file was made of"
        )
    rotated = metadata.get("rope.dimension_count", head_dim)
    config = {
        "hidden_size": width,
        "num_hidden_layers": metadata.need("block_count"),
        "intermediate_size": metadata.get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base", 10000.0),
        "max_position_embeddings": metadata.need("context_length"),
        "vocab_size": metadata.shapes.get("token_embd.weight", (0,))[0],
        "tie_word_embeddings": not metadata.has("output.weight"),
        "torch_dtype": "float32",
    }
    if rotated != head_dim and head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    config |= _scaling(metadata, config)
    config |= CONFIGS[metadata.architecture](metadata, config)
    for without_effect in ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout"):
        metadata.get(without_effect)
    metadata.refuse_others()
    return {name: value for name, value in config.items() if value is not None}


def _scaling(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """How positions are scaled. Factors that divide frequencies are longrope's, the same for all lengths."""
    kind, factor = metadata.get("rope.scaling.type", "none"), metadata.get("rope.scaling.factor", 0)
    original = metadata.get("rope.scaling.original_context_length")
    attention = metadata.get("rope.scaling.attn_factor")
    long, short = (metadata.factors.get(name) for name in FACTORS[1:])
    if (every := metadata.factors.get(FACTORS[0])) is not None:
        long, short, original, attention = every, every, config["max_position_embeddings"], 1.0
    if long is not None:
        longrope = {"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": attention}
        scaling = {name: value for name, value in longrope.items() if value is not None}
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    if (old := metadata.get("rope.scale_linear", 0)) and kind == "none":
        kind, factor = "linear", old
    if kind == "none" or not factor:
        return {}
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind == "yarn":
        scaling |= {
            "attention_factor": attention,
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow"),
        }
    return {"rope_scaling": {name: value for name, value in scaling.items() if value is not None}}


def _named(architecture: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type}


def _llama(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    """Llama; Mistral with a window; Mixtral with experts."""
    window, experts = metadata.get("attention.sliding_window"), metadata.get("expert_count")
    if experts:
        return {
            **_named("MixtralForCausalLM", "mixtral"),
            "num_local_experts": experts,
            "num_experts_per_tok": metadata.need("expert_used_count"),
            "sliding_window": window,
        }
    metadata.get("expert_used_count")
    if window:
        return {**_named("MistralForCausalLM", "mistral"), "sliding_window": window}
    biases = {"attention_bias": metadata.has("attn_q.bias"), "mlp_bias": metadata.has("ffn_up.bias")}
    return {**_named("LlamaForCausalLM", "llama"), **biases}


def _qwen3moe(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    """Every layer has experts, and the chosen ones' weights add up to 1, as llama.cpp has it."""
    return {
        **_named("Qwen3MoeForCausalLM", "qwen3_moe"),
        "num_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The window of five layers of six, and what older files leave out."""
    is_27b = config["num_hidden_layers"] == _LAYERS_OF_GEMMA_27B
    scalar = config["hidden_size"] / config["num_attention_heads"] if is_27b else config["head_dim"]
    pattern, kinds = metadata.get("attention.sliding_window_pattern", 6), None
    if isinstance(pattern, list):
        pattern, kinds = None, ["sliding_attention" if each else "full_attention" for each in pattern]
    return {
        **_named("Gemma3ForCausalLM", "gemma3_text"),
        "query_pre_attn_scalar": scalar,
        "rope_theta": metadata.get("rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 1e4),
        "sliding_window": metadata.need("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": kinds,
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
    }


def _phi3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """A file of a short context has no other one."""
    original = config.get("original_max_position_embeddings") or metadata.get("rope.scaling.original_context_length")
    return {
        **_named("Phi3ForCausalLM", "phi3"),
        "original_max_position_embeddings": original or config["max_position_embeddings"],
        "sliding_window": metadata.get("attention.sliding_window") or None,
    }


CONFIGS: Mapping[str, Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": lambda *_: _named("Qwen2ForCausalLM", "qwen2"),
    "qwen3": lambda *_: _named("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
"""The architectures by llama.cpp's names → the fields of `config.json` that are their own."""
