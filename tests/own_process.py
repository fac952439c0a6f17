"""Helpers of tests that run in a process of their own: JAX decides when it starts how many CPU devices it makes up."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

STANDS_STILL_S = 400
"""Ten times what the slowest takes, and less than the time after which pytest ends a test that hangs."""


def said(module: str, *arguments: str, told: Any = None) -> Any:
    """What `python -m module` writes to standard output last, a line of JSON; `told` is what it reads.

    Before it gloo may have said how many hosts it has found. A process that stands still says where.
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
    )
    try:
        output, errors = process.communicate(json.dumps(told), STANDS_STILL_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        output, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])
