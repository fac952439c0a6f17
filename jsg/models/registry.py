"""The families that jsg serves. docs/adding-a-model.md says how a new one is added. No JAX."""

from collections.abc import Iterable

from jsg.errors import ModelError
from jsg.models.families import (
    cohere2,
    ernie4_5,
    ernie4_5_moe,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granitemoe,
    llama,
    llava,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from jsg.models.family import Family
from jsg.models.vision_config import VISION_KINDS
from jsg.models.wrapper import Wrapper

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
    "Phi3ForCausalLM": phi3.FAMILY,
    "Glm4ForCausalLM": glm4.FAMILY,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "GraniteMoeForCausalLM": granitemoe.FAMILY,
    "Glm4MoeForCausalLM": glm4_moe.FAMILY,
    "MiniMaxM2ForCausalLM": minimax_m2.FAMILY,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe.FAMILY,
    "Ernie4_5ForCausalLM": ernie4_5.FAMILY,
    "Cohere2ForCausalLM": cohere2.FAMILY,
}
"""Architecture → how its files are read."""

ALIASES = {name.replace("ForCausalLM", "Model"): name for name in FAMILIES} | {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
}
"""Other names of architectures: those of models that were saved without their head, and the first name of Llama."""

TEXT_HALVES = {family.model_type: family.architecture for family in FAMILIES.values()}
"""`model_type` → architecture, for the text half of a vision model."""

WRAPPERS: dict[str, Wrapper] = {
    **dict.fromkeys(VISION_KINDS, llava.WRAPPER),
    "Mistral3ForConditionalGeneration": mistral3.WRAPPER,
    "Gemma3ForConditionalGeneration": gemma3.WRAPPER,
}
"""Architecture of a model around one of these → how its files are read."""


def family_of(architecture: str) -> Family:
    """The family of an architecture, by any of its names.

    Raises:
        ModelError: jsg has no such family.
    """
    family = FAMILIES.get(ALIASES.get(architecture, architecture))
    if family is None:
        served = (_shortened(FAMILIES, "ForCausalLM"), _shortened(WRAPPERS, "ForConditionalGeneration"))
        raise ModelError(
            f"the architecture must be one of {', '.join(served)}, but config.json names {architecture!r}; choose "
            "another model"
        )
    return family


def _shortened(names: Iterable[str], suffix: str) -> str:
    return f"{', '.join(name.removesuffix(suffix) for name in names)} (…{suffix})"
