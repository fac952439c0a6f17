"""The members of an object between its braces: in declared order or in any order, and how many there are.

    declared order   {"a": …, "b": …}       optional members may be left out
                     {"a": …, "b": …, …}    with others: in order up to the last required member, then in free order
    free order       a `Bag`: each declared member at most once, the others any number of times

`minProperties` must hold for every reader, though a name may be written twice and a reader keeps only one of such
members. A declared name is written once. One member with another name surely counts as one more. Where more than one is
needed, their names must be of different kinds (`distinct.py`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from jsg.constrained.ir import (
    EMPTY,
    MAX_ONCE,
    NEVER,
    Automaton,
    Bag,
    BagItem,
    Expr,
    Repeat,
    any_of,
    optional,
    separated,
    seq,
)
from jsg.constrained.schema import distinct
from jsg.constrained.schema.scope import Scope
from jsg.errors import GrammarError

_MAX_LATE = 4
"""Most optional members before a required one that may also come after it. Each doubles the grammar of the object."""
_MAX_COPIED = 100
"""Most members of an object that is written out for them, all copies together."""
_MAX_COPIES = 15_000
"""Most members of an object in declared order in which members are counted: each is written once for each count."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A declared member. Its expression has the name, the colon and the value."""

    expr: Expr
    is_required: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The members of one object.

    Attributes:
        declared: The declared members in their order.
        needed: The required members without a declared name.
        others: Any member without a declared name; NEVER where there is none.
        kinds: Gives the members without a declared name, one expression for each kind of names; kinds are disjoint.
        least, most: The least and the highest number of members.
    """

    declared: tuple[Member, ...]
    needed: tuple[Expr, ...]
    others: Expr
    kinds: Callable[[], Sequence[Expr]]
    least: int
    most: int | None

    @property
    def num_required(self) -> int:
        """The number of required declared members."""
        return sum(member.is_required for member in self.declared)

    @property
    def num_ordered(self) -> int:
        """The number of declared members up to the last required one."""
        return max([number for number, member in enumerate(self.declared, 1) if member.is_required], default=0)

    @property
    def is_surely_met(self) -> bool:
        """Whether every object with at least one member and all required members reaches `least`."""
        return self.least <= max(1, self.num_required + bool(self.needed))


def braces(scope: Scope, plan: Plan) -> Expr:
    """The members of a plan in braces; NEVER where no such object is possible.

    Raises:
        GrammarError: The counts or the order need a larger grammar than is allowed.
    """
    may_be_empty, some = members_expr(scope, plan)
    options = [scope.spacing.empty("{}")] if may_be_empty else []
    return any_of(options if some == NEVER else [*options, scope.spacing.enclosed("{", some, "}")])


def members_expr(scope: Scope, plan: Plan) -> tuple[bool, Expr]:
    """Whether there may be no member, and the members where there are some; NEVER where there cannot be any.

    Raises:
        GrammarError: The counts or the order need a larger grammar than is allowed.
    """
    least = max(plan.least, plan.num_required + len(plan.needed))
    if (plan.most is not None and plan.most < least) or NEVER in plan.needed:
        return False, NEVER
    arrange = _in_any_order if scope.order == "free" else _in_order
    is_empty = plan.most is not None and plan.most <= 0
    return least == 0, NEVER if is_empty else arrange(plan, scope.spacing.comma)


def _in_any_order(plan: Plan, comma: Expr) -> Expr:
    """At least one member, in any order."""
    required = plan.num_required + len(plan.needed)
    if required > MAX_ONCE:
        raise GrammarError(
            f"required: in free order an object may require at most {MAX_ONCE} names, but {required} are "
            'required; use property_order="declared" or require fewer'
        )
    is_counted = len(plan.declared) + len(plan.needed) <= MAX_ONCE
    items = [
        BagItem(member.expr, is_once=member.is_required or is_counted, is_required=member.is_required)
        for member in plan.declared
    ]
    least = max(1, plan.least)
    # A single member beside the required ones has a different name than these, so it surely counts.
    if plan.least <= plan.num_required + 1 or (is_counted and plan.others == NEVER and not plan.needed):
        items.extend(BagItem(expr, is_once=True, is_required=True) for expr in plan.needed)
        if plan.others != NEVER:
            items.append(BagItem(plan.others))
        if not items or (plan.others == NEVER and is_counted and len(items) < least):
            return NEVER
        return Bag(tuple(items), comma, least, plan.most)
    if not plan.declared:
        return _others(plan, comma, 0)
    kinds = _kinds(plan, 0) if is_counted else ()
    if not is_counted or len(items) + len(kinds) > MAX_ONCE:
        raise GrammarError(
            f"minProperties: in free order members can be counted where at most {MAX_ONCE - distinct.MOST} "
            f'names are declared, but there are {len(items)}; use property_order="declared", or leave minProperties out'
        )
    items.extend(BagItem(kind, is_once=True) for kind in kinds)
    return NEVER if len(items) < least else Bag(tuple(items), comma, least, plan.most)


def _in_order(plan: Plan, comma: Expr) -> Expr:
    """At least one member: the declared members in their order, then the others."""
    declared, required = plan.declared, plan.num_required
    has_others = plan.others != NEVER or bool(plan.needed)
    if has_others and (late := _late(plan)) is not None:
        return any_of([_with_late(plan, written, late, comma) for written in _subsets(late)])
    if required == len(declared):
        # Every declared member is there, so only the others are counted.
        others = _others(plan, comma, required)
        if not declared:
            return others
        first = separated([member.expr for member in declared], comma)
        must_have_others = plan.least > required or bool(plan.needed)
        if others == NEVER:
            return NEVER if must_have_others else first
        return seq(first, comma, others) if must_have_others else seq(first, optional(seq(comma, others)))
    if not plan.is_surely_met or has_others or (plan.most is not None and plan.most < len(declared)):
        return _counted(plan, comma)
    return _row(declared, comma)


def _late(plan: Plan) -> tuple[int, ...] | None:
    """Which optional members before a required one may also come after it; None where the order is strict.

    A model that has left a declared name out may still write it later. If the closing quote of the name were masked
    then, the model would go on with a name that nobody meant. The order is strict where members must be counted that a
    free order could not count.
    """
    if plan.least > plan.num_required + 1 or plan.num_required == len(plan.declared):
        return None
    before = [number for number in range(plan.num_ordered) if not plan.declared[number].is_required]
    most_late = min(_MAX_LATE, (_MAX_COPIED // len(plan.declared)).bit_length() - 1)
    is_counted = not plan.is_surely_met or plan.most is not None
    return None if is_counted and len(before) > most_late else tuple(before[: max(0, most_late)])


def _subsets(numbers: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(numbers, size) for size in range(len(numbers) + 1))


def _with_late(plan: Plan, written: tuple[int, ...], late: tuple[int, ...], comma: Expr) -> Expr:
    """The members where exactly `written` of `late` come before the last required one, and the others may come later.

    What comes after the last required member is in free order.
    """
    first: list[Member] = []
    for number, member in enumerate(plan.declared[: plan.num_ordered]):
        if number in written or number not in late:
            first.append(Member(member.expr, member.is_required or number in written))
    rest = [member for number, member in enumerate(plan.declared) if number in late and number not in written]
    rest.extend(plan.declared[plan.num_ordered :])
    count = plan.num_required + len(written)
    least, most = plan.least - count, None if plan.most is None else plan.most - count
    if most is not None and most < max(least, len(plan.needed)):
        return NEVER
    rest_plan = dataclasses.replace(plan, declared=tuple(rest), least=max(0, least), most=most)
    others = NEVER if most == 0 else _in_any_order(rest_plan, comma)
    if not first:
        return others
    after = seq(comma, others)
    if least <= 0 and not plan.needed:
        after = optional(after) if others != NEVER else EMPTY
    return seq(_row(first, comma), after)


def _others(plan: Plan, comma: Expr, before: int) -> Expr:
    """At least one member without a declared name, after `before` declared members."""
    missing = plan.least - before
    least = max(1, missing, len(plan.needed))
    most = None if plan.most is None else plan.most - before
    if (most is not None and most < least) or (plan.others == NEVER and len(plan.needed) < least):
        return NEVER
    if missing > 1:
        different = [BagItem(kind, is_once=True) for kind in _kinds(plan, missing)]
        first = Bag(tuple(different), comma, missing, missing)
        return seq(first, Repeat(seq(comma, plan.others), 0, None if most is None else most - missing))
    if not plan.needed:
        return Repeat(plan.others, least, most, comma)
    items = [BagItem(expr, is_once=True, is_required=True) for expr in plan.needed]
    if plan.others != NEVER:
        items.append(BagItem(plan.others))
    return Bag(tuple(items), comma, least, most)


def _kinds(plan: Plan, least: int) -> Sequence[Expr]:
    """The members without a declared name, one expression for each kind of names.

    Raises:
        GrammarError: There are fewer than `least` kinds, or the object has other required members without a declared
            name, whose kinds are not known.
    """
    if plan.needed:
        raise GrammarError(
            "minProperties is not supported beside `not` over patternProperties, propertyNames or "
            "additionalProperties, which requires members without giving their names; leave minProperties out"
        )
    kinds = plan.kinds()
    if least > len(kinds):
        raise GrammarError(
            f"minProperties: {least} members whose names are not declared cannot be told apart, at most "
            f"{len(kinds)} can; declare their names under properties, or use a smaller minProperties"
        )
    return kinds


def _counted(plan: Plan, comma: Expr) -> Expr:
    """Declared members in their order, and then the others, where their number must be counted.

    Raises:
        GrammarError: There are too many members and counts.
    """
    limit = max(1, plan.least) if plan.most is None else plan.most
    num_copies = len(plan.declared) * min(limit, len(plan.declared))
    if num_copies > _MAX_COPIES:
        raise GrammarError(
            f"minProperties and maxProperties can be counted in declared order where the bound times the number of "
            f"properties is at most {_MAX_COPIES}, but here it is {num_copies}; use a smaller bound, require all "
            'properties, use property_order="free" (up to 64 properties), or leave the counts out'
        )
    others = functools.partial(_others, plan, comma)
    return _row(plan.declared, comma, plan.least, plan.most, others, needs_others=bool(plan.needed))


def _row(
    members: Sequence[Member],
    comma: Expr,
    least: int = 0,
    most: int | None = None,
    others: Callable[[int], Expr] | None = None,
    *,
    needs_others: bool = False,
) -> Expr:
    """At least one member, in their order: an automaton with an edge for each, which skips those that are left out.

    A state is (next member, members so far), before a member or after one, where the object may end. Numbers of
    members from `least` on, or from `most` on, are one state.

    Args:
        members: The declared members.
        comma: What comes between two members.
        least, most: The bounds of the number of members, those of `others` included.
        others: Gives the members that may come after the declared ones, by how many come before them; None: none may.
        needs_others: Whether these must come.
    """
    limit = min(least if most is None else most, len(members))
    if not limit and others is None and (len(members) == 1 or all(member.is_required for member in members)):
        return separated([member.expr for member in members], comma)
    numbers: dict[tuple[int, int, bool], int] = {}
    num_required = num_ordered = 0
    for place in range(len(members) + 1):
        for count in range(min(num_required, limit), min(place, limit) + 1):
            for is_behind in (True, False) if place else (False,):
                numbers[place, count, is_behind] = len(numbers)
        if place < len(members) and members[place].is_required:
            num_required, num_ordered = num_required + 1, place + 1
    end = len(numbers)
    edges: list[list[tuple[Expr, int]]] = [[] for _ in range(end + 1)]
    accepting, skips = {end}, dict[int, int]()
    for (place, count, is_behind), number in numbers.items():
        if is_behind:
            if comma == EMPTY:
                skips[number] = numbers[place, count, False]
            else:
                edges[number].append((comma, numbers[place, count, False]))
            if place >= num_ordered and count >= least and not needs_others:
                accepting.add(number)
        elif place == len(members):
            edges[number].extend([(others(count), end)] if others is not None else [])
        else:
            if most is None or count < most:
                edges[number].append((members[place].expr, numbers[place + 1, min(count + 1, limit), True]))
            if not members[place].is_required:
                skips[number] = numbers[place + 1, count, False]
    return Automaton(tuple(map(tuple, edges)), frozenset(accepting), tuple(skips.items()))
