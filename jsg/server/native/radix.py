"""Endpoints that show the prefix cache as it is, and as it changes."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Annotated, Any, final

import numpy as np
from fastapi import Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from jsg.engine.front.tree_copy import Change, TreeNode
from jsg.engine.front.tree_feed import LOOK_S, TreeFeed
from jsg.errors import RequestError
from jsg.server.caller import Caller, CurrentCaller
from jsg.server.front import Front, ReadyFront
from jsg.server.http.event_stream import Event, respond_with_events
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.server.native.admin import check_admin
from jsg.server.native.info import answer_in_time
from jsg.server.native.radix_view import TOP, View

MAX_NODES = 20_000
MAX_TOLD = 2000
"""The most nodes of a tree whose changes are sent, and which is drawn on the event loop."""
MAX_CHANGES = 5000
"""The most changes that wait for a reader. One that reads too slowly gets a snapshot in their place."""
MAX_TEXT_CHARS = 200
FOLDED_S = 1.0
FOLDED_SHARE = 0.1
"""A folded tree is drawn again after a second, and in at most this share of the time."""
BEAT_S = 15.0

router = new_router()


class RadixQuery(BaseModel):
    """What `/debug/radix` shows."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(
        2000,
        ge=1,
        le=MAX_NODES,
        description="The largest number of nodes to show. Of more, the smallest subtrees are folded. Changes are sent "
        f"of at most {MAX_TOLD} nodes; a tree of more is sent again as a snapshot.",
    )
    root: int | None = Field(None, ge=1, description="The id of the node whose subtree to show.")
    engine: int = Field(0, ge=0, description="The number of the engine, if there are several.")
    text: bool = Field(False, description="Show how the text of each node begins. Only admins may.")


@router.get("/debug/radix")
async def radix(query: Annotated[RadixQuery, Query()], caller: CurrentCaller, front: ReadyFront) -> Response:
    """Shows the prefix cache: lengths, holders, ages and hits. Who is no admin sees the nodes of their own key."""
    reader = _reader(query, caller, front)
    with reader.feed.listening(reader):
        return json_response(await answer_in_time(front, reader.snapshot()))


@router.get("/debug/radix/events", responses={200: {"content": {"text/event-stream": {}}}})
async def radix_events(
    query: Annotated[RadixQuery, Query()], caller: CurrentCaller, front: ReadyFront, request: Request
) -> Response:
    """Sends events: first a `snapshot`, which is what `/debug/radix` shows, and then each `delta`."""
    reader = _reader(query, caller, front)
    return respond_with_events(request, reader.events(front), named=True, beat_s=BEAT_S)


def _reader(query: RadixQuery, caller: Caller, front: Front) -> "_Reader":
    engines = front.client.engines
    if query.engine >= len(engines):
        raise RequestError(f"engine must be below {len(engines)}, but got {query.engine}", param="engine")
    if query.text:
        check_admin(caller, "text=true shows the prompts of all keys")
    tree = engines[query.engine].tree
    view = View(query.limit, query.root, None if caller.is_admin else caller.namespace(), tree.secret)
    decode = functools.partial(front.generator.tokenizer.decode, skip_special_tokens=False) if query.text else None
    head = {"engine": query.engine, "page_size": front.client.info.page_size}
    return _Reader(tree, view, head, decode, None if caller.is_admin else caller.tenant)


@final
class _Reader:
    """Somebody who looks at the tree of one engine.

    Who sees one namespace gets events only when it has changed, and no number that depends on others.

    Invariant: unless `_is_stale`, what was sent, `_changes` and the copy's pool make what the view shows now.
    """

    def __init__(
        self,
        feed: TreeFeed,
        view: View,
        head: dict[str, int],
        decode: Callable[[Iterable[int]], str] | None,
        owner: str | None,
    ) -> None:
        self.feed = feed
        self.wants_tokens = decode is not None
        self.owner = owner
        self._view = view
        self._head = head
        self._decode = decode
        self._woken = asyncio.Event()
        self._error: Exception | None = None
        self._is_stale = True
        self._cursor = 0  # of the last event: the version of the copy, or for one namespace the number of events
        self._own: dict[int, TreeNode] = {}  # what was sent of the only namespace that is seen
        self._root = view.root  # as the tree numbers it
        self._shown: set[int] | None = None  # None while what is shown is folded
        self._changes: list[Change] = []
        self._due = 0.0

    # What the feed calls.

    def on_look(self, changes: list[Change] | None) -> None:
        """Keeps the changes that the reader sees."""
        if changes is None or (self._shown is None and self._concerns(changes)):
            self._is_stale = True
        elif self._shown is not None and not self._is_stale:
            self._changes += [change for change in changes if self._sees(change, self._shown)]
            self._is_stale |= len(self._changes) > MAX_CHANGES or len(self._shown) > self._most_told
        self._woken.set()

    def on_error(self, error: Exception) -> None:
        """Ends the reading."""
        self._error = error
        self._woken.set()

    def _concerns(self, changes: list[Change]) -> bool:
        """Whether what is shown, and is folded, is other than what was sent."""
        if self._view.namespace is None:
            return self.feed.copy.version != self._cursor
        own = {*self._own}
        return max((self._sees(change, own) for change in changes), default=False)  # each, because `own` grows

    def _sees(self, change: Change, shown: set[int]) -> bool:
        match change:
            case ("split", int(upper), int(lower), _):
                self._is_stale |= lower == self._root  # the upper half is above the root
                is_seen = lower in shown
                if is_seen:
                    shown.add(upper)
            case ("insert", int(new), int(parent), _):
                is_seen = parent in shown if parent != TOP else self._is_own_top(new)
                if is_seen:
                    shown.add(new)
            case ("evict", int(gone)):
                self._is_stale |= gone == self._root
                is_seen = gone in shown
                shown.discard(gone)
            case _:
                is_seen = change[1] in shown
        return is_seen

    def _is_own_top(self, new: int) -> bool:
        if self._view.root is not None:
            return False
        return self._view.namespace in (None, self.feed.copy.nodes[new].namespace)

    # What is sent.

    async def events(self, front: Front) -> AsyncGenerator[Event]:
        """A snapshot, and then deltas, or a snapshot where the deltas would be too many or are not known."""
        with self.feed.listening(self):
            yield await answer_in_time(front, self.snapshot())
            while True:
                await self._news()
                if self._is_stale:
                    if (event := await self._draw()) is not None:
                        yield event
                elif self._changes or (self._view.namespace is None and self.feed.copy.version != self._cursor):
                    yield self._delta()

    async def snapshot(self) -> Event:
        """All that is shown, as of the next look."""
        await self._news()
        return await self._draw() or {}

    async def _news(self) -> None:
        """Waits for a look that something may be sent of. Raises what the engine raised."""
        while True:
            await self._woken.wait()
            await asyncio.sleep(self._due - time.monotonic())
            self._woken.clear()
            if self._error is not None:
                raise self._error
            if self.feed.copy.is_whole:  # else it was begun anew meanwhile, and a look follows when it is whole
                return

    async def _draw(self) -> Event | None:
        """A snapshot; None where the reader sees one namespace and has been sent all that it shows."""
        copy = self.feed.copy
        nodes, start, now = [*copy.nodes.values()], time.monotonic(), time.time()
        event = self._event("snapshot", now)
        is_small = len(nodes) <= self._most_told
        self._is_stale, self._shown = False, None
        self._changes.clear()

        def draw() -> tuple[list[TreeNode], dict[str, Any], dict[int, TreeNode]]:
            shown, drawn = self._view.draw(nodes, now)
            own = {} if self._view.namespace is None else {node.id: node for node in self._view.seen(nodes)}
            return shown, drawn | self._texts(shown), own

        shown, drawn, own = draw() if is_small else await asyncio.to_thread(draw)
        self._shown = {node.id for node in shown} if is_small else None
        if self._view.root is not None and shown:
            self._root = shown[0].id
        is_known = self._view.namespace is not None and self._cursor > 1 and _alike(own, self._own)
        self._own = own
        took_s = time.monotonic() - start
        self._due = start + (LOOK_S if is_small else max(FOLDED_S, took_s / FOLDED_SHARE))
        if is_known:
            self._cursor -= 1
            return None
        return event | drawn

    @property
    def _most_told(self) -> int:
        return min(self._view.limit, MAX_TOLD)

    def _delta(self) -> Event:
        changes, self._changes = self._changes, []
        self._due = time.monotonic() + LOOK_S
        nodes = self.feed.copy.nodes
        told = {part for change in changes for part in change[1:3] if change[0] == "split"}
        told |= {change[1] for change in changes if change[0] == "insert"}
        texts = self._texts(nodes[number] for number in told if number in nodes)
        if self._view.namespace is not None:
            self._note(changes)
            changes = [self._named(change) for change in changes]
        num_nodes = len(nodes) if self._view.namespace is None else len(self._own)
        size = {"num_nodes": num_nodes} if self._view.root is None else {}
        return self._event("delta", time.time()) | size | {"changes": changes} | texts

    def _note(self, changes: list[Change]) -> None:
        """Remembers what is sent of the only namespace that is seen."""
        nodes = self.feed.copy.nodes
        for number in {part for change in changes for part in change[1 : _num_ids(change) + 1]}:
            if number in nodes:
                self._own[int(number)] = nodes[int(number)]
            else:
                self._own.pop(int(number), None)

    def _named(self, change: Change) -> Change:
        end = _num_ids(change) + 1
        return (change[0], *(self._view.name(int(part)) for part in change[1:end]), *change[end:])

    def _event(self, kind: str, now: float) -> Event:
        copy = self.feed.copy
        is_own = self._view.namespace is not None
        self._cursor = self._cursor + 1 if is_own else copy.version
        event = {"type": kind, "cursor": self._cursor, "time": now, **self._head}
        return event if is_own else event | {"pool": copy.pool}

    def _texts(self, nodes: Iterable[TreeNode]) -> dict[str, Any]:
        decode = self._decode
        if decode is None:
            return {}
        return {
            "texts": {node.id: decode(np.frombuffer(node.tokens, np.int32).tolist())[:MAX_TEXT_CHARS] for node in nodes}
        }


def _num_ids(change: Change) -> int:
    """How many numbers of nodes a change begins with, behind its name."""
    return 2 if change[0] in ("split", "insert") else 1


def _alike(some: dict[int, TreeNode], others: dict[int, TreeNode]) -> bool:
    """Whether two states of a tree differ in nothing that a change tells."""

    def told(nodes: dict[int, TreeNode]) -> dict[int, tuple[int, int, int, int, bool]]:
        return {n.id: (n.parent, n.length, n.holders, n.hits, n.is_usable) for n in nodes.values()}

    return told(some) == told(others)
