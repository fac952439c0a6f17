"""A machine that is slow and plain: the interface of `jsg.constrained.machine.Machine`, straight from the expressions.

A way to read a text is a stack of what is left to match, kept as nested pairs (top, rest). Reading a byte takes the
stacks apart until each begins with a byte. Grammars must not be left-recursive, and every rule must match something.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from jsg.constrained.ir import Alt, Automaton, Bag, ByteSet, Call, Expr, Grammar, Literal, Repeat, Seq, Words
from jsg.constrained.trie import Trie

type Stack = tuple[object, Stack] | None
Config = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class _Repeating:
    """In a repeat: so many items are done; `is_due` says that a separator was read."""

    repeat: Repeat
    count: int


@dataclasses.dataclass(frozen=True)
class _Bagging:
    bag: Bag
    count: int
    used: int


@dataclasses.dataclass(frozen=True)
class _At:
    automaton: Automaton
    state: int


class OracleMachine:
    """Every answer by trying. A head's frame is always -1: all that it knows is in its state."""

    def __init__(self, grammar: Grammar):
        self._rules = grammar.rules
        self._start: Stack = (Call(grammar.start), None)
        self._ids: dict[frozenset[tuple[frozenset[int], Stack]], int] = {}
        self._ways: list[tuple[frozenset[tuple[frozenset[int], Stack]], bool]] = []
        self.step = functools.lru_cache(maxsize=None)(self._step)
        self.num_frames = 0
        self.num_bytes = 0

    @property
    def num_states(self) -> int:
        return len(self._ways)

    def start(self) -> Config:
        return self._intern({self._start})

    def advance(self, config: Config, data: bytes) -> Config | None:
        at: Config | None = config
        for byte in data:
            at = self.step(at, byte) if at else None
        return at

    def is_accepting(self, config: Config) -> bool:
        return self._ways[config[0][0]][1]

    def can_continue(self, config: Config) -> bool:
        return bool(self.allowed_bytes(config))

    def allowed_bytes(self, config: Config) -> set[int]:
        return set().union(*(first for first, _ in self._ways[config[0][0]][0]))

    def forced_run(self, config: Config, max_bytes: int) -> bytes:
        run = bytearray()
        while len(run) < max_bytes and not self.is_accepting(config) and len(nexts := self.allowed_bytes(config)) == 1:
            run += bytes(nexts)
            config = self.step(config, run[-1])
        while run and not _is_utf8(run):
            run.pop()
        return bytes(run)

    def walk(self, config: Config, trie: Trie, mask: NDArray[np.uint32]) -> int:
        path: list[Config | None] = [config]
        node, end = 1, len(trie.byte)
        while node < end:
            del path[int(trie.depth[node]) :]
            at = self.step(path[-1], int(trie.byte[node]))
            if at is None:
                node = int(trie.skip[node])
                continue
            path.append(at)
            for token in trie.tokens[trie.token_start[node] : trie.token_start[node + 1]].tolist():
                mask[token >> 5] |= np.uint32(1 << (token & 31))
            node += 1
        return 0

    def frames_read(self, config: Config, depth: int) -> Hashable:
        return ()

    def accepts_all(self, config: Config, chars: NDArray[np.int16], max_chars: int) -> bool:
        """Breadth first over (configuration, character automaton), one character a round."""
        level = {config}
        seen: set[Config] = set()
        for _ in range(max_chars):
            seen |= level
            inside = {(at, 0) for at in level}
            level = set()
            while inside:
                at, state = inside.pop()
                for byte in np.flatnonzero(chars[state] >= 0).tolist():
                    after = self.step(at, byte)
                    if after is None:
                        return False
                    target = int(chars[state, byte])
                    if target:
                        inside.add((after, target))
                    elif after not in seen:
                        level.add(after)
        return True

    def compact(self, live: Iterable[Config]) -> dict[Config, Config]:
        return {config: config for config in live}

    def _intern(self, stacks: set[Stack]) -> Config:
        seen: set[Stack] = set()
        ways = frozenset(way for stack in stacks for way in self._open(stack, seen))
        state = self._ids.setdefault(ways, len(self._ways))
        if state == len(self._ways):
            self._ways.append((ways, None in seen))
        return ((state, -1),)

    def _step(self, config: Config, byte: int) -> Config | None:
        stacks = {rest for first, rest in self._ways[config[0][0]][0] if byte in first}
        return self._intern(stacks) if stacks else None

    def _open(self, stack: Stack, seen: set[Stack]) -> Iterator[tuple[frozenset[int], Stack]]:
        """The bytes that a stack may begin with, and what is left behind each; `seen` gets None where it may end."""
        todo = [stack]
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if stack is None:
                continue
            top, rest = stack
            match top:
                case Literal(value):
                    behind = (Literal(value[1:]), rest) if len(value) > 1 else rest
                    yield frozenset(value[:1]), behind
                case ByteSet(ranges):
                    yield frozenset(b for first, last in ranges for b in range(first, last + 1)), rest
                case _:
                    todo += self._expand(top, rest)

    def _expand(self, top: object, rest: Stack) -> list[Stack]:
        match top:
            case Words(words):
                return [(Literal(word), rest) for word in words]
            case Seq(parts):
                return [functools.reduce(lambda stack, part: (part, stack), reversed(parts), rest)]
            case Alt(options):
                return [(option, rest) for option in options]
            case Call(rule):
                return [(self._rules[rule], rest)]
            case Repeat():
                return [(_Repeating(top, 0), rest)]
            case _Repeating(repeat, count):
                return self._expand_repeat(repeat, count, rest)
            case Bag():
                return [(_Bagging(top, 0, 0), rest)]
            case _Bagging(bag, count, used):
                return self._expand_bag(bag, count, used, rest)
            case Automaton():
                return [(_At(top, 0), rest)]
            case _At(automaton, state):
                ends = [rest] if state in automaton.accepting else []
                return ends + [(label, (_At(automaton, to), rest)) for label, to in automaton.edges[state]]
        raise AssertionError(f"cannot be read: {top}")

    def _expand_repeat(self, repeat: Repeat, count: int, rest: Stack) -> list[Stack]:
        stacks: list[Stack] = [rest] if count >= repeat.min else []
        if repeat.max is None or count < repeat.max:
            # Without an end only "once" and "often enough" matter; so that empty items come to an end.
            after = count + 1 if repeat.max is not None else min(count + 1, max(repeat.min, 1))
            item: Stack = (repeat.item, (_Repeating(repeat, after), rest))
            stacks.append((repeat.separator, item) if count else item)
        return stacks

    def _expand_bag(self, bag: Bag, count: int, used: int, rest: Stack) -> list[Stack]:
        required = {i for i, item in enumerate(bag.items) if item.is_required}
        missing = {i for i in required if not used >> i & 1}
        stacks: list[Stack] = [rest] if count >= bag.min and not missing else []
        if bag.max is not None and count >= bag.max:
            return stacks
        for i, item in enumerate(bag.items):
            if item.is_once and used >> i & 1:
                continue
            if bag.max is not None and len(missing - {i}) > bag.max - count - 1:
                continue
            bits = used | 1 << i if item.is_once else used
            # Without an end only "often enough" matters.
            after = count + 1 if bag.max is not None else min(count + 1, max(bag.min, 1))
            behind: Stack = (item.expr, (_Bagging(bag, after, bits), rest))
            stacks.append((bag.separator, behind) if count else behind)
        return stacks


def matches(grammar: Grammar, text: bytes) -> bool:
    """Whether the whole text matches."""
    machine = OracleMachine(grammar)
    config = machine.advance(machine.start(), text)
    return config is not None and machine.is_accepting(config)


def rule(expr: Expr, **rules: Expr) -> Grammar:
    """A grammar of one expression, and of the rules that it calls."""
    return Grammar("root", {"root": expr} | rules)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
