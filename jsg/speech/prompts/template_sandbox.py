"""The jinja2 environment in which chat templates run: immutable, and bounded in steps and in characters.

jinja2's sandbox keeps a template from Python's internals, from changing its inputs and from long ranges. In addition,
every loop iteration and every call costs one step, every printed character costs one character, and a string or list
that an operator builds must not exceed the same limits. So no messages can make a template work endlessly, and no
template can do so by its loops, macros or operators. A template that was written to use up memory inside one filter is
not stopped: whoever chooses the model chooses its template, but not the messages.
"""

import datetime
import json
from collections.abc import Iterable, Iterator
from typing import Any, final

from jinja2 import Environment, Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 250_000
MAX_CHARS = 64 * 2**20
_MAX_INT_BITS = 4096
# Names that no template can write, so no template can replace what they name.
_BUDGET = "render budget"
_METERED = "metered loop"
_JOINED = "joined text"


@final
class RenderBudget:
    """The steps and characters that one rendering may still spend."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS

    def spend(self, *, steps: int = 0, chars: int = 0) -> None:
        """Takes from the budget. Raises SecurityError when it is used up."""
        self._steps -= steps
        self._chars -= chars
        if self._steps < 0:
            raise SecurityError(f"a chat template must take at most {MAX_STEPS} loop iterations and calls")
        if self._chars < 0:
            raise SecurityError(f"a chat template must print at most {MAX_CHARS} characters")


@final
class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one template, which concurrent renderings share."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=_print_metered,
        )
        self.filters |= {"tojson": _to_json, _METERED: _iterate_metered, _JOINED: _join_metered}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_metered(self, source: str) -> Template:
        """Compiles a template with meters in its loops and joins.

        Raises:
            jinja2.TemplateSyntaxError: The source is not a template.
            jinja2.exceptions.SecurityError: It has a recursive loop, which no meter sees. Macros may recurse.
        """
        return self.from_string(_MeterInserter().visit(self.parse(source)))

    def render(self, template: Template, variables: dict[str, Any]) -> str:
        """Renders with a fresh budget. Raises whatever the template raises."""
        return template.render(variables | {_BUDGET: RenderBudget()})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes a call inside a template, which costs one step."""
        _budget(__context).spend(steps=1)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator inside a template. Raises SecurityError if the result would be too large."""
        match operator, left, right:
            case "+", (str() | list() | tuple()), (str() | list() | tuple()):
                _check_size(left, len(left) + len(right))
            case "*", (str() | list() | tuple()), int():
                _check_size(left, len(left) * right)
            case "*", int(), (str() | list() | tuple()):
                _check_size(right, len(right) * left)
            case "*", int(), int():
                _check_bits(left.bit_length() + right.bit_length())
            case "**", int(), int():
                _check_bits(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)


@final
class _MeterInserter(NodeTransformer):
    """Puts meters into a syntax tree: around the items of each loop, and in place of `a ~ b`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError("a chat template must not have recursive loops; use a macro")
        static_len = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.iter = _filter(node.iter, _METERED, nodes.Const(static_len))
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return self.generic_visit(_filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED))


@final
class _GenerationTag(Extension):
    """`{% generation %}` marks the model's text for training. Here it is a scope that prints its body."""

    def __init__(self, environment: Environment):
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _budget(context: Context) -> RenderBudget:
    return context.parent[_BUDGET]


def _filter(value: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _check_size(kind: str | list[Any] | tuple[Any, ...], size: int) -> None:
    limit, unit = (MAX_CHARS, "characters") if isinstance(kind, str) else (MAX_STEPS, "items")
    if size > limit:
        raise SecurityError(f"a value in a chat template must have at most {limit} {unit}, but one would have {size}")


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_INT_BITS:
        raise SecurityError(f"an integer in a chat template must have at most {_MAX_INT_BITS} bits, not {num_bits}")


@pass_context
def _print_metered(context: Context, value: Any) -> str:
    text = str(value)
    _budget(context).spend(chars=len(text))
    return text


@pass_context
def _iterate_metered(context: Context, items: Iterable[Any], static_len: int) -> Iterator[Any]:
    budget = _budget(context)
    for item in items:
        budget.spend(steps=1, chars=static_len)
        yield item


@pass_context
def _join_metered(context: Context, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size("", sum(map(len, texts)))
    return "".join(texts)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it, which is not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    """Called by a template to refuse messages that it cannot express."""
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
