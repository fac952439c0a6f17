"""Parses a regular expression into an expression over characters.

`Reader` says what each atom of the pattern matches. The atom is then replaced by a single stand-in character, and
interegular parses what is left of one group: atoms, bars and quantifiers. The innermost groups come first, so nothing
recurses, however deep the pattern is.

There are two dialects. With `search=True` a pattern is of ECMA-262 with the flag u, as `pattern` of JSON Schema is, and
may be found anywhere in a text. With `search=False` it is of Python's `re`, and the whole text must match. In both
dialects a dollar means the end of the text and nothing else.
"""

import dataclasses
import re

from interegular.patterns import Pattern, _CharGroup, _Concatenation, _Repeated, parse_pattern

from jsg.constrained.chars import charset
from jsg.constrained.chars.lower import lower
from jsg.constrained.ir import NEVER, Expr, Grammar, depth_of
from jsg.constrained.limits import LIMITS, Limits, check
from jsg.constrained.regex.anchored import (
    AT_END,
    AT_START,
    Piece,
    anchor,
    any_of,
    concatenate,
    found_in,
    matched,
    one_of,
    repeat,
)
from jsg.constrained.regex.reader import Reader
from jsg.errors import GrammarError

_STAND_IN = 0x100  # The code point of the first stand-in: beyond all that interegular gives a meaning.
_MAX_BARS = 50_000
_MAX_SYMBOLS = 100_000
"""Quantifiers, anchors and what is between them, in a whole pattern. interegular takes 10 µs for each."""
_SYMBOLS = "quantifiers and anchors in a pattern"
_ORDINARY = re.compile(r"[^\\^$.|?*+()\[{]+")
_QUANTIFIERS = ("*", "+", "?", "{")
_NESTING = "levels of nesting in a pattern"


@dataclasses.dataclass(slots=True)
class _Group:
    """A group that is being read: where it opened, the flags inside it, and its atoms and operators so far."""

    start: int
    flags: frozenset[str]
    items: list[Piece | str]


def regex_grammar(text: str, limits: Limits = LIMITS) -> Grammar:
    """The grammar of the texts that a regular expression (Python's dialect) matches as a whole, in UTF-8.

    Raises:
        GrammarError: The pattern is wrong, uses something that is not supported, is too large, or matches no text.
    """
    expr = lower(parse_regex(text, search=False, limits=limits, param="regex"))
    if expr == NEVER:
        raise GrammarError("the regular expression matches no text at all; correct it", param="regex")
    return Grammar("root", {"root": expr})


def parse_regex(pattern: str, *, search: bool, limits: Limits = LIMITS, param: str | None = None) -> Expr:
    """The texts that a regular expression matches, over `Chars`; bounded repetition stays `Repeat`.

    Args:
        pattern: The regular expression.
        search: Whether the dialect is ECMA-262 and the pattern may be found anywhere; otherwise the dialect is
            Python's and the whole text must match.
        limits: What the pattern may cost.
        param: The field that an error names.

    Raises:
        GrammarError: The pattern is wrong, uses something that is not supported, or is too large.
    """
    piece = _parse(pattern, is_ecma=search, limits=limits, param=param)
    expr = found_in(piece) if search else matched(piece)
    check(depth_of(expr), limits.nesting, _NESTING, param)
    return expr


def parse_piece(pattern: str) -> Piece:
    """The texts that a regular expression in Python's dialect matches, by what they assert. Raises as `parse_regex`."""
    piece = _parse(pattern, is_ecma=False, limits=LIMITS, param=None)
    for part in piece.parts:
        if part is not None:
            check(depth_of(part.expr), LIMITS.nesting, _NESTING)
    return piece


def _parse(pattern: str, *, is_ecma: bool, limits: Limits, param: str | None) -> Piece:
    check(len(pattern.encode(errors="surrogatepass")), limits.text_bytes, "bytes in a pattern", param)
    return _Parser(pattern, Reader(pattern, is_ecma=is_ecma, param=param), limits, param).run()


class _Parser:
    def __init__(self, pattern: str, reader: Reader, limits: Limits, param: str | None):
        self._pattern = pattern
        self._reader = reader
        self._limits = limits
        self._param = param
        self._num_symbols = 0
        self._num_bars = 0
        self._atoms: dict[str, Piece] = {}
        self._characters: dict[tuple[str, bool], Piece] = {}

    def run(self) -> Piece:
        reader = self._reader
        stack = [_Group(0, frozenset(), [])]
        while reader.position < len(self._pattern):
            group = stack[-1]
            start = reader.position
            ordinary = _ORDINARY.match(self._pattern, start)
            if ordinary is not None:
                reader.position = ordinary.end()
                is_repeated = self._pattern[ordinary.end() : ordinary.end() + 1] in _QUANTIFIERS
                self._add_text(group, ordinary[0], is_repeated=is_repeated)
                continue
            character = self._pattern[start]
            if character in _QUANTIFIERS and (counts := reader.quantifier()) is not None:
                if not group.items or isinstance(group.items[-1], str):
                    reader.refuse("a quantifier has nothing to repeat", start, "write what it repeats before it")
                least, most = counts
                group.items.append(f"{{{least},{'' if most is None else most}}}")
                continue
            reader.position = start + 1
            if character == "(":
                flags, is_group = reader.group(group.flags)
                if is_group:
                    stack.append(_Group(start, flags, []))
                    check(len(stack) - 1, self._limits.nesting, _NESTING, self._param)
                else:
                    group.flags = flags
            elif character == ")":
                if len(stack) == 1:
                    reader.refuse("a parenthesis closes nothing", start, r"write \) for a parenthesis")
                stack.pop()
                stack[-1].items.append(self._assembled(group.items))
            elif character == "|":
                self._num_bars += 1
                check(self._num_bars, _MAX_BARS, "alternatives in a pattern", self._param)
                group.items.append("|")
            else:
                group.items.append(self._atom(character, start, group.flags))
        if len(stack) > 1:
            reader.refuse("a parenthesis is not closed", stack[-1].start, "close it with )")
        return self._assembled(stack[0].items)

    def _add_text(self, group: _Group, text: str, *, is_repeated: bool) -> None:
        """Adds ordinary characters to a group; the last by itself where it may be repeated."""
        head, tail = (text[:-1], text[-1:]) if is_repeated else (text, "")
        if head:
            group.items.append(concatenate([self._character(character, group.flags) for character in head]))
        if tail:
            group.items.append(self._character(tail, group.flags))

    def _character(self, character: str, flags: frozenset[str]) -> Piece:
        key = (character, "i" in flags)
        if key not in self._characters:
            point = ord(character)
            self._characters[key] = one_of(self._reader.folded(charset.of_ranges(((point, point),)), flags))
        return self._characters[key]

    def _atom(self, character: str, start: int, flags: frozenset[str]) -> Piece:
        reader = self._reader
        if character == "[":
            return one_of(reader.character_class(flags))
        if character == ".":
            return one_of(reader.dot(flags))
        if character in "^$":
            if "m" in flags:
                reader.refuse("anchors under the flag m are not supported", start)
            return self._anchor(AT_START if character == "^" else AT_END)
        if character == "\\":
            following = self._pattern[start + 1 : start + 2]
            if not reader.is_ecma and following in ("A", "Z", "z"):
                reader.position += 1
                return self._anchor(AT_START if following == "A" else AT_END)
            return one_of(reader.escape(flags))
        return self._character(character, flags)

    def _anchor(self, asserted: int) -> Piece:
        self._num_symbols += 1
        check(self._num_symbols, _MAX_SYMBOLS, _SYMBOLS, self._param)
        return anchor(asserted)

    def _assembled(self, items: list[Piece | str]) -> Piece:
        """The piece that the atoms and operators of one group make."""
        alternatives: list[list[Piece | str]] = [[]]
        for item in items:
            if item == "|":
                alternatives.append([])
            else:
                alternatives[-1].append(item)
        # Alternatives without quantifiers are put together at once: of thousands of words, the parser sees one atom.
        rows = [[item for item in alternative if not isinstance(item, str)] for alternative in alternatives]
        plain = [concatenate(row) for row, alternative in zip(rows, alternatives, strict=True) if row == alternative]
        if len(plain) == len(alternatives):
            return any_of(plain)
        self._atoms.clear()
        texts = [self._stand_in(any_of(plain))] if plain else []
        texts.extend(
            self._quantified(alternative)
            for row, alternative in zip(rows, alternatives, strict=True)
            if len(row) < len(alternative)
        )
        return self._piece(parse_pattern("|".join(texts)))

    def _quantified(self, items: list[Piece | str]) -> str:
        """An alternative for the parser, with a stand-in for each atom that is repeated and for each run of others."""
        symbols: list[str] = []
        run: list[Piece] = []
        for i, item in enumerate(items):
            if isinstance(item, str):
                symbols.append(item)
                continue
            is_repeated = i + 1 < len(items) and isinstance(items[i + 1], str)
            if is_repeated and run:
                symbols.append(self._stand_in(concatenate(run)))
                run = []
            if is_repeated:
                symbols.append(self._stand_in(item))
            else:
                run.append(item)
        if run:
            symbols.append(self._stand_in(concatenate(run)))
        self._num_symbols += len(symbols)
        check(self._num_symbols, _MAX_SYMBOLS, _SYMBOLS, self._param)
        return "".join(symbols)

    def _stand_in(self, piece: Piece) -> str:
        character = chr(_STAND_IN + len(self._atoms))
        self._atoms[character] = piece
        return character

    def _piece(self, node: object) -> Piece:
        """The piece of a node of interegular's tree, which is four levels deep at most as there are no groups in it."""
        match node:
            case Pattern(options=options):
                return any_of([self._piece(option) for option in options])
            case _Concatenation(parts=parts):
                return concatenate([self._piece(part) for part in parts])
            case _Repeated(base=base, min=least, max=most):
                return repeat(self._piece(base), least, most)
            case _CharGroup(chars=chars):
                return self._atoms[next(iter(chars))]
            case _:
                raise TypeError(f"interegular made a {type(node).__name__} of atoms, bars and quantifiers")
