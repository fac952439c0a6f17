"""Kernels of compressed-tensors: e4m3, int8, int4 and int8 in words of 32 bits, and NVFP4. Groups may differ."""

import dataclasses
import math

from jsg.errors import ModelError
from jsg.fields import Fields
from jsg.models.published.fp8 import in_e4m3
from jsg.models.published.layout import DAMAGED, SCALES, Group, Layout, Plane
from jsg.models.published.modelopt import in_nvfp4
from jsg.models.published.record import Published, matches, read_block, require_one_of
from jsg.models.without_effect import refuse_unknown

FLOAT, PACKED, NVFP4, INTEGER = "float-quantized", "pack-quantized", "nvfp4-pack-quantized", "int-quantized"
NAIVE, MIXED = "naive-quantized", "mixed-precision"
KINDS = {(FLOAT, "float", 8), (PACKED, "int", 4), (PACKED, "int", 8), (NVFP4, "float", 4), (INTEGER, "int", 8)}
_FIELDS = (
    "quant_method config_groups format ignore quantization_status global_compression_ratio kv_cache_scheme version "
    "sparsity_config transform_config"
)
_GROUP_FIELDS = "targets weights input_activations output_activations format"
_WEIGHT_FIELDS = (
    "num_bits type symmetric group_size strategy block_structure dynamic actorder observer observer_kwargs scale_dtype "
    "zp_dtype"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """How the modules of a group are quantised.

    Attributes:
        targets: Their names, patterns of them, or classes of modules.
        form: The format.
        bits: Bits of a number.
        block: Rows and columns that share a scale; 0 for all.
        is_symmetric: There are no zeros.
    """

    targets: tuple[str, ...]
    form: str
    bits: int
    block: tuple[int, int]
    is_symmetric: bool


def read(config: Fields) -> Published:
    """compressed-tensors, by its fields.

    Raises:
        FieldError: A field has another value than those that are supported.
    """
    refuse_unknown(config, set(_FIELDS.split()), "compressed-tensors")
    require_one_of(config, "quantization_status", "compressed", "frozen", default="compressed")
    sparsity = config.section("sparsity_config")
    if sparsity is not None:
        require_one_of(sparsity, "format", "dense", default="dense")
    config.require(not config.get("transform_config"), "transform_config", "be empty", config.get("transform_config"))
    groups = config.section("config_groups")
    config.require(bool(groups and groups.names()), "config_groups", "name a group", config.get("config_groups"))
    schemes = [_read_scheme(config, groups, name) for name in sorted(groups.names())] if groups else []
    ignored = [each for each in config.get("ignore", ()) if isinstance(each, str)]

    def skips(module: str) -> str | None:
        return next((pattern for pattern in ignored if matches(module, pattern)), None)

    def layout(group: Group) -> Layout:
        return _layout(group, _scheme_of(group, schemes))

    forms = dict.fromkeys(scheme.form for scheme in schemes)
    return Published(
        title=f"compressed-tensors {', '.join(forms)}",
        marks={".weight_scale": ".weight", ".weight_packed": ".weight"},
        roles=("_packed", "_scale", "_zero_point", "_shape", "_g_idx", "_global_scale"),
        layout=layout,
        skips=skips,
    )


def _read_scheme(config: Fields, groups: Fields, name: str) -> Scheme:
    group = groups.section(name)
    assert group is not None, "a name of `names`"
    refuse_unknown(group, set(_GROUP_FIELDS.split()), "a group")
    targets, weights = group.get("targets", []), group.section("weights")
    ok = isinstance(targets, list) and targets and all(isinstance(target, str) for target in targets)
    group.require(ok, "targets", "be a list of modules", targets)
    group.require(weights is not None, "weights", "be an object", None)
    assert weights is not None, "required"
    refuse_unknown(weights, set(_WEIGHT_FIELDS.split()), "weights")
    bits, kind = require_one_of(weights, "num_bits", 4, 8, default=8), weights.text("type", "int").lower()
    known = sorted({each for each, *of in KINDS if of == [kind, bits]})
    where = config if group.get("format") is None else group
    form = where.get("format")
    form = known[0] if known and form in (NAIVE, MIXED, None) and (kind, bits) != ("int", 8) else form
    form = INTEGER if form == NAIVE else form
    where.require(form in known, "format", f"be {' or '.join(known)} of {kind} {bits}", form)
    require_one_of(weights, "dynamic", False, default=False)
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = require_one_of(weights, "strategy", *strategies, default=default)
    wide = weights.integer("group_size") if strategy in ("group", "tensor_group") else 0
    block = (read_block(weights, "block_structure") or (128, 128)) if strategy == "block" else (1, wide)
    return Scheme(tuple(targets), str(form), bits, block, weights.flag("symmetric", default=True))


def _scheme_of(group: Group, schemes: list[Scheme]) -> Scheme:
    """The scheme of a module: of those that name it, or else of those for classes, the one that its tensors fit."""
    named = [each for each in schemes if any(matches(group.module, target) for target in each.targets)]
    of_classes = [each for each in schemes if any(not target.startswith("re:") for target in each.targets)]
    numbers = group.find("_packed", "")
    kind = None if numbers is None else (group.find("_packed") is not None, numbers.dtype)
    forms = {(True, "I32"): PACKED, (True, "U8"): NVFP4, (False, "F8_E4M3"): FLOAT, (False, "I8"): INTEGER}
    form = None if kind is None else forms.get(kind)
    found = next((each for each in named or of_classes if each.form == form), None)
    if found is None:
        raise ModelError(
            f"{group.name} must be in the format of a group of config_groups, but is stored as "
            f"{form or (numbers.dtype if numbers else 'scales alone')}; {DAMAGED}"
        )
    return found


def _layout(group: Group, scheme: Scheme) -> Layout:
    if scheme.form == NVFP4:
        return in_nvfp4(group, "_packed", "_global_scale", divides=True)
    if scheme.form == PACKED:
        return _packed(group, scheme)
    if scheme.form == FLOAT:
        return in_e4m3(group, "_scale", scheme.block)
    numbers = group.tensor("", ["I8"], 2)
    scale, block = group.scale("_scale", SCALES, numbers.shape, scheme.block)
    zero = None
    if not scheme.is_symmetric or group.find("_zero_point"):
        zero = dataclasses.replace(scale, tensor=group.reshaped("_zero_point", ["I8"], scale.shape))
    plane = Plane(tensor=numbers, shape=numbers.shape)
    return Layout(kind="int8", shape=numbers.shape, numbers=plane, scale=scale, zero=zero, block=block)


def _packed(group: Group, scheme: Scheme) -> Layout:
    """Numbers in words along inputs, and zeros in words along outputs. Both are stored without signs."""
    per_word = 32 // scheme.bits
    rows, words = group.tensor("_packed", ["I32"], 2).shape
    shape = (rows, words * per_word)
    if group.find("_shape"):
        told = group.tensor("_shape", ["I32", "I64"], 1).read((slice(None),)).tolist()
        ok = len(told) == 2 and told[0] == rows and -(-told[1] // per_word) == words
        if not ok:
            raise ModelError(
                f"{group.full_name('_shape')} must be the shape of {group.name}, whose numbers fill {rows} x {words} "
                f"words, but is {told}; {DAMAGED}"
            )
        shape = (rows, told[1])
    wide = scheme.block[1] or shape[1]
    groups, packing = (rows, math.ceil(shape[1] / wide)), {"bits": scheme.bits, "per_word": per_word}
    zero = None
    if not scheme.is_symmetric:
        zero = group.plane("_zero_point", ["I32"], groups, **packing, packs_rows=True)
    return Layout(
        kind="int4" if scheme.bits == 4 else "int8",
        shape=shape,
        numbers=group.plane("_packed", ["I32"], shape, **packing),
        scale=group.plane("_scale", SCALES, groups),
        zero=zero,
        no_zero=1 << (scheme.bits - 1),
        order=group.vector("_g_idx", shape[1]),
        block=(1, wide),
    )
