"""The front process from its first socket to its exit.

The socket listens at once, so a probe sees 503 rather than a refused connection while the engine loads. A first signal
ends the server in order (`ending.py`). When the engine, or the last of several, dies, streams end with an error, and
probes see 503 for a moment before the exit.
"""

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Never

from jsg.config import EngineConfig, ServerConfig
from jsg.engine.child.log import ServerLog
from jsg.engine.child.log_relay import json_line
from jsg.engine.child.parent import end_at_once
from jsg.engine.front.children import EngineChild
from jsg.engine.front.fleet import open_engines
from jsg.engine.front.served import ServedEngine
from jsg.errors import ConfigError, JsgError
from jsg.server.app import create_app
from jsg.server.ending import EndRequest, drain, on_signals
from jsg.server.front import Front, FrontDoor, public_name
from jsg.server.garbage import collect_garbage
from jsg.server.http.access import has_keys
from jsg.server.http.http_protocol import allow_more_files
from jsg.server.opening import MOST_WAITING, Directories, HttpServer, give_back_buffers, open_front
from jsg.server.progress import StartDisplay
from jsg.server.service_manager import READY, notify
from jsg.server.telemetry.telemetry import Telemetry
from jsg.server.workers.pool import KINDS, Workers, num_workers

logger = logging.getLogger(__name__)

FIRST_REQUEST_S = 1.0
"""For so long after it is ready the server begins no other work: the request that it was started for comes now."""
DEATH_NOTICE_S = 1.0  # probes see 503 for so long after the engine's death


async def serve(
    engine: EngineConfig,
    server: ServerConfig,
    children: Sequence[EngineChild],
    *,
    tokenizer_dir: Path,
    started_at: float,
    model_dir: Path | None = None,
    log: ServerLog | None = None,
) -> None:
    """Serves until a signal comes. This process must do nothing else.

    Args:
        engine: The engine's knobs, with the model under the name that clients see.
        server: The front's knobs.
        children: The engine processes, which may still be loading.
        tokenizer_dir: The directory of the tokenizer.
        started_at: `time.monotonic()` at the start of the program, for the greeting.
        model_dir: The directory of the model, which says how it takes pictures; None for one that sees nothing.
        log: The log process, if there is one.

    Raises:
        ConfigError: The address is not free, or a key, an origin or an option of telemetry cannot work.
        EngineDeadError: The engine process ended; of several, all of them.
        JsgError: The engine's start raised it.
    """
    give_back_buffers()
    allow_more_files(KINDS if num_workers(server) else 1)
    # First, because whoever sees that the server listens may send a signal.
    told_to_end = on_signals(EndRequest(server), children)
    directories, greet = Directories(tokenizer_dir, model_dir), functools.partial(_print, server.log_format)
    with StartDisplay(log) as display:
        client = open_engines(children, engine, display.show)
        tidying = asyncio.create_task(_tidy(client))  # here, because it is for a process that does nothing else
        try:
            await serve_until(told_to_end, client, engine, server, directories, started_at, greet)
        finally:
            tidying.cancel()


async def serve_to_end(*args: Any, log: ServerLog | None = None, **kwargs: Any) -> Never:
    """As `serve`, but where that would return, the process ends with status 0: nothing is left to be done."""
    await serve(*args, log=log, **kwargs)
    if log is not None:
        log.close()
    end_at_once(0)


async def serve_until(
    told_to_end: EndRequest,
    client: ServedEngine,
    engine: EngineConfig,
    server: ServerConfig,
    directories: Directories,
    started_at: float,
    greet: Callable[[str], None],
) -> None:
    """Serves until it is told to end, and closes the client. Raises as `serve` does.

    `greet` takes the greeting of a ready server; see `serve` for the other arguments.
    """
    try:
        name = server.served_model_name or public_name(engine.model_path)
        telemetry = Telemetry(server, name, started_at=started_at)
        async with telemetry.running():
            await _serve(told_to_end, client, engine, server, telemetry, directories, started_at, greet)
    finally:
        await client.close()


async def _serve(
    told_to_end: EndRequest,
    client: ServedEngine,
    engine: EngineConfig,
    server: ServerConfig,
    telemetry: Telemetry,
    directories: Directories,
    started_at: float,
    greet: Callable[[str], None],
) -> None:
    door = FrontDoor()
    workers = Workers(num, engine, server, directories) if (num := num_workers(server)) else None
    app = create_app(door, server, telemetry)
    http = HttpServer(app, door, telemetry) if workers is None else workers.hub(app, door, telemetry)
    listener = _listen(server)
    _warn_if_open_to_all(listener, server)
    serving = asyncio.create_task(http.serve([] if workers else [listener]))
    if workers is not None:
        telemetry.add_workers(workers)
        await asyncio.sleep(0)  # uvicorn starts
        workers.start(listener)
    opening = asyncio.create_task(open_front(client, engine, server, telemetry, directories, door.threads))
    dying = asyncio.create_task(client.death())
    ending = asyncio.create_task(told_to_end.is_made.wait())
    warming = asyncio.create_task(client.grammars.warm())  # while the engine loads

    def has_requests() -> bool:
        return bool(http.server_state.tasks) or (workers is not None and workers.has_requests)

    try:
        await asyncio.wait({serving, opening, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            return
        door.front = await opening
        if workers is not None:
            workers.open(door.front)
            await workers.ready()
        greet(_greeting(door.front, listener, time.monotonic() - started_at))
        notify(READY)
        await asyncio.wait({serving, dying, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not dying.done():
            if workers is not None:
                workers.note_ending()
            draining = asyncio.create_task(drain(told_to_end, door, has_requests))
            await asyncio.wait({draining, dying}, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
        if dying.done():
            await asyncio.sleep(DEATH_NOTICE_S)
            raise await dying
    finally:
        http.should_exit = True
        if workers is not None:
            await workers.close(listener)
            listener.close()
        await serving
        for task in (opening, dying, ending, warming):
            task.cancel()
        door.threads.close()


async def _tidy(client: ServedEngine) -> None:
    """Collects garbage from the first request on. Who waits for the engine is told if it does not start."""
    with contextlib.suppress(JsgError):
        await client.ready()
        await asyncio.sleep(FIRST_REQUEST_S)
        await collect_garbage(lambda: sum(each.num_under_way for each in client.engines))


def _listen(server: ServerConfig) -> socket.socket:
    """Listens at the address that `--host` and `--port` name. Raises ConfigError."""
    if not server.host:
        raise ConfigError("--host must be an address or a host name, but it is empty; name one, such as 127.0.0.1")
    try:
        family, _, _, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family, backlog=MOST_WAITING)
        # Connections inherit this option. asyncio sets it only on sockets that say they are TCP, which these do not.
        # Without it a response of two writes waits 40 ms until the client has acknowledged the first write.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ConfigError(
            f"--host and --port must be a free address of this machine, but {server.host} with {server.port} gave: "
            f"{error.strerror}; choose another --port, or end the process that uses it"
        ) from None


def _warn_if_open_to_all(listener: socket.socket, server: ServerConfig) -> None:
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    if not address.is_loopback and not has_keys(server):
        logger.warning(
            "the server listens beyond this machine and asks for no key: everybody who reaches it may use it; set "
            "--api-key-file, or leave out --host"
        )


def _print(log_format: str, text: str) -> None:
    """Prints to stdout, as JSON where the log is JSON, because many collect both together."""
    print(json_line("INFO", "front", text) if log_format == "json" else text, flush=True)


def _greeting(front: Front, listener: socket.socket, seconds: float) -> str:
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    url = f"http://{host}:{port}"
    if front.generator.info.embedder is not None:
        path, body = "/v1/embeddings", {"input": "Once upon a time"}
    elif front.generator.tokenizer.chat_template is None:
        path, body = "/generate", {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 32}}
    else:
        question = {"role": "user", "content": "What is the capital of France?"}
        path, body = "/v1/chat/completions", {"model": front.model_name, "messages": [question], "max_tokens": 64}
    headers = ["Content-Type: application/json"]
    if has_keys(front.server_config):
        headers.append("Authorization: Bearer YOUR_KEY")
    command = ["curl", url + path, *(word for header in headers for word in ("-H", header)), "-d", json.dumps(body)]
    page = "" if front.server_config.no_page else "open it in a browser, or "
    return f"{front.model_name} is ready at {url} after {seconds:.1f} s; {page}try:\n\n{shlex.join(command)}\n"
