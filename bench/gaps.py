"""Measures the longest gap on both loops while one large body is taken in and answered.

    python -m bench.gaps [--only answers,prompts,...] [--repeats 3]

The model computes nothing (`bench.gap_server`). Of several repeats the least counts, because other processes only add
to a gap. Turns of the loops are in processor time of their thread. `late` is how late a task of the front was that
wants to run every 2 ms, and `stream` the longest pause between two events of another client's stream, both on the
clock. `late` is at most the processor time that the front took meanwhile. The exit status is 1 where a loop had a gap
of more than 50 ms; `stream` has no bound, because it depends on what else the machine does.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import aiohttp

from bench import null_model
from bench.gap_bodies import EMBEDS, FLAVOURS, JUDGES, KINDS, SEES
from bench.report import Report
from bench.serving.client import open_session
from bench.shapes import CLIP_SMALL, llava, write_model
from jsg.server.shared.judging import TURN_BEGIN, TURN_END
from jsg.sources import resolve_model

CONTEXT_LEN = 2**17
VOCAB_SIZE = 1408  # of the embedded model, whose tokenizer reads the texts
VISION_VOCAB_SIZE = 1470  # of the embedded model that sees
WIDTH = 4096  # of vectors
MOST_MS = 50.0
LIMIT_S = 300
QUICK_KINDS = ("answers", "prompts", "scored_echo")


class GapServer:
    """A running `bench.gap_server`."""

    def __init__(self, process: subprocess.Popen[str], url: str, flavour: str) -> None:
        self.url = url
        self.flavour = flavour
        self._process = process

    def longest(self) -> dict[str, float]:
        """What the loops did since the last time, in seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def gap_server(flavour: str) -> Iterator[GapServer]:
    """Starts the server of a model in another process, and ends it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.gap_server", str(_make_model(Path(folder), flavour)), flavour]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            greeting = json.loads(process.stdout.readline())
            url = next(word for word in greeting.split() if word.startswith("http://"))
            yield GapServer(process, url, flavour)
            process.stdin.close()
            process.wait(LIMIT_S)


def _make_model(directory: Path, flavour: str) -> Path:
    """A model directory with the tokenizer of an embedded model."""
    embedded = resolve_model("tiny-vision" if flavour == SEES else "tiny")
    shape = null_model.SHAPE | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LEN}
    if flavour == EMBEDS:
        shape |= {"hidden_size": WIDTH}
    if flavour == SEES:
        shape = llava(shape | {"vocab_size": VISION_VOCAB_SIZE}, CLIP_SMALL | {"image_size": 60, "patch_size": 10})
        shutil.copy(embedded / "preprocessor_config.json", directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        written = (embedded / name).read_text(encoding="utf-8")
        if flavour == JUDGES:
            written = written.replace("<|user|>", TURN_BEGIN).replace("<|assistant|>", TURN_END)
        (directory / name).write_text(written, encoding="utf-8")
    return write_model(directory, shape)


async def _other(session: aiohttp.ClientSession, server: GapServer, pauses: list[float]) -> None:
    """Streams until it is cancelled, and notes the pauses between events; for vectors, the times of short requests."""
    path, body = "/v1/completions", {"prompt": [5], "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    if server.flavour == EMBEDS:
        path, body = "/v1/embeddings", {"input": [5]}
    while True:
        before_s = time.perf_counter()
        async with session.post(server.url + path, json=body) as response:
            async for _ in response.content.iter_any():
                now_s = time.perf_counter()
                pauses.append(now_s - before_s)
                before_s = now_s


async def _answered(server: GapServer, path: str, body: bytes) -> tuple[int, float]:
    """The status of the answer to a body, and the longest pause of another stream meanwhile."""
    pauses: list[float] = []
    async with open_session(LIMIT_S) as session:
        other = asyncio.create_task(_other(session, server, pauses))
        while len(pauses) < 20:
            await asyncio.sleep(0.05)
        server.longest()
        pauses.clear()
        headers = {"Content-Type": "application/json"}
        async with session.post(server.url + path, data=body, headers=headers) as response:
            await response.read()
        await asyncio.sleep(0.2)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        return response.status, max(pauses)


def measure(report: Report, server: GapServer, kind: str, num_repeats: int) -> list[str]:
    """Sends a body of a kind, anew each time, and adds the gaps to the report. Gives what is beyond the bound."""
    samples, statuses = list[dict[str, float]](), list[int]()
    for number in range(num_repeats):
        path, body = KINDS[kind](random.Random(number))
        status, pause_s = asyncio.run(_answered(server, path, json.dumps(body).encode()))
        statuses.append(status)
        samples.append({key: 1e3 * value for key, value in server.longest().items()} | {"pause_s": 1e3 * pause_s})
    names = {"turn_s": "turn of the front", "engine_turn_s": "turn of the engine", "gap_s": "late", "pause_s": "stream"}
    for key, name in names.items():
        report.add(f"{kind}: {name}", "ms", [sample[key] for sample in samples], status=max(statuses))
    found = {names[key]: min(sample[key] for sample in samples) for key in ("turn_s", "engine_turn_s", "gap_s")}
    return [
        f"{kind}: {name} was {value:.0f} ms; bound {MOST_MS:g} ms" for name, value in found.items() if value > MOST_MS
    ]


def measure_kinds(report: Report, kinds: Collection[str], num_repeats: int) -> list[str]:
    """Measures bodies of these kinds, each with a server of its model. Gives what is beyond the bound."""
    problems: list[str] = []
    for flavour, makes in FLAVOURS.items():
        if names := [make.__name__ for make in makes if make.__name__ in kinds]:
            with gap_server(flavour) as server:
                problems += [problem for name in names for problem in measure(report, server, name, num_repeats)]
    return problems


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gaps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(KINDS), help=f"the kinds of bodies, of {', '.join(KINDS)}")
    parser.add_argument("--repeats", type=int, default=3, help="how often each body is sent")
    parser.add_argument("--output", type=Path, help="JSON file for all samples")
    options = parser.parse_args(arguments)
    kinds = options.only.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--only knows {', '.join(KINDS)}, but got {', '.join(sorted(unknown))}")
    report = Report("bench.gaps", arguments, options.output, context_len=CONTEXT_LEN)
    problems = measure_kinds(report, kinds, options.repeats)
    report.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
