"""The workloads: calls whose prompts share prefixes, in an order and with gaps that depend only on a seed.

A prompt is a row of *names*. A name stands for a block of 32 tokens and everything before it, so equal names are equal
prefixes. Time is counted in *turns*: in one turn as many calls come as there are replicas. How many seconds a turn has
is decided by the load (`simulation.py`). Sessions have begun long before the time 0, so the first calls are in the
midst of theirs.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jsg.engine.front.prefix_index import BLOCK_TOKENS, Chain

MOONCAKE_TOKENS = 512  # of a block in traces of Mooncake


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request.

    Attributes:
        key: The conversation or document it belongs to.
        at: When it comes, in turns; but never before the answer to the call that it follows.
        follows: That call.
        prompt: Its blocks.
        answer: The blocks of the answer; the next prompt of the conversation has them too.
    """

    key: int
    at: float
    follows: "Call | None"
    prompt: Chain
    answer: Chain

    @property
    def prompt_len(self) -> int:
        """The tokens of the prompt."""
        return len(self.prompt) * BLOCK_TOKENS

    @property
    def output_len(self) -> int:
        """The tokens of the answer."""
        return len(self.answer) * BLOCK_TOKENS

    @property
    def kept(self) -> Chain:
        """What a cache has when the answer is there: its last block is not whole, as its last token never runs."""
        return self.prompt + self.answer[:-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How large a trace is.

    Attributes:
        num_replicas: Replicas that it is for.
        turns: How long it lasts; `num_replicas` calls come in each turn.
        seed: It decides everything else.
    """

    num_replicas: int
    turns: float
    seed: int = 0


class _Names:
    """New names, one after another."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def take(self, num_blocks: int) -> Chain:
        return tuple(number.to_bytes(4, "little") for number in itertools.islice(self._count, num_blocks))


def _zipf(size: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, size + 1) ** -exponent
    return weights / weights.sum()


def _in_order(calls: Iterator[Call]) -> list[Call]:
    return sorted(calls, key=lambda call: call.at)  # stable


def chats(shape: Shape) -> list[Call]:
    """Conversations of 6 turns behind one of 50 system prompts (Zipf) of 1024 tokens, 30 turns of time apart."""
    num_turns, gap = 6, 30.0
    rng, names = np.random.default_rng(shape.seed), _Names()
    systems, popular = [names.take(32) for _ in range(50)], _zipf(50, 1.0)
    before = num_turns * gap
    num_sessions = int((shape.turns + before) * shape.num_replicas / num_turns)

    def talk(key: int) -> Iterator[Call]:
        at, said, last = rng.uniform(-before, shape.turns), systems[rng.choice(50, p=popular)], None
        for _ in range(num_turns):
            said += names.take(int(rng.integers(4, 17)))
            answer = names.take(2)
            if 0 <= at < shape.turns:
                yield (last := Call(key, at, last, said, answer))
            said += answer
            at += rng.exponential(gap)

    return _in_order(call for key in range(num_sessions) for call in talk(key))


def documents(shape: Shape) -> list[Call]:
    """Questions about documents of 3840 tokens, four for each replica; the first is in a fifth of the calls."""
    rng, names = np.random.default_rng(shape.seed), _Names()
    texts = [names.take(120) for _ in range(4 * shape.num_replicas)]
    picked = rng.choice(len(texts), int(shape.turns * shape.num_replicas), p=_zipf(len(texts), 1.1))
    times = np.sort(rng.uniform(0, shape.turns, len(picked)))
    pairs = zip(picked.tolist(), times.tolist(), strict=True)
    return [Call(key, at, None, texts[key] + names.take(4), names.take(2)) for key, at in pairs]


def agents(shape: Shape) -> list[Call]:
    """Runs of 8 steps behind one of 8 sets of tools (2048 tokens); prompts grow by results, and a sixth of steps forks.

    A fork is three runs of 3 steps with the prompt so far in common, and the step after it has one result more.
    """
    num_steps, fork_steps, gap, forks = 8, 3, 8.0, 1 / 6
    rng, names = np.random.default_rng(shape.seed), _Names()
    tools, popular = [names.take(64) for _ in range(8)], _zipf(8, 1.0)
    before = num_steps * gap * 2
    calls_of_run = num_steps * (1 + forks * 3 * fork_steps)
    num_runs = int((shape.turns + before) * shape.num_replicas / calls_of_run)

    def walk(key: int, at: float, said: Chain, last: Call | None, size: int, can_fork: bool) -> Iterator[Call]:
        for _ in range(size):
            said += names.take(int(rng.integers(2, 17)))
            answer = names.take(2)
            if 0 <= at < shape.turns:
                yield (last := Call(key, at, last, said, answer))
            said += answer
            at += rng.exponential(gap)
            if can_fork and rng.random() < forks:
                for _ in range(3):
                    yield from walk(key, at, said, last, fork_steps, False)
                at += fork_steps * gap

    runs = (
        walk(key, rng.uniform(-before, shape.turns), tools[rng.choice(8, p=popular)], None, num_steps, True)
        for key in range(num_runs)
    )
    return _in_order(call for run in runs for call in run)


def mooncake(shape: Shape) -> list[Call]:
    """Calls like those of Mooncake's traces: long prompts in blocks of 512 tokens, a common first one, and bursts.

    Two fifths of the conversations have one turn; the others 2 to 6. Lengths are log-normal.
    """
    gap = 20.0
    rng, names = np.random.default_rng(shape.seed), _Names()
    block = MOONCAKE_TOKENS // BLOCK_TOKENS
    first = names.take(block)
    before = 6 * gap
    num_sessions = int((shape.turns + before) * shape.num_replicas / 2.8)  # the mean number of turns
    bursts = np.sort(rng.uniform(0, shape.turns, int(2 * shape.turns)))  # each brings half as many calls as replicas

    def talk(key: int) -> Iterator[Call]:
        at, said, last = rng.uniform(-before, shape.turns), first, None
        for turn in range(1 if rng.random() < 0.4 else int(rng.integers(2, 7))):
            new = rng.lognormal(np.log(6 if turn == 0 else 2), 0.8)
            said += names.take(block * int(np.clip(new, 1, 48)))
            answer = names.take(int(np.clip(rng.lognormal(np.log(6), 0.8), 1, 32)))
            if 0 <= at < shape.turns:
                burst = bursts[min(np.searchsorted(bursts, at), len(bursts) - 1)]
                yield (last := Call(key, float(max(burst, at)), last, said, answer))
            said += answer
            at += rng.exponential(gap)

    return _in_order(call for key in range(num_sessions) for call in talk(key))


def read_mooncake(path: Path, num_replicas: int) -> list[Call]:
    """A trace in Mooncake's form: lines of JSON with `timestamp`, `input_length`, `output_length` and `hash_ids`.

    Each id stands for 512 tokens and everything before them. Times keep their proportions. A call's key is its second
    id, because all calls of a published trace have the first one in common.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    span = max(line["timestamp"] for line in lines) + 1
    turns = len(lines) / num_replicas
    names, fresh = dict[int, Chain](), _Names()
    calls = []
    for line in lines:
        ids, block = line["hash_ids"], MOONCAKE_TOKENS // BLOCK_TOKENS
        for each in ids:
            if each not in names:
                names[each] = fresh.take(block)
        said = tuple(itertools.chain.from_iterable(names[each] for each in ids))
        prompt = said[: max(line["input_length"] // BLOCK_TOKENS, 1)]
        answer = fresh.take(max(line["output_length"] // BLOCK_TOKENS, 1))
        calls.append(Call(ids[min(1, len(ids) - 1)], turns * line["timestamp"] / span, None, prompt, answer))
    return _in_order(iter(calls))


Workload = Callable[[Shape], Sequence[Call]]

WORKLOADS: dict[str, Workload] = {"chats": chats, "documents": documents, "agents": agents, "mooncake": mooncake}
