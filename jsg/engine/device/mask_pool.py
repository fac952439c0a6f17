"""The host's side of the token masks on the device: which row of the pool holds which mask.

Masks repeat: nearly every mask that a grammar needs was needed before, by it or by another grammar. So each mask is
sent to the device once and found by its content, and a step names one row for each sampled position. Row 0 allows
everything.
"""

from collections import OrderedDict
from typing import NamedTuple, final

import numpy as np

NUM_MASKS = 4096
"""Rows on the device with row 0, which is more than two steps can name. They take 64 MiB for 131 072 tokens."""
UPLOAD_SIZES = (1, 8)
"""Numbers of masks that are sent at a time."""
ALL_ALLOWED = 0


def num_words(vocab_size: int) -> int:
    """32-bit words of one mask: token t is bit t & 31 of word t >> 5."""
    return (vocab_size + 31) // 32


class Upload(NamedTuple):
    """Masks for the device, padded to one of `UPLOAD_SIZES` with copies of row 0.

    Attributes:
        rows: int32[k].
        masks: uint32[k, W].
    """

    rows: np.ndarray
    masks: np.ndarray


@final
class MaskPool:
    """Rows of the device's masks by content. A new mask takes the least recently used row.

    That row may belong to a step that has not run yet: the device keeps the order of calls, so the step still reads the
    old mask. Only the rows of the step that is being planned must stay.

    Invariant: rows and contents correspond one to one; `len(self)` + free rows == all rows but row 0.
    """

    def __init__(self, words: int, num_rows: int = NUM_MASKS):
        """Makes a pool of `num_rows` masks of `words` words each; row 0 is taken."""
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
        """Begins a step: rows that it does not ask for may be given away."""
        self._current.clear()

    def find(self, key: bytes | None) -> int | None:
        """The row of the mask with this key; None if it must be `put` first. The key None means row 0."""
        if key is None:
            return ALL_ALLOWED
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
            self._current.add(row)
            self.num_found += 1
        return row

    def put(self, key: bytes, mask: np.ndarray) -> int:
        """Gives a row to a mask that was not found. It keeps the array, which must not be written any more."""
        assert mask.shape == (self._words,), f"a mask has {self._words} words, but this one is {mask.shape}"
        assert key not in self._rows, "a mask is put into the pool twice"
        row = self._free.pop() if self._free else self._evict()
        self._rows[key] = row
        self._current.add(row)
        self._new.append((row, mask))
        self.num_made += 1
        return row

    def take_uploads(self) -> list[Upload]:
        """The masks that were put since the last call, for the device."""
        latest = dict(self._new)  # a row may have been given to another mask since
        new, self._new = list(latest.items()), []
        return [self._pack(new[start : start + UPLOAD_SIZES[-1]]) for start in range(0, len(new), UPLOAD_SIZES[-1])]

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        rows = [*self._rows.values(), *self._free]
        assert sorted(rows) == list(range(1, self._num_rows)), "a row of the mask pool is lost or has two contents"

    def _evict(self) -> int:
        for key, row in self._rows.items():  # rows of this step are at the end, so one of the first rows is free
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
