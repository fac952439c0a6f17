"""Published figures of Google's TPUs. Nothing here was measured by jsg, which never ran on one."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """What one device of a kind does; a chip of v7x is two devices, and one of v5p is one device with two cores.

    Attributes:
        target: Its name for `jsg compile --target`.
        devices: The devices of one chip.
        chips: Those of the largest host.
        memory_bytes: Its memory.
        bytes_per_s: Of its memory.
        flops_per_s: Of products in bfloat16.
        clock_hz: `flops_per_s` over the operations of all matrix units in a cycle, which XLA's estimates show.
        link_bytes_per_s: Of one link to another chip in one direction: what is published for a chip in both directions,
            over twice its links (4 where chips form a plane, 6 otherwise).
        source: Where the figures are from.
    """

    target: str
    devices: int
    chips: int
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float
    clock_hz: float
    link_bytes_per_s: float
    source: str


_PAGES = "https://docs.cloud.google.com/tpu/docs/"
CHIPS = {
    "v5e": Chip("v5e", 1, 8, 16e9, 819e9, 197e12, 1.5e9, 400e9 / 8, f"{_PAGES}v5e"),
    "v6e": Chip("v6e", 1, 8, 32e9, 1638e9, 918e12, 1.75e9, 800e9 / 8, f"{_PAGES}v6e"),
    "v5p": Chip("v5p", 1, 4, 95e9, 2765e9, 459e12, 1.75e9, 1200e9 / 12, f"{_PAGES}v5p"),
    "v7x": Chip("tpu7x", 2, 4, 192e9 / 2, 7380e9 / 2, 2307e12 / 2, 2.2e9, 1200e9 / 12, f"{_PAGES}tpu7x"),
}
HOP_S = 1e-6
"""The latency from a chip to its neighbour (J. Austin et al., "How to Scale Your Model", 2025, part 3)."""


def exchange_seconds(chip: Chip, kind: str, num_bytes: int, num_devices: int) -> float:
    """The time of an exchange around a ring of devices, each of which sends to both of its neighbours at once.

    An all-gather of `num_bytes` moves `(N - 1) / N` of them over `N / 2` hops, an all-reduce twice as much. Between the
    two devices of a chip of v7x no more is assumed than between chips.
    """
    if num_devices == 1:
        return 0.0
    wire = (num_devices - 1) / num_devices * num_bytes / (2 * chip.link_bytes_per_s)
    return (2 if kind == "all-reduce" else 1) * (wire + num_devices // 2 * HOP_S)
