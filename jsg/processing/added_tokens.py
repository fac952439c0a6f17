"""Finds added tokens in a text as `tokenizers` finds them, with the flags that a checkpoint gives them."""

import itertools
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

FLAGS = ("lstrip", "rstrip", "single_word", "normalized")

_SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_WORD_CATEGORIES = frozenset("Lu Ll Lt Lm Lo Nl Nd Mn Mc Me Pc".split())
# Joiners, and letters in circles and squares, which Unicode calls symbols.
_OTHER_WORD = re.compile("[\u200c\u200d\u24b6-\u24e9\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189]")


@final
class AddedTokens:
    """The tokens that cut a text into segments. The leftmost one counts, and the longest of those that begin together.

    `lstrip` and `rstrip` take the white space before and after the token away. A `single_word` does not count beside a
    letter or digit. The `normalized` ones are looked for last, in what the others have left.
    """

    def __init__(self, tokens: Iterable[str], flags: Mapping[str, Collection[str]]):
        """Takes the written forms, and the flags that are on for those that have some."""
        self._flags = flags
        written = list(tokens)
        rounds = ([token for token in written if ("normalized" in flags.get(token, ())) == last] for last in (0, 1))
        self._patterns = [pattern for each in rounds if (pattern := longest_first(each)) is not None]

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The parts of a text in order, and whether each is such a token. White space that tokens take is in none."""
        parts = [(text, False)]
        for pattern in self._patterns:
            parts = [
                part for old, is_token in parts for part in ([(old, True)] if is_token else self._cut(old, pattern))
            ]
        return parts

    def _cut(self, text: str, pattern: re.Pattern[str]) -> list[tuple[str, bool]]:
        parts: list[tuple[str, bool]] = []
        done = 0
        for match in pattern.finditer(text):
            (start, end), flags = match.span(), self._flags.get(match[0], ())
            if "single_word" in flags and (_is_word(text[max(start - 1, 0) : start]) or _is_word(text[end : end + 1])):
                continue
            if "lstrip" in flags:
                start = done + len(text[done:start].rstrip(_SPACES))
            if "rstrip" in flags:
                end = len(text) - len(text[end:].lstrip(_SPACES))
            parts += [(text[done:start], False)] if start > done else []
            parts += [(match[0], True)] if start < end else []  # else the token before took all of it
            done = end
        return [*parts, (text[done:], False)] if done < len(text) else parts


def longest_first(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds these texts, of those that begin together the longest; None if there are none.

    Some models have thousands of them, which Python would try one by one, so the pattern is a tree of their beginnings.
    """
    ordered = sorted(set(tokens) - {""})
    return re.compile(_tree(ordered)) if ordered else None


def _tree(ordered: Sequence[str]) -> str:
    """An expression for sorted texts, none of which is empty."""
    branches: list[str] = []
    for _, group in itertools.groupby(ordered, lambda text: text[0]):
        texts = list(group)
        pairs = zip(texts[0], texts[-1], strict=False)
        shared = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rest = [text[len(shared) :] for text in texts if text != shared]
        branches.append(re.escape(shared) + (f"(?:{_tree(rest)})" if rest else "") + "?" * (0 < len(rest) < len(texts)))
    return "|".join(branches)


def _is_word(char: str) -> bool:
    """Whether a text of at most one character is a letter, digit or the like, as `tokenizers` has it."""
    return bool(char) and (unicodedata.category(char) in _WORD_CATEGORIES or bool(_OTHER_WORD.match(char)))
