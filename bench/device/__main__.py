"""The first hour on a device, in one command: `python -m bench.device`, or `make gpu-hour` and `make tpu-hour`.

It checks the kernels and measures step, engine, start and server, with PyTorch and vLLM beside them where they are
installed. Results lie in a folder, with a report that says what to do next. The same command goes on where it stopped:
after `--minutes`, after an error, or because the machine went down.

An accelerator is measured with the shape of Llama 3 8B in bfloat16, with fewer layers if it does not fit; a CPU with a
shape of 100 million parameters in float32. `--plan trial` runs the same code anywhere in minutes. Weights are random:
nothing is read or downloaded. It needs only jax, flax, numpy, jaxtyping and ml_dtypes, and runs from the root of a
checkout without installing it; parts that need more are left out where that is missing.

Each part is a separate process, so a failure or a hang in one costs the others nothing. Each figure is in the folder as
soon as it is known. When time runs out, the last parts are left out, and the report names them.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report as reporting
from bench.device import advice, markdown, summary
from bench.device.catalogue import PARTS
from bench.device.coordinator import Coordinator
from bench.device.plan import PLANS, Plan
from bench.device.results import Folder, OtherRunError, figures_of, write_json, write_text
from jsg.engine.tpu_chips import chip_devices

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem")
FIXED = ("device", "plan")
"""The conditions that all parts in a folder have in common."""
ONE_DAY = datetime.timedelta(days=1)


def main(arguments: Sequence[str]) -> None:
    begin = time.monotonic()
    options = _options(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both then end a part in order
    gpu = describe_gpu()
    tpu = None if gpu else describe_tpu()
    plan = PLANS[options.plan or ("8b" if gpu else "8b-tpu" if tpu else "100m")]
    head = reporting.describe_run("bench.device", arguments) | {"nvidia": gpu or "no nvidia-smi", "plan": plan.name}
    head |= {"tpu": tpu} if tpu else {}
    head["commit"] = options.commit or head["commit"]
    path = options.folder or _default_folder(gpu or tpu)
    try:
        folder = Folder(path, conditions(gpu or tpu, plan, head), FIXED)
    except OtherRunError as error:
        raise SystemExit(str(error)) from None
    print(*(f"{name}: {value}" for name, value in head.items()), f"folder: {path}", sep="\n", flush=True)
    coordinator = Coordinator(
        folder=folder,
        plan=plan,
        commit=head["commit"],
        deadline=begin + 60 * options.minutes,
        samples=options.samples,
        interpreters={name: python for name, python in _interpreters(options).items() if python != "none"},
    )
    coordinator.after_each = lambda: write_results(coordinator, head)
    num_failed = 1
    try:
        num_failed = coordinator.run(options.only, options.again)
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from here", flush=True)
    finally:
        write_results(coordinator, head)
    _show(coordinator)
    if options.plot:
        from bench import plot_roofline  # needs matplotlib

        plot_roofline.main([str(path / "run.json"), "--output", str(options.plot)])
    raise SystemExit(min(num_failed, 1))


def conditions(card: Mapping[str, str] | None, plan: Plan, head: Mapping[str, Any]) -> dict[str, str]:
    """What figures depend on. A part that was measured under other ones runs again."""
    versions = {name: head["versions"].get(name, "missing") for name in ("jax", "jaxlib")}
    device = card["name"] if card else head["cpu"]
    driver = card["driver_version"] if card else "none"
    return {"device": device, "plan": plan.name, "code": code(), "driver": driver, **versions}


def code() -> str:
    """A short hash of everything in the package jsg, committed or not.

    The bench is not in it, because most of what changes there changes no figure; `--again` is for when it does.
    """
    digest = hashlib.sha256()
    for file in sorted((reporting.ROOT / "jsg").rglob("*")):
        if file.suffix in (".py", ".json"):
            digest.update(str(file.relative_to(reporting.ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def describe_gpu() -> dict[str, str] | None:
    """What `nvidia-smi` says about the first GPU; None if there is none."""
    try:
        command = [*NVIDIA_SMI, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
        names = NVIDIA_SMI[1].partition("=")[2].split(",")
        return dict(zip(names, values, strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def describe_tpu() -> dict[str, str] | None:
    """The TPU chips of this machine, whose kind the part `rates` says, and libtpu in place of a driver; None for none.

    This process does not open them, because one process at a time can.
    """
    if not (chips := chip_devices()):
        return None
    kind = os.environ.get("TPU_ACCELERATOR_TYPE", "")  # set where Google's images run
    found = importlib.util.find_spec("libtpu")
    version = importlib.metadata.version("libtpu") if found else "no libtpu"
    return {"name": f"TPU {kind} ({len(chips)} chips)".replace("  ", " "), "driver_version": version}


def write_results(coordinator: Coordinator, head: Mapping[str, Any]) -> None:
    """Writes run.json and report.md anew."""
    run = _run_of(coordinator)
    records = run.records.values()
    figures = figures_of(records)
    header = dict(head)
    for record in records:
        header |= record.header
    header["part_s"] = {name: record.seconds for name, record in run.records.items()}
    failures = [failure.reason for record in records for failure in record.failures]
    left_out = [reason for record in records for reason in record.left_out]
    header["unmeasured"] = failures + left_out + _without_figures(run)
    header["targets"] = [row.as_json() for row in summary.targets(figures)]
    header["targets_are_meant_for_this"] = not summary.not_meant(coordinator.plan)
    folder = coordinator.folder.path
    write_json(folder / "run.json", {"header": header, "figures": [figure.as_json() for figure in figures]})
    text = markdown.report(run, head=header, not_meant=summary.not_meant(coordinator.plan))
    write_text(folder / "report.md", text)


def _run_of(coordinator: Coordinator) -> advice.Run:
    """The records that count, in the order of the catalogue, and what did not run."""
    current = coordinator.folder.current()
    records = {name: current[name] for name in coordinator.parts if name in current}
    return advice.Run(records, coordinator.omitted, coordinator.folder.conditions["device"], coordinator.parts)


def _without_figures(run: advice.Run) -> list[str]:
    return [f"{name}: {reason}" for name, reason in run.omitted.items() if name not in run.records]


def _show(coordinator: Coordinator) -> None:
    run = _run_of(coordinator)
    print("\n" + summary.table(summary.targets(figures_of(run.records.values()))))
    if reason := summary.not_meant(coordinator.plan):
        print(reason)
    print(*(f"not measured: {reason}" for reason in _without_figures(run)), sep="\n")
    print("\nnext:")
    for number, each in enumerate(advice.advise(run), 1):
        print(f"{number}. {each.what}\n   {each.do}")
    print(f"\n{coordinator.folder.path / 'report.md'}")


def _default_folder(card: Mapping[str, str] | None) -> Path:
    """bench/results/DEVICE-DATE of today; of yesterday if there is one, because a run may go on after midnight."""
    today = datetime.datetime.now(datetime.UTC).date()
    slug = re.sub(r"[^a-z0-9]+", "-", card["name"].lower()).strip("-") if card else "cpu"
    name = slug.replace("tpu", "tpu-hour", 1) if slug.startswith("tpu") else f"gpu-hour-{slug}"
    folders = [reporting.ROOT / "bench/results" / f"{name}-{day}" for day in (today, today - ONE_DAY)]
    return next((folder for folder in folders if folder.exists()), folders[0])


def _interpreters(options: argparse.Namespace) -> dict[str, str]:
    return {"torch": options.torch_python, "vllm": options.vllm_python}


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parts = "\n".join(f"    {name:<18}{entry.about}" for name, entry in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.device",
        description=f"{__doc__}\nParts, in this order:\n\n{parts}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time after which this call has ended; default 60")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the results; default: bench/results/gpu-hour-<device>-<date>, or tpu-hour",
    )
    parser.add_argument(
        "--plan",
        choices=sorted(PLANS),
        help="what to measure; default: 8b if nvidia-smi finds a GPU, 8b-tpu if there is a TPU, else 100m",
    )
    parser.add_argument(
        "--only", type=_part_names, default=list(PARTS), help="the parts to run, separated by commas; rates always runs"
    )
    parser.add_argument(
        "--again", type=_part_names, default=[], help="parts to repeat though they are done, or failed twice"
    )
    parser.add_argument(
        "--samples", type=int, default=20, help="timed calls for each figure, after 5 that are not timed"
    )
    for name, modules in (("torch", ("torch", "transformers")), ("vllm", ("vllm",))):
        has_them = all(importlib.util.find_spec(module) for module in modules)
        parser.add_argument(
            f"--{name}-python",
            default=sys.executable if has_them else "none",
            help=f"interpreter with {' and '.join(modules)}, or none; default: this one if it has them, else none",
        )
    parser.add_argument(
        "--plot", type=Path, help="file for an image of the roofline, drawn at the end; needs matplotlib"
    )
    parser.add_argument("--commit", help="the commit that is measured, if the working tree has no git repository")
    return parser.parse_args(arguments)


def _part_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"the parts are {', '.join(PARTS)}, but got {', '.join(unknown)}")
    return [name for name in PARTS if name in names]


if __name__ == "__main__":
    main(sys.argv[1:])
