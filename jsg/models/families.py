"""What `config.json` means in each text family: the fields that it reads, and what an absent one is. No JAX.

The defaults are those of transformers' configuration classes, which differ by family: files leave fields out. A null is
not an absence: it says "none", which only some fields can be.
"""

import dataclasses
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal

from jsg.errors import ModelError
from jsg.fields import MAX_SHOWN, Fields
from jsg.models.vision_config import VISION_KINDS

Windows = Literal["none", "all", "switched"]

ROPE_DICTS = ("rope_parameters", "rope_scaling")
"""Where transformers 5 and transformers 4 write the scaling of positions."""
CAUSAL_RULE = "be true, for a token sees only those before it"
WINDOW_FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_MIXTRAL = _MISTRAL | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "dual_chunk_attention_config": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family reads its `config.json`.

    Attributes:
        architecture: Its name in `architectures`; a key of `jsg/models/registry.py`.
        model_type: Its other name.
        defaults: Each field that it reads, with the value of an absent one. A `head_dim` of None is the width divided
            by the heads, and `num_key_value_heads` of None is the number of heads.
        windows: Which layers `sliding_window` is for: `none`, `all`, or those that the fields `use_sliding_window`,
            `max_window_layers` and `layer_types` switch on.
        aliases: Another name of a field → its name.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    windows: Windows = "none"
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def read(self, config: Fields) -> Fields:
        """The fields of a file with the family's defaults.

        Raises:
            ModelError: The file is one of another family, its attention is not causal, or it has a field that the
                family does not read and that may change the answers.
        """
        model_type = config.get("model_type", self.model_type)
        config.require(model_type == self.model_type, "model_type", f"be {self.model_type}", model_type)
        is_causal = config.over({"is_causal": True}).get("is_causal")  # transformers takes a null as false
        config.require(is_causal is True, "is_causal", CAUSAL_RULE, is_causal)
        ignored = WINDOW_FIELDS if self.windows == "none" else WINDOW_FIELDS[:2]
        refuse_unknown(config, {*self.defaults, *self.aliases, *ignored}, self.architecture)
        renamed = {name: config.get(alias) for alias, name in self.aliases.items() if config.get(alias) is not None}
        return config.over(self.defaults).under(renamed)


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            architecture="LlamaForCausalLM",
            model_type="llama",
            defaults=_LLAMA | {"attention_bias": False, "mlp_bias": False},
        ),
        Family(architecture="MistralForCausalLM", model_type="mistral", defaults=_MISTRAL, windows="all"),
        Family(
            architecture="MixtralForCausalLM",
            model_type="mixtral",
            defaults=_MIXTRAL,
            windows="all",
            aliases={"num_experts": "num_local_experts"},
        ),
        Family(architecture="Qwen2ForCausalLM", model_type="qwen2", defaults=_QWEN2, windows="switched"),
        Family(
            architecture="Qwen3ForCausalLM",
            model_type="qwen3",
            defaults=_QWEN2 | {"head_dim": 128, "attention_bias": False},
            windows="switched",
        ),
    )
}
"""Architecture → how its files are read."""

ALIASES = {name.replace("ForCausalLM", "Model"): name for name in FAMILIES} | {"LLaMAForCausalLM": "LlamaForCausalLM"}
"""Other names of architectures: those of models that were saved without their head, and the first name of Llama."""

TEXT_HALVES = {family.model_type: family.architecture for family in FAMILIES.values()}
"""`model_type` → architecture, for the text half of a vision model."""


def family_of(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        ModelError: jsg has no such family.
    """
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"the architecture must be one of {', '.join((*FAMILIES, *VISION_KINDS))}, but config.json names "
            f"{architecture!r}; choose another model"
        )
    return family


_ANYWHERE = frozenset(
    (
        # About the file and the program that wrote it. A custom model class in `auto_map` is noted in `config.py`.
        "architectures model_type auto_map author base_model custom_pipelines date description finetuning_task "
        "is_composition is_llama_config language library_name license model_id model_name name name_or_path "
        "pipeline_tag processor_class tags tokenizer transformers.js_config use_return_dict version "
        # The types of numbers, and how another program computes.
        "dtype torch_dtype torchscript attn_implementation experts_implementation fp16 bf16 low_cpu_mem_usage "
        "pretraining_tp return_dict upcast use_bfloat16 use_cache use_sdpa prefill_chunk_size "
        "use_memory_efficient_attention use_xformers chunk_size_feed_forward cache_implementation "
        # The context, which `max_position_embeddings` says, a scaling where nobody reads it, and training.
        "embedding_size factor finetuned type output_router_logits router_jitter_noise gradient_checkpointing "
        "gradient_checkpointing_kwargs neftune_noise_alpha seed n_ctx n_positions context_window context_window_size "
        # Biases and norms, whose tensors are there or not: a checkpoint with tensors too many or too few is refused.
        "attention_bias mlp_bias qkv_bias use_bias lm_head_bias use_qk_norm qk_norm "
        # Other uses than answering.
        "id2label label2id num_labels problem_type classifier_from_token sentence_transformers is_matryoshka "
        "matryoshka_dimensions task_specific_params is_decoder prefix pruned_heads tie_encoder_decoder "
        "output_attentions output_hidden_states output_scores output_past "
        # How tokens are chosen, which belongs into generation_config.json.
        "do_sample early_stopping num_beams num_beam_groups num_return_sequences temperature top_k top_p min_p "
        "typical_p no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha max_length min_length "
        "max_new_tokens bad_words_ids suppress_tokens begin_suppress_tokens remove_invalid_values renormalize_logits "
        # What all families read, or refuse by a message of its own.
        "is_causal partial_rotary_factor original_max_position_embeddings quantization_config quantization "
        "compression_config"
    ).split()
) | set(ROPE_DICTS)
_ANYWHERE_PATTERN = re.compile(
    r"_.*|unsloth_.*|tokenizer_.*|fuse_.*|(\w+_)?recompute(_\w+)?|initializer_.*|neuron(_.*)?|\w+_penalty|"
    r"flash_att(n|ention)(_2)?|use_(flash(_?att(n|ention)\w*)?|fused_(?!.*(scal|clip))\w*|liger_\w+)|"
    r"(tensor|pipeline|sequence|context|expert|data|virtual)_(model_)?(parallel|pp)(_\w+)?|model_max_len(gth)?|"
    r"((max|model_max|train|original_max)_)?(model|seq|sequence|context|position|input)_?len(gth)?|"
    r"(?!rope|rotary|attn|attention|norm)\w+_version|(\w+_)?(dropout(_prob|_rate)?|pdrop|layerdrop)|\w+_token_ids?|"
    r"(\w+_)?(bos|eos|pad|unk|sep|cls|mask|im_start|im_end|image|video)_token|(\w+_)?(aux|loss|kl|entropy)(_\w+)?",
    re.ASCII,
)
"""Fields without effect on answers, in files of any family."""
_AT_ONE = re.compile(r"(embedding|residual)_multiplier|logits?_scal(e|ing)|rope_(\w+_)?(factor|ratio)|rotary_pct")
"""Factors that change nothing if they are 1. That of attention is not among them, for it replaces 1/√head_dim."""


def refuse_unknown(config: Fields, known: AbstractSet[str], what: str) -> None:
    """Raises ModelError for a field that is neither known nor without effect. One that is off or empty changes nothing.

    Args:
        config: The object.
        known: The fields that are read.
        what: Whose fields they are, for the message.
    """
    for name in sorted(config.names() - known - _ANYWHERE):
        value = config.get(name)
        is_neutral = _is_off(value) or (value == 1 and _AT_ONE.fullmatch(name))
        if not is_neutral and not _ANYWHERE_PATTERN.fullmatch(name):
            raise ModelError(
                f"{config.file}: {what} has no field {name!r}, so jsg cannot know whether it changes the answers, but "
                f"it is {repr(value)[:MAX_SHOWN]}; remove it if the model does without"
            )


def _is_off(value: Any) -> bool:
    """Whether a value is off or empty, or an object of such values. A list of zeros is none: it may name layers."""
    values = [value]
    for each in values:
        values.extend(each.values() if isinstance(each, dict) else ())
    return not any(each for each in values if not isinstance(each, dict))
