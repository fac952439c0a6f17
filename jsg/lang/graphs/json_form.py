"""Graphs as JSON, and back: strict, so that a graph of a later version or with a slip is refused and never half run.

    graph      {"jsg_graph": 1, "name", "arguments": [{"name", "kind"}], "nodes": [...], "outputs": {name: value},
                "returns": value}
    node       {"kind": "append", "id", "stream", "line", and the fields of its dataclass}
    piece      "text" · {"argument": name} · {"node": id, "name": variable, "index": i}
    value      {"text": [piece]} · {"list": [value]} · {"dict": {key: value}} · {"constant": 1} · {"variable": ref} ·
               {"state": stream, "variables": {name: value}}
    condition  {"equals": [value, text]} · {"contains": [value, text]} · {"matches": [value, pattern]} · {"not": c} ·
               {"all": [c]} · {"any": [c]}      (value and text are lists of pieces)
    media      {"image": base64, "media_type"} · {"video": base64, "media_type", "num_frames"} · {"argument": name}

Fields that hold their default are left out.
"""

import json
from collections.abc import Mapping
from typing import Any, assert_never

from jsg.errors import GraphError
from jsg.lang.graphs.check import check_graph
from jsg.lang.graphs.graph import (
    AllOf,
    AnyNode,
    AnyOf,
    Append,
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
    Graph,
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
    Turn,
    Value,
    ValueRef,
    VariableValue,
)
from jsg.lang.graphs.json_reader import VERSION, Reader
from jsg.lang.ir import Image, SamplingArgs, Video
from jsg.processing.media.base64_files import write_base64


def graph_to_json(graph: Graph) -> str:
    """The graph as a JSON text."""
    return json.dumps(graph_to_dict(graph), ensure_ascii=False, separators=(",", ":"))


def graph_from_json(source: str | bytes | Mapping[str, Any]) -> Graph:
    """The graph of a JSON text, or of what was parsed from one. It is well-formed (`check_graph`).

    Raises:
        GraphError: It is not such a text or not well-formed; the message names the node.
    """
    if isinstance(source, str | bytes):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise GraphError(f"a graph must be JSON: {error}", param="graph") from None
    graph = Reader("graph").graph(source)
    check_graph(graph)
    return graph


def sampling_from_dict(source: Any, where: str = "sampling_params") -> SamplingArgs:
    """The reverse of `sampling_to_dict`. Raises GraphError; values that only a backend can judge are left to it."""
    return Reader(where).sampling(source)


def media_from_dict(source: Any, where: str) -> Image | Video:
    """The reverse of `media_to_dict`. Raises GraphError."""
    return Reader(where).media(source)


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """The graph as what `json.dumps` takes."""
    return {
        "jsg_graph": VERSION,
        "name": graph.name,
        "arguments": [{"name": argument.name, "kind": argument.kind} for argument in graph.arguments],
        "nodes": [_node(node) for node in graph.block.nodes],
        "outputs": _values(graph.block.outputs),
        "returns": _value(graph.returns),
    }


def media_to_dict(media: Image | Video) -> dict[str, Any]:
    """A picture or a video, as graphs and the arguments of `POST /v1/programs` hold it."""
    data = write_base64(media.data)
    match media:
        case Image():
            return {"image": data, "media_type": media.media_type}
        case Video():
            return {"video": data, "media_type": media.media_type, "num_frames": media.num_frames}
        case _:
            assert_never(media)


def sampling_to_dict(args: SamplingArgs) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in args.given().items()}


def _node(node: AnyNode) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": type(node).__name__.lower(), "id": node.id, "stream": node.stream}
    return fields | {"line": node.line} | {name: value for name, value in _own(node).items() if value is not None}


def _own(node: AnyNode) -> dict[str, Any]:
    match node:
        case Open():
            defaults = None if node.defaults is None else sampling_to_dict(node.defaults)
            return {"program": node.program, "defaults": defaults, "num_api_spec_tokens": node.num_api_spec_tokens}
        case Append():
            return {"pieces": _pieces(node.pieces), "part": _list(node.part)}
        case Media():
            return {"source": _source(node.source), "num_frames": node.num_frames, "part": _list(node.part)}
        case Generate(gen=gen):
            return {"name": gen.name, "args": sampling_to_dict(gen.args) or None, "reasoning": node.reasoning}
        case Choose():
            return {
                "name": node.name,
                "choices": [_pieces(choice.pieces) for choice in node.choices],
                "method": node.method,
                "temperature": node.temperature or None,
                "seed": node.seed,
            }
        case Turn():
            return {"role": node.role, "is_begin": node.is_begin}
        case Scope():
            return {"name": node.name, "is_begin": node.is_begin}
        case ReadText():
            return {}
        case Assign():
            return {"name": node.name, "value": _value(node.value)}
        case Fork():
            return {"branches": list(node.branches), "offsets": _list(node.offsets)}
        case Join():
            return {"branches": list(node.branches), "mode": node.mode}
        case Cond():
            return {
                "condition": _condition(node.condition),
                "then": _block(node.then),
                "otherwise": _block(node.otherwise),
                "before": _values(node.before) or None,
            }
        case Loop():
            return {
                "body": _block(node.body),
                "until": None if node.until is None else _condition(node.until),
                "max_rounds": node.max_rounds,
                "before": _values(node.before) or None,
            }
        case _:
            assert_never(node)


def _source(source: Image | Video | ArgumentRef) -> dict[str, Any]:
    return {"argument": source.name} if isinstance(source, ArgumentRef) else media_to_dict(source)


def _list(value: tuple[int, ...] | None) -> list[int] | None:
    return None if value is None else list(value)


def _block(block: Block) -> dict[str, Any]:
    return {"nodes": [_node(node) for node in block.nodes], "outputs": _values(block.outputs)}


def _values(values: tuple[tuple[str, Value], ...]) -> dict[str, Any]:
    return {name: _value(value) for name, value in values}


def _pieces(pieces: tuple[Piece, ...]) -> list[Any]:
    return [_piece(piece) for piece in pieces]


def _piece(piece: Piece) -> Any:
    match piece:
        case str():
            return piece
        case ArgumentRef(name):
            return {"argument": name}
        case ValueRef(node, name, index):
            return {"node": node, "name": name} | ({} if index is None else {"index": index})
        case _:
            assert_never(piece)


def _value(value: Value) -> dict[str, Any]:
    match value:
        case TextValue(pieces):
            return {"text": _pieces(pieces)}
        case ListValue(items):
            return {"list": [_value(item) for item in items]}
        case DictValue(items):
            return {"dict": _values(items)}
        case ConstantValue(constant):
            return {"constant": constant}
        case VariableValue(ref):
            return {"variable": _piece(ref)}
        case StateValue(stream, outputs):
            return {"state": stream, "variables": _values(outputs)}
        case _:
            assert_never(value)


def _condition(condition: Condition) -> dict[str, Any]:
    match condition:
        case Equals(value, text):
            return {"equals": [_pieces(value.pieces), _pieces(text.pieces)]}
        case Contains(value, text):
            return {"contains": [_pieces(value.pieces), _pieces(text.pieces)]}
        case Matches(value, pattern):
            return {"matches": [_pieces(value.pieces), pattern]}
        case Not(inner):
            return {"not": _condition(inner)}
        case AllOf(conditions):
            return {"all": [_condition(inner) for inner in conditions]}
        case AnyOf(conditions):
            return {"any": [_condition(inner) for inner in conditions]}
        case _:
            assert_never(condition)
