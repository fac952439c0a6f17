"""The host's side of the token masks on the device: which row of the pool holds which mask.

Masks repeat: of those that a grammar needs nearly all were needed before, by it or by another. So each is sent to the
device once and kept there under its content, and a step names one row per sampled position. Row 0 allows everything.
"""

from collections import OrderedDict
from typing import NamedTuple, final

import numpy as np

NUM_MASKS = 4096
"""Rows on the device, row 0 included: more than two steps can name. 64 MiB for 131 072 tokens."""
UPLOAD_SIZES = (1, 8)
"""Masks that are sent at a time."""
ALL_ALLOWED = 0


def num_words(vocab_size: int) -> int:
    """32-bit words of one mask: token t is bit t & 31 of word t >> 5."""
    return (vocab_size + 31) // 32


class Upload(NamedTuple):
    """Masks for the device, padded to one of `UPLOAD_SIZES` with what row 0 holds anyway.

    Attributes:
        rows: int32[k].
        masks: uint32[k, W].
    """

    rows: np.ndarray
    masks: np.ndarray


@final
class MaskPool:
    """Rows of the device's masks by content, the least recently used given away first.

    A row may be given away while a step that reads it has not run yet: the device does everything in the order in
    which it was told, so the step reads what was there before. Only the rows of the step that is being put together
    must stay.

    Invariant: a row has one content and a content one row; `len(self)` + free rows == all rows but row 0.
    """

    def __init__(self, words: int, num_rows: int = NUM_MASKS):
        """A pool of `num_rows` masks of so many words, of which row 0 is taken."""
        self.num_made = 0
        self.num_found = 0
        self._words = words
        self._num_rows = num_rows
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_rows - 1, 0, -1))
        self._current: set[int] = set()
        self._new: list[tuple[int, np.ndarray]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def begin_step(self) -> None:
        """From here on only rows that are asked for again are kept."""
        self._current.clear()

    def find(self, key: bytes | None) -> int | None:
        """The row of a mask by its content's key; None where it must be put there first. The key None is row 0."""
        if key is None:
            return ALL_ALLOWED
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
            self._current.add(row)
            self.num_found += 1
        return row

    def put(self, key: bytes, mask: np.ndarray) -> int:
        """Gives a mask that was not found a row, and keeps the array to be sent: it must not be written any more."""
        assert mask.shape == (self._words,), f"a mask has {self._words} words, but this one is {mask.shape}"
        assert key not in self._rows, "a mask is put into the pool twice"
        row = self._free.pop() if self._free else self._evict()
        self._rows[key] = row
        self._current.add(row)
        self._new.append((row, mask))
        self.num_made += 1
        return row

    def take_uploads(self) -> list[Upload]:
        """What has been put there since the last time and is not on the device yet."""
        latest = dict(self._new)  # a row may have been given away again since
        new, self._new = list(latest.items()), []
        return [self._pack(new[start : start + UPLOAD_SIZES[-1]]) for start in range(0, len(new), UPLOAD_SIZES[-1])]

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        rows = [*self._rows.values(), *self._free]
        assert sorted(rows) == list(range(1, self._num_rows)), "a row of the mask pool is lost or has two contents"

    def _evict(self) -> int:
        for key, row in self._rows.items():  # those of this step were moved to the end, so the first one is nearly it
            if row not in self._current:
                del self._rows[key]
                return row
        raise AssertionError("a step has more masks than the pool has rows")

    def _pack(self, part: list[tuple[int, np.ndarray]]) -> Upload:
        size = next(size for size in UPLOAD_SIZES if size >= len(part))
        rows = np.zeros(size, np.int32)
        masks = np.full((size, self._words), 0xFFFFFFFF, np.uint32)
        for index, (row, mask) in enumerate(part):
            rows[index], masks[index] = row, mask
        return Upload(rows, masks)
