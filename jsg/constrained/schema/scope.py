"""What the parts of the emitter share: the rules so far, the spellings, and a way to ask for a node."""

import dataclasses
from collections.abc import Callable

from jsg.constrained.ir import Expr
from jsg.constrained.limits import Limits
from jsg.constrained.schema.json_text import CharacterRules
from jsg.constrained.schema.rules import RuleBook
from jsg.constrained.schema.shapes import NodeName, Shape
from jsg.constrained.schema.whitespace import Spacing
from jsg.types import PropertyOrder


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The making of one grammar.

    Attributes:
        book: Collects the rules.
        characters: Character sets inside strings.
        spacing: White space between tokens.
        order: Order of the members of objects.
        limits: Limits of the work.
        shapes: The shapes of a node; none where no value is valid.
        value: The expression of a value that is valid for a node.
    """

    book: RuleBook
    characters: CharacterRules
    spacing: Spacing
    order: PropertyOrder
    limits: Limits
    shapes: Callable[[NodeName], tuple[Shape, ...]]
    value: Callable[[NodeName], Expr]
