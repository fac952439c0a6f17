"""Compiles programs of an engine for TPUs that are not here: `python -m bench.tpu.compiling`, a process of its own.

libtpu reads its flags once in a process, and the folder of a dump is one of them. Tasks come on standard input as JSON.
What is compiled is kept in a folder under the digest of what was lowered, so that nothing is compiled twice.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.compiled import Model, make_model
from bench.report import ROOT
from bench.tpu.program import Loop, loops
from jsg.engine.device.programs import GREEDY

DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles"

DIGEST_CHARS = 32


@dataclass(frozen=True, slots=True)
class Task:
    """A program of a model with so many layers: ("decode", rows), ("extend", tokens) or ("sample", rows)."""

    chip: str
    shape: dict[str, Any]
    num_devices: int
    layers: int
    program: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled program.

    Attributes:
        hlo: The optimised program.
        kernels: By the name of the operation, the loops of each kernel.
        page_size: KV slots of a page.
        temporary_bytes: See `bench.compiled.Program`.
    """

    hlo: str
    kernels: dict[str, list[Loop]]
    page_size: int
    temporary_bytes: int


def compile_all(tasks: Sequence[Task], kept: Path) -> list[Compiled]:
    """Compiles each task, or finds it in the folder, in one other process.

    Raises:
        RuntimeError: libtpu is not installed, or a program does not compile; the process has written why.
    """
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": DUMP.format(dump)}
        task = {"kept": str(kept.resolve()), "dump": dump, "tasks": [asdict(each) for each in tasks]}
        command = [sys.executable, "-m", "bench.tpu.compiling"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, input=json.dumps(task) + "\n", stdout=subprocess.PIPE, text=True
        )
    digests = [line for line in done.stdout.splitlines() if re.fullmatch(rf"[0-9a-f]{{{DIGEST_CHARS}}}", line)]
    if done.returncode or len(digests) != len(tasks):
        raise RuntimeError(f"compiling ended with status {done.returncode}")
    return [_read(kept, digest) for digest in digests]


def _read(kept: Path, digest: str) -> Compiled:
    """What a folder has of a program."""
    facts = json.loads((kept / f"{digest}.json").read_text(encoding="utf-8"))
    kernels = {name: [Loop(*each) for each in found] for name, found in facts["kernels"].items()}
    return Compiled((kept / f"{digest}.hlo").read_text(encoding="utf-8"), **facts | {"kernels": kernels})


def _main() -> None:
    task = json.loads(sys.stdin.readline())
    kept, dump = Path(task["kept"]), Path(task["dump"])
    versions = [importlib.metadata.version(name) for name in ("jax", "libtpu")]
    for fields in task["tasks"]:
        model, name = _program(Task(**fields))
        lowered = model.executables._lower_one(name)
        assert lowered is not None, "it was not compiled before"
        text = "\n".join([fields["chip"], *versions, lowered.as_text()])
        digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]
        if not (kept / f"{digest}.json").exists():
            _keep(model, name, kept, dump, digest)
        print(digest, flush=True)


def _keep(model: Model, name: Hashable, kept: Path, dump: Path, digest: str) -> None:
    program, kernels = model.program(name), {}
    for file in dump.iterdir():
        named = re.fullmatch(r"\d+-(.*)-\d+-final_bundles.txt", file.name)
        if named and f"%{named[1]} = " in program.hlo:
            found = loops(file.read_text(encoding="utf-8", errors="replace"))
            kernels[named[1]] = [(each.depth, each.bundles) for each in found]
        file.unlink()
    (kept / f"{digest}.hlo").write_text(program.hlo, encoding="utf-8")
    facts = {"kernels": kernels, "temporary_bytes": program.temporary_bytes, "page_size": model.settings.page_size}
    (kept / f"{digest}.json").write_text(json.dumps(facts), encoding="utf-8")


def _program(task: Task) -> tuple[Model, Hashable]:
    """The model with all its programs, of which none is compiled, and the name of this one."""
    model = make_model(task.shape | {"num_hidden_layers": task.layers}, task.chip, tp_size=task.num_devices)
    kind, size = task.program
    if kind == "sample":
        return model, ("sample", size, GREEDY)
    buckets = model.settings.buckets
    keys = buckets.decode if kind == "decode" else buckets.extend
    return model, ("forward", next(key for key in keys if key.num_tokens >= size))


if __name__ == "__main__":
    _main()
