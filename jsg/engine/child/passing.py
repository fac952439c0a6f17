"""Outputs that the hub of a server passes on to its workers unread: all but the first and the last of a request.

The name of a worker's request begins with that of the worker: `w2-0.17` is the request 17 of `w2-0`.
"""

from collections.abc import Iterable, Sequence
from typing import final

import msgspec

from jsg.types import RequestOutput

WORKER = "w"
"""The name of a worker begins so, and no name of a request of the hub itself does."""


@final
class Passing:
    """The requests of workers that have had a first output, with the tokens that were passed on since."""

    def __init__(self) -> None:
        self._begun: dict[str, list[int]] = {}
        self._encode = msgspec.msgpack.Encoder().encode

    def divide(self, outputs: Iterable[RequestOutput]) -> tuple[list[RequestOutput], list[tuple[str, bytes]]]:
        """The outputs that the front reads, and the others in msgpack for each worker. Last ones have `passed_ids`."""
        read: list[RequestOutput] = []
        passed: dict[str, list[RequestOutput]] = {}
        for output in outputs:
            name = output.rid
            if not name.startswith(WORKER):
                read.append(output)
            elif (ids := self._begun.get(name)) is None or output.finish is not None or output.waited is not None:
                if output.finish is None:
                    self._begun.setdefault(name, [])
                else:
                    output.passed_ids = tuple(self._begun.pop(name, ()))
                read.append(output)
            else:
                ids += output.token_ids
                passed.setdefault(name.partition(".")[0], []).append(output)
        return read, [(worker, self._encode(outputs)) for worker, outputs in passed.items()]

    def forget(self, names: Sequence[str]) -> None:
        """These requests were aborted."""
        for name in names:
            self._begun.pop(name, None)
