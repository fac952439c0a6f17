"""How much work it is to put a value together, to look at a condition, or to send the arguments of a gen."""

from typing import assert_never

from jsg.lang.graphs.graph import (
    AllOf,
    AnyOf,
    Condition,
    ConstantValue,
    Contains,
    DictValue,
    Equals,
    ListValue,
    Matches,
    Not,
    StateValue,
    TextValue,
    Value,
    VariableValue,
)
from jsg.lang.ir import SamplingArgs


def value_size(value: Value) -> int:
    """Of how many values and pieces of text a value is put together, itself included."""
    match value:
        case TextValue(pieces):
            return 1 + len(pieces)
        case ListValue(items):
            return 1 + sum(map(value_size, items))
        case DictValue(entries) | StateValue(_, entries):
            return 1 + sum(value_size(item) for _, item in entries)
        case ConstantValue() | VariableValue():
            return 1
        case _:
            assert_never(value)


def condition_size(condition: Condition) -> int:
    """How many conditions, texts and pieces of text a condition has, itself included."""
    match condition:
        case Equals(value, text) | Contains(value, text):
            return 1 + value_size(value) + value_size(text)
        case Matches(value):
            return 1 + value_size(value)
        case Not(inner):
            return 1 + condition_size(inner)
        case AllOf(conditions) | AnyOf(conditions):
            return 1 + sum(map(condition_size, conditions))
        case _:
            assert_never(condition)


def text_of_args(args: SamplingArgs) -> int:
    """Characters of the stop texts, patterns and grammars of a gen; a stop token counts as one."""
    size = 0
    for value in args.given().values():
        if isinstance(value, tuple):
            size += sum(len(item) if isinstance(item, str) else 1 for item in value)
        elif isinstance(value, str):
            size += len(value)
    return size
