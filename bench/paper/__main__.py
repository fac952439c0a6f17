"""Runs the workloads of the SGLang paper, with its ablations and beside other engines.

    python -m bench.paper --output bench/results/paper-cpu-2026-11-27 --scale 0.1
    python -m bench.paper --only judge,tips --arms full,no-cache --vllm-python .venv/peers/vllm/bin/python
    python -m bench.paper --endpoint other=http://127.0.0.1:8000 --dialect vllm --model DIRECTORY

Every engine gets the same programs with the same texts, which are synthetic, and they take turns. A round runs all
programs of a workload at once, for programs per second, and then some of them alone, for their latency.
`docs/benchmarking.md` says what the workloads, arms and figures are.
"""

import argparse
import contextlib
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper import report as reporting
from bench.paper.arms import ARMS, FULL, Arm
from bench.paper.data import DataError, runs_from
from bench.paper.measure import Measured, Target, measure
from bench.paper.programs import WORKLOADS
from bench.paper.recorded import Ways
from bench.paper.texts import Texts
from bench.paper.workload import Need, Workload
from bench.peers import engines, machine
from bench.peers.__main__ import started, wait_until_idle
from bench.peers.checkpoint import SHAPES, WEIGHTLESS, make_checkpoint
from bench.peers.engines import Engine, Setting, Start
from bench.report import ROOT, Report
from jsg.errors import JsgError
from jsg.lang.remote.dialects import DIALECTS, Dialect
from jsg.models.config import read_spec
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model

NUM_POSITIONS = 16_384
POOL_TOKENS = 65_536
NUM_ALONE = 3
QUICK = {"scale": 0.01, "shape": "small", "rounds": 1, "most": 4}
"""The defaults with `--quick`: every workload and arm, to see that they run."""
FORGOTTEN = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The shares of calls that find nothing cached, for the figure of batch size against hit rate."""
EVERYTHING = frozenset[Need]({"choices", "forms", "joins"})
LLAMA_CPP = dataclasses.replace(
    DIALECTS["compatible"], text_fields={**DIALECTS["compatible"].text_fields, "ignore_eos": "ignore_eos"}
)
HUGGING_FACE = Dialect(
    chat_fields={},
    text_fields={name: name for name in ("temperature", "top_p", "seed", "stop", "max_tokens")},
    has_logprobs=False,
)
PEERS: Mapping[str, tuple[Dialect | None, frozenset[Need]]] = {
    "jsg": (None, EVERYTHING),
    "sglang": (DIALECTS["sglang"], EVERYTHING),
    "vllm": (DIALECTS["vllm"], EVERYTHING),
    "llama.cpp": (LLAMA_CPP, frozenset[Need]({"joins"})),
    "hugging face": (HUGGING_FACE, frozenset[Need]({"joins"})),
}
"""For each kind of server the fields that its completions API takes, and what it can do with them. The language speaks
to jsg in its own way. Where nothing can be joined, texts follow each other."""
ENDPOINTS = ("jsg", "sglang", "vllm", "llama.cpp")
"""The servers that `--endpoint` can name. That of Hugging Face does not list the model that it was started with."""


def runs_of(workload: Workload, turn: int, options: argparse.Namespace, tokenizer: Any) -> list[dict[str, Any]]:
    """The arguments of the programs of a turn, each of which has texts of its own."""

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    if (path := options.data.get(workload.name)) is not None:
        count = min(workload.num_runs(options.scale), options.most or sys.maxsize)
        return runs_from(workload, path, turn, count, num_tokens)
    return workload.runs(Texts(f"{workload.name} {turn}", num_tokens), options.scale)[: options.most]


def run_workload(
    report: Report, workload: Workload, targets: Sequence[Target], options: argparse.Namespace, tokenizer: Any
) -> None:
    """Runs a workload on all engines that can, in turns, and adds its figures. Failures go to the header."""
    found: dict[str, list[Measured]] = {target.name: [] for target in targets if workload.needs <= target.can}
    for number in range(options.rounds + 1):
        at_once = runs_of(workload, 2 * number, options, tokenizer)
        alone = runs_of(workload, 2 * number + 1, options, tokenizer)[:NUM_ALONE]
        if not number:  # the first turn warms up
            at_once, alone = at_once[:NUM_ALONE], []
        for target in targets:
            if target.name not in found:
                continue
            wait_until_idle([each.pid for each in targets if each.pid is not None])
            try:
                measured = measure(workload, target, at_once, alone)
            except JsgError as error:
                del found[target.name]
                report.header.setdefault("failures", {})[f"{workload.name}: {target.name}"] = str(error)
                print(f"{workload.name}: {target.name} failed: {error}", flush=True)
                continue
            target.settle()
            if number:
                found[target.name].append(measured)
    add_workload(report, workload, found)


def add_workload(report: Report, workload: Workload, found: Mapping[str, Sequence[Measured]]) -> None:
    """Adds the wall times of each engine, and its facts in one round: each round has texts, and so hits, of its own."""
    if not found:
        return
    deciding = [each.wall_s for each in found.get(FULL, next(iter(found.values())))]
    middle = deciding.index(statistics.median_low(deciding))
    for name, rounds in found.items():
        walls = [each.wall_s for each in rounds]
        facts = rounds[middle].facts() | {"alone_s": statistics.median(s for each in rounds for s in each.alone_s)}
        report.add(f"{workload.name}: {name}", "s wall", walls, workload=workload.name, target=name, **facts)
    ours = found.get(FULL)
    for name, rounds in found.items():
        if ours is not None and name != FULL:
            ratios = [theirs.wall_s / own.wall_s for theirs, own in zip(rounds, ours, strict=True)]
            pairs = list(zip(rounds[0].states, ours[0].states, strict=True))
            same = sum(left.text() == right.text() for left, right in pairs) / len(pairs)
            facts = {"workload": workload.name, "beside": name, "same_answers": same}
            report.add(f"{workload.name}: {name} / {FULL}", "ratio", ratios, **facts)


def arm_targets(
    stack: contextlib.ExitStack, report: Report, setting: Setting, arms: Mapping[str, Arm], can: frozenset[Need]
) -> list[Target]:
    """The arms on servers of this jsg. Those that only run programs in another way share a server."""
    servers: dict[tuple[str, ...], Engine] = {}
    targets = []
    for name, arm in arms.items():
        if arm.options not in servers:
            own = dataclasses.replace(setting, options=(*setting.options, *arm.options))
            found = started(report, stack, {name: engines.jsg}, own)
            if not found:
                continue
            servers[arm.options] = found[0]
        targets.append(target_of(name, servers[arm.options], ways=arm.ways, can=can))
    return targets


def target_of(name: str, engine: Engine, **fields: Any) -> Target:
    """An engine that was started, as a target."""
    assert engine.url is not None, "only servers run programs"
    return Target(name=name, url=engine.url, settle=engine.settle, pid=engine.pid, **fields)


def peer_targets(
    stack: contextlib.ExitStack, report: Report, setting: Setting, options: argparse.Namespace
) -> list[Target]:
    """The peers that the command line names, each twice: as the language runs programs, and as its users would."""
    dialect, can = PEERS[options.dialect]
    targets = [
        Target(name=name, url=url, dialect=dialect, model=engines.model_at(url), can=can)
        for name, url in (each.split("=", 1) for each in options.endpoint)
    ]
    starts: dict[str, Start] = {}
    if options.vllm_python:
        starts["vllm"] = engines.vllm(options.vllm_python)
    if options.llama_python:
        starts["llama.cpp"] = engines.llama_cpp(options.llama_python, None)
    if options.torch_python:
        starts["hugging face"] = engines.hugging_face_server(options.torch_python)
    for name, start in starts.items():
        dialect, can = PEERS[name]
        ways = Ways(endless=name == "hugging face")
        for engine in started(report, stack, {name: start}, setting):
            model = engine.model or engines.model_at(engine.url or "")
            targets.append(target_of(engine.name, engine, dialect=dialect, model=model, can=can, ways=ways))
    # As one writes a program with an SDK alone: the whole text is sent with each call, and each call is waited for.
    return targets + [
        dataclasses.replace(
            target,
            name=f"{target.name}, raw SDK",
            ways=dataclasses.replace(target.ways, one_by_one=True, opening="Raw.\n"),
        )
        for target in targets
        if options.raw
    ]


def run_group(
    report: Report,
    model: str | Path,
    workloads: Sequence[Workload],
    arms: Mapping[str, Arm],
    options: argparse.Namespace,
) -> None:
    """Runs workloads on one model: the arms, and the peers if they can have this model."""
    sees = options.pictures_model == model
    can = frozenset[Need]({"pictures"}) if sees else EVERYTHING
    if read_spec(resolve_model(str(model))).state_shapes:
        can -= {"joins"}
    weights = () if options.model or options.shape in SHAPES else ("--load-format", "dummy")
    states = () if options.max_states is None else ("--max-states", str(options.max_states))
    setting = Setting(
        model=Path(model),
        dtype=options.dtype,
        quantization="none",
        logs=Path(tempfile.mkdtemp(prefix="bench-paper-")),
        num_threads=max(machine.thread_counts()),
        context_length=NUM_POSITIONS,
        options=() if sees else ("--max-total-tokens", str(POOL_TOKENS), *weights, *states),
    )
    tokenizer = load_tokenizer(resolve_model(str(model)))
    print(f"logs of the engines: {setting.logs}", flush=True)
    with contextlib.ExitStack() as stack:
        targets = arm_targets(stack, report, setting, arms, can)
        if not sees:
            targets += peer_targets(stack, report, setting, options)
        for workload in workloads:
            concerned = [each for each in targets if each.name not in ARMS or ARMS[each.name].concerns(workload)]
            run_workload(report, workload, concerned, options, tokenizer)
        if options.batches and not sees:
            for full in (target for target in targets if target.name == FULL):
                run_batches(report, full, options, tokenizer)


def run_batches(report: Report, full: Target, options: argparse.Namespace, tokenizer: Any) -> None:
    """Runs trees of thought with a growing share of calls that find nothing in the cache."""
    workload = WORKLOADS["tree-deep"]
    for number, share in enumerate(FORGOTTEN):
        # What a fork computes ahead would be for nothing where its branches find nothing.
        target = dataclasses.replace(full, ways=Ways(forgotten=share, hints_forks=False))
        at_once, alone = (runs_of(workload, 2 * number + turn, options, tokenizer) for turn in range(2))
        measured = measure(workload, target, at_once, alone[:1])
        facts = measured.facts() | {"forgotten": share}
        report.add(f"{workload.name}: {share:.0%} of calls find nothing", "s wall", [measured.wall_s], **facts)


def main(arguments: Sequence[str]) -> int:
    made = parser()
    options = made.parse_args(arguments)
    if options.quick:
        made.set_defaults(**QUICK)
        options = made.parse_args(arguments)
    if options.rounds < 1 or not options.scale > 0 or (options.most is not None and options.most < 1):
        raise SystemExit("--rounds and --most must be at least 1, and --scale must be larger than 0")
    arms = chosen(options.arms, ARMS, "--arms")
    workloads = chosen(options.only, WORKLOADS, "--only")
    options.data = {name: Path(path) for name, _, path in (each.partition("=") for each in options.data)}
    if unknown := sorted(options.data.keys() - workloads.keys()):
        raise SystemExit(
            f"--data takes NAME=PATH, and NAME is one of {', '.join(workloads)}, but got {', '.join(unknown)}"
        )
    output = options.output
    report = Report(
        "bench.paper",
        arguments,
        output / "run.json" if output else None,
        model=Path(options.model).name if options.model else options.shape,
        dtype=options.dtype,
        scale=options.scale,
        data={name: path.name for name, path in options.data.items()} or "synthetic",
    )
    model = options.model or make_checkpoint(options.directory, options.shape, NUM_POSITIONS)
    seeing = [each for each in workloads.values() if "pictures" in each.needs]
    reading = [each for each in workloads.values() if "pictures" not in each.needs]
    try:
        if reading:
            run_group(report, model, reading, arms, options)
        if seeing:
            run_group(report, options.pictures_model, seeing, arms, options)
    except DataError as error:
        raise SystemExit(f"--data: {error}") from error
    report.close()
    if output:
        reporting.write({"header": report.header, "figures": [each.as_json() for each in report.figures]}, output)
    if failures := report.header.get("failures"):
        print(f"failures: {json.dumps(failures, indent=1)}")
    return 1 if failures else 0


def chosen[Value](names: str | None, all_of_them: Mapping[str, Value], option: str) -> dict[str, Value]:
    """What an option with names, separated by commas, chooses. The arm `full` is always there."""
    if names is None:
        return dict(all_of_them)
    listed = [FULL, *names.split(",")] if FULL in all_of_them else names.split(",")
    if unknown := sorted(set(listed) - all_of_them.keys()):
        raise SystemExit(f"{option} takes {', '.join(all_of_them)}, but got {', '.join(unknown)}")
    return {name: value for name, value in all_of_them.items() if name in listed}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", help=f"workloads, separated by commas, of {', '.join(WORKLOADS)}")
    made.add_argument("--arms", help=f"arms beside {FULL}, separated by commas, of {', '.join(ARMS)}")
    made.add_argument("--scale", type=float, default=0.1, help="the share of the published numbers of programs")
    made.add_argument("--most", type=int, metavar="N", help="the most programs of a workload")
    made.add_argument("--rounds", type=int, default=3, help="how often each engine runs each workload")
    made.add_argument("--quick", action="store_true", help="few programs on a tiny model, to see that everything runs")
    made.add_argument("--batches", action="store_true", help="also batch size and throughput against hit rate")
    made.add_argument(
        "--data", nargs="+", default=[], metavar="NAME=PATH", help="real data of a workload in place of synthetic texts"
    )
    made.add_argument("--model", help="a directory or hub name; without it a checkpoint of --shape is made")
    made.add_argument(
        "--shape", choices=SHAPES | WEIGHTLESS, default="100m", help="the shape of the model that is made"
    )
    made.add_argument("--max-states", type=int, metavar="N", help="of a model whose layers keep states")
    made.add_argument("--pictures-model", default="tiny-vision", help="the model of questions to pictures")
    made.add_argument("--dtype", choices=engines.ITEMSIZES, default="float32", help="of all engines")
    peers = made.add_argument_group("other engines (`make peers` sets them up)")
    peers.add_argument("--vllm-python", metavar="PATH")
    peers.add_argument("--llama-python", metavar="PATH", help="has xllamacpp, gguf and safetensors")
    peers.add_argument("--torch-python", metavar="PATH", help="has torch, accelerate and transformers[serving] 5")
    peers.add_argument("--endpoint", nargs="+", default=[], metavar="NAME=URL", help="servers that run already")
    peers.add_argument("--dialect", choices=ENDPOINTS, default="vllm", help="of the servers of --endpoint")
    peers.add_argument(
        "--raw", action="store_true", help="also each peer as with its SDK only: calls of a program one by one"
    )
    made.add_argument("--directory", type=Path, default=ROOT / ".cache" / "peers", help="where checkpoints are kept")
    made.add_argument("--output", type=Path, help="folder for the samples (JSON), a table and plots")
    return made


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the engines end too
    sys.exit(main(sys.argv[1:]))
