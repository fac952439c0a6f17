"""Makes expressions of strings: free strings, lengths, patterns, formats, and strings that exclude some words.

Common cases have small expressions. A length beside a simple pattern becomes a count. "Any string except these words"
follows the words only while one of them is still possible. Every other case becomes a deterministic automaton over
characters.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

from jsg.constrained.automata import DEAD, live_states
from jsg.constrained.chars import charset
from jsg.constrained.chars.chardfa import CharDfa, as_repeat, fit_length
from jsg.constrained.chars.lower import lower
from jsg.constrained.ir import (
    EMPTY,
    NEVER,
    Automaton,
    Call,
    Chars,
    Expr,
    Literal,
    Repeat,
    Seq,
    Words,
    alt,
    literal,
    parts_of,
    seq,
)
from jsg.constrained.limits import LIMITS, check
from jsg.constrained.schema.formats import (
    MAX_COUNTED,
    format_expr,
    is_identifier,
    long_identifier_expr,
    short_format_expr,
)
from jsg.constrained.schema.json_text import character
from jsg.constrained.schema.patterns import search_expr
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.shapes import String
from jsg.constrained.schema.spelling import NAME_PATTERN, Mark
from jsg.errors import GrammarError

_QUOTE = Literal(b'"')
_ESCAPED = charset.union(charset.of('"\\'), ((0, 0x1F),))
"""The characters that JSON always writes with a backslash."""
_MAX_INLINE_SETS = 2
_MAX_RAW_LENGTH = 300
"""A length beside the end of a raw string needs a state for each character and each part of the mark."""


def string_expr(scope: Scope, shape: String, where: str) -> Call:
    """A string with its quotes, as a call of the rule that all strings of this shape share."""
    return scope.book.call(shape, described(shape, where), lambda: quoted_expr(scope, shape))


def name_expr(scope: Scope, shape: String) -> Expr:
    r"""The name of a member, as its notation has it; NEVER where no name is valid.

    A name that begins like one of the excluded names does not go on with a quote, a backslash or a control character: a
    model that may not close the excluded name would choose `\"` next.
    """
    if scope.spelling.name_begin is None:
        return string_expr(scope, shape, "") if shape == String() else quoted_expr(scope, shape, is_name=True)
    shape = dataclasses.replace(shape, patterns=(*shape.patterns, NAME_PATTERN))
    content = _content(scope, shape)
    return NEVER if content == NEVER else seq(scope.spelling.before_name, lower(content))


def raw_expr(scope: Scope, shape: String, mark: Mark, before: Expr = EMPTY) -> Expr:
    """A string as it is, up to the mark, with what comes before the mark; NEVER where no string is valid.

    Raises:
        GrammarError: The string has too long a length to be counted.
    """
    content = _content(scope, shape)
    if _has_sign(content, mark.text[0]):
        if max(shape.min_length, shape.max_length or 0) > _MAX_RAW_LENGTH:
            raise GrammarError(
                f"minLength and maxLength of a string must be at most {_MAX_RAW_LENGTH} where a model writes strings "
                "without quotes, because its characters cannot simply be counted; use a smaller one, or leave it out"
            )
        not_patterns = (*shape.not_patterns, re.escape(mark.text))
        content = _content(scope, dataclasses.replace(shape, not_patterns=not_patterns))
    return NEVER if content == NEVER else seq(lower(content), before, mark.spellings)


def _has_sign(content: Expr, sign: str) -> bool:
    """Whether a text of an expression over characters may have the sign in it, as far as its parts show."""
    todo = [content]
    while todo:
        match part := todo.pop():
            case Chars(ranges) if charset.contains(ranges, sign):
                return True
            case Literal(value) if sign.encode() in value:
                return True
            case Words(values) if any(sign.encode() in value for value in values):
                return True
            case _:
                todo.extend(parts_of(part))
    return False


def described(shape: String, where: str) -> str:
    """A name for the string in messages, after the keyword that costs most."""
    if shape == String():
        return "string"
    if shape.patterns or shape.not_patterns:
        return f"pattern at {where}"
    return f"format at {where}" if shape.formats else f"string of {where}"


def quoted_expr(scope: Scope, shape: String, *, is_name: bool = False) -> Expr:
    """A string with its quotes; NEVER where no string is valid."""
    if (mark := scope.spelling.quote) is not None:
        raw = raw_expr(scope, shape, mark)
        return NEVER if raw == NEVER else seq(literal(mark.spelling), raw)
    if shape == String():
        return seq(_QUOTE, _rest(scope))
    if shape.excluded:
        whole = dataclasses.replace(shape, excluded=frozenset())
        dfa = _every_text() if whole == String() else _automaton(scope, whole, _parts(scope, shape), is_name)
        if dfa.has_lengths(shape.min_length, shape.max_length):
            rest = _all_but(scope, dfa, shape.excluded, is_name)
            return NEVER if rest == NEVER else seq(_QUOTE, rest)
    if len(shape.formats) == 1 and shape == String(formats=shape.formats):
        return _of_format(shape.formats[0])
    return seq(_QUOTE, _lowered(scope, _content(scope, shape, is_name)), _QUOTE)


@functools.cache
def _every_text() -> CharDfa:
    return CharDfa.length(0, None, LIMITS)


@functools.cache
def _of_format(name: str) -> Expr:
    """The strings of a format with their quotes. Few of them have long sets, so their characters need no rules."""
    return seq(_QUOTE, lower(format_expr(name), character), _QUOTE)


def _searches(scope: Scope, patterns: Iterable[str]) -> list[Expr]:
    return [search_expr(pattern, scope.limits) for pattern in patterns]


def _parts(scope: Scope, shape: String) -> list[Expr]:
    """What a string of a shape must be, with its patterns and formats, each over characters."""
    return _joined([*_searches(scope, shape.patterns), *map(format_expr, shape.formats)])


def _content(scope: Scope, shape: String, is_name: bool = False) -> Expr:
    """The string without its quotes, over characters."""
    parts = _parts(scope, shape)
    least, most = shape.min_length, shape.max_length
    if not shape.not_patterns and not shape.excluded and len(parts) <= 1:
        if not parts:
            return NEVER if most is not None and most < least else Repeat(Chars(charset.UNIVERSE), least, most)
        if least == 0 and most is None:
            return parts[0]
        fitted = fit_length(parts[0], least, most)
        if fitted is not None:
            return fitted
        if most is not None and most > MAX_COUNTED and least <= 1 and any(map(is_identifier, shape.formats)):
            return long_identifier_expr(shape.formats[0], most)
    dfa = _automaton(scope, shape, parts, is_name)
    if dfa.has_lengths(least, most):
        return dfa.to_expr()
    fitted = fit_length(dfa.to_expr(), least, most)
    if fitted is not None:
        return fitted
    if shape.formats:
        short = [short_format_expr(name, most) for name in shape.formats]
        dfa = _automaton(scope, shape, _joined([*_searches(scope, shape.patterns), *short]), is_name)
        is_surely_short = most is None or dfa.has_lengths(0, most)
        most = None if is_surely_short else max(least, min(MAX_COUNTED, most or 0))
    return dfa.intersect(CharDfa.length(least, most, scope.limits)).minimised().to_expr()


def _automaton(scope: Scope, shape: String, parts: Sequence[Expr], is_name: bool) -> CharDfa:
    """The texts of all parts that have none of the shape's forbidden patterns and are none of its excluded words."""
    dfa = CharDfa.of(parts[0] if parts else Repeat(Chars(charset.UNIVERSE), 0, None), scope.limits)
    for part in parts[1:]:
        dfa = dfa.intersect(CharDfa.of(part, scope.limits))
    for part in _searches(scope, shape.not_patterns):
        dfa = dfa.difference(CharDfa.of(part, scope.limits))
    if shape.excluded:
        words = CharDfa.words(sorted(shape.excluded), scope.limits)
        if is_name:
            endings = Seq((Chars(_ESCAPED), Repeat(Chars(charset.UNIVERSE), 0, None)))
            words = CharDfa.of(Seq((words.to_expr(), alt(EMPTY, endings))), scope.limits)
        dfa = dfa.difference(words)
    return dfa.minimised()


def _joined(parts: Sequence[Expr]) -> list[Expr]:
    """The parts, in which all repeats of the characters of one set are one repeat, however long they are."""
    ranges, least, most = charset.UNIVERSE, 0, None
    others: list[Expr] = []
    for part in parts:
        if (repeat := as_repeat(part)) is None:
            others.append(part)
            continue
        ranges, least = charset.intersect(ranges, repeat[0]), max(least, repeat[1])
        most = min((bound for bound in (most, repeat[2]) if bound is not None), default=None)
    if most is not None and most < least:
        return [NEVER]
    return others if len(others) == len(parts) else [Repeat(Chars(ranges), least, most), *others]


def _lowered(scope: Scope, expr: Expr) -> Expr:
    """The expression with the JSON spellings of its characters. Long sets become rules where there are many sets."""
    is_short = _count_sets(expr) <= _MAX_INLINE_SETS
    return lower(expr, character if is_short else scope.characters.character)


def _count_sets(expr: Expr) -> int:
    """How many sets of more than one character an expression has; counting stops above `_MAX_INLINE_SETS`."""
    count, todo = 0, [expr]
    while todo and count <= _MAX_INLINE_SETS:
        part = todo.pop()
        count += isinstance(part, Chars) and charset.size(part.ranges) > 1
        todo.extend(parts_of(part))
    return count


def _all_but(scope: Scope, dfa: CharDfa, words: frozenset[str], is_name: bool) -> Expr:
    """The texts of an automaton except these words, with the closing quote; NEVER where there is none.

    The result is a trie of the words, each node with the automaton's state there, and the automaton. A text leaves the
    trie where it differs from all words. `name_expr` says what a name may not be.
    """
    trie, places, ends = _trie(scope, dfa, words)
    done = len(trie) + len(dfa.rows)
    targets = [_targets(dfa, state) for state in range(len(dfa.rows))]
    leaving: dict[tuple[int, tuple[str, ...], bool], list[tuple[Expr, int]]] = {}
    edges: list[list[tuple[Expr, int]]] = []
    for node, (children, place) in enumerate(zip(trie, places, strict=True)):
        is_end = node in ends
        key = (place, tuple(children), is_end)
        others = leaving.get(key)
        if others is None:
            others = leaving[key] = []
            for target, ranges in targets[place]:
                rest = _without(ranges, key[1])
                if is_name and is_end:
                    rest = charset.difference(rest, _ESCAPED)
                if rest:
                    others.append((scope.characters.character(rest), len(trie) + target))
            if place in dfa.accepting and not is_end:
                others.append((_QUOTE, done))
        edges.append([*[(_sign(sign), target) for sign, target in children.items()], *others])
    is_free = False
    for state, own in enumerate(targets):
        if own == [(state, charset.UNIVERSE)] and state in dfa.accepting:
            edges.append([(_rest(scope), done)])
            is_free = state == 0  # then a text may leave the words at each of their characters
        else:
            out = [(scope.characters.character(ranges), len(trie) + target) for target, ranges in own]
            edges.append(out + ([(_QUOTE, done)] if state in dfa.accepting else []))
    edges.append([])
    if not is_free and 0 not in live_states([tuple([target for _, target in out]) for out in edges], (done,)):
        return NEVER
    return Automaton(tuple(map(tuple, edges)), frozenset((done,)))


@functools.lru_cache(maxsize=1024)
def _sign(sign: str) -> Expr:
    """A character of a known name where other names may begin alike. It needs no rule."""
    return character(charset.of(sign))


def _trie(scope: Scope, dfa: CharDfa, words: frozenset[str]) -> tuple[list[dict[str, int]], list[int], set[int]]:
    """What words and texts of an automaton begin with: a trie, the state at each node, and where words end."""
    trie: list[dict[str, int]] = [{}]
    places, ends = [0], set[int]()
    classes: dict[str, int] = {}
    for word in sorted(words):
        node, known = 0, len(trie)
        for sign in word:
            target = trie[node].get(sign)
            if target is None:
                if sign not in classes:
                    found = (i for i, ranges in enumerate(dfa.classes) if charset.contains(ranges, sign))
                    classes[sign] = next(found, DEAD)
                place = DEAD if classes[sign] == DEAD else dfa.rows[places[node]][classes[sign]]
                if place == DEAD:
                    break
                target = trie[node][sign] = len(trie)
                trie.append({})
                places.append(place)
            node = target
        else:
            ends.add(node)
        if len(trie) > known:
            scope.limits.spend((len(trie) - known) * len(dfa.classes))
            check(len(trie), scope.limits.positions, "characters of names under properties, to tell others from them")
    return trie, places, ends


def _targets(dfa: CharDfa, state: int) -> list[tuple[int, charset.CharRanges]]:
    """The states that follow a state of an automaton, each with the characters that lead to it."""
    found: dict[int, list[charset.CharRanges]] = {}
    for ranges, target in zip(dfa.classes, dfa.rows[state], strict=True):
        if target != DEAD:
            found.setdefault(target, []).append(ranges)
    return [(target, charset.union(*sets)) for target, sets in found.items()]


@functools.lru_cache(maxsize=4096)
def _without(ranges: charset.CharRanges, signs: tuple[str, ...]) -> charset.CharRanges:
    return charset.difference(ranges, charset.of(signs))


def _rest(scope: Scope) -> Call:
    """Any characters and the closing quote: the end of free strings and free names."""
    return scope.book.call(
        "rest", "rest of a string", lambda: seq(Repeat(character(charset.UNIVERSE), 0, None), _QUOTE)
    )
