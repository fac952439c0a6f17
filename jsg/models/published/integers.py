"""Kernels in integers that lie in words of 32 bits by columns: AWQ (`gemm`) and GPTQ (both versions)."""

import re
from collections.abc import Callable
from typing import Any

from jsg.models.published.layout import SCALES, Group, Layout
from jsg.models.published.record import Published, expression_of, read_rule, refuse_others, require_one_of
from jsg.sources import Fields

AWQ_LANES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight outputs its place in a word, from the low end."""
ONES = {4: 0x11111111, 8: 0x01010101}
"""What GPTQModel adds to the words of zeros of the first version, which has each zero less one. It carries."""
_AWQ_FIELDS = "bits group_size zero_point version format modules_to_not_convert w_bit q_group_size"
_GPTQ_FIELDS = "bits group_size desc_act sym checkpoint_format format dynamic lm_head pack_dtype is_marlin_format "


def read_awq(config: Fields) -> Published:
    """AWQ, by its fields.

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    refuse_others(config, _AWQ_FIELDS, "awq")
    require_one_of(config, "bits" if config.get("w_bit") is None else "w_bit", 4, default=4)
    require_one_of(config, "format" if config.get("version") is None else "version", "gemm", "GEMM", default="gemm")
    require_one_of(config, "zero_point", True, default=True)
    config.require(config.get("backend") != "llm-awq", "backend", "be one for gemm", config.get("backend"))
    size = read_group(config, "group_size" if config.get("q_group_size") is None else "q_group_size")

    def layout(group: Group) -> Layout:
        columns, words = group.tensor(".qweight", ["I32"], 2).shape
        packing = {"bits": 4, "per_word": 8, "packs_rows": True, "lanes": AWQ_LANES}
        return _layout(group, "int4", (words * 8, columns), size or columns, packing, packing, has_order=False)

    return Published(
        title="awq",
        marks={".qweight": ".weight", ".qzeros": ".weight"},
        roles=(".qweight", ".qzeros", ".scales"),
        layout=layout,
        skips=read_rule(config, "transformers", "modules_to_not_convert"),
    )


def read_gptq(config: Fields) -> Published:
    """GPTQ, by its fields.

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    refuse_others(config, _GPTQ_FIELDS, "gptq")
    require_one_of(config, "bits", 4, 8)
    name = "format" if config.get("checkpoint_format") is None else "checkpoint_format"
    is_second = require_one_of(config, name, "gptq", "gptq_v2", default="gptq") == "gptq_v2"
    require_one_of(config, "pack_dtype", "int32", default="int32")
    require_one_of(config, "is_marlin_format", False, default=False)
    settings, skips = _read_dynamic(config)

    def layout(group: Group) -> Layout:
        own = settings(group.module)
        bits, size = own.integer("bits"), read_group(own, "group_size")
        has_order = own.flag("desc_act", default=False) and size is not None
        words, rows = group.tensor(".qweight", ["I32"], 2).shape
        packing = {"bits": bits, "per_word": 32 // bits}
        shape = (rows, words * packing["per_word"])
        zeros = {**packing, "packs_rows": True, "added": 0 if is_second else ONES[bits]}
        kind = "int4" if bits == 4 else "int8"
        return _layout(group, kind, shape, size or shape[1], packing, zeros, has_order=has_order)

    return Published(
        title=f"gptq, {config.get('bits')} bits",
        marks={".qweight": ".weight", ".qzeros": ".weight"},
        roles=(".qweight", ".qzeros", ".scales", ".g_idx"),
        layout=layout,
        skips=skips,
        adds_biases=True,
    )


def _layout(
    group: Group,
    kind: Any,
    shape: tuple[int, int],
    wide: int,
    numbers: dict[str, Any],
    zeros: dict[str, Any],
    *,
    has_order: bool,
) -> Layout:
    """The layout of a kernel whose numbers and whose zeros are packed so. Its order may be there in any case."""
    groups = (shape[0], -(-shape[1] // wide))
    return Layout(
        kind=kind,
        numbers=group.plane(".qweight", ["I32"], shape, **numbers, is_turned=True),
        scale=group.plane(".scales", SCALES, groups, is_turned=True),
        zero=group.plane(".qzeros", ["I32"], groups, **zeros, is_turned=True),
        order=group.reshaped(".g_idx", ["I32", "I64"], shape[1:]) if has_order or group.find(".g_idx") else None,
        block=(1, wide),
    )


def read_group(config: Fields, name: str) -> int | None:
    """How many inputs share a scale; None for all."""
    return None if config.get(name) == -1 else config.integer(name, default=128)


def _read_dynamic(config: Fields) -> tuple[Callable[[str], Fields], Callable[[str], str | None]]:
    """The fields of a module of this name, and the rule that says that it is not quantised, by `dynamic`."""
    config.section("dynamic")
    rules: list[tuple[str, re.Pattern[str], Fields | None]] = []
    for pattern, own in config.get("dynamic", {}).items():
        config.require(own is None or isinstance(own, dict), "dynamic", "have an object for each pattern", own)
        changed = None if pattern.startswith("-:") else config.under(own or {})
        if changed is not None:
            require_one_of(changed, "bits", 4, 8)
        rules.append((pattern, expression_of(config, "dynamic", re.sub(r"^[+-]:", "", pattern)), changed))

    def first(module: str) -> tuple[str, Fields | None]:
        return next(((name, own) for name, expression, own in rules if expression.match(module)), ("", config))

    return lambda module: first(module)[1] or config, lambda module: None if first(module)[1] else first(module)[0]
