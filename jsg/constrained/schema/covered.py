"""Alternatives of a node that another one says already.

Each alternative that is an object is a way of its own to read a text, and a machine follows only a few at once. Working
out `oneOf` leaves many that others cover.
"""

from collections.abc import Callable, Sequence

from jsg.constrained.schema.shapes import ANY, NodeName, Object, Shape

_MAX_OBJECTS = 100
"""Of one node; every two are compared."""
IsNever = Callable[[NodeName], bool]


def without_covered(shapes: Sequence[Shape], is_never: IsNever) -> list[Shape]:
    """The shapes without objects that are valid for another one of them anyway."""
    objects = [shape for shape in shapes if isinstance(shape, Object)]
    if not 1 < len(objects) <= _MAX_OBJECTS:
        return list(shapes)
    kept: list[Object] = []
    for shape in objects:
        if not any(_covers(other, shape, is_never) for other in kept):
            kept = [other for other in kept if not _covers(shape, other, is_never)]
            kept.append(shape)
    names = {id(shape) for shape in kept}
    return [shape for shape in shapes if not isinstance(shape, Object) or id(shape) in names]


def _covers(outer: Object, inner: Object, is_never: IsNever) -> bool:
    """Whether every object that is valid for `inner` is valid for `outer`; False where that is not plain to see."""
    for one in (outer, inner):
        if one.patterns or one.additional_excludes or one.names is not None or one.some:
            return False
    if outer.dependents and outer.dependents != inner.dependents:
        return False
    most = inner.max_properties
    if outer.min_properties > inner.min_properties:
        return False
    if outer.max_properties is not None and (most is None or most > outer.max_properties):
        return False
    if not outer.required <= inner.required or not _is_within(inner.additional, outer.additional, is_never):
        return False
    return all(
        _is_within(inner.properties.get(name, inner.additional), outer.properties.get(name, outer.additional), is_never)
        for name in {*inner.properties, *outer.properties}
    )


def _is_within(inner: NodeName, outer: NodeName, is_never: IsNever) -> bool:
    return inner == outer or outer == ANY or is_never(inner)
