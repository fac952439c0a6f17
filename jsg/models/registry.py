"""Which architecture is built by what. A new family is one file and one line here: docs/adding-a-model.md."""

from collections.abc import Callable

import jax
from flax import nnx

from jsg.errors import ModelError
from jsg.models.clip import VisionTower
from jsg.models.config import ModelConfig
from jsg.models.llama import build_llama
from jsg.models.llava import Llava
from jsg.models.mistral import build_mistral
from jsg.models.mixtral import build_mixtral
from jsg.models.qwen2 import build_qwen2
from jsg.models.qwen3 import build_qwen3
from jsg.models.vision_config import VISION_KINDS

BUILDERS: dict[str, Callable[[ModelConfig, jax.typing.DTypeLike], nnx.Module]] = {
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_mistral,
    "MixtralForCausalLM": build_mixtral,
    "Qwen2ForCausalLM": build_qwen2,
    "Qwen3ForCausalLM": build_qwen3,
}
"""Architecture, as config.json names it → a function that builds the module, a `jsg.models.model.Model`, of zeros."""


def build_model(config: ModelConfig, dtype: jax.typing.DTypeLike) -> nnx.Module:
    """The model, its vision tower included, with all parameters zero; under `nnx.eval_shape`, their shapes only.

    Raises:
        ModelError: The architecture is not in `BUILDERS`.
    """
    builder = BUILDERS.get(config.architecture)
    if builder is None:
        raise ModelError(
            f"the architecture must be one of {', '.join((*BUILDERS, *VISION_KINDS))}, but config.json names "
            f"{config.architecture!r}; choose another model"
        )
    text = builder(config, dtype)
    return text if config.vision is None else Llava(text, VisionTower(config.vision, config.hidden_size, dtype))
