"""`python -m jsg.lang.http.watched MODULE ARGUMENTS...` runs a module as a program that ends when its stdin ends.

The first line of stdin is a JSON list of further arguments, which the list of processes must not show.

The process that starts it holds the other end of the pipe, which the kernel closes however that process dies. (Linux
can send a signal at the death of a parent, but sends it when the thread ends that started the program.)
"""

import json
import os
import runpy
import signal
import sys
import threading
import time

GRACE_S = 5.0


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)  # nobody reads the answers under way any more
    os.kill(os.getpid(), signal.SIGTERM)  # a second signal ends `jsg serve` at once
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    further = sys.stdin.buffer.readline()
    if not further:
        sys.exit(1)  # the process that started it has died already
    sys.argv += json.loads(further)
    threading.Thread(target=_end_with_stdin, name="watch-stdin", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
