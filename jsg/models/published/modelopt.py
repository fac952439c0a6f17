"""Kernels that ModelOpt wrote: NVFP4, which is e2m1 in groups of 16 inputs with a factor, and FP8."""

from jsg.fields import Fields
from jsg.models.published.fp8 import in_e4m3
from jsg.models.published.layout import Group, Layout
from jsg.models.published.record import Published, require_one_of, skips_by_wildcards
from jsg.models.without_effect import refuse_unknown

GROUP = 16
ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_FIELDS = (
    "quant_method quant_algo ignore exclude_modules group_size config_groups quantized_layers producer kv_cache_scheme "
    "kv_cache_quant_algo"
)


def read(config: Fields) -> Published:
    """ModelOpt's, by its fields. In mixed precision the type of a kernel says which of the two it is.

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    refuse_unknown(config, set(_FIELDS.split()), "modelopt")
    algorithm = require_one_of(config, "quant_algo", *ALGORITHMS)
    if algorithm not in ("FP8", "MIXED_PRECISION"):
        require_one_of(config, "group_size", GROUP, default=GROUP)
    excluded = config.get("ignore", config.get("exclude_modules"))

    def layout(group: Group) -> Layout:
        if group.tensor("", ["U8", "F8_E4M3"], 2).dtype == "U8":
            return in_nvfp4(group, "", "_scale_2", divides=False)
        return in_e4m3(group, "_scale", (1, 1))

    return Published(
        title=f"modelopt {algorithm}",
        marks={".weight_scale": ".weight", ".weight_scale_2": ".weight"},
        roles=("_scale", "_scale_2"),
        layout=layout,
        skips=skips_by_wildcards(excluded),
    )


def in_nvfp4(group: Group, numbers: str, factor: str, *, divides: bool) -> Layout:
    """The layout of a kernel in NVFP4 whose numbers and whose factor have these roles."""
    rows, groups = group.tensor("_scale", ["F8_E4M3"], 2).shape
    shape = (rows, groups * GROUP)
    return Layout(
        kind="e2m1",
        shape=shape,
        numbers=group.plane(numbers, ["U8"], shape, bits=4, per_word=2),
        scale=group.plane("_scale", ["F8_E4M3"], (rows, groups)),
        block=(1, GROUP),
        factor=group.number(factor),
        divides=divides,
    )
