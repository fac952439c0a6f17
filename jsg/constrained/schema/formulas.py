"""Formulas: what a schema says about the values of one type, as a list of alternatives.

Formulas resolve the keywords that combine schemas. A conjunction is the product of the lists of its parts, a
disjunction is their concatenation, and a negation moves inward to the keywords. Each type has its own formulas, because
a keyword about one type holds for every value of the other types and costs nothing there.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jsg.constrained.schema import unevaluated
from jsg.constrained.schema.alternatives import FREE, Alternative, Meeting, Members, string_of
from jsg.constrained.schema.assertions import number_denies, number_says, string_denies, string_says
from jsg.constrained.schema.containers import (
    DEPENDENTS,
    Context,
    array_denies,
    array_says,
    object_denies,
    object_says,
    without,
)
from jsg.constrained.schema.judge import Judge, UnderWayError
from jsg.constrained.schema.keywords import Reader
from jsg.constrained.schema.locations import EVERYTHING
from jsg.constrained.schema.nodes import Literal, TooMuchError
from jsg.constrained.schema.shapes import Json, NodeName, Number, String
from jsg.constrained.schema.values import TYPES, decimal_of, described, key_of, type_of
from jsg.errors import GrammarError

MAX_ALTERNATIVES = 512
MANY_ALTERNATIVES = 8
"""A formula with more alternatives than this is reduced: alternatives that another one covers are left out."""

MAX_REDUCED = 64
"""The alternatives of a formula with more of them than this are not compared with one another."""

MAX_MEETINGS = 100_000
MAX_DEPTH = 100

Formula = Sequence[Alternative]

_FREE: Mapping[str, Formula] = {kind: (Alternative(shape),) for kind, shape in FREE.items()}


class Formulas:
    """The formulas of one document. Each is computed once.

    Attributes:
        values: Values of enum and const by their keys.
        judge: Decides questions about nodes, for which it asks for formulas.
    """

    def __init__(self, context: Context, choices: int):
        self.context = context
        self.values: dict[str, Json] = {}
        self.judge = Judge(self.of_kinds, self.of_node, context.nodes, context.patterns, self.values)
        self._choices = choices
        self._meeting = Meeting(context.nodes.conjoin)
        self._free = _FREE
        self._nodes: dict[tuple[NodeName, str], Formula] = {}
        self._formulas: dict[tuple[Literal, str], Formula] = {}
        self._under_way: dict[tuple[Literal, str], int] = {}
        self._types: dict[int, frozenset[str] | None] = {}
        self._kinds: dict[NodeName, Sequence[str]] = {}
        self._listed: dict[int, dict[str, tuple[str, ...]]] = {}
        self._num_meetings = 0
        self._level = 0

    def of_kinds(self, node: NodeName) -> Iterator[Formula]:
        """The alternatives of the values that are valid for a node, for one type after another."""
        kinds = self._kinds.get(node)
        if kinds is None:
            literals = [literal for literal in self.context.nodes.literals(node) if literal > 1]
            kinds = [kind for kind in TYPES if not any(self._is_other_type(literal, kind) for literal in literals)]
            self._kinds[node] = kinds
        return (self.of_node(node, kind) for kind in kinds)

    def of_node(self, node: NodeName, kind: str) -> Formula:
        """The alternatives of the values of one type that are valid for a node."""
        key = (node, kind)
        if key not in self._nodes:
            self._level += 1  # a schema that is met again from here is applied to another value, which is progress
            try:
                literals = self.context.nodes.literals(node)
                formula = self.of(literals[0], kind) if len(literals) == 1 else None
                if formula is None or len(formula) > MANY_ALTERNATIVES:
                    formula = self._all_of((self.of(literal, kind) for literal in literals), kind, node)
                self._nodes[key] = formula
            finally:
                self._level -= 1
        return self._nodes[key]

    def of(self, literal: Literal, kind: str) -> Formula:
        """The alternatives of the values of one type for which a literal holds.

        Raises:
            GrammarError: A keyword is wrong, or cannot be enforced.
            UnderWayError: Computing this formula asked for this same formula, applied to another value.
        """
        key = (self.context.nodes.simple(literal), kind)
        if key in self._formulas:
            return self._formulas[key]
        if key in self._under_way:
            if self._under_way[key] == self._level:
                raise self.context.nodes.no_progress(abs(literal))
            raise UnderWayError
        if len(self._under_way) > MAX_DEPTH:
            raise GrammarError(
                f"schemas may be combined by $ref, allOf, anyOf, oneOf and not {MAX_DEPTH} levels deep, but "
                f"{self.context.pointer(literal)} is deeper; simplify it"
            )
        if key[0] > 1 and self._is_other_type(*key):
            self._formulas[key] = ()
            return ()
        if self.context.nodes.keywords(abs(key[0])).keys() == {"type"}:
            formula = self._formulas[key] = self._type(self._reader(abs(key[0])), kind, 1 if key[0] > 0 else -1)
            return formula
        self._under_way[key] = self._level
        try:
            parts = self._parts(*key)
            if key[0] > 0:
                formula = self._all_of(parts, kind, self.context.pointer(key[0]))
            else:
                formula = self._any_of(itertools.chain.from_iterable(parts))
        finally:
            del self._under_way[key]
        self._formulas[key] = formula
        return formula

    def reduced(self, alternatives: Sequence[Alternative]) -> Formula:
        """The alternatives without those that another one covers."""
        kept = list(dict.fromkeys(alternatives))
        if not 1 < len(kept) <= MAX_REDUCED:
            return tuple(kept)
        self._spend(len(kept) ** 2 // 2)
        for one in tuple(kept):
            if any(other is not one and self._covers(other, one) for other in kept):
                kept.remove(one)
        return tuple(kept)

    def _covers(self, outer: Alternative, inner: Alternative) -> bool:
        match outer.shape, inner.shape:
            case Members() as one, Members() as other if not one.shows_all_of(other):
                return False
        return self._meeting.meet(inner, outer) == inner

    # -- connectives ---------------------------------------------------------------------------------------------------

    def _all_of(self, parts: Iterable[Formula], kind: str, where: NodeName) -> Formula:
        choices: list[Formula] = []
        free = result = self._free[kind]
        for part in parts:
            if part is free:
                continue
            if result is free and len(part) == 1:
                result = part
            elif len(part) == 1:
                result = self._product(result, part, where)
            else:
                choices.append(part)
            if not result or not part:
                return ()
        for part in choices:
            result = self._product(result, part, where)
        return result

    def _product(self, left: Formula, right: Formula, where: NodeName) -> Formula:
        self._spend(len(left) * len(right))
        meetings = (self._meeting.meet(one, other) for one in left for other in right)
        result = self._any_of([alternative for alternative in meetings if alternative is not None])
        if len(result) > MANY_ALTERNATIVES:
            result = self.reduced([alternative for alternative in result if not self._is_empty(alternative)])
        if len(result) > MAX_ALTERNATIVES:
            raise GrammarError(
                f"a schema may have at most {MAX_ALTERNATIVES} alternatives after anyOf, oneOf, allOf and not are "
                f"worked out, but {where} has more; simplify it"
            )
        return result

    def _spend(self, meetings: int) -> None:
        self._num_meetings += meetings
        if self._num_meetings > MAX_MEETINGS:
            raise TooMuchError(
                f"anyOf, oneOf, allOf and not of the schema have too many combinations: more than {MAX_MEETINGS} pairs "
                "of alternatives would have to be compared; split the schema, or nest fewer unions within each other"
            )

    def _any_of(self, alternatives: Iterable[Alternative]) -> Formula:
        """The alternatives without duplicates, with all lists of values merged into one alternative."""
        found: dict[Alternative, None] = {}
        listed: dict[str, None] = {}
        first: Alternative | None = None
        for alternative in alternatives:
            if alternative.is_free:
                return (alternative,)
            if alternative.is_listed:
                first = first or alternative
                listed.update(dict.fromkeys(alternative.values or ()))
            else:
                found[alternative] = None
        if first is None:
            return tuple(found)
        return (dataclasses.replace(first, values=tuple(listed)), *found)

    def _is_empty(self, alternative: Alternative) -> bool:
        try:
            return self.judge.is_empty(alternative)
        except UnderWayError:
            return False

    def _is_disjoint(self, left: Formula, right: Formula) -> bool:
        self._spend(len(left) * len(right))
        meetings = (self._meeting.meet(one, other) for one in left for other in right)
        return all(alternative is None or self._is_empty(alternative) for alternative in meetings)

    # -- what makes a schema hold, or not hold -------------------------------------------------------------------------

    def _parts(self, literal: Literal, kind: str) -> Iterator[Formula]:
        """A formula for each keyword: what it allows or, where the literal is negative, what it forbids."""
        location, sign = abs(literal), 1 if literal > 0 else -1
        reader, where = self._reader(location), self.context.pointer(location)
        keywords = reader.keywords
        if "type" in keywords:
            yield self._type(reader, kind, sign)
        for keyword in ("const", "enum"):
            if keyword in keywords:
                keys = self._keys(location, keyword, reader).get(kind, ())
                yield self._listing(keys, kind) if sign > 0 else self._without_values(location, keys, kind)
        yield self._own(location, kind, sign, reader)
        for child in self.context.always(location, reader):
            yield self.of(sign * child, kind)
        if "not" in keywords:
            yield self.of(-sign * self._child(location, "not"), kind)
        for keyword in ("anyOf", "oneOf"):
            if keyword in keywords:
                children = self._each(location, keyword, reader)
                yield (
                    self._united(keyword, children, kind, reader)
                    if sign > 0
                    else (
                        self._not_one_of(children, kind, where)
                        if keyword == "oneOf"
                        else self._all_of((self.of(-child, kind) for child in children), kind, where)
                    )
                )
        if "then" in keywords or "else" in keywords:
            yield from self._if(location, kind, sign, keywords)
        if kind == "object":
            for name, child in self._dependents(location, reader):
                present = self._product((Alternative(Members(required=(name,))),), self.of(sign * child, kind), where)
                yield self._any_of((Alternative(without(name)), *present)) if sign > 0 else present
        keyword = {"array": "unevaluatedItems", "object": "unevaluatedProperties"}.get(kind, "")
        if keyword in keywords:
            refusal = f"{reader.where(keyword)} stands under `not`, where it is not supported; remove it"
            denied = Alternative(FREE[kind], refusals=(refusal,))
            yield (unevaluated.alternative(self.context, location, keyword) if sign > 0 else denied,)
        if kind == "array":
            yield from ((Alternative(FREE[kind], refusals=(reason,)),) for reason in reader.refusals())

    def _is_other_type(self, location: int, kind: str) -> bool:
        """Whether `type` of a schema excludes this kind of values, so that its other keywords do not matter."""
        if location not in self._types:
            self._types[location] = self._reader(location).types()
        types = self._types[location]
        return types is not None and kind not in types and not (kind == "number" and "integer" in types)

    def _type(self, reader: Reader, kind: str, sign: int) -> Formula:
        types = reader.types() or frozenset(TYPES)
        if kind == "number" and "integer" in types and kind not in types:
            return (Alternative(Number(is_integer=True) if sign > 0 else Number(not_multiple_of=(decimal_of(1, ""),))),)
        return self._free[kind] if (kind in types) == (sign > 0) else ()

    def _own(self, location: int, kind: str, sign: int, reader: Reader) -> Formula:
        """What the keywords about this one type of values allow; where `sign` is negative, what they forbid."""
        patterns, shape = self.context.patterns, FREE[kind]
        denied: Formula = ()
        match kind, sign:
            case "number", 1:
                shape = number_says(reader)
            case "number", _:
                denied = number_denies(reader)
            case "string", 1:
                shape = string_says(reader, patterns)
            case "string", _:
                denied = string_denies(reader, patterns)
            case "array", 1:
                shape = array_says(self.context, location, reader)
            case "array", _:
                denied = array_denies(self.context, location, reader)
            case "object", 1:
                shape = object_says(self.context, location, reader)
            case "object", _:
                denied = object_denies(self.context, location, reader)
            case _:
                pass
        if sign < 0:
            return denied
        return () if shape is None else self._free[kind] if shape == FREE[kind] else (Alternative(shape),)

    def _united(self, keyword: str, children: Sequence[int], kind: str, reader: Reader) -> Formula:
        """The values for which any of the schemas holds, or exactly one. The tag of a `discriminator` decides alone."""
        tagged = self._tagged(children, reader) if kind == "object" else None
        if tagged is not None:
            return self._any_of(itertools.chain(*tagged))
        if keyword == "oneOf":
            return self._one_of(children, kind)
        return self._any_of(itertools.chain(*(self.of(child, kind) for child in children)))

    def _tagged(self, children: Sequence[int], reader: Reader) -> list[Formula] | None:
        """The formulas of the schemas for objects with the tag, if no two of them allow the same tag; else None.

        Pydantic requires the tag though its schemas do not, where the tag has a default.
        """
        tag = reader.keywords.get("discriminator")
        name = tag.get("propertyName") if isinstance(tag, dict) else None
        if not isinstance(name, str):
            return None
        present = (Alternative(Members(required=(name,))),)
        found = [self._product(self.of(child, "object"), present, reader.location.pointer) for child in children]
        try:
            tags = [self._values_of_member(formula, name) for formula in found]
        except UnderWayError:
            return None
        known = [key for keys in tags for key in keys or ()]
        return found if None not in tags and len(set(known)) == len(known) else None

    def _values_of_member(self, formula: Formula, name: str) -> set[str] | None:
        """The keys of the values that a member has in objects; None where they are not listed."""
        keys: set[str] = set()
        for alternative in formula:
            if alternative.values is not None or not isinstance(alternative.shape, Members):
                return None
            node = self.judge.member(alternative.shape, name)
            for found in itertools.chain(*(self.of_node(node, kind) for kind in TYPES)):
                if found.values is None:
                    return None
                keys.update(found.values)
        return keys

    def _one_of(self, children: Sequence[int], kind: str) -> Formula:
        """The values for which exactly one of the schemas holds."""
        formulas = {child: formula for child in children if (formula := self.of(child, kind))}
        if len(children) > len(set(children)):  # a schema that is listed twice never holds exactly once
            formulas = {child: formula for child, formula in formulas.items() if children.count(child) == 1}
            others = [child for child in set(children) if children.count(child) > 1]
        else:
            others = []
        if not others and all(len(formula) == 1 and formula[0].is_listed for formula in formulas.values()):
            counts: dict[str, int] = {}
            for formula in formulas.values():
                for key in formula[0].values or ():
                    counts[key] = counts.get(key, 0) + 1
            return self._listing(tuple(key for key, count in counts.items() if count == 1), kind)
        result: list[Alternative] = []
        for child, formula in formulas.items():
            overlapping = [o for o in formulas if o != child and not self._is_disjoint(formula, formulas[o])]
            rivals = [self.of(-other, kind) for other in (*overlapping, *others)]
            result.extend(self._all_of((formula, *rivals), kind, self.context.pointer(child)))
        return self._any_of(result)

    def _if(self, location: int, kind: str, sign: int, keywords: Mapping[str, Json]) -> Iterator[Formula]:
        """`then` where `if` holds, and `else` where it does not. A missing branch counts as the schema `true`."""
        if "if" not in keywords or {"then", "else"}.isdisjoint(keywords):
            return
        condition = self._child(location, "if")
        if sign > 0 and "then" not in keywords:  # the same as `if` or `else`, and here `if` need not be denied
            yield self._any_of((*self.of(condition, kind), *self.of(self._child(location, "else"), kind)))
            return
        alternatives: list[Alternative] = []
        for test, word in ((condition, "then"), (-condition, "else")):
            branch = self._child(location, word) if word in keywords else EVERYTHING
            if held := self.of(sign * branch, kind):
                alternatives.extend(self._product(self.of(test, kind), held, self.context.pointer(location)))
        yield self._any_of(alternatives)

    def _not_one_of(self, children: Sequence[int], kind: str, where: str) -> Formula:
        """The values for which none of the schemas holds, or at least two of them hold."""
        none = self._all_of((self.of(-child, kind) for child in children), kind, where)
        pairs = (
            alternative
            for one, other in itertools.combinations(children, 2)
            for alternative in self._product(self.of(one, kind), self.of(other, kind), where)
            if not self._is_empty(alternative)
        )
        return self._any_of((*none, *pairs))

    def _without_values(self, location: int, keys: Sequence[str], kind: str) -> Formula:
        """All values of the type except these."""
        if not keys:
            return self._free[kind]
        values = [self.values[key] for key in keys]
        match kind:
            case "null":
                return ()
            case "boolean":
                return self._listing(tuple(key for key in ("true", "false") if key not in keys), kind)
            case "number":
                numbers = frozenset(decimal_of(value, "enum") for value in values)  # pyright: ignore[reportArgumentType]
                return (Alternative(Number(excluded=numbers)),)
            case "string":
                strings = frozenset(value for value in values if isinstance(value, str))
                shape = string_of(String(excluded=strings))
                return () if shape is None else (Alternative(shape),)
        nodes = (self.context.locations.synthetic(location, key, described(self.values[key])) for key in keys)
        return self._all_of((self.of(-node, kind) for node in nodes), kind, self.context.pointer(location))

    # -- parts of a schema ---------------------------------------------------------------------------------------------

    def _reader(self, location: int) -> Reader:
        return Reader(self.context.locations.all[location], self.context.nodes.keywords(location))

    def _child(self, location: int, *path: str | int) -> int:
        return self.context.locations.child(location, *path)

    def _each(self, location: int, keyword: str, reader: Reader) -> list[int]:
        simple = self.context.nodes.simple
        return [simple(self._child(location, keyword, i)) for i in range(reader.schemas(keyword))]

    def _dependents(self, location: int, reader: Reader) -> Iterator[tuple[str, int]]:
        """(name of a member, schema that holds for every object with this member)."""
        required = set(reader.names("required"))
        for keyword in DEPENDENTS:
            for name, names in reader.names_by_name(keyword).items():
                if not required.issuperset(names):
                    what = f"{keyword} of {name!r}"
                    yield name, self.context.locations.synthetic(location, what, {"required": [*names]})
        for keyword in ("dependentSchemas", "dependencies"):
            for name, schema in reader.mapping(keyword).items():
                if not (keyword == "dependencies" and isinstance(schema, list)):
                    yield name, self._child(location, keyword, name)

    def _keys(self, location: int, keyword: str, reader: Reader) -> dict[str, tuple[str, ...]]:
        """The keys of the values of `const` or `enum`, by the types of the values."""
        number = location if keyword == "enum" else -location
        if number not in self._listed:
            values = reader.array("enum") if keyword == "enum" else [reader.keywords["const"]]
            if len(values) > self._choices:
                raise GrammarError(
                    f"an enum may have at most {self._choices} values, but {reader.where('enum')} has {len(values)}; "
                    "shorten it"
                )
            found: dict[str, dict[str, None]] = {}
            for value in values:
                key = key_of(value, reader.where(keyword))
                self.values.setdefault(key, value)
                found.setdefault(type_of(value), {})[key] = None
            self._listed[number] = {kind: tuple(keys) for kind, keys in found.items()}
        return self._listed[number]

    def _listing(self, keys: tuple[str, ...], kind: str) -> Formula:
        if not keys:
            return ()
        for key in keys:
            self.values.setdefault(key, {"true": True, "false": False}.get(key))
        if kind == "null" or (kind == "boolean" and len(keys) == 2):
            return self._free[kind]
        return (Alternative(FREE[kind], values=keys),)
