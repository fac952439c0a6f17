"""A worker process: `python -m jsg.server.workers.process`, with a `WorkerStart` as JSON on its stdin."""

import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path
from typing import cast

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from jsg.engine.child.log import log_to_stderr
from jsg.engine.child.parent import die_with_parent, end_at_once
from jsg.engine.front.served import ServedEngine
from jsg.server.app import create_app
from jsg.server.front import FrontDoor, public_name
from jsg.server.garbage import collect_garbage
from jsg.server.http.failures import failure_response
from jsg.server.http.http_protocol import ACCEPTED_AT_ONCE, allow_more_files
from jsg.server.http.root_path import checked_root_path
from jsg.server.opening import Directories, HttpServer, give_back_buffers, open_front
from jsg.server.telemetry.telemetry import Telemetry
from jsg.server.workers.client import HubAdmission, HubClient
from jsg.server.workers.connection import WorkerConnection, WorkerConnections
from jsg.server.workers.messages import FromHub, Report, WorkerStart
from jsg.server.workers.pool import PATHS, SLOT
from jsg.server.workers.table import ConnectionTable


async def work(start: WorkerStart) -> None:
    """Answers requests until the hub says stop."""
    give_back_buffers()
    allow_more_files()
    server = start.server
    telemetry = Telemetry(server, server.served_model_name or public_name(start.engine.model_path))
    door = FrontDoor()

    def take(message: FromHub) -> None:
        door.is_ending = door.is_ending or message.is_ending
        if message.wants_report:
            client.report(Report(telemetry.counted(), telemetry.waits))

    client = HubClient(start.address, start.name, take)
    table = ConnectionTable(start.table_fd, PATHS)
    shared = WorkerConnections(table, start.number, client.give_back, checked_root_path(server.root_path))
    http = HttpServer(
        _only(shared, create_app(door, server, telemetry)),
        door,
        telemetry,
        lambda *args, **kwargs: WorkerConnection(shared, *args, **kwargs),
    )
    directories = Directories(Path(start.tokenizer_dir), None if start.model_dir is None else Path(start.model_dir))
    async with telemetry.running():
        serving = asyncio.create_task(http.serve([]))
        served = cast(ServedEngine, client)  # the hub answers the endpoints that need more of an engine
        admission = HubAdmission(server, client)
        door.front = await open_front(
            *(served, start.engine, server, telemetry, directories, door.threads),
            admission=admission,
            seed=start.seed,
        )
        client.note_ready()
        taking = asyncio.create_task(_take_connections(socket.socket(fileno=start.connections_fd), http, client))
        tidying = asyncio.create_task(collect_garbage(lambda: client.num_under_way))
        await asyncio.wait({asyncio.create_task(client.has_stopped.wait()), taking}, return_when="FIRST_COMPLETED")
        tidying.cancel()
        taking.cancel()
        http.should_exit = True
        await serving
    await client.close()


async def _take_connections(channel: socket.socket, http: HttpServer, client: HubClient) -> None:
    """Serves the connections that come, until the hub is gone."""
    channel.setblocking(False)
    loop = asyncio.get_running_loop()
    has_come = asyncio.Event()
    loop.add_reader(channel.fileno(), has_come.set)
    try:
        while True:
            await has_come.wait()
            has_come.clear()
            beginning = []
            with contextlib.suppress(BlockingIOError):
                while len(beginning) < ACCEPTED_AT_ONCE:
                    slot, fds, _, _ = socket.recv_fds(channel, SLOT.size, 1)
                    if not slot:
                        return
                    if fds:
                        beginning.append(http.connect(socket.socket(fileno=fds[0]), slot=SLOT.unpack(slot)[0]))
                    else:  # this process may open no more
                        client.give_back(SLOT.unpack(slot)[0], None)
            await asyncio.gather(*beginning)
    finally:
        loop.remove_reader(channel.fileno())


def _only(shared: WorkerConnections, app: ASGIApp) -> ASGIApp:
    """The app, but for requests that came together with another one on a connection, and are not for a worker."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if shared.path_of(f"{scope['method']} {scope['raw_path'].decode()}".encode()) is None:
            refused = "a request for this endpoint must not be sent before the response to another one; send it again"
            response = failure_response(scope, 421, refused, {"Connection": "close"})
            await response(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


def main() -> None:
    """Runs the worker that stdin describes."""
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerStart)
    log_to_stderr(f"worker-{start.number}")
    die_with_parent(start.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # a service manager sends them to all processes; the hub stops this
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(work(start))
    end_at_once(0)


if __name__ == "__main__":
    main()
