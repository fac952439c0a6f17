"""Processes that must not outlive whoever started them. Standard library only."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL at the parent's death, and ends this process if it is dead already.

    Linux only; elsewhere who needs it has to look by itself. A parent is a thread: it must live as long as the child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)
