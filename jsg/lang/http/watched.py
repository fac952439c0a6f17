"""`python -m jsg.lang.http.watched MODULE ARGUMENTS...`: a module as a program that ends when its stdin does.

The first line of stdin is a JSON list of further arguments: those that the list of processes must not show.

Who starts it holds the other end of that pipe, which the kernel closes whatever way the holder dies. (The signal at a
parent's death that Linux offers would come when the thread that started the program ends.)
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
    time.sleep(GRACE_S)  # nobody reads what is under way any more
    os.kill(os.getpid(), signal.SIGTERM)  # at once, to `jsg serve`
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    further = sys.stdin.buffer.readline()
    if not further:
        sys.exit(1)  # who started it has died already
    sys.argv += json.loads(further)
    threading.Thread(target=_end_with_stdin, name="watch-stdin", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
