"""Kernels of compressed-tensors: e4m3, int8, int4 and int8 in words of 32 bits, NVFP4 and MXFP4. Groups may differ."""

import dataclasses

from jsg.errors import ModelError
from jsg.models.published import mxfp4
from jsg.models.published.fp8 import in_e4m3
from jsg.models.published.layout import DAMAGED, SCALES, Group, Layout, Plane, Stored
from jsg.models.published.modelopt import GROUP, in_nvfp4
from jsg.models.published.record import Published, Rule, read_block, read_rule, refuse_others, require_one_of
from jsg.sources import Fields

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
FORMATS += ("pack-quantized",)
HELD = {(False, "F8_E4M3"): "float 8", (False, "I8"): "int 8", (True, "U8"): "float 4"}
"""Whether numbers are packed, and the type of their tensor → what they are. I32 has integers of either length."""
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
ORDERS = (True, False, "group", "dynamic", "weight", "static")
PRODUCER = "jsg"
"""The name in `producer` of what `jsg convert` rounds to 4 bits: bfloat16 holds each number times its scale."""
_FIELDS = "config_groups format ignore quantization_status kv_cache_scheme version sparsity_config transform_config"
_WEIGHT_FIELDS = (
    "num_bits type symmetric group_size strategy block_structure dynamic actorder observer observer_kwargs zp_dtype "
    "scale_dtype"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """How the modules of a group are quantised.

    Attributes:
        names: Which modules are named.
        is_for_classes: It is for classes of modules.
        kind: `int` or `float`, and the bits of a number.
        block: Rows and columns that share a scale; 0 for all.
        is_symmetric: There are no zeros.
        has_order: A tensor has the group of each column.
        is_exact: See `Form`.
    """

    names: Rule
    is_for_classes: bool
    kind: str
    block: tuple[int, int]
    is_symmetric: bool
    has_order: bool
    is_exact: bool


def read(config: Fields) -> Published:
    """compressed-tensors, by its fields.

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    refuse_others(config, _FIELDS, "compressed-tensors")
    require_one_of(config, "quantization_status", "compressed", "frozen", default="compressed")
    sparsity = config.section("sparsity_config")
    if sparsity is not None:
        require_one_of(sparsity, "format", "dense", default="dense")
    config.require(not config.get("transform_config"), "transform_config", "be empty", config.get("transform_config"))
    groups = config.section("config_groups") or Fields(config.file, {})
    config.require(bool(groups.names()), "config_groups", "name a group", config.get("config_groups"))
    producer = config.get("producer")
    is_own = isinstance(producer, dict) and producer.get("name") == PRODUCER
    schemes = [_read_scheme(config, groups.section(name) or groups, name, is_own) for name in sorted(groups.names())]
    return Published(
        title=f"compressed-tensors, {' and '.join(dict.fromkeys(scheme.kind for scheme in schemes))} bits",
        marks={".weight_scale": ".weight", ".weight_packed": ".weight", "_proj_scale": "_proj"},
        roles=("_packed", "_scale", "_zero_point", "_shape", "_g_idx", "_global_scale"),
        layout=lambda group: _layout(group, schemes),
        skips=read_rule(config, "compressed-tensors", "ignore"),
    )


def _read_scheme(config: Fields, group: Fields, name: str, is_own: bool) -> Scheme:
    refuse_others(group, "targets weights input_activations output_activations format", f"the group {name}")
    where = config if group.get("format") is None else group
    if where is group or config.get("format") != "mixed-precision":
        require_one_of(where, "format", *FORMATS)
    targets, weights = group.get("targets", []), group.section("weights") or Fields(group.file, {})
    group.require(bool(targets), "targets", "name modules", targets)
    names = read_rule(group, "compressed-tensors", "targets")
    refuse_others(weights, _WEIGHT_FIELDS, "weights")
    bits = require_one_of(weights, "num_bits", 4, 8, default=8 if weights.names() else None)
    kind = f"{require_one_of(weights, 'type', 'int', 'float', default='int')} {bits}"
    require_one_of(weights, "dynamic", False, default=False)
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = require_one_of(weights, "strategy", *STRATEGIES, default=default)
    wide = weights.integer("group_size") if strategy in ("group", "tensor_group") else 0
    sizes = {"tensor_group": GROUP, "group": mxfp4.GROUP} if kind == "float 4" else {strategy: wide}
    weights.require(wide == sizes.get(strategy), "group_size", "be that of NVFP4 or MXFP4 for float 4", size)
    block = (read_block(weights, "block_structure") or (128, 128)) if strategy == "block" else (1, wide)
    is_for_classes = any(not target.startswith("re:") for target in targets)
    order = require_one_of(weights, "actorder", *ORDERS, default=False)
    has_order = order in (True, "group", "dynamic")  # with the others the columns are in their places again
    is_symmetric, is_exact = weights.flag("symmetric", default=True), is_own and kind == "int 4"
    return Scheme(names, is_for_classes, kind, block, is_symmetric, has_order, is_exact)


def _layout(group: Group, schemes: list[Scheme]) -> Layout:
    """The layout of a module by its group: of those that name it, or else of those for classes, one that fits it."""
    packed = group.find("_packed")
    numbers = packed or group.tensor("", ["F8_E4M3", "I8"])
    named = [each for each in schemes if each.names(group.module)]
    of_classes = [each for each in schemes if each.is_for_classes]
    integers = ("int 4", "int 8") if packed and numbers.dtype == "I32" else ()
    kinds = integers or (HELD.get((packed is not None, numbers.dtype)),)
    scheme = next((each for each in named or of_classes if each.kind in kinds), None)
    if scheme is None:
        raise ModelError(
            f"{group.name} must be as a group of config_groups says, but its numbers are {numbers.dtype}; {DAMAGED}"
        )
    if integers:
        return _packed(group, scheme)
    if scheme.kind != "int 8":
        _refuse_numbers(group, "_zero_point", "_g_idx")
    if packed is not None:
        if scheme.block[1] == mxfp4.GROUP:
            return mxfp4.in_mxfp4(group)
        return in_nvfp4(group, "_packed", "_global_scale", divides=True)
    if scheme.kind == "float 8":
        return in_e4m3(group, "_scale", scheme.block, turns_stacks=True)
    rows, columns = group.tensor("", ["I8"], 2).shape
    scale, block = group.scale("_scale", SCALES, (rows, columns), scheme.block)
    zero = None
    if not scheme.is_symmetric or group.find("_zero_point"):
        zero = Plane(tensor=group.reshaped("_zero_point", ["I8"], scale.shape), shape=scale.shape)
    return Layout(
        kind="int8",
        numbers=group.plane("", ["I8"], (rows, columns)),
        scale=scale,
        zero=zero,
        order=_order(group, scheme, columns),
        may_be_unset=True,
        block=block,
    )


def _order(group: Group, scheme: Scheme, columns: int) -> Stored | None:
    return group.reshaped("_g_idx", ["I32", "I64"], (columns,)) if scheme.has_order or group.find("_g_idx") else None


def _refuse_numbers(group: Group, *roles: str) -> None:
    """Raises ModelError if a tensor changes what numbers mean, but the kernel's group does not have it."""
    for role in roles:
        if (tensor := group.find(role)) is not None and tensor.read((slice(None),) * len(tensor.shape)).any():
            raise ModelError(
                f"{group.full_name(role)} must be absent or of zeros by its group of config_groups, but is not; "
                f"{DAMAGED}"
            )


def _packed(group: Group, scheme: Scheme) -> Layout:
    """Numbers in words along inputs, and zeros in words along outputs. Both are stored without signs."""
    bits = 4 if scheme.kind == "int 4" else 8
    packing = {"bits": bits, "per_word": 32 // bits}
    rows, words = group.tensor("_packed", ["I32"], 2).shape
    columns = words * packing["per_word"]
    if group.find("_shape"):
        rows, columns = group.reshaped("_shape", ["I32", "I64"], (2,)).read((slice(None),)).tolist()
    wide = scheme.block[1] or columns
    groups = (rows, -(-columns // wide))
    if scheme.is_symmetric:
        _refuse_numbers(group, "_zero_point")
    return Layout(
        kind="int4" if bits == 4 else "int8",
        numbers=group.plane("_packed", ["I32"], (rows, columns), **packing),
        scale=group.plane("_scale", SCALES, groups),
        zero=None if scheme.is_symmetric else group.plane("_zero_point", ["I32"], groups, **packing, packs_rows=True),
        no_zero=1 << (bits - 1),
        order=_order(group, scheme, columns),
        may_be_unset=True,
        block=(1, wide),
        is_exact=scheme.is_exact,
    )
