"""The folder of compiled kernels, which a process of its own fills while an engine starts."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import final

from jsg.config import EngineConfig
from jsg.constrained.jit import default_kernel_cache, use_kernel_cache
from jsg.constrained.run import kernel_cache
from jsg.engine.child.kernel_process import fill_elsewhere
from jsg.engine.grammars.begun import Begun
from jsg.engine.private_directory import (
    PROGRAMS_WHY,
    compilation_cache_path,
    private_directory,
    temporary_directory,
    why_unwritable,
)
from jsg.errors import ConfigError

logger = logging.getLogger(__name__)

KERNEL_DIRECTORY = "numba"


@final
class KernelFolder:
    """Fills a folder with the kernels of grammars, unless they are there. Threads may share it.

    The kernels are there before the engine is ready: on a busy machine they may take a minute, for which no client of
    a request with a grammar would wait.
    """

    def __init__(self, cache_directory: Path | None):
        """Begins nothing yet.

        Args:
            cache_directory: The owner-only directory of compiled programs, in which kernels get a directory of their
                own. With None they lie beside Python's own compiled files.
        """
        self._directory = default_kernel_cache() if cache_directory is None else _kernel_directory(cache_directory)
        self._temporary = contextlib.ExitStack()
        self._filling = Begun("kernels", self._run)
        self._is_closing = threading.Event()

    def begin(self) -> None:
        """Starts to fill the folder in a thread, if nobody has."""
        self._filling.begin()

    def wait(self) -> Path | None:
        """The folder, once all kernels are in it; None where it cannot have them, or this was closed."""
        return self._filling.result()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Has this process load its kernels from the folder. A temporary one goes with the context."""
        with self._temporary:
            use_kernel_cache(self.wait())
            yield

    def close(self) -> None:
        """Ends what fills the folder."""
        self._is_closing.set()

    def _run(self) -> Path | None:
        try:
            return self._fill()
        except Exception:
            logger.exception("the folder for the kernels of grammars could not be filled")
            return None

    def _fill(self) -> Path | None:
        """As `wait`. If nothing can be kept, the folder is a temporary one, so that this process compiles nothing."""
        directory = self._directory
        if directory is not None and kernel_cache.is_filled(directory):
            return directory
        if directory is not None:
            with contextlib.suppress(OSError):
                directory.mkdir(exist_ok=True)  # Python may have compiled nothing there
        if directory is None or why_unwritable(directory) is not None:
            with contextlib.suppress(ConfigError):
                directory = Path(self._temporary.enter_context(temporary_directory()))
        if directory is None:
            return None
        fill_elsewhere(directory, self._is_closing)
        return directory if kernel_cache.is_filled(directory) else None


def _kernel_directory(cache_directory: Path) -> Path | None:
    """The owner-only directory of kernels; None where it cannot be made, somebody else owns it, or others may enter."""
    try:
        return private_directory(cache_directory / KERNEL_DIRECTORY, "--compilation-cache-dir", PROGRAMS_WHY)
    except ConfigError as error:
        logger.warning("the kernels of grammars are not kept, so each start compiles them anew: %s", error)
        return None


def kernel_cache_of(config: EngineConfig) -> Path | None:
    """The directory of compiled programs in which the kernels of grammars lie too; None where programs are not kept."""
    return None if config.disable_compilation_cache else compilation_cache_path(config.compilation_cache_dir)
