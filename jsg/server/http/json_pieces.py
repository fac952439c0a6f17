"""JSON that is made piece by piece, while it is sent."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import msgspec

AT_ONCE = 2**12
"""Numbers or short texts of a list that become JSON in one call: 0.2 ms."""
PIECE_BYTES = 2**17
"""What is made and sent in one turn: less than 1 ms, since a number of 20 bytes takes 50 ns."""


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a value, in which whatever else can be iterated stands for JSON that it makes in pieces."""
    later: list[Iterable[bytes]] = []

    def place(pieces: Any) -> msgspec.Raw:
        later.append(pieces)
        return _PLACE

    texts = msgspec.json.encode(value, enc_hook=place).split(b"\0")  # JSON has no such byte
    yield texts[0]
    for pieces, text in zip(later, texts[1:], strict=True):
        yield from pieces
        yield text


def item_pieces(items: Iterable[Any]) -> Iterator[bytes]:
    """The JSON of a list, whose items become JSON as those of `json_pieces`, one after another."""
    before = b"["
    for item in items:
        yield before
        yield from json_pieces(item)
        before = b","
    yield b"]" if before == b"," else b"[]"


@final
class JsonLists:
    """Lists whose entries are made side by side. The JSON of one is sent behind that of another, so it is kept."""

    def __init__(self, show: Callable[[int, int], Mapping[str, list[Any]]], step: int) -> None:
        """Lists without entries.

        Args:
            show: Makes the entries from one number up to another, by the names of the lists. It is asked in order.
            step: How many are made in a turn.
        """
        self._show = show
        self._step = step
        self._num_made = 0
        self._made: dict[str, list[bytearray]] = {name: [] for name in show(0, 0)}

    def until(self, stop: int) -> dict[str, Iterable[bytes]]:
        """The JSON of each list up to an entry. It may be read several times, before more entries are asked for."""
        return {name: _Until(self, name, stop) for name in self._made}

    def pieces(self, name: str, stop: int) -> Iterator[bytes]:
        """The JSON of one list."""
        while self._num_made < stop:
            until = min(stop, self._num_made + self._step)
            for each, entries in self._show(self._num_made, until).items():
                self._add(self._made[each], msgspec.json.encode(entries)[1:-1])
            self._num_made = until
            yield b""
        yield b"["
        yield from map(bytes, self._made[name])
        yield b"]"

    @staticmethod
    def _add(made: list[bytearray], entries: bytes) -> None:
        """Adds entries to the last part, or a part for them. No part ends inside of an entry."""
        if entries:
            entries = b"," + entries if made else entries
            if not made or len(made[-1]) > PIECE_BYTES:
                made.append(bytearray())
            made[-1] += entries


@final
class _Until(Iterable[bytes]):  # no dataclass, because the encoder knows how to write those
    def __init__(self, lists: JsonLists, name: str, stop: int) -> None:
        self._lists = lists
        self._name = name
        self._stop = stop

    def __iter__(self) -> Iterator[bytes]:
        return self._lists.pieces(self._name, self._stop)


def list_pieces(items: list[Any]) -> Iterator[bytes]:
    """The JSON of a list, or of a list of lists. It is empty afterwards, because to free a million items takes long."""
    yield b"["
    items.reverse()
    is_first = True
    while items:
        if not is_first:
            yield b","
        is_first = False
        if isinstance(items[-1], list):
            yield from list_pieces(items.pop())
            continue
        some = items[: -AT_ONCE - 1 : -1]
        del items[-AT_ONCE:]
        yield msgspec.json.encode(some)[1:-1]
    yield b"]"


def next_piece(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """What is made of the pieces in one turn, and whether it is the rest."""
    made = bytearray()
    for piece in pieces:
        made += piece
        if not piece or len(made) > PIECE_BYTES:
            return bytes(made), False
    return bytes(made), True


_PLACE = msgspec.Raw(b"\0")
