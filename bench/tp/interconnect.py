"""What H200s on one NVSwitch need to exchange numbers, by the figures that others published.

A ring carries `2 (N - 1) / N` times the data in an all-reduce and `(N - 1) / N` of the result in an all-gather; both
take N - 1 steps around the ring, the all-reduce twice (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations"). How long a small one takes is what decides a decode step, and there the
published figures differ most, so a time is a pair: as if every one took what two GPUs take, which is what a reduction
inside the switch promises, and as the ring's steps add up.
"""

import dataclasses

RING_BYTES_PER_S = 370e9
"""What a ring carries over NVLink 4, of 450 GB/s on the wire, with 2 to 8 H100s
(github.com/NVIDIA/nccl-tests/issues/212, github.com/NVIDIA/nccl/issues/1455)."""
PAIR_LATENCY_S = 6e-6
"""A small all-reduce of two H100s in a CUDA graph (github.com/NVIDIA/nccl/issues/1259)."""
STEP_LATENCY_S = 2e-6
"""What each further step around the ring adds: from 10 to 34 microseconds between 2 and 8 A100s, in 12 steps
(github.com/NVIDIA/nccl-tests/issues/123)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One exchange between all devices.

    Attributes:
        kind: "all-reduce" or "all-gather".
        num_bytes: Of its result on one device.
        count: How many there are of it.
    """

    kind: str
    num_bytes: int
    count: int = 1

    def seconds(self, num_devices: int) -> tuple[float, float]:
        """All of them one after another: at the latency of two GPUs, and at that of a ring."""
        if num_devices == 1:
            return 0.0, 0.0
        rounds = {"all-reduce": 2, "all-gather": 1}[self.kind]
        wire = rounds * (num_devices - 1) / num_devices * self.num_bytes / RING_BYTES_PER_S
        steps = rounds * (num_devices - 1)
        ring = PAIR_LATENCY_S + STEP_LATENCY_S * max(0, steps - 2)
        return self.count * (PAIR_LATENCY_S + wire), self.count * (ring + wire)
