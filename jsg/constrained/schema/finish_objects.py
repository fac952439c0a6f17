"""Makes shapes of the alternatives of objects. All facets are merged, so that each name has one node.

A cell is a set of undeclared names that match the same patterns, with the node of their values.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jsg.constrained.chars.chardfa import CharDfa
from jsg.constrained.schema.alternatives import Alternative, Facet, Members, meet_strings, string_of
from jsg.constrained.schema.formats import FORMATS
from jsg.constrained.schema.formulas import Formulas
from jsg.constrained.schema.patterns import Patterns
from jsg.constrained.schema.shapes import ANY, NEVER, NamePattern, NodeName, Object, String
from jsg.errors import GrammarError

MAX_CELLS = 64
"""Most combinations of patterns that a name may match."""

MAX_SOME = 3
"""Most required members without a declared name, in an object that is not closed."""

MAX_CHOICES = 10_000
"""Most ways to choose the members that meet such requirements."""


def finish_object(formulas: Formulas, shape: Members, where: NodeName) -> Iterator[Object]:
    """The shapes whose values are those of the alternative.

    Raises:
        GrammarError: Patterns of names overlap in too many ways, or the alternative has too many `some`.
    """
    names = _names(formulas, shape)
    strings: tuple[String, ...] | None = None
    if names is not None:
        strings = tuple(name for name in names if isinstance(name, String))
        single = {name: ANY for name in names if isinstance(name, str)}
        facet = Facet(single, additional=ANY if strings else NEVER)
        shape = dataclasses.replace(shape, facets=(*shape.facets, facet))
    if len(shape.some) > MAX_SOME and not formulas.judge.is_closed(shape):
        raise GrammarError(
            f"the schema at {where} requires more than {MAX_SOME} members without giving their names, by `not` over "
            "patternProperties, propertyNames or additionalProperties, which is not supported; remove some of them"
        )
    for one, pending in _served(formulas, shape, where):
        yield from _Finish(formulas, one, strings, where).shapes(pending)


def _names(formulas: Formulas, shape: Members) -> Sequence[str | String] | None:
    """The allowed names, as single strings and as shapes of strings; None where every name is allowed."""
    if not shape.names:
        return None
    found: list[str | String] = []
    for alternative in formulas.of_node(formulas.context.nodes.conjoin(*shape.names), "string"):
        if alternative.is_free:
            return None
        found.extend(formulas.judge.strings(alternative))
    return found


Served = tuple[Members, tuple[tuple[NodeName, NodeName], ...]]


def _served(formulas: Formulas, shape: Members, where: NodeName) -> Iterator[Served]:
    """The ways to meet `some`, each as (object, undeclared members that it still needs).

    One member may meet several of `some`, and it may be a declared member or an undeclared one.
    """
    base = dataclasses.replace(shape, some=())
    if not shape.some:
        yield base, ()
        return
    conjoin = formulas.context.nodes.conjoin
    # In a closed object a member whose name is known meets each of `some`, and one member meets all that choose it.
    is_closed = formulas.judge.is_closed(base)
    for groups in ([[some] for some in shape.some],) if is_closed else _partitions(shape.some):
        wanted = [(conjoin(*(n for n, _ in group)), conjoin(*(v for _, v in group))) for group in groups]
        if any(formulas.judge.is_never(part) for pair in wanted for part in pair):
            continue
        options = [list(_options(formulas, base, names, value)) for names, value in wanted]
        if math.prod(map(len, options)) > MAX_CHOICES:
            raise GrammarError(
                f"the schema at {where} requires members that can be chosen in more than {MAX_CHOICES} ways, by `not` "
                "over patternProperties, propertyNames or additionalProperties, which is not supported; remove some of "
                "them"
            )
        for choice in itertools.product(*options):
            one, pending = base, []
            for names, value in choice:
                if isinstance(names, tuple):
                    facet = Facet({names[0]: value})
                    one = dataclasses.replace(
                        one,
                        facets=(*one.facets, facet),
                        required=tuple(dict.fromkeys((*one.required, names[0]))),
                    )
                else:
                    pending.append((names, value))
            yield one, tuple(pending)


def _options(
    formulas: Formulas, base: Members, names: NodeName, value: NodeName
) -> Iterator[tuple[tuple[str] | NodeName, NodeName]]:
    """The members that can meet one of `some`, as (name, node of the value).

    The name is a tuple of one string, or the node of undeclared names.
    """
    declared = formulas.judge.declared(base)
    known = [name for name in declared if formulas.judge.holds(name, names)]
    has_shapes = False
    for alternative in formulas.of_node(names, "string"):
        for found in formulas.judge.strings(alternative):
            if isinstance(found, str):
                known.append(found)
            else:
                has_shapes = True
    yield from (((name,), value) for name in dict.fromkeys(known))
    if has_shapes and not formulas.judge.is_closed(base):
        yield names, value


def _partitions[T](items: Sequence[T]) -> Iterator[list[list[T]]]:
    """All ways to divide the items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in _partitions(rest):
        yield [[first], *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], [first, *group], *groups[i + 1 :]]


class _Some(NamedTuple):
    """A required member without a declared name.

    Attributes:
        cell: The cell of its name.
        name: Everything that holds for its name.
        node: Everything that holds for its value.
    """

    cell: NamePattern
    name: String
    node: NodeName

    @property
    def is_narrow(self) -> bool:
        """Whether the cell also allows values that are not valid for this member."""
        return self.node != self.cell.node


_NO_CELL = NamePattern((), (), NEVER)


class _Finish:
    """Makes shapes of one alternative of an object for one way to meet `some`."""

    def __init__(self, formulas: Formulas, shape: Members, names: tuple[String, ...] | None, where: NodeName):
        self._formulas = formulas
        self._shape = shape
        self._names = names
        self._where = where
        judge = formulas.judge
        self._nodes = {name: judge.member(shape, name) for name in judge.declared(shape)}

    def shapes(self, pending: Sequence[tuple[NodeName, NodeName]]) -> Iterator[Object]:
        """The object's shapes. `pending` are its required members without a declared name."""
        if any(self._is_never(self._nodes[name]) for name in self._shape.required):
            return
        cells = self._cells()
        choices = [list(self._some(names, value, cells)) for names, value in pending]
        for some in itertools.product(*choices):
            settled = self._settled(self._expected(cells, len(some)), some)
            for needed in itertools.product(*(self._alone(one, some) for one in some)):
                shape = self._bounded(settled, needed)
                if shape is not None:
                    yield shape

    def _is_never(self, node: NodeName) -> bool:
        return self._formulas.judge.is_never(node)

    def _cells(self) -> list[NamePattern]:
        """The cells: each combination of patterns that an undeclared name may match, with the node of the value."""
        facets = self._shape.facets
        conjoin = self._formulas.context.nodes.conjoin
        if self._names == ():
            return []
        patterns = tuple(dict.fromkeys(pattern for facet in facets for pattern, _ in facet.patterns))
        cells: list[NamePattern] = []
        for matched, matches, excludes in combinations(self._formulas.context.patterns, patterns, self._where):
            nodes = []
            for facet in facets:
                found = [node for pattern, node in facet.patterns if pattern in matched]
                nodes.extend(found or (facet.additional,))
            node = conjoin(*nodes)
            if not self._is_never(node):
                cells.append(NamePattern(matches, excludes if matched else patterns, node))
        return cells

    def _expected(self, cells: list[NamePattern], num_some: int) -> list[NamePattern]:
        """The cells without the cell of unexpected names, where an object is closed by default.

        That cell stays where `propertyNames` describes its names, or where `minProperties` needs more members.
        """
        if not self._shape.is_closed_by_default or self._names is not None:
            return cells
        expected = [cell for cell in cells if cell.matches]
        possible = num_some + sum(not self._is_never(node) for node in self._nodes.values())
        return expected if expected or possible >= self._shape.min_properties else cells

    def _some(self, names: NodeName, value: NodeName, cells: Sequence[NamePattern]) -> Iterator[_Some]:
        """The undeclared members whose name and value are valid for these two nodes, by cell."""
        conjoin = self._formulas.context.nodes.conjoin
        declared = frozenset(self._nodes)
        wanted = [
            found
            for alternative in self._formulas.of_node(names, "string")
            for found in self._formulas.judge.strings(alternative)
            if isinstance(found, String)
        ]
        for name, cell, allowed in itertools.product(wanted, cells, self._names or (String(),)):
            node = conjoin(cell.node, value)
            if self._is_never(node):
                continue
            own = string_of(String(patterns=cell.matches, not_patterns=cell.excludes, excluded=declared))
            shape = None if own is None else meet_strings(name, own)
            shape = None if shape is None else meet_strings(shape, allowed)
            if shape is not None and not self._formulas.judge.is_empty(Alternative(shape)):
                yield _Some(cell, shape, node)

    def _settled(self, cells: Sequence[NamePattern], some: Sequence[_Some]) -> list[NamePattern]:
        """The cells, split so that an object stays valid when a name is written twice.

        A reader keeps one of two members with the same name. So every member that could have the name of a required
        member must have a value that is valid for that member.
        """
        settled: list[NamePattern] = []
        for cell in cells:
            parts = [cell]
            for one in some:
                if one.cell is cell and one.is_narrow:
                    parts = [part for whole in parts for part in self._split(whole, one)]
            settled.extend(part for part in parts if not self._is_never(part.node))
        return settled

    def _alone(self, one: _Some, some: Sequence[_Some]) -> list[tuple[String, NodeName]]:
        """The ways in which the member has a name that no other member of `some` may have.

        Objects in which one member meets two of `some` are another alternative, which `_served` gives.
        """
        parts = [NamePattern(one.name.patterns, one.name.not_patterns, one.node)]
        for other in some:
            if other is not one and other.cell is one.cell and other.is_narrow:
                parts = [part for whole in parts for part in list(self._split(whole, other))[:-1]]
        names = (dataclasses.replace(one.name, patterns=part.matches, not_patterns=part.excludes) for part in parts)
        return [(name, one.node) for name in names if not self._formulas.judge.is_empty(Alternative(name))]

    def _split(self, cell: NamePattern, one: _Some) -> Iterator[NamePattern]:
        """The cell in disjoint parts. The last part has the names of the member, and only values valid for it."""
        matches, excludes = cell.matches, cell.excludes
        for pattern, is_found in _conditions(one.name, frozenset(self._nodes)):
            if pattern in (matches if is_found else excludes):
                continue
            if is_found:
                yield NamePattern(matches, (*excludes, pattern), cell.node)
                matches = (*matches, pattern)
            else:
                yield NamePattern((*matches, pattern), excludes, cell.node)
                excludes = (*excludes, pattern)
        yield NamePattern(matches, excludes, self._formulas.context.nodes.conjoin(cell.node, one.node))

    def _bounded(self, cells: Sequence[NamePattern], some: tuple[tuple[String, NodeName], ...]) -> Object | None:
        """The object with counts that its names can reach; None where no object is valid."""
        additional = next((cell for cell in cells if not cell.matches), _NO_CELL)
        cells = [cell for cell in cells if cell.matches]
        least, most = self._shape.min_properties, self._shape.max_properties
        required = dict.fromkeys(self._shape.required)
        sure = len(required) + len(some)
        if most is not None and sure > most:
            return None
        properties: Mapping[str, NodeName] = self._nodes
        is_closed = additional == _NO_CELL and not cells
        if most == sure:
            cells, additional, is_closed = [], _NO_CELL, True
            properties = {name: node for name, node in properties.items() if name in required}
        if is_closed:
            properties = {name: node for name, node in properties.items() if not self._is_never(node)}
            possible = len(properties) + len(some)
            if least > possible:
                return None
            if least == possible:
                required.update(dict.fromkeys(properties))
                sure = least
            if most is not None and most >= possible:
                most = None
        return Object(
            properties=properties,
            required=frozenset(required),
            patterns=tuple(cells),
            additional=additional.node,
            additional_excludes=additional.excludes,
            names=None if is_closed else self._names,
            some=some,
            # Two members of `some` may have the same name, so they surely count as one member only.
            min_properties=least if least > sure - max(0, len(some) - 1) else 0,
            max_properties=most,
        )


Combination = tuple[frozenset[str], tuple[str, ...], tuple[str, ...]]


def combinations(patterns: Patterns, all_patterns: Sequence[str], where: str) -> list[Combination]:
    """The combinations of patterns that a name can match.

    Each is (all matched patterns, those of them that must be tested, those whose absence must be tested). A pattern
    needs no test where the others imply it.

    Raises:
        GrammarError: There are too many combinations.
    """
    found: list[tuple[CharDfa, Combination]] = [(patterns.everything, (frozenset(), (), ()))]
    for pattern in all_patterns:
        following: list[tuple[CharDfa, Combination]] = []
        for automaton, (matched, matches, excludes) in found:
            inside = patterns.narrowed(automaton, pattern, is_found=True)
            outside = patterns.narrowed(automaton, pattern, is_found=False)
            if inside is not None:
                tested = (*matches, pattern) if outside is not None or not matches else matches
                following.append((inside, (matched | {pattern}, tested, excludes)))
            if outside is not None:
                kept = excludes if inside is None else (*excludes, pattern)
                following.append((outside, (matched, matches, kept)))
        found = following
        if len(found) > MAX_CELLS:
            raise GrammarError(
                f"patternProperties at {where}: names may match them in more than {MAX_CELLS} combinations, which is "
                "not supported; make the patterns exclude each other"
            )
    return [
        (matched, matches, tuple(p for p in excludes if not any(patterns.are_disjoint(m, p) for m in matches)))
        for _, (matched, matches, excludes) in found
    ]


Condition = tuple[str, bool]
"""A pattern, and whether the name must match it."""


def _conditions(name: String, declared: frozenset[str]) -> list[Condition]:
    """What holds for the names of a shape, as patterns. Declared names are not excluded again."""
    conditions = [(pattern, True) for pattern in name.patterns]
    conditions.extend((pattern, False) for pattern in name.not_patterns)
    if name.min_length or name.max_length is not None:
        most = "" if name.max_length is None else name.max_length
        conditions.append((rf"^[\s\S]{{{name.min_length},{most}}}$", True))
    conditions.extend((f"^(?:{FORMATS[format_name]})$", True) for format_name in name.formats)
    if words := name.excluded - declared:
        conditions.append((f"^(?:{'|'.join(map(_quoted, sorted(words)))})$", False))
    return conditions


def _quoted(word: str) -> str:
    """The word as a pattern, with every character escaped."""
    return "".join(rf"\u{{{ord(sign):x}}}" for sign in word)
