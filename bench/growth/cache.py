"""Prompts that wait at different places of the radix tree, prompts that are held, and evictions."""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from bench.growth.curve import Calls, Curve
from bench.sched import VOCAB, Host, make_host, request
from jsg.sched.batch import Batch, StepResult

Prompts = Callable[[int], list[np.ndarray]]

TURNS, TURN_TOKENS = 20, 12
FIRST_STEPS = 20
HELD_POOL = 20_000
"""The pages of the pool in which prompts are held."""


def _document(size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, size).astype(np.int32)


def _growing(size: int) -> list[np.ndarray]:
    document = _document(size)
    return [document[:length] for length in range(1, size + 1)]


def _shrinking(size: int) -> list[np.ndarray]:
    return _growing(size)[::-1]


def _comb(size: int) -> list[np.ndarray]:
    order = np.random.default_rng(1).permutation(size)
    prompts = [np.append(prompt, np.int32(number % VOCAB)) for number, prompt in enumerate(_growing(size))]
    return [prompts[index] for index in order.tolist()]


def _turns(size: int) -> list[np.ndarray]:
    dialogs = _document(size // TURNS * TURNS * TURN_TOKENS).reshape(-1, TURNS * TURN_TOKENS)
    return [dialog[: turn * TURN_TOKENS] for dialog in dialogs for turn in range(1, TURNS + 1)]


def _insert(host: Host, tokens: np.ndarray) -> int:
    """Inserts tokens; returns how many nodes and groups that touched."""
    before, pages = host.cache.work, host.take_pages(len(tokens))
    result = host.cache.insert(tokens, pages)
    host.allocator.free(pages[: result.num_existing])
    return host.cache.work - before


def _watches(prompts: Prompts) -> Callable[[int], Calls]:
    """So many watches, then the path that they have in common in two inserts, and its eviction."""

    def calls(size: int) -> Calls:
        host, waiting = make_host(), prompts(size)
        for prompt in waiting:
            host.cache.watch(prompt)
        longest = max(waiting, key=len)
        yield lambda: _insert(host, longest[: len(longest) // 2])
        yield lambda: _insert(host, longest)
        yield host.cache.reset

    return calls


def _steps(host: Host) -> Calls:
    """Steps until all are answered, or with a request that cannot be admitted for ever; only their plans are timed."""
    planned: list[Batch | None] = []

    def plan() -> int:
        before = host.cache.work
        planned.append(host.scheduler.plan())
        return host.cache.work - before

    while not host.scheduler.is_idle:
        yield plan
        if (batch := planned.pop()) is not None:
            host.scheduler.commit(batch, StepResult([7] * batch.key.num_rows))
        host.scheduler.take_finished()


def _plans(prompts: Prompts) -> Callable[[int], Calls]:
    """The first steps of a server for which so many prompts wait."""

    def calls(size: int) -> Calls:
        host = make_host(context_length=size + 1000)
        for number, prompt in enumerate(prompts(size)):
            host.scheduler.add(request(f"r{number}", prompt, 4))
        yield from itertools.islice(_steps(host), FIRST_STEPS)

    return calls


def _whole_queue(size: int) -> Calls:
    """Growing contexts, until all are answered."""
    host = make_host(context_length=size + 1000)
    for number, prompt in enumerate(_growing(size)):
        host.scheduler.add(request(f"r{number}", prompt, 4))
    yield from _steps(host)


def _holds(size: int) -> Calls:
    """Steps with so many nested holds, while a request waits for more memory than holds and free pages have."""
    host = make_host(context_length=HELD_POOL, num_pages=HELD_POOL)
    for number, prompt in enumerate(_growing(size)):
        host.scheduler.add(dataclasses.replace(request(f"h{number}", prompt, 0), hold=True))
    for plan in _steps(host):
        plan()
    assert host.scheduler.plan() is None, "nothing runs, so memory for new requests is estimated anew"
    for rid in ("runs", "waits"):
        host.scheduler.add(request(rid, (_document(1000) + 1) % VOCAB, 3 * HELD_POOL // 4))
    yield from itertools.islice(_steps(host), FIRST_STEPS)


def _evictions(size: int) -> Calls:
    """One eviction of so many tokens, in leaves of ten tokens below one prefix."""
    host, shared = make_host(), _document(10)
    for tail in np.random.default_rng(1).integers(0, VOCAB, (size // 10, 10)).astype(np.int32):
        _insert(host, np.concatenate([shared, tail]))
    yield lambda: host.cache.evict(size)


SIZES = (156, 625, 2500, 10_000)
TURN_SIZES = (160, 640, 2560, 10_240)

CURVES = (
    Curve("n watches on one path: inserts and an eviction", SIZES, _watches(_growing)),
    Curve("n watches that leave one path: inserts and an eviction", SIZES, _watches(_comb)),
    Curve("first plans for n growing contexts", SIZES, _plans(_growing)),
    Curve("first plans for n shrinking contexts", SIZES, _plans(_shrinking)),
    Curve("first plans for n prompts that leave one path", SIZES, _plans(_comb)),
    Curve("first plans for n replayed turns", TURN_SIZES, _plans(_turns)),
    # The path of each has a node for each that ran before, and a lock visits all of them.
    Curve("all plans for n growing contexts", (60, 240, 960, 3840), _whole_queue, max_exponent=2.2),
    Curve("steps with n nested holds and too little memory", (16, 64, 256, 1024), _holds, max_exponent=0.3),
    Curve("one eviction of n tokens in leaves of ten", (1600, 6400, 25_600, 102_400), _evictions),
)
