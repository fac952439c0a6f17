"""Reads from `config.json` how positions become angles, and how long the context is. No JAX."""

import dataclasses
import math
from collections.abc import Set as AbstractSet
from typing import get_args

from jsg.models.block_spec import RopeSpec, RopeType
from jsg.models.without_effect import ROPE_DICTS
from jsg.sources import FieldError, Fields

MAX_CONTEXT_LEN = 2**27
ROPE_FIELDS = frozenset(
    "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast "
    "beta_slow attention_factor attn_factor mscale mscale_all_dim truncate finetuned partial_rotary_factor "
    "short_factor long_factor".split()
)


def rope_section(config: Fields) -> Fields:
    """The fields of rope: `rope_scaling` (of transformers 4) if there is one, else `rope_parameters` (of 5)."""
    new, old = (config.section(name) for name in ROPE_DICTS)
    return old if old is not None and config.get("rope_scaling") else new or Fields("config.json", {}, config.notes)


def read_rope(
    config: Fields, own: AbstractSet[str] = frozenset(), head_dim: int | None = None, *, is_partial: bool = False
) -> RopeSpec:
    """Rope, as transformers 5 reads it.

    A dictionary counts as a whole: `rope_scaling` hides even the base in `rope_parameters`, and is then read with the
    `rope_theta` beside it.

    Args:
        config: The fields of the file.
        own: Fields of rope that only the family knows, which reads them itself.
        head_dim: The width of a head.
        is_partial: Whether the family may turn a part of it.
    """
    new, scaling = config.section("rope_parameters"), rope_section(config)
    for name in scaling.names() - ROPE_FIELDS - own:
        message = f"config.json: rope field {name!r} is not supported; supported are {sorted(ROPE_FIELDS)}"
        raise FieldError(message, scaling.file, name)
    scaling = scaling.over({"rope_theta": config.get("rope_theta"), "rope_type": scaling.get("type", "default")})
    is_partial = is_partial or scaling.get("rope_type") == "proportional"
    rotated = _read_rotated(config, scaling, head_dim if is_partial else None)
    theta, rope_type = scaling.number("rope_theta", low=1.0), scaling.get("rope_type")
    if scaling.file.endswith("rope_scaling") and new is not None and new.get("rope_theta", theta) != theta:
        config.notes.append(
            f"config.json has rope_scaling and rope_parameters, so rope_scaling counts, as in transformers, and the "
            f"base of the positions is {theta:g} and not {new.get('rope_theta')}; write rope_theta into rope_scaling "
            "if it is the other"
        )
    supported = get_args(RopeType)
    scaling.require(rope_type in supported, "rope_type", f"be one of {', '.join(supported)}", rope_type)
    return dataclasses.replace(_read_type(config, scaling, rope_type, theta, rotated or head_dim), rotated=rotated)


def _read_rotated(config: Fields, scaling: Fields, head_dim: int | None) -> int | None:
    """How many numbers of a head are turned; None for all, and for a family that can do nothing else."""
    name = "partial_rotary_factor"
    if head_dim is None:
        for fields in (scaling, config):
            share = fields.number(name, default=1.0)
            fields.require(share == 1.0, name, "be 1, for rope turns whole heads", share)
        return None
    fields = config if scaling.get(name) is None else scaling
    share = fields.number(name, default=1.0, high=1.0)
    rotated = int(head_dim * share)
    if scaling.get("rope_type") == "proportional":
        rotated -= rotated % 2
    fields.require(rotated > 0 and rotated % 2 == 0, name, f"give an even number of the {head_dim} of a head", share)
    return None if rotated == head_dim else rotated


def _read_type(config: Fields, scaling: Fields, rope_type: RopeType, theta: float, width: int | None) -> RopeSpec:
    """Rope of this type, that turns `width` numbers of a head."""
    if rope_type == "longrope":
        return _read_longrope(config, scaling, theta, width)
    rope = RopeSpec(type=rope_type, theta=theta)
    if rope_type == "default":
        return rope
    if rope_type == "proportional":
        return dataclasses.replace(rope, factor=scaling.number("factor", default=1.0, high=1e6))
    factor = scaling.number("factor", high=1e6)
    scaling.require(factor >= 1.0, "factor", "be at least 1", factor)
    rope = dataclasses.replace(rope, factor=factor)
    if rope_type == "linear":
        return rope
    rope = dataclasses.replace(rope, original_max_position_embeddings=read_original(config, scaling))
    if rope_type == "yarn":
        return dataclasses.replace(
            rope,
            beta_fast=scaling.number("beta_fast", default=32.0),
            beta_slow=scaling.number("beta_slow", default=1.0),
            attention_factor=_read_attention_factor(scaling, factor),
            truncate=scaling.over({"truncate": True}).flag("truncate", default=False),
        )
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    scaling.require(low <= high, "low_freq_factor", f"be at most high_freq_factor = {high}", low)
    return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high)


def read_original(config: Fields, scaling: Fields) -> int:
    """The context of the first training. One beside the dictionary counts more, as in Phi-3, where positions scale."""
    name, context_len = "original_max_position_embeddings", None
    if scaling.get("rope_type", scaling.get("type")) in ("llama3", "yarn", "longrope"):
        context_len = context_field(config)
        scaling = scaling.under({name: config.get(name, scaling.get(name))})
    return scaling.integer(name, default=context_len, high=MAX_CONTEXT_LEN)


def _read_longrope(config: Fields, scaling: Fields, theta: float, width: int | None) -> RopeSpec:
    """A list of factors for texts up to the original context, and one for longer ones, which a model of it has."""

    def factors(name: str) -> tuple[float, ...]:
        values = scaling.get(name)
        is_list = isinstance(values, list) and (width is None or len(values) == width // 2)
        is_list = is_list and all(type(value) in (int, float) and 0 < value < math.inf for value in values)
        scaling.require(is_list, name, f"be a list of a number for each of {(width or 0) // 2} pairs", values)
        return tuple(map(float, values))

    original, context_len = read_original(config, scaling), context_field(config)
    scaling.require(original > 1, "original_max_position_embeddings", "be above 1", original)
    growth = scaling.number("factor", default=context_len / original)
    growth = 1.0 if growth <= 1.0 else math.sqrt(1.0 + math.log(growth) / math.log(original))
    rope = RopeSpec(
        type="longrope",
        theta=theta,
        original_max_position_embeddings=original,
        attention_factor=scaling.number("attention_factor", default=growth),
        factors=factors("long_factor"),
        short_factors=factors("short_factor"),
    )
    return rope.for_context(context_len)


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
