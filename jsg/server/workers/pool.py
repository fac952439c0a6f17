"""The worker processes of a server: they read requests and write answers, and the hub has everything else.

                        ┌▶ worker 1 ─┐
    clients ──▶ the hub ┼▶ worker 2 ─┼▶ the hub ──▶ engines
                        └▶ worker 3 ─┘

The hub accepts each connection and gives it to the worker that has least to do. It keeps a descriptor of its own, so
that a request for one of its own endpoints comes back with its connection, and so that it can say a last word to the
clients of a worker that has died. Another worker takes the place of that one. While no worker is there, the hub answers
all requests itself.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import socket
import struct
import sys
from collections import Counter, deque
from collections.abc import Coroutine, Mapping
from typing import final

import numpy as np
from starlette.types import ASGIApp

from jsg.config import EngineConfig, ServerConfig
from jsg.engine.child.passing import WORKER
from jsg.errors import EngineDeadError
from jsg.server.front import Front, FrontDoor
from jsg.server.http.http_protocol import ACCEPTED_AT_ONCE, HttpLimits, most_connections
from jsg.server.opening import CLOSE_S, MOST_WAITING, Directories, HttpServer
from jsg.server.telemetry.metrics import GAUGES
from jsg.server.telemetry.series import Samples, summed
from jsg.server.telemetry.telemetry import Telemetry
from jsg.server.workers.connection import HubConnection
from jsg.server.workers.guest import Guest
from jsg.server.workers.messages import Report, ToHub, WorkerStart
from jsg.server.workers.table import IDLE, NEW, SLOTS, ConnectionTable
from jsg.waits import WaitReason

logger = logging.getLogger(__name__)

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings", "/generate")
"""The endpoints that workers answer, all with POST. What is asked less often, or keeps something, is the hub's."""
STDERR = 2
ACTIVE = 8
"""A connection with a request counts as so many without one."""
SOON_S = 5.0
"""A worker that ends within this time after its start is not replaced before this time has passed."""
REPORT_S = 1.0
MOST_UNANSWERED = 3
"""A worker that has left so many questions for its report unanswered stands still, and gets no connection."""
PAUSE_S = 1.0
"""For so long no connection is accepted where none can be."""
KINDS = 2
"""The connections of a hub: those of its workers, of which it keeps a descriptor, and its own. Each may be so many."""
SLOT = struct.Struct("<I")


def num_workers(server: ServerConfig) -> int:
    """How many workers a server has: none where one process is to do everything.

    One process answers two GPUs: 18 000 tokens/s of an H200 are to 40 000 of a front. Engines on CPUs are slower still.
    """
    num = server.front_processes
    if num is None:
        num = min(server.dp_size // 2, (os.cpu_count() or 1) // 8)
    return num if num > 1 else 0


@final
class _Place:
    """A worker process, and those that follow it.

    Attributes:
        number: Its number, from 1 on.
        states: Its part of the table.
        sockets: The hub's descriptors of its connections, by slot.
        is_ready: It has begun to take connections.
        num_unanswered: How often it was asked for its report since the last one.
        report: What it has counted.
        ended: The totals of those before it, which are `num_ended`.
    """

    def __init__(self, number: int, states: np.ndarray, most: int) -> None:
        """`most` is how many connections it may have."""
        self.number = number
        self.states = states
        self.sockets: dict[int, socket.socket] = {}
        self.is_ready = False
        self.num_unanswered = 0
        self.report = Report({}, {})
        self.num_ended = 0
        self.ended: Mapping[str, Samples] = {}
        self.guest: Guest | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.channel: socket.socket | None = None
        self._unsent = deque[int]()
        self._slots = deque(range(most))

    @property
    def name(self) -> str:
        """The name of the process that is in the place now."""
        return f"{WORKER}{self.number}-{self.num_ended}"

    @property
    def is_up(self) -> bool:
        """Whether it takes connections."""
        return self.is_ready and self.num_unanswered < MOST_UNANSWERED

    @property
    def has_room(self) -> bool:
        """Whether it can get a connection."""
        return self.is_up and bool(self._slots)

    @property
    def load(self) -> int:
        """How much it has to do."""
        return (ACTIVE - 1) * int(np.count_nonzero(self.states)) + len(self.sockets)

    def take(self, connection: socket.socket) -> None:
        """Gives it a connection."""
        slot = self._slots.popleft()
        self.sockets[slot] = connection
        self.states[slot] = NEW
        self._unsent.append(slot)
        self._send()

    def free(self, slot: int) -> socket.socket:
        """Takes a connection from it."""
        self.states[slot] = IDLE
        self._slots.append(slot)
        return self.sockets.pop(slot)

    def clear(self) -> None:
        """It has ended, and so have its connections."""
        if self.channel is not None:
            asyncio.get_running_loop().remove_writer(self.channel.fileno())
            self.channel.close()
        self.guest, self.channel, self.process, self.is_ready, self.num_unanswered = None, None, None, False, 0
        self._unsent.clear()

    def end(self) -> None:
        """Keeps the totals that it has counted, since totals never fall."""
        totals = {name: samples for name, samples in self.report.families.items() if name not in GAUGES}
        self.ended, self.report = summed([self.ended, totals]), Report({}, {})
        self.num_ended += 1

    def _send(self) -> None:
        channel, loop = self.channel, asyncio.get_running_loop()
        assert channel is not None, "only a worker that is ready gets connections"
        try:
            while self._unsent:
                slot = self._unsent[0]
                if slot in self.sockets:
                    socket.send_fds(channel, [SLOT.pack(slot)], [self.sockets[slot].fileno()])
                self._unsent.popleft()
        except BlockingIOError:
            loop.add_writer(channel.fileno(), self._send)
        except OSError:
            pass  # it has ended, which is noticed elsewhere
        else:
            loop.remove_writer(channel.fileno())


@final
class Workers:
    """The workers of a hub.

    Invariant: the hub has a descriptor of each connection of a worker, from when it accepts it until it is given back.
    """

    def __init__(self, num: int, engine: EngineConfig, server: ServerConfig, directories: Directories) -> None:
        """Starts no process before `start`."""
        self._table = ConnectionTable.make(num, PATHS)
        most = min(most_connections(KINDS) // num, SLOTS)
        self._places = [_Place(number, self._table.of_worker(number), most) for number in range(1, num + 1)]
        self._engine = engine
        self._server = server
        self._directories = directories
        self._front: Front | None = None
        self._http: HttpServer
        self._is_ending = self._is_closed = False
        self._tasks = set[asyncio.Task[None]]()

    def hub(self, app: ASGIApp, door: FrontDoor, telemetry: Telemetry) -> HttpServer:
        """The server that answers what workers do not. It must be made before `start`."""
        limits = HttpLimits(connections=most_connections(KINDS))
        self._http = HttpServer(app, door, telemetry, functools.partial(HubConnection, self._give), limits)
        return self._http

    def start(self, listener: socket.socket) -> None:
        """Starts the processes and accepts connections."""
        listener.setblocking(False)
        listener.listen(MOST_WAITING)
        self._listen(listener)
        for place in self._places:
            self._begin(self._keep(place))
        self._begin(self._ask_for_reports())

    def open(self, front: Front) -> None:
        """The engine is ready, so workers may send requests."""
        self._front = front
        for engine in front.client.engines:
            engine.pass_on(self._pass_on)
        for place in self._places:
            if place.guest is not None:
                place.guest.open(front)

    async def ready(self) -> None:
        """Waits until a worker takes connections, or until one could not start."""
        while not any(place.is_ready or place.num_ended for place in self._places):
            await asyncio.sleep(0.01)

    @property
    def num_up(self) -> int:
        """How many take connections."""
        return sum(place.is_up for place in self._places)

    @property
    def has_requests(self) -> bool:
        """Whether a request of a worker is under way. A connection that has sent nothing has none."""
        return any(np.isin(place.states, (IDLE, NEW), invert=True).any() for place in self._places)

    @property
    def families(self) -> list[Mapping[str, Samples]]:
        """What all workers have counted, also those that have ended."""
        return [counted for place in self._places for counted in (place.ended, place.report.families)]

    @property
    def waits(self) -> Counter[WaitReason]:
        """How many HTTP requests wait in workers now, by the reason."""
        waits = Counter[WaitReason]()
        for place in self._places:
            waits.update(place.report.waits)
        return waits

    async def refresh(self, timeout_s: float = REPORT_S) -> None:
        """Asks the workers for their reports, and waits a little for them."""
        asked = [place for place in self._places if place.is_up]
        before = [place.report for place in asked]
        for place in asked:
            self._ask(place)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(place.report is old and place.is_up for place, old in zip(asked, before, strict=True)):
                    await asyncio.sleep(0.002)

    def note_ending(self) -> None:
        """The server ends, so each response ends its connection from now on."""
        self._is_ending = True
        for place in self._places:
            if place.guest is not None:
                place.guest.post().is_ending = True

    async def close(self, listener: socket.socket) -> None:
        """Ends the processes, which have `CLOSE_S` for the last bytes of their responses."""
        self._is_ending = self._is_closed = True
        asyncio.get_running_loop().remove_reader(listener.fileno())
        for place in self._places:
            if place.guest is not None:
                place.guest.post().stop = True
        if self._tasks:
            await asyncio.wait({*self._tasks}, timeout=CLOSE_S + 1)
        for place in self._places:
            if place.process is not None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    place.process.kill()
        for task in [*self._tasks]:
            task.cancel()
        if self._tasks:
            await asyncio.wait({*self._tasks})

    def _pass_on(self, name: str, outputs: bytes) -> None:
        for place in self._places:
            if place.name == name and place.guest is not None:
                place.guest.post().outputs.append(outputs)

    # ---- connections

    def _listen(self, listener: socket.socket) -> None:
        if not self._is_closed:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                logger.exception("no connection can be accepted for %g s", PAUSE_S)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener.fileno())
                loop.call_later(PAUSE_S, self._listen, listener)
                return
            connection.setblocking(False)
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        """Sees to it that a connection is served, of which nothing has been read that was not answered."""
        if not self._give(connection):
            self._begin(self._http.connect(connection))

    def _give(self, connection: socket.socket) -> bool:
        """Gives a connection to the worker that has least to do. False where none can have it."""
        able = [place for place in self._places if place.has_room]
        if able:
            min(able, key=lambda place: place.load).take(connection)
        return bool(able)

    def _note(self, place: _Place, news: ToHub) -> None:
        """The news of a worker that do not concern its requests."""
        for slot in news.closed:
            place.free(slot).close()
        for moved in news.moved:
            self._begin(self._http.connect(place.free(moved.slot), begin=moved.begin))
        if news.report is not None:
            place.report, place.num_unanswered = news.report, 0
        place.is_ready = place.is_ready or news.is_ready

    # ---- processes

    async def _keep(self, place: _Place) -> None:
        """Runs a worker, and another one after its end."""
        loop = asyncio.get_running_loop()
        while not self._is_ending:
            began = loop.time()
            try:
                ended = f"exit status {await self._run(place)}"
            except Exception as error:  # no process can be started, perhaps for a while
                ended = f"{type(error).__name__}: {error}"
            finally:
                self._end_connections(place)
            if self._is_ending:
                return
            place.end()
            logger.error("worker %d ended (%s); another takes its place", place.number, ended)
            await asyncio.sleep(max(0.0, began + SOON_S - loop.time()))

    async def _run(self, place: _Place) -> int:
        place.channel, channel = socket.socketpair()
        with channel, contextlib.closing(Guest(lambda news: self._note(place, news))) as guest:
            place.guest = guest
            if self._front is not None:
                guest.open(self._front)
            place.channel.setblocking(False)
            process = place.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "jsg.server.workers.process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=STDERR,
                process_group=0,
                pass_fds=(channel.fileno(), self._table.fd),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            guest.reading.add_done_callback(functools.partial(_end_unread, process))
            assert process.stdin is not None, "it is a pipe"
            # Keys are in it, which arguments would show.
            process.stdin.write(json.dumps(dataclasses.asdict(self._start_of(place, guest, channel))).encode())
            process.stdin.close()
            channel.close()
            return await process.wait()

    def _start_of(self, place: _Place, guest: Guest, channel: socket.socket) -> WorkerStart:
        return WorkerStart(
            number=place.number,
            name=place.name,
            seed=self._engine.random_seed + (place.num_ended * len(self._places) + place.number) * 2**32,
            engine=self._engine,
            server=self._server,
            tokenizer_dir=str(self._directories.tokenizer),
            model_dir=None if self._directories.model is None else str(self._directories.model),
            address=guest.address,
            connections_fd=channel.fileno(),
            table_fd=self._table.fd,
            parent_pid=os.getpid(),
        )

    def _end_connections(self, place: _Place) -> None:
        """Tells the clients of a worker that has ended what became of their requests; others get another worker."""
        error = EngineDeadError("the process that answered this request ended; send it again")
        place.clear()
        for slot in [*place.sockets]:
            state, connection = int(place.states[slot]), place.free(slot)
            if state in (IDLE, NEW) and not self._is_closed:
                self._serve(connection)
                continue
            with contextlib.suppress(OSError):
                connection.send(self._table.last_words(state, error))
                connection.shutdown(socket.SHUT_WR)
            if self._is_closed:
                connection.close()
            else:
                self._begin(_close_later(connection))

    async def _ask_for_reports(self) -> None:
        """Asks all workers again and again, and ends those that have stood still for `--watchdog-timeout`."""
        while not self._is_ending:
            for place in self._places:
                if place.is_ready:
                    self._ask(place)
                    place.num_unanswered += 1
                if place.num_unanswered * REPORT_S > self._engine.watchdog_timeout and place.process is not None:
                    logger.error("worker %d stands still for too long (--watchdog-timeout); it is ended", place.number)
                    place.process.kill()
            await asyncio.sleep(REPORT_S)

    def _ask(self, place: _Place) -> None:
        if place.guest is not None:
            place.guest.post().wants_report = True

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _end_unread(process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
    """Ends a worker whose messages cannot be read, rather than that its clients wait for ever."""
    if not reading.cancelled() and (error := reading.exception()):
        logger.error("a message of a worker cannot be read; the worker is ended", exc_info=error)
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def _close_later(connection: socket.socket) -> None:
    """Closes a connection once a client that still sends has read the last words, which it might lose otherwise."""
    with connection:
        await asyncio.sleep(HttpLimits().linger_s)
