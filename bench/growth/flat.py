"""Curves that are flat or linear as they should be, so that a regression shows: a step, a match, the queue."""

import numpy as np

from bench.growth.curve import Calls, Curve
from bench.sched import VOCAB, make_host, request

NUM_STEPS = 50
NUM_MATCHES = 200
EDGE_LEN = 8
NUM_UPPER_NODES = 100


def _decode_steps(size: int) -> Calls:
    """The host's part of decode steps of one request behind so many tokens."""
    host = make_host(context_length=size + 2 * NUM_STEPS)
    host.scheduler.add(request("long", np.arange(size, dtype=np.int32) % VOCAB, NUM_STEPS + 10))
    while host.step().num_singles == 0:
        pass
    for _ in range(NUM_STEPS):
        yield host.step


def _matches(size: int) -> Calls:
    """Matches of prompts in a tree of so many nodes."""
    rng = np.random.default_rng(0)
    host = make_host()
    upper = rng.integers(0, VOCAB, (NUM_UPPER_NODES, EDGE_LEN)).astype(np.int32)
    lower = rng.integers(0, VOCAB, (size, EDGE_LEN)).astype(np.int32)
    prompts = [np.concatenate([upper[number % NUM_UPPER_NODES], tail]) for number, tail in enumerate(lower)]
    for prompt in prompts:
        pages = host.take_pages(len(prompt))
        result = host.cache.insert(prompt, pages)
        host.allocator.free(pages[: result.num_existing])
    for prompt in prompts[:: size // NUM_MATCHES]:
        yield lambda prompt=prompt: host.cache.match(prompt)


def _waiting(size: int) -> Calls:
    """The scheduler takes so many prompts of twenty families, and plans a first step."""
    rng = np.random.default_rng(0)
    host = make_host()
    families = rng.integers(0, VOCAB, (20, 100)).astype(np.int32)
    for number, own in enumerate(rng.integers(0, VOCAB, (size, 20)).astype(np.int32)):
        new = request(f"r{number}", np.concatenate([families[number % 20], own]), 10)
        yield lambda new=new: host.scheduler.add(new)
    yield host.scheduler.plan


CURVES = (
    Curve("decode steps behind n tokens, the host's part", (2000, 8000, 32_000, 128_000), _decode_steps, 0.3),
    Curve("matches in a tree of n nodes", (1000, 4000, 16_000, 64_000), _matches, 0.3),
    Curve("n prompts wait, and a first plan", (312, 1250, 5000, 20_000), _waiting),
)
