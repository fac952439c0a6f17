"""The live requests of the front, each with its outputs that are not read yet."""

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import final

from jsg.engine.front.places import Places
from jsg.errors import JsgError, RequestError
from jsg.types import RequestOutput
from jsg.waits import BEFORE_THE_ENGINE, WaitClock, Waited, WaitReason, sum_of


@dataclasses.dataclass(slots=True, eq=False)
class Stream:
    """One live request.

    Attributes:
        owner: Whose request it is. Nobody else can see, name or end it.
        rid: The client's name for it, unique among the owner's live requests.
        wire_name: Its name on the wire, which is never used twice.
        arrived: Its outputs in order. Nothing follows the last output, or an error.
        ended: Set when the stream is closed.
        clock: For what it waits before it is sent.
        waited_s: How long its request has waited for a place in the engine.
    """

    owner: str
    rid: str
    wire_name: str
    clock: WaitClock
    arrived: asyncio.Queue[RequestOutput | JsgError] = dataclasses.field(default_factory=asyncio.Queue)
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    waited_s: float = 0.0

    @property
    def waited(self) -> Waited | None:
        """For how long it waited before it was sent."""
        share = {WaitReason.KEY_SHARE: self.waited_s} if self.waited_s else None
        return sum_of((self.clock.waited, share))


@final
class Streams:
    """Every live request, by its name on the wire and by owner and rid.

    Invariant: both tables hold the same streams, and every owner in them has one.

    Attributes:
        places: Those in the engine, where owners take turns; None where every request goes to the engine at once.
    """

    def __init__(self) -> None:
        self.places: Places | None = None
        self._waits = Counter[WaitReason]()
        self._numbers = itertools.count()
        self._by_wire_name: dict[str, Stream] = {}
        self._by_owner: dict[str, dict[str, Stream]] = {}

    def open(self, owner: str, rid: str) -> Stream:
        """Makes a stream. Raises RequestError where the owner has a live request of that rid."""
        if self.find(owner, rid) is not None:
            raise name_in_use(rid)
        stream = Stream(owner, rid, str(next(self._numbers)), WaitClock(self._waits))
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
        stream.ended.set()
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
