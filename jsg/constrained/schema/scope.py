"""What the parts of the emitter share: the rules so far, the spellings, and access to the nodes."""

import dataclasses
from collections.abc import Callable, Sequence

from jsg.constrained.ir import Expr
from jsg.constrained.limits import Limits
from jsg.constrained.schema.json_text import CharacterRules
from jsg.constrained.schema.rules import RuleBook
from jsg.constrained.schema.shapes import NodeName, Shape
from jsg.constrained.schema.spelling import Spelling
from jsg.constrained.schema.whitespace import Spacing
from jsg.types import PropertyOrder


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The state of making one grammar.

    Attributes:
        book: Collects the rules.
        characters: Gives the expressions of character sets inside strings.
        spelling: How words, strings and names are written.
        spacing: White space between JSON tokens.
        order: Order of the members of objects.
        limits: Limits of the work.
        shapes: Gives the shapes of a node. There are none where no value is valid.
        value: Gives the expression of the values that are valid for a node.
        alternatives: Gives the expression of the values that are valid for some of a node's shapes.
    """

    book: RuleBook
    characters: CharacterRules
    spelling: Spelling
    spacing: Spacing
    order: PropertyOrder
    limits: Limits
    shapes: Callable[[NodeName], tuple[Shape, ...]]
    value: Callable[[NodeName], Expr]
    alternatives: Callable[[Sequence[Shape], NodeName], Expr]
