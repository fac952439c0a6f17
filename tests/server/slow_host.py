"""A host that follows like any other, but takes no part in anything for a while when a file is there.

`python -m tests.server.slow_host FILE serve …`.
"""

import sys
import time
from pathlib import Path
from typing import Any

from jsg.cli import main
from jsg.engine.device.replica import Replica

PAUSE_S = 60


def run() -> int:
    file, call = Path(sys.argv[1]), Replica.call

    def slow_call(self: Replica, *arguments: Any) -> Any:
        if file.exists():
            time.sleep(PAUSE_S)
        return call(self, *arguments)

    Replica.call = slow_call
    return main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(run())
