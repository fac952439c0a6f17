"""Reads from `config.json` how positions become angles, and how long the context is. No JAX."""

import math
from collections.abc import Set as AbstractSet
from typing import get_args

from jsg.fields import FieldError, Fields
from jsg.models.block_spec import RopeSpec, RopeType
from jsg.models.without_effect import ROPE_DICTS

MAX_CONTEXT_LEN = 2**27
ROPE_FIELDS = frozenset(
    "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast "
    "beta_slow attention_factor attn_factor mscale mscale_all_dim truncate finetuned partial_rotary_factor".split()
)


def rope_section(config: Fields) -> Fields:
    """The fields of rope: `rope_scaling` (of transformers 4) if there is one, else `rope_parameters` (of 5)."""
    new, old = (config.section(name) for name in ROPE_DICTS)
    return old if old is not None and config.get("rope_scaling") else new or Fields("config.json", {}, config.notes)


def read_rope(config: Fields, own: AbstractSet[str] = frozenset()) -> RopeSpec:
    """Rope, as transformers 5 reads it.

    A dictionary counts as a whole: `rope_scaling` hides even the base in `rope_parameters`, and is then read with the
    `rope_theta` beside it.

    Args:
        config: The fields of the file.
        own: Fields of rope that only the family knows, which reads them itself.
    """
    new, scaling = config.section("rope_parameters"), rope_section(config)
    for name in scaling.names() - ROPE_FIELDS - own:
        message = f"config.json: rope field {name!r} is not supported; supported are {sorted(ROPE_FIELDS)}"
        raise FieldError(message, scaling.file, name)
    for fields in (scaling, config):
        partial = fields.number("partial_rotary_factor", default=1.0)
        fields.require(partial == 1.0, "partial_rotary_factor", "be 1, for rope turns whole heads", partial)
    scaling = scaling.over({"rope_theta": config.get("rope_theta"), "rope_type": scaling.get("type", "default")})
    theta, rope_type = scaling.number("rope_theta", low=1.0), scaling.get("rope_type")
    if scaling.file.endswith("rope_scaling") and new is not None and new.get("rope_theta", theta) != theta:
        config.notes.append(
            f"config.json has rope_scaling and rope_parameters, so rope_scaling counts, as in transformers, and the "
            f"base of the positions is {theta:g} and not {new.get('rope_theta')}; write rope_theta into rope_scaling "
            "if it is the other"
        )
    supported = get_args(RopeType)
    scaling.require(rope_type in supported, "rope_type", f"be one of {', '.join(supported)}", rope_type)
    if rope_type == "default":
        return RopeSpec(theta=theta)
    factor = scaling.number("factor", high=1e6)
    scaling.require(factor >= 1.0, "factor", "be at least 1", factor)
    if rope_type == "linear":
        return RopeSpec(type="linear", theta=theta, factor=factor)
    original = config.get("original_max_position_embeddings")  # one beside the dictionary counts more, as in Phi-3
    scaling = scaling if original is None else scaling.under({"original_max_position_embeddings": original})
    original = scaling.integer("original_max_position_embeddings", default=context_field(config), high=MAX_CONTEXT_LEN)
    if rope_type == "yarn":
        return RopeSpec(
            type="yarn",
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=scaling.number("beta_fast", default=32.0),
            beta_slow=scaling.number("beta_slow", default=1.0),
            attention_factor=_read_attention_factor(scaling, factor),
            truncate=scaling.flag("truncate", default=True),
        )
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    scaling.require(low < high, "low_freq_factor", f"be below high_freq_factor = {high}", low)
    return RopeSpec(
        type="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _read_attention_factor(scaling: Fields, factor: float) -> float | None:
    """The factor of cosine and sine in yarn, from the file or by DeepSeek's two scales; None for the usual one."""
    usual = 0.1 * math.log(factor) + 1.0
    if scaling.get("attention_factor") is not None:
        usual = scaling.number("attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):  # a 0 is none, as in transformers
        above, below = (0.1 * scaling.number(name) * math.log(factor) + 1.0 for name in ("mscale", "mscale_all_dim"))
        usual = above / below
    elif scaling.get("attn_factor") is None:
        return None
    # Files for vLLM and SGLang, which multiply by it, have another one. DeepSeek-R1-0528-Qwen3-8B is such a file.
    if (extra := scaling.number("attn_factor", default=1.0)) != 1.0:
        scaling.notes.append(
            f"config.json scales positions by attn_factor = {extra:g}, which transformers would ignore"
        )
    return usual * extra


def context_field(config: Fields) -> int:
    """The longest sequence as the file has it, in tokens."""
    return config.integer("max_position_embeddings", high=MAX_CONTEXT_LEN)


def read_context(config: Fields, rope: RopeSpec | None) -> int:
    """The longest sequence with the only rope of a model, or with none or several.

    The file has it for llama3, may have it for yarn, not for linear.
    """
    context_len = context_field(config)
    if rope is None:
        return context_len
    match rope.type:
        case "linear":
            return math.floor(context_len * rope.factor)
        case "yarn":
            return max(context_len, math.floor(rope.original_max_position_embeddings * rope.factor))
        case _:
            return context_len
