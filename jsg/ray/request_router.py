"""The part of routing that runs in each front: asks the directory's actor, and does without it where it is late.

Ray pickles the classes of this module by value. So what its callers give to it is made in other modules.
"""

import asyncio
import time
from typing import Any, final

from ray import serve
from ray.serve.request_router import RequestRouter  # pyright: ignore[reportMissingImports]

from jsg.ray.directory import Ticket, by_hash

ACTOR = "directory"
MAX_WAIT_S = 0.05
RETRY_S = 1.0
"""How long a front does without an actor that has failed. Until then each request would look for it."""


@final
class DirectoryHandle:
    """The directory's actor as one loop of a front sees it."""

    def __init__(self) -> None:
        """Looks for the actor when it is first needed."""
        self._actor: Any = None
        self._retry_at = 0.0

    def get(self) -> Any:
        """The actor; None where there is none now."""
        if self._actor is None and time.monotonic() >= self._retry_at:
            try:
                self._actor = serve.get_deployment_actor(ACTOR)
            except ValueError:  # Serve starts another one
                self.lose()
        return self._actor

    def lose(self) -> None:
        """Notes that the actor has failed."""
        self._actor, self._retry_at = None, time.monotonic() + RETRY_S


@final
class PrefixRouter(RequestRouter):
    """Sends a request where the directory says, or else where the hash of its conversation says."""

    def initialize_state(self, **_: Any) -> None:
        """Has no state but the handle of the actor."""
        self._directory = DirectoryHandle()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The candidates, each a rank of its own, best first. Replicas that have failed the request come last."""
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ticket = None if pending_request is None else pending_request.kwargs.get("ticket")
        if not isinstance(ticket, Ticket):
            return [list(named.values())]
        able = [name for name in named if name not in ticket.avoid] or list(named)
        order = by_hash(ticket.prompt.conversation or ticket.key.encode(), able)
        chosen = await self._ask(ticket, able)
        order.sort(key=lambda name: name != chosen)  # stable, so the others stay in their order
        return [[named[name]] for name in (*order, *(name for name in named if name not in able))]

    async def _ask(self, ticket: Ticket, able: list[str]) -> str | None:
        if not ticket.prompt.units or (actor := self._directory.get()) is None:
            return None
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return await actor.route.remote(ticket.front, ticket.key, ticket.prompt, able)
        except TimeoutError:
            return None
        except Exception:  # whatever befell the actor: a request does not depend on it
            self._directory.lose()
            return None
