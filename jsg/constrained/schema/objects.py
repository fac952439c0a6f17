"""Makes expressions of objects: the members that may be there, each with its name and its value.

`orders.py` puts the members in braces.

A grammar cannot remember names, so two members may have the same undeclared name. Each of them is valid by itself, and
a reader keeps either the first or the last. The object must be valid for both readers. For counts of members,
`orders.py` makes sure of that. For `Object.some`, `finish_objects.py` does: every member that may have the name of a
required member also has a value that is valid for it.
"""

import functools

from jsg.constrained.ir import EMPTY, NEVER, Expr, any_of, seq
from jsg.constrained.schema import distinct, strings
from jsg.constrained.schema.alternatives import meet_strings
from jsg.constrained.schema.orders import Member, Plan, braces, members_expr
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.shapes import NodeName, Object, String
from jsg.errors import GrammarError


def object_expr(scope: Scope, shape: Object) -> Expr:
    """An object with its braces; NEVER where no object is valid.

    Raises:
        GrammarError: The counts or the order need a larger grammar than is allowed.
    """
    plan = _plan(scope, shape)
    return NEVER if plan is None else braces(scope, plan)


def bare_object_expr(scope: Scope, shape: Object) -> Expr:
    """The members of an object, which may have none, without braces; NEVER where no object is valid.

    Raises:
        GrammarError: The counts or the order need a larger grammar than is allowed.
    """
    plan = _plan(scope, shape)
    if plan is None:
        return NEVER
    may_be_empty, some = members_expr(scope, plan)
    return any_of([EMPTY, some] if may_be_empty else [some])


def _plan(scope: Scope, shape: Object) -> Plan | None:
    """The members that an object may have; None where no object is valid."""
    needed, others = _needed_members(scope, shape), _other_members(scope, shape, None)
    kinds = functools.cache(functools.partial(_kinds, scope, shape))
    members: list[Member] = []
    for name, node in scope.spelling.in_order(shape.properties):
        if scope.shapes(node):
            members.append(Member(_member(scope, scope.spelling.known_name(name), node), name in shape.required))
        elif name in shape.required:
            return None
    return Plan(tuple(members), needed, others, kinds, shape.min_properties, shape.max_properties)


def _member(scope: Scope, name: Expr, node: NodeName) -> Expr:
    return seq(name, scope.spacing.colon, scope.value(node))


def _needed_members(scope: Scope, shape: Object) -> tuple[Expr, ...]:
    """The required members outside `properties`."""
    needed: list[Expr] = []
    for name, node in shape.some:
        quoted = strings.name_expr(scope, name)
        needed.append(_member(scope, quoted, node) if quoted != NEVER and scope.shapes(node) else NEVER)
    return tuple(needed)


def _other_members(scope: Scope, shape: Object, kind: str | None) -> Expr:
    """Any member outside `properties`. With `kind`, which is a pattern, only those whose names match it."""
    excluded = String(patterns=() if kind is None else (kind,), excluded=frozenset(shape.properties))
    sorts = [(String(patterns=p.matches, not_patterns=p.excludes), p.node) for p in shape.patterns]
    sorts.append((String(not_patterns=shape.additional_excludes), shape.additional))
    others: list[Expr] = []
    for names, node in sorts:
        if scope.shapes(node):
            wanted = meet_strings(names, excluded)
            quoted = NEVER if wanted is None else _names(scope, wanted, shape)
            if quoted != NEVER:
                others.append(_member(scope, quoted, node))
    return any_of(others)


def _kinds(scope: Scope, shape: Object) -> list[Expr]:
    """The members outside `properties`, one expression for each kind of names; kinds are disjoint."""
    found = (_other_members(scope, shape, kind) for kind in distinct.kinds())
    return [kind for kind in found if kind != NEVER]


def _names(scope: Scope, names: String, shape: Object) -> Expr:
    """Those of the names that are also valid for `shape.names`, with their quotes.

    Raises:
        GrammarError: Their patterns need too large an automaton.
    """
    options: list[Expr] = []
    for taken in (String(),) if shape.names is None else shape.names:
        wanted = meet_strings(names, taken)
        if wanted is None:
            continue
        try:
            options.append(strings.name_expr(scope, wanted))
        except GrammarError as error:
            raise GrammarError(f"patternProperties or propertyNames: {error}") from error
    return any_of(options)
