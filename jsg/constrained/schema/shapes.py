"""Shapes: the form of a JSON Schema that has no combining keywords. A shape describes values of one type.

`normalise.py` makes shapes of a schema's JSON. $ref, allOf, anyOf, oneOf, not, if/then/else and lists of types are
resolved there. `emit.py` makes a grammar of the shapes. A node is a list of shapes under a name, so schemas may be
recursive. A value is valid for a node if it is valid for any of its shapes; no value is valid for a node without
shapes.

The grammar enforces everything that a shape says. A schema that cannot be enforced is refused before it becomes a
shape.
"""

import dataclasses
from collections.abc import Mapping
from decimal import Decimal

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
NodeName = str
ANY = "any"
"""The name of the node for which every value is valid. Every document has it."""
NEVER = "never"
"""The name of the node for which no value is valid. Every document has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Const:
    """One value of any type. `text` is its canonical JSON, without spaces and with the keys in the schema's order."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Boolean:
    """`true` or `false`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Null:
    """`null`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A number.

    Attributes:
        is_integer: Whether it must be an integer.
        min, max: Its bounds; None for no bound. A bound is inclusive unless its flag says otherwise.
        multiple_of: It is a multiple of each of these.
        not_multiple_of: It is a multiple of none of these. If 1 is among them, it is no integer.
        excluded: Numbers that are not allowed.
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
    """A string. Lengths count characters (code points).

    Attributes:
        patterns: ECMA-262 patterns, each of which is found somewhere in the string.
        not_patterns: Patterns that are found nowhere in the string.
        formats: Names of formats, each of which the string has. All of them are enforced formats.
        excluded: Strings that are not allowed.
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
        prefix: The nodes of the first items.
        items: The node of the other items.
        is_unique: Whether no two items are equal.
        values: The canonical JSON texts of the values of `items`, each of which may come once; None where they may be
            repeated, or are not known yet. A unique array that becomes a grammar has them, or at most one of `items`.
        some: (node, number): an item from this number on is valid for the node. An array that becomes a grammar has at
            most one such pair. Its number is the length of the prefix, and its node also says what `items` says.
    """

    prefix: tuple[NodeName, ...] = ()
    items: NodeName = ANY
    min_items: int = 0
    max_items: int | None = None
    some: tuple[tuple[NodeName, int], ...] = ()
    is_unique: bool = False
    values: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NamePattern:
    """The members of an object whose names match some patterns and do not match others.

    Attributes:
        matches: ECMA-262 patterns, at least one, each of which is found somewhere in the name.
        excludes: Patterns that are found nowhere in the name.
        node: The node of the members' values.
    """

    matches: tuple[str, ...]
    excludes: tuple[str, ...]
    node: NodeName


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    """An object.

    Attributes:
        properties: The node of the value for each declared name, in the order of the schema. The node says everything
            that holds for the value, including what patternProperties and additionalProperties say about it.
        required: The names of required members. All of them are in `properties`.
        patterns: The undeclared members that match a pattern. No name belongs to two of these entries.
        additional: The node of the undeclared members whose names match none of `additional_excludes`.
        additional_excludes: The patterns that a name must not match to be additional.
        names: String shapes as alternatives. Each name outside `properties` must be valid for at least one of them;
            None where every name is allowed.
        some: (name, node) for each required member outside `properties`. Each is a separate member. The name's shape
            and the node say everything that holds for the member, including what `patterns` and `names` say.
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
"""The shapes of the node `ANY`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A whole schema.

    Attributes:
        root: The name of the node for which the whole value must be valid.
        nodes: Every node by its name.
        annotations: What is not enforced because the standard calls it an annotation, such as an unknown format. Each
            is a line for people to read, with a JSON pointer.
    """

    root: NodeName
    nodes: Mapping[NodeName, tuple[Shape, ...]]
    annotations: tuple[str, ...] = ()
