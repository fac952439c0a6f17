"""The families that jsg serves. docs/adding-a-model.md says how a new one is added. No JAX."""

import itertools
from collections.abc import Collection

from jsg.errors import ModelError
from jsg.models.families import (
    cohere2,
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granitemoe,
    granitemoehybrid,
    hunyuan_v1_dense,
    kimi_linear,
    lfm2,
    lfm2_moe,
    llama,
    llama4,
    llava,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from jsg.models.family import Family
from jsg.models.vision_config import VISION_KINDS
from jsg.models.wrapper import Wrapper

MAX_NAMED = 10
"""The most architectures of a kind that an error message names."""

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen2MoeForCausalLM": qwen2_moe.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
    "Qwen3NextForCausalLM": qwen3_next.FAMILY,
    "Qwen3_5ForCausalLM": qwen3_5.FAMILY,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe.FAMILY,
    "MinistralForCausalLM": ministral.FAMILY,
    "Ministral3ForCausalLM": ministral3.FAMILY,
    "SeedOssForCausalLM": seed_oss.FAMILY,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "SmolLM3ForCausalLM": smollm3.FAMILY,
    "GraniteForCausalLM": granite.FAMILY,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma4ForCausalLM": gemma4.FAMILY,
    "Olmo3ForCausalLM": olmo3.FAMILY,
    "OlmoeForCausalLM": olmoe.FAMILY,
    "Llama4ForCausalLM": llama4.FAMILY,
    "Exaone4ForCausalLM": exaone4.FAMILY,
    "HunYuanDenseV1ForCausalLM": hunyuan_v1_dense.FAMILY,
    "GptOssForCausalLM": gpt_oss.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "Glm4ForCausalLM": glm4.FAMILY,
    "GraniteMoeForCausalLM": granitemoe.FAMILY,
    "GraniteMoeHybridForCausalLM": granitemoehybrid.FAMILY,
    "Glm4MoeForCausalLM": glm4_moe.FAMILY,
    "DeepseekV2ForCausalLM": deepseek_v2.FAMILY,
    "DeepseekV3ForCausalLM": deepseek_v3.FAMILY,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite.FAMILY,
    "Mistral4ForCausalLM": mistral4.FAMILY,
    "MiniMaxM2ForCausalLM": minimax_m2.FAMILY,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe.FAMILY,
    "Ernie4_5ForCausalLM": ernie4_5.FAMILY,
    "Cohere2ForCausalLM": cohere2.FAMILY,
    "NemotronHForCausalLM": nemotron_h.FAMILY,
    "Lfm2ForCausalLM": lfm2.FAMILY,
    "Lfm2MoeForCausalLM": lfm2_moe.FAMILY,
    "KimiLinearForCausalLM": kimi_linear.FAMILY,
}
"""Architecture → how its files are read."""

ALIASES = {name.replace("ForCausalLM", "Model"): name for name in FAMILIES} | {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "Gemma4TextModel": "Gemma4ForCausalLM",
    "Llama4TextModel": "Llama4ForCausalLM",
    "Qwen3_5TextModel": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeTextModel": "Qwen3_5MoeForCausalLM",
}
"""Other names of architectures: those of models that were saved without their head, and the first name of Llama."""

TEXT_HALVES = {family.model_type: architecture for architecture, family in FAMILIES.items()}
"""`model_type` → architecture, for the text half of a vision model."""

WRAPPERS: dict[str, Wrapper] = {
    **dict.fromkeys(VISION_KINDS, llava.WRAPPER),
    "Mistral3ForConditionalGeneration": mistral3.WRAPPER,
    "Gemma3ForConditionalGeneration": gemma3.WRAPPER,
    "Gemma4ForConditionalGeneration": gemma4.WRAPPER,
    "Qwen3_5ForConditionalGeneration": qwen3_5.WRAPPER,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe.WRAPPER,
    "Llama4ForConditionalGeneration": llama4.WRAPPER,
    "Lfm2VlForConditionalGeneration": lfm2.WRAPPER,
}
"""Architecture of a model around one of these → how its files are read."""


def served_name(architecture: str) -> str:
    """The name in `FAMILIES` of an architecture, by any of its names.

    Raises:
        ModelError: jsg has no such family.
    """
    name = ALIASES.get(architecture, architecture)
    if name not in FAMILIES:
        served = (shortened(FAMILIES, "ForCausalLM"), shortened(WRAPPERS, "ForConditionalGeneration"))
        raise ModelError(
            f"the architecture must be one of {', '.join(served)}, but config.json names {architecture!r}; choose "
            "another model, of those on the page of models in the documentation"
        )
    return name


def shortened(names: Collection[str], suffix: str = "") -> str:
    """The first of these names, and how many more there are."""
    first = ", ".join(name.removesuffix(suffix) for name in itertools.islice(names, MAX_NAMED))
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{first}{rest} (…{suffix})" if suffix else f"{first}{rest}"
