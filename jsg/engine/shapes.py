"""In which shapes an engine computes: how many rows, tokens and tiles its programs take, by kind of device."""

import dataclasses

from jsg.config import EngineConfig
from jsg.kernels_pallas import ops
from jsg.models.spec import ModelSpec
from jsg.sched.buckets import Buckets, make_buckets, make_deterministic_buckets

ROW_MULTIPLE = {"gpu": 8, "tpu": 8}
"""Every number of rows is a multiple of this, by platform. cuBLASLt would pad to it in launches of its own, and XLA
would make a single row a product of vectors and convert every weight to float32 for it (seen in programs compiled for
an H200), or multiply on a TPU's vector unit, at 7 times the cycles of eight rows by its own estimate (compiled for v5e
and v6e). A step reads the weights once for any number of rows, so the padding is nearly free."""

ENCODE_SIZES = {"cpu": (1, 4)}
OTHER_ENCODE_SIZES = (1, 2, 4, 8)
"""Numbers of tiles that the vision encoder takes at once. A CPU has few, because each is a program to compile."""

ACCELERATOR_CHUNK = 8192
"""New tokens of a step at most by default, where there is an accelerator."""


def shapes_of(config: EngineConfig, model: ModelSpec, max_running: int, platform: str) -> Buckets:
    """The shapes of the engine. Layers with a sliding window read no prefix for several requests at once."""
    on_cpu = platform == "cpu"
    sizes = () if model.vision is None else ENCODE_SIZES.get(platform, OTHER_ENCODE_SIZES)
    if config.deterministic:
        num_tokens = 64 if on_cpu else 512
        buckets = make_deterministic_buckets(max_running, config.chunked_prefill_size or num_tokens, num_tokens)
        return dataclasses.replace(buckets, encode=sizes[-1:])
    buckets = make_buckets(
        max_running,
        config.chunked_prefill_size or max(512 if on_cpu else ACCELERATOR_CHUNK, max_running),
        row_multiple=ROW_MULTIPLE.get(platform, 1),
        shares_prefixes=ops.best_implementation() == "triton" and None in model.layer_windows,
    )
    return dataclasses.replace(buckets, encode=sizes)
