"""Which rows of the vision pool hold the features of which image.

The vision pool is an array [rows, D] on the device, beside the KV pool. It has the features that the encoder made of
images, and the text model reads them in place of embeddings. When a step is planned, this module decides which images
are encoded and where their features go.

An item is an image or a video. Its features are found again by its digest, within a namespace: the time that an answer
takes must not show a client whether another client has sent the same image. Features stay until their rows are needed,
and the longest unused go first. Two kinds of rows are never taken: the rows that the planned step reads, and the rows
of an item inside which a chunk of a prompt ended (its pin). A step is planned for as many tokens as have room for their
features. No request waits for ever:

- An item that does not fit the pool is refused, so each item has room when it is alone.
- A request with a pin goes on inside of its item and needs no more room. After the item the pin ends.
- If an item finds no room, no request begins another item in that round, not even a stored one. Otherwise one pin could
  follow another for ever. Chunks are planned oldest first, so pins end one after another until the oldest request has
  its room, whatever arrives meanwhile.
- A retract ends the pin of the request that is sent back.

Rows may be given to others as soon as the steps that read them are dispatched, since the device runs one program after
another.
"""

import dataclasses
from collections import Counter, OrderedDict

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.errors import QueueFullError, RequestError
from jsg.media import MediaInput
from jsg.sched.batch import Encoding
from jsg.sched.request import Placement, RunningRequest
from jsg.types import Request

DUMP_ROW = 0
"""The row to which padding is written. Nobody reads it."""
NEWLINE_ROW = 1
NUM_FIXED_ROWS = 2

MAX_PIXEL_BYTES = 2**30
"""The most pixels of all live requests, so that a queue of images does not take all memory of the host: about 790 tiles
of 336 x 336."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The size of the vision pool, and the sizes of what the encoder takes and gives.

    Attributes:
        num_rows: How many rows the pool has.
        tile_rows: How many rows a tile of an image becomes.
        frame_rows: How many rows a frame of a video becomes; 0 if the model takes no videos.
        image_size: Side of a tile or frame in pixels.
        has_newline: Whether row `NEWLINE_ROW` is the model's newline.
    """

    num_rows: int
    tile_rows: int
    frame_rows: int
    image_size: int
    has_newline: bool

    def rows_of(self, *, is_video: bool) -> int:
        """How many rows one tile or frame becomes."""
        return self.frame_rows if is_video else self.tile_rows


@dataclasses.dataclass(slots=True, eq=False)
class _Stored:
    """An item with rows: int32 [tiles, rows of a tile]; and which of its tiles are encoded: bool [tiles]."""

    rows: np.ndarray
    is_encoded: np.ndarray


_Key = tuple[str, bytes, tuple[int, ...], bool]


def _key(request: Request, item: MediaInput) -> _Key:
    return request.namespace, item.digest, item.pixels.shape, item.is_video


class VisionStore:
    """The rows of the vision pool and the items that have them.

    Invariants: every row but the fixed ones is free or belongs to one item. Pinned and planned items have rows. A pin
    belongs to a running request whose next token is inside of the item. `_users` counts the items in `_items`, and
    `_pixels` has the pixels of each.

    Attributes:
        num_encoded: How many tiles and frames were encoded.
        num_found: How often a prompt came to an item that had rows.
        num_evicted: How many items lost their rows to others.
        num_pixel_bytes: Bytes of the pixels of live requests, on the host. Equal items count once.
    """

    def __init__(self, shape: VisionShape | None, vocab_size: int):
        """Makes an empty store.

        Args:
            shape: The shape of the pool; None for a model without an encoder, which refuses images.
            vocab_size: Ids from this number on are rows of the pool.
        """
        self.num_encoded = self.num_found = self.num_evicted = self.num_pixel_bytes = 0
        self._pixels: dict[_Key, np.ndarray] = {}
        self._users: Counter[_Key] = Counter()
        self._items: dict[str, list[_Key]] = {}
        self._shape = shape
        self._vocab_size = vocab_size
        self._rows = PageAllocator(max(shape.num_rows - NUM_FIXED_ROWS, 0) + 1 if shape else 1)
        self._stored: OrderedDict[_Key, _Stored] = OrderedDict()  # the longest unused first
        self._pins: dict[Placement, _Key] = {}
        self._planned: set[_Key] = set()
        self._encodings: list[Encoding] = []
        self._is_short = False

    @property
    def num_used_rows(self) -> int:
        """How many rows belong to items."""
        return self._rows.num_total - self._rows.num_free

    # Requests in and out.

    def acquire(self, request: Request) -> Request:
        """Keeps a request's pixels until `release`.

        Returns:
            The request, in which equal items of several requests have the same pixels.

        Raises:
            RequestError: It has images or videos that the engine can never run, or too many of them.
            QueueFullError: The pixels of live requests take too much memory. Nothing was changed.
        """
        if not request.media:
            return request
        self._check(request)
        keys = [_key(request, item) for item in request.media]
        own = {key: item.pixels for key, item in zip(keys, request.media, strict=True)}
        if (num_bytes := sum(pixels.nbytes for pixels in own.values())) > MAX_PIXEL_BYTES:
            raise RequestError(
                f"a request may have {MAX_PIXEL_BYTES} bytes of pixels, but got {num_bytes}; send fewer or smaller "
                "images and videos",
                "media",
            )
        new = {key: pixels for key, pixels in own.items() if key not in self._pixels}
        num_bytes = sum(pixels.nbytes for pixels in new.values())
        if self.num_pixel_bytes + num_bytes > MAX_PIXEL_BYTES:
            raise QueueFullError(
                f"images of requests that run and wait may take {MAX_PIXEL_BYTES >> 20} MiB, but with this one they "
                f"would take {self.num_pixel_bytes + num_bytes >> 20}; try again later"
            )
        self.num_pixel_bytes += num_bytes
        self._pixels |= new
        self._users.update(keys)
        self._items[request.rid] = keys
        items = zip(keys, request.media, strict=True)
        media = tuple(dataclasses.replace(item, pixels=self._pixels[key]) for key, item in items)
        return dataclasses.replace(request, media=media)

    def release(self, rid: str, *, distrusts: bool = False) -> None:
        """Gives back the pixels of a request, if it has any.

        Its features stay. With `distrusts` they may be wrong, so they are encoded anew when a request needs them.
        """
        for key in self._items.pop(rid, ()):
            if distrusts and key in self._stored:
                self._stored[key].is_encoded[:] = False
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.num_pixel_bytes -= self._pixels.pop(key).nbytes

    def _check(self, request: Request) -> None:
        shape = self._shape
        for item in request.media:
            if shape is None:
                raise RequestError("this model takes text only, but got an image or a video; leave it out", "media")
            num_rows = shape.rows_of(is_video=item.is_video)
            if not num_rows:
                raise RequestError("this model takes no videos, but got one; send some of its frames", "media")
            size = shape.image_size
            is_known = item.pixels.shape[2] == size and item.rows.max() < len(item.pixels) * num_rows
            if not is_known or item.words.min() < self._vocab_size or (item.rows.min() < 0 and not shape.has_newline):
                raise RequestError(
                    f"an image must be tiles of {size} x {size} pixels, each of {num_rows} rows, with words from "
                    f"{self._vocab_size}, but one was made for another model; use this model's processor",
                    "media",
                )
            if len(item.pixels) * num_rows > self._rows.num_total:
                raise RequestError(
                    f"an image or video may have at most {self._rows.num_total // num_rows} tiles or frames, but got "
                    f"{len(item.pixels)}; send fewer, or raise --vision-cache-size",
                    "media",
                )

    # Around a step.

    def begin_round(self) -> None:
        """Begins a round, in which chunks are planned from the oldest request on. A retract begins another round."""
        self._is_short = False

    def must_wait(self, request: Request, start: int) -> bool:
        """Whether a request needs features from index `start` on while older requests wait for theirs."""
        return self._is_short and any(item.end > start for item in request.media)

    def reserve(self, running: RunningRequest, place: Placement, start: int, count: int) -> int:
        """Finds room for the features of a request's next tokens, from index `start` on, and plans to encode them.

        Returns:
            How many of these tokens the step may run: `count`, or those before the first item that has to wait.
        """
        media = running.request.media if count > 0 else ()
        for item in media:
            if item.end <= start or item.start >= start + count:
                continue
            key = _key(running.request, item)
            has_pin = self._pins.get(place) == key
            stored = self._stored.get(key) if has_pin or not self._is_short else None
            self.num_found += stored is not None and not has_pin
            if stored is None and not self._is_short:
                stored = self._store(key, item)
            if stored is None:
                count = max(item.start - start, 0)
                break
            self._stored.move_to_end(key)
            self._planned.add(key)
            self._plan(stored, item, item.rows[max(start - item.start, 0) : start + count - item.start])
        if media and count > 0:
            self._move_pin(running, place, start + count)
        return count

    def ids(self, running: RunningRequest, start: int, count: int) -> np.ndarray | None:
        """int32 [count], the ids that the model reads for tokens that have room; None if none is of an image.

        Ids from `vocab_size` on are rows of the pool.
        """
        ids = None
        for item in running.request.media:
            if item.end <= start or item.start >= start + count:
                continue
            stored = self._stored[_key(running.request, item)]
            first, end = max(start, item.start), min(start + count, item.end)
            rows = item.rows[first - item.start : end - item.start]
            ids = running.tokens[start : start + count].copy() if ids is None else ids
            there = np.where(rows < 0, NEWLINE_ROW, stored.rows.reshape(-1)[rows])
            ids[first - start : end - start] = self._vocab_size + there
        return ids

    def take_encodings(self) -> tuple[Encoding, ...]:
        """Takes the tiles to encode before the planned step. The next step may take the rows that this step reads."""
        encodings, self._encodings = tuple(self._encodings), []
        self._planned.clear()
        return encodings

    def unpin(self, place: Placement) -> None:
        """Ends the pin of a request that has stopped running."""
        self._pins.pop(place, None)

    def reset(self) -> None:
        """Forgets all features. No request may run."""
        assert not self._pins and not self._planned, "features that requests need are forgotten"
        for stored in self._stored.values():
            self._free(stored)
        self._stored.clear()

    def _store(self, key: _Key, item: MediaInput) -> _Stored | None:
        """Gives an item rows, for which it evicts others. If that is not enough, it evicts nothing and returns None."""
        assert self._shape is not None, "a request with images was refused"
        shape = (len(item.pixels), self._shape.rows_of(is_video=item.is_video))
        missing = shape[0] * shape[1] - self._rows.num_free
        needed = self._planned.union(self._pins.values())
        victims = []
        for other, stored in self._stored.items():
            if missing <= 0:
                break
            if other not in needed:
                victims.append(other)
                missing -= stored.rows.size
        if missing > 0:
            self._is_short = True
            return None
        for other in victims:
            self._free(self._stored.pop(other))
        self.num_evicted += len(victims)
        rows = self._rows.allocate(shape[0] * shape[1])
        assert rows is not None, "rows were made free"
        stored = _Stored(rows.reshape(shape) + (NUM_FIXED_ROWS - 1), np.zeros(shape[0], bool))  # its pages begin at 1
        self._stored[key] = stored
        return stored

    def _free(self, stored: _Stored) -> None:
        self._rows.free(stored.rows.reshape(-1) - (NUM_FIXED_ROWS - 1))

    def _plan(self, stored: _Stored, item: MediaInput, rows: np.ndarray) -> None:
        """Plans to encode the tiles of these rows that are not encoded."""
        tiles = np.unique(rows[rows >= 0] // stored.rows.shape[1])
        missing = tiles[~stored.is_encoded[tiles]]
        stored.is_encoded[missing] = True
        self.num_encoded += len(missing)
        for tile in missing.tolist():
            self._encodings.append(Encoding(item.pixels[tile], stored.rows[tile], item.is_video))

    def _move_pin(self, running: RunningRequest, place: Placement, end: int) -> None:
        """Moves a request's pin to the item, if any, inside which its next token, at index `end`, is."""
        self._pins.pop(place, None)
        for item in running.request.media:
            if item.start < end < item.end:
                self._pins[place] = _key(running.request, item)
