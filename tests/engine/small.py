"""A small random model, engines of it, and random traffic for them."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import jax
import numpy as np

from jsg.config import EngineConfig
from jsg.engine import startup
from jsg.engine.child.protocol import Progress
from jsg.engine.core import EngineCore
from jsg.engine.device import programs
from jsg.engine.device.programs import EVERYTHING
from jsg.engine.drafter import Drafter, Outlook
from jsg.sched.drafts.estimates import Kind, kind_of
from jsg.sched.request import RunningRequest
from jsg.step_reports import Source
from jsg.types import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob
from tests.cache.integrity import check_cache
from tests.engine.late import POOL_TOKENS, late_programs
from tests.sched.integrity import check_scheduler

VOCAB = 96
EOS = 1
CONTEXT = 256
MAX_CORES = 8
"""Engines that are kept at a time."""
DETERMINISTIC = {"deterministic": True}
"""Such an engine has one shape for every step, so it runs a third of the programs of another one."""
SMALL_POOL = {"max_total_tokens": 200, "schedule_conservativeness": 0.01}
"""Two or three requests of `traffic` fill it, so that others are retracted."""
PAGE_SIZE = 4
"""Of engines that have pages of several tokens."""
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


def make_core(
    directory: pathlib.Path,
    cache_dir: str,
    *,
    is_warm: bool = False,
    report: Callable[[Progress], None] | None = None,
    **knobs: object,
) -> EngineCore:
    """An engine of the small model, whose programs are compiled when first needed or, if `is_warm`, before it is used.

    With `forbid_compile=False` it compiles them as an engine does that serves, all but some in the background.
    """
    config = make_config(directory, cache_dir, **knobs)
    with late_programs() if config.forbid_compile else contextlib.nullcontext():
        core = EngineCore(config, report=report)
    for name in core._executables.names() if is_warm else ():
        core._executables.compiled(name)
    return core


@contextlib.contextmanager
def few_variants() -> Iterator[None]:
    """Engines that are made inside have one sampling program for each number of rows, which can do all."""
    with mock.patch.multiple(programs, COMMON=(), RARE=(EVERYTHING,), SWITCHED=(EVERYTHING,)):
        yield


def follow(
    directory: pathlib.Path, cache_dir: str, *, report: Callable[[Progress], None] | None = None, **knobs: object
) -> None:
    """Is a host of such an engine that follows, until its leader ends."""
    with late_programs():
        startup.follow(make_config(directory, cache_dir, **knobs), report or (lambda progress: None))


def make_config(directory: pathlib.Path, cache_dir: str, **knobs: object) -> EngineConfig:
    """The knobs of an engine of the small model. Without drafts, the number of its steps follows from its requests."""
    defaults = {"max_running_requests": 4, "max_total_tokens": POOL_TOKENS, "chunked_prefill_size": 64}
    defaults["speculative"] = "off"
    fixed = {"load_format": "dummy", "forbid_compile": True, "compilation_cache_dir": cache_dir}
    return EngineConfig(model_path=str(directory), **({**defaults, **fixed, **knobs}))  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def shared_cores(make: Callable[..., EngineCore]) -> Iterator[Callable[..., EngineCore]]:
    """Makes an engine with the given knobs, or returns the one made before, its cache emptied.

    One in which a failed test left work is not given out again.
    """
    cores: dict[tuple, EngineCore] = {}

    def get(**knobs: object) -> EngineCore:
        key = tuple(sorted(knobs.items()))
        core = cores.pop(key, None)
        if core is not None and not core.flush_cache():
            core.close()
            core = None
        if core is None:
            while len(cores) >= MAX_CORES:
                cores.pop(next(iter(cores))).close()
            core = make(**knobs)
        cores[key] = core  # the last is the latest used
        return core

    try:
        yield get
    finally:
        for core in cores.values():
            core.close()


@contextlib.contextmanager
def own_cores(make: Callable[..., EngineCore]) -> Iterator[Callable[..., EngineCore]]:
    """Makes engines with the given knobs, and closes them at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda **knobs: stack.enter_context(contextlib.closing(make(**knobs)))


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
            check_core(core)
        step += 1
        assert step < 5000, "the engine does not come to an end"
    assert core.scheduler.table.num_uncached_pages == 0, "a finished request still holds pages"
    return outcomes


def alone(core: EngineCore, request: Request) -> Outcome:
    """The request on an empty engine with an empty cache."""
    assert core.flush_cache()
    return run(core, [(0, request)], check=False)[request.rid]


def mixed_drafts(answers: Callable[[Request], Sequence[int]]) -> Callable[..., tuple[list[int], list[Kind]]]:
    """Stands in for `Drafter._search`: drafts are the right tokens, with wrong ones between them."""
    numbers = np.random.default_rng(0)

    def search(
        self: Drafter, running: RunningRequest, outlook: Outlook, forced: Sequence[int] = ()
    ) -> tuple[list[int], list[Kind]]:
        right = answers(running.request)[running.num_output + len(forced) :][:10]
        tokens = [token if numbers.random() < 0.8 else int(numbers.integers(2, VOCAB)) for token in right]
        return tokens, [kind_of(Source.TEXT, 16)] * len(tokens)

    return search


def random_aborts(seed: int, arrivals: list[tuple[int, Request]]) -> dict[str, int]:
    """Some of the requests, and the steps before which they are aborted."""
    rng = np.random.default_rng(seed + 1000)
    return {request.rid: when + int(rng.integers(0, 30)) for when, request in arrivals if rng.random() < 0.25}


def assert_is_prefix_of(outcome: Outcome, reference: Outcome) -> None:
    """An aborted request has said the beginning of what it would have said."""
    count = len(outcome.token_ids)
    assert outcome.token_ids == reference.token_ids[:count] and outcome.logprobs == reference.logprobs[:count]


def remembered[Found](find: Callable[[Request], Found]) -> Callable[[Request], Found]:
    """Finds what belongs to a request of `traffic`, whose names are given once, and remembers it."""
    found: dict[str, Found] = {}

    def get(request: Request) -> Found:
        if request.rid not in found:
            found[request.rid] = find(request)
        return found[request.rid]

    return get


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


def check_core(core: EngineCore) -> None:
    """Asserts the invariants of scheduler, cache and masks."""
    check_scheduler(core.scheduler)
    check_cache(core._cache)
    core._runner.masks.check_integrity()
