"""Puts equal nodes under one name, so that parts of a schema with the same meaning become one rule.

Alternatives of a node that another alternative covers are left out.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from jsg.constrained.schema.shapes import ANY, EVERY_SHAPE, NEVER, Array, Document, NamePattern, NodeName, Object, Shape

MAX_ROUNDS = 60

MAX_OBJECTS = 200
"""If a node has more objects than this among its alternatives, they are not compared."""

IsNever = Callable[[NodeName], bool]


def shared(document: Document) -> Document:
    """The same document with equal nodes merged, unless finding them takes more than `MAX_ROUNDS` rounds."""
    classes = _classes(document.nodes)
    if classes is None:
        classes = {name: number for number, name in enumerate(document.nodes)}
    names: dict[int, NodeName] = {}
    for name in (ANY, NEVER, document.root, *document.nodes):
        names.setdefault(classes[name], name)
    final = {name: names[classes[name]] for name in document.nodes}
    nodes = {
        name: shapes
        if shapes is EVERY_SHAPE
        else _without_covered([_renamed(shape, final) for shape in shapes], lambda node: not document.nodes[node])
        for name, shapes in document.nodes.items()
        if final[name] == name
    }
    return Document(final[document.root], nodes, document.annotations)


def named(shape: Shape) -> Iterator[NodeName]:
    """The nodes that a shape names."""
    if isinstance(shape, Array):
        yield from (*shape.prefix, shape.items, *(node for node, _ in shape.some))
    elif isinstance(shape, Object):
        yield from (*shape.properties.values(), *(cell.node for cell in shape.patterns), shape.additional)
        yield from (node for _, node in shape.some)


def _classes(nodes: Mapping[NodeName, tuple[Shape, ...]]) -> dict[NodeName, int] | None:
    """A number for each node, the same for equal nodes; None where that takes too many rounds.

    At first all nodes have one number. Each round separates nodes that differ in what they say or in the numbers of the
    nodes that they name, until a round changes nothing. A node that equals no other node is not compared again.
    """
    classes = dict.fromkeys(nodes, 0)
    groups: list[list[NodeName]] = [list(nodes)]
    num_classes = 1
    for _ in range(MAX_ROUNDS):
        following: list[list[NodeName]] = []
        changes: dict[NodeName, int] = {}
        for group in groups:
            parts: dict[Hashable, list[NodeName]] = {}
            for name in group:
                key = tuple(_signature(shape, classes) for shape in nodes[name])
                parts.setdefault(key, []).append(name)
            for part in list(parts.values())[1:]:
                changes.update(dict.fromkeys(part, num_classes))
                num_classes += 1
            following.extend(part for part in parts.values() if len(part) > 1)
        if not changes:
            return classes
        classes.update(changes)
        groups = following
    return None


def _signature(shape: Shape, classes: Mapping[NodeName, int]) -> Hashable:
    """Everything that a shape says, with the numbers of the nodes that it names in place of their names."""
    if isinstance(shape, Array):
        nodes = ([classes[name] for name in shape.prefix], classes[shape.items])
        some = tuple([(classes[node], start) for node, start in shape.some])
        return (Array, tuple(nodes[0]), nodes[1], shape.min_items, shape.max_items, some, shape.is_unique, shape.values)
    if isinstance(shape, Object):
        return (
            *(Object, tuple([(name, classes[node]) for name, node in shape.properties.items()]), shape.required),
            *(tuple([(cell.matches, cell.excludes, classes[cell.node]) for cell in shape.patterns]),),
            *(classes[shape.additional], shape.additional_excludes, shape.names),
            *(tuple([(name, classes[node]) for name, node in shape.some]),),
            *(shape.min_properties, shape.max_properties),
        )
    return shape


def _renamed(shape: Shape, names: Mapping[NodeName, NodeName]) -> Shape:
    if all(names[name] == name for name in named(shape)):
        return shape
    if isinstance(shape, Array):
        prefix = tuple(names[node] for node in shape.prefix)
        some = tuple((names[node], start) for node, start in shape.some)
        return dataclasses.replace(shape, prefix=prefix, items=names[shape.items], some=some)
    if isinstance(shape, Object):
        return dataclasses.replace(
            shape,
            properties={name: names[node] for name, node in shape.properties.items()},
            patterns=tuple(NamePattern(cell.matches, cell.excludes, names[cell.node]) for cell in shape.patterns),
            additional=names[shape.additional],
            some=tuple((name, names[node]) for name, node in shape.some),
        )
    return shape


def _without_covered(shapes: Sequence[Shape], is_never: IsNever) -> tuple[Shape, ...]:
    """The shapes without duplicates, and without objects whose values are all valid for another object shape.

    Each alternative that is an object is one more level that a machine follows. Resolving `oneOf` leaves many objects
    that others cover.
    """
    objects = [shape for shape in shapes if isinstance(shape, Object)]
    kept: list[Object] = objects
    if 1 < len(objects) <= MAX_OBJECTS:
        kept = []
        for shape in objects:
            if not any(_covers(other, shape, is_never) for other in kept):
                kept = [other for other in kept if not _covers(shape, other, is_never)]
                kept.append(shape)
    others = dict.fromkeys(shape for shape in shapes if not isinstance(shape, Object))
    return (*others, *kept)


def _covers(outer: Object, inner: Object, is_never: IsNever) -> bool:
    """Whether every object that is valid for `inner` is valid for `outer`; False where that is not obvious."""
    rules = [(one.patterns, one.additional_excludes, one.names, one.some) for one in (outer, inner)]
    if rules[0] != rules[1]:
        return False
    if rules[0] != ((), (), None, ()) and outer.properties.keys() != inner.properties.keys():
        return False  # a pattern or `names` may say something about a name that only one of the two declares
    most = inner.max_properties
    # Two members of `some` may have the same name, so they surely count as one member only.
    if outer.min_properties > max(inner.min_properties, len(inner.required) + bool(inner.some)):
        return False
    if outer.max_properties is not None and (most is None or most > outer.max_properties):
        return False

    def is_within(node: NodeName, other: NodeName) -> bool:
        return node == other or other == ANY or is_never(node)

    names = {*inner.properties, *outer.properties}
    return (
        outer.required <= inner.required
        and is_within(inner.additional, outer.additional)
        and all(
            is_within(inner.properties.get(name, inner.additional), outer.properties.get(name, outer.additional))
            for name in names
        )
    )
