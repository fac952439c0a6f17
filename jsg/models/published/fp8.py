"""Kernels in e4m3 with a scale for each block, row or tensor: `fp8` of DeepSeek, Qwen and others, and `fbgemm_fp8`."""

from jsg.errors import ModelError
from jsg.models.published.layout import DAMAGED, EXPONENTS, SCALES, Group, Layout
from jsg.models.published.record import Published, read_block, read_rule, refuse_others, require_one_of
from jsg.sources import Fields

BLOCK = (128, 128)
_FIELDS = (
    "fmt scale_fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers modules_to_convert "
    "dequantize expert_dtype kv_cache_scheme"
)
_ROLES = ("_scale_inv", ".qscale_weight", ".scale", "_scale")


def read(config: Fields) -> Published:
    """`fp8`, by its fields.

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    refuse_others(config, _FIELDS, "fp8")
    require_one_of(config, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    require_one_of(config, "scale_fmt", "float", "ue8m0", default="float")
    require_one_of(config, "activation_scheme", "dynamic", "static", default="dynamic")
    require_one_of(config, "expert_dtype", "fp8", default="fp8")
    block = read_block(config, "weight_block_size") or BLOCK
    return Published(
        title="fp8",
        marks={"_scale_inv": "", ".qscale_weight": ".weight", ".scale": ".weight", ".weight_scale": ".weight"},
        roles=_ROLES,
        layout=lambda group: in_e4m3(group, _role_of_scale(group), block),
        skips=read_rule(config, "transformers", "modules_to_not_convert", "ignored_layers"),
    )


def _role_of_scale(group: Group) -> str:
    """The role of the one tensor with a kernel's scales. Raises ModelError if there are several."""
    found = [role for role in _ROLES if group.find(role)]
    if len(found) > 1:
        names = " and ".join(map(group.full_name, found))
        raise ModelError(
            f"{group.name} must have its scales in one tensor, but the checkpoint holds {names}; {DAMAGED}"
        )
    return found[0] if found else _ROLES[0]


def read_fbgemm(config: Fields) -> Published:
    """`fbgemm_fp8`: each row has a scale. Kernels of experts are [expert, in, out].

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    refuse_others(config, "activation_scale_ub modules_to_not_convert", "fbgemm_fp8")
    return Published(
        title="fbgemm_fp8",
        marks={".weight_scale": ".weight", "_proj_scale": "_proj"},
        roles=("_scale",),
        layout=lambda group: in_e4m3(group, "_scale", (1, 0), turns_stacks=True),
        skips=read_rule(config, "transformers", "modules_to_not_convert"),
    )


def in_e4m3(group: Group, role: str, block: tuple[int, int], *, turns_stacks: bool = False) -> Layout:
    """The layout of a kernel in e4m3 whose scales have this role."""
    *lead, rows, columns = group.tensor("", ["F8_E4M3"], 2, 3).shape
    is_turned = turns_stacks and bool(lead)
    shape = (*lead, columns, rows) if is_turned else (*lead, rows, columns)
    scale, block = group.scale(role, (*SCALES, *EXPONENTS), shape, block)
    numbers = group.plane("", ["F8_E4M3"], shape, is_turned=is_turned)
    return Layout(kind="e4m3", numbers=numbers, scale=scale, block=block, is_turned=is_turned)
