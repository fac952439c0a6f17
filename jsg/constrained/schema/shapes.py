"""Shapes: a JSON Schema when everything that combines schemas is worked out. A shape describes values of one type.

`normalise.py` makes shapes of a schema's JSON; $ref, allOf, anyOf, oneOf, not, if/then/else and lists of types are then
gone. `emit.py` makes a grammar of them. A node is a list of shapes under a name, so schemas may be recursive. A value
is valid for a node where it is valid for any of its shapes, and no value is valid for a node without shapes.

The grammar enforces everything that stands in a shape. What could not be enforced was refused before.
"""

import dataclasses
from collections.abc import Mapping
from decimal import Decimal

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
NodeName = str
ANY = "any"
"""Name of the node that every value is valid for; it is always there."""
NEVER = "never"
"""Name of the node that no value is valid for; it is always there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Const:
    """One value, of any type. `text` is its canonical JSON: no spaces, keys as in the schema."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Boolean:
    """true or false."""


@dataclasses.dataclass(frozen=True, slots=True)
class Null:
    """null."""


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A number.

    Attributes:
        is_integer: Without a fraction.
        min, max: Bounds, inclusive unless the flag beside them says otherwise; None for none.
        multiple_of: Its value is a multiple of each.
        not_multiple_of: Its value is a multiple of none of them; 1 among them says that it is no integer.
        excluded: Values that it is not.
    """

    is_integer: bool = False
    min: Decimal | None = None
    max: Decimal | None = None
    is_min_exclusive: bool = False
    is_max_exclusive: bool = False
    multiple_of: tuple[Decimal, ...] = ()
    not_multiple_of: tuple[Decimal, ...] = ()
    excluded: frozenset[Decimal] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class String:
    """A string; lengths in characters (code points).

    Attributes:
        patterns: ECMA-262 patterns, each of which is found somewhere in it.
        not_patterns: Patterns that are found nowhere in it.
        formats: Names of formats, each of which it has. Only formats that are enforced.
        excluded: Strings that it is not.
    """

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    not_patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """An array.

    Attributes:
        prefix: Nodes of the first items.
        items: Node of the others.
        some: (node, number): one of the items from this number on is valid for the node. A grammar is made of an array
            with at most one, after the prefix, whose node says all that holds for the item.
    """

    prefix: tuple[NodeName, ...] = ()
    items: NodeName = ANY
    min_items: int = 0
    max_items: int | None = None
    some: tuple[tuple[NodeName, int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class NamePattern:
    """Members of an object whose names match these patterns and not those.

    Attributes:
        matches: ECMA-262 patterns, each found somewhere in the name; at least one.
        excludes: Patterns found nowhere in it.
        node: Node of their values.
    """

    matches: tuple[str, ...]
    excludes: tuple[str, ...]
    node: NodeName


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    """An object.

    Attributes:
        properties: Declared name → node of its value, in the order of the schema. The node is all that holds for the
            value: patterns that match the name and additionalProperties are worked in.
        required: Names that must be there, all of them in `properties`.
        patterns: For names that are not declared; no name belongs to two of them.
        additional: Node of members that are not declared and whose names match none of `additional_excludes`.
        additional_excludes: All patterns that keep a name from being additional.
        names: String shapes, each of which all names outside `properties` are valid for, as alternatives: a name is
            valid where any of them takes it; None where every name is.
        some: (name, node) for members that must be there, each one of its own, outside `properties`. The name's shape
            and the node are all that holds for that member: patterns, `names` and what is declared are worked in.
    """

    properties: Mapping[str, NodeName] = dataclasses.field(default_factory=dict)
    required: frozenset[str] = frozenset()
    patterns: tuple[NamePattern, ...] = ()
    additional: NodeName = ANY
    additional_excludes: tuple[str, ...] = ()
    names: tuple[String, ...] | None = None
    some: tuple[tuple[String, NodeName], ...] = ()
    min_properties: int = 0
    max_properties: int | None = None


Shape = Const | Boolean | Null | Number | String | Array | Object
EVERY_SHAPE: tuple[Shape, ...] = (Null(), Boolean(), Number(), String(), Array(), Object())
"""Of the node `ANY`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A whole schema.

    Attributes:
        root: Name of the node that the value must be valid for.
        nodes: Every node by its name.
        annotations: What stood in the schema and is not enforced because the standard calls it an annotation: an
            unknown format, with its JSON pointer. For people.
    """

    root: NodeName
    nodes: Mapping[NodeName, tuple[Shape, ...]]
    annotations: tuple[str, ...] = ()
