"""Mistral Small 3.1 and 3.2, and Ministral 3 as it is published: a text model beside a tower, which is not built."""

from jsg.models.family import usual
from jsg.models.wrapper import Wrapper

WRAPPER = Wrapper(
    text_type="mistral",
    text_half=usual(
        vocab=131072, width=5120, inner=32768, layers=40, heads=32, kv_heads=8, head_dim=128, context=131072
    )
    | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000_000.0, "sliding_window": None},
    is_tied=True,
    fields="spatial_merge_size",
)
