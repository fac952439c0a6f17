"""How the parts of JSON values are spelled: as JSON, or in another notation in which models write calls of tools."""

import dataclasses
from collections.abc import Collection, Mapping

from jsg.constrained.call_styles import LITERAL_MARKS, PLAIN_NAME, PYTHON_WORDS, CallStyle, is_plain_name
from jsg.constrained.ir import EMPTY, Expr, Literal, alt, literal
from jsg.constrained.schema.json_text import string_words
from jsg.constrained.special_tokens import spelled
from jsg.errors import GrammarError

NAME_PATTERN = f"^{PLAIN_NAME}$"
"""The names that need no quotes, for the pattern of a string shape."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What ends a text in which nothing is escaped.

    Attributes:
        text: Its characters, which the text must not have in it.
        spelling: Its bytes, in which special tokens are named.
    """

    text: str
    spelling: bytes

    @classmethod
    def of(cls, text: str, special: Collection[str]) -> "Mark":
        """The mark that is written so, with these special tokens."""
        return cls(text, spelled(text, special))

    def check(self, text: str) -> None:
        """Raises GrammarError for a known text that has the mark in it."""
        if self.text in text:
            raise GrammarError(
                f"a string under enum or const must not have {self.text!r} in it, which ends a string in the form in "
                f"which this model writes calls and cannot be escaped, but one is {text[:60]!r}; change it"
            )

    @property
    def spellings(self) -> Expr:
        """All that looks like the mark in a text."""
        return alt(literal(self.text), literal(self.spelling))


@dataclasses.dataclass(frozen=True, slots=True)
class Spelling:
    """A notation.

    Attributes:
        words: The spellings of true, false and null.
        quote: What comes before and after strings that are written as they are; None for strings of JSON.
        name_begin: What comes before a name without quotes; None where names are strings of JSON.
        is_sorted: The declared order of names is that of the alphabet, because the model is shown no other order.
    """

    words: Mapping[str, tuple[bytes, ...]]
    quote: Mark | None = None
    name_begin: bytes | None = None
    is_sorted: bool = False

    def in_order[T](self, members: Mapping[str, T]) -> list[tuple[str, T]]:
        """The members of an object in the declared order."""
        # Jinja's `dictsort`, by which these models are shown tools and calls, takes upper and lower case as equal.
        return sorted(members.items(), key=lambda item: item[0].lower()) if self.is_sorted else [*members.items()]

    def scalar_string(self, text: str) -> tuple[bytes, ...]:
        """The spellings of a known string with its quotes. Raises GrammarError if the notation cannot write it."""
        if self.quote is None:
            return string_words(text)
        self.quote.check(text)
        return (self.quote.spelling + text.encode() + self.quote.spelling,)

    def known_name(self, name: str) -> Expr:
        """A known name of a member.

        Raises:
            GrammarError: The notation cannot write it.
        """
        if self.name_begin is None:
            return Literal(string_words(name)[0])
        if not is_plain_name(name):
            raise GrammarError(
                "a name under properties must have no white space, quotes, brackets and none of the signs :=,<>|\\ in "
                f"the form in which this model writes calls of tools, but one is {name[:60]!r}; rename it"
            )
        return Literal(self.name_begin + name.encode())

    @property
    def before_name(self) -> Expr:
        """What comes before a name without quotes."""
        return literal(self.name_begin) if self.name_begin else EMPTY


JSON = Spelling({word: (word.encode(),) for word in ("true", "false", "null")})
_PYTHON = Spelling({word: (name.encode(),) for name, word in PYTHON_WORDS.items()})


def spelling_of(style: CallStyle | None, special: Collection[str]) -> Spelling:
    """The notation of the values in a style; in the XML styles it is JSON."""
    marks = LITERAL_MARKS.get(style) if style is not None else None
    if marks is None:
        return JSON
    if marks.quote is None:
        return _PYTHON
    words = {**JSON.words, "null": (b"None", b"null")}
    return Spelling(words, Mark.of(marks.quote, special), b"", is_sorted=True)
