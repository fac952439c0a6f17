"""Prints the modelled speed of models on every card: `PYTHONPATH=.venv/nvidia python -m bench.nvidia.model`.

It needs no GPU, because XLA's CUDA plugin compiles for GPUs anywhere (`make test-nvidia` fetches it). Launches and
bytes are read off compiled programs. Times are **modelled** from them and not measured: see `ASSUMPTIONS`. Beside them
stand what an H200 measured, as a check, and what other engines published.
"""

from bench.nvidia.plugin import use_plugin

if __name__ == "__main__":
    use_plugin()  # before anything imports JAX

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.nvidia import programs
from bench.nvidia.estimate import MODELS, Estimate, Load
from bench.nvidia.rates import NVLINK_BYTES_PER_S
from bench.report import Figure, describe_run, table
from jsg.engine.device.cards import NAMES, card
from jsg.engine.device.devices import E4M3_CAPABILITY
from jsg.sched.buckets import BucketKey

ASSUMPTIONS = """\
Every time is modelled. An H200, and an H100 with 20 layers, were measured with the 8B shape in bfloat16.

- Launches, the bytes of weights and of activations: read off programs of a few layers, compiled for a card of the class
  (8.0, 8.6 and 8.9, 9.0, 10.0, 12.0); further layers are like the second of their kind.
- Every card reaches the H200's shares of its published bandwidth and peak, and its launches start as fast
  (`bench/nvidia/rates.py`). Low power limits, such as the L4's, and other clocks are not modelled.
- Kernels in int8, with rows in bfloat16, where XLA multiplies: the H200's shares, measured for feed-forward blocks and
  experts alone. On other classes XLA's code for them was compiled, not run.
- fp8: rows are rounded to e4m3 too. Products have the shares that jsg's kernel for experts reached in bfloat16, of
  twice the peak, and one kernel up to 256 rows 0.45 of it. They were measured nowhere.
- Products of jsg's own kernel for few bits, int4 and few rows in int8, of models without experts: the shares of its
  kernel for experts in 8 bits, by instructions for a number in code for an H200. They were measured nowhere.
- KV in 8 bits is read at the same share of the bandwidth as bfloat16. This was measured nowhere.
- States of linear attention are read and written at the share of keys, and products of tiles of prompts have the share
  of the peak of a prompt's attention. Neither was measured. Substitution counts as operations of float32 at that share.
- Contexts of 1024 tokens, nothing shared. One request runs in the shape of 8 rows. Tokens are chosen greedily.
- Prefill: a step of 8192 tokens, 8 prompts of 1024 from an empty cache.
- Experts: every choice is equally likely, tokens choose independently.
- Tensor parallelism: the fewest cards with NVLink whose memory holds 32 requests; all-reduces take the steps of a ring
  (`bench/tp/interconnect.py`). Over PCIe nothing is modelled.
- Memory: 85 % of the card less 2 %, less weights and 1.5 GB. "-" is a batch that does not fit.
- A served load: at most 256 requests at half of their answers, each prompt computed once, no waiting and no host.
"""
QUANTIZATIONS = {"bfloat16": "none", "int8": "int8", "fp8": "fp8"}
"""The numbers of the weights → `--quantization`. In fp8 rows are rounded too, where the card multiplies e4m3."""
IN_4_BITS = {"int4": "int4"}
"""The same of models without experts, whose kernels each step restores. No published figure is compared with them."""
KV_BYTES = {"bfloat16": 2, "8-bit": 1}
UNSUPPORTED = {"30B-A3B": "Qwen3-30B-A3B is not modelled"}
ROWS = (1, 32, 256)
TRAFFIC_CARD = "h200"
"""The bytes of a step are told of one card: they are the same on all of its class."""
TRAFFIC_TARGET = "<= 1.15"
CONTEXT = 1024
DEVICE_COUNTS = (1, 2, 4, 8)
FEWEST_REQUESTS = 32
RESULTS = Path(__file__).parent.parent / "results"
MEASURED = {
    "h200": (
        "device-h200-steps-2026-11-27.json",
        "device-h200-engine-2026-11-27.json",
        "gpu-h200-2026-11-28/run.json",
    ),
    "h100": ("gpu-h100-2026-11-28/run.json",),
}
"""What was measured on a card, with the 8B shape in bfloat16."""
PUBLISHED = Path(__file__).with_name("published.json")


@dataclass(frozen=True, slots=True)
class Row:
    """The modelled speed of a model on a card, in tokens per second.

    Attributes:
        numbers: What the weights are in.
        decode: By the type of the KV pool, for each of `ROWS`; None where the batch does not fit.
        prefill: New tokens of prompts.
        num_launches: Of decode, for each of `ROWS`.
    """

    card: str
    model: str
    numbers: str
    num_devices: int
    decode: dict[str, list[float | None]]
    prefill: float
    num_launches: list[int]

    def __str__(self) -> str:
        """A line of the table."""
        rates = [*zip(*self.decode.values(), strict=True), (self.prefill,)]
        cells = [" / ".join("-" if each is None else f"{each:,.0f}" for each in both) for both in rates]
        cards = f"{self.num_devices} x " if self.num_devices > 1 else ""
        return f"| {cards}{self.card} | {self.model} | {self.numbers} | {' | '.join(cells)} |"


def decode_key(rows: int) -> BucketKey:
    """The smallest of the compiled decode shapes that holds as many rows."""
    return next(key for key in programs.BUCKETS.decode if key.num_rows in (8, 32, 256) and key.num_rows >= rows)


def extend_key(num_tokens: int) -> BucketKey:
    """The smallest shape of a step with chunks that holds as many tokens."""
    return next(key for key in programs.BUCKETS.extend if key.num_tokens >= num_tokens)


def decode_rate(estimate: Estimate, rows: int, kv_bytes: int, context: int = CONTEXT) -> float | None:
    """Tokens per second of decoding; None if the pool does not hold the requests."""
    if rows * (context + 1) > estimate.pool_tokens(kv_bytes, rows):
        return None
    return rows / estimate.seconds(decode_key(rows), Load(rows, context), kv_bytes)


def prefill_rate(estimate: Estimate, length: int = CONTEXT) -> float:
    """Tokens per second of computing prompts of this length, in steps of the largest chunk."""
    rows, new = max(1, programs.CHUNK // length), min(length, programs.CHUNK)
    return rows * new / estimate.seconds(extend_key(rows * new), Load(rows, 0, new))


def served_rate(estimate: Estimate, num_in: int, num_out: int, kv_bytes: int) -> float:
    """Output tokens per second if as many requests as fit, or 256, always run: prompts and answers of these lengths."""
    rows = min(programs.MAX_RUNNING, estimate.pool_tokens(kv_bytes) // (num_in + num_out))
    decode = decode_rate(estimate, rows, kv_bytes, num_in + num_out // 2) if rows > 0 else None
    prefill = prefill_rate(estimate, num_in)
    return 0.0 if decode is None else 1 / (1 / decode + num_in / num_out / prefill)


def fewest_devices(name: str, model: str, quantization: str) -> int | None:
    """How many cards the model is divided among: the fewest that hold a few requests; None if none do."""
    counts = DEVICE_COUNTS if name in NVLINK_BYTES_PER_S else DEVICE_COUNTS[:1]
    rows = FEWEST_REQUESTS if len(counts) > 1 else 1
    sizes = ((count, Estimate(name, model, quantization, count).pool_tokens(2, rows)) for count in counts)
    held = (count for count, num_tokens in sizes if num_tokens >= rows * (CONTEXT + 1))
    return next(held, None)


def rows(names: list[str], models: list[str]) -> Iterator[Row | str]:
    """The rows of the table, or why there is none."""
    for name in names:
        for model in models:
            if model in UNSUPPORTED:
                yield f"| {name} | {model} | {UNSUPPORTED[model]} | | | | |"
                continue
            is_dense = not {"num_local_experts", "num_experts"} & set(MODELS[model].get("text_config", MODELS[model]))
            for numbers, quantization in (QUANTIZATIONS | (IN_4_BITS if is_dense else {})).items():
                if not takes(name, quantization):
                    continue
                count = fewest_devices(name, model, quantization)
                if count is None:
                    yield f"| {name} | {model} | {numbers} | does not fit | | | |"
                else:
                    yield _row(Estimate(name, model, quantization, count), numbers)


def takes(name: str, quantization: str) -> bool:
    """Whether a card takes kernels in this form. Of those that do not multiply e4m3, fp8 is not modelled."""
    return quantization != "fp8" or card(name).capability >= E4M3_CAPABILITY


def _row(estimate: Estimate, numbers: str) -> Row:
    return Row(
        card=estimate.card.name,
        model=estimate.model,
        numbers=numbers,
        num_devices=estimate.num_devices,
        decode={
            kind: [decode_rate(estimate, count, num_bytes) for count in ROWS] for kind, num_bytes in KV_BYTES.items()
        },
        prefill=prefill_rate(estimate),
        num_launches=[estimate.num_launches(decode_key(count)) for count in ROWS],
    )


def traffic(models: list[str]) -> Iterator[Figure]:
    """How many times the least bytes a decode step moves, beside its time and that of the least at full bandwidth."""
    for model in models:
        if model in UNSUPPORTED or (count := fewest_devices(TRAFFIC_CARD, model, "none")) is None:
            continue
        estimate = Estimate(TRAFFIC_CARD, model, num_devices=count)
        for rows in ROWS:
            key, load = decode_key(rows), Load(rows, CONTEXT)
            moved, ms = estimate.traffic(key, load), 1e3 * estimate.seconds(key, load)
            facts: dict[str, Any] = {
                "gigabytes": moved.compiled / 1e9,
                "least_gigabytes": moved.least / 1e9,
                "least_ms": 1e3 * moved.least / estimate.speed.bytes_per_s,
                "modelled_ms": ms,
                "launches": estimate.num_launches(key),
            }
            name = f"{count} x {TRAFFIC_CARD}, {model}: bytes of a decode step of {rows} beside the least"
            yield Figure(name, "x", (moved.ratio,), {"kind": "traffic", "target": TRAFFIC_TARGET, "rows": rows} | facts)


def checks(name: str) -> Iterator[tuple[str, float, float]]:
    """What a card measured, in ms, and what is modelled for it, with as many layers as the measured model had."""
    for file in MEASURED[name]:
        run = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        estimate = Estimate(name, "8B", num_layers=run["header"].get("num_layers"))
        for figure in run["figures"]:
            facts = figure["facts"]
            if facts.get("kind") in ("decode", "engine"):
                key, load = decode_key(facts["rows"]), Load(facts["rows"], round(facts["context"]))
            elif facts.get("kind") == "prefill":
                key, load = extend_key(facts["length"]), Load(1, 0, facts["length"])
            else:
                continue
            yield f"{run['header']['date'][:10]}: {figure['name']}", figure["min"], 1e3 * estimate.seconds(key, load)


def published(names: list[str], models: list[str]) -> Iterator[tuple[dict[str, Any], str, float | None]]:
    """Figures of other engines, each with jsg's best modelled one for the same cards and load, and how that is made.

    A figure in bfloat16 is compared with bfloat16; one in 8 or 4 bits with the best of all that jsg has.
    """
    for source in json.loads(PUBLISHED.read_text(encoding="utf-8")).values():
        for figure in source.pop("figures"):
            found = source | figure
            if found["card"] not in names or found["model"] not in models:
                continue
            if found["model"] in UNSUPPORTED:
                yield found, "not supported", None
            elif "in" not in found:
                yield found, "load not stated", None
            else:
                yield found, *_best(found)


def _best(figure: dict[str, Any]) -> tuple[str, float | None]:
    is_long = figure["numbers"] == "bfloat16"
    choices = {
        f"{numbers} weights, {kv} KV": served_rate(
            Estimate(figure["card"], figure["model"], quantization, figure["devices"]),
            figure["in"],
            figure["out"],
            num_bytes,
        )
        for numbers, quantization in QUANTIZATIONS.items()
        for kv, num_bytes in KV_BYTES.items()
        if takes(figure["card"], quantization) and (not is_long or (quantization == "none" and num_bytes == 2))
    }
    best = max(choices, key=lambda each: choices[each])
    return (best, choices[best]) if choices[best] else ("does not fit", None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nvidia.model", description=__doc__)
    parser.add_argument("--card", choices=NAMES, action="append", help="only this card; may be repeated")
    parser.add_argument("--model", choices=[*MODELS, *UNSUPPORTED], action="append", help="only this model")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args()
    names, models = options.card or list(NAMES), options.model or [*MODELS, *UNSUPPORTED]
    start, figures = time.monotonic(), []
    print(f"# Modelled speed on NVIDIA cards\n\n{ASSUMPTIONS}")
    for name in [name for name in MEASURED if name in names and "8B" in models]:
        print(f"## The model beside an {name.upper()}\n\n| | measured, ms | modelled, ms | error |\n|---|---|---|---|")
        for what, measured, modelled in checks(name):
            print(f"| {what} | {measured:.2f} | {modelled:.2f} | {modelled / measured - 1:+.1%} |", flush=True)
            figures.append(Figure(f"{name}, {what}", "ms", (modelled,), {"kind": "check", "measured": measured}))
    print("\n## Tokens per second, modelled\n\nDecode with KV in bfloat16 / in 8 bits.\n")
    print("| card | model | weights | 1 request | 32 | 256 | prefill |\n|---|---|---|---|---|---|---|")
    for row in rows(names, models):
        print(row, flush=True)
        if isinstance(row, Row):
            figures += _figures(row)
    if TRAFFIC_CARD in names:
        print("\n## Bytes of a decode step beside the least\n\nWeights, keys and values once, states twice.\n")
        print(table([]))
        for figure in traffic(models):
            print(table([figure], with_head=False), flush=True)
            figures.append(figure)
    print("\n## Published figures beside the model, output tokens per second\n")
    print("| engine | card | model | numbers | in / out | published | jsg, modelled | with |")
    print("|---|---|---|---|---|---|---|---|")
    for found, how, rate in published(names, models):
        lengths, shown = f"{found.get('in', '?')} / {found.get('out', '?')}", "" if rate is None else f"{rate:,.0f}"
        where = f"{found['devices']} x {found['card']} | {found['model']} | {found['numbers']} | {lengths}"
        print(f"| {found['engine']} | {where} | {found['tokens_per_s']:,} | {shown} | {how} |", flush=True)
        facts = found | {"kind": "published", "jsg": how}
        figures.append(Figure(f"{found['engine']}, {where}", "tokens/s", (rate or 0.0,), facts))
    for source in json.loads(PUBLISHED.read_text(encoding="utf-8")).values():
        print(f"\n{source['url']} ({source['date']}): {source['how']}.")
    header = describe_run("bench.nvidia.model", sys.argv[1:])
    header |= {"device": "none: compiled, times are modelled", "assumptions": ASSUMPTIONS.splitlines()}
    header["seconds"] = round(time.monotonic() - start)
    print(f"\nThis took {header['seconds']} s.", file=sys.stderr)
    if options.output:
        content = {"header": header, "figures": [figure.as_json() for figure in figures]}
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _figures(row: Row) -> Iterator[Figure]:
    """The figures of a row for the file."""
    facts = {"card": row.card, "model": row.model, "weights": row.numbers, "devices": row.num_devices}
    name = f"{row.num_devices} x {row.card}, {row.model} in {row.numbers}"
    for kv, rates in row.decode.items():
        for count, rate, launches in zip(ROWS, rates, row.num_launches, strict=True):
            if rate is not None:
                own = {"kind": "decode", "rows": count, "kv": kv, "launches": launches}
                yield Figure(f"{name}: decode of {count}, KV in {kv}", "tokens/s", (rate,), facts | own)
    yield Figure(f"{name}: prefill", "tokens/s", (row.prefill,), facts | {"kind": "prefill"})


if __name__ == "__main__":
    main()
