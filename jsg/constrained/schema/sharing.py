"""Equal nodes under one name: parts of a schema that say the same, wherever they stand, become one rule."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from jsg.constrained.schema.shapes import ANY, EVERY_SHAPE, NEVER, Array, Document, NamePattern, NodeName, Object, Shape

MAX_ROUNDS = 60

Rename = Callable[[NodeName], Hashable]


def shared(document: Document) -> Document:
    """The same document, in which no two nodes are alike (as far as can be told in few rounds)."""
    classes = _classes(document.nodes)
    if classes is None:
        return document
    names: dict[int, NodeName] = {}
    for name in (ANY, NEVER, document.root, *document.nodes):
        names.setdefault(classes[name], name)
    final = {name: names[classes[name]] for name in document.nodes}
    nodes = {
        name: shapes if shapes is EVERY_SHAPE else _distinct([_renamed(shape, final) for shape in shapes])
        for name, shapes in document.nodes.items()
        if final[name] == name
    }
    return Document(final[document.root], nodes, document.annotations)


def named(shape: Shape) -> Iterator[NodeName]:
    """The nodes that a shape names."""
    if isinstance(shape, Array):
        yield from (*shape.prefix, shape.items)
        if shape.contains is not None:
            yield shape.contains.node
            if shape.contains.others is not None:
                yield shape.contains.others
    elif isinstance(shape, Object):
        yield from (*shape.properties.values(), *(cell.node for cell in shape.patterns), shape.additional)
        yield from (node for _, node in shape.some)


def _classes(nodes: Mapping[NodeName, tuple[Shape, ...]]) -> dict[NodeName, int] | None:
    """A number for each node, the same for nodes that are alike; None where that takes too long.

    All are taken to be alike at first, and told apart by what they say and by the nodes that they name, until nothing
    changes. A node that is like no other one is not looked at again.
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
                key = tuple(_signature(shape, classes.__getitem__) for shape in nodes[name])
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


def _signature(shape: Shape, rename: Rename) -> Hashable:
    """All of a shape, other nodes by what `rename` makes of them."""
    if isinstance(shape, Array):
        kind = shape.contains
        return (
            Array,
            tuple(map(rename, shape.prefix)),
            rename(shape.items),
            (shape.min_items, shape.max_items, shape.is_unique),
            kind and (rename(kind.node), kind.others and rename(kind.others), kind.least, kind.most),
        )
    if isinstance(shape, Object):
        return (
            Object,
            tuple((name, rename(node)) for name, node in shape.properties.items()),
            shape.required,
            tuple((cell.matches, cell.excludes, rename(cell.node)) for cell in shape.patterns),
            (rename(shape.additional), shape.additional_excludes, shape.names),
            tuple((name, rename(node)) for name, node in shape.some),
            (shape.min_properties, shape.max_properties),
            tuple(sorted((name, tuple(sorted(needed))) for name, needed in shape.dependents.items())),
        )
    return shape


def _renamed(shape: Shape, names: Mapping[NodeName, NodeName]) -> Shape:
    if all(names[name] == name for name in named(shape)):
        return shape
    if isinstance(shape, Array):
        kind = shape.contains
        if kind is not None:
            others = None if kind.others is None else names[kind.others]
            kind = dataclasses.replace(kind, node=names[kind.node], others=others)
        prefix = tuple(names[node] for node in shape.prefix)
        return dataclasses.replace(shape, prefix=prefix, items=names[shape.items], contains=kind)
    if isinstance(shape, Object):
        return dataclasses.replace(
            shape,
            properties={name: names[node] for name, node in shape.properties.items()},
            patterns=tuple(NamePattern(cell.matches, cell.excludes, names[cell.node]) for cell in shape.patterns),
            additional=names[shape.additional],
            some=tuple((name, names[node]) for name, node in shape.some),
        )
    return shape


def _distinct(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Each once, and no object that another one allows anyhow, which asks for fewer members."""
    if len(shapes) < 2:
        return tuple(shapes)
    found: dict[Hashable, Shape] = {}
    objects: dict[Hashable, list[Object]] = {}
    for shape in shapes:
        if isinstance(shape, Object):
            loose = dataclasses.replace(shape, required=frozenset(), min_properties=0)
            objects.setdefault(_signature(loose, str), []).append(shape)
        else:
            found[shape] = shape
    for alike in objects.values():
        for i, shape in enumerate(alike):
            if not any(j != i and _allows(other, shape, is_first=j < i) for j, other in enumerate(alike)):
                found[i, _signature(shape, str)] = shape
    return tuple(found.values())


def _allows(other: Object, shape: Object, is_first: bool) -> bool:
    """Whether `other`, which differs in what it asks for only, allows all that `shape` does; of equals the first."""
    least = max(shape.min_properties, len(shape.required) + len(shape.some))
    if not (other.required <= shape.required and other.min_properties <= least):
        return False
    return is_first or other.required != shape.required or other.min_properties != shape.min_properties
