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
import base64
import contextlib
import io
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from bench import null_model
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
SAMPLING = {"max_new_tokens": 4, "ignore_eos": True}
BYTES = 4_000_000  # of a large body: the server's limit is a little more

Post = tuple[str, dict[str, Any]]
Make = Callable[[random.Random], Post]


def ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(3, 1400), k=count)


def words(rng: random.Random, num_chars: int) -> str:
    return "".join(rng.choices("abcdefgh     ", k=num_chars))


def answers(rng: random.Random) -> Post:
    """128 answers to a prompt of 65 000 ids."""
    return "/generate", {"input_ids": ids(rng, 65_000), "sampling_params": SAMPLING | {"n": 128}}


def long(rng: random.Random) -> Post:
    """One prompt of 131 000 ids."""
    return "/generate", {"input_ids": ids(rng, 131_000), "sampling_params": SAMPLING}


def prompts(rng: random.Random) -> Post:
    """A list of 1024 prompts of 700 ids."""
    return "/generate", {"input_ids": [ids(rng, 700) for _ in range(1024)], "sampling_params": SAMPLING}


def short_prompts(rng: random.Random) -> Post:
    """A list of 1024 prompts of three ids in OpenAI's form."""
    return "/v1/completions", {"prompt": [ids(rng, 3) for _ in range(1024)], "max_tokens": 4}


def texts(rng: random.Random) -> Post:
    """A list of 1024 texts of 3 500 characters."""
    return "/generate", {"text": [words(rng, 3500) for _ in range(1024)], "sampling_params": SAMPLING}


def text(rng: random.Random) -> Post:
    """A text of 80 000 characters."""
    return "/v1/completions", {"prompt": words(rng, 80_000), "max_tokens": 4}


def refused_text(rng: random.Random) -> Post:
    """A text of four million characters, which is too long."""
    return "/v1/completions", {"prompt": words(rng, BYTES), "max_tokens": 4}


def chat(rng: random.Random) -> Post:
    """32 answers to a chat of 80 000 characters."""
    message = {"role": "user", "content": words(rng, 80_000)}
    return "/v1/chat/completions", {"messages": [message], "max_tokens": 4, "n": 32}


def echoed(rng: random.Random) -> Post:
    """128 answers, each with its prompt of 8 000 ids in front."""
    return "/v1/completions", {"prompt": ids(rng, 8000), "max_tokens": 4, "n": 128, "echo": True}


def scored_echo(rng: random.Random) -> Post:
    """A prompt of 60 000 ids, echoed with five alternatives for each."""
    return "/v1/completions", {"prompt": ids(rng, 60_000), "max_tokens": 4, "echo": True, "logprobs": 5}


def scored(rng: random.Random) -> Post:
    """The log-probabilities of a prompt of 65 000 ids with five alternatives for each."""
    reports = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5}
    return "/generate", {"input_ids": ids(rng, 65_000), "sampling_params": SAMPLING, **reports}


def scored_answers(rng: random.Random) -> Post:
    """The log-probabilities of a prompt of 4 000 ids for 128 answers."""
    reports = {"return_logprob": True, "logprob_start_len": 0}
    return "/generate", {"input_ids": ids(rng, 4000), "sampling_params": SAMPLING | {"n": 128}, **reports}


def biased(rng: random.Random) -> Post:
    """128 answers to a prompt of 65 000 ids with penalties and a bias of 1 024 ids."""
    bias = {str(token): 1.0 for token in range(1024)}
    params = SAMPLING | {"n": 128, "repetition_penalty": 1.1, "logit_bias": bias}
    return "/generate", {"input_ids": ids(rng, 65_000), "sampling_params": params}


def score(rng: random.Random) -> Post:
    """A query of 8 000 ids before 1 000 items."""
    return "/v1/score", {"query": ids(rng, 8000), "items": [ids(rng, 8) for _ in range(1000)], "label_token_ids": [5]}


def score_texts(rng: random.Random) -> Post:
    """A query of 8 000 characters before 1 000 items."""
    query, items = words(rng, 8000), [words(rng, 50) for _ in range(1000)]
    return "/v1/score", {"query": query, "items": items, "label_token_ids": [5]}


def score_long_texts(rng: random.Random) -> Post:
    """A query of 100 000 characters before 80 items."""
    query, items = words(rng, 100_000), [words(rng, 50) for _ in range(80)]
    return "/v1/score", {"query": query, "items": items, "label_token_ids": [5]}


def scored_chat(_rng: random.Random) -> Post:
    """Eight answers of 3 000 tokens with 20 alternatives for each."""
    message = {"role": "user", "content": "hi"}
    asked = {"max_tokens": 3000, "ignore_eos": True, "n": 8, "logprobs": True, "top_logprobs": 20}
    return "/v1/chat/completions", {"messages": [message], **asked}


def tokenized(rng: random.Random) -> Post:
    """The tokens of 1024 texts of 3 500 characters."""
    return "/tokenize", {"prompt": [words(rng, 3500) for _ in range(1024)]}


def choices(rng: random.Random) -> Post:
    """A choice among 512 texts behind 10 000 characters."""
    return "/select", {"prompt": words(rng, 10_000), "choices": [f"choice {number}" for number in range(512)]}


def stops(rng: random.Random) -> Post:
    """1 000 prompts, each with 16 stop strings of 250 characters."""
    params = SAMPLING | {"stop": [words(rng, 250) for _ in range(16)]}
    return "/generate", {"text": [words(rng, 100) for _ in range(1000)], "sampling_params": params}


def wrong_ids(rng: random.Random) -> Post:
    """700 000 ids, of which the last is wrong."""
    return "/generate", {"input_ids": [*ids(rng, 700_000), -1], "sampling_params": SAMPLING}


def program(rng: random.Random) -> Post:
    """A program with 256 branches behind a text of 100 000 characters."""
    import jsg as sgl  # here: only this needs it

    @sgl.function
    def branches(s: Any) -> None:
        s += words(rng, 100_000)
        forks = s.fork(256)
        for number in range(256):
            forks[number] += f" {number}"
            forks[number] += sgl.gen("said", max_tokens=4)
        forks.join()

    return "/v1/programs", {"graph": json.loads(branches.compile().to_json())}


def pictures(rng: random.Random) -> Post:
    """64 pictures of 340 x 340 pixels in the body, 22 MB as files."""
    return _asked_about(_picture(340, 340, rng) for _ in range(64))


def large_pictures(rng: random.Random) -> Post:
    """Four pictures of 5 700 x 5 700 pixels in the body, of which little is a file."""
    return _asked_about(itertools.repeat(_picture(5700, 5700, None), 4))


def _asked_about(urls: Iterable[str]) -> Post:
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}
    return "/v1/chat/completions", {"messages": [message], "max_tokens": 4}


def _picture(width: int, height: int, rng: random.Random | None) -> str:
    """A picture as a data: URL, of noise or of one colour."""
    from PIL import Image  # here: only these kinds need it

    size = width * height * 3
    raw = bytes(size) if rng is None else rng.randbytes(size)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), raw).save(file, "png", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def embeddings(rng: random.Random) -> Post:
    """1 024 texts of 3 500 characters, whose vectors have 4 096 numbers."""
    return "/v1/embeddings", {"input": [words(rng, 3500) for _ in range(1024)]}


def short_embeddings(rng: random.Random) -> Post:
    """1 024 inputs of three ids, whose vectors are sent as base64."""
    return "/v1/embeddings", {"input": [ids(rng, 3) for _ in range(1024)], "encoding_format": "base64"}


def rerank(rng: random.Random) -> Post:
    """A query of 4 000 characters and 1 000 documents of 3 500."""
    return "/v1/rerank", {"query": words(rng, 4000), "documents": [words(rng, 3500) for _ in range(1000)]}


GENERATES, EMBEDS, JUDGES, SEES = "generates", "embeds", "judges", "sees"
FLAVOURS: dict[str, tuple[Make, ...]] = {
    GENERATES: (
        *(answers, long, prompts, short_prompts, texts, text, refused_text, chat, echoed, scored_echo, scored),
        *(scored_answers, scored_chat, biased, score, score_texts, score_long_texts, tokenized, choices, stops),
        *(wrong_ids, program),
    ),
    EMBEDS: (embeddings, short_embeddings),
    JUDGES: (rerank,),
    SEES: (pictures, large_pictures),
}
"""The kinds of bodies, by the model that answers them."""
KINDS = {make.__name__: make for makes in FLAVOURS.values() for make in makes}
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
