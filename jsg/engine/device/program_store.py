"""Compiled programs in a folder: `jsg compile` writes it, and a start with `--programs` compiles nothing.

A folder holds the programs of one model for one kind of device, in a file each, and a manifest. The manifest says what
the programs were compiled for. A start that differs in any of this is refused by the name of the difference, because
its programs would be others. Executables are in the form of `jax.experimental.serialize_executable`, which runs code
when it is read. So a folder that others can write to is refused.
"""

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import stat
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jsg.engine.device.memory import MemoryPlan
from jsg.engine.device.pool_sizes import WindowPool
from jsg.errors import ConfigError
from jsg.kernels_pallas import machine_code
from jsg.window import Window

MANIFEST = "manifest.json"
FORMAT = 2
KERNELS = "kernels"
"""The name, among those of programs, of the machine code of the kernels that programs for a CPU call."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramStore:
    """The programs in a folder.

    Attributes:
        directory: The folder.
        conditions: What the programs were compiled for, by the name that a refusal gives.
        plan: The memory plan, whose pool has the size for which the programs were compiled.
        files: For each program, by the text of its name, its file and the SHA-256 of its bytes.
    """

    directory: Path
    conditions: Mapping[str, str]
    plan: MemoryPlan
    files: Mapping[str, tuple[str, str]]

    def check(self, conditions: Mapping[str, str]) -> None:
        """Compares what a start needs with what the programs were compiled for.

        Raises:
            ConfigError: They differ. The message names the first difference.
        """
        for name in {**self.conditions, **conditions}:
            made, asked = self.conditions.get(name, "missing"), conditions.get(name, "missing")
            if made != asked:
                raise ConfigError(
                    f"--programs {self.directory} was compiled for {name} {made}, but this start has {asked}; run jsg "
                    "compile again with the options of this start, or leave --programs out"
                )

    def load_kernels(self) -> None:
        """Makes the kernels known to XLA that programs for a CPU call."""
        if KERNELS in self.files:
            machine_code.register_native(pickle.loads(self._read(KERNELS)))  # see the module's head

    def load(self, name: Hashable, devices: Sequence[Any]) -> jax.stages.Compiled:
        """Reads one program, for these devices to run it together.

        Raises:
            ConfigError: The folder lacks it, or its file was changed.
        """
        executable, in_tree, out_tree = pickle.loads(self._read(repr(name)))  # see the module's head
        return serialize_executable.deserialize_and_load(executable, in_tree, out_tree, execution_devices=devices)

    def _read(self, name: str) -> bytes:
        file, checksum = self.files.get(name, ("", ""))
        problem = "lacks it"
        if file:
            try:
                data = (self.directory / file).read_bytes()
                if hashlib.sha256(data).hexdigest() == checksum:
                    return data
                problem = f"the checksum of {file} is another"
            except OSError as error:
                problem = f"reading {file} gave: {error.strerror}"
        raise ConfigError(
            f"--programs {self.directory} must hold {name} as it was compiled, but {problem}; run jsg compile again"
        )


def save(
    directory: Path,
    programs: Mapping[Hashable, jax.stages.Compiled],
    conditions: Mapping[str, str],
    plan: MemoryPlan,
) -> None:
    """Writes programs to a new folder. It has its name only when it is whole.

    Raises:
        ConfigError: The folder exists, or cannot be written.
    """
    unfinished = directory.with_name(f".{directory.name}.{os.getpid()}")
    contents = {repr(name): pickle.dumps(serialize_executable.serialize(program)) for name, program in programs.items()}
    if kernels := machine_code.native_object_files():
        contents[KERNELS] = pickle.dumps(kernels)
    files: dict[str, tuple[str, str]] = {}
    manifest = {"format": FORMAT, "conditions": dict(conditions), "plan": dataclasses.asdict(plan), "programs": files}
    try:
        unfinished.mkdir(mode=0o700, parents=True)
        for number, (name, data) in enumerate(contents.items()):
            files[name] = f"{number:04}", hashlib.sha256(data).hexdigest()
            (unfinished / files[name][0]).write_bytes(data)
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        unfinished.rename(directory)
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be written: {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_new(directory: Path) -> None:
    """Raises ConfigError where the folder is there already. Nothing that somebody may be using is replaced."""
    if directory.exists():
        raise ConfigError(f"--out {directory} must not exist yet, but it does; remove it or choose another folder")


def open_store(directory: Path) -> ProgramStore:
    """Reads the manifest of a folder.

    Raises:
        ConfigError: It is not a folder of `jsg compile`, or others can write to it.
    """
    problem, store, statuses = "is damaged", None, list[os.stat_result]()
    try:
        statuses = [directory.stat(), (directory / MANIFEST).stat()]  # which has the checksums of all other files
        store = _read_manifest(directory, json.loads((directory / MANIFEST).read_text(encoding="utf-8")))
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):  # no JSON, or no text
        pass
    if store is None:
        raise ConfigError(
            f"--programs must be a folder that jsg compile has written, but {MANIFEST} in {directory} {problem}; run "
            "jsg compile again, or leave --programs out"
        )
    if any(each.st_uid not in (os.getuid(), 0) or stat.S_IMODE(each.st_mode) & 0o022 for each in statuses):
        raise ConfigError(
            f"--programs {directory} must belong to you or to root, and nobody else may write to it, because what lies "
            "there is run as code; change its owner and mode (chmod go-w)"
        )
    return store


def _read_manifest(directory: Path, manifest: Any) -> ProgramStore | None:
    """The store of a manifest, as it was read; None if it has not the form that `save` writes.

    Raises:
        ConfigError: Another version wrote it.
    """
    match manifest:
        case {"format": int(number)} if number != FORMAT:
            raise ConfigError(f"--programs {directory} was written by another version of jsg; run jsg compile again")
        case {"format": int(), "conditions": dict(conditions), "plan": dict(plan), "programs": dict(programs)}:
            plan = {**plan, "windows": _window_pools(plan.get("windows"))}
            types = {field.name: field.type for field in dataclasses.fields(MemoryPlan)} | {"windows": tuple}
            is_plan = {name: type(value) for name, value in plan.items()} == types
            are_files = all(_forms(pair) == [str] * 2 for pair in programs.values())
            if is_plan and are_files and all(isinstance(value, str) for value in conditions.values()):
                files = {name: (file, checksum) for name, (file, checksum) in programs.items()}
                return ProgramStore(directory, conditions, MemoryPlan(**plan), files)
    return None


def _window_pools(found: Any) -> tuple[WindowPool, ...] | None:
    """The pools of layers with a window, as JSON has them; None if they have another form."""
    match found:
        case list() if all(_forms(pool) == [list, int, int] and _forms(pool[0]) == [int, bool] for pool in found):
            return tuple(WindowPool(Window(*window), *sizes) for window, *sizes in found)
    return None


def _forms(value: Any) -> list[type] | None:
    return [type(each) for each in value] if isinstance(value, list) else None
