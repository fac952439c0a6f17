"""What engines on one and on several devices answer, as JSON: `python -m tests.engine.parallel_answers`.

A process of its own, because JAX decides how many CPU devices it makes up when it starts. Standard input has a list of
runs, each {"variant", "directory", "cache_dir", "tp_size", "knobs", "num_new"} and perhaps {"num_requests"}; standard
output has their answers in that order. A run whose knobs say that this is a host which follows has none: null.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from jsg.engine.core import EngineCore
from jsg.types import Request, SamplingParams
from tests.engine import small
from tests.golden.variants import random_tokens

PROGRAMS = ("forward", "copy_slots", "write_rows")


def requests_of(tokens: list[int], num_new: int, *, vocab: int) -> list[Request]:
    """The recorded prompt, greedily; and others that begin alike, sampled in several ways."""
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=num_new)
    made = [Request(rid="greedy", input_ids=tuple(tokens), sampling=greedy)]
    made.append(
        Request(rid="scored", input_ids=tuple(tokens), sampling=greedy, return_logprob=True, logprob_start_len=3)
    )
    ways: list[dict[str, Any]] = [
        {},
        {"top_k": 20},
        {"top_p": 0.8, "min_p": 0.01},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.2},
        {"logit_bias": {7: 2.0, vocab - 1: 1.5}},
        {"temperature": 0.3},
    ]
    for index, way in enumerate(ways):
        sampling = SamplingParams(
            **{"temperature": 0.9, "sampling_seed": index, "max_new_tokens": 12, "ignore_eos": True} | way
        )
        prompt = (*tokens[: 20 + index], index)
        made.append(Request(rid=f"sampled {index}", input_ids=prompt, sampling=sampling))
    return made


def answer(run: dict[str, Any]) -> dict[str, Any] | None:
    """The answers of one engine, some requests coming while others run; and which collectives a decode step has."""
    plans: list[str] = []
    make = small.follow if run["knobs"].get("node_rank") else small.make_core
    core = make(
        Path(run["directory"]),
        run["cache_dir"],
        tp_size=run["tp_size"],
        report=lambda progress: plans.append(progress.text) if progress.stage == "plan" else None,
        **{"load_format": "auto", "chunked_prefill_size": 64, "max_total_tokens": 1024} | run["knobs"],
    )
    if core is None:
        return None
    try:
        requests = requests_of(run["tokens"], run["num_new"], vocab=core.info.vocab_size)[: run.get("num_requests")]
        outcomes = small.run(core, [(2 * index, request) for index, request in enumerate(requests)])
        return {
            "tokens": {rid: outcome.token_ids for rid, outcome in outcomes.items()},
            "logprobs": [scored.logprob for scored in outcomes["scored"].logprobs],
            "prompt_logprobs": [scored.logprob for scored in (outcomes["scored"].prompt_logprobs or ())],
            "collectives": collectives(core),
            "plan": plans[0],
            "stats": {name: core.stats()[name] for name in ("num_retracts", "cached_tokens", "num_evicted_tokens")},
            "scored_alone": again(core, requests[1]),
        }
    finally:
        core.close()


def again(core: EngineCore, request: Request) -> list[float]:
    """The log-probabilities of the prompt and of the answer, where nothing is cached and nothing runs beside it."""
    outcome = small.alone(core, request)
    return [scored.logprob for scored in (*(outcome.prompt_logprobs or ()), *outcome.logprobs)]


def collectives(core: EngineCore) -> dict[str, list[int]]:
    """All-reduces, all-gathers and others in what every step runs; of the forward passes, in those that ran."""
    programs = core._executables
    names = [name for name in programs.names() if isinstance(name, tuple)]
    names = [name for name in names if name in programs._compiled or name[0] in ("copy_slots", "write_rows")]
    texts = {str(name[0]): programs.compiled(name).as_text() for name in names if name[0] in PROGRAMS}
    others = ("all-to-all(", "collective-permute(", "reduce-scatter(")
    return {
        name: [text.count(" all-reduce("), text.count(" all-gather("), sum(text.count(f" {other}") for other in others)]
        for name, text in texts.items()
    }


def main() -> None:
    runs = json.load(sys.stdin)
    jax.config.update("jax_num_cpu_devices", max(run["tp_size"] // run["knobs"].get("nnodes", 1) for run in runs))
    for run in runs:
        run["tokens"] = random_tokens(run["variant"], 0, 100)
    json.dump([answer(run) for run in runs], sys.stdout)


if __name__ == "__main__":
    main()
