"""Reads one schema's keywords about arrays and objects.

The `…_says` functions give the values that all of the keywords allow. The `…_denies` functions give the values that at
least one of them forbids. They take the document's context, and the place and keywords of the schema.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jsg.constrained.schema.drafts import Draft, Facet, Members, items_of
from jsg.constrained.schema.keywords import REFERENCES, Reader
from jsg.constrained.schema.locations import Locations
from jsg.constrained.schema.nodes import Nodes
from jsg.constrained.schema.patterns import Patterns
from jsg.constrained.schema.shapes import ANY, NEVER, Array, NodeName
from jsg.errors import GrammarError

DEPENDENTS = ("dependentRequired", "dependencies")
MAX_OPTIONAL_DEPENDENTS = 5
"""Most optional names that require other names. Each doubles the ways to read an object, and a machine follows at most
32 ways at once."""


class Context(NamedTuple):
    """What reading a schema needs of the document around it."""

    locations: Locations
    nodes: Nodes
    patterns: Patterns

    def child(self, place: int, *path: str | int) -> NodeName:
        """The node of the values that are valid for a schema inside another."""
        return self.nodes.node(self.locations.child(place, *path))

    def no_child(self, place: int, *path: str | int) -> NodeName:
        """The node of the values that are not valid for a schema inside another."""
        return self.nodes.node(-self.locations.child(place, *path))

    def always(self, place: int, reader: Reader) -> Iterator[int]:
        """The schemas that hold for every valid value of a schema: those of its references and of its allOf."""
        for keyword in REFERENCES:
            if keyword in reader.keywords:
                yield self.locations.reference(place, keyword)
        if "allOf" in reader.keywords:
            yield from (self.locations.child(place, "allOf", i) for i in range(reader.schemas("allOf")))

    def pointer(self, literal: int) -> str:
        """The JSON pointer of the schema that a literal names."""
        return self.locations.places[abs(literal)].pointer


def array_says(context: Context, place: int, reader: Reader) -> Array | None:
    """The arrays that all keywords allow; None where they allow no array."""
    prefix, rest = _item_paths(reader)
    return items_of(
        Array(
            prefix=tuple(context.child(place, *path) for path in prefix),
            items=context.child(place, *rest) if rest else ANY,
            min_items=reader.count("minItems") or 0,
            max_items=reader.count("maxItems"),
        )
    )


def array_denies(context: Context, place: int, reader: Reader) -> list[Draft]:
    """The arrays that at least one keyword forbids, as alternatives."""
    drafts: list[Draft] = []
    least, most = reader.count("minItems"), reader.count("maxItems")
    if least:
        drafts.append(Draft(Array(max_items=least - 1)))
    if most is not None:
        drafts.append(Draft(Array(min_items=most + 1)))
    prefix, rest = _item_paths(reader)
    for i, path in enumerate(prefix):
        drafts.append(Draft(Array(prefix=(ANY,) * i + (context.no_child(place, *path),), min_items=i + 1)))
    if rest:
        wrong = context.no_child(place, *rest)
        if wrong == ANY:
            drafts.append(Draft(Array(min_items=len(prefix) + 1)))
        elif wrong != NEVER:
            drafts.append(Draft(Array(some=((wrong, len(prefix)),))))
    return drafts


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


def object_says(context: Context, place: int, reader: Reader) -> Members | None:
    """The objects that all keywords allow, except those about dependents; None where they allow no object."""
    facets: tuple[Facet, ...] = ()
    if not {"properties", "patternProperties", "additionalProperties"}.isdisjoint(reader.keywords):
        facets = (_facet(context, place, reader),)
    names: tuple[NodeName, ...] = ()
    if "propertyNames" in reader.keywords:
        names = (context.child(place, "propertyNames"),)
    required = reader.names("required")
    _check_dependents(context, place)
    least, most = reader.count("minProperties") or 0, reader.count("maxProperties")
    if most is not None and max(least, len(required)) > most:
        return None
    return Members(facets, required, names, (), least, most)


def _check_dependents(context: Context, place: int) -> None:
    """Counts the optional names that require others, also those of references and of `allOf`."""
    stack, seen = [place], set[int]()
    required: set[str] = set()
    needed: list[tuple[str, str, tuple[str, ...]]] = []
    while stack:
        if (current := stack.pop()) in seen:
            continue
        seen.add(current)
        reader = Reader(context.locations.places[current], context.nodes.keywords(current))
        required.update(reader.names("required"))
        for keyword in DEPENDENTS:
            needed.extend((keyword, name, names) for name, names in reader.names_by_name(keyword).items())
        stack.extend(context.always(current, reader))
    counted = [each for each in needed if each[1] not in required and not required.issuperset(each[2])]
    num_names = len({name for _, name, _ in counted})
    if num_names > MAX_OPTIONAL_DEPENDENTS:
        keywords = " and ".join(dict.fromkeys(keyword for keyword, _, _ in counted))
        raise GrammarError(
            f"{keywords} at {context.pointer(place)} can be enforced for at most {MAX_OPTIONAL_DEPENDENTS} optional "
            f"names, but there are {num_names}; require some of them or leave some out"
        )


def object_denies(context: Context, place: int, reader: Reader) -> list[Draft]:
    """The objects that at least one keyword forbids, except those about dependents, as alternatives."""
    drafts: list[Draft] = []
    least, most = reader.count("minProperties"), reader.count("maxProperties")
    if least:
        drafts.append(Draft(Members(max_properties=least - 1)))
    if most is not None:
        drafts.append(Draft(Members(min_properties=most + 1)))
    drafts.extend(Draft(without(name)) for name in reader.names("required"))
    for name in reader.mapping("properties"):
        wrong = context.no_child(place, "properties", name)
        if wrong != NEVER:
            drafts.append(Draft(Members(facets=(Facet({name: wrong}),), required=(name,))))
    for names, wrong in _wrong_members(context, place, reader):
        if wrong == NEVER:
            continue
        if names == wrong == ANY:
            drafts.append(Draft(Members(min_properties=1)))
        else:
            drafts.append(Draft(Members(some=((names, wrong),), min_properties=1)))
    return drafts


def without(name: str) -> Members:
    """The objects without a member of this name."""
    return Members(facets=(Facet({name: NEVER}),))


def _facet(context: Context, place: int, reader: Reader) -> Facet:
    patterns: list[tuple[str, NodeName]] = []
    for pattern in reader.mapping("patternProperties"):
        context.patterns.check(pattern, reader.where("patternProperties"))
        patterns.append((pattern, context.child(place, "patternProperties", pattern)))
    is_open = "additionalProperties" not in reader.keywords
    return Facet(
        {name: context.child(place, "properties", name) for name in reader.mapping("properties")},
        tuple(patterns),
        ANY if is_open else context.child(place, "additionalProperties"),
    )


def _wrong_members(context: Context, place: int, reader: Reader) -> Iterator[tuple[NodeName, NodeName]]:
    """Undeclared members of which a single one makes an object invalid, as (node of the name, node of the value)."""

    def names(what: str, *conditions: dict[str, object]) -> NodeName:
        schema = {"allOf": [*conditions]}
        return context.nodes.node(context.locations.synthetic(place, what, schema))  # pyright: ignore[reportArgumentType]

    if "propertyNames" in reader.keywords:
        yield context.no_child(place, "propertyNames"), ANY
    for pattern in reader.mapping("patternProperties"):
        context.patterns.check(pattern, reader.where("patternProperties"))
        wrong = context.no_child(place, "patternProperties", pattern)
        yield names(f"names with {pattern}", {"pattern": pattern}), wrong
    if "additionalProperties" in reader.keywords:
        declared = list(reader.mapping("properties"))
        conditions: list[dict[str, object]] = [{"not": {"enum": declared}}] if declared else []
        conditions.extend({"not": {"pattern": pattern}} for pattern in reader.mapping("patternProperties"))
        wrong = context.no_child(place, "additionalProperties")
        yield (names("other names", *conditions) if conditions else ANY), wrong
