"""Objects: declared members in their order or in any, then members with other names, and how many there are.

    declared order   {"a": …, "b": …, …others}       optional members may be left out
    free order       a `Bag`: each declared member once at most, others as often as may be

Two members with one name are not kept apart where the name is not declared, because a grammar cannot remember names: a
reader takes the last, and each is valid for itself. Only `minProperties` can be met by such a repetition. A declared
name stands once at most, except that in free order of more than `MAX_ONCE` names the optional ones may stand again.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence

from jsg.constrained.ir import EMPTY, MAX_ONCE, NEVER, Automaton, Bag, BagItem, Expr, Repeat, alt, optional, seq
from jsg.constrained.schema import strings
from jsg.constrained.schema.json_text import known_string
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.shapes import Const, NodeName, Object, String
from jsg.errors import GrammarError

_MAX_TRIGGERS = 3
"""Names with dependents: each doubles the ways to read an object, and the machine follows eight."""
_MAX_LEFT_OUT = 2_000
"""Names of one object that may be left out in declared order: each may follow all before it, so the grammar grows by
the square of their number."""
_MAX_EDGES = 5_000
"""Of the automaton that counts members in declared order."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Member:
    """A declared member: name, colon and value."""

    expr: Expr
    is_required: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """Members of one object.

    Attributes:
        declared: In their order.
        needed: Members with other names that must be there.
        others: Any member with another name; NEVER where there is none.
        least, most: How many members there are.
    """

    declared: tuple[_Member, ...]
    needed: tuple[Expr, ...]
    others: Expr
    least: int
    most: int | None


def object_expr(scope: Scope, shape: Object, where: str) -> Expr:
    """An object with its braces; NEVER where no object is valid.

    Raises:
        GrammarError: Counts, dependents or an order that a grammar of this size cannot keep.
    """
    needed, others = _other_members(scope, shape, where)
    options: list[Expr] = []
    for required, forbidden in _cases(shape, where):
        members: list[_Member] = []
        is_possible = not required & forbidden
        for name, node in shape.properties.items():
            is_valid = name not in forbidden and bool(scope.shapes(node))
            if is_valid:
                members.append(_Member(_member(scope, known_string(name), node), name in required))
            elif name in required:
                is_possible = False
        if is_possible:
            plan = _Plan(tuple(members), needed, others, shape.min_properties, shape.max_properties)
            options.append(_braces(scope, plan, where))
    return strings.any_of(options)


def _member(scope: Scope, name: Expr, node: NodeName) -> Expr:
    return seq(name, scope.spacing.colon, scope.value(node))


def _cases(shape: Object, where: str) -> list[tuple[frozenset[str], frozenset[str]]]:
    """(required, forbidden) names that, each for itself, say what `dependents` says: one for each set of triggers."""
    triggers = [name for name, wanted in shape.dependents.items() if name in shape.properties and wanted]
    required = _closed(shape.required, shape)
    open_triggers = [name for name in triggers if name not in required and not shape.dependents[name] <= required]
    if len(open_triggers) > _MAX_TRIGGERS:
        raise GrammarError(
            f"dependentRequired can be enforced for at most {_MAX_TRIGGERS} optional names of one object, but there "
            f"are {len(open_triggers)} at {where}; require some of them or leave some out"
        )
    cases: list[tuple[frozenset[str], frozenset[str]]] = []
    for present in itertools.product((False, True), repeat=len(open_triggers)):
        chosen = frozenset(name for name, is_there in zip(open_triggers, present, strict=True) if is_there)
        wanted = _closed(required | chosen, shape)
        forbidden = frozenset(open_triggers) - chosen
        if not wanted & forbidden:
            cases.append((wanted, forbidden))
    return cases


def _closed(names: frozenset[str], shape: Object) -> frozenset[str]:
    """The names and all that must be there with them."""
    known, waiting = set(names), list(names)
    while waiting:
        for name in shape.dependents.get(waiting.pop(), ()):
            if name not in known:
                known.add(name)
                waiting.append(name)
    return frozenset(known)


def _other_members(scope: Scope, shape: Object, where: str) -> tuple[tuple[Expr, ...], Expr]:
    """Members outside `properties`: those that must be there, and any that may."""
    declared = frozenset(shape.properties)
    needed: list[Expr] = []
    for name, node in shape.some:
        quoted = strings.quoted_expr(scope, name)
        needed.append(_member(scope, quoted, node) if quoted != NEVER and scope.shapes(node) else NEVER)
    kinds = [(String(patterns=p.matches, not_patterns=p.excludes), p.node) for p in shape.patterns]
    kinds.append((String(not_patterns=shape.additional_excludes), shape.additional))
    others: list[Expr] = []
    for names, node in kinds:
        if scope.shapes(node):
            quoted = _names(scope, strings.both(names, String(excluded=declared)), shape, where)
            if quoted != NEVER:
                others.append(_member(scope, quoted, node))
    return tuple(needed), strings.any_of(others)


def _names(scope: Scope, names: String, shape: Object, where: str) -> Expr:
    """Names of a kind that `shape.names` takes too, with their quotes."""
    options: list[Expr] = []
    for taken in (String(),) if shape.names is None else shape.names:
        if isinstance(taken, Const):
            text = json.loads(taken.text)
            if isinstance(text, str) and strings.accepts(scope, names, text):
                options.append(known_string(text))
            continue
        wanted = strings.both(names, taken)
        if wanted == String():
            options.append(strings.string_expr(scope, wanted, where))
        else:
            options.append(strings.quoted_expr(scope, wanted))
    return strings.any_of(options)


def _braces(scope: Scope, plan: _Plan, where: str) -> Expr:
    """The members of a plan in braces."""
    required = sum(member.is_required for member in plan.declared) + len(plan.needed)
    least = max(plan.least, required)
    if (plan.most is not None and plan.most < least) or NEVER in plan.needed:
        return NEVER
    options: list[Expr] = []
    if least == 0:
        options.append(scope.spacing.empty("{}"))
    if plan.most is None or plan.most > 0:
        in_any_order = scope.order == "free"
        some = _in_any_order(scope, plan, where) if in_any_order else _in_order(scope, plan, where)
        if some != NEVER:
            options.append(scope.spacing.enclosed("{", some, "}"))
    return strings.any_of(options)


def _in_any_order(scope: Scope, plan: _Plan, where: str) -> Expr:
    """At least one member, in any order."""
    required = sum(member.is_required for member in plan.declared) + len(plan.needed)
    if required > MAX_ONCE:
        raise GrammarError(
            f"in free order an object may require at most {MAX_ONCE} names, but {required} are required at {where}; "
            'use property_order="declared" or require fewer'
        )
    is_counted = len(plan.declared) + len(plan.needed) <= MAX_ONCE
    items = [
        BagItem(member.expr, is_once=member.is_required or is_counted, is_required=member.is_required)
        for member in plan.declared
    ]
    items.extend(BagItem(expr, is_once=True, is_required=True) for expr in plan.needed)
    if plan.others != NEVER:
        items.append(BagItem(plan.others))
    least = max(1, plan.least)
    if not items or (plan.others == NEVER and is_counted and len(items) < least):
        return NEVER
    return Bag(tuple(items), scope.spacing.comma, least, plan.most)


def _in_order(scope: Scope, plan: _Plan, where: str) -> Expr:
    """At least one member, the declared ones in their order and then the others."""
    comma, declared = scope.spacing.comma, plan.declared
    required = sum(member.is_required for member in declared)
    if len(declared) - required > _MAX_LEFT_OUT:
        raise GrammarError(
            f"in declared order an object may have at most {_MAX_LEFT_OUT} names that are not required, but there are "
            f'{len(declared) - required} at {where}; require some, leave some out, or use property_order="free"'
        )
    has_others = plan.others != NEVER or bool(plan.needed)
    if required == len(declared):
        # Counts are left to the others.
        least = max(plan.least - required, len(plan.needed), 0 if required else 1)
        most = None if plan.most is None else plan.most - required
        others = _others(plan, comma, least, most)
        if not declared:
            return others
        first = _row([member.expr for member in declared], comma)
        if others == NEVER or most == 0:
            return first if least == 0 else NEVER
        return seq(first, comma, others) if least else seq(first, optional(seq(comma, others)))
    can_be_few = plan.least <= max(1, required + len(plan.needed))
    can_be_all = plan.most is None or (not has_others and plan.most >= len(declared))
    if not (can_be_few and can_be_all):
        return _counted(plan, comma, where)
    others = _others(plan, comma, max(1, len(plan.needed)), None)
    if others == NEVER:
        return _subsequence(declared, comma)
    if required or plan.needed:
        return _subsequence([*declared, _Member(others, bool(plan.needed))], comma)
    # They may be long, so they are not one more member: that would stand in every half.
    return alt(seq(_subsequence(declared, comma), optional(seq(comma, others))), others)


def _others(plan: _Plan, comma: Expr, least: int, most: int | None) -> Expr:
    """A run of members with other names, at least one."""
    least = max(1, least, len(plan.needed))
    if (most is not None and most < least) or (plan.others == NEVER and len(plan.needed) < least):
        return NEVER
    if not plan.needed:
        return Repeat(plan.others, least, most, comma)
    items = [BagItem(expr, is_once=True, is_required=True) for expr in plan.needed]
    if plan.others != NEVER:
        items.append(BagItem(plan.others))
    return Bag(tuple(items), comma, least, most)


def _row(exprs: Sequence[Expr], comma: Expr) -> Expr:
    return seq(*itertools.chain.from_iterable((EMPTY if i == 0 else comma, expr) for i, expr in enumerate(exprs)))


def _subsequence(members: Sequence[_Member], comma: Expr) -> Expr:
    """At least one of the members, all that are required, in their order.

    Around the first required member this is easy: what comes before it has a comma after itself, what comes after it
    has one before. Where all are optional, the first that is there is in one half or the other; halving makes the whole
    longer by the logarithm of the number of members, where trying each as the first would square it.
    """
    first = next((i for i, member in enumerate(members) if member.is_required), None)
    if first is not None:
        before = [optional(seq(member.expr, comma)) for member in members[:first]]
        return seq(*before, members[first].expr, _tail(members[first + 1 :], comma))
    if len(members) == 1:
        return members[0].expr
    middle = len(members) // 2
    left, right = members[:middle], members[middle:]
    return alt(seq(_subsequence(left, comma), _tail(right, comma)), _subsequence(right, comma))


def _tail(members: Sequence[_Member], comma: Expr) -> Expr:
    """Members after another one."""
    parts = [seq(comma, member.expr) for member in members]
    return seq(*(part if member.is_required else optional(part) for part, member in zip(parts, members, strict=True)))


def _counted(plan: _Plan, comma: Expr, where: str) -> Expr:
    """Members in declared order and their number: an automaton whose states are the next member and the count.

    Every edge is a member; its target is the state after it. The others come last, as a run that brings the count to
    where it has to be.
    """
    declared = plan.declared
    # Beyond this count nothing depends on it.
    limit = max(1, plan.least) if plan.most is None else plan.most
    limit = min(limit, len(declared) + (limit if plan.others != NEVER else 0) + len(plan.needed))
    if len(declared) ** 2 * (limit + 1) // 2 > _MAX_EDGES:
        raise GrammarError(
            f"minProperties and maxProperties can be counted in declared order for a few optional properties, but "
            f'there are too many at {where}; use property_order="free", or leave the counts out'
        )
    width, end = limit + 1, (len(declared) + 1) * (limit + 1)
    edges: list[list[tuple[Expr, int]]] = [[] for _ in range(end + 1)]
    accepting = {end}
    for start, count in itertools.product(range(len(declared) + 1), range(width)):
        lead = comma if count else EMPTY
        row = edges[start * width + count]
        if plan.most is None or count < plan.most:
            for following in range(start, len(declared)):
                target = (following + 1) * width + min(count + 1, limit)
                row.append((seq(lead, declared[following].expr), target))
                if declared[following].is_required:
                    break
        if any(member.is_required for member in declared[start:]):
            continue
        if count and count >= plan.least and not plan.needed:
            accepting.add(start * width + count)
        others = _others(plan, comma, plan.least - count, None if plan.most is None else plan.most - count)
        if others != NEVER:
            row.append((seq(lead, others), end))
    return Automaton(tuple(tuple(row) for row in edges), frozenset(accepting))
