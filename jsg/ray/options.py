"""What `serve run jsg.ray:build NAME=VALUE ...` takes."""

import re
import shlex
import sys
from typing import Annotated

from pydantic import BaseModel, Field, field_validator, model_validator

COUNT = Field(ge=1)
SECONDS = Field(gt=0)


class Options(BaseModel, extra="forbid", frozen=True):
    """The application. An unknown name is an error.

    Attributes:
        model: The model, as for `jsg serve`; on every host.
        replicas: How many replicas, or `LEAST..MOST` for autoscaling.
        fronts: How many processes relay.
        tp: The devices of a replica, on all its hosts together.
        hosts: The hosts of a replica.
        gpus: GPUs of a replica on each host; by default its devices there. 0 on a machine without GPUs.
        cpus: CPU cores that Ray sets aside for a replica on each host.
        host: Where replicas listen; by default at their node's address. 127.0.0.1 does for a cluster of one machine.
        options: More options of `jsg serve`.
        python: The interpreter that has jsg and JAX, on every host. By default the one that runs this.
        wait_s: Seconds after which a request that no replica has taken fails.
        start_s: Seconds in which a replica must be ready.
        drain_s: Seconds in which the requests of a replica that is stopped may end.
        waiting: Waiting requests for which autoscaling adds one replica.
        kv_usage: The share of the KV pools in use that autoscaling aims at.
    """

    model: str
    replicas: str = "1"
    fronts: Annotated[int, COUNT] = 1
    tp: Annotated[int, COUNT] = 1
    hosts: Annotated[int, COUNT] = 1
    gpus: Annotated[float, Field(ge=0)] | None = None
    cpus: Annotated[float, Field(ge=0)] = 1
    host: str | None = None
    options: str = ""
    python: str = sys.executable
    wait_s: Annotated[float, SECONDS] = 60
    start_s: Annotated[float, SECONDS] = 1800
    drain_s: Annotated[float, SECONDS] = 600
    waiting: Annotated[float, SECONDS] = 8
    kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.7

    @field_validator("replicas", mode="before")
    @classmethod
    def _check_replicas(cls, value: object) -> str:
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", str(value))
        if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            raise ValueError(f"replicas must be a number or LEAST..MOST, from 1 on, but it is {value!r}")
        return str(value)

    @model_validator(mode="after")
    def _check_hosts(self) -> "Options":
        if self.tp % self.hosts:
            raise ValueError(f"hosts must divide tp, but {self.hosts} does not divide {self.tp}; change one of them")
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest number of replicas."""
        least, _, most = self.replicas.partition("..")
        return int(least), int(most or least)

    @property
    def num_gpus(self) -> float:
        """GPUs of a replica on one host."""
        return self.tp // self.hosts if self.gpus is None else self.gpus

    def command(self, rank: int, address: str, port: int, meeting_port: int) -> list[str]:
        """The command of host `rank` of a replica whose first host has this address.

        Args:
            rank: The number of the host.
            address: Where host 0 listens for fronts and for the other hosts.
            port: Where it serves.
            meeting_port: Where the hosts meet, if there are several.
        """
        command = [self.python, "-m", "jsg.cli", "serve", self.model, "--exit-with-parent", "--open-metrics"]
        command += ["--host", address, "--port", str(port), "--tp-size", str(self.tp), *shlex.split(self.options)]
        if self.hosts == 1:
            return command
        meeting = ["--dist-init-addr", f"{address}:{meeting_port}"]
        return [*command, "--nnodes", str(self.hosts), "--node-rank", str(rank), *meeting]
