"""How fast a launch is on a card: shares of its bandwidth and of its peak, which were measured on an H200.

**Modelled**: no other card has run jsg, so every card is taken to reach the shares that the H200 does. The figures
behind them are in `bench/results/device-h200-*-2026-11-27.json`; a share is of the published figure of the H200, 4.81
TB/s and 989 TFLOP/s. The sum over launches is compared with measured steps by `python -m bench.nvidia.model`.
"""

import dataclasses
import math
import re

from bench.nvidia.work import Kind, Work
from bench.tp.interconnect import RING_SHARE
from jsg.engine.device.targets import TARGETS

PEAK_TFLOPS = {
    "a100_80gb": 312,
    "a10g": 70,
    "rtx_a6000": 155,
    "l4": 121,
    "l40s": 362,
    "rtx4090": 165,
    "h100": 989,
    "h200": 989,
    "b200": 2250,
    "rtx_pro_6000": 504,
    "rtx5090": 209.5,
}
"""Published peaks of bfloat16 products that add up in float32, without sparsity, in TFLOP/s. Where the sum is float32,
GeForce cards and the A10G have half of their rate. A card of little power, such as the L4 with 72 W, holds less."""
NVLINK_BYTES_PER_S = {"a100_80gb": 300e9, "h100": 450e9, "h200": 450e9, "b200": 900e9}
"""One direction of NVLink. The other cards exchange over PCIe, which is not modelled."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What a kind of launch reaches, for steps of up to a number of tokens.

    Attributes:
        tokens: The most tokens of a step.
        bandwidth: Its share of the memory's bandwidth.
        peak: Its share of the peak.
    """

    tokens: float
    bandwidth: float
    peak: float


SHARES = {
    (Kind.PRODUCT, False): (Share(256, 0.92, 0.70), Share(math.inf, 0.92, 0.73)),
    (Kind.PRODUCT, True): (Share(8, 0.63, 0.45), Share(256, 0.57, 0.45), Share(math.inf, 0.57, 0.59)),
    (Kind.PRODUCT_OF_FEW_BITS, False): (Share(math.inf, 0.54, 0.47),),
    (Kind.PRODUCT_OF_FEW_BITS, True): (Share(64, 0.83, 0.47), Share(math.inf, 0.70, 0.47)),
    (Kind.PRODUCT_OF_E4M3, True): (Share(64, 0.83, 0.45), Share(256, 0.70, 0.45), Share(math.inf, 0.70, 0.54)),
    (Kind.EXPERTS_OF_E4M3, True): (Share(32, 0.83, 0.25), Share(256, 0.70, 0.25), Share(math.inf, 0.70, 0.54)),
    (Kind.EXPERTS, False): (Share(32, 0.83, 0.25), Share(256, 0.70, 0.25), Share(math.inf, 0.70, 0.54)),
    (Kind.EXPERTS, True): (Share(32, 0.43, 0.20), Share(256, 0.29, 0.20), Share(math.inf, 0.29, 0.38)),
}
"""By kind, and whether the kernel is in 8 bits. Then the card reads half of the bytes but converts each number, so it
reaches a smaller share. Those of products are such that they are to bfloat16 as in the run that measured both: 1.15 to
1.3 times as fast for up to 32 rows, and 1.5 times slower at 256. Int8 and fp8 differed by 5 % and have one share.
Products of jsg's kernel for few bits were measured nowhere. They reach what that of experts in 8 bits did, by
instructions for a number as counted in the machine code of loops for an H200. For few rows int4 has 3.2, int8 3.5 and
that of experts 7.2, which read 0.43 of the bandwidth. So int4 restores 2.2 times as many numbers, of 0.56 bytes each,
and int8 would need 0.88 of it: it has what experts in bfloat16 reached, which restore nothing. For many rows int4 has
4.2 and int8 4.4, between experts in 8 bits with 7.6, at 0.38 of the peak, and in bfloat16 with 1.8, at 0.54.
Products of e4m3 with e4m3 convert nothing and are built as those of experts, so they have the shares of these in
bfloat16, of twice the peak. One kernel has the 0.45 that XLA's own Triton products of up to 256 rows reached. Nothing
of it was measured."""
E4M3_TIMES = 2
"""How many times the peak of bfloat16 that of e4m3 is, as published for every card that has it."""
ATTENTION = Share(math.inf, 0.88, 0.27)
"""Reading the KV pool in decoding, and the products of a prompt; keys in 8 bits were not measured, and are taken to be
read with the same share."""
OTHER_BANDWIDTH = 0.83
START_S = {
    Kind.PRODUCT: 3.5e-6,
    Kind.PRODUCT_OF_FEW_BITS: 3.5e-6,
    Kind.PRODUCT_OF_E4M3: 3.5e-6,
    Kind.EXPERTS: 4e-6,
    Kind.EXPERTS_OF_E4M3: 4e-6,
    Kind.ATTENTION: 11e-6,
    Kind.OTHER: 1.7e-6,
}
"""The time of a launch that has almost nothing to do."""
GAP_S = 0.5e-6
"""Between two launches of a CUDA graph."""
STEP_S = 40e-6
"""Of every step: two programs begin, and the tokens are chosen in about five launches."""


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """A card's published figures.

    Attributes:
        bytes_per_s: Of its memory.
        flops_per_s: Of products in bfloat16.
        ring_bytes_per_s: What a ring of such cards carries; 0 without NVLink.
    """

    bytes_per_s: float
    flops_per_s: float
    ring_bytes_per_s: float


def speed_of(card: str) -> Speed:
    """The figures of a card of `jsg.engine.device.cards`."""
    found = re.search(r"memory_bandwidth: (\d+)", TARGETS.joinpath(f"{card}.txtpb").read_text(encoding="utf-8"))
    assert found is not None, "every description has it"
    return Speed(float(found[1]), 1e12 * PEAK_TFLOPS[card], RING_SHARE * NVLINK_BYTES_PER_S.get(card, 0))


def seconds(work: Work, tokens: int, speed: Speed, *, experts_read: float = 0, copies: float = 0) -> float:
    """The time of one launch but that of attention's keys, with the gap behind it.

    Args:
        work: Its bytes.
        tokens: The rows that a product multiplies.
        speed: The card's figures.
        experts_read: Of a launch with experts, how many are read.
        copies: The rows that they multiply.
    """
    start = START_S[work.kind] + GAP_S
    if not work.kernel:
        return start + work.other_bytes / (OTHER_BANDWIDTH * speed.bytes_per_s)
    share = next(each for each in SHARES[work.kind, work.is_in_8_bits] if tokens <= each.tokens)
    elements, num_bytes, rows = math.prod(work.kernel), float(work.kernel_bytes), float(tokens)
    if work.kind.has_experts:
        elements //= work.kernel[0]
        num_bytes *= experts_read / work.kernel[0]
        rows = copies
    moved = (num_bytes + work.other_bytes) / (share.bandwidth * speed.bytes_per_s)
    peak = speed.flops_per_s * (E4M3_TIMES if work.kind.is_in_e4m3 else 1)
    return start + max(moved, 2 * elements * rows / (share.peak * peak))


def attention_seconds(kv_bytes: float, flops: float, speed: Speed) -> float:
    """The time in which keys and values are read and multiplied by, beside the start of the launches."""
    return max(kv_bytes / (ATTENTION.bandwidth * speed.bytes_per_s), flops / (ATTENTION.peak * speed.flops_per_s))
