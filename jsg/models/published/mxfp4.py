"""Kernels in MXFP4, experts as gpt-oss has them too: e2m1 in groups of 32 inputs, whose scales are powers of two."""

from jsg.models.published.layout import EXPONENTS, Group, Layout
from jsg.models.published.record import Published, read_rule, refuse_others
from jsg.sources import Fields

GROUP = 32


def read(config: Fields) -> Published:
    """`mxfp4`. The model has the kernels as [expert, in, out].

    Raises:
        FieldError: A field is not known.
    """
    refuse_others(config, "modules_to_not_convert dequantize", "mxfp4")
    return Published(
        title="mxfp4",
        marks={"_blocks": "", "_scales": ""},
        roles=("_blocks", "_scales"),
        layout=_layout,
        skips=read_rule(config, "transformers", "modules_to_not_convert"),
    )


def _layout(group: Group) -> Layout:
    experts, rows, groups, _ = group.tensor("_blocks", ["U8"], 4).shape
    shape, packing = (experts, rows, groups * GROUP), {"bits": 4, "per_word": GROUP, "word_bytes": GROUP // 2}
    return Layout(
        kind="e2m1",
        numbers=group.plane("_blocks", ["U8"], shape, **packing),
        scale=group.plane("_scales", ["U8"], (experts, rows, groups)),
        block=(1, GROUP),
        is_turned=True,
    )


def in_mxfp4(group: Group) -> Layout:
    """The layout of a kernel [out, in] of compressed-tensors."""
    rows, groups = group.tensor("_scale", EXPONENTS, 2).shape
    return Layout(
        kind="e2m1",
        numbers=group.plane("_packed", ["U8"], (rows, groups * GROUP), bits=4, per_word=2),
        scale=group.plane("_scale", EXPONENTS, (rows, groups)),
        block=(1, GROUP),
    )
