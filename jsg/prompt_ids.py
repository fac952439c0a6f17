"""The token ids of a prompt as an array that nobody changes. All answers to the prompt share it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, final, overload

from jsg.errors import require

ndarray = Any
"""NumPy's type: to import NumPy takes longer than everything that a command line needs of this module."""

CHUNK = 2**15
"""Ids that are checked in one go. Other threads have their turn between two chunks."""

_RULE = ("input_ids", "integers in [0, 2^31)")


@final
class PromptIds(Sequence[int]):
    """At least one integer in [0, 2^31). They are checked when this is made, so whoever has it need not check them.

    A slice is a tuple, and a sum is of this type. It equals a tuple or a list of the same ids.

    Attributes:
        array: int32, read-only.
        highest: The largest id.
    """

    __slots__ = ("array", "highest")

    def __init__(self, array: ndarray) -> None:
        """Takes an int32 array, and keeps it without a copy. Raises RequestError as `of`."""
        require(len(array) > 0, "input_ids", "at least one token", [], "send a prompt")
        require(bool(array.min() >= 0), *_RULE, [int(array.min())], "correct them")
        self.array = array
        self.array.flags.writeable = False
        self.highest = int(array.max())

    @classmethod
    def of(cls, ids: Sequence[int]) -> "PromptIds":
        """These ids. Raises RequestError where there are none, or where one is no integer in [0, 2^31)."""
        if isinstance(ids, cls):
            return ids
        import numpy as np  # here: see `ndarray`

        require(len(ids) > 0, "input_ids", "at least one token", ids, "send a prompt")
        array = np.empty(len(ids), np.int32)
        for start in range(0, len(ids), CHUNK):
            some = ids[start : start + CHUNK]
            are_ints = set(map(type, some)) <= {int}
            try:
                array[start : start + CHUNK] = some if are_ints else -1
            except OverflowError:
                are_ints = False
            require(are_ints and bool(array[start : start + CHUNK].min() >= 0), *_RULE, ids, "correct them")
        return cls(array)

    @classmethod
    def of_any(cls, ids: Sequence[int]) -> "PromptIds | tuple[()]":
        """As `of`, but there may be none."""
        return cls.of(ids) if ids else ()

    @classmethod
    def joined(cls, *parts: Sequence[int]) -> "PromptIds | tuple[()]":
        """The ids of all parts. No Python object is made of those that were checked. Raises RequestError as `of`."""
        import numpy as np  # here: see `ndarray`

        some = [cls.of(part) for part in parts if part]
        if len(some) < 2:
            return some[0] if some else ()
        return cls(np.concatenate([part.array for part in some]))

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self.array[index].tolist())
        return int(self.array[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __add__(self, behind: Sequence[int]) -> "PromptIds":
        return self.joined(self, behind) or self

    def __radd__(self, before: Sequence[int]) -> "PromptIds":
        return self.joined(before, self) or self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PromptIds):
            return self is other or self.array.tobytes() == other.array.tobytes()
        return isinstance(other, tuple | list) and self.array.tolist() == list(other)

    def __hash__(self) -> int:
        return hash(self[:])

    def __repr__(self) -> str:
        return repr(self[:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> ndarray:
        made = self.array if dtype is None else self.array.astype(dtype, copy=False)
        return made.copy() if copy else made


@final
class GrowingIds:
    """Ids that grow. Those that were checked stay one array, because many prompts may begin with the same long text."""

    def __init__(self) -> None:
        """There are none yet."""
        self._parts: list[list[int] | PromptIds] = []
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def add(self, ids: Sequence[int]) -> None:
        """Appends some."""
        last = self._parts[-1] if self._parts else None
        if isinstance(ids, PromptIds):
            self._parts.append(ids)
        elif isinstance(last, list):
            last += ids
        else:
            self._parts.append(list(ids))
        self._len += len(ids)

    def whole(self) -> PromptIds | tuple[()]:
        """All of them. Raises RequestError as `PromptIds.of`."""
        return PromptIds.joined(*self._parts)


def join_ids(parts: Sequence[tuple[int, ...] | PromptIds]) -> tuple[int, ...] | PromptIds:
    """Ids one after another. They are a tuple if none of them were checked, so a client does without NumPy."""
    if any(isinstance(part, PromptIds) for part in parts):
        return PromptIds.joined(*parts)
    return tuple(itertools.chain.from_iterable(parts))
