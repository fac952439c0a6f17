"""Prints the modelled speed of models on TPUs: `PYTHONPATH=.venv/tpu python -m bench.tpu`.

It needs no TPU, because libtpu compiles for them anywhere (`make test-tpu` fetches it). What programs compute, read and
exchange is read off compiled ones. Times are **modelled** from that and not measured: see `ASSUMPTIONS`. Beside them
stand what the chips' published figures allow at most, and what other engines published.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import ROOT, Figure, describe_run
from bench.tpu.chips import CHIPS
from bench.tpu.estimate import MODELS, PROMPT_TOKENS, Estimate, Load

ASSUMPTIONS = f"""\
Every time is modelled. jsg never ran on a TPU.

- Operations, their bytes, copies and exchanges: read off programs of one layer and of two; further layers are like the
  second. Programs have the types and shapes of the engine by default, in bfloat16, with pages as it chooses them.
- The core takes XLA's own estimate of an operation's cycles, and a kernel of Pallas the bundles of its loops, each as
  often as it runs. Cycles are at the clock that follows from the published peak.
- Memory gives 86 % of its published rate and works beside the core as the program's schedule lets it. The core waits
  where the schedule does.
- Gathers, scatters and sorts have no estimate: XLA's least for an operation, and 30 cycles for each row.
- An exchange goes around a ring at the published rate of links, 1 microsecond for a hop, and nothing runs beside it.
- Requests are always as many, at all places of their answers; tokens are chosen greedily; nothing is shared. Prompts
  are computed in steps of {PROMPT_TOKENS} tokens, each once.
- Left out: the host, its transfers, waiting, programs beside the forward pass and the choice of tokens.
- Bound: all bytes of a step at the full rate of memory, or all operations at the full peak, whichever takes longer;
  weights, keys and values are read once, and nothing is exchanged.
"""
DEVICE_COUNTS = (1, 2, 4, 8)
TARGET = 0.7
KINDS = ("attention", "product", "elementwise", "kernel", "exchange", "wait")
"""Of operations, in the order in which they are shown."""
HEAD = f"""\
| chips | model | requests | decode step, ms | {" / ".join(KINDS)} | prompts | output | bound | of it | published |
|{"---|" * 10}"""
PUBLISHED = Path(__file__).with_name("published.json")


def cases(options: argparse.Namespace) -> Iterator[tuple[Estimate, list[Load]]]:
    """What is modelled: each model on the fewest devices of each chip that hold all loads, or on so many."""
    loads = [Load(rows, options.prompt, options.answer) for rows in options.concurrency or (64, 256)]
    for chip in options.chip or CHIPS:
        for model in options.model or MODELS:
            estimates = [Estimate(chip, model, count, options.keep) for count in options.tp or DEVICE_COUNTS]
            held = [(each, [load for load in loads if each.fits(load)]) for each in estimates]
            whole = [case for case in held if len(case[1]) == len(loads)]
            yield from held if options.tp else (whole or [case for case in held if case[1]][-1:])[:1]


def figures(estimate: Estimate, loads: Sequence[Load]) -> Iterator[Figure]:
    """The figures of a model on its devices. A load that does not fit has none."""
    estimate.compile(loads)
    chips = -(-estimate.num_devices // estimate.chip.devices)
    for load in loads:
        step, prefill = estimate.step(load), estimate.prefill(load)
        rate, bound = estimate.rate(load), estimate.bound(load)
        facts: dict[str, Any] = {"chip": estimate.name, "chips": chips, "model": estimate.model}
        facts |= {"devices": estimate.num_devices, **load._asdict(), "step_ms": _in_ms(step)}
        facts |= {"prompts_per_s": round(PROMPT_TOKENS / sum(prefill.values())), "prompt_step_ms": _in_ms(prefill)}
        facts |= {"bound": round(bound), "of_bound": round(rate / bound, 3), "target": f">= {TARGET}"}
        facts |= {"published": dict(published(estimate, load))}
        name = f"{chips} x {estimate.name}, {estimate.model}: {load.rows} requests, {load.prompt} in, {load.answer} out"
        yield Figure(name, "tokens/s", (rate,), facts)


def published(estimate: Estimate, load: Load) -> Iterator[tuple[str, int]]:
    """What other engines published of this model, load and number of devices."""
    for source in json.loads(PUBLISHED.read_text(encoding="utf-8")).values():
        for each in source["figures"]:
            found = each["chip"], each["model"], each["devices"], each["concurrency"], each["in"], each["out"]
            if found == (estimate.name, estimate.model, estimate.num_devices, *load):
                yield source["engine"], each["tokens_per_s"]


def _row(figure: Figure) -> str:
    facts, step = figure.facts, figure.facts["step_ms"]
    parts = " / ".join(f"{step.get(kind, 0.0):.2f}" for kind in KINDS)
    others = ", ".join(f"{engine} {rate:,}" for engine, rate in facts["published"].items()) or "-"
    cells = [f"{facts['chips']} x {facts['chip']}", facts["model"], facts["rows"], f"{step['all']:.2f}", parts]
    cells += [f"{facts['prompts_per_s']:,}", f"{figure.smallest:,.0f}", f"{facts['bound']:,}"]
    return f"| {' | '.join(map(str, cells))} | {facts['of_bound']:.0%} | {others} |"


def _in_ms(found: Mapping[str, float]) -> dict[str, float]:
    parts = {kind: round(1e3 * found[kind], 3) for kind in KINDS if found.get(kind, 0.0) > 0}
    return parts | {"all": round(1e3 * sum(found.values()), 3)}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tpu", description=__doc__)
    parser.add_argument("--chip", choices=CHIPS, action="append", help="only this chip; may be repeated")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this model; may be repeated")
    parser.add_argument("--tp", type=int, action="append", help="so many devices; default: the fewest that hold all")
    parser.add_argument("--concurrency", type=int, action="append", help="so many requests; default: 64 and 256")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt; default 1024")
    parser.add_argument("--answer", type=int, default=1024, help="tokens of an answer; default 1024")
    parser.add_argument("--keep", type=Path, default=ROOT / ".cache/tpu", help="folder of compiled programs")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    header = describe_run("bench.tpu", arguments) | {"libtpu": importlib.metadata.version("libtpu")}
    header |= {"device": "none: compiled, times are modelled", "assumptions": ASSUMPTIONS.splitlines()}
    print(f"# Modelled speed on TPUs\n\n{ASSUMPTIONS}\nTokens per second of prompts and of output:\n\n{HEAD}")
    found: list[Figure] = []
    for estimate, loads in cases(options):
        try:
            for figure in figures(estimate, loads):
                print(_row(figure), flush=True)
                found.append(figure)
        except (NotImplementedError, RuntimeError) as error:
            print(f"| {estimate.num_devices} devices of {estimate.name} | {estimate.model} | {error} |" + " |" * 7)
        if options.output:
            content = {"header": header, "figures": [each.as_json() for each in found]}
            options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for source in json.loads(PUBLISHED.read_text(encoding="utf-8")).values():
        print(f"\n{source['engine']}: {source['url']} ({source['date']}): {source['how']}.")


if __name__ == "__main__":
    main(sys.argv[1:])
