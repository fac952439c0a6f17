"""Every compiled program of the engine, and the only place that calls `jax.jit`.

Programs are lowered before the engine is ready (tracing holds the GIL) and compiled then or, for those that have a
larger one to stand in for them, in a thread afterwards (compiling does not). Calls go to the compiled program itself,
so a call can never trace or compile: after warm-up both counters stand still.
"""

import logging
import os
import stat
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jsg.errors import ConfigError, ForbiddenCompileError

logger = logging.getLogger(__name__)

CACHE_BYTES = 4 * 2**30
"""Size of the persistent cache. Only a bounded one is locked, so that two engines may share it."""
COMPILE_THREADS = 2
"""XLA compiles without the GIL, so two programs at a time use the two cores of the smallest machine we care for."""


class Executables:
    """Programs by name: declared, lowered, compiled, called.

    Attributes:
        num_lowered: Traces so far.
    """

    def __init__(self, *, forbid_compile: bool):
        self.num_lowered = 0
        self._forbid_compile = forbid_compile
        self._is_sealed = False
        self._lowered: dict[Hashable, jax.stages.Lowered] = {}
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()

    def lower(self, name: Hashable, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> None:
        """Traces `fn` for arguments like `args` (arrays or their shapes); the donated ones are reused for its results.

        A name that was lowered before is left as it is.

        Raises:
            ForbiddenCompileError: After `seal` under `--forbid-compile`.
        """
        if name in self._lowered:
            return
        if self._is_sealed and self._forbid_compile:
            raise ForbiddenCompileError(f"{name} would be compiled after warm-up, which --forbid-compile forbids")
        self._lowered[name] = jax.jit(fn, donate_argnums=donate).lower(*args)
        self.num_lowered += 1

    def compile(self, names: Iterable[Hashable], report: Callable[[Hashable], None] = lambda name: None) -> None:
        """Compiles lowered programs now, `COMPILE_THREADS` at a time; `report` is told of each that is done."""
        missing = [name for name in names if name not in self._compiled]
        with ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="compile") as pool:
            for name in pool.map(self._compile_one, missing):
                report(name)

    def clear(self) -> None:
        """Drops every program, so that they can be lowered for other shapes."""
        self._lowered.clear()
        self._compiled.clear()

    def compile_rest_in_background(self) -> None:
        """Compiles what is lowered but not compiled in a thread, in the order it was lowered."""
        rest = [name for name in self._lowered if name not in self._compiled]
        if rest:
            self._thread = threading.Thread(target=self._compile_rest, args=(rest,), name="compile", daemon=True)
            self._thread.start()

    def seal(self) -> None:
        """Warm-up is over."""
        self._is_sealed = True

    def names(self) -> list[Hashable]:
        """Everything that was lowered, in that order."""
        return list(self._lowered)

    def is_ready(self, name: Hashable) -> bool:
        """Whether the program can be called."""
        return name in self._compiled

    @property
    def num_compiled(self) -> int:
        """Compilations so far, those found in the persistent cache included."""
        return len(self._compiled)

    @property
    def num_pending(self) -> int:
        """Programs that are lowered but not compiled: it falls to 0, and stays above it where a compile failed."""
        return len(self._lowered) - len(self._compiled)

    def output_shape(self, name: Hashable) -> Any:
        """Shapes and types of what a lowered program returns."""
        return self._lowered[name].out_info

    def compiled(self, name: Hashable) -> jax.stages.Compiled:
        """The program itself, for those who read its memory analysis."""
        return self._compiled[name]

    def __call__(self, name: Hashable, *args: Any) -> Any:
        """Runs a compiled program."""
        return self._compiled[name](*args)

    def close(self) -> None:
        """Ends the background thread after the program it is compiling."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    def _compile_one(self, name: Hashable) -> Hashable:
        self._compiled[name] = self._lowered[name].compile()
        return name

    def _compile_rest(self, names: list[Hashable]) -> None:
        for name in names:
            if self._is_closing.is_set():
                return
            try:
                self._compile_one(name)
            except Exception:  # a larger program stands in for it, so it costs speed and not answers
                logger.exception("compiling %s in the background failed", name)


def use_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs in an owner-only directory: who can write there can run code as us.

    Args:
        directory: None for `~/.cache/jsg/xla`.

    Raises:
        ConfigError: The directory belongs to somebody else, or others can write to it.
    """
    path = Path(directory) if directory else Path.home() / ".cache" / "jsg" / "xla"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            "--compilation-cache-dir must be yours and closed to everybody else, because what lies there is run as "
            "code; change its owner and mode (chmod 700) or choose another"
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
