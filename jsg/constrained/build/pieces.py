"""Rules that are built once and put into many grammars: the positions of a rule, which move as a block.

A rule's positions follow one another and lead to each other only, so a copy of them needs new numbers and nothing else.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jsg.constrained import tables
from jsg.constrained.build.finish import Loop, Positions


class Place(NamedTuple):
    """How many positions, loops and branches a builder has."""

    positions: int
    loops: int
    branches: int


class Piece(NamedTuple):
    """A rule that is built. Its positions, loops and branches are numbered from 0.

    Attributes:
        kinds, arguments: As in `Parts`; the argument of a call is its number in `callees`.
        groups: The groups of positions that may follow others, each once.
        follow: For each position the numbers of its groups.
        loops: The rule's loops.
        num_branches: How many branches they have.
        first, end: The positions that begin the rule, and its END.
        callees: The rules that it calls.
        is_nullable: Whether it may be empty.
        num_edges: What the rule took of `Limits.transitions`.
    """

    kinds: list[int]
    arguments: list[int]
    groups: list[Positions]
    follow: list[list[int]]
    loops: list[Loop]
    num_branches: int
    first: Positions
    end: int
    callees: list[str]
    is_nullable: bool
    num_edges: int

    def moved_follow(self, by: int) -> list[list[Positions]]:
        """The groups that follow each position, where the rule begins at position `by`."""
        groups = [moved(group, by) for group in self.groups]
        return [[groups[number] for number in row] for row in self.follow]

    def moved_arguments(self, place: Place, numbers: Sequence[int]) -> Iterator[int]:
        """The arguments of the positions, where `numbers` are those of the callees."""
        for kind, argument in zip(self.kinds, self.arguments, strict=True):
            if kind == tables.BYTE:
                yield argument
            elif kind == tables.CALL:
                yield numbers[argument]
            elif kind in (tables.LOOP, tables.END_SEPARATOR):
                yield argument + place.loops
            else:
                yield argument + place.branches if kind == tables.END_BRANCH else argument


def cut(
    begin: Place,
    end: Place,
    kinds: Sequence[int],
    arguments: Sequence[int],
    follow: Sequence[Sequence[Positions]],
    loops: Sequence[Loop],
    rule: tuple[str, Positions, int],
    names: Sequence[str],
    is_nullable: bool,
    num_edges: int,
) -> Piece:
    """The rule that a builder has built between two places; `names` are those of its rules by number."""
    span = slice(begin.positions, end.positions)
    numbers: dict[int, int] = {}
    groups: list[Positions] = []
    rows: list[list[int]] = []
    for row in follow[span]:
        for group in row:
            if id(group) not in numbers:
                numbers[id(group)] = len(groups)
                groups.append(moved(group, -begin.positions))
        rows.append([numbers[id(group)] for group in row])
    called = [argument for kind, argument in zip(kinds[span], arguments[span], strict=True) if kind == tables.CALL]
    callees = [names[number] for number in dict.fromkeys(called)]
    piece = Piece(
        kinds=list(kinds[span]),
        arguments=list(arguments[span]),
        groups=groups,
        follow=rows,
        loops=[moved_loop(loop, -begin.positions) for loop in loops[begin.loops : end.loops]],
        num_branches=end.branches - begin.branches,
        first=moved(rule[1], -begin.positions),
        end=rule[2] - begin.positions,
        callees=callees,
        is_nullable=is_nullable,
        num_edges=num_edges,
    )
    places = {name: number for number, name in enumerate(callees)}
    back = Place(0, -begin.loops, -begin.branches)
    return piece._replace(arguments=list(piece.moved_arguments(back, [places.get(name, -1) for name in names])))


def moved(positions: Positions, by: int) -> Positions:
    """The positions with their numbers changed."""
    return tuple([position + by for position in positions])


def moved_loop(loop: Loop, by: int) -> Loop:
    """The loop with the numbers of its positions changed."""
    return loop._replace(
        branches=[(moved(first, by), bit) for first, bit in loop.branches],
        separator=moved(loop.separator, by),
        first_end=loop.first_end + by,
    )
