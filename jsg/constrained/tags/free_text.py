"""Free text that goes on until a string comes up in it: a trigger, an end, or a forbidden string."""

import dataclasses
from collections import deque
from collections.abc import Sequence

from jsg.constrained.automata import explore
from jsg.constrained.chars import charset
from jsg.constrained.ir import Automaton, ByteSet, Expr, seq
from jsg.constrained.limits import Limits, check
from jsg.constrained.special_tokens import FIRST_BYTE
from jsg.constrained.tags.fields import PARAM
from jsg.constrained.utf8 import Rest, next_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """A text that may come up in free text, and what follows it.

    Attributes:
        text: Whole characters, or a special token's spelling; never empty.
        then: What must follow; None where the text must not come up at all.
        is_last: Whether the whole text ends after that; otherwise free text goes on.
    """

    text: bytes
    then: Expr | None
    is_last: bool = False


def free_text(branches: Sequence[Branch], limits: Limits, *, may_end: bool) -> Expr:
    """UTF-8 text in which what a branch says follows its text. The text that is complete first counts.

    Where two are complete at once any of them may go on, unless one is forbidden.

    Args:
        branches: No two with the same text.
        limits: They bound the states.
        may_end: Whether the free text may end anywhere, even where the beginning of a branch's text has come up.
    """
    return _FreeText(branches, limits).automaton(may_end)


class _FreeText:
    """An Aho-Corasick automaton over bytes, together with where in a character a byte is.

    A state is (node of the trie of texts, rest of the character); the free text begins at (0, ()).
    """

    def __init__(self, branches: Sequence[Branch], limits: Limits):
        self._children: list[dict[int, int]] = [{}]
        self._branches: list[list[Branch]] = [[]]
        self._is_special = [False]
        check(sum(len(branch.text) for branch in branches), limits.char_states, "bytes of triggers and ends", PARAM)
        for branch in branches:
            node = 0
            for byte in branch.text:
                if byte not in self._children[node]:
                    self._children[node][byte] = len(self._children)
                    self._children.append({})
                    self._branches.append([])
                    self._is_special.append(branch.text[0] == FIRST_BYTE)
                node = self._children[node][byte]
            self._branches[node].append(branch)
        # Where each byte leads from a node, bytes left out that lead to node 0.
        self._next: list[dict[int, int]] = [{} for _ in self._children]
        self._link()

    def _link(self) -> None:
        """Adds to each node the edges and the branches of its longest proper suffix that is in the trie."""
        failure = [0] * len(self._children)
        self._next[0] = dict(self._children[0])
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            if self._is_special[node]:  # the name of a token is no text: nothing else begins or ends in it
                self._next[node] = dict(self._children[node])
                queue.extend(self._children[node].values())
                continue
            self._branches[node] = [*self._branches[node], *self._branches[failure[node]]]
            self._next[node] = self._next[failure[node]] | self._children[node]
            for byte, child in self._children[node].items():
                failure[child] = self._next[failure[node]].get(byte, 0)
                queue.append(child)

    def automaton(self, may_end: bool) -> Automaton:
        """The automaton; its last state is where a last branch leads."""
        matches: dict[tuple[int, Rest], list[tuple[int, Branch]]] = {}

        def steps(state: tuple[int, Rest]) -> list[tuple[Expr, tuple[int, Rest]]]:
            targets, matches[state] = self._ways(*state)
            return [(ByteSet(charset.of_ranges(ranges)), target) for target, ranges in targets.items()]

        order, edges = explore((0, ()), steps)
        end = len(order)
        accepting = {
            number for number, (node, rest) in enumerate(order) if may_end and not rest and not self._is_special[node]
        }
        for state, row in zip(order, edges, strict=True):
            for byte, branch in matches[state]:
                assert branch.then is not None, "forbidden texts lead nowhere"
                label = seq(ByteSet(((byte, byte),)), branch.then)
                row.append((label, end if branch.is_last else 0))
                accepting.update((end,) if branch.is_last else ())
        return Automaton((*map(tuple, edges), ()), frozenset(accepting))

    def _ways(
        self, node: int, rest: Rest
    ) -> tuple[dict[tuple[int, Rest], list[tuple[int, int]]], list[tuple[int, Branch]]]:
        """The ranges of bytes to each next state, and the bytes that complete a text, with its branch."""
        targets: dict[tuple[int, Rest], list[tuple[int, int]]] = {}
        matches: list[tuple[int, Branch]] = []
        ways = self._next[node]

        def go(byte: int, after: Rest) -> None:
            branches = self._branches[ways[byte]]
            if not branches:
                targets.setdefault((ways[byte], after), []).append((byte, byte))
            elif all(branch.then is not None for branch in branches):
                matches.extend((byte, branch) for branch in branches)

        if self._is_special[node]:
            for byte in sorted(ways):
                go(byte, ())
            return targets, matches
        for first, last, after in next_bytes(rest):
            start = first
            for byte in sorted(byte for byte in ways if first <= byte <= last):
                if start < byte:
                    targets.setdefault((0, after), []).append((start, byte - 1))
                start = byte + 1
                go(byte, after)
            if start <= last:
                targets.setdefault((0, after), []).append((start, last))
        if not rest and FIRST_BYTE in ways:
            go(FIRST_BYTE, ())
        return targets, matches
