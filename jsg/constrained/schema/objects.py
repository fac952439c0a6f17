"""Objects as expressions: the members that may be there, each with its name and its value.

`orders.py` puts them in braces.

A grammar cannot remember names, so two members may have the same name where it is not declared. A reader keeps the
first of them or the last, and each is valid by itself. What must be there is asked for in a way that holds for either
reader: `orders.py` does so for counts, and what `Object.some` asks for holds for every member whose name could be the
one that is asked for (`finish_objects.py`).
"""

import functools
import itertools

from jsg.constrained.ir import NEVER, Expr, any_of, seq
from jsg.constrained.schema import distinct, strings
from jsg.constrained.schema.drafts import meet_strings
from jsg.constrained.schema.json_text import known_string
from jsg.constrained.schema.orders import Member, Plan, braces
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.shapes import NodeName, Object, String
from jsg.errors import GrammarError

_MAX_TRIGGERS = 3
"""Names with dependents: each doubles the ways to read an object, of which a machine follows only so many at once."""


def object_expr(scope: Scope, shape: Object, where: str) -> Expr:
    """An object with its braces; NEVER where no object is valid.

    Raises:
        GrammarError: Counts, dependents or an order that a grammar of this size cannot keep.
    """
    needed, others = _needed_members(scope, shape), _other_members(scope, shape, None, where)
    kinds = functools.cache(functools.partial(_kinds, scope, shape, where))
    options: list[Expr] = []
    for required, forbidden in _cases(shape, where):
        members: list[Member] = []
        is_possible = not required & forbidden
        for name, node in shape.properties.items():
            is_valid = name not in forbidden and bool(scope.shapes(node))
            if is_valid:
                members.append(Member(_member(scope, known_string(name), node), name in required))
            elif name in required:
                is_possible = False
        if is_possible:
            plan = Plan(tuple(members), needed, others, kinds, shape.min_properties, shape.max_properties)
            options.append(braces(scope, plan, where))
    return any_of(options)


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


def _needed_members(scope: Scope, shape: Object) -> tuple[Expr, ...]:
    """Members outside `properties` that must be there."""
    needed: list[Expr] = []
    for name, node in shape.some:
        quoted = strings.quoted_expr(scope, name)
        needed.append(_member(scope, quoted, node) if quoted != NEVER and scope.shapes(node) else NEVER)
    return tuple(needed)


def _other_members(scope: Scope, shape: Object, kind: str | None, where: str) -> Expr:
    """Any member outside `properties`; only those in whose names a pattern is found, where one is given."""
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
