"""A slow and plain machine: the interface of `jsg.constrained.run.machine.Machine`, straight from the expressions.

A way to read a text is a stack of the expressions that are left to match. To read a byte, the machine expands the
stacks until each begins with a byte. Grammars must not be left-recursive, and every rule must match something.
"""

import contextlib
import functools
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jsg.constrained.ir import Alt, Automaton, Bag, ByteSet, Call, Expr, Grammar, Literal, Repeat, Seq, Words
from jsg.constrained.limits import Account
from jsg.constrained.run.trie import Trie

Stack = int
"""Number of a stack in the machine's table; equal stacks have equal numbers, and 0 is the empty one."""
Config = tuple[tuple[int, int], ...]
Ways = frozenset[tuple[frozenset[int], Stack]]


class _Item(NamedTuple):
    """The part of an expression that is left to match.

    `expr` is the number of the expression in the machine's table. The rest depends on its kind: bytes that were read of
    a literal; items of a repeat or a bag that were read, and bits of those that may stand only once; the state of an
    automaton.
    """

    expr: int
    progress: int = 0
    used: int = 0


class OracleMachine:
    """Every answer by trying. There is one head, and its frame is always -1: all that is known is in its state."""

    def __init__(self, grammar: Grammar):
        self._rules = grammar.rules
        self._exprs: list[Expr] = []
        self._expr_ids: dict[int, int] = {}
        self._words: dict[bytes, Literal] = {}
        self._stacks: list[tuple[_Item, Stack] | None] = [None]
        self._stack_ids: dict[tuple[_Item, Stack], Stack] = {}
        self._state_ids: dict[tuple[Ways, bool], int] = {}
        self._states: list[tuple[Ways, bool]] = []
        self._start = self._push(Call(grammar.start), 0)
        self.step = functools.lru_cache(maxsize=None)(self._step)
        self.num_frames = 0
        self.num_bytes = 0
        self.fullness = 0.0
        self.needs_room = False

    @property
    def num_states(self) -> int:
        return len(self._states)

    def paid_by(self, account: Account | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start(self) -> Config:
        return self._intern({self._start})

    def advance(self, config: Config, data: bytes) -> Config | None:
        at: Config | None = config
        for byte in data:
            at = self.step(at, byte) if at else None
        return at

    def is_accepting(self, config: Config) -> bool:
        return self._states[config[0][0]][1]

    def can_continue(self, config: Config) -> bool:
        return bool(self.allowed_bytes(config))

    def allowed_bytes(self, config: Config) -> set[int]:
        return set().union(*(first for first, _ in self._states[config[0][0]][0]))

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

    def accepts_all(self, config: Config, chars: NDArray[np.int16], max_chars: int) -> tuple[bool, int]:
        return self.text_room(config, chars, max_chars)[0] == max_chars, 0

    def is_dead(self, config: Config, byte: int) -> bool:
        return False

    def text_room(self, config: Config, chars: NDArray[np.int16], most: int) -> tuple[int, bool, int]:
        """Breadth first over (configuration, character automaton), one character a round."""
        level = {config}
        seen: set[Config] = set()
        for room in range(most):
            seen |= level
            inside = {(at, 0) for at in level}
            level = set()
            is_alive: set[bool] = set()
            while inside:
                at, state = inside.pop()
                for byte in np.flatnonzero(chars[state] >= 0).tolist():
                    after = self.step(at, byte)
                    is_alive.add(after is not None)
                    target = int(chars[state, byte])
                    if after is not None and target:
                        inside.add((after, target))
                    elif after is not None and after not in seen:
                        level.add(after)
            if False in is_alive:
                return room, True not in is_alive, 0
        return most, False, 0

    def compact(self, live: Iterable[Config]) -> dict[Config, Config]:
        return {config: config for config in live}

    def _intern(self, stacks: set[Stack]) -> Config:
        seen: set[Stack] = set()
        ways = frozenset(way for stack in stacks for way in self._open(stack, seen))
        key = (ways, 0 in seen)
        state = self._state_ids.setdefault(key, len(self._states))
        if state == len(self._states):
            self._states.append(key)
        return ((state, -1),)

    def _step(self, config: Config, byte: int) -> Config | None:
        stacks = {rest for first, rest in self._states[config[0][0]][0] if byte in first}
        return self._intern(stacks) if stacks else None

    def _push(self, expr: Expr, rest: Stack, progress: int = 0, used: int = 0) -> Stack:
        number = self._expr_ids.setdefault(id(expr), len(self._exprs))
        if number == len(self._exprs):
            self._exprs.append(expr)  # which also keeps its identity from being used again
        pair = (_Item(number, progress, used), rest)
        stack = self._stack_ids.setdefault(pair, len(self._stacks))
        if stack == len(self._stacks):
            self._stacks.append(pair)
        return stack

    def _open(self, stack: Stack, seen: set[Stack]) -> Iterator[tuple[frozenset[int], Stack]]:
        """The bytes that a stack may begin with, and what is left behind each; `seen` gets 0 where it may end."""
        todo = [stack]
        while todo:
            stack = todo.pop()
            pair = self._stacks[stack]
            if stack in seen or pair is None:
                seen.add(stack)
                continue
            seen.add(stack)
            item, rest = pair
            match expr := self._exprs[item.expr]:
                case Literal(value):
                    done = item.progress + 1
                    yield frozenset((value[done - 1],)), self._push(expr, rest, done) if done < len(value) else rest
                case ByteSet(ranges):
                    yield frozenset(b for first, last in ranges for b in range(first, last + 1)), rest
                case Repeat():
                    todo += self._expand_repeat(expr, item.progress, rest)
                case Bag():
                    todo += self._expand_bag(expr, item.progress, item.used, rest)
                case _:
                    todo += self._expand(expr, item, rest)

    def _expand(self, expr: Expr, item: _Item, rest: Stack) -> list[Stack]:
        match expr:
            case Words(words):
                return [self._push(self._words.setdefault(word, Literal(word)), rest) for word in words]
            case Seq(parts):
                return [functools.reduce(lambda stack, part: self._push(part, stack), reversed(parts), rest)]
            case Alt(options):
                return [self._push(option, rest) for option in options]
            case Call(rule):
                return [self._push(self._rules[rule], rest)]
            case Automaton(edges, accepting, skips):
                ends = [rest] if item.progress in accepting else []
                ends += [self._push(expr, rest, to) for state, to in skips if state == item.progress]
                return ends + [self._push(label, self._push(expr, rest, to)) for label, to in edges[item.progress]]
        raise AssertionError(f"cannot be read: {expr}")

    def _expand_repeat(self, repeat: Repeat, count: int, rest: Stack) -> list[Stack]:
        stacks = [rest] if count >= repeat.min else []
        if repeat.max is None or count < repeat.max:
            # Without an end only "once" and "often enough" matter; so that empty items come to an end.
            after = count + 1 if repeat.max is not None else min(count + 1, max(repeat.min, 1))
            item = self._push(repeat.item, self._push(repeat, rest, after))
            stacks.append(self._push(repeat.separator, item) if count else item)
        return stacks

    def _expand_bag(self, bag: Bag, count: int, used: int, rest: Stack) -> list[Stack]:
        missing = {i for i, item in enumerate(bag.items) if item.is_required and not used >> i & 1}
        stacks = [rest] if count >= bag.min and not missing else []
        if bag.max is not None and count >= bag.max:
            return stacks
        for i, item in enumerate(bag.items):
            if item.is_once and used >> i & 1:
                continue
            if bag.max is not None and len(missing - {i}) > bag.max - count - 1:
                continue
            bits = used | 1 << i if item.is_once else used
            after = count + 1 if bag.max is not None else min(count + 1, max(bag.min, 1))
            behind = self._push(item.expr, self._push(bag, rest, after, bits))
            stacks.append(self._push(bag.separator, behind) if count else behind)
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
