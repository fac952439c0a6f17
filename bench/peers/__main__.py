"""Measures jsg beside the engines that people would pick on a CPU: vLLM, llama.cpp, OpenVINO and Hugging Face.

    python -m bench.peers --vllm-python .venv/peers/vllm/bin/python --rounds 3 --output FILE --plot FILE

All engines have the same checkpoint, which is made here, get the same requests, and take turns. Each runs a workload
once before its times count, and jsg then waits until nothing is left to compile. `make peers` makes the environments;
without a flag for it, an engine is left out. `docs/benchmarking.md` says what the workloads and figures are.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers import engines, machine
from bench.peers.checkpoint import SHAPES, make_checkpoint
from bench.peers.clients import WrongAnswerError
from bench.peers.engines import CannotStartError, Engine, Setting, Start
from bench.peers.figures import Turn, add_workload
from bench.peers.plot import draw
from bench.peers.workloads import DEFAULT, WORKLOADS, Draw, Load
from bench.plots import save
from bench.report import ROOT, Report
from bench.roofline import Rates
from bench.served import tree_of, usage_of
from bench.start.notes import cpu_s
from jsg.models.config import read_spec
from jsg.models.spec import ModelSpec

IDLE_SHARE, IDLE_EVERY_S, IDLE_WITHIN_S = 0.05, 0.2, 10.0
"""The most of a core that engines use while they are idle, how often that is read, and how long it may take."""


def wait_until_idle(pids: Sequence[int]) -> None:
    """Waits until no engine computes any more: threads of vLLM go on for half a second after an answer, and wait."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    used_s = sum(map(cpu_s, pids))
    while time.monotonic() < deadline:
        time.sleep(IDLE_EVERY_S)
        before_s, used_s = used_s, sum(map(cpu_s, pids))
        if used_s - before_s <= IDLE_SHARE * IDLE_EVERY_S:
            return


def take_turn(engine: Engine, load: Load, everyone: Sequence[Engine]) -> Turn:
    """Runs a load on one engine when all are idle, and reads what all engines used."""
    wait_until_idle([each.pid for each in everyone])
    before = {each.name: cpu_s(each.pid) for each in everyone}
    ran = engine.client.run(load)
    used = {each.name: cpu_s(each.pid) - before[each.name] for each in everyone}
    own = used.pop(engine.name)
    pss = 0
    for pid in tree_of(engine.pid):
        with contextlib.suppress(OSError, KeyError):  # a process that has ended meanwhile
            pss += usage_of(pid).pss
    return Turn(ran=ran, cpu_s=own, others_cpu_s=sum(used.values()), pss=pss)


def measure(
    report: Report,
    name: str,
    everyone: Sequence[Engine],
    config: ModelSpec,
    rates: Rates,
    *,
    rounds: int,
    divisor: int = 1,
) -> None:
    """Runs one workload on every engine that can, in turns, and adds its figures. Failures go to the header."""

    def load(turn: int) -> Load:
        return WORKLOADS[name](Draw(f"{name} {turn}", config.vocab_size, divisor))

    turns: dict[str, list[Turn]] = {}
    for engine in everyone:
        reason = engine.client.cannot(load(0))
        if reason is None:
            turns[engine.name] = []
        else:
            report.header.setdefault("left_out", {})[f"{name}: {engine.name}"] = reason
    for number in range(rounds + 1):
        for engine in everyone:
            if engine.name not in turns:
                continue
            try:
                turn = take_turn(engine, load(number), everyone)
            except WrongAnswerError as error:
                del turns[engine.name]
                report.header.setdefault("failures", {})[f"{name}: {engine.name}"] = str(error)
                print(f"{name}: {engine.name} failed: {error}", flush=True)
                continue
            print(
                f"{name}, {f'round {number}' if number else 'warm-up'}: {engine.name} {turn.ran.wall_s:.2f} s",
                flush=True,
            )
            engine.settle()
            if number:  # the first turn warms up
                turns[engine.name].append(turn)
    add_workload(report, name, load(0), turns, everyone, config, rates)


def measure_machine(report: Report) -> Rates:
    """Adds the rates of the machine, and gives those of all cores."""
    rates = Rates(0.0, 0.0)
    for count in machine.thread_counts():
        plural = "s" if count > 1 else ""
        read = report.add(
            f"memory read, {count} thread{plural}", "GB/s", [rate / 1e9 for rate in machine.read_rates(count)]
        )
        fma = report.add(
            f"multiply-adds, {count} thread{plural}", "GFLOP/s", [rate / 1e9 for rate in machine.fma_rates(count)]
        )
        rates = Rates(
            max(rates.copy_bytes_per_s, max(read.samples) * 1e9), max(rates.matmul_flops_per_s, max(fma.samples) * 1e9)
        )
    return rates


def started(report: Report, stack: contextlib.ExitStack, starts: dict[str, Start], setting: Setting) -> list[Engine]:
    """The engines that start, one after another. What does not start is in the header."""
    found = []
    for name, start in starts.items():
        print(f"starting {name}", flush=True)
        try:
            found.append(stack.enter_context(start(setting)))
        except CannotStartError as error:
            report.header.setdefault("failures", {})[name] = str(error)
            print(f"{name} does not start: {error}", flush=True)
    return found


def starts_of(options: argparse.Namespace) -> dict[str, Start]:
    """How to start each engine that the command line names."""
    found: dict[str, Start] = {"jsg": engines.jsg}
    if options.vllm_python:
        found["vllm"] = engines.vllm(options.vllm_python)
    if options.llama_python:
        found |= {f"llama.cpp {kind}": engines.llama_cpp(options.llama_python, kind) for kind in options.llama_weights}
    if options.openvino_python:
        found |= {
            f"openvino {kind}": engines.openvino(options.openvino_python, kind) for kind in options.openvino_weights
        }
    if options.torch_python:
        for way in ("static", "continuous"):
            found[f"hugging face, {way}"] = engines.hugging_face(options.torch_python, way)
    return found


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    names = options.only.split(",") if options.only else list(DEFAULT)
    if unknown := sorted(set(names) - WORKLOADS.keys()):
        raise SystemExit(f"--only takes {', '.join(WORKLOADS)}, but got {', '.join(unknown)}")
    if options.rounds < 1 or options.divisor < 1:
        raise SystemExit("--rounds and --divisor must be at least 1")
    report = Report("bench.peers", arguments, options.output, shape=options.shape, dtype=options.dtype)
    model = make_checkpoint(options.directory, options.shape)
    config = read_spec(model)
    rates = measure_machine(report)
    logs = Path(tempfile.mkdtemp(prefix="bench-peers-"))
    setting = Setting(
        model=model,
        dtype=options.dtype,
        quantization=options.quantization,
        logs=logs,
        num_threads=max(machine.thread_counts()),
    )
    print(f"logs of the engines: {logs}", flush=True)
    with contextlib.ExitStack() as stack:
        everyone = started(report, stack, starts_of(options), setting)
        report.header["engines"] = {engine.name: dict(engine.facts) for engine in everyone}
        for name in names:
            measure(report, name, everyone, config, rates, rounds=options.rounds, divisor=options.divisor)
    report.close()
    if options.plot:
        save(draw({"header": report.header, "figures": [each.as_json() for each in report.figures]}), options.plot)
    if failures := report.header.get("failures"):
        print(f"failures: {json.dumps(failures, indent=1)}")
    return 1 if failures else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", help=f"workloads, separated by commas, of {', '.join(WORKLOADS)}")
    made.add_argument(
        "--rounds", type=int, default=3, help="how often each engine runs each workload, after a first time"
    )
    made.add_argument("--shape", choices=SHAPES, default="100m", help="the shape of the model")
    made.add_argument(
        "--dtype", choices=engines.ITEMSIZES, default="float32", help="of jsg, vLLM, llama.cpp, Hugging Face"
    )
    made.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="of jsg's weights")
    made.add_argument("--divisor", type=int, default=1, help="divides lengths and numbers of requests, for a try")
    peers = made.add_argument_group("peers; each needs an interpreter that has it (`make peers`)")
    peers.add_argument("--vllm-python", metavar="PATH")
    peers.add_argument("--llama-python", metavar="PATH", help="has xllamacpp, gguf and safetensors")
    peers.add_argument("--openvino-python", metavar="PATH", help="has openvino-genai, gguf and safetensors")
    peers.add_argument("--torch-python", metavar="PATH", help="has torch and transformers 5")
    peers.add_argument(
        "--llama-weights", nargs="+", default=[None], metavar="KIND", help="f32, f16, bf16, q8_0; default: as --dtype"
    )
    peers.add_argument(
        "--openvino-weights", nargs="+", default=["f16"], metavar="KIND", help="f16 or q8_0; default f16"
    )
    made.add_argument("--directory", type=Path, default=ROOT / ".cache" / "peers", help="where checkpoints are kept")
    made.add_argument("--output", type=Path, help="JSON file with every sample")
    made.add_argument("--plot", type=Path, help="image of the ratios")
    return made


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the engines end too
    sys.exit(main(sys.argv[1:]))
