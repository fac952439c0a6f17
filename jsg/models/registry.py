"""The families that jsg serves. docs/adding-a-model.md says how a new one is added. No JAX."""

from typing import NamedTuple

from jsg.errors import ModelError
from jsg.models.families import (
    exaone4,
    gemma2,
    gemma3,
    granite,
    hunyuan_v1_dense,
    llama,
    ministral,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
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
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Olmo3ForCausalLM": olmo3.FAMILY,
    "Exaone4ForCausalLM": exaone4.FAMILY,
    "HunYuanDenseV1ForCausalLM": hunyuan_v1_dense.FAMILY,
}
"""Architecture → how its files are read."""

ALIASES = {name.replace("ForCausalLM", "Model"): name for name in FAMILIES} | {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
}
"""Other names of architectures: those of models that were saved without their head, and the first name of Llama."""


class TextOnly(NamedTuple):
    """A model of which jsg serves the text half and not the rest.

    Attributes:
        model_type: That of the text half, if the file does not say.
        fields: Fields of the whole file that are about the rest.
        tensors: A pattern of the names of the rest's tensors, with those of the text half as in `llava.module_name`.
    """

    model_type: str
    fields: frozenset[str]
    tensors: str


TEXT_ONLY = {
    "Gemma3ForConditionalGeneration": TextOnly(
        "gemma3_text",
        frozenset("vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index".split()),
        r"(vision_tower|multi_modal_projector)\..*",
    ),
}
"""Architecture → its text half."""

TEXT_HALVES = {family.model_type: family.architecture for family in FAMILIES.values()}
"""`model_type` → architecture, for the text half of a vision model."""


def family_of(architecture: str) -> Family:
    """The family of an architecture, by any of its names.

    Raises:
        ModelError: jsg has no such family.
    """
    family = FAMILIES.get(ALIASES.get(architecture, architecture))
    if family is None:
        served = ", ".join(
            f"{', '.join(name.removesuffix(suffix) for name in names)} (…{suffix})"
            for suffix, names in (
                ("ForCausalLM", FAMILIES),
                ("ForConditionalGeneration", (*TEXT_ONLY, *VISION_KINDS)),
            )
        )
        raise ModelError(
            f"the architecture must be one of {served}, but config.json names {architecture!r}; choose another model"
        )
    return family
