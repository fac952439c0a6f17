"""A replica: an actor with one `jsg serve`, and one follower actor for each further host."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from typing import Any, final

import aiohttp
import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from jsg.ray.child import Child, free_ports
from jsg.ray.directory import Pool
from jsg.ray.options import Options
from jsg.ray.prompt import MAX_UNIT_BYTES
from jsg.ray.scaling import load_of, parse_scrape

logger = logging.getLogger(__name__)

POLL_S = 0.2
CHECK_S = 4.0
WORK = ("jsg:answers_open", "jsg:requests_running", "jsg:requests_waiting")
SAMPLE = (
    "When the ship came in, people who had waited since the morning went down to the water and asked for letters from "
    "their families. Some had to wait for the next one, and others read what they had got twice, because it was short."
)
"""Plain text, to see how many tokens the model's tokenizer makes of it."""
LOST_LEASE_S = 30.0  # longer than a request takes from its lease to the engine, pictures fetched


def _end_too(status: int) -> None:
    """Ends this actor at once, so that Serve replaces it without waiting for failed health checks."""
    logger.error("jsg serve has ended with status %d, and its replica ends too; the log above says why", status)
    os._exit(1)


@ray.remote
class Follower:
    """A further host of a replica. It ends with the replica's actor, which owns it, and with its own `jsg serve`."""

    def __init__(self, command: list[str]) -> None:
        """Starts the command on the host where this actor is."""
        self._child = Child(command, _end_too)


@final
class Replica:
    """One `jsg serve`. It is ready when the constructor returns."""

    async def __init__(self, options: Options) -> None:
        """Starts the server on all hosts, and waits for it."""
        address = options.host or ray.util.get_node_ip_address()
        port, meeting_port = free_ports(address), free_ports(address, 2)
        commands = [options.command(rank, address, port, meeting_port) for rank in range(options.hosts)]
        self._url = f"http://{address}:{port}"
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CHECK_S))
        self._has_cache = "--disable-radix-cache" not in commands[0]
        self._leases: set[asyncio.Event] = set()
        self._sweeping = asyncio.create_task(self._end_lost_leases())
        self._child = Child(commands[0], _end_too)
        self._followers = [_follow(rank, command, options) for rank, command in enumerate(commands) if rank]
        async with asyncio.timeout(options.start_s):
            while not await self._is_ready():
                await asyncio.sleep(POLL_S)
        self._pool = await self._measure_pool()
        self._name = serve.get_replica_context().replica_id.unique_id

    async def lease(self, ticket: str) -> AsyncGenerator[tuple[str, str, Pool]]:
        """The address, name and cache of this replica, which the caller may use while the call is open."""
        is_over = asyncio.Event()
        self._leases.add(is_over)
        try:
            yield self._url, self._name, self._pool
            await is_over.wait()
        finally:
            self._leases.discard(is_over)

    async def check_health(self) -> None:
        """Raises if the server does not answer, or says that it is not well."""
        async with self._http.get(self._url + "/health") as answer:
            answer.raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `LoadPolicy` reads."""
        return load_of(await self._scrape())

    async def __del__(self) -> None:
        """Serve calls it after the last lease has ended."""
        self._sweeping.cancel()
        await self._http.close()
        await asyncio.to_thread(self._child.stop)

    async def _end_lost_leases(self) -> None:
        """Ends the leases of fronts that were killed, because Ray does not end their calls and a drain waits for them.

        The server is asked, since it notices that a front has gone: where it has nothing to do twice in a row, no
        lease that was there the first time is in use.
        """
        unused: set[asyncio.Event] = set()
        while True:
            await asyncio.sleep(LOST_LEASE_S)
            try:
                scrape = await self._scrape()
                is_idle = not any(scrape[name] for name in WORK)
            except (aiohttp.ClientError, TimeoutError):  # it starts, or is busy
                is_idle = False
            for is_over in unused if is_idle else ():
                is_over.set()
            unused = set(self._leases) if is_idle else set()

    async def _is_ready(self) -> bool:
        try:
            async with self._http.get(self._url + "/ready") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _measure_pool(self) -> Pool:
        """The cache, and about how many bytes of text make a token."""
        scrape, unit_bytes = await self._scrape(), MAX_UNIT_BYTES
        async with self._http.post(self._url + "/tokenize", json={"prompt": SAMPLE}) as answer:
            if answer.status == 200:  # it may need a key
                unit_bytes = min(max(round(len(SAMPLE) / (await answer.json())["count"]), 1), MAX_UNIT_BYTES)
        return Pool(int(scrape["jsg:kv_capacity_tokens"]) * self._has_cache, int(scrape["page_size"]), unit_bytes)

    async def _scrape(self) -> dict[str, float]:
        async with self._http.get(self._url + "/metrics") as answer:
            answer.raise_for_status()
            return parse_scrape(await answer.text())


def _follow(rank: int, command: list[str], options: Options) -> Any:
    """A follower in its bundle of the replica's placement group. The group keeps a bundle for each host."""
    placed = PlacementGroupSchedulingStrategy(ray.util.get_current_placement_group(), placement_group_bundle_index=rank)
    actor = Follower.options(num_cpus=options.cpus, num_gpus=options.num_gpus, scheduling_strategy=placed)
    return actor.remote(command)
