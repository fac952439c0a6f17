"""The kernel process: `python -m jsg.engine.child.kernel_process DIRECTORY PID` compiles the kernels of grammars.

Compiling takes 5 to 15 seconds of Python, which in a thread of the engine would hold up its start. So an engine starts
this process beside its long work, once for each version of the kernels and each kind of processor.
"""

import fcntl
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from jsg.engine.child.log import log_to_stderr
from jsg.engine.child.parent import die_with_parent

logger = logging.getLogger(__name__)

FILL_CPU_S = 150
"""The most processor time that compiling may take: ten times what it takes on a slow machine."""
HANG_S = 3600.0
"""A process that is not ready by then hangs, however little of the processor it gets."""
POLL_S = 0.1
STDERR = 2


def fill_elsewhere(directory: Path, is_closing: threading.Event, limit_s: float = HANG_S) -> None:
    """Has a process of its own compile the kernels into a directory, and waits for it until `is_closing` is set.

    If that fails or takes too long, the log says so, and this process has to compile the kernels for itself.
    """
    command = [sys.executable, "-P", "-m", "jsg.engine.child.kernel_process", str(directory), str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=STDERR, env=environment)
    except OSError as error:
        failure = f"could not be started ({error.strerror})"
    else:
        failure = _wait(process, is_closing, limit_s)
    if failure is not None and not is_closing.is_set():
        logger.warning(
            "the process that compiles the kernels of grammars %s; they are compiled in the engine process instead, "
            "which holds up its steps",
            failure,
        )


def _wait(process: subprocess.Popen[bytes], is_closing: threading.Event, limit_s: float) -> str | None:
    """Waits for the end of the process, or ends it; returns what went wrong, or None."""
    end = time.monotonic() + limit_s
    try:
        while process.poll() is None and time.monotonic() < end and not is_closing.wait(POLL_S):
            pass
        if process.returncode is None:
            return f"was not ready after {limit_s:g} s and was ended"
        if process.returncode == -signal.SIGXCPU:
            return f"took more than {FILL_CPU_S} s of processor time and was ended"
        return f"ended with status {process.returncode}" if process.returncode else None
    finally:
        process.kill()  # does nothing to one that has ended
        process.wait()


def fill_once(directory: Path) -> None:
    """Compiles the kernels into a directory unless they are there. One of several processes does it, others wait."""
    from jsg.constrained.run import kernel_cache  # here: before this slow import the process is bound to its parent

    directory.mkdir(exist_ok=True)
    with open(directory / "kernels.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process ends
        if not kernel_cache.is_filled(directory):
            kernel_cache.take_installed(directory)
            kernel_cache.fill(directory)


def _limit_processor_time() -> None:
    """Has the system end this process after `FILL_CPU_S`, which does not count the time of a busy machine."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    least = FILL_CPU_S if most == resource.RLIM_INFINITY else min(FILL_CPU_S, most)
    resource.setrlimit(resource.RLIMIT_CPU, (least, most))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    log_to_stderr("kernels")
    for number in (signal.SIGINT, signal.SIGTERM):  # the front's to obey, which may take requests for a while yet
        signal.signal(number, signal.SIG_IGN)
    _limit_processor_time()
    try:
        fill_once(Path(sys.argv[1]))
    except OSError as error:  # the directory is read-only or full, which is nobody's bug
        rule = "the directory for the kernels of grammars must be one that can be written and has room"
        logger.error("%s, but: %s", rule, error)
        sys.exit(1)
