"""Turns a JSON Schema into shapes (`normalise`).

    locations.py   finds schemas and follows $ref
        │
    formulas.py    gives what a schema says about one type, as alternatives (alternatives.py). It uses assertions.py,
        │          containers.py and unevaluated.py; judge.py finds the alternatives that have no value
    finish_*.py    make shapes of the alternatives
        │
    normalise.py   collects the nodes that the root needs, and drops shapes that have no value
        │
    sharing.py     puts equal nodes under one name

A node is computed when another node names it. So parts of a schema that nothing uses cost nothing, and the schema is
not refused because of them.
"""

from collections.abc import Iterable, Iterator, Mapping

from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.schema.alternatives import Alternative, Members
from jsg.constrained.schema.containers import Context
from jsg.constrained.schema.finish_arrays import finish_array
from jsg.constrained.schema.finish_objects import finish_object
from jsg.constrained.schema.formats import FORMATS
from jsg.constrained.schema.formulas import Formulas
from jsg.constrained.schema.keywords import CONSTRAINING, HELPERS, SAYING_NOTHING
from jsg.constrained.schema.locations import EVERYTHING, Locations, step
from jsg.constrained.schema.nodes import Nodes, TooMuchError
from jsg.constrained.schema.patterns import Patterns
from jsg.constrained.schema.shapes import (
    ANY,
    EVERY_SHAPE,
    NEVER,
    Array,
    Const,
    Document,
    Json,
    NodeName,
    Object,
    Shape,
)
from jsg.constrained.schema.sharing import named, shared
from jsg.constrained.schema.values import TYPES, text_of
from jsg.errors import GrammarError
from jsg.types import AdditionalProperties

NO_VALUE = "no value is valid for the schema"
"""How the error message begins for a schema that contradicts itself. Such a schema has no unsupported part."""


def normalise(schema: Json, limits: Limits = LIMITS, additional_properties: AdditionalProperties = "open") -> Document:
    """The shapes of all values that are valid for a JSON Schema; with "closed", without members that nothing declares.

    Numbers may be int, float or Decimal. Decimal numbers are exact.

    Raises:
        GrammarError: The schema is wrong, no value is valid for it, or something in it cannot be enforced.
    """
    locations = Locations(schema, limits)
    context = Context(locations, Nodes(locations), Patterns(limits), additional_properties)
    formulas = Formulas(context, limits.choices)
    root = context.nodes.node(locations.root)
    nodes = _pruned(_all_nodes(formulas, root))
    if not nodes[root]:
        raise _contradiction(formulas, root)
    return shared(Document(root, nodes, tuple(_annotations(locations))))


def no_value(where: str, keywords: Iterable[str]) -> str:
    """The message for a schema without a valid value. `where` is its pointer, and `keywords` are its keywords."""
    names = ", ".join(dict.fromkeys(keyword for keyword in keywords if keyword in CONSTRAINING))
    return f"{NO_VALUE}: {where} {f'contradicts itself ({names})' if names else 'is false'}; correct it"


def _all_nodes(formulas: Formulas, root: NodeName) -> dict[NodeName, tuple[Shape, ...]]:
    """The root and all nodes that it needs.

    Raises:
        GrammarError: A node cannot be enforced.
    """
    nodes: dict[NodeName, tuple[Shape, ...]] = {NEVER: (), ANY: EVERY_SHAPE}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            try:
                nodes[node] = tuple(_finished(formulas, node))
            except TooMuchError as error:
                raise GrammarError(f"{error} (at {node})") from error
            waiting.extend(name for shape in nodes[node] for name in named(shape) if name not in nodes)
    return nodes


def _finished(formulas: Formulas, node: NodeName) -> Iterator[Shape]:
    for formula in formulas.of_kinds(node):
        for alternative in formulas.reduced(formula) if len(formula) > 1 else formula:
            yield from _shapes(formulas, alternative, node)


def _shapes(formulas: Formulas, alternative: Alternative, node: NodeName) -> Iterator[Shape]:
    judge = formulas.judge
    if alternative.values is not None:
        yield from (Const(text_of(value, "a value of enum or const")) for value in judge.listed(alternative))
        return
    if judge.is_empty(alternative):
        return
    if alternative.refusals:
        raise GrammarError(alternative.refusals[0])
    match alternative.shape:
        case Array() as shape:
            yield from finish_array(formulas, shape, node)
        case Members() as shape:
            yield from finish_object(formulas, shape, node)
        case shape:
            yield shape


def _needed(shape: Shape) -> Iterator[NodeName]:
    """The nodes that must each have a value, or else the shape has none."""
    if isinstance(shape, Array):
        yield from shape.prefix[: shape.min_items]
        if shape.min_items > len(shape.prefix):
            yield shape.items
        yield from (node for node, _ in shape.some)
    elif isinstance(shape, Object):
        yield from (shape.properties[name] for name in sorted(shape.required))
        yield from (node for _, node in shape.some)


def _pruned(nodes: Mapping[NodeName, tuple[Shape, ...]]) -> dict[NodeName, tuple[Shape, ...]]:
    """The nodes without the shapes that have no finite value, such as an object that must contain itself."""
    users: dict[NodeName, list[tuple[NodeName, int]]] = {}
    missing: dict[tuple[NodeName, int], set[NodeName]] = {}
    ready: list[tuple[NodeName, int]] = []
    for name, shapes in nodes.items():
        for i, shape in enumerate(shapes):
            needs = missing[name, i] = set(_needed(shape))
            for need in needs:
                users.setdefault(need, []).append((name, i))
            if not needs:
                ready.append((name, i))
    possible: set[NodeName] = set()
    while ready:
        name, _ = ready.pop()
        if name in possible:
            continue
        possible.add(name)
        for user in users.get(name, ()):
            missing[user].discard(name)
            if not missing[user]:
                ready.append(user)
    return {
        name: tuple(shape for i, shape in enumerate(shapes) if not missing[name, i]) for name, shapes in nodes.items()
    }


def _contradiction(formulas: Formulas, root: NodeName) -> GrammarError:
    """The error that no value is valid for the root. It names the innermost schema that causes this."""
    nodes, locations = formulas.context.nodes, formulas.context.locations
    where, found = locations.all[locations.root].pointer, [locations.root]
    node, seen = root, {NEVER}
    while node not in seen:
        seen.add(node)
        where, found = node, [abs(literal) for literal in nodes.literals(node)]
        node = _impossible_part(formulas, node)
    return GrammarError(no_value(where, (keyword for location in found for keyword in nodes.keywords(location))))


def _impossible_part(formulas: Formulas, node: NodeName) -> NodeName:
    """The node of a required member or item for which no value is valid; NEVER where there is none."""
    alternatives = [one for kind in TYPES for one in formulas.of_node(node, kind)]
    parts: Iterable[NodeName] = ()
    match alternatives:
        case [Alternative(Members() as shape)]:
            parts = (formulas.judge.member(shape, name) for name in shape.required)
        case [Alternative(Array() as shape)]:
            others = (shape.items,) if shape.min_items > len(shape.prefix) else ()
            parts = (*shape.prefix[: shape.min_items], *others)
        case _:
            pass
    return next((part for part in parts if formulas.judge.is_never(part)), NEVER)


def _annotations(locations: Locations) -> Iterator[str]:
    """The annotations: what the schema says and the grammar does not enforce."""
    for name in locations.unknown_drafts:
        yield f"$schema {name!r} is not known; read as draft 2020-12"
    for location in locations.all[EVERYTHING + 1 :]:
        if isinstance(location.schema, dict):
            name = location.schema.get("format")
            if isinstance(name, str) and name not in FORMATS:
                yield f"format {name!r} at {step(location.pointer, 'format')}"
            for keyword in location.schema:
                if keyword not in CONSTRAINING and keyword not in HELPERS and keyword not in SAYING_NOTHING:
                    yield f"{keyword} at {step(location.pointer, keyword)}"
