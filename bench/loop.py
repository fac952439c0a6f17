"""What `EngineCore.step` costs beside its two programs."""

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bench import null_model
from bench.bare import BareStep
from bench.clock import Sample, alternate, timed
from bench.report import Report
from bench.shapes import write_model
from jsg.config import EngineConfig
from jsg.engine.core import EngineCore
from jsg.models.config import ModelConfig
from jsg.sched.buckets import BucketKey, Phase
from jsg.types import Request, SamplingParams

CONTEXT_LEN = 1024
WARM_UP_STEPS = 5


def make_engine(directory: Path, **knobs: Any) -> EngineCore:
    """A float32 engine with random weights, once nothing compiles in its background any more."""
    core = EngineCore(EngineConfig(model_path=str(directory), load_format="dummy", dtype="float32", **knobs))
    while core.stats()["num_programs_pending"]:
        time.sleep(0.1)
    return core


def random_prompt(seed: int, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Token ids that the seed decides."""
    return tuple(random.Random(seed).choices(range(vocab_size), k=num_tokens))


def greedy(max_new_tokens: int) -> SamplingParams:
    """Exactly so many tokens, the likeliest each time."""
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)


class DecodingEngine:
    """An engine in which a number of requests do nothing but decode, for as long as their context lasts."""

    def __init__(self, directory: Path, batch: int, prompt_len: int):
        """Brings all requests to their first token."""
        self.core = make_engine(
            directory, max_running_requests=batch, context_length=CONTEXT_LEN, max_total_tokens=batch * CONTEXT_LEN
        )
        self.context_len = prompt_len
        sampling = greedy(CONTEXT_LEN - prompt_len)
        for seed in range(batch):
            prompt = random_prompt(seed, prompt_len, self.core.info.vocab_size)
            self.core.add(Request(rid=str(seed), input_ids=prompt, sampling=sampling))
        waiting = {str(seed) for seed in range(batch)}
        while waiting:
            waiting -= {output.rid for output in self._step()}

    def samples(self, count: int) -> list[Sample]:
        """Times `count` steps."""
        return timed(self._step)(count)

    def _step(self) -> list[Any]:
        self.context_len += 1
        return self.core.step()


def measure_loop(report: Report, directory: Path, batch: int, *, prompt_len: int, rounds: int, steps: int) -> None:
    """The whole loop against the bare programs, which run at the context that the loop has reached."""
    engine = DecodingEngine(directory, batch, prompt_len)
    bare = BareStep(
        ModelConfig.from_directory(directory), jnp.float32, max_rows=batch, context_len=CONTEXT_LEN
    )  # its tables are as large as the engine's, so its programs are the same

    def bare_samples(count: int) -> list[Sample]:
        key = BucketKey(Phase.DECODE, batch, batch)
        return timed(bare.runner(key, [(engine.context_len, 1)] * batch))(count)

    samples = alternate(
        {"bare": bare_samples, "loop": engine.samples}, rounds=rounds, per_round=steps, warm_up=WARM_UP_STEPS
    )
    engine.core.close()
    for side, name in (("bare", "bare programs"), ("loop", "EngineCore.step")):
        report.add(f"{name}, decode B={batch}", "ms cpu", [sample.cpu_ms for sample in samples[side]])
    ratios = _ratios_by_round(samples["loop"], samples["bare"], steps)
    report.add(f"EngineCore.step / bare programs, B={batch}", "x", ratios, target="<= 1.10", context=engine.context_len)


def measure_null(report: Report, folder: Path, batch: int, *, prompt_len: int, steps: int) -> None:
    """The loop around a model that computes nothing, everything counted: planning, packing, dispatch, commit."""
    with null_model.registered():
        engine = DecodingEngine(write_model(folder, null_model.SHAPE), batch, prompt_len)
        engine.samples(WARM_UP_STEPS)
        samples = engine.samples(steps)
        engine.core.close()
    report.add(
        f"EngineCore.step of a null model, B={batch}", "ms cpu", [s.cpu_ms for s in samples], target="<= 1.5 (median)"
    )


def _ratios_by_round(ours: Sequence[Sample], theirs: Sequence[Sample], per_round: int) -> list[float]:
    """Ratio of the medians of each round: within a round the context, and the neighbours on the machine, are alike."""

    def medians(samples: Sequence[Sample]) -> list[float]:
        starts = range(0, len(samples), per_round)
        return [statistics.median(s.cpu_ms for s in samples[start : start + per_round]) for start in starts]

    return [a / b for a, b in zip(medians(ours), medians(theirs), strict=True)]
