"""A small random model, engines of it, and random traffic for them."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from jsg.config import EngineConfig
from jsg.engine import startup
from jsg.engine.child.protocol import Progress
from jsg.engine.core import EngineCore
from jsg.engine.device.executables import Executables
from jsg.types import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob

VOCAB = 96
EOS = 1
CONTEXT = 256
MAX_CORES = 4
"""Engines kept at a time. Each compiled program of a CPU takes about 100 memory mappings, an engine up to 5000, and
where a process reaches the 65530 that Linux allows, LLVM aborts it."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}


def write_model(directory: pathlib.Path, **changes: object) -> pathlib.Path:
    """A model directory that holds a config only; `load_format="dummy"` makes its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL | changes))
    return directory


class WhenNeeded(dict[Hashable, jax.stages.Compiled]):
    """Compiled programs, each of which is compiled when it is first looked up."""

    def __init__(self, compile_one: Callable[[Hashable], object]):
        super().__init__()
        self._compile_one = compile_one

    def __missing__(self, name: Hashable) -> jax.stages.Compiled:
        self._compile_one(name)
        return self[name]


class LateExecutables(Executables):
    """Behaves as if every program were compiled, and compiles each when it is first needed.

    An engine has about 85, which take half a minute; most tests run a few of them.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._compiled = WhenNeeded(self._compile_one)

    def compile(self, names: Iterable[Hashable], report: Callable[[Hashable], None] = lambda name: None) -> None:
        pass

    def compile_rest_in_background(self) -> None:
        pass

    def is_ready(self, name: Hashable) -> bool:
        return name in self._lowered


def make_core(
    directory: pathlib.Path,
    cache_dir: str,
    *,
    is_warm: bool = False,
    report: Callable[[Progress], None] | None = None,
    **knobs: object,
) -> EngineCore:
    """An engine of the small model, with all its programs; unless `is_warm`, they are compiled when first needed."""
    config = make_config(directory, cache_dir, **knobs)
    is_late = not is_warm and config.forbid_compile
    with mock.patch.object(startup, "Executables", LateExecutables if is_late else Executables):
        return EngineCore(config, report=report)


def follow(
    directory: pathlib.Path, cache_dir: str, *, report: Callable[[Progress], None] | None = None, **knobs: object
) -> None:
    """Is a host of such an engine that follows, until its leader ends."""
    with mock.patch.object(startup, "Executables", LateExecutables):
        startup.follow(make_config(directory, cache_dir, **knobs), report or (lambda progress: None))


def make_config(directory: pathlib.Path, cache_dir: str, **knobs: object) -> EngineConfig:
    """The knobs of an engine of the small model."""
    defaults: dict[str, object] = {"max_running_requests": 4, "max_total_tokens": 1024}
    fixed = {"load_format": "dummy", "forbid_compile": True, "compilation_cache_dir": cache_dir}
    return EngineConfig(model_path=str(directory), **(defaults | fixed | knobs))  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def shared_cores(make: Callable[..., EngineCore]) -> Iterator[Callable[..., EngineCore]]:
    """Makes an engine with the given knobs, or returns the one made before, its cache emptied."""
    cores: dict[tuple, EngineCore] = {}

    def get(**knobs: object) -> EngineCore:
        key = tuple(sorted(knobs.items()))
        core = cores.pop(key, None)
        if core is None:
            while len(cores) >= MAX_CORES:
                cores.pop(next(iter(cores))).close()
            core = make(**knobs)
        cores[key] = core  # the last is the latest used
        assert core.flush_cache(), "a test left work in a shared engine"
        return core

    try:
        yield get
    finally:
        for core in cores.values():
            core.close()


@contextlib.contextmanager
def nothing_compiled(core: EngineCore) -> Iterator[None]:
    """Asserts that JAX traces and compiles nothing inside, not even an operation outside the engine's own programs."""
    events: list[str] = []

    def listen(name: str, duration_s: float, **_: object) -> None:
        events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1)(1.0)
        assert events, "the listener hears compilations"
        events.clear()
        before = core.stats()
        yield
        after = core.stats()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not events
    for counter in ("num_lowered", "num_compiled"):
        assert after[counter] == before[counter]


@dataclasses.dataclass
class Outcome:
    """Everything the engine said of one request."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        assert self.finish is None, "nothing may come after the end"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish = output.finish
        self.prompt_tokens, self.cached_tokens = output.prompt_tokens, output.cached_tokens


def run(
    core: EngineCore,
    arrivals: list[tuple[int, Request]],
    aborts: dict[str, int] | None = None,
    *,
    check: bool = True,
) -> dict[str, Outcome]:
    """Adds each request before its step, aborts those of `aborts` before theirs, and steps until all have ended."""
    outcomes = {request.rid: Outcome() for _, request in arrivals}
    waiting = sorted(arrivals, key=lambda arrival: arrival[0])
    step = 0
    while waiting or core.has_work:
        while waiting and waiting[0][0] <= step:
            core.add(waiting.pop(0)[1])
        for rid, when in (aborts or {}).items():
            if when == step:
                core.abort(rid)
        for output in core.step():
            outcomes[output.rid].add(output)
        if check:
            core.check_integrity()
        step += 1
        assert step < 5000, "the engine does not come to an end"
    assert core.scheduler.table.num_uncached_pages == 0, "a finished request still holds pages"
    return outcomes


def alone(core: EngineCore, request: Request) -> Outcome:
    """The request on an empty engine with an empty cache."""
    assert core.flush_cache()
    return run(core, [(0, request)], check=False)[request.rid]


def traffic(seed: int, count: int = 10, *, logprobs: int = 2) -> list[tuple[int, Request]]:
    """Random requests, many with common prefixes, arriving over a few dozen steps."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(2, VOCAB, size=size) for size in (3, 40, 90)]
    arrivals = []
    for i in range(count):
        prefix = prefixes[rng.integers(len(prefixes))] if rng.random() < 0.7 else prefixes[0][:0]
        own = rng.integers(2, VOCAB, size=rng.integers(1, 40))
        prompt = tuple(int(token) for token in np.concatenate([prefix, own]))
        max_new = int(rng.integers(0, 60))
        sampling = SamplingParams(
            max_new_tokens=max_new,
            min_new_tokens=int(rng.integers(0, max_new + 1)) if rng.random() < 0.3 else 0,
            temperature=float(rng.choice([0.0, 0.0, 0.7, 1.3])),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([-1, 20])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.5])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
            sampling_seed=int(rng.integers(0, 2**32)),
            ignore_eos=bool(rng.random() < 0.5),
            stop_token_ids=(int(rng.integers(2, VOCAB)),) if rng.random() < 0.2 else (),
        )
        start = int(rng.integers(0, len(prompt))) if rng.random() < 0.3 else -1
        arrivals.append(
            (
                int(rng.integers(0, 12)),
                Request(
                    rid=f"{seed}-{i}",
                    input_ids=prompt,
                    sampling=sampling,
                    return_logprob=True,
                    logprob_start_len=start,
                    top_logprobs_num=logprobs,
                ),
            )
        )
    return arrivals
