"""The machine of a grammar. It reads the bytes of a text and says which may come next, and whether the text may end."""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np

from jsg.constrained.limits import LIMITS, Account, Limits
from jsg.constrained.run import kernel_cache
from jsg.constrained.run.memory import (
    CALLED,
    DEAD,
    DEPTH,
    ENTRIES,
    FAILED,
    FRAMES,
    FROZEN,
    FROZEN_DEPTH,
    FUEL,
    FULL,
    HEADS,
    LOWEST,
    MAX_HEADS,
    OUT_OF_FUEL,
    PARENT,
    RETURN,
    SIBLING,
    STATES,
    STOPPED,
    TOO_MUCH_WORK,
    UNKNOWN,
    Memory,
    enlarged,
    new_memory,
    num_bytes,
    renewed,
)
from jsg.constrained.run.trie import Trie
from jsg.constrained.tables import MAX, MIN, NUM_REQUIRED, UNBOUNDED, StaticTables
from jsg.errors import GrammarError

Config = tuple[tuple[int, int], ...]
"""What a machine knows of a text: (state, frame) of each way to read it; frame -1 is the bottom. The ways are in the
order in which they were found, which does not depend on how the text was split into tokens."""

_CHAR_NODES = 2048
_ROOM_NODES = 256
_BYTES_PER_TEXT, _BYTES_PER_MACHINE = 80, 6144
"""About how many bytes it takes to remember for a state whether all text of one slice may come next, and what a machine
takes beside its memory: its objects, and sets of characters in its classes of bytes."""
_BYTES_PER_STEP = 2
"""How many bytes of new memory cost one step."""
_MOST_CONTENTS = 64
"""The most frames that are compared by their contents. If there are more, they are compared by their numbers."""
_STEPS_PER_FRAME = 1000
"""Steps that comparing the contents of a frame costs."""
_HINT_STEPS = 10_000_000
"""The most steps that finding forced bytes may take, and the steps that it always leaves for the text."""
_LEAST_GROWTH = 1.25
"""The factor by which an array grows if doubling it would exceed the limit."""


class _Scratch(threading.local):
    """Arrays that `accepts_all` and `text_room` write and nobody reads later, so all machines of a thread share them.

    If each machine had its own, it would hold half a megabyte, of which pages that an earlier owner has written count.
    """

    def __init__(self) -> None:
        self._by_heads: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def of(self, heads: int) -> tuple[np.ndarray, np.ndarray]:
        """The nodes, for machines with this limit of heads, and the hash table of the nodes."""
        found = self._by_heads.get(heads)
        if found is None:
            found = np.empty((_CHAR_NODES, 2 + 2 * heads), np.int32), np.empty(2 * _CHAR_NODES, np.int32)
            self._by_heads[heads] = found
        return found


_scratch = _Scratch()


class Machine:
    """Reads texts of one grammar. Threads may share it: one of them reads at a time, and reading releases the GIL.

    States are made when a text first needs them. Configurations are values, so a caller that keeps one can go back to
    it.

    Invariants: the numbers in a configuration stay valid until `compact`.
    """

    def __init__(self, static: StaticTables, limits: Limits = LIMITS, max_token_len: int | None = None):
        """Makes a machine that has read nothing.

        Args:
            static: The grammar.
            limits: The most that states, stacks and walks may cost.
            max_token_len: Bytes of the longest token, with which `frames_read` can treat different counts as equal;
                None means that all counts differ.
        """
        kernel_cache.load()
        from jsg.constrained.run import kernels, states  # these load numba, which only a process that masks needs

        self._kernels = kernels
        self._states = states
        self._static = static
        self._limits = limits
        self._max_token_len = max_token_len
        self._lock = threading.Lock()
        self._is_paid = False
        self._static_record = kernels.run.record(static)
        self._memory = new_memory(static, limits)
        self._memory_record = kernels.run.record(self._memory)
        # The keys are identities of arrays. The values hold the arrays, so that no other one gets such an identity.
        self._alphabets: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
        self._known_text: dict[tuple[int, int], dict[int, bool]] = {}
        sizes = np.bincount(static.classes, minlength=static.num_classes)
        self._only_byte = np.full(static.num_classes, -1, np.int16)
        for byte in np.flatnonzero(sizes[static.classes] == 1):
            self._only_byte[static.classes[byte]] = byte
        with self._lock:
            self._start: Config = ((self._run(states.state_of_list, (), static.start), -1),)

    @contextlib.contextmanager
    def paid_by(self, account: Account | None) -> Iterator[None]:
        """A context in which all questions together may take the steps of one mask, which the account pays for.

        Only one thread may use it at a time. Outside of it, each question may take the steps of a mask. A question
        raises GrammarError when no steps are left.
        """
        limits = self._limits
        most = limits.mask_steps if account is None else min(limits.mask_steps, account.steps_left(limits))
        self._memory.counters[FUEL] = most
        self._is_paid = True
        try:
            yield
        finally:
            self._is_paid = False
            if account is not None:
                account.num_steps += most - int(self._memory.counters[FUEL])

    # -- Reading

    def start(self) -> Config:
        """The configuration of the empty text."""
        return self._start

    def advance(self, config: Config, data: bytes) -> Config | None:
        """The configuration after these bytes; None if they may not come next."""
        with self._lock:
            row = self._run(self._kernels.advance, config, np.frombuffer(data, np.uint8))
            return None if row < 0 else self._config(row)

    def is_accepting(self, config: Config) -> bool:
        """Whether the text may end here."""
        with self._lock:
            return bool(self._run(self._kernels.is_accepting, config))

    def can_continue(self, config: Config) -> bool:
        """Whether any byte may come next."""
        with self._lock:
            return self._possible(config, 1)[0] > 0

    def allowed_bytes(self, config: Config) -> set[int]:
        """All bytes that may come next."""
        with self._lock:
            _, classes = self._possible(config, self._static.num_classes)
            return set(np.flatnonzero(classes[self._static.classes]).tolist())

    def forced_run(self, config: Config, max_bytes: int) -> bytes:
        """The forced bytes: those up to the first place where there is a choice or the text may end.

        Only complete characters are given. If finding all of them costs too many steps, only the first are given,
        because they are a hint and the text must not run out of steps for it.
        """
        out = np.zeros(max_bytes, np.uint8)
        with self._lock:
            keep = self.num_frames
            least = max(int(self._memory.counters[FUEL]) - _HINT_STEPS, _HINT_STEPS)
            try:
                length = self._run(self._kernels.forced_run, config, self._only_byte, least, out)
                if not length:
                    return b""
                _, classes = self._possible(self._config(0), self._static.num_classes)
            finally:
                self._forget_frames(keep)
        data = out[:length].tobytes()
        if not classes[self._static.classes[0x80:0xC0]].any():
            return data
        # The last character is incomplete, so it is cut off.
        while data and 0x80 <= data[-1] < 0xC0:
            data = data[:-1]
        return data[:-1] if data and data[-1] >= 0xC0 else data

    # -- Masks

    def walk(self, config: Config, trie: Trie, mask: np.ndarray) -> int:
        """Sets the bit of every token of the trie that may come next.

        Args:
            config: The configuration of the text.
            trie: The tokens.
            mask: uint32[words], token t at bit t & 31 of word t >> 5.

        Returns:
            How many open frames, counted from the top, the walk read. The mask also holds for configurations of the
            same states that have an equal `frames_read` for this number.

        Raises:
            GrammarError: The walk needs more steps than are left.
        """
        with self._lock:
            return self._tried(self._kernels.walk, config, *trie, mask)[1]

    def frames_read(self, config: Config, depth: int) -> Hashable:
        """A value for what the uppermost `depth` frames can mean to one token.

        If a walk read `depth` frames, its mask holds for every configuration of the same states with an equal value.
        """
        with self._lock:
            top = max([self._depth(frame) for _, frame in config])
            near_limit = top if self._is_near_limit(top) else -1
            if depth == 0 and len(config) == 1:
                return near_limit
            frames = [frame for _, frame in config]
            found: list[tuple[Hashable, int]] = []
            # Whether two ways of reading become one depends on all frames below them. So if the frames below differ,
            # the whole stacks are compared.
            for floor in (max(top - depth, -1), -1):
                num_frames = sum([max(self._depth(frame) - max(floor, 0), 0) for frame in frames])
                if num_frames > _MOST_CONTENTS:  # Equal numbers mean equal contents, but fewer stacks have them.
                    return (near_limit, *frames)
                self._spend(_STEPS_PER_FRAME * num_frames)
                found = [self._above(frame, floor) for frame in frames]
                if len({below for _, below in found}) == 1:
                    break
            return (near_limit, *[contents for contents, _ in found])

    def accepts_all(self, config: Config, chars: np.ndarray, max_chars: int) -> tuple[bool, int]:
        """Whether every text of at most `max_chars` characters of a set may come next.

        Args:
            config: The configuration of the text.
            chars: int16[states, 256], the set as an automaton over UTF-8: the next state or -1. State 0 is the boundary
                between characters.
            max_chars: At least 1.

        Returns:
            (answer, how many open frames were read, as `walk` counts them). The answer may also be False because the
            proof would take too long.
        """
        with self._lock:
            state, frame = config[0]
            known = self._known_text.setdefault((id(chars), max_chars), {})
            top = max([self._depth(frame) for _, frame in config])
            # An answer for which no frame was read holds for this state in any stack that is not nearly full.
            is_lasting = len(config) == 1 and not self._is_near_limit(top)
            if is_lasting and (answer := known.get(state)) is not None:
                return answer, 0
            starts, spelled, firsts = self._spelled(chars)
            if self._is_barred(config, firsts):
                return False, 0
            counters = self._memory.counters
            nodes, slots = _scratch.of(int(counters[MAX_HEADS]))
            counters[FROZEN], counters[FROZEN_DEPTH], counters[FAILED] = max_chars, top, 0
            try:
                size, depth = self._tried(self._kernels.accepts_all, config, starts, spelled, nodes, slots)
            finally:
                counters[FROZEN] = 0
            if is_lasting and not depth:
                known[state] = size > 0
                found = nodes[:size]
                same = (found[:, 0] == 0) & (found[:, 1] == 1) & (found[:, 3] == frame)
                known.update(dict.fromkeys(found[same, 2].tolist(), True))
            return size > 0, depth

    def text_room(self, config: Config, chars: np.ndarray, most: int) -> tuple[int, bool, int]:
        """The largest number n such that every text of n characters of a set may come next.

        Args:
            config: The configuration of the text.
            chars: As for `accepts_all`.
            most: The highest number to try.

        Returns:
            (n, whether no longer text of the set may come, how many open frames were read, as `walk` counts them). The
            second is False if n is `most`.
        """
        with self._lock:
            starts, spelled, firsts = self._spelled(chars)
            if self._is_barred(config, firsts):
                # Some characters may not come. That none of them may come is not worth finding out.
                return 0, False, 0
            nodes, slots = _scratch.of(int(self._memory.counters[MAX_HEADS]))
            nodes, slots = nodes[:_ROOM_NODES], slots[: 2 * _ROOM_NODES]
            found, depth = self._tried(self._kernels.text_room, config, starts, spelled, nodes, slots, most)
            return found >> 1, bool(found & 1), depth

    def is_dead(self, config: Config, byte: int) -> bool:
        """Whether the states alone show that a byte may not come next. No frame is read."""
        with self._lock:
            klass = self._static.classes[byte]
            if any(self._memory.trans[state, klass] == UNKNOWN for state, _ in config):
                self._run(self._kernels.expand_heads, config)
            trans = self._memory.trans
            return all(trans[state, klass] == DEAD for state, _ in config)

    # -- Memory

    @property
    def num_states(self) -> int:
        """The number of states made so far."""
        return int(self._memory.counters[STATES])

    @property
    def num_frames(self) -> int:
        """The number of stored frames."""
        return int(self._memory.counters[FRAMES])

    @property
    def num_bytes(self) -> int:
        """Memory of everything made so far, without the grammar's tables."""
        known = sum(map(len, self._known_text.values()))
        return num_bytes(self._memory) + _BYTES_PER_MACHINE + _BYTES_PER_TEXT * known

    @property
    def fullness(self) -> float:
        """How much of its limits of states and memory the machine uses, from 0 to 1. Above 0.5 call `compact`."""
        limits = self._limits
        return max(self.num_states / limits.states, self.num_bytes / limits.machine_bytes)

    @property
    def needs_room(self) -> bool:
        """Whether the last question was refused for lack of room for states or frames."""
        return 0 <= int(self._memory.counters[FULL]) < OUT_OF_FUEL

    def compact(self, live: Iterable[Config]) -> dict[Config, Config]:
        """Forgets all states and frames except those that these configurations need, and all transitions.

        Returns:
            The new value of each configuration. Configurations that were not given become invalid. The one of `start`
            is always kept.
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
            for column in (PARENT, SIBLING):
                rows[:, column] = [new_frame[frame] for frame in rows[:, column].tolist()]
            rows[:, RETURN] = [new_state[back] for back in rows[:, RETURN].tolist()]
            self._use(renewed(old, self._static, self._limits, states, rows))
            self._known_text.clear()
            renamed = {c: tuple([(new_state[state], new_frame[frame]) for state, frame in c]) for c in configs}
            self._start = renamed[self._start]
            return renamed

    # -- Internal; the caller holds the lock

    def _forget_frames(self, keep: int) -> None:
        """Forgets all frames but the first `keep`."""
        if self.num_frames > keep:
            self._call(self._states.forget_frames, keep)

    def _is_barred(self, config: Config, firsts: np.ndarray) -> bool:
        """Whether there is one of these classes of bytes that, as is already known, no head can read."""
        if len(config) == 1:
            return bool((self._memory.trans[config[0][0], firsts] == DEAD).any())
        return bool((self._memory.trans[[state for state, _ in config]][:, firsts] == DEAD).all(axis=0).any())

    def _above(self, frame: int, floor: int) -> tuple[Hashable, int]:
        """The contents of a stack's frames above a depth (of all frames, if negative), and the frame below them."""
        contents = []
        while frame >= 0:
            parent, back, loop, count, mask, sibling, depth, _ = self._memory.frames[frame].tolist()
            if depth <= floor:
                break
            contents.append((back, loop, mask, *self._count_left(loop, count), sibling >= 0))
            frame = sibling if sibling >= 0 else parent
        return (*contents, "bottom") if frame < 0 and floor < 0 else tuple(contents), frame

    def _count_left(self, loop: int, count: int) -> tuple[int, int]:
        """How far a count is from both bounds of its loop. Distances that no token can cross are equal."""
        if loop < 0:
            return 0, 0
        row, longest = self._static.loops[loop], self._max_token_len
        least, most = max(int(row[MIN]) - count, 0), int(row[MAX]) - count
        if longest is not None:
            least, most = min(least, longest + 2), min(most, longest + 2 + int(row[NUM_REQUIRED]))
        return least, -1 if row[MAX] == UNBOUNDED else most

    def _needed_frames(self, configs: Iterable[Config]) -> np.ndarray:
        """The frames of these configurations and all that lie below them, ascending: parents first."""
        frames, needed = self._memory.frames, set[int]()
        todo = [frame for config in configs for _, frame in config]
        while todo:
            frame = todo.pop()
            if frame >= 0 and frame not in needed:
                needed.add(frame)
                todo.extend(frames[frame, [PARENT, SIBLING]].tolist())
        return np.array(sorted(needed), np.int64)

    def _is_near_limit(self, depth: int) -> bool:
        """Whether a token that is read at this depth may exceed the limit of the stack."""
        longest = self._limits.stack if self._max_token_len is None else self._max_token_len
        return depth + longest * self._static.max_push > self._limits.stack

    def _spelled(self, chars: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A set of characters in this grammar's classes of bytes, in the form for kernels, and its first classes."""
        found = self._alphabets.get(id(chars))
        if found is None:
            starts, spelled = np.empty(len(chars) + 1, np.int32), np.empty(chars.size, np.int32)
            size = self._call(self._kernels.spell, chars, starts, spelled)
            spelled = spelled[:size].copy()
            found = self._alphabets[id(chars)] = starts, spelled, spelled[: starts[1]] & 255, chars
        return found[0], found[1], found[2]

    def _config(self, row: int) -> Config:
        """The heads in a row."""
        heads = self._memory.heads[row].tolist()
        return tuple([(heads[i], heads[i + 1]) for i in range(1, 1 + 2 * heads[0], 2)])

    def _depth(self, frame: int) -> int:
        return int(self._memory.frames[frame, DEPTH]) if frame >= 0 else 0

    def _possible(self, config: Config, most: int) -> tuple[int, np.ndarray]:
        """How many classes of bytes may come next, counted up to `most`, and which they are."""
        classes = np.zeros(self._static.num_classes, np.uint8)
        return self._tried(self._kernels.possible_classes, config, most, classes)[0], classes

    def _tried(self, kernel: Callable[..., int], config: Config, *args: object) -> tuple[int, int]:
        """The result of a kernel, and how many open frames from the top it read. Forgets the frames that it made."""
        keep, counters = self.num_frames, self._memory.counters
        counters[LOWEST] = UNBOUNDED
        try:
            found = self._run(kernel, config, *args)
        finally:
            self._forget_frames(keep)
        top = max([self._depth(frame) for _, frame in config])
        return found, max(0, top - int(counters[LOWEST]) + 1)

    def _run(self, kernel: Callable[..., int], config: Config, *args: object) -> int:
        """The result of a kernel for the heads of a configuration. Arrays that are full are enlarged."""
        if not self._is_paid:
            self._memory.counters[FUEL] = self._limits.mask_steps
        while True:
            memory = self._memory
            memory.counters[FULL] = -1
            memory.counters[CALLED] += 1
            if config:
                memory.heads[0, : 1 + 2 * len(config)] = [len(config), *[part for head in config for part in head]]
            result = self._call(kernel, *args)
            if result != STOPPED:
                return result
            self._make_room(int(memory.counters[FULL]))

    def _call(self, kernel: Callable[..., int | None], *args: object) -> int:
        return self._kernels.run(kernel, self._static_record, self._memory_record, *args)

    def _spend(self, num_steps: int) -> None:
        """Pays for steps that Python takes.

        Raises:
            GrammarError: Fewer steps are left.
        """
        limits, counters = self._limits, self._memory.counters
        counters[FUEL] -= num_steps
        if counters[FUEL] < 0:
            counters[FULL] = OUT_OF_FUEL
            raise GrammarError(
                f"finding what may come next took too many steps: one token may take {limits.mask_steps}, and a text "
                f"{limits.text_steps} and {limits.token_steps} more for each of its tokens; "
                "make the grammar less ambiguous"
            )

    def _make_room(self, which: int) -> None:
        """Enlarges the array that was full.

        Raises:
            GrammarError: The array may not become larger, or more room would not help.
        """
        limits = self._limits
        if which == OUT_OF_FUEL:
            self._spend(0)
        if which == TOO_MUCH_WORK or (which == HEADS and self._memory.counters[MAX_HEADS] >= limits.heads):
            self._memory.counters[FULL] = TOO_MUCH_WORK  # no room would help
            raise GrammarError(
                f"a text may be read in at most {limits.heads} ways at once, but this one can be read in more; make "
                "the grammar less ambiguous"
            )
        if which == STATES and self.num_states >= limits.states:
            raise GrammarError(f"the grammar needs more than {limits.states} states for this text; simplify it")
        bytes_before = num_bytes(self._memory)
        self._spend(bytes_before // _BYTES_PER_STEP)  # pays the most that it may cost; the rest is given back below
        larger = enlarged(self._memory, which, limits)
        if num_bytes(larger) > limits.machine_bytes:
            larger = enlarged(self._memory, which, limits, by=_LEAST_GROWTH)
        if num_bytes(larger) > limits.machine_bytes:
            raise GrammarError(
                f"the grammar needs more than {limits.machine_bytes} bytes for the states and stacks of this text; "
                "simplify it"
            )
        if which == ENTRIES:
            larger.counters[ENTRIES] = 0
        larger.counters[FUEL] += (2 * bytes_before - num_bytes(larger)) // _BYTES_PER_STEP
        self._use(larger)

    def _use(self, memory: Memory) -> None:
        """Goes on with a memory whose hash tables are empty."""
        self._memory, self._memory_record = memory, self._kernels.run.record(memory)
        self._call(self._states.rebuild_indexes)
