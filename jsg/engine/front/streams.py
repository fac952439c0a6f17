"""The live requests of the front, each with what takes its outputs."""

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import final

from jsg.engine.front.places import Places
from jsg.errors import RequestError
from jsg.types import RequestOutput
from jsg.waits import BEFORE_THE_ENGINE, WaitClock, Waited, WaitReason, sum_of, waited_so_far

type Sink = Callable[[RequestOutput | Exception], None]
"""Takes the outputs of a request as they come, up to one with `finish`, or an error in place of the rest.

It is called while a message of the engine is taken, so it must be quick, and it must not raise.
"""


@dataclasses.dataclass(slots=True, eq=False)
class Stream:
    """One live request.

    Attributes:
        owner: Whose request it is. Nobody else can see, name or end it.
        rid: The client's name for it, unique among the owner's live requests.
        wire_name: Its name on the wire, which is never used twice.
        sink: Takes its outputs.
        clock: For what it waits before it is sent.
        before: For how long its HTTP request had waited when it was opened.
        compiling: Compiles its grammar, until the request is sent.
        waited_s: How long its request has waited for a place in the engine.
        has_output: Whether an output has come.
    """

    owner: str
    rid: str
    wire_name: str
    sink: Sink
    clock: WaitClock
    before: Waited
    compiling: asyncio.Task[None] | None = None
    waited_s: float = 0.0
    has_output: bool = False

    def take(self, output: RequestOutput) -> None:
        """Gives the sink an output under the client's name, the first one with what the request waited for here."""
        output.rid = self.rid
        if not self.has_output:
            self.has_output = True
            share = {WaitReason.KEY_SHARE: self.waited_s} if self.waited_s else None
            output.waited = sum_of((self.before, self.clock.waited, share, output.waited))
            output.queue_s += self.waited_s
        self.sink(output)


@final
class Streams:
    """Every live request, by its name on the wire and by owner and rid.

    Invariant: both tables hold the same streams, and every owner in them has one.

    Attributes:
        places: Those in the engine, where owners take turns; None where every request goes to the engine at once.
        pass_on: Takes the name of a worker and the outputs that are for it.
    """

    def __init__(self, prefix: str = "") -> None:
        """Names on the wire begin with the prefix, except those that are given."""
        self.places: Places | None = None
        self.pass_on: Callable[[str, bytes], None] = lambda worker, outputs: None
        self._prefix = prefix
        self._waits = Counter[WaitReason]()
        self._numbers = itertools.count()
        self._by_wire_name: dict[str, Stream] = {}
        self._by_owner: dict[str, dict[str, Stream]] = {}

    def open(self, owner: str, rid: str, sink: Sink, name: str | None = None) -> Stream:
        """Makes a stream, with this name on the wire if there is one.

        Raises:
            RequestError: The owner has a live request of that rid.
        """
        if self.find(owner, rid) is not None:
            raise name_in_use(rid)
        name = name or f"{self._prefix}{next(self._numbers)}"
        stream = Stream(owner, rid, name, sink, WaitClock(self._waits), waited_so_far())
        self._by_wire_name[stream.wire_name] = stream
        self._by_owner.setdefault(owner, {})[rid] = stream
        return stream

    @property
    def waits(self) -> Mapping[WaitReason, int]:
        """How many wait, before they are sent to the engine, for each of `BEFORE_THE_ENGINE`."""
        num_without_place = 0 if self.places is None else len(self.places)
        return {reason: self._waits[reason] for reason in BEFORE_THE_ENGINE} | {WaitReason.KEY_SHARE: num_without_place}

    def close(self, stream: Stream) -> bool:
        """Forgets a stream; False if it was closed before."""
        if self._by_wire_name.pop(stream.wire_name, None) is None:
            return False
        if stream.compiling is not None:
            stream.compiling.cancel()
        owned = self._by_owner[stream.owner]
        del owned[stream.rid]
        if not owned:
            del self._by_owner[stream.owner]
        return True

    def find(self, owner: str, rid: str) -> Stream | None:
        """The owner's live request of that rid."""
        return self._by_owner.get(owner, {}).get(rid)

    def on_wire(self, wire_name: str) -> Stream | None:
        """The live request of that name on the wire; None if it was closed."""
        return self._by_wire_name.get(wire_name)

    def all_of(self, owner: str | None) -> list[Stream]:
        """The owner's live requests, or everybody's, oldest first."""
        table = self._by_wire_name if owner is None else self._by_owner.get(owner, {})
        return list(table.values())

    def __len__(self) -> int:
        return len(self._by_wire_name)


def name_in_use(rid: str) -> RequestError:
    """The error for a second request of a name."""
    return RequestError(
        f"rid must be unique among running requests, but {rid!r} is running; choose another", param="rid"
    )
