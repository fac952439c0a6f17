"""A replica: an actor with one `jsg serve`, and one follower actor for each further host."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, final

import aiohttp
import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from jsg.free_ports import free_ports
from jsg.ray.child import Child
from jsg.ray.directory import Pool
from jsg.ray.options import Options
from jsg.ray.prompt import MAX_UNIT_BYTES
from jsg.ray.scaling import load_of, parse_scrape

logger = logging.getLogger(__name__)

POLL_S = 0.2
CHECK_S = 4.0
JOIN_EVERY_S = 1.0
TELL_S = 3.0  # both together are well below directory.MAX_SILENCE_S
WORK = ("jsg:answers_open", "jsg:requests_running", "jsg:requests_waiting")
SAMPLE = (
    "When the ship came in, people who had waited since the morning went down to the water and asked for letters from "
    "their families. Some had to wait for the next one, and others read what they had got twice, because it was short."
)
"""Plain text, to see how many tokens the model's tokenizer makes of it."""


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

    async def __init__(self, options: Options, directory: Any) -> None:
        """Starts the server on all hosts, waits for it, and tells the directory."""
        address = options.host or ray.util.get_node_ip_address()
        port = free_ports(address, 3)
        meeting_port = port + 1
        commands = [options.command(rank, address, port, meeting_port) for rank in range(options.hosts)]
        self._url = f"http://{address}:{port}"
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CHECK_S))
        self._has_cache = "--disable-radix-cache" not in commands[0]
        self._child = Child(commands[0], _end_too)
        self._followers = [_follow(rank, command, options) for rank, command in enumerate(commands) if rank]
        async with asyncio.timeout(options.start_s):
            while not await self._is_ready():
                await asyncio.sleep(POLL_S)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._directory = directory
        pool = await self._measure_pool()
        while not await self._tell(directory.join.remote, self._url, pool):
            await asyncio.sleep(POLL_S)
        self._joining = asyncio.create_task(self._join(pool))

    async def check_health(self) -> None:
        """Raises if the server does not answer, or says that it is not well."""
        async with self._http.get(self._url + "/health") as answer:
            answer.raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `LoadPolicy` reads."""
        return load_of(await self._scrape())

    async def __del__(self) -> None:
        """Serve calls it when it stops a replica, and waits for as long as a drain may take."""
        self._joining.cancel()
        await self._tell(self._directory.leave.remote)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # the server has ended
            while any(map((await self._scrape()).get, WORK)):
                await asyncio.sleep(POLL_S)
        await self._http.close()
        await asyncio.to_thread(self._child.stop)

    async def _join(self, pool: Pool) -> None:
        """Tells the directory from time to time, which may be a new one that knows nothing."""
        while True:
            await asyncio.sleep(JOIN_EVERY_S)
            if await self._is_ready():
                await self._tell(self._directory.join.remote, self._url, pool)

    async def _tell(self, method: Callable[..., Any], *values: Any) -> bool:
        """Whether the directory has heard it. It may have ended, or not begun."""
        try:
            async with asyncio.timeout(TELL_S):
                await method(self._name, *values)
        except Exception:  # whatever befell it
            return False
        return True

    async def _is_ready(self) -> bool:
        try:
            async with self._http.get(self._url + "/ready") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _measure_pool(self) -> Pool:
        scrape, token_bytes = await self._scrape(), float(MAX_UNIT_BYTES)
        async with self._http.post(self._url + "/tokenize", json={"prompt": SAMPLE}) as answer:
            if answer.status == 200:  # it may need a key
                token_bytes = len(SAMPLE) / (await answer.json())["count"]
        unit_bytes = min(max(round(token_bytes), 1), MAX_UNIT_BYTES)
        units = round(scrape["jsg:kv_capacity_tokens"] * token_bytes / unit_bytes)
        return Pool(units * self._has_cache, int(scrape["page_size"]), unit_bytes)

    async def _scrape(self) -> dict[str, float]:
        async with self._http.get(self._url + "/metrics") as answer:
            answer.raise_for_status()
            return parse_scrape(await answer.text())


def _follow(rank: int, command: list[str], options: Options) -> Any:
    """A follower in its bundle of the replica's placement group. The group keeps a bundle for each host."""
    placed = PlacementGroupSchedulingStrategy(ray.util.get_current_placement_group(), placement_group_bundle_index=rank)
    actor = Follower.options(num_cpus=options.cpus, num_gpus=options.num_gpus, scheduling_strategy=placed)
    return actor.remote(command)
