"""White space between JSON tokens: none, that of `json.dumps`, or a bounded choice.

White space is bounded everywhere, so that no text ends in endless white space. There is none before a comma or a colon:
nobody writes any there, and a choice would mean less forced text.
"""

import dataclasses

from jsg.constrained.ir import EMPTY, ByteSet, Expr, Literal, Repeat, alt, literal, optional, seq
from jsg.constrained.schema.rules import RuleBook
from jsg.types import Whitespace

MAX_INDENT = 8
"""Most spaces or tabs after a line break in flexible white space: two levels of four spaces, four levels of two spaces,
or eight tabs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spacing:
    """The white space and signs between JSON tokens.

    Attributes:
        comma, colon: The sign and the white space after it.
        gap: White space after an opening bracket and before a closing one; may be empty.
    """

    comma: Expr
    colon: Expr
    gap: Expr

    def enclosed(self, left: str, content: Expr, right: str) -> Expr:
        """The content in brackets."""
        return seq(literal(left), self.gap, content, self.gap, literal(right))

    def empty(self, brackets: str) -> Expr:
        """Brackets around nothing."""
        return seq(literal(brackets[0]), self.gap, literal(brackets[1]))


def spacing(book: RuleBook, whitespace: Whitespace) -> Spacing:
    """The spacing for one of the names that clients use."""
    if whitespace == "fixed":
        return Spacing(literal(", "), literal(": "), EMPTY)
    if whitespace == "compact":
        return Spacing(literal(","), literal(":"), EMPTY)
    gap = optional(book.call("gap", "white space", _gap))
    return Spacing(seq(literal(","), gap), seq(literal(":"), gap), gap)


def _gap() -> Expr:
    indent = Repeat(ByteSet(((0x09, 0x09), (0x20, 0x20))), 0, MAX_INDENT)
    return alt(Literal(b" "), seq(Literal(b"\n"), indent))
