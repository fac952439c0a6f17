"""Messages to the engine on the socket: a frame of msgpack, then a frame for each array.

    requests of the front          on the wire                              requests of the engine
    ─────────────────────          ───────────                              ──────────────────────
    1_0 (prompt, seed 7)    ──▶    common part 4: everything but        ──▶  the common part, read and checked once,
    1_1 (prompt, seed 8)           name and seed; the ids are a frame        with another name and seed for each
    1_2 (prompt, seed 9)           (1_0, 4, 7) (1_1, 4, 8) (1_2, 4, 9)

The ids of a prompt and the pixels of its pictures are a thousand times as long as the rest. So they are not encoded:
they are frames of their own, and the engine reads them in place. The answers to one prompt differ in name and seed
only. What they have in common is sent once, even where they come in several messages, as the loop of the front has its
turns. The engine makes a request of it when the request's turn has come.
"""

import dataclasses
import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, final

import msgspec
import numpy as np

from jsg.engine.child.protocol import Call, GrammarTables, ToEngine
from jsg.prompt_ids import PromptIds
from jsg.types import Request, SamplingParams, altered

MOST_KEPT = 64
MOST_KEPT_BYTES = 2**24
"""How many common parts both ends keep for answers to come, and how long their arrays may be together."""

_ARRAY, _IDS = 1, 2
"""The extensions of msgpack that stand for an array, and for the ids of a prompt. They hold type, shape, and the number
of the array's frame."""
_TYPES = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4")}


def _others(record: type, *own: str) -> operator.attrgetter:
    return operator.attrgetter(*(field.name for field in dataclasses.fields(record) if field.name not in own))


_common_fields = _others(Request, "rid", "sampling")
_common_sampling = _others(SamplingParams, "sampling_seed")


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """What a request has of its own, and the number of the common part."""

    rid: str
    common: int
    seed: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """The first frame.

    Attributes:
        common: The new common parts by number, each a request that has nothing of its own.
        answers: The requests.
        dropped: The common parts that no later message names.
        aborts, grammars, forgotten_grammars, calls, stop: As in `ToEngine`.
    """

    common: Sequence[tuple[int, msgspec.Raw]] = ()
    answers: Sequence[_Answer] = ()
    dropped: Sequence[int] = ()
    aborts: Sequence[str] = ()
    grammars: Sequence[GrammarTables] = ()
    forgotten_grammars: Sequence[str] = ()
    calls: Sequence[Call] = ()
    stop: bool = False


@final
class MessageEncoder:
    """The front's end, for one engine."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._kept: OrderedDict[tuple[int, ...], tuple[int, Request]] = OrderedDict()
        self._num_kept_bytes = 0

    def encode(self, message: ToEngine) -> list[bytes | memoryview]:
        """The frames of a message. All but the first are views of its arrays, which must not change any more."""
        frames: list[bytes | memoryview] = []
        places: dict[int, int] = {}

        def spell(value: Any) -> msgspec.msgpack.Ext:
            kind = _IDS if isinstance(value, PromptIds) else _ARRAY
            array = value.array if isinstance(value, PromptIds) else value
            if not isinstance(array, np.ndarray):
                raise NotImplementedError(f"a message holds a {type(value).__name__}")
            if id(array) not in places:
                places[id(array)] = len(frames)
                frames.append(memoryview(np.ascontiguousarray(array, _TYPES[array.dtype.name])).cast("B"))
            place = (array.dtype.name, array.shape, places[id(array)])
            return msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(place))

        common: list[tuple[int, msgspec.Raw]] = []
        answers: list[_Answer] = []
        for request in message.requests:
            key = (*map(id, _common_fields(request)), *map(id, _common_sampling(request.sampling)))
            if key not in self._kept:
                number = next(self._numbers)
                self._kept[key] = number, request
                self._num_kept_bytes += _num_bytes(request)
                common.append((number, msgspec.Raw(msgspec.msgpack.encode(request, enc_hook=spell))))
            self._kept.move_to_end(key)
            answers.append(_Answer(request.rid, self._kept[key][0], request.sampling.sampling_seed))
        head = _Head(
            common=common,
            answers=answers,
            dropped=self._drop(),
            aborts=message.aborts,
            grammars=message.grammars,
            forgotten_grammars=message.forgotten_grammars,
            calls=message.calls,
            stop=message.stop,
        )
        return [msgspec.msgpack.encode(head), *frames]

    def _drop(self) -> list[int]:
        """Forgets the common parts that were used least recently, as far as there are too many."""
        dropped: list[int] = []
        while len(self._kept) > MOST_KEPT or self._num_kept_bytes > MOST_KEPT_BYTES:
            _, (number, request) = self._kept.popitem(last=False)
            self._num_kept_bytes -= _num_bytes(request)
            dropped.append(number)
        return dropped


def _num_bytes(request: Request) -> int:
    ids = [each for each in (request.input_ids, request.prediction) if each is not None]
    return sum(each.array.nbytes for each in ids) + sum(item.pixels.nbytes for item in request.media)


@final
class _Common:
    """A common part, which is read when the first of its requests is made."""

    def __init__(self, raw: msgspec.Raw, frames: Sequence[memoryview]) -> None:
        self._raw = raw
        self._frames = frames

    @functools.cached_property
    def request(self) -> Request:
        request = _Reader(self._frames).decode(self._raw)
        del self._raw, self._frames  # the arrays keep their frames
        return request


@final
@dataclasses.dataclass(frozen=True, slots=True)
class SentRequest:
    """A request that has arrived. `make` makes it."""

    rid: str
    _common: _Common
    _seed: int | None

    def make(self) -> Request:
        """The request. Its ids, and all else that it has not alone, are the objects of the other answers."""
        request = self._common.request
        return altered(request, rid=self.rid, sampling=altered(request.sampling, sampling_seed=self._seed))


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """A message of the front. The `requests` of `message` are empty, because `requests` has them."""

    message: ToEngine
    requests: Sequence[SentRequest] = ()


@final
class MessageDecoder:
    """The engine's end."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(_Head)
        self._common: dict[int, _Common] = {}

    def decode(self, frames: Sequence[memoryview]) -> Arrived:
        """The message of these frames. The arrays of its requests are views of them."""
        head = self._decoder.decode(frames[0])
        for number, raw in head.common:
            self._common[number] = _Common(raw, frames[1:])
        requests = [SentRequest(answer.rid, self._common[answer.common], answer.seed) for answer in head.answers]
        for number in head.dropped:
            del self._common[number]
        message = ToEngine(
            aborts=head.aborts,
            grammars=head.grammars,
            forgotten_grammars=head.forgotten_grammars,
            calls=head.calls,
            stop=head.stop,
        )
        return Arrived(message, requests)


@final
class _Reader:
    """Reads one request whose arrays are these frames."""

    def __init__(self, frames: Sequence[memoryview]) -> None:
        self._frames = frames

    def decode(self, raw: msgspec.Raw) -> Request:
        return msgspec.msgpack.decode(raw, type=Request, ext_hook=self._array)

    def _array(self, code: int, spelled: memoryview) -> np.ndarray | PromptIds:
        assert code in (_ARRAY, _IDS), f"nothing is known of extension {code}"
        name, shape, place = msgspec.msgpack.decode(spelled)
        array = np.frombuffer(self._frames[place], _TYPES[name]).reshape(shape)
        return PromptIds(array) if code == _IDS else array
