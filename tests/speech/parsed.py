"""Answers in one piece: what the readers of growing answers give for them."""

from collections.abc import Callable, Collection, Iterable, Mapping

from jsg.constrained.call_styles import ArgumentTypes
from jsg.speech.answers.tool_calls import GrowingAnswer, ParsedAnswer, ToolCallParser, ToolDelta
from jsg.speech.dialects import Dialect


def parse_tool_calls(
    text: str,
    dialect: Dialect,
    names: Collection[str] | None,
    new_id: Callable[[int], str],
    *,
    types: Mapping[str, ArgumentTypes] | None = None,
    is_cut: bool = False,
) -> ParsedAnswer:
    """The text and calls of a whole answer, which may be cut short."""
    parser = ToolCallParser(dialect, names, new_id, types=types)
    grown = GrowingAnswer()
    grown.add([*parser.push(text), *parser.finish(is_cut=is_cut)])
    return grown.whole(is_cut=parser.is_cut)


def join_deltas(deltas: Iterable[ToolDelta]) -> ParsedAnswer:
    """The answer that these deltas make together."""
    grown = GrowingAnswer()
    grown.add(deltas)
    return grown.whole()
