"""Sends thousands of different grammars, and shows where the memory of a server stops growing.

    python -m bench.grammar_memory [--grammars 16000] [--every 500] [--output FILE]

Each request has a small JSON schema of its own, by a seed, so no grammar is ever found in a cache. The engine keeps the
tables of `ENGINE_GRAMMAR_BYTES` for later requests, and states and masks of `MACHINE_BYTES`. The first bound is
reached last, because tables are small: from then on the number of grammars that the engine has stays the same, and no
process may grow any more. If one does, or if the number never stops growing, the exit status is 1.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from bench.report import Report
from bench.served import Served, served, tree_of, usage_of
from bench.serving.client import open_session
from bench.soak.memory import MIB, theil_sen
from jsg.engine.front.client import ENGINE_GRAMMAR_BYTES
from jsg.engine.grammars.store import MACHINE_BYTES

KIB = 2**10
CLIENTS = 8
PROMPT, MAX_NEW = "A form:\n", 32
MAX_TRIES = 60
OPTIONS = ("--port", "0", "--max-total-tokens", "2048")
"""The pool is small, so that it is full after the first answers and its memory does not grow with later ones."""
SETTLED = 0.99
"""The plateau begins when the engine has this share of the most grammars that it ever has."""
MIN_SETTLED = 5  # samples that a slope needs
MAX_KIB_PER_GRAMMAR = 1.0
"""The most that a process may grow for each grammar on the plateau. The tables of one take about 7 KiB."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Sample(NamedTuple):
    """What the processes had after a number of grammars.

    Attributes:
        num_sent: Grammars that were sent.
        num_known: Grammars whose tables the engine has.
        counted: MiB of grammars in the engine, as it counts them itself.
        anonymous: MiB of anonymous memory by process. The grammar processes are one entry.
    """

    num_sent: int
    num_known: int
    counted: float
    anonymous: dict[str, float]


def schema(seed: int, number: int) -> dict[str, Any]:
    """A small object with 3 to 6 members. Two numbers have two schemas."""
    rng = random.Random(f"{seed}:{number}")
    members = {f"m{number}": {"type": "boolean"}}
    for _ in range(rng.randint(2, 5)):
        members["".join(rng.choices(LETTERS, k=rng.randint(4, 9)))] = _member(rng)
    return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}


def _member(rng: random.Random) -> dict[str, Any]:
    least = rng.randrange(100)
    return rng.choice(
        (
            {"type": "string", "maxLength": rng.randint(4, 40)},
            {"type": "integer", "minimum": least, "maximum": least + rng.randint(1, 1000)},
            {"enum": ["".join(rng.choices(LETTERS, k=6)) for _ in range(rng.randint(2, 6))]},
            {"type": "array", "items": {"type": "integer"}, "maxItems": rng.randint(1, 5)},
            {"anyOf": [{"type": "null"}, {"type": "number"}]},
        )
    )


async def send_all(server: Served, num_grammars: int, every: int, seed: int) -> list[Sample]:
    """Sends all grammars, and takes a sample before the first and after each `every` of them."""
    async with open_session(None) as session:
        samples = [await look(server, session, 0)]
        for first in range(0, num_grammars, every):
            numbers = iter(range(first, min(first + every, num_grammars)))

            async def one_client(numbers: Any = numbers) -> None:
                for number in numbers:
                    await _ask(session, server.url, schema(seed, number))

            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(one_client())
            samples.append(await look(server, session, min(first + every, num_grammars)))
            last = samples[-1]
            held = ", ".join(f"{name} {mib:.0f} MiB" for name, mib in last.anonymous.items())
            print(f"{last.num_sent} sent, {last.num_known} known, {last.counted:.0f} MiB counted; {held}", flush=True)
    return samples


async def _ask(session: aiohttp.ClientSession, url: str, form: dict[str, Any]) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": MAX_NEW, "temperature": 0, "json_schema": form}}
    for tries in itertools.count(1):
        async with session.post(url + "/generate", json=body) as response:
            answer = await response.text()
        if response.status == 200:
            return
        # A busy machine may take longer for the first grammar than later ones may wait.
        if response.status != 503 or tries == MAX_TRIES:
            raise RuntimeError(f"POST /generate answered {response.status}: {answer}")
        await asyncio.sleep(1)


async def look(server: Served, session: aiohttp.ClientSession, num_sent: int) -> Sample:
    """What the processes have now."""
    async with session.get(server.url + "/get_server_info") as response:
        state = msgspec.json.decode(await response.read())["internal_states"][0]
    anonymous = {name: usage.anonymous / MIB for name, usage in server.usage().items()}
    compilers, others = 0.0, set(server.pids.values())
    for pid in tree_of(server.pids["front"]):
        if pid not in others:
            with contextlib.suppress(OSError):  # one may end meanwhile
                compilers += usage_of(pid).anonymous / MIB
    anonymous["grammar processes"] = compilers
    return Sample(num_sent, state["num_grammars"], state["grammar_bytes"] / MIB, anonymous)


def on_plateau(samples: Sequence[Sample]) -> list[Sample]:
    """The samples from the first one at which the engine had nearly as many grammars as it ever has."""
    most = max(sample.num_known for sample in samples)
    return list(itertools.dropwhile(lambda sample: sample.num_known < SETTLED * most, samples))


def kib_per_grammar(samples: Sequence[Sample], process: str) -> float | None:
    """How much a process grows for each grammar, as the median of the slopes of all pairs; None for too few samples."""
    if len(samples) < MIN_SETTLED:
        return None
    slope = theil_sen([(3600.0 * sample.num_sent, sample.anonymous[process]) for sample in samples])
    return None if slope is None else slope.per_hour * MIB / KIB


def problems_of(samples: Sequence[Sample]) -> list[str]:
    """Why there is no plateau; nothing where there is one."""
    settled = on_plateau(samples)
    if len(settled) < MIN_SETTLED:
        return [f"the engine got {settled[-1].num_known} grammars and took more of them to the end: send more"]
    grown = {name: kib_per_grammar(settled, name) for name in settled[0].anonymous}
    return [
        f"{name}: anonymous memory grows by {slope:.1f} KiB for each grammar; less than {MAX_KIB_PER_GRAMMAR} is due"
        for name, slope in grown.items()
        if slope is not None and slope >= MAX_KIB_PER_GRAMMAR
    ]


def add_figures(report: Report, samples: Sequence[Sample]) -> None:
    """Adds all samples, and where the plateau begins."""
    settled, last = on_plateau(samples), samples[-1]
    report.add("plateau: grammars sent until it begins", "count", [settled[0].num_sent], known=last.num_known)
    report.add(
        "engine: grammars by its own count, at the end",
        "MiB",
        [last.counted],
        bound=(ENGINE_GRAMMAR_BYTES + MACHINE_BYTES) / MIB,
    )
    for name in last.anonymous:
        held = [sample.anonymous[name] for sample in samples]
        report.add(f"{name}: anonymous memory", "MiB", held, first=held[0], last=held[-1])
        slope = kib_per_grammar(settled, name)
        if slope is not None:
            report.add(f"{name}: growth on the plateau", "KiB each", [slope], target=f"< {MAX_KIB_PER_GRAMMAR}")
    report.add("engine: grammars that it knows", "count", [sample.num_known for sample in samples])
    report.add("engine: grammars by its own count", "MiB", [sample.counted for sample in samples])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.grammar_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grammars", type=int, default=16_000, help="how many are sent (default %(default)s)")
    parser.add_argument("--every", type=int, default=500, help="grammars between two samples (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the schemas (default %(default)s)")
    parser.add_argument("--log", type=Path, help="file for the server's standard error")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    report = Report("bench.grammar_memory", arguments, options.output, model="tiny", server=" ".join(OPTIONS))
    with served(("serve", *OPTIONS), log=options.log) as server:
        samples = asyncio.run(send_all(server, options.grammars, options.every, options.seed))
    add_figures(report, samples)
    report.close()
    problems = problems_of(samples)
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
