"""Measures the time and memory to load a model: `python -m bench.load [--rounds N] [--output FILE]`.

A Llama of 500 million random numbers in float32 is written as safetensors and converted with `jsg convert` for one and
for two devices. Each form is loaded on one and on two simulated CPU devices. Every sample is a new process, which has
imported and started JAX before the clock runs, and files are in the page cache. Memory is anonymous memory (RssAnon),
so pages of mapped files do not count. The floor is a process that allocates as much memory and writes it once, from two
threads. It is the time in which the system provides memory; on a virtual machine it depends on the host.
"""

import argparse
import concurrent.futures
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.report import Report
from bench.shapes import LLAMA_500M, LLAMA_SMALL, write_model

CHECKPOINTS = {"safetensors": None, "orbax for 1": 1, "orbax for 2": 2}
DEVICES = (1, 2)
BLOCK_BYTES = 16 * 2**20


def write_safetensors(directory: Path, shape: dict[str, Any]) -> None:
    """Writes random numbers for every tensor of the model, in another process so that this one stays small."""
    import numpy as np
    from safetensors.numpy import save_file

    from jsg.models.config import read_spec
    from jsg.models.loading import abstract_model, checkpoint_shapes

    write_model(directory, shape)
    shapes = checkpoint_shapes(abstract_model(read_spec(directory), np.float32))
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape, np.float32) * np.float32(0.02) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")


class AnonymousPeak:
    """The peak of this process's anonymous memory (RssAnon) inside the `with`, beyond what it had before.

    Attributes:
        num_bytes: The peak in bytes. It is final when the block has ended.
    """

    def __init__(self, interval_s: float = 0.002) -> None:
        self.num_bytes = 0
        self._interval_s = interval_s
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "AnonymousPeak":
        self._before = _anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.wait(self._interval_s):
            self.num_bytes = max(self.num_bytes, _anonymous_bytes() - self._before)


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def load(directory: Path, count: int) -> dict[str, float]:
    """Loads the model once in this process."""
    import jax
    from flax import nnx

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    from jsg.models.config import read_spec
    from jsg.models.loading import load_model
    from jsg.models.tensor_parallel import make_mesh

    config = read_spec(directory).over_devices(count)
    mesh = make_mesh(count)
    jax.block_until_ready(jax.numpy.zeros(3) + 1)
    num_bytes, started = 0, time.monotonic()

    def tell(done: int, total: int, num_read: int) -> None:
        nonlocal num_bytes
        num_bytes = num_read

    with AnonymousPeak(0.005) as peak:
        model = load_model(directory, config, mesh=mesh, dtype="float32", progress=tell)
        seconds = time.monotonic() - started
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(nnx.state(model)) for shard in leaf.addressable_shards)
    return {"seconds": seconds, "bytes": num_bytes, "held": held, "peak": peak.num_bytes}


def touch(num_bytes: int) -> float:
    """The seconds to allocate memory and to write it once."""
    import numpy as np

    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        blocks = list(pool.map(lambda _: np.ones(BLOCK_BYTES, np.uint8), range(num_bytes // BLOCK_BYTES)))
    seconds = time.monotonic() - started
    del blocks
    return seconds


def sample(directory: Path, count: int) -> dict[str, float]:
    """Takes one sample in a new process."""
    command = [sys.executable, "-m", "bench.load", "--load", str(directory), "--devices", str(count)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(report: Report, root: Path, shape: dict[str, Any], rounds: int) -> None:
    source = root / "safetensors"
    subprocess.run([sys.executable, "-m", "bench.load", "--write", str(source), json.dumps(shape)], check=True)
    for name, count in CHECKPOINTS.items():
        if count is not None:
            started = time.monotonic()
            command = [sys.executable, "-m", "jsg.cli", "convert", str(source), str(root / name)]
            subprocess.run([*command, "--tp-size", str(count)], check=True, stderr=subprocess.DEVNULL)
            report.add(f"convert to {name}", "s wall", [time.monotonic() - started])
    cases = [(name, count) for count in DEVICES for name in CHECKPOINTS]
    samples: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    floors = []
    size = (source / "model.safetensors").stat().st_size
    for _ in range(rounds):
        command = [sys.executable, "-m", "bench.load", "--touch", str(size)]
        floors.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        for name, count in cases:
            samples[name, count].append(sample(root / name, count))
    report.add("write as much fresh memory", "s wall", floors)
    for (name, count), found in samples.items():
        best = min(found, key=lambda each: each["seconds"])
        report.add(
            f"load {name} on {count}",
            "s wall",
            [each["seconds"] for each in found],
            target="<= 3",
            gb_per_s=best["bytes"] / 1e9 / best["seconds"],
            held_mib=best["held"] / 2**20,
            peak_beside_it_mib=max(each["peak"] - each["held"] for each in found) / 2**20,
        )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    parser.add_argument("--rounds", type=int, default=5, help="number of samples for each figure")
    parser.add_argument("--small", action="store_true", help="use a small model that loads in a moment")
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--touch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.write:
        write_safetensors(Path(options.write[0]), json.loads(options.write[1]))
        return
    if options.load:
        json.dump(load(options.load, options.devices), sys.stdout)
        return
    if options.touch is not None:
        print(touch(options.touch))
        return
    report = Report("bench.load", arguments, options.output, model="small" if options.small else "500M")
    with tempfile.TemporaryDirectory() as root:
        measure(report, Path(root), LLAMA_SMALL if options.small else LLAMA_500M, options.rounds)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
