"""The application that `serve run jsg.ray:build` starts: fronts, replicas, and one directory."""

import time
from collections.abc import Sequence
from typing import Any, final

import ray
from ray import serve
from ray.serve.config import (  # pyright: ignore[reportMissingImports]
    AutoscalingConfig,
    AutoscalingPolicy,
    DeploymentActorConfig,
    RequestRouterConfig,
)

from jsg.ray.directory import Directory, Report
from jsg.ray.front import Front
from jsg.ray.options import Options
from jsg.ray.prompt import PromptUnits
from jsg.ray.replica import Replica
from jsg.ray.request_router import ACTOR, PrefixRouter
from jsg.ray.scaling import LoadPolicy

MAX_OPEN = 4096  # leases of a replica, and requests of a front; jsg has its own limits, and says so to the client
HEALTH_CHECK_S = 5


@final
class DirectoryActor:
    """The directory with the clock of its process. Calls run one after the other."""

    def __init__(self) -> None:
        """Knows nothing; fronts choose by hash until it does."""
        self._directory = Directory()

    def route(self, front: str, key: str, prompt: PromptUnits, replicas: Sequence[str]) -> str | None:
        """As `Directory.route`."""
        return self._directory.route(front, key, prompt, replicas, time.monotonic())

    def note(self, front: str, reports: Sequence[Report]) -> None:
        """As `Directory.note`."""
        self._directory.note(front, reports, time.monotonic())


def build(options: Options) -> Any:
    """The application with these options."""
    directory = DeploymentActorConfig(name=ACTOR, actor_class=ray.remote(DirectoryActor), actor_options={"num_cpus": 0})
    fronts = serve.deployment(
        name="front",
        num_replicas=options.fronts,
        max_ongoing_requests=MAX_OPEN,
        graceful_shutdown_timeout_s=options.drain_s,
        ray_actor_options={"num_cpus": 0.5},
        deployment_actors=[directory],
    )(Front)
    return fronts.bind(options.for_processes(), _replicas(options))


def _replicas(options: Options) -> Any:
    least, most = options.bounds
    resources = {"num_cpus": options.cpus, "num_gpus": options.num_gpus}
    deployment = serve.deployment(
        name="replica",
        max_ongoing_requests=MAX_OPEN,
        health_check_period_s=HEALTH_CHECK_S,
        health_check_timeout_s=HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=options.drain_s,
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )(Replica)
    if options.hosts > 1:
        bundle = {"CPU": options.cpus, "GPU": options.num_gpus}
        bundles = [{name: count for name, count in bundle.items() if count}] * options.hosts
        deployment = deployment.options(placement_group_bundles=bundles, placement_group_strategy="SPREAD")
    if least == most:
        return deployment.options(num_replicas=least).bind(options.for_processes())
    kwargs = {"waiting": options.waiting, "kv_usage": options.kv_usage}
    policy = AutoscalingPolicy(policy_function=LoadPolicy, policy_kwargs=kwargs)
    return deployment.options(
        autoscaling_config=AutoscalingConfig(min_replicas=least, max_replicas=most, policy=policy)
    ).bind(options.for_processes())
