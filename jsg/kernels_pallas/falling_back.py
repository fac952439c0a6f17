"""What the reference does because a kernel cannot."""

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)

refusals: dict[str, str] = {}
"""Operations that the reference did for a kernel in traces since this was cleared, and why."""


@contextlib.contextmanager
def falling_back(operation: str, kernel: str, named: str | None) -> Iterator[None]:
    """Lets the reference do a case that a kernel cannot do, unless that kernel was named, and says so once."""
    try:
        yield
    except NotImplementedError as error:
        if named:
            raise
        if operation not in refusals:
            # On a CPU this costs little, and on a GPU much.
            level = logging.INFO if kernel == "native" else logging.WARNING
            logger.log(level, "%s by 'reference', because %r cannot do it: %s", operation, kernel, error)
        refusals[operation] = str(error)
