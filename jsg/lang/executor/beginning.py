"""The constant beginning of a graph that runs many times: it is executed once, and each run goes on from a copy."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping

from jsg.lang.executor.arguments import ArgumentValue
from jsg.lang.executor.driver import Pace, known_item, place_of
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import MAIN_STREAM, AnyNode, Append, ArgumentRef, Media, Open, Turn, refs
from jsg.lang.graphs.reorder import reorder
from jsg.lang.streams.loop import running_loop
from jsg.lang.streams.stream import Stream
from jsg.lang.words.backend import Backend


@dataclasses.dataclass(frozen=True, slots=True)
class Beginning:
    """What all runs of a graph have in common.

    Attributes:
        graph: What each run still has to execute.
        stream: The program's own stream so far, of which each run takes a copy; None where it is empty.
    """

    graph: Graph
    stream: Stream | None = None


async def begin(
    graph: Graph,
    backend: Backend,
    arguments: Mapping[str, ArgumentValue],
    varying: Collection[str],
    pace: Pace | None = None,
) -> Beginning:
    """Executes what a graph's own stream appends before the first call of the model and the first value of one run.

    Args:
        graph: A well-formed graph.
        backend: The backend, on this loop. Its sessions are `CopySession`s.
        arguments: The arguments of any of the runs.
        varying: The arguments that are not equal in all runs.
        pace: As in `execute`.
    """
    graph = reorder(graph, varying)
    opened, *nodes = graph.block.nodes
    assert isinstance(opened, Open)
    own = (node for node in nodes if node.stream == MAIN_STREAM)
    constant = list(itertools.takewhile(lambda node: _is_constant(node, varying), own))
    open_session = functools.partial(backend.open, num_api_spec_tokens=opened.num_api_spec_tokens)
    stream = Stream(running_loop(), open_session)
    try:
        for node in constant:
            if pace is not None:
                await pace()
            stream.append(known_item(node, arguments), place_of(node))
        await stream.read("nothing").get()
    except Exception:  # each run finds it again, and says where
        return Beginning(graph)
    done = frozenset(node.id for node in constant)
    rest = tuple(node for node in graph.block.nodes if node.id not in done)
    left = dataclasses.replace(graph, block=dataclasses.replace(graph.block, nodes=rest))
    return Beginning(left, stream) if constant else Beginning(graph)


def _is_constant(node: AnyNode, varying: Collection[str]) -> bool:
    return isinstance(node, Append | Media | Turn) and all(
        isinstance(ref, ArgumentRef) and ref.name not in varying for ref in refs(node)
    )
