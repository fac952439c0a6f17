"""Calculates the time of exchanges between H200s on one or two NVSwitches, from published figures.

A ring moves `2 (N - 1) / N` times the data in an all-reduce, and `(N - 1) / N` of the result in an all-gather. An
all-gather takes N - 1 steps around the ring, and an all-reduce twice as many (Patarasuk and Yuan 2009, "Bandwidth
optimal all-reduce algorithms for clusters of workstations"). The latency of a small exchange decides a decode step, and
there the published figures differ most. So a time is a pair. The first assumes the latency of two GPUs, which a
reduction inside the switch promises. The second adds up the steps of the ring.

With two hosts the sum is made in three stages: inside each host; then between the two GPUs that have the same part, one
in each host, each over its own network card; then the parts are distributed inside each host.
"""

import dataclasses

RING_BYTES_PER_S = 370e9
"""What a ring reaches over NVLink 4, of 450 GB/s on the wire, with 2 to 8 H100s
(github.com/NVIDIA/nccl-tests/issues/212, github.com/NVIDIA/nccl/issues/1455)."""
RING_SHARE = RING_BYTES_PER_S / 450e9
"""Of one direction of NVLink."""
PAIR_LATENCY_S = 6e-6
"""The time of a small all-reduce of two H100s in a CUDA graph (github.com/NVIDIA/nccl/issues/1259)."""
STEP_LATENCY_S = 2e-6
"""What each further step around the ring adds: 8 A100s take 34 microseconds and 2 take 10, which differ by 12 steps
(github.com/NVIDIA/nccl-tests/issues/123)."""
NETWORK_BYTES_PER_S = 47e9
"""What one network card of 400 Gb/s reaches (github.com/NVIDIA/nccl-tests/issues/290: 46 to 48 GB/s)."""
NETWORK_LATENCY_S = 19.5e-6
"""The time of a small all-reduce of two A100s in two hosts over InfiniBand HDR
(github.com/NVIDIA/nccl-tests/issues/150)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One exchange between all devices.

    Attributes:
        kind: "all-reduce" or "all-gather".
        num_bytes: Bytes of its result on one device.
        count: How many such exchanges there are.
    """

    kind: str
    num_bytes: int
    count: int = 1

    def seconds(self, num_devices: int, ring_bytes_per_s: float = RING_BYTES_PER_S) -> tuple[float, float]:
        """The seconds of all of them in sequence: at the latency of two GPUs, and at that of a ring."""
        if num_devices == 1:
            return 0.0, 0.0
        rounds = {"all-reduce": 2, "all-gather": 1}[self.kind]
        wire = rounds * (num_devices - 1) / num_devices * self.num_bytes / ring_bytes_per_s
        steps = rounds * (num_devices - 1)
        ring = PAIR_LATENCY_S + STEP_LATENCY_S * max(0, steps - 2)
        return self.count * (PAIR_LATENCY_S + wire), self.count * (ring + wire)

    def seconds_on_two_hosts(self, num_devices: int) -> tuple[float, float]:
        """The same if half of the devices are in another host, and each device has a network card."""
        in_a_host = num_devices // 2
        inside = dataclasses.replace(self, count=1).seconds(in_a_host)
        # In an all-reduce each GPU sends its part of the sum; in an all-gather, the part that its half has.
        between = NETWORK_LATENCY_S + self.num_bytes / in_a_host / NETWORK_BYTES_PER_S
        return self.count * (inside[0] + between), self.count * (inside[1] + between)
