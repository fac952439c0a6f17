"""The patterns of a schema: in which strings each is found, and which of them exclude each other."""

import functools
import itertools
import re

from jsg.constrained.chars.chardfa import CharDfa
from jsg.constrained.ir import Expr
from jsg.constrained.limits import Limits
from jsg.constrained.regex.parse import parse_regex
from jsg.constrained.schema.formats import format_expr
from jsg.errors import GrammarError

_MAX_KEPT = 4_000
"""The length in characters of the longest pattern whose expression is cached for other schemas."""


def search_expr(pattern: str, limits: Limits) -> Expr:
    """The texts in which a pattern of ECMA-262 is found, over characters.

    Raises:
        GrammarError: It is not a pattern, or the pattern is not supported.
    """
    return (_kept if len(pattern) <= _MAX_KEPT else _parsed)(pattern, limits)


def _parsed(pattern: str, limits: Limits) -> Expr:
    parts = without_look_ahead(pattern)
    if len(parts) == 1:
        return parse_regex(parts[0][0], search=True, limits=limits)
    whole = CharDfa.length(0, None, limits)
    for part, is_found in parts:
        automaton = CharDfa.of(parse_regex(part, search=True, limits=limits), limits)
        whole = whole.intersect(automaton if is_found else automaton.complement())
    return whole.minimised().to_expr()


# One schema asks for a pattern several times, and many schemas ask for the patterns of `distinct.py`.
_kept = functools.lru_cache(maxsize=256)(_parsed)


_PARTS = re.compile(r"\\[\s\S]|\[(?:\\[\s\S]|[^\\\]])*\]|[\s\S]")
"""The signs of a pattern, with an escape or a class as one of them."""


def without_look_ahead(pattern: str) -> list[tuple[str, bool]]:
    """Patterns that together mean the same, each with whether it must be found: look-ahead at the ends is resolved.

    A text has `^(?!x)y` if it has `^y` and does not have `^x`, and it has `y(?=x)` if it has `yx`.
    """
    if "(?=" not in pattern and "(?!" not in pattern:
        return [(pattern, True)]
    signs = _PARTS.findall(pattern)
    depths = list(itertools.accumulate((sign == "(") - (sign == ")") for sign in signs))
    if any(sign == "|" and depth == 0 for sign, depth in zip(signs, depths, strict=True)):
        return [(pattern, True)]
    found: list[tuple[str, bool]] = []
    while "".join(signs[:4]) in ("^(?=", "^(?!") and 0 in depths[1:]:
        end = depths.index(0, 1)
        if signs[end + 1 : end + 2] in (["*"], ["+"], ["?"], ["{"]):
            break
        found.append((f"^(?:{''.join(signs[4:end])})", signs[3] == "="))
        del signs[1 : end + 1], depths[1 : end + 1]
    last = max((i + 1 for i, depth in enumerate(depths[:-1]) if depth == 0), default=0)
    if signs[last : last + 3] == ["(", "?", "="] and depths[-1] == 0:
        signs[last + 2] = ":"
    return [("".join(signs), True), *found]


class Patterns:
    """The patterns of one document. Each automaton is made when it is first needed."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._locations: dict[str, str] = {}
        self._automata: dict[tuple[str, bool], CharDfa] = {}
        self._formats: dict[str, CharDfa] = {}
        self._disjoint: dict[tuple[str, str], bool] = {}

    @functools.cached_property
    def everything(self) -> CharDfa:
        """The automaton that accepts every text."""
        return CharDfa.length(0, None, self._limits)

    def check(self, pattern: str, where: str) -> None:
        """Raises GrammarError, with `where` in the message, unless the pattern is supported."""
        try:
            search_expr(pattern, self._limits)
        except GrammarError as error:
            raise GrammarError(f"{where}: {error}") from None
        self._locations.setdefault(pattern, where)

    def is_found(self, pattern: str, text: str) -> bool:
        """Whether the pattern is found somewhere in the text."""
        return self.automaton(pattern).accepts(text)

    def has_format(self, name: str, text: str) -> bool:
        """Whether the text has the format."""
        if name not in self._formats:
            self._formats[name] = CharDfa.of(format_expr(name), self._limits)
        return self._formats[name].accepts(text)

    def automaton(self, pattern: str, is_found: bool = True) -> CharDfa:
        """The texts in which the pattern is found, or in which it is not.

        Raises:
            GrammarError: The automaton is too large.
        """
        key = (pattern, is_found)
        if key not in self._automata:
            if is_found:
                self._automata[key] = self._made(pattern)
            else:
                self._automata[key] = self.automaton(pattern).complement()
        return self._automata[key]

    def _made(self, pattern: str) -> CharDfa:
        try:
            return CharDfa.of(search_expr(pattern, self._limits), self._limits)
        except GrammarError as error:
            if pattern not in self._locations:  # jsg made this pattern from other keywords
                raise
            raise GrammarError(f"{self._locations[pattern]}: {error}") from error

    def narrowed(self, automaton: CharDfa, pattern: str, is_found: bool) -> CharDfa | None:
        """The texts of the automaton in which the pattern is found, or is not; None where there are none.

        If the result is too large, the automaton is returned unchanged.
        """
        try:
            result = automaton.intersect(self.automaton(pattern, is_found))
        except GrammarError:
            return automaton
        return None if result.is_empty() else result

    def are_disjoint(self, left: str, right: str) -> bool:
        """Whether it is certain that no text has both patterns."""
        key = (left, right)
        if key not in self._disjoint:
            narrowed = self.narrowed(self.everything, left, is_found=True)
            self._disjoint[key] = narrowed is None or self.narrowed(narrowed, right, is_found=True) is None
        return self._disjoint[key]
