"""Makes a grammar of shapes: each node has a rule, and equal parts of the schema share one."""

import functools
from collections.abc import Sequence

from jsg.constrained.ir import NEVER, Call, Expr, Grammar, Library, any_of
from jsg.constrained.limits import LIMITS, Limits, check
from jsg.constrained.schema import strings
from jsg.constrained.schema.arguments import CallForm, arguments_expr
from jsg.constrained.schema.arrays import array_expr
from jsg.constrained.schema.consts import const_expr, scalar_words
from jsg.constrained.schema.json_text import CharacterRules, words
from jsg.constrained.schema.numbers import number_expr
from jsg.constrained.schema.objects import object_expr
from jsg.constrained.schema.rules import RuleBook
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.shapes import (
    ANY,
    EVERY_SHAPE,
    Array,
    Boolean,
    Const,
    Document,
    NodeName,
    Null,
    Number,
    Object,
    Shape,
    String,
)
from jsg.constrained.schema.spelling import JSON, Spelling
from jsg.constrained.schema.whitespace import spacing
from jsg.errors import GrammarError
from jsg.types import PropertyOrder, Whitespace

_MAX_INLINE_BYTES = 64


def emit(
    document: Document,
    whitespace: Whitespace,
    order: PropertyOrder,
    limits: Limits = LIMITS,
    form: CallForm | None = None,
) -> Grammar:
    """The grammar of the JSON texts whose value is valid for the document's root.

    Args:
        document: The schema.
        whitespace: White space between JSON tokens. There is none before the first or after the last.
        order: Order of the members of objects.
        limits: Limits of the work.
        form: The texts are the arguments of a call in this form, and not JSON.

    Raises:
        GrammarError: No grammar within the limits can express the schema.
    """
    spelling = JSON if form is None else form.spelling
    # In other notations, and with other limits, all rules are made for the grammar alone.
    library = _library(whitespace, order) if spelling is JSON and limits == LIMITS else None
    emitter = _Emitter(document, whitespace, order, limits, spelling, library)
    scope = emitter.scope
    if form is None:
        start = emitter.rule(document.root).rule
    else:
        # The book makes the rules one after another, so the arguments can be made before the rules that they call.
        start = scope.book.call("arguments", "arguments", lambda: arguments_expr(scope, document, form)).rule
    return Grammar(start, scope.book.finish(), library=library)


@functools.cache
def _library(whitespace: Whitespace, order: PropertyOrder) -> Library:
    """The rules that most schemas need: those of any value, of plain numbers and strings, and of sets of characters."""
    emitter = _Emitter(Document(ANY, {}), whitespace, order, LIMITS, JSON, None)
    emitter.rule(ANY)
    scope = emitter.scope
    for shape in (Number(), Number(is_integer=True), String()):
        emitter.shape(shape, ANY)
    strings.name_expr(scope, String(excluded=frozenset({"a"})))
    return scope.book.library()


class _Emitter:
    """Turns nodes into expressions. The rule book makes the rules one by one, so that nothing here is recursive."""

    def __init__(
        self,
        document: Document,
        whitespace: Whitespace,
        order: PropertyOrder,
        limits: Limits,
        spelling: Spelling,
        library: Library | None,
    ) -> None:
        self._nodes = document.nodes
        self._values: dict[NodeName, Expr] = {}
        book = RuleBook(library)
        self.scope = Scope(
            book,
            CharacterRules(book),
            spelling,
            spacing(book, whitespace),
            order,
            limits,
            self._shapes,
            self._value,
            self._alternatives,
        )

    def rule(self, node: NodeName) -> Call:
        """A call of the node's rule."""
        name = "value" if node == ANY else node
        return self.scope.book.call(("node", node), name, functools.partial(self._node, node))

    def _shapes(self, node: NodeName) -> tuple[Shape, ...]:
        return EVERY_SHAPE if node == ANY else self._nodes[node]

    def _value(self, node: NodeName) -> Expr:
        """The expression to write where a node is used: the node's own if it is short, else a call of its rule."""
        found = self._values.get(node)
        if found is None:
            found = self._values[node] = self._written(node)
        return found

    def _written(self, node: NodeName) -> Expr:
        match self._shapes(node):
            case ():
                return NEVER
            case (Boolean() | Null() | String() | Number(),):
                return self._node(node)
            case (Const(text),) if len(text) <= _MAX_INLINE_BYTES:
                return self._node(node)
            case _:
                return self.rule(node)

    def _node(self, node: NodeName) -> Expr:
        return self._alternatives(self._shapes(node), node)

    def _alternatives(self, shapes: Sequence[Shape], node: NodeName) -> Expr:
        """Shapes of a node, as alternatives. The known scalars are one set of words."""
        known: set[bytes] = set()
        options: list[Expr] = []
        texts = [shape for shape in shapes if isinstance(shape, String)]
        num_signs = 0
        for shape in shapes:
            if isinstance(shape, Const):
                if (spellings := scalar_words(self.scope.spelling, shape.text)) is not None:
                    known.update(spellings)
                    continue
                num_signs += len(shape.text)  # each character of an array or object becomes at least one position
                check(num_signs, self.scope.limits.positions, "positions in the arrays and objects of an enum")
            if len(texts) < 2 or not isinstance(shape, String):
                options.append(self.shape(shape, node))
        if len(texts) > 1:
            # A rule for each string shape would add one way to read a text. Inside one rule they are one way.
            options.extend(self._text(shape, node) for shape in texts)
        return any_of([words(known), *options])

    def _text(self, shape: String, node: NodeName) -> Expr:
        try:
            return strings.quoted_expr(self.scope, shape)
        except GrammarError as error:
            raise GrammarError(f"{strings.described(shape, node)}: {error}") from error

    def shape(self, shape: Shape, node: NodeName) -> Expr:
        """The expression of a shape of the node."""
        scope = self.scope
        match shape:
            case Const(text):
                return const_expr(scope, text)
            case Boolean():
                return words((*scope.spelling.words["true"], *scope.spelling.words["false"]))
            case Null():
                return words(scope.spelling.words["null"])
            case Number():
                name = "integer" if shape == Number(is_integer=True) else "number"
                name = name if shape in (Number(), Number(is_integer=True)) else f"number of {node}"
                return scope.book.call(shape, name, functools.partial(number_expr, shape, scope.limits))
            case String():
                return strings.string_expr(scope, shape, node)
            case Array():
                return array_expr(scope, shape)
            case Object():
                return object_expr(scope, shape)
