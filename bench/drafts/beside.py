"""Measures drafts beside those of other engines: `python -m bench.drafts.beside --llama-python PYTHON`.

All engines have the `wide` model of `bench.drafts`, each once with drafts and once without, and take turns at the same
requests, one at a time. Only the best that each has without another model is compared: n-grams of vLLM and llama.cpp.
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
from typing import Any

import httpx
from tokenizers import Tokenizer

from bench.drafts.models import copying_model, wide_model
from bench.drafts.workloads import WORKLOADS, Draw
from bench.peers import engines, machine
from bench.peers.__main__ import started, wait_until_idle
from bench.peers.engines import Engine, Setting, Start
from bench.report import ROOT, Report

NAMES = ("extraction", "tools", "edits", "repeats")
NGRAMS = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 8, "prompt_lookup_min": 2}
LLAMA_DRAFTS = "ngram-simple"
TIMEOUT_S = 600


def ask(engine: Engine, prompts: Sequence[tuple[list[int], dict[str, Any]]]) -> tuple[float, int]:
    """Seconds and tokens of answers to prompts, one after another."""
    assert engine.url is not None, "only servers are compared"
    num_tokens, model = 0, engine.model or engines.model_at(engine.url)
    with httpx.Client(base_url=engine.url, timeout=TIMEOUT_S) as http:
        started_at = time.perf_counter()
        for ids, params in prompts:
            fields = {"temperature": 0.0, "max_tokens": params["max_new_tokens"], "stop": params.get("stop", [])}
            answer = http.post("/v1/completions", json={"model": model, "prompt": ids, **fields})
            num_tokens += answer.raise_for_status().json()["usage"]["completion_tokens"]
        return time.perf_counter() - started_at, num_tokens


def measure(
    report: Report, name: str, everyone: dict[str, Engine], tokenizer: Tokenizer, rounds: int, requests: int
) -> None:
    """Adds the milliseconds per token of each engine, and the gain by its drafts. The first round warms up."""
    samples: dict[str, list[float]] = {side: [] for side in everyone}
    for number in range(rounds + 1):
        draw = Draw(f"{name} {number}", is_embedded=False)
        asked = [each for wave in WORKLOADS[name].waves(draw, 1, requests) for each in wave]
        prompts = [(tokenizer.encode(each.prompt).ids, each.params) for each in asked]
        for side, engine in everyone.items():
            wait_until_idle([each.pid for each in everyone.values()])
            if WORKLOADS[name].is_asked_before:
                ask(engine, prompts)
            seconds, num_tokens = ask(engine, prompts)
            engine.settle()
            if number:
                samples[side].append(1000 * seconds / num_tokens)
    for side, own in samples.items():
        report.add(f"{name}: {side}", "ms/tok", own)
    for side in everyone:
        if (plain := samples.get(f"{side}, no drafts")) is not None:
            report.add(f"{name}: {side}, gain", "x", [a / b for a, b in zip(plain, samples[side], strict=True)])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drafts.beside", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-python", metavar="PATH", help="has xllamacpp, gguf and safetensors")
    parser.add_argument("--vllm-python", metavar="PATH")
    parser.add_argument("--only", default=",".join(NAMES), help="workloads, separated by commas")
    parser.add_argument("--requests", type=int, default=4, help="the least requests of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=ROOT / ".cache" / "drafts", help="where models are kept")
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    options = parser.parse_args(arguments)
    report = Report("bench.drafts.beside", arguments, options.output)
    model = wide_model(copying_model(options.directory), options.directory / "wide")
    logs, threads = Path(tempfile.mkdtemp(prefix="bench-drafts-")), max(machine.thread_counts())

    def setting(*more: str) -> Setting:
        return Setting(model=model, dtype="float32", quantization="none", logs=logs, num_threads=threads, options=more)

    wanted: dict[str, tuple[Start, Setting]] = {
        "jsg": (engines.jsg, setting("--speculative", "auto")),
        "jsg, no drafts": (engines.jsg, setting("--speculative", "off")),
    }
    if options.llama_python:
        for name, drafts in (("llama.cpp", LLAMA_DRAFTS), ("llama.cpp, no drafts", "none")):
            wanted[name] = engines.llama_cpp(options.llama_python, None, drafts), setting()
    if options.vllm_python:
        config = ("--speculative-config", json.dumps(NGRAMS))
        for name, more in (("vllm", config), ("vllm, no drafts", ())):
            wanted[name] = engines.vllm(options.vllm_python, more), setting()
    with contextlib.ExitStack() as stack:
        everyone: dict[str, Engine] = {}
        for name, (start, own) in wanted.items():
            for engine in started(report, stack, {name: start}, own):
                everyone[name] = engine
        for name in options.only.split(","):
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            measure(report, name, everyone, tokenizer, options.rounds, options.requests)
    report.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the engines end too
    main(sys.argv[1:])
