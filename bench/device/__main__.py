"""Measures everything on one device, in one call of under nine minutes: `python -m bench.device`.

An accelerator is measured with the shape of Llama 3 8B in bfloat16, with fewer layers if it does not fit; a CPU with a
shape of 100 million parameters in float32. `--plan trial` runs the same code anywhere in minutes. Weights are random:
nothing is read or downloaded. It needs only jax, flax, numpy, jaxtyping and ml_dtypes, and runs from the root of a
checkout without installing it.

Each part is a separate process, so a failure or a hang in one costs the others nothing. Each figure is in the result
file as soon as it is known. When time runs out, the last parts are left out, and the result names them.
"""

import argparse
import datetime
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report as reporting
from bench.device import summary
from bench.device.catalogue import PARTS
from bench.device.coordinator import Coordinator
from bench.device.plan import PLANS

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem")


def main(arguments: Sequence[str]) -> None:
    begin = time.monotonic()
    options = _options(arguments)
    gpu = describe_gpu()
    plan = PLANS[options.plan or ("8b" if gpu else "100m")]
    output = options.output or _default_output(gpu)
    report = reporting.Report(
        "bench.device",
        arguments,
        output,
        nvidia=gpu or "no nvidia-smi",
        plan=plan.name,
        shape=plan.shape,
        dtype=plan.dtype,
        part_s={},
        unmeasured=[],
    )
    coordinator = Coordinator(
        report,
        plan,
        log=output.with_suffix(".log"),
        deadline=begin + options.deadline_s,
        samples=options.samples,
        torch_python=None if options.torch_python == "none" else options.torch_python,
    )
    if options.commit:
        report.header["commit"] = options.commit
    failed = coordinator.run(options.only)
    report.header["seconds"] = round(time.monotonic() - begin, 1)
    rows = summary.targets(report.figures)
    report.header["targets"] = [row.as_json() for row in rows]
    report.header["targets_are_meant_for_this"] = plan.is_for_accelerators
    report.close()
    print("\n" + summary.table(rows))
    if not plan.is_for_accelerators:
        print("the targets are those of an H200 at the shape of plan 8b, not of this run")
    print(*(f"not measured: {reason}" for reason in report.header["unmeasured"]), sep="\n")
    if options.plot:
        from bench import plot_roofline  # needs matplotlib

        plot_roofline.main([str(output), "--output", str(options.plot)])
    raise SystemExit(min(failed, 1))


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


def _default_output(gpu: dict[str, Any] | None) -> Path:
    today = datetime.datetime.now(datetime.UTC).date()
    slug = re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower()).strip("-") if gpu else "cpu"
    return reporting.ROOT / "bench" / "results" / f"{slug}-{today}.json"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parts = "\n".join(f"    {name:<18}{entry.about}" for name, entry in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.device",
        description=f"{__doc__}\nParts, in this order:\n\n{parts}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    has_torch = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
    parser.add_argument(
        "--plan", choices=sorted(PLANS), help="what to measure; default: 8b if nvidia-smi finds a GPU, else 100m"
    )
    parser.add_argument(
        "--only", type=_part_names, default=list(PARTS), help="the parts to run, separated by commas; rates always runs"
    )
    parser.add_argument(
        "--samples", type=int, default=20, help="timed calls for each figure, after 5 that are not timed"
    )
    parser.add_argument("--deadline-s", type=float, default=525.0, help="seconds after which the whole run has ended")
    parser.add_argument(
        "--torch-python",
        default=sys.executable if has_torch else "none",
        help="Python interpreter with torch and transformers 5, or none; default: this one if it has both, else none",
    )
    parser.add_argument(
        "--plot", type=Path, help="file for an image of the roofline, drawn at the end; needs matplotlib"
    )
    parser.add_argument("--commit", help="the commit that is measured, if the working tree has no git repository")
    parser.add_argument(
        "--output", type=Path, help="JSON file for all figures; default: bench/results/<device>-<date>.json"
    )
    return parser.parse_args(arguments)


def _part_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"the parts are {', '.join(PARTS)}, but got {', '.join(unknown)}")
    return [name for name in PARTS if name in {"rates", *names}]


if __name__ == "__main__":
    main(sys.argv[1:])
