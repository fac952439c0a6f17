"""The architectures, and the function that builds each. docs/adding-a-model.md says how a new one is added."""

from collections.abc import Callable

import jax
from flax import nnx

from jsg.models.clip import VisionTower
from jsg.models.config import ModelConfig
from jsg.models.decoder import Decoder
from jsg.models.families import family_of
from jsg.models.llava import Llava


def _llama(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Decoder:
    """Llama 1 to 3.x, and models of its shape such as Vicuna and Yi.

    `attention_bias` means all four projections of attention.
    """
    bias = config.attention_bias
    return Decoder(config, dtype, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def _qwen2(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Decoder:
    """Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, whatever config.json says."""
    return Decoder(config, dtype, qkv_bias=True)


def _qwen3(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Decoder:
    """Qwen3: Llama with norms of queries and keys. `attention_bias` means all four projections of attention."""
    return Decoder(config, dtype, qkv_bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True)


BUILDERS: dict[str, Callable[[ModelConfig, jax.typing.DTypeLike], nnx.Module]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": Decoder,  # Llama without biases; its first version has a sliding window
    "MixtralForCausalLM": Decoder,  # Mistral with `config.num_experts` experts
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
"""Architecture, a key of `FAMILIES` → a function that builds the module, a `jsg.models.model.Model`, of zeros."""


def build_model(config: ModelConfig, dtype: jax.typing.DTypeLike) -> nnx.Module:
    """The model with its vision tower, if it has one. All parameters are zero; under `nnx.eval_shape` they are shapes.

    Raises:
        ModelError: jsg has no such family.
    """
    text = BUILDERS[family_of(config.architecture).architecture](config, dtype)
    return text if config.vision is None else Llava(text, VisionTower(config.vision, config.hidden_size, dtype))
