"""Servers over HTTP with the loads of the plan: `jsg serve`, and vLLM beside it with the same requests.

Both get the same directory: the plan's shape without weights, which both make themselves, and a tokenizer in which
every id is a word of its own. Prompts are ids, so both compute the same number of tokens.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.device.events import Part
from bench.device.plan import Load
from bench.report import ROOT
from jsg.free_ports import free_ports

POLL_S = 0.25
SETTLE_S = 90
"""Seconds that a server may compile in its background before the loads begin all the same."""
ENDING_S = 20
ALONE_REQUESTS = 4
SPACE = "\u2581"
"""The mark of a space in a piece of a tokenizer."""


def jsg(part: Part) -> None:
    """Measures `jsg serve`: its start, one client, and the loads."""
    plan = part.plan
    options = ["--dtype", plan.dtype, "--max-running-requests", str(plan.max_running)]
    options += ["--context-length", str(_longest(part)), "--max-total-tokens", str(plan.engine_pool_tokens)]
    with _server(part, [sys.executable, "-m", "jsg.cli", "serve", "--load-format", "dummy", *options], "jsg") as url:
        _settle(url, part.left_s / 3)
        _measure_loads(part, url, "jsg")


def vllm(part: Part) -> None:
    """Measures vLLM in the same way. Its prefix cache is on, as it comes."""
    plan = part.plan
    options = ["--load-format", "dummy", "--dtype", plan.dtype, "--max-num-seqs", str(plan.max_running)]
    options += ["--max-model-len", str(_longest(part))]
    command = [part.interpreters["vllm"], "-m", "vllm.entrypoints.cli.main", "serve", *options]
    with _server(part, command, "vllm") as url:
        part.header(vllm=_get(f"{url}/version").get("version", "unknown"))
        _measure_loads(part, url, "vllm")


def _longest(part: Part) -> int:
    return min(part.plan.engine_context + 64, part.plan.shape["max_position_embeddings"])


def write_words(directory: Path, vocab_size: int) -> None:
    """Writes a tokenizer of one word for each id. A server whose tokenizer lacked an id might send nothing for it."""
    words = {f"{SPACE}w{number}": number for number in range(vocab_size)}
    spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    model = {"type": "WordLevel", "vocab": words, "unk_token": f"{SPACE}w0"}
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    tokenizer = rest | {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": spaces,
        "decoder": spaces,
        "model": model,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": f"{SPACE}w0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@contextlib.contextmanager
def _server(part: Part, command: Sequence[str], name: str) -> Iterator[str]:
    """The address of a server that answers. The time until then is a figure. What it says goes to standard error."""
    log = part.folder / f"{name}.log"
    directory = part.model_directory()
    write_words(directory, part.plan.shape["vocab_size"])
    port = free_ports()
    at = {"jsg": ["--model-path", str(directory)], "vllm": [str(directory)]}[name]
    environment = {key: value for key, value in os.environ.items() if name == "jsg" or key != "PYTHONPATH"}
    begin = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *at, "--host", "127.0.0.1", "--port", str(port)],
            env=environment | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            cwd=ROOT if name == "jsg" else part.folder,
            stdout=file,
            stderr=file,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log)
        part.add(f"{name} over HTTP, until ready", "s", [time.monotonic() - begin], kind="http-start", server=name)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        process.kill()
        process.wait()
        sys.stderr.write(log.read_text(errors="replace"))


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Returns when the server answers. The time limit of the part ends the waiting."""
    while True:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").split("\n")
            said = (
                [line for line in lines if "error" in line.lower()] or [line for line in lines if line.strip()] or [""]
            )
            raise RuntimeError(f"the server ended with status {process.returncode}: {said[-1].strip()}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
            return
        time.sleep(POLL_S)


def _settle(url: str, seconds: float) -> None:
    """Waits until jsg has compiled what it compiles in its background, because that slows requests down."""
    end = time.monotonic() + min(seconds, SETTLE_S)
    while time.monotonic() < end and _get(f"{url}/get_server_info")["internal_states"][0]["num_programs_pending"]:
        time.sleep(POLL_S)


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


def _measure_loads(part: Part, url: str, server: str) -> None:
    plan = part.plan
    alone = Load(1, 0, plan.concurrent.own_len, plan.alone_tokens)
    for name, load in {"alone": alone, "concurrent": plan.concurrent, "shared": plan.shared}.items():
        part.attempt(f"{server} over HTTP, {name}", functools.partial(_measure_load, part, url, server, name, load))


def _measure_load(part: Part, url: str, server: str, name: str, load: Load) -> None:
    """Sends twice as many requests as the load has, with as many clients, after as many that are not counted."""
    file = part.folder / f"{server}-{name}.json"
    lengths = {"--unique-len": load.own_len, "--output-len": load.output_len, "--concurrency": load.num_requests}
    lengths |= {"--num-requests": max(ALONE_REQUESTS, 2 * load.num_requests), "--warmup-requests": load.num_requests}
    workload = "shared-prefix" if load.shared_len else "random"
    lengths |= {"--groups": 1, "--shared-len": load.shared_len} if load.shared_len else {"--range-ratio": 1}
    command = ["--base-url", url, "--workload", workload, "--ignore-eos", "--continuous-usage", "--output", str(file)]
    command += ["--prompt-ids", "--vocab-size", str(part.plan.shape["vocab_size"])]
    for option, value in lengths.items():
        command += [option, str(value)]
    done = subprocess.run([sys.executable, "-m", "bench.serving", *command], cwd=ROOT, stdout=sys.stderr)
    if not file.exists():
        raise RuntimeError(f"bench.serving ended with status {done.returncode}")
    found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["summary"]
    if found["complete"] != found["requests"]:
        raise RuntimeError(f"{found['requests'] - found['complete']} requests have no whole answer: {found['errors']}")
    facts = {"server": server, "load": name, "tokens_per_s": found["output_tokens_per_s"]}
    facts |= {"ttft_p50_ms": found["ttft_ms"]["p50"], "tpot_p50_ms": found["tpot_ms"]["p50"]}
    part.add(f"{server} over HTTP, {name} load", "tokens/s", [found["output_tokens_per_s"]], kind="http", **facts)
