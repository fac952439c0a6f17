"""What becomes of fields that ask for something which no answer of this server has, and whose absence changes none."""

import logging
from typing import final

from jsg.errors import RequestError

HEADER = "x-jsg-warnings"

logger = logging.getLogger(__name__)


@final
class FieldRules:
    """The rules for the fields of one body, and what was passed over so far.

    It is the context in which pydantic checks the body, so that every object inside the body can reach it.

    Attributes:
        is_strict: Fields without an effect are refused, and so are unknown fields that are null.
        warnings: One text for each field that was passed over, and for whatever else the client should know.
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.warnings: list[str] = []

    @classmethod
    def of(cls, context: object) -> "FieldRules":
        """The rules in the context of a check; without a context new ones that are strict."""
        return context if isinstance(context, cls) else cls(is_strict=True)

    def pass_over(self, name: str, reason: str) -> None:
        """Notes that a field has no effect. Raises RequestError where that is not allowed."""
        if self.is_strict:
            raise RequestError(f"{name} is not supported: {reason}", param=name)
        self.note(name, reason)

    def note(self, name: str, reason: str) -> None:
        """Notes that a field has no effect, which is right here, so that no rule refuses it."""
        self.warn(f"{name} has no effect: {reason}")

    def warn(self, warning: str) -> None:
        """Tells the client something that no rule refuses. It is a constant text, because the log has each once."""
        if warning not in self.warnings:
            self.warnings.append(warning)


def log_new(warnings: list[str], path: str, logged: set[str]) -> None:
    """Logs each warning once for each endpoint. `logged` has those that were logged; there are few kinds of them."""
    for warning in warnings:
        line = f"{path}: {warning} (logged once; --strict-fields refuses it)"
        if line not in logged:
            logged.add(line)
            logger.warning("%s", line)
