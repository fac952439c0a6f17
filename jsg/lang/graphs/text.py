"""A graph for human readers: as text, one line for each node, and as a drawing."""

import itertools
from collections.abc import Iterable, Iterator
from typing import assert_never

from jsg.lang.graphs.codec import sampling_to_dict
from jsg.lang.graphs.nodes import (
    AllOf,
    AnyNode,
    AnyOf,
    Append,
    Argument,
    ArgumentRef,
    Assign,
    Block,
    Choose,
    Cond,
    Condition,
    ConstantValue,
    Contains,
    DictValue,
    Equals,
    Fork,
    Generate,
    Join,
    ListValue,
    Loop,
    Matches,
    Media,
    Not,
    Open,
    Piece,
    ReadText,
    Scope,
    StateValue,
    TextValue,
    TupleValue,
    Turn,
    Value,
    ValueRef,
    VariableValue,
    kind_of,
    refs,
    walk,
)
from jsg.lang.words.ir import SamplingArgs, Video
from jsg.processing.parts import file_size

MAX_SHOWN = 60  # characters of a constant that are shown


def to_text(name: str, arguments: Iterable[Argument], block: Block, returns: Value) -> str:
    """Gives a line for each node: its number, its stream, what it does, and its place in the program."""
    taken = ", ".join(
        argument.name if argument.kind == "text" else f"{argument.name}: {argument.kind}" for argument in arguments
    )
    lines = [f"program {name}({taken})", *_block_lines(block, "")]
    lines += [f"  {name} = {shown(value)}" for name, value in block.outputs]
    if returns != ConstantValue(None):
        lines.append(f"  return {shown(returns)}")
    return "\n".join(lines)


def to_dot(block: Block) -> str:
    """Gives a drawing for Graphviz. Streams are boxes; a dashed arrow is a value that a node reads."""
    lines = ["digraph program {", "  rankdir=TB; node [shape=box, fontname=monospace, fontsize=10];"]
    by_stream: dict[int, list[AnyNode]] = {}
    for node in walk(block):
        by_stream.setdefault(node.stream, []).append(node)
    for stream, nodes in by_stream.items():
        lines.append(f'  subgraph cluster_{stream} {{ label="stream {stream}"; color=gray;')
        lines += [f"    n{node.id} [label={_quoted(f'{node.id}: {node_text(node)}')}];" for node in nodes]
        lines.append("  }")
        lines += [f"  n{a.id} -> n{b.id};" for a, b in itertools.pairwise(nodes)]
    first = {stream: nodes[0].id for stream, nodes in by_stream.items()}
    last = {stream: nodes[-1].id for stream, nodes in by_stream.items()}
    for node in walk(block):
        match node:
            case Fork(branches=branches):
                lines += [f"  n{node.id} -> n{first[branch]};" for branch in branches if branch in first]
            case Join(branches=branches):
                lines += [f"  n{last[branch]} -> n{node.id};" for branch in branches if branch in last]
            case _:
                pass
        read = refs(node.condition if isinstance(node, Cond) else node)
        sources = {(ref.node, ref.name) for ref in read if isinstance(ref, ValueRef) and ref.node != node.id}
        lines += [
            f"  n{source} -> n{node.id} [style=dashed, label={_quoted(name)}];" for source, name in sorted(sources)
        ]
    return "\n".join([*lines, "}"])


def node_text(node: AnyNode) -> str:
    """Says what a node does, in a few words."""
    match node:
        case Open():
            return f"open {node.program}{_sampling(node.defaults)}"
        case Append():
            free = "" if node.part is None else f" (part {node.part[1]} of an unordered group)"
            return f"+ {shown(TextValue(node.pieces))}{free}"
        case Media():
            what = "video" if node.num_frames is not None or isinstance(node.source, Video) else "image"
            if isinstance(node.source, ArgumentRef):
                return f"{what} {{{node.source.name}}}"
            return f"{what}, {file_size(node.source.data)} bytes"
        case Generate():
            reasoning = "" if node.reasoning is None else f" reasoning of {node.reasoning} apart"
            return f"{_set(node.name)}gen{_sampling(node.args)}{reasoning}"
        case Choose():
            what = "select" if node.question is None else f"decide {shown(node.question)}"
            return f"{_set(node.name)}{what} [{_joined(node.choices, ', ')}]"
        case Turn():
            return f"{'begin' if node.is_begin else 'end'} {node.role}"
        case Scope():
            return f"{'begin' if node.is_begin else 'end'} scope {node.name}"
        case ReadText():
            return "read text"
        case Assign():
            return f"{node.name} = {shown(node.value)}"
        case Fork():
            offsets = "" if node.offsets is None else f" at offsets {list(node.offsets)}"
            return f"fork → {', '.join(map(str, node.branches))}{offsets}"
        case Join():
            return f"join {', '.join(map(str, node.branches))} ({node.mode})"
        case Cond():
            return f"cond {shown(node.condition)}"
        case Loop():
            until = "" if node.until is None else f" until {shown(node.until)}"
            return f"loop, {node.max_rounds} rounds at most{until}"
        case _:
            return kind_of(node)


def shown(part: Piece | Value | Condition) -> str:
    """Gives a short form of a piece of text, a value or a condition."""
    match part:
        case str():
            return repr(part if len(part) <= MAX_SHOWN else f"{part[: MAX_SHOWN // 2]}…{part[-MAX_SHOWN // 2 :]}")
        case ArgumentRef(name):
            return f"{{{name}}}"
        case ValueRef(node, name, index):
            place = "" if index is None else f"[{index}]"
            return f"{{{name or 'text'}{place}@{node}}}"
        case TextValue(pieces):
            return " ".join(map(shown, pieces)) or "''"
        case ListValue(items):
            return f"[{_joined(items, ', ')}]"
        case TupleValue(items):
            return f"({_joined(items, ', ')})"
        case DictValue(items):
            return f"{{{', '.join(f'{key!r}: {shown(item)}' for key, item in items)}}}"
        case ConstantValue(constant):
            return repr(constant)
        case VariableValue(ref):
            return shown(ref)
        case StateValue(stream):
            return f"state of stream {stream}"
        case Equals(value, text):
            return f"{shown(value)} == {shown(text)}"
        case Contains(value, text):
            return f"{shown(text)} in {shown(value)}"
        case Matches(value, pattern):
            return f"{shown(value)} matches {pattern!r}"
        case Not(inner):
            return f"not ({shown(inner)})"
        case AllOf(conditions):
            return f"({_joined(conditions, ' and ')})"
        case AnyOf(conditions):
            return f"({_joined(conditions, ' or ')})"
        case _:
            assert_never(part)


def _joined(parts: Iterable[Value | Condition], by: str) -> str:
    return by.join(map(shown, parts))


def _block_lines(block: Block, indent: str) -> Iterator[str]:
    for node in block.nodes:
        yield f"{node.id:5}  s{node.stream:<3} {indent}{node_text(node)}  # {node.line}"
        match node:
            case Cond():
                yield from _block_lines(node.then, f"{indent}  ")
                if node.otherwise.nodes:
                    yield f"{'':12}{indent}otherwise"
                    yield from _block_lines(node.otherwise, f"{indent}  ")
            case Loop():
                yield from _block_lines(node.body, f"{indent}  ")
            case _:
                pass


def _set(name: str | None) -> str:
    return "" if name is None else f"{name} = "


def _sampling(args: SamplingArgs | None) -> str:
    fields = {} if args is None else sampling_to_dict(args)
    return "".join(f" {name}={value!r}" for name, value in fields.items())


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
