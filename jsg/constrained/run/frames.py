"""Describes the open frames of a text as far as they can matter to one token; masks are found by that description."""

from collections.abc import Callable, Hashable, Sequence

from jsg.constrained.run.memory import DEPTH, Memory
from jsg.constrained.tables import MAX, MIN, NUM_REQUIRED, UNBOUNDED, StaticTables

_MOST_CONTENTS = 64
"""Frames whose contents are compared; more are told apart by their numbers."""
_STEPS_PER_FRAME = 1000
"""To compare what it holds."""


class FramesRead:
    """Describes stacks of frames of one grammar."""

    def __init__(self, static: StaticTables, max_token_len: int | None):
        """`max_token_len` is as for `Machine`."""
        self._static = static
        self._max_token_len = max_token_len

    def read(
        self, frames: Sequence[int], floor: int, memory: Memory, spend: Callable[[int], None]
    ) -> tuple[Hashable, ...]:
        """What lies above a depth in the stacks under these top frames. It is equal where it makes no difference.

        Args:
            frames: One for each way to read the text, -1 for an empty stack.
            floor: The depth; negative: all of it.
            memory: Where the frames are.
            spend: Is told the steps of work that it takes, and may raise.
        """
        depths = [int(memory.frames[frame, DEPTH]) if frame >= 0 else 0 for frame in frames]
        found: list[tuple[Hashable, int]] = []
        # Whether two ways of reading become one depends on all that is below.
        for least in (max(floor, -1), -1):
            num_frames = sum([max(depth - max(least, 0), 0) for depth in depths])
            if num_frames > _MOST_CONTENTS:  # the same frames hold the same; it only serves fewer configurations
                return tuple(frames)
            spend(_STEPS_PER_FRAME * num_frames)
            found = [self._above(frame, least, memory) for frame in frames]
            if len({rest for _, rest in found}) == 1:
                break
        return tuple([contents for contents, _ in found])

    def _above(self, frame: int, floor: int, memory: Memory) -> tuple[Hashable, int]:
        """What the frames of a stack above a depth hold, and the frame below them."""
        contents = []
        while frame >= 0:
            parent, back, loop, count, mask, depth, _ = memory.frames[frame].tolist()
            if depth <= floor:
                break
            contents.append((back, loop, mask, *self._count_left(loop, count)))
            frame = parent
        return (*contents, "bottom") if frame < 0 and floor < 0 else tuple(contents), frame

    def _count_left(self, loop: int, count: int) -> tuple[int, int]:
        """How far a count is from both bounds of its loop, where one token can tell."""
        if loop < 0:
            return 0, 0
        row = self._static.loops[loop]
        least, most = max(int(row[MIN]) - count, 0), int(row[MAX]) - count
        if self._max_token_len is not None:
            least = min(least, self._max_token_len + 2)
            most = min(most, self._max_token_len + 2 + int(row[NUM_REQUIRED]))
        return least, -1 if row[MAX] == UNBOUNDED else most
