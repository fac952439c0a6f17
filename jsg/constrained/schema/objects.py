"""Objects as expressions: the members that may be there, each with its name and its value.

`orders.py` puts them in braces.

A grammar cannot remember names, so two members may have the same undeclared name. A reader keeps the first of them or
the last, and each is valid by itself. So whatever an object must have is there for both readers: `orders.py` sees to
counts. `finish_objects.py` sees to `Object.some`: every member that may have the name of such a member has a value that
serves.
"""

import functools

from jsg.constrained.ir import NEVER, Expr, any_of, seq
from jsg.constrained.schema import distinct, strings
from jsg.constrained.schema.drafts import meet_strings
from jsg.constrained.schema.json_text import known_string
from jsg.constrained.schema.orders import Member, Plan, braces
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.shapes import NodeName, Object, String
from jsg.errors import GrammarError


def object_expr(scope: Scope, shape: Object, where: str) -> Expr:
    """An object with its braces; NEVER where no object is valid.

    Raises:
        GrammarError: Counts or an order that a grammar of this size cannot keep.
    """
    needed, others = _needed_members(scope, shape), _other_members(scope, shape, None, where)
    kinds = functools.cache(functools.partial(_kinds, scope, shape, where))
    members: list[Member] = []
    for name, node in shape.properties.items():
        if scope.shapes(node):
            members.append(Member(_member(scope, known_string(name), node), name in shape.required))
        elif name in shape.required:
            return NEVER
    plan = Plan(tuple(members), needed, others, kinds, shape.min_properties, shape.max_properties)
    return braces(scope, plan, where)


def _member(scope: Scope, name: Expr, node: NodeName) -> Expr:
    return seq(name, scope.spacing.colon, scope.value(node))


def _needed_members(scope: Scope, shape: Object) -> tuple[Expr, ...]:
    """Members outside `properties` that must be there."""
    needed: list[Expr] = []
    for name, node in shape.some:
        quoted = strings.quoted_expr(scope, name)
        needed.append(_member(scope, quoted, node) if quoted != NEVER and scope.shapes(node) else NEVER)
    return tuple(needed)


def _other_members(scope: Scope, shape: Object, kind: str | None, where: str) -> Expr:
    """Any member outside `properties`; with a pattern, only those whose names it is found in."""
    excluded = String(patterns=() if kind is None else (kind,), excluded=frozenset(shape.properties))
    sorts = [(String(patterns=p.matches, not_patterns=p.excludes), p.node) for p in shape.patterns]
    sorts.append((String(not_patterns=shape.additional_excludes), shape.additional))
    others: list[Expr] = []
    for names, node in sorts:
        if scope.shapes(node):
            wanted = meet_strings(names, excluded)
            quoted = NEVER if wanted is None else _names(scope, wanted, shape, where)
            if quoted != NEVER:
                others.append(_member(scope, quoted, node))
    return any_of(others)


def _kinds(scope: Scope, shape: Object, where: str) -> list[Expr]:
    """Members outside `properties` by kinds of their names, of which no two have a name in common."""
    found = (_other_members(scope, shape, kind, where) for kind in distinct.kinds())
    return [kind for kind in found if kind != NEVER]


def _names(scope: Scope, names: String, shape: Object, where: str) -> Expr:
    """Names of a kind that `shape.names` takes too, with their quotes.

    Raises:
        GrammarError: Their patterns are too much to work out.
    """
    options: list[Expr] = []
    for taken in (String(),) if shape.names is None else shape.names:
        wanted = meet_strings(names, taken)
        if wanted is None:
            continue
        if wanted == String():
            options.append(strings.string_expr(scope, wanted, where))
            continue
        try:
            options.append(strings.quoted_expr(scope, wanted))
        except GrammarError as error:
            raise GrammarError(f"patternProperties or propertyNames at {where}: {error}") from error
    return any_of(options)
