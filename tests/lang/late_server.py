"""`jsg serve` whose engine compiles each program when it is first needed; run in the place of `jsg.cli`."""

import functools
import sys

from jsg import cli
from jsg.engine.front.children import EngineChild

if __name__ == "__main__":
    late = functools.partial(EngineChild.spawn, core="tests.engine.late:LateCore")
    EngineChild.spawn = late  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(cli.main())
