"""Kernels in e4m3 with a scale for each block, row or tensor: `fp8` of DeepSeek, Qwen and others, and `fbgemm_fp8`."""

from jsg.fields import Fields
from jsg.models.published.layout import EXPONENTS, SCALES, Group, Layout, Plane
from jsg.models.published.record import Published, read_block, require_one_of, skips_of
from jsg.models.without_effect import refuse_unknown

BLOCK = (128, 128)
_MARKS = {"_scale_inv": "", ".qscale_weight": ".weight", ".scale": ".weight", ".weight_scale": ".weight"}
_ROLES = ("_scale_inv", ".qscale_weight", ".scale", "_scale")


def read(config: Fields) -> Published:
    """`fp8`, by its fields.

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    known = "quant_method fmt scale_fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers"
    more = "modules_to_convert dequantize expert_dtype kv_cache_scheme"
    refuse_unknown(config, {*known.split(), *more.split()}, "fp8")
    require_one_of(config, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    require_one_of(config, "scale_fmt", "float", "ue8m0", default="float")
    require_one_of(config, "activation_scheme", "dynamic", "static", default="dynamic")
    require_one_of(config, "expert_dtype", "fp8", default="fp8")
    block = read_block(config, "weight_block_size")
    skips = skips_of(config.get("modules_to_not_convert", config.get("ignored_layers")))

    def layout(group: Group) -> Layout:
        role = next((role for role in _ROLES if group.find(role)), _ROLES[0])
        return in_e4m3(group, role, block or BLOCK)

    return Published(title="fp8", marks=_MARKS, roles=_ROLES, layout=layout, skips=skips)


def in_e4m3(group: Group, role: str, block: tuple[int, int]) -> Layout:
    """The layout of a kernel in e4m3 whose scales have this role."""
    numbers = group.tensor("", ["F8_E4M3"], 2, 3)
    scale, block = group.scale(role, (*SCALES, *EXPONENTS), numbers.shape, block)
    plane = Plane(tensor=numbers, shape=numbers.shape)
    return Layout(kind="e4m3", shape=numbers.shape, numbers=plane, scale=scale, block=block)


def read_fbgemm(config: Fields) -> Published:
    """`fbgemm_fp8`: each row has a scale. Kernels of experts are [expert, in, out].

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    refuse_unknown(config, {"quant_method", "activation_scale_ub", "modules_to_not_convert"}, "fbgemm_fp8")

    def layout(group: Group) -> Layout:
        if len(group.tensor("", ["F8_E4M3"], 2, 3).shape) == 2:
            return in_e4m3(group, "_scale", (1, 0))
        numbers = group.tensor("", ["F8_E4M3"])
        experts, columns, rows = numbers.shape
        scale, block = group.scale("_scale", SCALES, (experts, rows, columns), BLOCK)
        plane = Plane(tensor=numbers, shape=(experts, rows, columns), is_turned=True)
        return Layout(kind="e4m3", shape=plane.shape, numbers=plane, scale=scale, block=block, is_turned=True)

    return Published(
        title="fbgemm_fp8",
        marks={".weight_scale": ".weight", "_proj_scale": "_proj"},
        roles=("_scale",),
        layout=layout,
        skips=skips_of(config.get("modules_to_not_convert")),
    )
