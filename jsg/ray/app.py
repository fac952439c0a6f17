"""The application that `serve run jsg.ray:build` starts: fronts, replicas, and one directory."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy  # pyright: ignore[reportMissingImports]

from jsg.ray.directory import Directory
from jsg.ray.front import Front
from jsg.ray.options import Options
from jsg.ray.replica import Replica
from jsg.ray.scaling import LoadPolicy

MAX_OPEN = 4096  # requests of a front, and calls of the directory; jsg has its own limits, and says so to the client
HEALTH_CHECK_S = 5


def build(options: Options) -> Any:
    """The application with these options."""
    directory = serve.deployment(
        name="directory",
        max_ongoing_requests=MAX_OPEN,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},  # it would have a line for each call
    )(Directory)
    answering = directory.bind()
    fronts = serve.deployment(
        name="front",
        num_replicas=options.fronts,
        max_ongoing_requests=MAX_OPEN,
        graceful_shutdown_timeout_s=options.drain_s,
        ray_actor_options={"num_cpus": 0.5},
    )(Front)
    return fronts.bind(options, answering, _replicas(options, answering))


def _replicas(options: Options, directory: Any) -> Any:
    least, most = options.bounds
    resources = {"num_cpus": options.cpus, "num_gpus": options.num_gpus}
    deployment = serve.deployment(
        name="replica",
        health_check_period_s=HEALTH_CHECK_S,
        health_check_timeout_s=HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=options.drain_s,
        ray_actor_options=resources,
    )(Replica)
    if options.hosts > 1:
        bundle = {"CPU": options.cpus, "GPU": options.num_gpus}
        bundles = [{name: count for name, count in bundle.items() if count}] * options.hosts
        deployment = deployment.options(placement_group_bundles=bundles, placement_group_strategy="SPREAD")
    if least == most:
        return deployment.options(num_replicas=least).bind(options, directory)
    kwargs = {"waiting": options.waiting, "kv_usage": options.kv_usage}
    policy = AutoscalingPolicy(policy_function=LoadPolicy, policy_kwargs=kwargs)
    return deployment.options(
        autoscaling_config=AutoscalingConfig(min_replicas=least, max_replicas=most, policy=policy)
    ).bind(options, directory)
