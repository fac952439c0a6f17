"""The families that jsg serves. docs/adding-a-model.md says how a new one is added. No JAX."""

from jsg.errors import ModelError
from jsg.models.families import (
    gpt_oss,
    granite,
    llama,
    ministral,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from jsg.models.family import Family
from jsg.models.vision_config import VISION_KINDS

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen2MoeForCausalLM": qwen2_moe.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
    "MinistralForCausalLM": ministral.FAMILY,
    "Ministral3ForCausalLM": ministral3.FAMILY,
    "SeedOssForCausalLM": seed_oss.FAMILY,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "SmolLM3ForCausalLM": smollm3.FAMILY,
    "GraniteForCausalLM": granite.FAMILY,
    "GptOssForCausalLM": gpt_oss.FAMILY,
}
"""Architecture → how its files are read."""

ALIASES = {name.replace("ForCausalLM", "Model"): name for name in FAMILIES} | {"LLaMAForCausalLM": "LlamaForCausalLM"}
"""Other names of architectures: those of models that were saved without their head, and the first name of Llama."""

TEXT_HALVES = {family.model_type: family.architecture for family in FAMILIES.values()}
"""`model_type` → architecture, for the text half of a vision model."""


def family_of(architecture: str) -> Family:
    """The family of an architecture, by any of its names.

    Raises:
        ModelError: jsg has no such family.
    """
    family = FAMILIES.get(ALIASES.get(architecture, architecture))
    if family is None:
        text = ", ".join(name.removesuffix("ForCausalLM") for name in FAMILIES)
        raise ModelError(
            f"the architecture must be one of {text} (…ForCausalLM), {', '.join(VISION_KINDS)}, but config.json names "
            f"{architecture!r}; choose another model"
        )
    return family
