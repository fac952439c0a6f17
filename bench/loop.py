"""Measures the cost of `EngineCore.step` beside its two programs."""

import random
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import null_model, settled
from bench.bare import BareStep
from bench.clock import Sample, alternate, timed
from bench.report import Report
from bench.shapes import write_model
from jsg.config import EngineConfig
from jsg.engine.core import EngineCore
from jsg.models.config import read_spec
from jsg.prompt_ids import PromptIds
from jsg.sched.buckets import BucketKey, Phase
from jsg.types import Request, RequestOutput, SamplingParams

CONTEXT_LEN = 1024
WARM_UP_STEPS = 5


def make_engine(directory: Path, **knobs: Any) -> EngineCore:
    """A float32 engine with random weights, in which all programs are compiled and have run once."""
    core = EngineCore(EngineConfig(model_path=str(directory), load_format="dummy", dtype="float32", **knobs))
    settled.wait_until_compiled(core.stats)
    while core.has_work:
        core.step()
    return core


def make_decoding_engine(directory: Path, batch: int, **knobs: Any) -> EngineCore:
    """An engine for this number of requests. It has few shapes to compile, because only decoding is measured."""
    return make_engine(
        directory,
        max_running_requests=batch,
        context_length=CONTEXT_LEN,
        max_total_tokens=batch * CONTEXT_LEN,
        **({"chunked_prefill_size": max(128, batch)} | knobs),
    )


def random_prompt(seed: int, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Random token ids, which depend only on the seed."""
    return tuple(random.Random(seed).choices(range(vocab_size), k=num_tokens))


def greedy(max_new_tokens: int) -> SamplingParams:
    """Sampling parameters for exactly this number of tokens, the likeliest each time."""
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)


class Decoding:
    """An engine in which a number of requests only decode, for as long as their context lasts."""

    def __init__(self, core: EngineCore, batch: int, prompt_len: int):
        """Brings all requests to their first token."""
        self.core = core
        self._lens = {f"decoding-{seed}": prompt_len for seed in range(batch)}
        sampling = greedy(core.info.context_length - prompt_len)
        for seed, rid in enumerate(self._lens):
            prompt = PromptIds.of(random_prompt(seed, prompt_len, core.info.vocab_size))
            core.add(Request(rid=rid, input_ids=prompt, sampling=sampling))
        waiting = set(self._lens)
        while waiting:
            waiting -= {output.rid for output in self._step()}

    @property
    def context_lens(self) -> list[int]:
        """The number of tokens of each request so far."""
        return list(self._lens.values())

    def run(self, count: int) -> None:
        """Makes steps and waits for the work that the last one left on the device."""
        for _ in range(count):
            self._step()
        jax.block_until_ready(jax.live_arrays())

    def end(self) -> None:
        """Aborts the requests."""
        for rid in self._lens:
            self.core.abort(rid)
        while self.core.has_work:
            self.core.step()

    def _step(self) -> list[RequestOutput]:
        outputs = self.core.step()
        for output in outputs:
            self._lens[output.rid] += len(output.token_ids)
        return outputs


def measure_loop(report: Report, directory: Path, batch: int, *, prompt_len: int, rounds: int, steps: int) -> None:
    """Measures the whole loop and the bare programs, which run at the context that the loop has reached.

    A sample is the mean of `steps` steps, with the device idle before and after. Single steps cannot be timed, because
    a step leaves work on the device when it returns.
    """
    core = make_decoding_engine(directory, batch)
    engine = Decoding(core, batch, prompt_len)
    # With tables as large as the engine's the programs are the same. With pages side by side, as a new engine allocates
    # them, the memory accesses are the same.
    config = read_spec(directory)
    bare = BareStep(config, jnp.float32, max_rows=batch, context_len=CONTEXT_LEN, is_shuffled=False)

    def bare_steps(count: int) -> list[Sample]:
        chunks = [(context + steps // 2, 1) for context in engine.context_lens]
        run = bare.runner(BucketKey(Phase.DECODE, batch, batch), chunks)
        return timed(lambda: [run() for _ in range(steps)])(count)

    sides = {"bare": bare_steps, "loop": timed(lambda: engine.run(steps))}
    samples = alternate(sides, rounds=rounds, per_round=1, warm_up=1)
    core.close()
    per_step = {name: [sample.cpu_ms / steps for sample in samples[name]] for name in sides}
    report.add(f"bare programs, decode B={batch}", "ms cpu", per_step["bare"])
    report.add(f"EngineCore.step, decode B={batch}", "ms cpu", per_step["loop"], context=max(engine.context_lens))
    ratios = [loop / bare for loop, bare in zip(per_step["loop"], per_step["bare"], strict=True)]
    report.add(f"EngineCore.step / bare programs, B={batch}", "x", ratios, target="<= 1.10 (median)")


def measure_null(report: Report, folder: Path, batch: int, *, prompt_len: int, steps: int) -> None:
    """Measures the loop with a model that computes nothing: planning, packing, dispatch through JAX, reading, commit.

    The host's time is that of the thread that steps. The time of the process also has the device's threads, which have
    almost nothing to do.
    """
    with null_model.registered():
        core = make_decoding_engine(write_model(folder, null_model.SHAPE), batch)
        engine = Decoding(core, batch, prompt_len)
        engine.run(WARM_UP_STEPS)
        host_ms, process_ms = [], []
        for _ in range(steps):
            host, process = time.thread_time(), time.process_time()
            core.step()
            host_ms.append((time.thread_time() - host) * 1e3)
            process_ms.append((time.process_time() - process) * 1e3)
        core.close()
    report.add(f"step of a null model, host thread, B={batch}", "ms cpu", host_ms, target="<= 1.5 (median)")
    report.add(f"step of a null model, whole process, B={batch}", "ms cpu", process_ms)
