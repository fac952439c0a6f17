"""What happened in a run of a program, which its states show, and which outlives no state and no task of it."""

import logging
import weakref

from jsg.errors import AbortedError

logger = logging.getLogger(__name__)

_MAX_SHOWN = 500  # characters of an error


class History:
    """The failures of a run. When it goes, one that nobody has read is logged, so that no failed run looks done.

    It keeps the texts of errors and not the errors, whose tracebacks reference it.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()  # identities of errors
        self._unread: list[str] = []
        weakref.finalize(self, _log_unread, self._unread)

    def failed(self, error: BaseException, *, is_new: bool = False) -> None:
        """Notes a failure of a stream or of the body.

        Args:
            error: The error.
            is_new: Whether it counts as unread though it was read before. A body that reads an error and raises it
                again has told nobody outside.
        """
        if not isinstance(error, Exception) or isinstance(error, AbortedError):
            return  # interrupts are raised elsewhere, and who cancels knows it
        if is_new or id(error) not in self._known:
            self._known.add(id(error))
            text = f"{type(error).__name__}: {error}"
            shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
            self._unread.append("; ".join([shown, *getattr(error, "__notes__", ())]))

    def read(self, error: BaseException) -> None:
        """Notes that a reader was told of an error. Whoever knows of one knows that the run has failed."""
        if id(error) in self._known:
            self._unread.clear()


def _log_unread(unread: list[str]) -> None:
    if unread:
        more = f" (and {len(unread) - 1} more errors)" if unread[1:] else ""
        logger.warning(
            "a program failed, and nobody read its error, which state.error() gives and state.sync() raises: %s%s",
            unread[0],
            more,
        )
