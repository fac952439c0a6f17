"""Messages to the engine on the socket: a frame of msgpack, then a frame for each array.

Pixels are a thousand times as long as the rest of a message, so they are not encoded: they are frames of their own, and
the engine reads them in place. An array that several requests share, as the answers to one prompt do, is sent once.
"""

from collections.abc import Sequence
from typing import Any, final

import msgspec
import numpy as np

from jsg.engine.child.protocol import ToEngine

_ARRAY = 1
"""The extension of msgpack that stands for an array. It holds type, shape, and the number of the array's frame."""
_TYPES = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4")}


def encode(message: ToEngine) -> list[bytes | memoryview]:
    """The frames of a message. All but the first are views of its arrays, which must not change any more."""
    frames: list[bytes | memoryview] = []
    places: dict[int, int] = {}

    def spell(value: Any) -> msgspec.msgpack.Ext:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"a message holds a {type(value).__name__}")
        if id(value) not in places:
            places[id(value)] = len(frames)
            frames.append(memoryview(np.ascontiguousarray(value, _TYPES[value.dtype.name])).cast("B"))
        place = (value.dtype.name, value.shape, places[id(value)])
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(place))

    return [msgspec.msgpack.encode(message, enc_hook=spell), *frames]


@final
class MessageDecoder:
    """The engine's end. Decoded arrays are views of the frames in which they came."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(ToEngine, ext_hook=self._array)
        self._frames: Sequence[memoryview] = ()

    def decode(self, frames: Sequence[memoryview]) -> ToEngine:
        """The message of these frames."""
        self._frames = frames[1:]
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._frames = ()

    def _array(self, code: int, spelled: memoryview) -> np.ndarray:
        assert code == _ARRAY, f"nothing is known of extension {code}"
        name, shape, place = msgspec.msgpack.decode(spelled)
        return np.frombuffer(self._frames[place], _TYPES[name]).reshape(shape)
