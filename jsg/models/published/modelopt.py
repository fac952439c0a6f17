"""Kernels that ModelOpt wrote: NVFP4, which is e2m1 in groups of 16 inputs with a factor, and FP8."""

from jsg.models.published.fp8 import in_e4m3
from jsg.models.published.layout import Group, Layout
from jsg.models.published.record import Published, read_rule, refuse_others, require_one_of
from jsg.sources import Fields

GROUP = 16
MIXED = "MIXED_PRECISION"
ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")
_FIELDS = (
    "quant_algo ignore exclude_modules group_size config_groups quantized_layers kv_cache_scheme kv_cache_quant_algo"
)


def read(config: Fields) -> Published:
    """ModelOpt's, by its fields. The type of a kernel says which of the two it is.

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    algorithm = require_one_of(config, "quant_algo", *ALGORITHMS, MIXED)
    refuse_others(config, _FIELDS, "modelopt")
    if "NVFP4" in algorithm:
        require_one_of(config, "group_size", GROUP, default=GROUP)
    layers = config.section("quantized_layers") or Fields(config.file, {})
    for name in layers.names():
        require_one_of(layers.section(name) or layers, "quant_algo", *ALGORITHMS)
    return Published(
        title=f"modelopt, {algorithm}",
        marks={".weight_scale": ".weight", ".weight_scale_2": ".weight"},
        roles=("_scale", "_scale_2"),
        layout=_layout,
        skips=read_rule(config, "modelopt", "ignore", "exclude_modules"),
    )


def _layout(group: Group) -> Layout:
    if group.tensor("", ["U8", "F8_E4M3"]).dtype == "U8":
        return in_nvfp4(group, "", "_scale_2", divides=False)
    return in_e4m3(group, "_scale", (1, 0))


def in_nvfp4(group: Group, numbers: str, factor: str, *, divides: bool) -> Layout:
    """The layout of a kernel in NVFP4 whose numbers and whose factor have these roles."""
    rows, groups = group.tensor("_scale", ["F8_E4M3"], 2).shape
    return Layout(
        kind="e2m1",
        numbers=group.plane(numbers, ["U8"], (rows, groups * GROUP), bits=4, per_word=2),
        scale=group.plane("_scale", ["F8_E4M3"], (rows, groups)),
        block=(1, GROUP),
        factor=group.reshaped(factor, ["F32"]),
        divides=divides,
    )
