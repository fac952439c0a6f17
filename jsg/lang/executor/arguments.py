"""The arguments of a run: as a caller gives them, as JSON, and in the form in which they are appended."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jsg.errors import GraphError, ProgramError
from jsg.lang.graphs import codec
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import Argument, ArgumentRef, Media, Piece
from jsg.lang.words.ir import Image, Video
from jsg.lang.words.media import image_of, video_of

ArgumentValue = str | int | float | Image | Video
"""The value of an argument: what was given, or a picture or video in the form in which it is appended."""


def argument_value(argument: Argument, value: Any) -> ArgumentValue:
    """Gives the value of an argument from what a caller gave. Raises ProgramError for a value of another kind."""
    match argument.kind:
        case "text":
            if isinstance(value, str | int | float):
                return value
            raise ProgramError(
                f"the argument {argument.name!r} is text or a number in a compiled program, but got "
                f"{type(value).__name__}; give it to compile() as a constant"
            )
        case "image":
            return value if isinstance(value, Image) else image_of(value)
        case "video":
            return value if isinstance(value, Video) else video_of(value, 1)


def known_text(pieces: Iterable[Piece], arguments: Mapping[str, ArgumentValue]) -> str:
    """Gives the text of pieces that are constants and arguments."""
    return "".join(str(arguments[piece.name]) if isinstance(piece, ArgumentRef) else str(piece) for piece in pieces)


def known_media(node: Media, arguments: Mapping[str, ArgumentValue]) -> Image | Video:
    """Gives the picture or video that a node appends."""
    media = arguments[node.source.name] if isinstance(node.source, ArgumentRef) else node.source
    assert isinstance(media, Image | Video)
    if isinstance(media, Video) and node.num_frames is not None:
        return dataclasses.replace(media, num_frames=node.num_frames)
    return media


def arguments_to_json(arguments: Mapping[str, ArgumentValue]) -> dict[str, Any]:
    """Gives arguments in the form that `POST /v1/programs` takes. Raises ProgramError for what JSON does not have."""
    for name, value in arguments.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ProgramError(
                f"an argument of a program that is sent must be a finite number, but {name!r} is {value}; give it as "
                "text, or run it with where='here'"
            )
    return {
        name: codec.write(Image | Video, value) if isinstance(value, Image | Video) else value
        for name, value in arguments.items()
    }


def arguments_from_json(graph: Graph, source: Any) -> dict[str, ArgumentValue]:
    """Does the reverse: gives exactly the arguments that a graph declares, each of its kind.

    Raises:
        GraphError: An argument is missing, unknown or of another kind.
    """
    if not isinstance(source, Mapping):
        raise GraphError("arguments must be an object", param="arguments")
    kinds = {argument.name: argument.kind for argument in graph.arguments}
    if missing := sorted(kinds.keys() - source.keys()):
        raise GraphError(f"the program needs the argument {missing[0]!r}", param="arguments")
    if unknown := sorted(map(str, source.keys() - kinds.keys())):
        raise GraphError(f"the program has no argument {unknown[0][:40]!r}", param="arguments")
    return {name: _argument(name, kind, source[name]) for name, kind in kinds.items()}


def _argument(name: str, kind: str, source: Any) -> ArgumentValue:
    location = codec.Location(f"argument {name!r}")
    if kind == "text":
        if isinstance(source, int | float):
            return source
        if isinstance(source, str):
            return codec.read(str, source, "it", location)
        raise GraphError(f"the argument {name!r} must be text or a number", param="arguments")
    if not isinstance(source, Mapping) or kind not in source:
        raise GraphError(f"the argument {name!r} must be an object with the field {kind}", param="arguments")
    return codec.read(Image | Video, {"num_frames": 1, **source} if kind == "video" else source, "it", location)
