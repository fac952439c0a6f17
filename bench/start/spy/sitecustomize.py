"""Records the time of the stages of a start. Python imports this module by itself if its folder is on PYTHONPATH.

Every process of a server then writes a line of JSON for each stage to its own file, in the folder that
BENCH_START_NOTES names. The time of a stage does not include other stages inside it.
"""

import builtins
import functools
import importlib.machinery
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

PROCESSES = {
    "jsg.cli": "front",
    "jsg.engine.child.process": "engine",
    "jsg.engine.child.grammar_process": "grammar process",
    "jsg.engine.child.kernel_process": "kernel process",
}
IMPORTS = "imports"
SHORTEST_IMPORT_S = 0.0005
STAGES = {
    "jsg.engine.front.children": {"EngineChild.spawn": "start of the engine process"},
    "jsg.server.app": {"create_app": "routes"},
    "jsg.server.run": {"_greeting": "ready"},
    "jsg.processing.tokenizer": {"load_tokenizer": "tokenizer"},
    "jsg.constrained.compiler": {"warm": "first grammars"},
    "jsg.constrained.run.kernel_cache": {"fill": "compile kernels"},
    "jsg.engine.grammars.lexicon": {"_load_kernels": "load kernels"},
    "jsg.engine.startup": {"begin": "device", "make_plan": "memory plan", "Settings.make_state": "state"},
    "jsg.models.loading": {"load_model": "weights"},
    "jsg.engine.device.executables": {"Executables._lower_one": "trace", "Executables._compile_one": "compile"},
    "jsg.engine.device.runner": {"ModelRunner.warm_up": "first runs"},
}
"""For each module, the functions and methods that are stages, and the names of these stages."""


class _Stack(threading.local):
    """For each stage that a thread is in, the wall and CPU time of the stages inside it so far."""

    def __init__(self) -> None:
        self.inner: list[list[float]] = []
        self.is_importing = False


class _Notes:
    """Writes the lines of one process."""

    def __init__(self, directory: str, process: str) -> None:
        self._file = open(f"{directory}/{os.getpid()}.jsonl", "a", buffering=1, encoding="utf-8")  # noqa: SIM115 # until the process ends
        self._process = process
        self._stack = _Stack()

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, changed so that it records each call."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            return self._note(stage, 0.0, function, *args, **options)

        return call

    def importing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The import function, changed so that it records imports that are not inside another import."""

        def call(name: str, *args: Any, **options: Any) -> Any:
            if self._stack.is_importing:
                return function(name, *args, **options)
            self._stack.is_importing = True
            try:
                return self._note(IMPORTS, SHORTEST_IMPORT_S, function, name, *args, **options)
            finally:
                self._stack.is_importing = False

        return call

    def _note(self, stage: str, shortest_s: float, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        inner = self._stack.inner
        inner.append([0.0, 0.0])
        start, cpu = time.monotonic(), time.thread_time()
        try:
            return function(*args, **options)
        finally:
            wall_s, cpu_s = time.monotonic() - start, time.thread_time() - cpu
            inner_wall_s, inner_cpu_s = inner.pop()
            if wall_s >= shortest_s:
                if inner:
                    inner[-1][0] += wall_s
                    inner[-1][1] += cpu_s
                line = {"process": self._process, "stage": stage, "start": start, "end": start + wall_s}
                line |= {"wall_s": wall_s - inner_wall_s, "cpu_s": cpu_s - inner_cpu_s}
                self._file.write(json.dumps(line) + "\n")


class _Finder:
    """Finds the modules with stages as Python does, and makes their stages record calls once they are loaded."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        stages = STAGES.get(name)
        spec = None if stages is None else importlib.machinery.PathFinder.find_spec(name, path, target)
        if stages is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            for place, stage in stages.items():
                *owners, attribute = place.split(".")
                owner = functools.reduce(getattr, owners, module)
                given = vars(owner)[attribute]
                function = self._notes.timed(stage, getattr(owner, attribute))
                setattr(owner, attribute, staticmethod(function) if isinstance(given, classmethod) else function)

        spec.loader.exec_module = load_and_wrap
        return spec


def _begin() -> None:
    directory = os.environ.get("BENCH_START_NOTES")
    process = next((PROCESSES[word] for word in sys.orig_argv if word in PROCESSES), None)
    if directory is None or process is None:
        return
    notes = _Notes(directory, process)
    sys.meta_path.insert(0, _Finder(notes))
    builtins.__import__ = notes.importing(builtins.__import__)


_begin()
