"""How long `jsg serve` takes from the start of its process to its first answer, with an empty compile cache and again.

    python -m bench.start [--rounds N] [--output FILE]

Wall time, so it wants a quiet machine; the load stands beside the figures. The model is the embedded one.
"""

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from bench.report import Report

LIMIT_S = 300
QUESTION = {"text": "<|user|>What is the capital of France?<|end|><|assistant|>", "sampling_params": {"temperature": 0}}


def first_answer_s(cache: Path) -> float:
    """Seconds from the start of a server to its first answer; it is stopped again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jsg.cli", "serve", "--port", str(port), "--compilation-cache-dir", str(cache)]
    started = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as http:
            while not _has_answered(http):
                assert server.poll() is None, "the server ended before it answered"
                assert time.monotonic() - started < LIMIT_S, "the server does not answer"
                time.sleep(0.05)
        return time.monotonic() - started
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def _has_answered(http: httpx.Client) -> bool:
    try:
        return http.post("/generate", json=QUESTION).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    report = Report("bench.start", arguments, options.output, model="tiny")
    cold, warm = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:  # mode 0700, as the cache must be
            cold.append(first_answer_s(Path(cache)))
            warm.append(first_answer_s(Path(cache)))
    report.add("first answer, empty compile cache", "s wall", cold, target="<= 30")
    report.add("first answer, full compile cache", "s wall", warm, target="<= 12")
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
