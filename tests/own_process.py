"""Helpers of tests that run in a process of their own: JAX decides when it starts how many CPU devices it makes up."""

import json
import os
import subprocess
import sys
from typing import Any


def said(module: str, *arguments: str, told: Any = None) -> Any:
    """What `python -m module` writes to standard output last, a line of JSON; `told` is what it reads.

    Before it gloo may have said how many hosts it has found.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        input=json.dumps(told),
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
