"""Decides whether a value is valid for a node, and whether a node clearly has no valid value."""

from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction

from jsg.constrained.schema.alternatives import Alternative, AlternativeShape, Members, is_multiple
from jsg.constrained.schema.nodes import Nodes
from jsg.constrained.schema.patterns import Patterns
from jsg.constrained.schema.shapes import ANY, NEVER, Array, Json, NodeName, Number, String
from jsg.constrained.schema.values import decimal_of, key_of, type_of
from jsg.errors import GrammarError

MAX_DEPTH = 8
"""How many levels of values inside values are searched for the proof that a node has no valid value."""

Alternatives = Callable[[NodeName, str], Sequence[Alternative]]
"""Gives the alternatives of a node for one type."""

Every = Callable[[NodeName], Iterable[Sequence[Alternative]]]
"""Gives the alternatives of a node, for one type after another."""


class UnderWayError(Exception):
    """Computing the alternatives of a schema asked for these same alternatives, of which nothing is known yet."""


class Judge:
    """Answers questions about the nodes of one document."""

    def __init__(
        self, every: Every, alternatives: Alternatives, nodes: Nodes, patterns: Patterns, values: dict[str, Json]
    ):
        self._every = every
        self._alternatives = alternatives
        self._nodes = nodes
        self._patterns = patterns
        self._values = values
        self._never: dict[NodeName, bool] = {ANY: False, NEVER: True}
        self._path: set[NodeName] = set()
        self._tried: dict[NodeName, int] = {}  # how many levels were searched without an answer
        self._strings: dict[String, bool] = {}

    # -- whether anything is valid -------------------------------------------------------------------------------------

    def is_never(self, node: NodeName) -> bool:
        """Whether no value is valid for the node; False where the search could not prove that."""
        depth_left = MAX_DEPTH - len(self._path)
        if node in self._never:
            return self._never[node]
        if node in self._path or depth_left <= self._tried.get(node, 0):
            return False
        self._path.add(node)
        try:
            result = all(self.is_empty(alternative) for formula in self._every(node) for alternative in formula)
        except UnderWayError:
            return False
        finally:
            self._path.discard(node)
        if result:
            self._never[node] = True
        else:
            self._tried[node] = depth_left
        return result

    def is_empty(self, alternative: Alternative) -> bool:
        """Whether no value is valid for the alternative; False where the search could not prove that."""
        if alternative.values is not None:
            if alternative.is_listed or alternative.refusals:
                return False
            return not any(self.fits(self._values[key], alternative.shape) for key in alternative.values)
        match alternative.shape:
            case String() as shape:
                return self._is_no_string(shape)
            case Array() as shape:
                return self._is_no_array(shape)
            case Members() as shape:
                return self._is_no_object(shape)
        return False

    def _is_no_string(self, shape: String) -> bool:
        if len(shape.patterns) + len(shape.not_patterns) + (shape.min_length > 0 or shape.max_length is not None) < 2:
            return False
        if shape not in self._strings:
            self._strings[shape] = self._finds_no_string(shape)
        return self._strings[shape]

    def _finds_no_string(self, shape: String) -> bool:
        automaton = self._patterns.everything
        for is_found, patterns in ((True, shape.patterns), (False, shape.not_patterns)):
            for pattern in patterns:
                narrowed = self._patterns.narrowed(automaton, pattern, is_found)
                if narrowed is None:
                    return True
                automaton = narrowed
        lengths = automaton.lengths()
        if lengths is None:
            return True
        least, most = lengths
        is_too_long = shape.max_length is not None and least > shape.max_length
        return is_too_long or (most is not None and most < shape.min_length)

    def _is_no_array(self, shape: Array) -> bool:
        for i in range(min(shape.min_items, len(shape.prefix))):
            if self.is_never(shape.prefix[i]):
                return True
        if shape.min_items > len(shape.prefix) and self.is_never(shape.items):
            return True
        return any(self.is_never(node) for node, _ in shape.some)

    def _is_no_object(self, shape: Members) -> bool:
        if any(self.is_never(self.member(shape, name)) for name in shape.required):
            return True
        if any(self.is_never(part) for some in shape.some for part in some):
            return True
        if shape.min_properties <= len(shape.required) or not self.is_closed(shape):
            return False
        possible = sum(not self.is_never(self.member(shape, name)) for name in self.declared(shape))
        return possible < shape.min_properties

    # -- members of objects --------------------------------------------------------------------------------------------

    def declared(self, shape: Members) -> list[str]:
        """The names in the `properties` of all facets, then those in `required`, without duplicates."""
        names: dict[str, None] = {}
        for facet in shape.facets:
            names.update(dict.fromkeys(facet.properties))
        names.update(dict.fromkeys(shape.required))
        return list(names)

    def member(self, shape: Members, name: str) -> NodeName:
        """The node of the value of the member with that name; NEVER where its name is not allowed."""
        nodes: list[NodeName] = []
        for facet in shape.facets:
            found = [node for pattern, node in facet.patterns if self._patterns.is_found(pattern, name)]
            if name in facet.properties:
                found.append(facet.properties[name])
            nodes.extend(found or (facet.additional,))
        if not all(self.holds(name, node) for node in shape.names):
            return NEVER
        return self._nodes.conjoin(*nodes)

    def is_closed(self, shape: Members) -> bool:
        """Whether only declared members are allowed."""
        return any(facet.additional == NEVER and not facet.patterns for facet in shape.facets)

    def strings(self, alternative: Alternative) -> list[str | String]:
        """The strings that are valid for an alternative, as single strings or as one shape.

        Raises:
            GrammarError: The alternative cannot be enforced.
        """
        if alternative.values is not None:
            return [value for value in self.listed(alternative) if isinstance(value, str)]
        if self.is_empty(alternative):
            return []
        if alternative.refusals:
            raise GrammarError(alternative.refusals[0])
        assert isinstance(alternative.shape, String)
        return [alternative.shape]

    def listed(self, alternative: Alternative) -> list[Json]:
        """The values of an alternative that lists its values.

        Raises:
            GrammarError: The alternative cannot be enforced.
        """
        values = [self._values[key] for key in alternative.values or ()]
        if not alternative.is_listed:
            values = [value for value in values if self.fits(value, alternative.shape)]
        if values and alternative.refusals:
            raise GrammarError(alternative.refusals[0])
        return values

    # -- whether a value is valid --------------------------------------------------------------------------------------

    def holds(self, value: Json, node: NodeName) -> bool:
        """Whether the value is valid for the node.

        Raises:
            GrammarError: Something that decides it cannot be enforced.
        """
        if node == ANY:
            return True
        return any(self.takes(value, alternative) for alternative in self._alternatives(node, type_of(value)))

    def takes(self, value: Json, alternative: Alternative) -> bool:
        """Whether the value, which has the alternative's type, is valid for the alternative."""
        if alternative.values is not None and key_of(value, "a value of enum or const") not in alternative.values:
            return False
        if not self.fits(value, alternative.shape):
            return False
        if alternative.refusals:
            raise GrammarError(alternative.refusals[0])
        return True

    def fits(self, value: Json, shape: AlternativeShape) -> bool:
        """Whether the value, which has the shape's type, is of the shape."""
        match shape:
            case Number():
                assert isinstance(value, int | float | Decimal)
                return fits_number(decimal_of(value, "a value of enum or const"), shape)
            case String():
                assert isinstance(value, str)
                return self.fits_string(value, shape)
            case Array():
                assert isinstance(value, list)
                return self._fits_array(value, shape)
            case Members():
                assert isinstance(value, dict)
                return self._fits_object(value, shape)
        return True

    def fits_string(self, value: str, shape: String) -> bool:
        """Whether the string is of the shape."""
        is_long_enough = shape.min_length <= len(value)
        if not is_long_enough or (shape.max_length is not None and len(value) > shape.max_length):
            return False
        if value in shape.excluded:
            return False
        if not all(self._patterns.is_found(pattern, value) for pattern in shape.patterns):
            return False
        if any(self._patterns.is_found(pattern, value) for pattern in shape.not_patterns):
            return False
        return all(self._patterns.has_format(name, value) for name in shape.formats)

    def _fits_array(self, value: list[Json], shape: Array) -> bool:
        if len(value) < shape.min_items or (shape.max_items is not None and len(value) > shape.max_items):
            return False
        if shape.is_unique and len({key_of(item, "an item") for item in value}) < len(value):
            return False
        nodes = [*shape.prefix[: len(value)], *[shape.items] * (len(value) - len(shape.prefix))]
        if not all(self.holds(item, node) for item, node in zip(value, nodes, strict=True)):
            return False
        return all(any(self.holds(item, node) for item in value[start:]) for node, start in shape.some)

    def _fits_object(self, value: dict[str, Json], shape: Members) -> bool:
        if len(value) < shape.min_properties or not all(name in value for name in shape.required):
            return False
        if shape.max_properties is not None and len(value) > shape.max_properties:
            return False
        if not all(self.holds(item, self.member(shape, name)) for name, item in value.items()):
            return False
        return all(
            any(self.holds(name, names) and self.holds(item, node) for name, item in value.items())
            for names, node in shape.some
        )


def fits_number(number: Decimal, shape: Number) -> bool:
    """Whether the number is of the shape."""
    if shape.min is not None and (number < shape.min or (shape.is_min_exclusive and number == shape.min)):
        return False
    if shape.max is not None and (number > shape.max or (shape.is_max_exclusive and number == shape.max)):
        return False
    if shape.is_integer and Fraction(number).denominator != 1:
        return False
    if number in shape.excluded or not all(is_multiple(number, step) for step in shape.multiple_of):
        return False
    return not any(is_multiple(number, step) for step in shape.not_multiple_of)
