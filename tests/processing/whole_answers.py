"""Tool calls of an answer that is there as a whole."""

from collections.abc import Callable, Collection

from jsg.processing.tool_calls import Dialect, ParsedAnswer, ToolCallParser, join_deltas


def parse_tool_calls(
    text: str, dialect: Dialect, names: Collection[str] | None, new_id: Callable[[int], str]
) -> ParsedAnswer:
    """Takes a whole answer apart, just as `ToolCallParser` does piece by piece."""
    parser = ToolCallParser(dialect, names, new_id)
    return join_deltas([*parser.push(text), *parser.finish()])
