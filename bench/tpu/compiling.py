"""Compiles programs of an engine for TPUs that are not here: `python -m bench.tpu.compiling`, a process of its own.

libtpu reads its flags once in a process, and the folder of a dump is one of them. Tasks come on standard input as JSON.
What is compiled is kept in a folder under the digest of what was lowered, so that nothing is compiled twice.
"""

import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax.experimental import pallas

from bench.compiled import Model, make_model
from bench.report import ROOT
from bench.tpu.program import Kernel, Loop, loops
from jsg.engine.device.programs import GREEDY

DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles"

DIGEST_CHARS = 32
PROGRAMS: dict[str, int] = {}
"""Of each kernel that the process has traced for the task."""


@dataclass(frozen=True, slots=True)
class Task:
    """A program of a model with so many layers: ("decode", rows), ("extend", tokens) or ("sample", rows)."""

    target: str
    shape: dict[str, Any]
    num_devices: int
    layers: int
    program: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled program.

    Attributes:
        hlo: The optimised program.
        kernels: By name; those of programs with one layer only, because only these are dumped, which takes longest.
        page_size: KV slots of a page.
        temporary_bytes: See `bench.compiled.Program`.
    """

    hlo: str
    kernels: dict[str, Kernel]
    page_size: int
    temporary_bytes: int


def compile_all(tasks: Sequence[Task], kept: Path) -> list[Compiled]:
    """Compiles each task, or finds it in the folder, in two other processes.

    Raises:
        RuntimeError: libtpu is not installed, or a program does not compile; the process has written why.
    """
    kept.mkdir(parents=True, exist_ok=True)
    halves = [[index for index, each in enumerate(tasks) if (each.layers == 1) is dumps] for dumps in (True, False)]
    with ThreadPoolExecutor(len(halves)) as pool:
        found = pool.map(
            _compile_in_a_process, ([tasks[i] for i in half] for half in halves), (True, False), [kept] * 2
        )
        done = dict(zip(itertools.chain(*halves), itertools.chain(*found), strict=True))
    return [done[index] for index in range(len(tasks))]


def _compile_in_a_process(tasks: Sequence[Task], dumps: bool, kept: Path) -> list[Compiled]:
    with tempfile.TemporaryDirectory() as dump:
        arguments = {"kept": str(kept.resolve()), "dump": dump, "tasks": [asdict(each) for each in tasks]}
        done = subprocess.run(
            [sys.executable, "-m", "bench.tpu.compiling"],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": DUMP.format(dump) if dumps else ""},
            input=json.dumps(arguments) + "\n",
            stdout=subprocess.PIPE,
            text=True,
        )
    digests = [line for line in done.stdout.splitlines() if re.fullmatch(rf"[0-9a-f]{{{DIGEST_CHARS}}}", line)]
    if done.returncode or len(digests) != len(tasks):
        raise RuntimeError(f"compiling ended with status {done.returncode}")
    return [_read(kept, digest) for digest in digests]


def _read(kept: Path, digest: str) -> Compiled:
    """What a folder has of a program."""
    facts = json.loads((kept / f"{digest}.json").read_text(encoding="utf-8"))
    kernels = {
        name: Kernel(each["programs"], tuple(Loop(*loop) for loop in each["loops"]))
        for name, each in facts["kernels"].items()
    }
    return Compiled((kept / f"{digest}.hlo").read_text(encoding="utf-8"), **facts | {"kernels": kernels})


def _main() -> None:
    task = json.loads(sys.stdin.readline())
    kept, dump = Path(task["kept"]), Path(task["dump"])
    _note_programs()
    versions = [importlib.metadata.version(name) for name in ("jax", "libtpu")]
    for fields in task["tasks"]:
        PROGRAMS.clear()
        model, name = _program(Task(**fields))
        lowered = model.executables._lower_one(name)
        assert lowered is not None, "it was not compiled before"
        text = "\n".join([fields["target"], *versions, lowered.as_text()])
        digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]
        if not (kept / f"{digest}.json").exists():
            _keep(model, name, kept, dump, digest)
        print(digest, flush=True)


def _keep(model: Model, name: Hashable, kept: Path, dump: Path, digest: str) -> None:
    program, kernels = model.program(name), {}
    for file in dump.iterdir():
        named = re.fullmatch(r"\d+-([^.]*)\..*-\d+-final_bundles.txt", file.name)
        if named and named[1] in PROGRAMS:
            found = loops(file.read_text(encoding="utf-8", errors="replace"))
            each = {"programs": PROGRAMS[named[1]], "loops": [(loop.depth, loop.bundles) for loop in found]}
            kernels[named[1]] = each
        file.unlink()
    (kept / f"{digest}.hlo").write_text(program.hlo, encoding="utf-8")
    facts = {"kernels": kernels, "temporary_bytes": program.temporary_bytes, "page_size": model.settings.page_size}
    (kept / f"{digest}.json").write_text(json.dumps(facts), encoding="utf-8")


def _note_programs() -> None:
    """Lets every kernel of Pallas that is traced say its name and the number of its programs."""
    call = pallas.pallas_call

    def noting(*arguments: Any, **options: Any) -> Any:
        grid = options["grid_spec"].grid if "grid_spec" in options else options.get("grid", ())
        PROGRAMS[str(options.get("name"))] = math.prod(grid if isinstance(grid, tuple) else (grid,))
        return call(*arguments, **options)

    pallas.pallas_call = noting


def _program(task: Task) -> tuple[Model, Hashable]:
    """The model with all its programs, of which none is compiled, and the name of this one."""
    model = make_model(task.shape | {"num_hidden_layers": task.layers}, task.target, tp_size=task.num_devices)
    kind, size = task.program
    if kind == "sample":
        return model, ("sample", size, GREEDY)
    buckets = model.settings.buckets
    keys = buckets.decode if kind == "decode" else buckets.extend
    return model, ("forward", next(key for key in keys if key.num_tokens >= size))


if __name__ == "__main__":
    _main()
