"""Measures what a few large posts of one key do to everybody else: `/health`, and the chat of another key.

    python -m bench.posts [--only texts,answers,...,mixed] [--posts 20] [--busy 2]

The server is a real one of the embedded model, and so many processes beside it do nothing but use a core. Each chat is
new to the cache, so that it has no better place in the queue than the posts.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

import jsg as sgl
from bench.front import probed
from bench.report import Report
from bench.served import Served, served
from bench.serving.client import open_session
from bench.serving.statistics import percentile

TARGET_HEALTH_S = 0.5
TARGET_CHAT_S = 3.0
LIMIT_S = 600
PAUSE_S = 0.2  # between two chats
SAMPLING = {"max_new_tokens": 16}

Post = tuple[str, dict[str, Any]]


def texts(_: int) -> Post:
    """A list of 1024 prompts."""
    return "/generate", {"text": ["hello"] * 1024, "sampling_params": SAMPLING | {"stop": ["x" * 500, "y" * 500]}}


def answers(_: int) -> Post:
    """128 answers to each of eight prompts."""
    return "/generate", {"text": ["hello"] * 8, "sampling_params": SAMPLING | {"n": 128}}


def completions(_: int) -> Post:
    """The same in OpenAI's form."""
    return "/v1/completions", {"prompt": ["hello"] * 1024, "max_tokens": 16}


def choices(number: int) -> Post:
    """A choice among 512 texts."""
    return "/select", {"prompt": "hello", "choices": [f"choice {number} of {index}" for index in range(512)]}


def programs(_: int) -> Post:
    """A program of three forks with 256 branches each."""
    return "/v1/programs", {"graph": json.loads(_branches.compile().to_json())}


def long_texts(number: int) -> Post:
    """A text of 3.5 MB."""
    return "/tokenize", {"prompt": f"hello {number} " * 400_000}


def bodies(_: int) -> Post:
    """A body of 700 000 numbers."""
    return "/detokenize", {"tokens": [100] * 700_000}


def schemas(number: int) -> Post:
    """A schema of 1 000 properties, each of which is nested."""
    shape: dict[str, Any] = {"type": "string"}
    for depth in range(4):
        shape = {"type": "object", "properties": {f"p{depth}": shape}}
    shape = {"type": "object", "properties": {f"n{number}_{index}": shape for index in range(1000)}}
    return "/generate", {"text": "hello", "sampling_params": SAMPLING | {"json_schema": shape}}


def short(number: int) -> Post:
    """One short answer. With `--posts 1000` this is a burst of connections."""
    return "/generate", {"text": f"hello {number}", "sampling_params": SAMPLING}


SINGLE = (texts, answers, completions, choices, programs, long_texts, bodies, schemas, short)


def mixed(number: int) -> Post:
    """One of each in turn."""
    return SINGLE[number % len(SINGLE)](number)


KINDS: dict[str, Callable[[int], Post]] = {make.__name__: make for make in (*SINGLE, mixed)}


@sgl.function
def _branches(s: sgl.ProgramState) -> None:
    s += "hello"
    for _ in range(3):
        forks = s.fork(256)
        for number in range(256):
            forks[number] += f" {number}"
            forks[number] += sgl.gen("said", max_tokens=4)
        forks.join()


def measure(report: Report, kind: str, num_posts: int, num_busy: int) -> None:
    """Sends the posts of a kind at once, with the key of alice, while bob chats."""
    posts = [(path, json.dumps(body).encode()) for path, body in map(KINDS[kind], range(num_posts))]
    arguments = ["serve", "--port", "0", "--api-key", "alice", "--api-key", "bob"]
    with served(arguments) as server, _busy(num_busy):
        asyncio.run(_chats(server.url, 5))
        before = server.usage()["front"].cpu_s
        with probed(server.url) as delays:
            statuses, chats, wall_s = asyncio.run(_attack(server, posts))
        cpu_s = server.usage()["front"].cpu_s - before
    name = f"{num_posts} posts of kind {kind}"
    facts = {"wall_s": wall_s, "front_cpu_s": cpu_s, "statuses": {str(s): statuses.count(s) for s in set(statuses)}}
    for what, samples, target_s in (
        ("/health", delays["answered"], TARGET_HEALTH_S),
        ("a chat of another key", chats, TARGET_CHAT_S),
    ):
        p99, most = percentile(samples, 99), max(samples)
        report.add(f"{name}: {what}, p99", "s", [p99], target=f"<= {target_s:g}", most=most, **facts)


@contextlib.contextmanager
def _busy(number: int) -> Iterator[None]:
    """Processes that use a core each."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


async def _attack(server: Served, posts: list[tuple[str, bytes]]) -> tuple[list[int], list[float], float]:
    """The statuses of the posts, how long each chat beside them took, and how long the posts took."""
    async with open_session(LIMIT_S) as session:

        async def post(path: str, body: bytes) -> int:
            headers = {"Authorization": "Bearer alice", "Content-Type": "application/json"}
            async with session.post(server.url + path, data=body, headers=headers) as response:
                await response.read()
                return response.status

        chatting = asyncio.create_task(_chats(server.url, None))
        began = time.perf_counter()
        statuses = await asyncio.gather(*(post(path, body) for path, body in posts))
        wall_s = time.perf_counter() - began
        assert 200 in statuses, "no post was answered"
        chatting.cancel()
        return statuses, await chatting, wall_s


async def _chats(url: str, number: int | None) -> list[float]:
    """How long each chat took; so many, or until it is cancelled."""
    took_s: list[float] = []
    async with open_session(LIMIT_S) as session:
        with contextlib.suppress(asyncio.CancelledError):
            for index in itertools.count() if number is None else range(number):
                took_s.append(await _chat(session, url, f"{time.time_ns()} {index}"))
                await asyncio.sleep(PAUSE_S)
    return took_s


async def _chat(session: aiohttp.ClientSession, url: str, text: str) -> float:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    began = time.perf_counter()
    headers = {"Authorization": "Bearer bob"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()
    return time.perf_counter() - began


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.posts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(KINDS), help=f"the kinds of posts, of {', '.join(KINDS)}")
    parser.add_argument("--posts", type=int, default=20, help="number of posts that come at once")
    parser.add_argument("--busy", type=int, default=2, help="number of cores that are kept busy")
    parser.add_argument("--output", type=Path, help="JSON file for all samples")
    options = parser.parse_args(arguments)
    kinds = options.only.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--only knows {', '.join(KINDS)}, but got {', '.join(sorted(unknown))}")
    report = Report("bench.posts", arguments, options.output, model="tiny")
    for kind in kinds:
        measure(report, kind, options.posts, options.busy)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
