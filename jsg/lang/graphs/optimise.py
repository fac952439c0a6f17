"""What a graph allows beyond running its nodes in program order, each of it to be switched off.

None of it changes what a program says. `reorder` moves only parts that the program itself declared to be in any order
(`unordered`); whether constants may move before an argument in a text is a matter of its meaning, which no analysis
of dependencies can decide, so nothing else moves. The others change only when something is computed, and for how long
it is kept: prefixes are computed by requests of their own, whose prompts are beginnings of the streams' prompts, and
what a stream appends is encoded as if there had been none.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

from jsg.lang.backend import PromptItem
from jsg.lang.graphs.graph import (
    AnyNode,
    Append,
    Argument,
    ArgumentRef,
    Assign,
    Block,
    Cond,
    Graph,
    Loop,
    Media,
    Open,
    Piece,
    ReadText,
    Scope,
    Turn,
    ValueRef,
)
from jsg.lang.graphs.refs import refs_of_node
from jsg.lang.ir import Image, RoleBegin, RoleEnd, Text, Video

MIN_SHARED = 64
"""Characters from which a common prefix is worth a request; a picture or a video is worth one by itself."""

ArgumentValue = str | Image | Video
"""What a run gives to an argument, in the form in which it is appended."""


@dataclasses.dataclass(frozen=True, slots=True)
class Optimisations:
    """Which are on.

    Attributes:
        reorder: The parts of an `unordered` group are put in the order constants, arguments (in a batch first those
            that are the same in all runs), variables, so that prompts have more in common from the start.
        share_prefixes: What all branches of a fork, or all calls of a program, append first is computed once before
            them and kept until they end.
        batch_prefix: What all runs of a batch begin with is computed once before them and kept until they end.
        parallel: Streams run side by side; otherwise node after node, in program order.
        prefetch: While a stream waits for a value, what stands before it is computed.
        release_early: A stream's prefix is given back behind its last node; otherwise when the program ends.
    """

    reorder: bool = True
    share_prefixes: bool = True
    batch_prefix: bool = True
    parallel: bool = True
    prefetch: bool = True
    release_early: bool = True


ALL_ON = Optimisations()
ALL_OFF = Optimisations(
    reorder=False, share_prefixes=False, batch_prefix=False, parallel=False, prefetch=False, release_early=False
)


def reorder(graph: Graph, varying: Collection[str] = ()) -> Graph:
    """The graph with the parts of each unordered group in the order that shares most.

    Args:
        graph: The graph.
        varying: Arguments that differ between the runs of a batch; they come behind the others.
    """
    return dataclasses.replace(graph, block=_reorder_block(graph.block, frozenset(varying)))


def _reorder_block(block: Block, varying: frozenset[str]) -> Block:
    nodes: list[AnyNode] = []
    for key, members in itertools.groupby(block.nodes, _group_of):
        run = [_reorder_inner(node, varying) for node in members]
        if key is None:
            nodes += run
            continue
        parts = [list(part) for _, part in itertools.groupby(run, lambda node: _part_of(node))]
        parts.sort(key=lambda part: max(_rank(node, varying) for node in part))  # stable: equals stay as written
        ids = [node.id for node in run]
        moved = itertools.chain.from_iterable(parts)
        nodes += [dataclasses.replace(node, id=number) for number, node in zip(ids, moved, strict=True)]
    return dataclasses.replace(block, nodes=tuple(nodes))


def _reorder_inner(node: AnyNode, varying: frozenset[str]) -> AnyNode:
    match node:
        case Cond():
            then, otherwise = _reorder_block(node.then, varying), _reorder_block(node.otherwise, varying)
            return dataclasses.replace(node, then=then, otherwise=otherwise)
        case Loop():
            return dataclasses.replace(node, body=_reorder_block(node.body, varying))
        case _:
            return node


def _part_of(node: AnyNode) -> tuple[int, int] | None:
    return node.part if isinstance(node, Append | Media) else None


def _group_of(node: AnyNode) -> tuple[int, int] | None:
    part = _part_of(node)
    return None if part is None else (node.stream, part[0])


def _rank(node: AnyNode, varying: frozenset[str]) -> int:
    ranks = [0]
    for ref in refs_of_node(node):
        ranks.append(3 if isinstance(ref, ValueRef) else 2 if ref.name in varying else 1)
    return max(ranks)


def varying_arguments(arguments: Iterable[Argument], runs: Sequence[Mapping[str, ArgumentValue]]) -> frozenset[str]:
    """The arguments that are not the same in all runs."""
    return frozenset(
        argument.name for argument in arguments if any(run[argument.name] != runs[0][argument.name] for run in runs)
    )


def static_prefix(nodes: Iterable[AnyNode], arguments: Mapping[str, ArgumentValue] | None) -> tuple[PromptItem, ...]:
    """What the nodes of a stream append before anything that has to be computed.

    Args:
        nodes: Of one stream, in program order.
        arguments: What the run gives; None stops before the first argument.
    """
    unknown = ValueRef if arguments is not None else ValueRef | ArgumentRef
    arguments = arguments or {}
    items: list[PromptItem | str] = []
    for node in nodes:
        match node:
            case Append(pieces=pieces):
                known = list(itertools.takewhile(lambda piece: not isinstance(piece, unknown), pieces))
                items.append(known_text(known, arguments))
                if len(known) < len(pieces):
                    break
            case Media(source=source):
                if isinstance(source, unknown):
                    break
                items.append(known_media(node, arguments))
            case Turn(role=role, is_begin=is_begin):
                items.append(RoleBegin(role) if is_begin else RoleEnd(role))
            case Open() | Scope() | Assign() | ReadText():
                pass
            case _:
                break
    return tuple(_joined_texts(items))


def known_text(pieces: Iterable[Piece], arguments: Mapping[str, ArgumentValue]) -> str:
    """The text of pieces that are constants and arguments."""
    return "".join(str(arguments[piece.name]) if isinstance(piece, ArgumentRef) else str(piece) for piece in pieces)


def known_media(node: Media, arguments: Mapping[str, ArgumentValue]) -> Image | Video:
    """The picture or video that a node appends."""
    media = arguments[node.source.name] if isinstance(node.source, ArgumentRef) else node.source
    assert isinstance(media, Image | Video)
    if isinstance(media, Video) and node.num_frames is not None:
        return dataclasses.replace(media, num_frames=node.num_frames)
    return media


def common_prefix(prompts: Sequence[Sequence[PromptItem]]) -> tuple[PromptItem, ...]:
    """What all prompts begin with; () where that is too short to be worth a request."""
    shared: list[PromptItem] = []
    for items in zip(*prompts, strict=False):
        if all(item == items[0] for item in items):
            shared.append(items[0])
            continue
        texts = [item.text for item in items if isinstance(item, Text)]
        if len(texts) == len(items) and (text := _common_text(texts)):
            shared.append(Text(text))
        break
    return tuple(shared) if prefix_size(shared) >= MIN_SHARED else ()


def _common_text(texts: Sequence[str]) -> str:
    least, most = min(texts), max(texts)
    size = next((index for index, char in enumerate(least) if char != most[index]), len(least))
    return least[:size]


def prefix_size(items: Iterable[PromptItem]) -> int:
    """Characters; a picture or a video counts `MIN_SHARED`."""
    size = 0
    for item in items:
        match item:
            case Text(text):
                size += len(text)
            case Image() | Video():
                size += MIN_SHARED
            case _:
                pass
    return size


def _joined_texts(items: Iterable[PromptItem | str]) -> Iterable[PromptItem]:
    for is_text, some in itertools.groupby(items, lambda item: isinstance(item, str)):
        if not is_text:
            yield from cast(Iterable[PromptItem], some)
        elif text := "".join(cast(Iterable[str], some)):
            yield Text(text)


def by_stream(block: Block) -> dict[int, list[AnyNode]]:
    """The nodes of a block, those within its `cond` and `loop` left out, by stream."""
    nodes: dict[int, list[AnyNode]] = {}
    for node in block.nodes:
        nodes.setdefault(node.stream, []).append(node)
    return nodes


def shared_by_calls(
    block: Block, runs: Sequence[Mapping[str, ArgumentValue]]
) -> dict[str, tuple[tuple[int, ...], tuple[PromptItem, ...]]]:
    """What the calls of each program that a block makes begin with, over all runs.

    Returns:
        By program: the streams of one run that begin so, and what is common to them; only where more than one stream
        of all runs does.
    """
    streams = by_stream(block)
    calls: dict[str, list[int]] = {}
    for node in block.nodes:
        if isinstance(node, Open):
            calls.setdefault(node.program, []).append(node.stream)
    shared: dict[str, tuple[tuple[int, ...], tuple[PromptItem, ...]]] = {}
    for program, numbers in calls.items():
        if len(numbers) * len(runs) < 2:
            continue
        prefix = common_prefix([static_prefix(streams[number], run) for run in runs for number in numbers])
        if prefix:
            shared[program] = (tuple(numbers), prefix)
    return shared
