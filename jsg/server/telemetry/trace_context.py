"""The W3C trace context of a request: reads `traceparent` by the rules of the recommendation, level 1.

A header that breaks a rule is ignored, because the recommendation says so.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Self

_FORMAT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
MAX_TRACESTATE_CHARS = 512  # the length that everybody must be able to pass on


@dataclasses.dataclass(frozen=True, slots=True)
class TraceContext:
    """The span of the caller.

    Attributes:
        trace_id: 32 hexadecimal digits, not all 0.
        parent_id: The id of the span: 16 hexadecimal digits, not all 0.
        is_sampled: Whether the caller may have recorded the span.
        state: `tracestate` as it came; empty if it is too long to be passed on.
    """

    trace_id: str
    parent_id: str
    is_sampled: bool
    state: str = ""

    @classmethod
    def parse(cls, headers: Iterable[tuple[bytes, bytes]]) -> Self | None:
        """Reads the headers of a request; gives None if there is no valid `traceparent`, or more than one."""
        parents: list[bytes] = []
        states: list[bytes] = []
        for name, value in headers:
            if name == b"traceparent":
                parents.append(value)
            elif name == b"tracestate":
                states.append(value)
        if len(parents) != 1:
            return None
        match = _FORMAT.fullmatch(parents[0].decode("latin-1").strip(" \t"))
        if match is None:
            return None
        version, trace_id, parent_id, flags, rest = match.groups()
        is_wrong_version = version == "ff" or (version == "00" and rest is not None)
        if is_wrong_version or int(trace_id, 16) == 0 or int(parent_id, 16) == 0:
            return None
        state = b",".join(states).decode("latin-1")
        return cls(trace_id, parent_id, bool(int(flags, 16) & 1), state if len(state) <= MAX_TRACESTATE_CHARS else "")
