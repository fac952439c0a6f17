"""A compiled grammar that reads bytes: which may come next, where a text may end, what is forced."""

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

import numpy as np

from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.memory import (
    DEAD,
    DEPTH,
    DROPPED,
    FAILED,
    FRAMES,
    FROZEN,
    FROZEN_DEPTH,
    FULL,
    LOWEST,
    MAX_CALLS,
    OUT_OF_FUEL,
    PARENT,
    RETURN,
    STATES,
    STOPPED,
    TOO_MANY_CALLS,
    enlarged,
    new_memory,
    renewed,
)
from jsg.constrained.tables import MAX, MIN, NUM_REQUIRED, UNBOUNDED, StaticTables
from jsg.errors import GrammarError

Config = tuple[tuple[int, int], ...]
"""What a machine knows of a text: (state, frame) of each way to read it; frame -1 is the bottom. The order is that in
which the ways were found; it does not depend on how the text was cut into tokens."""

_CHAR_NODES = 2048
_ROOM_NODES = 256
_MOST_FRAMES = 8
"""Times `Limits.frames`: what texts may use before those that nobody needs are forgotten."""


class ByteTrie(Protocol):
    """Byte strings as a tree; see `trie.py`."""

    @property
    def byte(self) -> np.ndarray:
        """uint8[nodes], the byte that leads to a node; node 0 is the root."""
        ...

    @property
    def depth(self) -> np.ndarray:
        """uint16[nodes]."""
        ...

    @property
    def skip(self) -> np.ndarray:
        """int32[nodes], the first node behind a node's subtree."""
        ...

    @property
    def token_start(self) -> np.ndarray:
        """int32[nodes + 1], where a node's tokens begin in `tokens`."""
        ...

    @property
    def tokens(self) -> np.ndarray:
        """int32[...], tokens whose bytes end at a node."""
        ...


class Machine:
    """Reads texts of one grammar. Threads may share it: one reads at a time, and none holds the GIL while it does.

    States are made when a text first needs them. Configurations are values: to go back, or to go two ways, keep them.

    Invariants: the numbers in a configuration stay valid until `compact`.
    """

    def __init__(self, static: StaticTables, limits: Limits = LIMITS, max_token_len: int | None = None):
        """Makes a machine that has read nothing.

        Args:
            static: The grammar.
            limits: What states, stacks and walks may cost.
            max_token_len: Bytes of the longest token, for `frames_read`; None: counts are told apart exactly.
        """
        from jsg.constrained import kernels, states  # they load numba, which only those who mask should pay for

        self._kernels = kernels
        self._states = states
        self._static = static
        self._limits = limits
        self._max_token_len = max_token_len
        self._lock = threading.Lock()
        self._memory = new_memory(static, limits)
        self._alphabets: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # by identity, so it holds the key
        # What is never touched of these takes no memory.
        self._nodes = np.empty((_CHAR_NODES, 2 + 2 * limits.heads), np.int32)
        self._slots = np.empty(2 * _CHAR_NODES, np.int32)
        self._known_text: dict[tuple[int, int], dict[int, bool]] = {}
        sizes = np.bincount(static.classes, minlength=static.num_classes)
        self._only_byte = np.full(static.num_classes, -1, np.int16)
        for byte in np.flatnonzero(sizes[static.classes] == 1):
            self._only_byte[static.classes[byte]] = byte
        with self._lock:
            self._start: Config = ((self._run(states.state_of_list, (), static.start), -1),)

    # -- Reading

    def start(self) -> Config:
        """The configuration of the empty text."""
        return self._start

    def advance(self, config: Config, data: bytes) -> Config | None:
        """The configuration after more bytes; None where they cannot come."""
        with self._lock:
            row = self._run(self._kernels.advance, config, np.frombuffer(data, np.uint8))
            return None if row < 0 else self._config(row)

    def is_accepting(self, config: Config) -> bool:
        """The text may end here."""
        with self._lock:
            return bool(self._run(self._kernels.is_accepting, config))

    def can_continue(self, config: Config) -> bool:
        """Some byte may come next."""
        with self._lock:
            return self._possible(config, 1)[0] > 0

    def allowed_bytes(self, config: Config) -> set[int]:
        """All bytes that may come next."""
        with self._lock:
            _, classes = self._possible(config, self._static.num_classes)
            return set(np.flatnonzero(classes[self._static.classes]).tolist())

    def forced_run(self, config: Config, max_bytes: int) -> bytes:
        """The bytes that must come next, as far as nothing else may and the text may not end; whole characters only."""
        out = np.zeros(max_bytes, np.uint8)
        with self._lock:
            keep = self.num_frames
            length = self._run(self._kernels.forced_run, config, self._only_byte, out)
            _, classes = self._possible(self._config(0), self._static.num_classes)
            self._states.forget_frames(self._memory, keep)
        data = out[:length].tobytes()
        if not classes[self._static.classes[0x80:0xC0]].any():
            return data
        # A character is not complete: go back to before its first byte.
        while data and 0x80 <= data[-1] < 0xC0:
            data = data[:-1]
        return data[:-1] if data and data[-1] >= 0xC0 else data

    # -- Masks

    def walk(self, config: Config, trie: ByteTrie, mask: np.ndarray) -> int:
        """Sets the bit of every token of the trie that may come next.

        Args:
            config: Where the text stands.
            trie: The tokens.
            mask: uint32[words], token t at bit t & 31 of word t >> 5.

        Returns:
            How many open frames, counted from the top, it read: with `frames_read` of so many, the mask serves other
            configurations of the same states.

        Raises:
            GrammarError: It took more fuel than there is.
        """
        kernels = self._kernels
        arrays = [_read_only(a) for a in (trie.byte, trie.depth, trie.skip, trie.token_start, trie.tokens)]
        with self._lock:
            keep = self.num_frames
            self._memory.counters[LOWEST] = UNBOUNDED
            try:
                self._run(kernels.walk, config, *arrays, mask)
            finally:
                self._states.forget_frames(self._memory, keep)
            top = max((self._depth(frame) for _, frame in config), default=0)
            return max(0, top - int(self._memory.counters[LOWEST]) + 1)

    def frames_read(self, config: Config, depth: int) -> Hashable:
        """What the uppermost `depth` frames hold, so far as it can matter to one token.

        A mask made by a walk that read `depth` frames is right for every configuration of the same states for which
        this is equal.
        """
        with self._lock:
            top = max([self._depth(frame) for _, frame in config])
            near_limit = top if self._is_near_limit(top) else -1
            if depth == 0 and len(config) == 1:
                return near_limit
            found = [self._frames_above(frame, top - depth) for _, frame in config]
            if len({rest for _, rest in found}) > 1:
                # Whether two ways of reading become one depends on all that is below.
                found = [self._frames_above(frame, -1) for _, frame in config]
            return (near_limit, *[contents for contents, _ in found])

    def accepts_all(self, config: Config, chars: np.ndarray, max_chars: int) -> tuple[bool, int]:
        """Whether every text of at most `max_chars` characters of a set may come next, and how many frames it read.

        Args:
            config: Where the text stands.
            chars: int16[states, 256], the set as an automaton over UTF-8: the next state or -1; 0 is a boundary.
            max_chars: At least 1.

        Returns:
            True only where it is so; False where it is not, or would take long to find out. And frames as of `walk`.
        """
        with self._lock:
            state, frame = config[0]
            known = self._known_text.setdefault((id(chars), max_chars), {})
            top = max([self._depth(frame) for _, frame in config])
            # What no frame has a say in is so wherever the state stands, unless the stack is about to be full.
            is_lasting = len(config) == 1 and not self._is_near_limit(top)
            if is_lasting and (answer := known.get(state)) is not None:
                return answer, 0
            nodes, keep, counters = self._nodes, self.num_frames, self._memory.counters
            counters[FROZEN], counters[FROZEN_DEPTH], counters[FAILED], counters[LOWEST] = max_chars, top, 0, UNBOUNDED
            try:
                size = self._run(self._kernels.accepts_all, config, *self._spelled(chars), nodes, self._slots)
            finally:
                counters[FROZEN] = 0
                self._states.forget_frames(self._memory, keep)
            depth = max(0, top - int(counters[LOWEST]) + 1)
            if is_lasting and not depth:
                known[state] = size > 0
                found = nodes[:size]
                same = (found[:, 0] == 0) & (found[:, 1] == 1) & (found[:, 3] == frame)
                known.update(dict.fromkeys(found[same, 2].tolist(), True))
            return size > 0, depth

    def text_room(self, config: Config, chars: np.ndarray, most: int) -> tuple[int, bool, int]:
        """How many characters of a set every text may have that comes next, and whether none may have more.

        Args:
            config: Where the text stands.
            chars: As for `accepts_all`.
            most: Where to stop; the flag is then False.

        Returns:
            The number, the flag, and how many frames it read, as `walk` counts them.
        """
        with self._lock:
            nodes, keep, counters = self._nodes[:_ROOM_NODES], self.num_frames, self._memory.counters
            counters[LOWEST] = UNBOUNDED
            try:
                found = self._run(self._kernels.text_room, config, *self._spelled(chars), nodes, most)
            finally:
                self._states.forget_frames(self._memory, keep)
            top = max([self._depth(frame) for _, frame in config])
            return found >> 1, bool(found & 1), max(0, top - int(counters[LOWEST]) + 1)

    def is_dead(self, config: Config, byte: int) -> bool:
        """Whether it is known already, at a look, that a byte cannot come next."""
        with self._lock:
            klass, trans = self._static.classes[byte], self._memory.trans
            return all(trans[state, klass] == DEAD for state, _ in config)

    # -- Memory

    @property
    def num_states(self) -> int:
        """States made so far."""
        return int(self._memory.counters[STATES])

    @property
    def num_frames(self) -> int:
        """Frames that are remembered."""
        return int(self._memory.counters[FRAMES])

    @property
    def num_dropped(self) -> int:
        """How often a way to read a text was given up because there were more than `Limits.heads`."""
        return int(self._memory.counters[DROPPED])

    @property
    def num_bytes(self) -> int:
        """Memory of what was made so far; the tables are not counted."""
        return sum(array.nbytes for array in self._memory)

    def compact(self, live: Iterable[Config]) -> dict[Config, Config]:
        """Forgets all states and frames that none of these configurations needs, and what was made of the others.

        Returns:
            What each configuration has become. Others are void, but for `start`, which is always kept.
        """
        with self._lock:
            configs = [*live, self._start]
            old = self._memory
            frames = self._needed_frames(configs)
            states = np.unique(
                np.concatenate((old.frames[frames, RETURN], [state for config in configs for state, _ in config]))
            ).astype(np.int64)
            new_frame = {int(frame): i for i, frame in enumerate(frames)} | {-1: -1}
            new_state = {int(state): i for i, state in enumerate(states)}
            rows = old.frames[frames]
            rows[:, PARENT] = [new_frame[parent] for parent in rows[:, PARENT].tolist()]
            rows[:, RETURN] = [new_state[back] for back in rows[:, RETURN].tolist()]
            self._memory = renewed(old, self._static, self._limits, states, rows)
            self._states.rebuild_indexes(self._memory)
            self._known_text.clear()
            renamed = {c: tuple([(new_state[state], new_frame[frame]) for state, frame in c]) for c in configs}
            self._start = renamed[self._start]
            return renamed

    # -- Inside; the lock is held

    def _needed_frames(self, configs: Iterable[Config]) -> np.ndarray:
        """The frames of these configurations and all that lie below them, ascending: parents first."""
        frames, needed = self._memory.frames, set[int]()
        for config in configs:
            for _, frame in config:
                while frame >= 0 and frame not in needed:
                    needed.add(frame)
                    frame = int(frames[frame, PARENT])
        return np.array(sorted(needed), np.int64)

    def _is_near_limit(self, depth: int) -> bool:
        """Whether one token may need more stack than there is, from so deep."""
        longest = self._limits.stack if self._max_token_len is None else self._max_token_len
        return depth + longest * self._static.max_push > self._limits.stack

    def _spelled(self, chars: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A set of characters in the classes of bytes of this grammar, as the kernels want it."""
        found = self._alphabets.get(id(chars))
        if found is None:
            steps = np.sort((chars.astype(np.int32) << 8) + self._static.classes, axis=1)
            is_kept = steps >= 0
            is_kept[:, 1:] &= steps[:, 1:] != steps[:, :-1]
            starts = np.concatenate(([0], np.cumsum(is_kept.sum(axis=1)))).astype(np.int32)
            spelled = steps[is_kept]
            found = self._alphabets[id(chars)] = (_read_only(starts), _read_only(spelled), chars)
        return found[:2]

    def _config(self, row: int) -> Config:
        """The heads in a row."""
        heads = self._memory.heads[row].tolist()
        return tuple([(heads[i], heads[i + 1]) for i in range(1, 1 + 2 * heads[0], 2)])

    def _depth(self, frame: int) -> int:
        return int(self._memory.frames[frame, DEPTH]) if frame >= 0 else 0

    def _frames_above(self, frame: int, floor: int) -> tuple[Hashable, int]:
        """What the frames of a stack above a depth hold, and the frame below them."""
        contents = []
        while frame >= 0:
            parent, back, loop, count, mask, depth, _ = self._memory.frames[frame].tolist()
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

    def _possible(self, config: Config, most: int) -> tuple[int, np.ndarray]:
        """How many classes of bytes may come next, counted up to `most`, and which."""
        classes = np.zeros(self._static.num_classes, np.uint8)
        keep = self.num_frames
        try:
            return self._run(self._kernels.possible_classes, config, most, classes), classes
        finally:
            self._states.forget_frames(self._memory, keep)

    def _run(self, kernel: Callable[..., int], config: Config, *args: object) -> int:
        """What a kernel finds for the heads of a configuration, with as much room as it needs."""
        while True:
            memory = self._memory
            memory.counters[FULL] = -1
            if config:
                memory.heads[0, : 1 + 2 * len(config)] = [len(config), *[part for head in config for part in head]]
            result = kernel(self._static, memory, *args)
            if result != STOPPED:
                return result
            self._make_room(int(memory.counters[FULL]))

    def _make_room(self, which: int) -> None:
        """Doubles what was full.

        Raises:
            GrammarError: It may not become larger, or no room would help.
        """
        limits = self._limits
        if which == OUT_OF_FUEL:
            raise GrammarError(
                f"finding the tokens that may come next took more than {limits.walk} steps; "
                "make the grammar less ambiguous"
            )
        if which == TOO_MANY_CALLS:
            raise GrammarError(
                f"one byte may begin more than {MAX_CALLS} rules at once; write what they have in common first"
            )
        if which == STATES and self.num_states >= limits.states:
            raise GrammarError(f"the grammar needs more than {limits.states} states for this text; simplify it")
        if which == FRAMES and self.num_frames >= _MOST_FRAMES * limits.frames:
            raise GrammarError("the grammar has too many ways to read this text; make it less ambiguous")
        self._memory = enlarged(self._memory, which, limits.states)
        self._states.rebuild_indexes(self._memory)


def _read_only(array: np.ndarray) -> np.ndarray:
    """The array as the kernels know it: numba would compile them again for one that may be written to."""
    if not array.flags.writeable:
        return array
    array = array.view()
    array.flags.writeable = False
    return array
