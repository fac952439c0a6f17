"""Simulates 8 to 1024 replicas behind one router or several: hit rates beside one pooled cache, TTFT and balance.

    python -m bench.scale --output bench/results/scale-2026-11-28.json
    python -m bench.scale --only policies --workloads chats --replicas 128
    python -m bench.scale --only policies --trace conversation_trace.jsonl

choice    the time in `Router.route` for one request
policies  every policy and workload, for one router and for 8, which know nothing of each other or hear from replicas
replicas  jsg's router with other numbers of replicas

The router is the one of `jsg serve`; replicas are modelled. docs/benchmarking.md says how, and what the figures are.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.report import Report
from bench.scale.choice import measure_choice
from bench.scale.policies import HashOfKey, Jsg, LeastLoaded, MakePolicy, RoundRobin
from bench.scale.published import Dynamo, LlmD, SGLang
from bench.scale.simulation import Fleet, Outcome, pool, simulate
from bench.scale.traces import WORKLOADS, Call, Shape, read_mooncake

POLICIES: dict[str, MakePolicy] = {
    "jsg": Jsg,
    "hash": HashOfKey,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "sglang": SGLang,
    "dynamo": Dynamo,
    "llm-d": LlmD,
}

HEARING = {"jsg", "sglang", "dynamo", "llm-d"}
"""Policies to which events make a difference."""


class Arm(NamedTuple):
    """Routers and what they hear.

    Attributes:
        num_routers: Number of routers.
        has_events: Whether they hear what caches gain and lose.
    """

    num_routers: int
    has_events: bool


ARMS = {"1 router": Arm(1, False), "8 routers": Arm(8, False), "8 routers, events": Arm(8, True)}
EVENT_DELAY_S = 0.05


class Size(NamedTuple):
    """The size of a workload: its length in turns, and the blocks of a replica's pool."""

    turns: float
    pool_blocks: int


SIZES = {
    "chats": Size(80, 2048),
    "documents": Size(50, 2048),
    "agents": Size(40, 4096),
    "mooncake": Size(40, 8192),
    "trace": Size(0, 8192),  # as long as it is
}
POLICY_REPLICAS = 64
REPLICAS = (8, 256, 1024)
HIT_TARGETS = {"1 router": ">= 0.97", "8 routers, events": ">= 0.95"}  # on chats
TTFT_TARGET = "<= 2 x 1 router"  # on documents, of 8 routers with events


def measure(
    report: Report, workload: str, calls: Sequence[Call], fleet: Fleet, names: Sequence[str], arms: Mapping[str, Arm]
) -> None:
    """Plays one trace through every policy and arm, and adds a figure for each."""
    pooled = pool(calls, fleet)
    title = f"{workload}, {fleet.num_replicas} replicas"
    report.add(f"{title}: one pooled cache", "hit rate", [pooled.hit_rate], calls=len(calls))
    for arm_name, arm in arms.items():
        delay = EVENT_DELAY_S if arm.has_events else None
        armed = Fleet(fleet.num_replicas, fleet.pool_blocks, arm.num_routers, delay, fleet.load, fleet.seed)
        for name in names:
            if arm.has_events and name not in HEARING:
                continue
            outcome = simulate(calls, armed, pooled, POLICIES[name])
            facts = _facts(outcome) | _targets(workload, arm_name, name)
            report.add(f"{title}, {arm_name}: {name}", "of pooled", [outcome.hit_rate / pooled.hit_rate], **facts)


def _facts(outcome: Outcome) -> dict[str, float]:
    return {
        "hit_rate": outcome.hit_rate,
        "ttft_p50_ms": outcome.ttft_ms(50),
        "ttft_p99_ms": outcome.ttft_ms(99),
        "balance": outcome.balance,
    }


def _targets(workload: str, arm: str, policy: str) -> dict[str, str]:
    if policy != "jsg":
        return {}
    if workload == "chats" and arm in HIT_TARGETS:
        return {"target": HIT_TARGETS[arm]}
    return {"target_p99": TTFT_TARGET} if workload == "documents" and arm == "8 routers, events" else {}


def _calls(options: argparse.Namespace, workload: str, num_replicas: int) -> Sequence[Call]:
    if workload == "trace":
        return read_mooncake(options.trace, num_replicas)
    turns = SIZES[workload].turns / (4 if options.quick else 1)
    return WORKLOADS[workload](Shape(num_replicas, turns, options.seed))


def _fleet(options: argparse.Namespace, workload: str, num_replicas: int) -> Fleet:
    return Fleet(num_replicas, SIZES[workload].pool_blocks, load=options.load, seed=options.seed)


def measure_policies(report: Report, options: argparse.Namespace) -> None:
    """Every policy; those that know no caches hear nothing, so they have no arm with events."""
    num_replicas = options.replicas[0] if options.replicas else 8 if options.quick else POLICY_REPLICAS
    for workload in ["trace"] if options.trace else options.workloads:
        calls, fleet = _calls(options, workload, num_replicas), _fleet(options, workload, num_replicas)
        measure(report, workload, calls, fleet, options.policies, ARMS)


def measure_replicas(report: Report, options: argparse.Namespace) -> None:
    """jsg's router, on chats."""
    for num_replicas in options.replicas or ((4, 16) if options.quick else REPLICAS):
        calls, fleet = _calls(options, "chats", num_replicas), _fleet(options, "chats", num_replicas)
        measure(report, "chats", calls, fleet, ["jsg"], ARMS)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    names = {"only": "choice,policies,replicas", "workloads": ",".join(WORKLOADS), "policies": ",".join(POLICIES)}
    for name, default in names.items():
        parser.add_argument(f"--{name}", default=default, help="some of these, separated by commas (default: all)")
    parser.add_argument("--replicas", default="", help="numbers of replicas; policies take the first")
    parser.add_argument("--load", type=float, default=0.5, help="part of the work that the replicas could do at most")
    parser.add_argument("--seed", type=int, default=0, help="decides all prompts and times")
    parser.add_argument("--trace", type=Path, help="a trace of Mooncake (JSONL), instead of the workloads")
    parser.add_argument("--quick", action="store_true", help="few replicas and short traces, to see that it runs")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    for name, default in names.items():
        chosen = getattr(options, name).split(",")
        if unknown := set(chosen) - set(default.split(",")):
            parser.error(f"--{name} must name some of {default}, but got {', '.join(sorted(unknown))}")
        setattr(options, name, chosen)
    options.replicas = tuple(int(each) for each in options.replicas.split(",") if each)
    report = Report("bench.scale", arguments, options.output, load=options.load, event_delay_s=EVENT_DELAY_S)
    parts: dict[str, Callable[[], None]] = {
        "choice": lambda: measure_choice(report, (2, 16) if options.quick else (8, 64, 256, 1024)),
        "policies": lambda: measure_policies(report, options),
        "replicas": lambda: measure_replicas(report, options),
    }
    for part, measure_part in parts.items():
        if part in options.only:
            measure_part()
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
