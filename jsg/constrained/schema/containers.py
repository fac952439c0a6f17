"""Reads one schema's keywords about arrays and objects.

The `…_says` functions give the values that all of the keywords allow. The `…_denies` functions give the values that at
least one of them forbids. They take the document's context, and the location and keywords of the schema.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jsg.constrained.schema.alternatives import Alternative, Facet, Members, items_of
from jsg.constrained.schema.keywords import REFERENCES, Reader
from jsg.constrained.schema.locations import Locations
from jsg.constrained.schema.nodes import Nodes
from jsg.constrained.schema.patterns import Patterns
from jsg.constrained.schema.shapes import ANY, NEVER, Array, NodeName
from jsg.errors import GrammarError
from jsg.types import AdditionalProperties

DEPENDENTS = ("dependentRequired", "dependencies")
MAX_OPTIONAL_DEPENDENTS = 5
"""Most optional names that require other names. Each doubles the alternatives of an object."""


class Context(NamedTuple):
    """What reading a schema needs of the document around it."""

    locations: Locations
    nodes: Nodes
    patterns: Patterns
    additional_properties: AdditionalProperties

    def child(self, location: int, *path: str | int) -> NodeName:
        """The node of the values that are valid for a schema inside another."""
        return self.nodes.node(self.locations.child(location, *path))

    def no_child(self, location: int, *path: str | int) -> NodeName:
        """The node of the values that are not valid for a schema inside another."""
        return self.nodes.node(-self.locations.child(location, *path))

    def always(self, location: int, reader: Reader) -> Iterator[int]:
        """The schemas that hold for every valid value of a schema: those of its references and of its allOf."""
        for keyword in REFERENCES:
            if keyword in reader.keywords:
                yield self.locations.reference(location, keyword)
        if "allOf" in reader.keywords:
            yield from (self.locations.child(location, "allOf", i) for i in range(reader.schemas("allOf")))

    def pointer(self, literal: int) -> str:
        """The JSON pointer of the schema that a literal names."""
        return self.locations.all[abs(literal)].pointer


def array_says(context: Context, location: int, reader: Reader) -> Array | None:
    """The arrays that all keywords allow; None where they allow no array."""
    prefix, rest = _item_paths(reader)
    return items_of(
        Array(
            prefix=tuple(context.child(location, *path) for path in prefix),
            items=context.child(location, *rest) if rest else ANY,
            min_items=reader.count("minItems") or 0,
            max_items=reader.count("maxItems"),
            is_unique=reader.flag("uniqueItems"),
        )
    )


def array_denies(context: Context, location: int, reader: Reader) -> list[Alternative]:
    """The arrays that at least one keyword forbids, as alternatives."""
    alternatives: list[Alternative] = []
    least, most = reader.count("minItems"), reader.count("maxItems")
    if least:
        alternatives.append(Alternative(Array(max_items=least - 1)))
    if most is not None:
        alternatives.append(Alternative(Array(min_items=most + 1)))
    if reader.flag("uniqueItems") and (most is None or most > 1):
        refusal = f"{reader.where('uniqueItems')} stands under `not`, where it is not supported; remove it"
        alternatives.append(Alternative(Array(min_items=2), refusals=(refusal,)))
    prefix, rest = _item_paths(reader)
    for i, path in enumerate(prefix):
        before, wrong = (ANY,) * i, context.no_child(location, *path)
        alternatives.append(Alternative(Array(prefix=(*before, wrong), min_items=i + 1)))
    if rest:
        wrong = context.no_child(location, *rest)
        if wrong == ANY:
            alternatives.append(Alternative(Array(min_items=len(prefix) + 1)))
        elif wrong != NEVER:
            alternatives.append(Alternative(Array(some=((wrong, len(prefix)),))))
    return alternatives


def _item_paths(reader: Reader) -> tuple[list[tuple[str | int, ...]], tuple[str | int, ...]]:
    """The paths of the schemas of the first items, and the path of the schema of the others (empty without one).

    Both forms are read: `prefixItems` with `items`, and the older list in `items` with `additionalItems`.
    """
    items = reader.keywords.get("items")
    holder = "items" if isinstance(items, list) else "prefixItems"
    prefix: list[tuple[str | int, ...]] = [(holder, i) for i in range(len(reader.array(holder)))]
    if isinstance(items, list):
        return prefix, ("additionalItems",) if "additionalItems" in reader.keywords else ()
    return prefix, ("items",) if items is not None else ()


def object_says(context: Context, location: int, reader: Reader) -> Members | None:
    """The objects that all keywords allow, except those about dependents; None where they allow no object."""
    facets: tuple[Facet, ...] = ()
    if not {"properties", "patternProperties", "additionalProperties"}.isdisjoint(reader.keywords):
        facets = (_facet(context, location, reader),)
    names: tuple[NodeName, ...] = ()
    if "propertyNames" in reader.keywords:
        names = (context.child(location, "propertyNames"),)
    required = reader.names("required")
    _check_dependents(context, location)
    least, most = reader.count("minProperties") or 0, reader.count("maxProperties")
    if most is not None and max(least, len(required)) > most:
        return None
    return Members(facets, required, names, (), least, most)


def _check_dependents(context: Context, location: int) -> None:
    """Counts the optional names that require others, also those of references and of `allOf`."""
    stack, seen = [location], set[int]()
    required: set[str] = set()
    needed: list[tuple[str, str, tuple[str, ...]]] = []
    while stack:
        if (current := stack.pop()) in seen:
            continue
        seen.add(current)
        reader = Reader(context.locations.all[current], context.nodes.keywords(current))
        required.update(reader.names("required"))
        for keyword in DEPENDENTS:
            needed.extend((keyword, name, names) for name, names in reader.names_by_name(keyword).items())
        stack.extend(context.always(current, reader))
    counted = [each for each in needed if each[1] not in required and not required.issuperset(each[2])]
    num_names = len({name for _, name, _ in counted})
    if num_names > MAX_OPTIONAL_DEPENDENTS:
        keywords = " and ".join(dict.fromkeys(keyword for keyword, _, _ in counted))
        raise GrammarError(
            f"{keywords} at {context.pointer(location)} can be enforced for at most {MAX_OPTIONAL_DEPENDENTS} optional "
            f"names, but there are {num_names}; require some of them or leave some out"
        )


def object_denies(context: Context, location: int, reader: Reader) -> list[Alternative]:
    """The objects that at least one keyword forbids, except those about dependents, as alternatives."""
    alternatives: list[Alternative] = []
    least, most = reader.count("minProperties"), reader.count("maxProperties")
    if least:
        alternatives.append(Alternative(Members(max_properties=least - 1)))
    if most is not None:
        alternatives.append(Alternative(Members(min_properties=most + 1)))
    alternatives.extend(Alternative(without(name)) for name in reader.names("required"))
    for name in reader.mapping("properties"):
        wrong = context.no_child(location, "properties", name)
        if wrong != NEVER:
            alternatives.append(Alternative(Members(facets=(Facet({name: wrong}),), required=(name,))))
    for names, wrong in _wrong_members(context, location, reader):
        if wrong == NEVER:
            continue
        if names == wrong == ANY:
            alternatives.append(Alternative(Members(min_properties=1)))
        else:
            alternatives.append(Alternative(Members(some=((names, wrong),), min_properties=1)))
    return alternatives


def without(name: str) -> Members:
    """The objects without a member of this name."""
    return Members(facets=(Facet({name: NEVER}),))


def _facet(context: Context, location: int, reader: Reader) -> Facet:
    patterns: list[tuple[str, NodeName]] = []
    for pattern in reader.mapping("patternProperties"):
        context.patterns.check(pattern, reader.where("patternProperties"))
        patterns.append((pattern, context.child(location, "patternProperties", pattern)))
    is_given = "additionalProperties" in reader.keywords
    return Facet(
        {name: context.child(location, "properties", name) for name in reader.mapping("properties")},
        tuple(patterns),
        context.child(location, "additionalProperties") if is_given else ANY,
        "given" if is_given or context.additional_properties == "open" else "missing",
    )


def _wrong_members(context: Context, location: int, reader: Reader) -> Iterator[tuple[NodeName, NodeName]]:
    """Undeclared members of which a single one makes an object invalid, as (node of the name, node of the value)."""

    def names(what: str, *conditions: dict[str, object]) -> NodeName:
        schema = {"allOf": [*conditions]}
        return context.nodes.node(context.locations.synthetic(location, what, schema))  # pyright: ignore[reportArgumentType]

    if "propertyNames" in reader.keywords:
        yield context.no_child(location, "propertyNames"), ANY
    for pattern in reader.mapping("patternProperties"):
        context.patterns.check(pattern, reader.where("patternProperties"))
        wrong = context.no_child(location, "patternProperties", pattern)
        yield names(f"names with {pattern}", {"pattern": pattern}), wrong
    if "additionalProperties" in reader.keywords:
        declared = list(reader.mapping("properties"))
        conditions: list[dict[str, object]] = [{"not": {"enum": declared}}] if declared else []
        conditions.extend({"not": {"pattern": pattern}} for pattern in reader.mapping("patternProperties"))
        wrong = context.no_child(location, "additionalProperties")
        yield (names("other names", *conditions) if conditions else ANY), wrong
