"""Kernels of experts in MXFP4, as gpt-oss has them: e2m1 in groups of 32 inputs, whose scales are powers of two."""

from jsg.fields import Fields
from jsg.models.published.layout import Group, Layout
from jsg.models.published.record import Published, skips_of
from jsg.models.without_effect import refuse_unknown

GROUP = 32


def read(config: Fields) -> Published:
    """`mxfp4`. The model has the kernels as [expert, in, out].

    Raises:
        FieldError: A field is not known.
    """
    refuse_unknown(config, {"quant_method", "modules_to_not_convert", "dequantize"}, "mxfp4")

    def layout(group: Group) -> Layout:
        experts, rows, groups, _ = group.tensor("_blocks", ["U8"], 4).shape
        shape = (experts, rows, groups * GROUP)
        return Layout(
            kind="e2m1",
            shape=shape,
            numbers=group.plane("_blocks", ["U8"], shape, bits=4, per_word=GROUP, words=GROUP // 2),
            scale=group.plane("_scales", ["U8"], (experts, rows, groups)),
            block=(1, GROUP),
            is_turned=True,
        )

    return Published(
        title="mxfp4",
        marks={"_blocks": "", "_scales": ""},
        roles=("_blocks", "_scales"),
        layout=layout,
        skips=skips_of(config.get("modules_to_not_convert")),
    )
