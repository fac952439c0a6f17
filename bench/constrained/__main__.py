"""Compile and mask times of jsg beside other grammar engines: the same work over 131 072 tokens, in one run.

    python -m bench.constrained [--engines jsg,llguidance] [--python xgrammar=/path/to/python ...] [--output FILE]
    python -m bench.constrained --maskbench DATA [--share N] [--compile-only]

`--python` names another Python for an engine that is not installed in this one (the extra `bench-constrained` has them;
xgrammar brings PyTorch). That Python needs only numpy and the engine. Times are CPU time of one thread. "Cold" is the
first walk over a document with a freshly compiled grammar; "warm" are the walks after it. Every token of a document is
checked to be allowed. `--maskbench` measures jsg alone over real schemas; see `maskbench.py`.
"""

import argparse
import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.constrained.cases import CASES
from bench.report import ROOT, Report

TARGETS = {
    ("jsg", "warm"): {"target_p50": 2.5, "target_p99": 8.0},
    ("jsg", "cold"): {"target_p99": 300.0},
    ("jsg", "small schema"): {"target": 2.0},
    ("jsg", "nested schema"): {"target": 15.0},
}


def tekken() -> tuple[Any, list[bytes]]:
    """The tokenizer of `mistral-common`, and the bytes of its tokens by id; special tokens have none."""
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    tokenizer = Tekkenizer.from_file(str(data))
    num_special, size = tokenizer.num_special_tokens, tokenizer.n_words
    plain = [base64.b64decode(entry["token_bytes"]) for entry in json.loads(data.read_text())["vocab"]]
    return tokenizer, [b""] * num_special + plain[: size - num_special]


def work(skipped: list[str]) -> dict[str, Any]:
    """The vocabulary, and the tokens of each document."""
    tokenizer, tokens = tekken()
    cases = [case for case in CASES if case.name not in skipped]
    return {
        "tokens": [base64.b64encode(token).decode() for token in tokens],
        "special_ids": list(range(tokenizer.num_special_tokens)),
        "eos_id": tokenizer.eos_id,
        "cases": [{**vars(c), "token_ids": tokenizer.encode(c.document, bos=False, eos=False)} for c in cases],
    }


def run_maskbench(data: Path, share: int, has_masks: bool, report: Report) -> None:
    """Times jsg over the sample of MaskBench."""
    from bench.constrained import maskbench
    from jsg.constrained.run.vocab import Vocabulary

    tokenizer, tokens = tekken()
    vocabulary = Vocabulary(tokens, range(tokenizer.num_special_tokens), [tokenizer.eos_id])
    maskbench.run(data, vocabulary, lambda text: tokenizer.encode(text, bos=False, eos=False), report, share, has_masks)


def run_engine(engine: str, python: str, given: str, report: Report) -> None:
    """Runs one engine in its Python and reports its figures as they come."""
    process = subprocess.Popen(
        [python, "-m", "bench.constrained.measure", engine],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    process.stdin.write(given)
    process.stdin.close()
    for line in process.stdout:
        figures = json.loads(line)
        if "done" in figures:
            report.header[engine] = figures["done"]
        elif "refused" in figures:
            print(f"{engine}: {figures['case']}: {figures['refused']}", flush=True)
        else:
            add_figures(report, engine, figures)
    if process.wait():
        raise SystemExit(f"{engine}: {python} ended with {process.returncode}")


def add_figures(report: Report, engine: str, figures: dict[str, Any]) -> None:
    case = figures["case"]
    facts = TARGETS.get((engine, case), {})
    report.add(f"{case}: compile, {engine}", "ms", figures["compile_ms"], **facts)
    for pace in ("cold", "warm"):
        samples = np.array(figures[f"{pace}_us"])
        percentiles = {f"p{rank:g}": float(np.percentile(samples, rank)) for rank in (50, 99)}
        facts = percentiles | {"max": float(samples.max()), "masks": len(samples)} | TARGETS.get((engine, pace), {})
        report.add(f"{case}: mask {pace}, {engine}", "us", [percentiles["p50"]], **facts)
    report.add(f"{case}: accept, {engine}", "us", [float(np.median(figures["accept_us"]))])


def _without_path(argument: str) -> str:
    """The argument in the form for a result file: without paths of this machine."""
    name, _, value = argument.partition("=")
    return f"{name}={Path(value).name}" if "/" in value else argument


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.constrained", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", default="jsg,llguidance", help="engines to measure, in this order, separated by commas"
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=PYTHON",
        help="the Python that runs this engine; may be given several times",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="ENGINE=CASE",
        help="the name of a case that this engine does not run; may be given several times",
    )
    parser.add_argument(
        "--maskbench",
        type=Path,
        metavar="DATA",
        help="directory with maskbench-dev.jsonl; measures jsg over its schemas instead",
    )
    parser.add_argument("--share", type=int, default=1, help="with --maskbench: read every N-th schema only")
    parser.add_argument(
        "--compile-only", action="store_true", help="with --maskbench: only compile, and read no instance"
    )
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    pythons = dict(pair.split("=", 1) for pair in options.python)
    report = Report(
        "bench.constrained",
        [_without_path(argument) for argument in arguments],
        options.output,
        vocabulary="tekken, 131072 tokens",
    )
    if options.maskbench is not None:
        run_maskbench(options.maskbench, options.share, not options.compile_only, report)
    else:
        for engine in options.engines.split(","):
            skipped = [pair.split("=", 1)[1] for pair in options.skip if pair.split("=", 1)[0] == engine]
            run_engine(engine, pythons.get(engine, sys.executable), json.dumps(work(skipped)), report)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
