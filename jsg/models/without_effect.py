"""The fields of `config.json` that change no answer whatever the family, and the refusal of all that might. No JAX."""

import re
from collections.abc import Set as AbstractSet
from typing import Any

from jsg.sources import MAX_SHOWN, FieldError, Fields

ROPE_DICTS = ("rope_parameters", "rope_scaling")
"""Where transformers 5 and transformers 4 write the scaling of positions."""

_ANYWHERE = frozenset(
    (
        # About the file and the program that wrote it. A custom model class in `auto_map` is noted in `family.py`.
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
    """Raises FieldError for a field that is neither known nor without effect. One that is off or empty changes nothing.

    Args:
        config: The object.
        known: The fields that are read.
        what: Whose fields they are, for the message.
    """
    for name in sorted(config.names() - known - _ANYWHERE):
        value = config.get(name)
        is_neutral = _is_off(value) or (value == 1 and _AT_ONE.fullmatch(name))
        if not is_neutral and not _ANYWHERE_PATTERN.fullmatch(name):
            raise FieldError(
                f"{config.file}: {what} has no field {name!r}, so jsg cannot know whether it changes the answers, but "
                f"it is {repr(value)[:MAX_SHOWN]}; remove it if the model does without",
                config.file,
                name,
            )


def _is_off(value: Any) -> bool:
    """Whether a value is off or empty, or an object of such values. A list of zeros is none: it may name layers."""
    values = [value]
    for each in values:
        values.extend(each.values() if isinstance(each, dict) else ())
    return not any(each for each in values if not isinstance(each, dict))
