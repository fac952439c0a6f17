"""The form that every kind of grammar takes before it becomes an automaton: expressions over bytes, and rules.

    regex ──────┐
    JSON Schema ┤                      build/builder.py    run/machine.py
    EBNF ───────┼──▶ Grammar of Expr ──▶ static tables ──▶ states made when met ──▶ masks
    choices ────┤
    tags ───────┘

Expressions are immutable. An expression that is in two places may be one object. The builder knows every kind of
expression but `Chars`: the front end that made a set of characters lowers it to bytes, because the bytes of a character
depend on where it is (in plain text, or inside a JSON string).

`EMPTY` matches the empty text only, and `NEVER` matches nothing at all.
"""

import dataclasses
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping

CharRanges = tuple[tuple[int, int], ...]
"""Code points as closed intervals, ascending, neither touching nor overlapping."""


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """These bytes, one after another. There is at least one."""

    value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ByteSet:
    """One byte out of closed intervals, which ascend and do not touch."""

    ranges: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Chars:
    """One character (Unicode scalar value) out of a set. Must be lowered before a grammar is built."""

    ranges: CharRanges


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """Any one of many byte strings, which become a trie. None is empty; they ascend and do not repeat."""

    words: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Seq:
    """All parts, one after another."""

    parts: tuple["Expr", ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Alt:
    """Any one of the options."""

    options: tuple["Expr", ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """An item `min` to `max` times (None: without end), `separator` between each two.

    Large bounds cost nothing: they are counted while a text is read.
    """

    item: "Expr"
    min: int
    max: int | None
    separator: "Expr" = Seq(())


@dataclasses.dataclass(frozen=True, slots=True)
class BagItem:
    """One kind of item in a `Bag`.

    Attributes:
        expr: The item, which is never empty.
        is_once: The item may come at most once.
        is_required: The item must come, and only once.
    """

    expr: "Expr"
    is_once: bool = False
    is_required: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Bag:
    """`min` to `max` items in any order, with `separator` between each two. `BagItem` says how often each may come.

    At most `MAX_ONCE` of the items are `is_once`. The members of a JSON object in free order are a bag, and so are the
    items of an array of unique values.
    """

    items: tuple[BagItem, ...]
    separator: "Expr"
    min: int = 0
    max: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Automaton:
    """The texts along the edges from state 0 to an accepting state.

    Attributes:
        edges: For each state its edges (label, target). A label is never empty and, when built, holds no `Chars`.
        accepting: States in which a text may end.
        skips: For a state another one, with a higher number, to which a text may go on without a byte.
    """

    edges: tuple[tuple[tuple["Expr", int], ...], ...]
    accepting: frozenset[int]
    skips: tuple[tuple[int, int], ...] = ()

    @property
    def may_be_empty(self) -> bool:
        """Whether the empty text is one of the texts."""
        state: int | None = 0
        skips = dict(self.skips)
        while state is not None and state not in self.accepting:
            state = skips.get(state)
        return state is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Any text that the rule of that name matches. Only calls make recursion possible."""

    rule: str


Expr = Literal | ByteSet | Chars | Words | Seq | Alt | Repeat | Bag | Automaton | Call

EMPTY = Seq(())
NEVER = Alt(())
MAX_ONCE = 64


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Rules that are the same in many grammars, such as those of any JSON value. It lives as long as the process.

    What is built of its rules is kept, so they cost a grammar little. They call each other only.

    Attributes:
        calls: The call of each rule by what the rule is for.
        rules: The rules by name. All of them match something.
        reached: For each rule the names of the rules that it and its callees call, its own among them.
    """

    calls: Mapping[Hashable, Call]
    rules: Mapping[str, "Expr"]
    reached: Mapping[str, Collection[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """Rules by name, and the one that a whole text must match.

    A rule that is called from several places is built once, and masks found inside it serve all of them. So an
    expression that is in many places (a JSON string, a JSON value) should be a rule.

    Attributes:
        start: Name of the rule of the whole text.
        rules: All of them.
        contradiction: The error message where no text matches, in words of the client's grammar; None: a general one.
        annotations: What the schemas had in them that is not enforced; see `schema_grammar`.
        library: The library that some of the rules are taken from.
    """

    start: str
    rules: Mapping[str, Expr]
    contradiction: str | None = None
    annotations: tuple[str, ...] = ()
    library: Library | None = None


def seq(*parts: Expr) -> Expr:
    """The parts in a row, flattened; NEVER where any part is."""
    flat: list[Expr] = []
    for part in parts:
        if part == NEVER:
            return NEVER
        flat.extend(part.parts if isinstance(part, Seq) else (part,))
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def separated(parts: Iterable[Expr], separator: Expr) -> Expr:
    """The parts in a row, with the separator between each two."""
    row = [each for part in parts for each in (separator, part)]
    return seq(*row[1:])


def alt(*options: Expr) -> Expr:
    """Any of the options, flattened and each once."""
    whole = either(*options)
    return either(*dict.fromkeys(whole.options)) if isinstance(whole, Alt) else whole


def either(*options: Expr) -> Expr:
    """Any of the options, flattened. Unlike `alt` it compares none of them, because deep ones take long to compare."""
    flat: list[Expr] = []
    for option in options:
        flat.extend(option.options if isinstance(option, Alt) else (option,))
    return flat[0] if len(flat) == 1 else Alt(tuple(flat))


def any_of(options: Iterable[Expr]) -> Expr:
    """Any of the options that can be matched at all."""
    found = [option for option in options if option != NEVER]
    return found[0] if len(found) == 1 else alt(*found)


def optional(item: Expr) -> Expr:
    """The item or nothing."""
    return alt(item, EMPTY)


def literal(text: str | bytes) -> Expr:
    """Exactly this text."""
    value = text.encode() if isinstance(text, str) else text
    return Literal(value) if value else EMPTY


def parts_of(expr: Expr) -> Iterable[Expr]:
    """The expressions that are directly in this one."""
    match expr:
        case Seq(parts) | Alt(parts):
            return parts
        case Repeat(item, _, _, separator):
            return (item, separator)
        case Bag(items, separator):
            return (*(item.expr for item in items), separator)
        case Automaton(edges):
            return [label for row in edges for label, _ in row]
        case _:
            return ()


def parts_first(root: Expr, known: Container[int]) -> Iterator[Expr]:
    """The expressions in this one, each after its parts, without recursion.

    The caller adds the identity of each to `known`; an expression whose identity is there is left out.
    """
    todo = [root]
    while todo:
        expr = todo[-1]
        if id(expr) not in known:
            missing = [part for part in parts_of(expr) if id(part) not in known]
            if missing:
                todo.extend(missing)
                continue
            yield expr
        todo.pop()


def depth_of(root: Expr) -> int:
    """How deep an expression is nested."""
    depths: dict[int, int] = {}
    for expr in parts_first(root, depths):
        depths[id(expr)] = 1 + max([depths[id(part)] for part in parts_of(expr)], default=0)
    return depths[id(root)]


def rules_reached(rules: Mapping[str, Expr], start: str) -> Collection[str]:
    """The names of the rules that a rule needs, its own first."""
    names = {start: None}
    for name in (order := [start]):  # `order` grows while it is walked.
        for part in parts_first(rules[name], known := set[int]()):
            known.add(id(part))
            if isinstance(part, Call) and part.rule not in names:
                names[part.rule] = None
                order.append(part.rule)
    return tuple(names)


def with_parts(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The expression with each of its parts replaced by what `change` gives for it."""
    match expr:
        case Seq(parts):
            return seq(*map(change, parts))
        case Alt(options):
            return Alt(tuple(map(change, options)))
        case Repeat(item, least, most, separator):
            return Repeat(change(item), least, most, change(separator))
        case Bag(items, separator, least, most):
            changed = tuple([BagItem(change(item.expr), item.is_once, item.is_required) for item in items])
            return Bag(changed, change(separator), least, most)
        case Automaton(edges, accepting, skips):
            changed_edges = tuple([tuple([(change(label), to) for label, to in row]) for row in edges])
            return Automaton(changed_edges, accepting, skips)
        case _:
            return expr


def merge_rules(grammar: Grammar, prefix: str) -> tuple[str, dict[str, Expr]]:
    """The grammar's rules under names that begin with `prefix`, and the new name of its start rule."""
    names = {name: prefix + name for name in grammar.rules}
    rename = CallRewriter(lambda name: Call(names.get(name, prefix + name)))
    return prefix + grammar.start, {names[name]: rename(expr) for name, expr in grammar.rules.items()}


class CallRewriter:
    """Replaces every call in an expression. Parts that were shared stay shared."""

    def __init__(self, in_place_of: Callable[[str], Expr]):
        """Makes a rewriter; `in_place_of` gives the replacement of a call of a rule."""
        self._in_place_of = in_place_of
        # By identity: equal expressions may be large to compare. The expressions are kept, so ids stay theirs.
        self._done: dict[int, tuple[Expr, Expr]] = {}

    def __call__(self, expr: Expr) -> Expr:
        """The expression, rewritten."""
        if isinstance(expr, Call):
            return self._in_place_of(expr.rule)
        known = self._done.get(id(expr))
        if known is None:
            known = self._done[id(expr)] = (expr, with_parts(expr, self))
        return known[1]
