"""A process that ends with the one that started it, whichever of its threads did."""

import os
import signal
import subprocess
import sys

from tests.server.running import is_running, wait_until

CHILD = "import signal; from jsg.engine.child.parent import end_with_parent; end_with_parent(); signal.pause()"
STARTER = f"""
import subprocess, sys, threading, time
def start():
    print(subprocess.Popen([sys.executable, "-c", {CHILD!r}]).pid, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(60)
"""


def test_it_ends_with_the_process_and_not_with_the_thread():
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        try:
            wait_until(lambda: len(os.listdir(f"/proc/{child}/task")) > 1)  # it watches
            assert is_running(child)
            starter.kill()
            wait_until(lambda: not is_running(child))
        finally:
            if is_running(child):
                os.kill(child, signal.SIGKILL)
