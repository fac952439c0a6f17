"""What H200s on one NVSwitch, or on two, need to exchange numbers, by the figures that others published.

A ring carries `2 (N - 1) / N` times the data in an all-reduce and `(N - 1) / N` of the result in an all-gather; both
take N - 1 steps around the ring, the all-reduce twice (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations"). How long a small one takes is what decides a decode step, and there the
published figures differ most, so a time is a pair: as if every one took what two GPUs take, which is what a reduction
inside the switch promises, and as the ring's steps add up.

Two hosts add up inside each first, then each GPU its part with the one that has the same part in the other host, over a
network card of its own, and then share out inside each again.
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
NETWORK_BYTES_PER_S = 47e9
"""What one card of 400 Gb/s carries (github.com/NVIDIA/nccl-tests/issues/290: 46 to 48 GB/s)."""
NETWORK_LATENCY_S = 19.5e-6
"""A small all-reduce of two A100s in two hosts over InfiniBand HDR (github.com/NVIDIA/nccl-tests/issues/150)."""


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

    def seconds_on_two_hosts(self, num_devices: int) -> tuple[float, float]:
        """The same where half of the devices are in another host, and each has a network card."""
        in_a_host = num_devices // 2
        inside = dataclasses.replace(self, count=1).seconds(in_a_host)
        # Of an all-reduce each GPU sends its part of the sum, of an all-gather what its own half has.
        between = NETWORK_LATENCY_S + self.num_bytes / in_a_host / NETWORK_BYTES_PER_S
        return self.count * (inside[0] + between), self.count * (inside[1] + between)
