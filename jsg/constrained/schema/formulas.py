"""Formulas: what a schema says about the values of one type, as a list of alternatives (drafts).

Everything that combines schemas is worked out here. A conjunction is the product of the lists of its parts, a
disjunction is their concatenation, and a negation moves inward to the keywords. Each type has formulas of its own,
because a keyword about one type holds for every value of another and then costs nothing.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jsg.constrained.schema import unevaluated
from jsg.constrained.schema.assertions import number_denies, number_says, string_denies, string_says
from jsg.constrained.schema.containers import (
    Context,
    array_denies,
    array_says,
    object_denies,
    object_says,
    without,
)
from jsg.constrained.schema.drafts import FREE, Draft, DraftShape, Meeting, Members, string_of
from jsg.constrained.schema.judge import Judge, UnderWayError
from jsg.constrained.schema.keywords import REFERENCES, Reader
from jsg.constrained.schema.nodes import Literal
from jsg.constrained.schema.shapes import Json, NodeName, Number, String
from jsg.constrained.schema.values import TYPES, decimal_of, described, key_of, type_of
from jsg.errors import GrammarError

MAX_ALTERNATIVES = 512
MANY_ALTERNATIVES = 8
"""From here on it pays to look for alternatives that can be left out."""

MAX_REDUCED = 64
"""More than so many are left as they are."""

MAX_MEETINGS = 100_000
MAX_DEPTH = 100

Formula = Sequence[Draft]


class Formulas:
    """The formulas of one document, each worked out once.

    Attributes:
        values: Values of enum and const by their keys.
        judge: Answers that need formulas.
    """

    def __init__(self, context: Context, choices: int):
        self.context = context
        self.values: dict[str, Json] = {}
        self.judge = Judge(self.of_node, context.nodes, context.patterns, self.values)
        self._choices = choices
        self._meeting = Meeting(context.nodes.conjoin)
        self._free = {kind: (Draft(shape),) for kind, shape in FREE.items()}
        self._nodes: dict[tuple[NodeName, str], Formula] = {}
        self._formulas: dict[tuple[Literal, str], Formula] = {}
        self._under_way: dict[tuple[Literal, str], int] = {}
        self._types: dict[int, frozenset[str] | None] = {}
        self._listed: dict[int, dict[str, tuple[str, ...]]] = {}
        self._num_meetings = 0
        self._level = 0

    def of_node(self, node: NodeName, kind: str) -> Formula:
        """The alternatives of the values of one type that are valid for a node."""
        key = (node, kind)
        if key not in self._nodes:
            self._level += 1  # a schema met again from here is met with another value: that is progress
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
        """The alternatives of the values of one type that a literal holds for.

        Raises:
            GrammarError: A keyword is wrong, or cannot be enforced.
            UnderWayError: It was asked for while it is worked out, for another value.
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
                f"{self._pointer(literal)} is deeper; simplify it"
            )
        if key[0] > 1 and self._is_other_type(*key):
            self._formulas[key] = ()
            return ()
        self._under_way[key] = self._level
        try:
            formula = self._says(*key) if key[0] > 0 else self._denies(-key[0], kind)
        finally:
            del self._under_way[key]
        self._formulas[key] = formula
        return formula

    def reduced(self, drafts: Sequence[Draft]) -> Formula:
        """The alternatives without those that another one covers."""
        kept = list(dict.fromkeys(drafts))
        if not 1 < len(kept) <= MAX_REDUCED:
            return tuple(kept)
        self._spend(len(kept) ** 2 // 2)
        for draft in tuple(kept):
            if any(other is not draft and self._meeting.meet(draft, other) == draft for other in kept):
                kept.remove(draft)
        return tuple(kept)

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
        result = self._any_of([draft for draft in meetings if draft is not None])
        if len(result) > MANY_ALTERNATIVES:
            result = self.reduced([draft for draft in result if not self._is_empty(draft)])
        if len(result) > MAX_ALTERNATIVES:
            raise GrammarError(
                f"a schema may have at most {MAX_ALTERNATIVES} alternatives after anyOf, oneOf, allOf and not are "
                f"worked out, but {where} has more; simplify it"
            )
        return result

    def _spend(self, meetings: int) -> None:
        self._num_meetings += meetings
        if self._num_meetings > MAX_MEETINGS:
            raise GrammarError("anyOf, oneOf, allOf and not of the schema have too many combinations; simplify them")

    def _any_of(self, drafts: Iterable[Draft]) -> Formula:
        """The drafts, each once, with all lists of values as one."""
        found: dict[Draft, None] = {}
        listed: dict[str, None] = {}
        first: Draft | None = None
        for draft in drafts:
            if draft.is_free:
                return (draft,)
            if draft.is_listed:
                first = first or draft
                listed.update(dict.fromkeys(draft.values or ()))
            else:
                found[draft] = None
        if first is None:
            return tuple(found)
        return (dataclasses.replace(first, values=tuple(listed)), *found)

    def _is_empty(self, draft: Draft) -> bool:
        try:
            return self.judge.is_empty(draft)
        except UnderWayError:
            return False

    def _is_disjoint(self, left: Formula, right: Formula) -> bool:
        self._spend(len(left) * len(right))
        meetings = (self._meeting.meet(one, other) for one in left for other in right)
        return all(draft is None or self._is_empty(draft) for draft in meetings)

    # -- a schema holds ------------------------------------------------------------------------------------------------

    def _says(self, place: Literal, kind: str) -> Formula:
        return self._all_of(self._says_each(place, kind), kind, self._pointer(place))

    def _says_each(self, place: int, kind: str) -> Iterator[Formula]:
        if place == 1:
            return
        reader = self._reader(place)
        keywords = reader.keywords
        if "type" in keywords:
            yield self._type_says(reader, kind)
        for keyword in ("const", "enum"):
            if keyword in keywords:
                keys = self._keys(place, keyword, reader).get(kind, ())
                yield self._listing(keys, kind)
        shape = self._shape(place, kind, reader)
        if shape is None:
            yield ()
        elif shape != FREE[kind]:
            yield (Draft(shape),)
        for child in self._always(place, reader):
            yield self.of(child, kind)
        if "not" in keywords:
            yield self.of(-self._child(place, "not"), kind)
        if "anyOf" in keywords:
            yield self._any_of(draft for child in self._each(place, "anyOf", reader) for draft in self.of(child, kind))
        if "oneOf" in keywords:
            yield self._one_of(self._each(place, "oneOf", reader), kind)
        if "if" in keywords:
            yield self._if_says(place, kind, keywords)
        if kind == "object":
            for name, child in self._dependent_schemas(place, reader):
                present = self._product((Draft(Members(required=(name,))),), self.of(child, kind), self._pointer(place))
                yield self._any_of((Draft(without(name)), *present))
        if kind in ("array", "object"):
            yield from self._unevaluated(place, kind, reader)
        yield from self._refused(kind, reader)

    def _is_other_type(self, place: int, kind: str) -> bool:
        """Whether `type` of a schema leaves nothing of a kind of values, so that its other keywords do not matter."""
        if place not in self._types:
            self._types[place] = self._reader(place).types()
        types = self._types[place]
        return types is not None and kind not in types and not (kind == "number" and "integer" in types)

    def _type_says(self, reader: Reader, kind: str) -> Formula:
        types = reader.types() or frozenset(TYPES)
        if kind in types:
            return self._free[kind]
        return (Draft(Number(is_integer=True)),) if kind == "number" and "integer" in types else ()

    def _shape(self, place: int, kind: str, reader: Reader) -> DraftShape | None:
        match kind:
            case "number":
                return number_says(reader)
            case "string":
                return string_says(reader, self.context.patterns)
            case "array":
                return array_says(self.context, place, reader)
            case "object":
                return object_says(self.context, place, reader)
        return FREE[kind]

    def _one_of(self, children: Sequence[int], kind: str) -> Formula:
        """The values that exactly one of the schemas holds for."""
        formulas = {child: formula for child in children if (formula := self.of(child, kind))}
        if len(children) > len(set(children)):  # the same schema twice holds twice
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
        result: list[Draft] = []
        for child, formula in formulas.items():
            overlapping = [o for o in formulas if o != child and not self._is_disjoint(formula, formulas[o])]
            rivals = [self.of(-other, kind) for other in (*overlapping, *others)]
            result.extend(self._all_of((formula, *rivals), kind, self._pointer(child)))
        return self._any_of(result)

    def _if_says(self, place: int, kind: str, keywords: Mapping[str, Json]) -> Formula:
        condition = self._child(place, "if")
        where = self._pointer(place)
        if "then" not in keywords and "else" not in keywords:
            return self._free[kind]
        then = self.of(self._child(place, "then"), kind) if "then" in keywords else self._free[kind]
        otherwise = self.of(self._child(place, "else"), kind) if "else" in keywords else self._free[kind]
        if "then" not in keywords:  # `if` holds, or it does not and `else` does: `if` or `else`
            return self._any_of((*self.of(condition, kind), *otherwise))
        holds = self._product(self.of(condition, kind), then, where)
        return self._any_of((*holds, *self._product(self.of(-condition, kind), otherwise, where)))

    def _refused(self, kind: str, reader: Reader) -> Iterator[Formula]:
        if kind == "array":
            for reason in reader.refusals():
                yield (Draft(FREE[kind], refusals=(reason,)),)

    def _unevaluated(self, place: int, kind: str, reader: Reader) -> Iterator[Formula]:
        keyword = "unevaluatedItems" if kind == "array" else "unevaluatedProperties"
        if keyword in reader.keywords:
            yield (unevaluated.draft(self.context, place, keyword),)

    # -- a schema does not hold ----------------------------------------------------------------------------------------

    def _denies(self, place: int, kind: str) -> Formula:
        return self._any_of(draft for part in self._denies_each(place, kind) for draft in part)

    def _denies_each(self, place: int, kind: str) -> Iterator[Formula]:
        if place == 1:
            return
        reader = self._reader(place)
        keywords = reader.keywords
        where = self._pointer(place)
        if "type" in keywords:
            yield self._type_denies(reader, kind)
        for keyword in ("const", "enum"):
            if keyword in keywords:
                yield self._without_values(place, self._keys(place, keyword, reader).get(kind, ()), kind)
        yield self._shape_denied(place, kind, reader)
        for child in self._always(place, reader):
            yield self.of(-child, kind)
        if "not" in keywords:
            yield self.of(self._child(place, "not"), kind)
        if "anyOf" in keywords:
            yield self._all_of((self.of(-child, kind) for child in self._each(place, "anyOf", reader)), kind, where)
        if "oneOf" in keywords:
            yield self._not_one_of(self._each(place, "oneOf", reader), kind, where)
        if "if" in keywords:
            condition = self._child(place, "if")
            for sign, branch in ((1, "then"), (-1, "else")):
                if branch in keywords:
                    yield self._product(
                        self.of(sign * condition, kind), self.of(-self._child(place, branch), kind), where
                    )
        if kind == "object":
            for name, child in self._dependent_schemas(place, reader):
                yield self._product((Draft(Members(required=(name,))),), self.of(-child, kind), where)
        for keyword, owner in (("unevaluatedItems", "array"), ("unevaluatedProperties", "object")):
            if keyword in keywords and kind == owner:
                refusal = f"{reader.where(keyword)} stands under `not`, where it is not supported; remove it"
                yield (Draft(FREE[kind], refusals=(refusal,)),)
        yield from self._refused(kind, reader)

    def _type_denies(self, reader: Reader, kind: str) -> Formula:
        types = reader.types() or frozenset(TYPES)
        if kind in types:
            return ()
        if kind == "number" and "integer" in types:
            return (Draft(Number(not_multiple_of=(decimal_of(1, ""),))),)
        return self._free[kind]

    def _shape_denied(self, place: int, kind: str, reader: Reader) -> Formula:
        match kind:
            case "number":
                return number_denies(reader)
            case "string":
                return string_denies(reader, self.context.patterns)
            case "array":
                return array_denies(self.context, place, reader)
            case "object":
                return object_denies(self.context, place, reader)
        return ()

    def _not_one_of(self, children: Sequence[int], kind: str, where: str) -> Formula:
        """The values that none of the schemas holds for, or two of them."""
        none = self._all_of((self.of(-child, kind) for child in children), kind, where)
        pairs = (
            draft
            for one, other in itertools.combinations(children, 2)
            for draft in self._product(self.of(one, kind), self.of(other, kind), where)
            if not self._is_empty(draft)
        )
        return self._any_of((*none, *pairs))

    def _without_values(self, place: int, keys: Sequence[str], kind: str) -> Formula:
        """All values of the type but these."""
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
                return (Draft(Number(excluded=numbers)),)
            case "string":
                strings = frozenset(value for value in values if isinstance(value, str))
                shape = string_of(String(excluded=strings))
                return () if shape is None else (Draft(shape),)
        nodes = (self.context.locations.synthetic(place, key, described(self.values[key])) for key in keys)
        return self._all_of((self.of(-node, kind) for node in nodes), kind, self._pointer(place))

    # -- parts of a schema ---------------------------------------------------------------------------------------------

    def _reader(self, place: int) -> Reader:
        return Reader(self.context.locations.places[place], self.context.nodes.keywords(place))

    def _pointer(self, literal: Literal) -> str:
        return self.context.locations.places[abs(literal)].pointer

    def _child(self, place: int, *path: str | int) -> int:
        return self.context.locations.child(place, *path)

    def _each(self, place: int, keyword: str, reader: Reader) -> list[int]:
        simple = self.context.nodes.simple
        return [simple(self._child(place, keyword, i)) for i in range(reader.schemas(keyword))]

    def _always(self, place: int, reader: Reader) -> Iterator[int]:
        """The schemas that hold for the same value: references and allOf."""
        for keyword in REFERENCES:
            if keyword in reader.keywords:
                yield self.context.locations.reference(place, keyword)
        if "allOf" in reader.keywords:
            yield from self._each(place, "allOf", reader)

    def _dependent_schemas(self, place: int, reader: Reader) -> Iterator[tuple[str, int]]:
        for keyword in ("dependentSchemas", "dependencies"):
            for name, schema in reader.mapping(keyword).items():
                if not (keyword == "dependencies" and isinstance(schema, list)):
                    yield name, self._child(place, keyword, name)

    def _keys(self, place: int, keyword: str, reader: Reader) -> dict[str, tuple[str, ...]]:
        """By type the keys of the values of `const` or `enum`."""
        number = place if keyword == "enum" else -place
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
        return (Draft(FREE[kind], values=keys),)
