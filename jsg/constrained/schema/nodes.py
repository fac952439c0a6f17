"""Nodes and their names.

A node is a set of literals. A literal is a schema, or the negation of a schema. A value is valid for the node where all
of its literals hold.

Equal sets have one name, and a document has finitely many sets. So the work on allOf, on a $ref beside other keywords
and on recursive schemas ends.
"""

from jsg.constrained.schema.keywords import HELPERS, enforced
from jsg.constrained.schema.locations import EVERYTHING, Locations
from jsg.constrained.schema.shapes import ANY, NEVER, Json, NodeName
from jsg.errors import GrammarError

Literal = int
"""The number of a schema's location; negative where a value must not be valid for the schema."""

MAX_SETS = 50_000


class TooMuchError(GrammarError):
    """A schema is too much to work out. `normalise` adds the node at which that was found."""


class Nodes:
    """The nodes of one document that have been asked for so far."""

    def __init__(self, locations: Locations):
        self._locations = locations
        self._names: dict[tuple[Literal, ...], NodeName] = {(): ANY, (-EVERYTHING,): NEVER}
        self._sets: dict[NodeName, tuple[Literal, ...]] = {ANY: (), NEVER: (-EVERYTHING,)}
        self._simple: dict[Literal, Literal] = {}
        self._keywords: dict[int, dict[str, Json]] = {}
        self._joined: dict[tuple[NodeName, NodeName], NodeName] = {}

    def keywords(self, location: int) -> dict[str, Json]:
        """The keywords of the schema that constrain values."""
        found = self._keywords.get(location)
        if found is None:
            found = self._keywords[location] = dict(enforced(self._locations.all[location]))
        return found

    def literals(self, name: NodeName) -> tuple[Literal, ...]:
        """The literals of the node, which all hold for each of its values."""
        return self._sets[name]

    def node(self, *literals: Literal) -> NodeName:
        """The node of the values for which all of these literals hold."""
        simple = {self.simple(literal) for literal in literals} - {EVERYTHING}
        if -EVERYTHING in simple or any(-literal in simple for literal in simple):
            return NEVER
        return self._name(tuple(sorted(simple, key=lambda literal: (abs(literal), literal))))

    def conjoin(self, *names: NodeName) -> NodeName:
        """The node of the values that are valid for all of these nodes."""
        result = ANY
        for name in names:
            if name in (ANY, result):
                continue
            if result == ANY:
                result = name
                continue
            pair = (result, name)
            if pair not in self._joined:
                self._joined[pair] = self.node(*self._sets[result], *self._sets[name])
            result = self._joined[pair]
        return result

    def simple(self, literal: Literal) -> Literal:
        """The simplest literal with the same meaning: references are followed, and double negations cancel.

        Raises:
            GrammarError: A schema consists only of a reference to itself.
        """
        path: dict[Literal, None] = {}
        current = literal
        while (known := self._simple.get(current)) is None:
            if current in path or -current in path:
                raise self.no_progress(abs(current))
            path[current] = None
            following = self._following(current)
            if following is None:
                known = current
                break
            current = following
        self._simple.update(dict.fromkeys(path, known))
        return known

    def no_progress(self, location: int) -> GrammarError:
        """The error that a schema refers to itself for the same value."""
        pointer = self._locations.all[location].pointer
        return GrammarError(
            f"the schema at {pointer} refers to itself by $ref without a property or an item between, so that it says "
            "nothing; remove that reference"
        )

    def _following(self, literal: Literal) -> Literal | None:
        """A simpler literal with the same meaning; None where there is none."""
        location = abs(literal)
        sign = 1 if literal > 0 else -1
        if location == EVERYTHING:
            return None
        schema = self._locations.all[location].schema
        if isinstance(schema, bool):
            return sign * EVERYTHING if schema else -sign * EVERYTHING
        keywords = self.keywords(location)
        match list(keywords):
            case []:
                return sign * EVERYTHING
            case [keyword] if keyword in HELPERS:
                return sign * EVERYTHING
            case ["$ref" | "$dynamicRef" | "$recursiveRef" as keyword]:
                return sign * self._locations.reference(location, keyword)
            case ["not"]:
                return -sign * self._locations.child(location, "not")
            case ["allOf" | "anyOf" | "oneOf" as keyword]:
                members = keywords[keyword]
                if isinstance(members, list) and len(members) == 1:
                    return sign * self._locations.child(location, keyword, 0)
        return None

    def _name(self, literals: tuple[Literal, ...]) -> NodeName:
        name = self._names.get(literals)
        if name is None:
            if len(self._names) > MAX_SETS:
                raise TooMuchError(
                    f"a schema may have at most {MAX_SETS} different parts after allOf, anyOf and the like are worked "
                    "out, but this one has more; simplify it"
                )
            locations = self._locations.all
            pointers = [("" if literal > 0 else "not ") + locations[abs(literal)].pointer for literal in literals]
            name = " and ".join(pointers[:3])
            if len(pointers) > 3 or name in self._sets:
                name = f"{name} ({len(self._names)})"
            self._names[literals] = name
            self._sets[name] = literals
        return name
