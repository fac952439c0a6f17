"""The kernel process: `python -m jsg.engine.child.kernel_process DIRECTORY PID` compiles kernels of grammars, and ends.

It takes some twenty seconds of Python, which in a thread of an engine that starts would hold up everything else. So the
engine has it done by a process of its own, once for each version of the kernels.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

from jsg.constrained.run import kernel_cache
from jsg.engine.child.parent import die_with_parent

logger = logging.getLogger(__name__)

FILL_S = 300.0
"""Ten times what it takes. A process that is not ready then has no CPU, or hangs."""
STDERR = 2


def fill_elsewhere(directory: Path, limit_s: float = FILL_S) -> None:
    """Compiles the kernels into a directory by a process of its own, and waits for it.

    Where that fails or takes too long, the log says so, and they are compiled in this process when they are first used.
    """
    command = [sys.executable, "-P", "-m", "jsg.engine.child.kernel_process", str(directory), str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    logger.info("compiling the kernels of grammars, once for this version; it takes about half a minute")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=STDERR, env=environment, timeout=limit_s, check=False
        )
        failure = f"ended with status {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired:  # which has ended it
        failure = f"was not ready after {limit_s:g} s and was ended"
    except OSError as error:
        failure = f"could not be started ({error.strerror})"
    if failure is not None:
        logger.warning(
            "the process that compiles the kernels of grammars %s; they are compiled in the engine process instead, "
            "which holds its start up",
            failure,
        )


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    kernel_cache.fill(Path(sys.argv[1]))
