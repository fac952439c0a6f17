"""The front process from its first socket to its exit.

The socket listens at once, so a probe sees 503 rather than a refused connection while the engine loads. One signal
ends the server in order (no new requests, a few seconds for the running ones, then they are aborted), a second one
at once. When the engine dies, streams end with an error and probes see 503 for a moment before the exit.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

import uvicorn

from jsg.config import EngineConfig, ServerConfig
from jsg.engine.child import EngineChild
from jsg.engine.client import EngineClient
from jsg.errors import ConfigError
from jsg.processing.tokenizer import load_tokenizer
from jsg.server.app import create_app
from jsg.server.chat_prompt import ChatPrompt
from jsg.server.front import Front, FrontDoor
from jsg.server.generation import Generator
from jsg.server.progress import StartDisplay

DRAIN_S = 5  # for running requests after a signal
CLOSE_S = 2  # for their last events after the abort
DEATH_NOTICE_S = 1.0  # how long probes see 503 after the engine's death
INTERRUPTED = 130  # exit status after a second signal


async def serve(
    engine: EngineConfig, server: ServerConfig, child: EngineChild, *, tokenizer_dir: Path, started_at: float
) -> None:
    """Serves until a signal comes.

    Args:
        engine: The knobs, with the model under the name that clients see.
        server: The knobs of the front.
        child: The engine process, which may still be loading.
        tokenizer_dir: Where the tokenizer is.
        started_at: `time.monotonic()` at the start of the program, for the message that it is ready.

    Raises:
        ConfigError: The address is not free.
        EngineDeadError: The engine process ended.
        JsgError: What the engine's start raised.
    """
    with StartDisplay() as display:
        client = EngineClient(child, engine, display.show)
        try:
            await _serve(client, child, engine, server, tokenizer_dir, started_at)
        finally:
            await client.close()


async def _serve(
    client: EngineClient,
    child: EngineChild,
    engine: EngineConfig,
    server: ServerConfig,
    tokenizer_dir: Path,
    started_at: float,
) -> None:
    door = FrontDoor()
    listener = _listen(server)
    http = _HttpServer(_uvicorn_config(door, server))
    _end_on_signal(http, client, child)
    serving = asyncio.create_task(http.serve([listener]))
    opening = asyncio.create_task(_open(client, engine, server, tokenizer_dir))
    dying = asyncio.create_task(client.death())
    try:
        await asyncio.wait({serving, opening}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return
        door.front = await opening
        print(_greeting(door.front, listener, time.monotonic() - started_at), flush=True)
        await asyncio.wait({serving, dying}, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            await asyncio.sleep(DEATH_NOTICE_S)
            raise await dying
    finally:
        http.should_exit = True
        await serving
        opening.cancel()
        dying.cancel()


async def _open(client: EngineClient, engine: EngineConfig, server: ServerConfig, tokenizer_dir: Path) -> Front:
    """Loads what the front needs while the engine loads what it needs."""
    tokenizer, _ = await asyncio.gather(asyncio.to_thread(load_tokenizer, tokenizer_dir), client.ready())
    generator = Generator(client, tokenizer, random_seed=engine.random_seed)
    return Front(client, generator, ChatPrompt(tokenizer), engine, server)


@final
class _HttpServer(uvicorn.Server):
    """Uvicorn without its signal handling, which raises the signal again at the end: the exit would be no 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(door: FrontDoor, server: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(door, server),
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=DRAIN_S + CLOSE_S,
    )


def _end_on_signal(http: uvicorn.Server, client: EngineClient, child: EngineChild) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        if http.should_exit:
            child.kill()
            child.remove_directory()
            os._exit(INTERRUPTED)
        http.should_exit = True
        loop.call_later(DRAIN_S, client.abort_all)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)


def _listen(server: ServerConfig) -> socket.socket:
    """Binds the one address that was asked for."""
    if not server.host:
        raise ConfigError("--host must be an address or a host name, but it is empty; name one, such as 127.0.0.1")
    try:
        family, _, _, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"--host and --port must be a free address of this machine, but {server.host} with {server.port} gave: "
            f"{error.strerror}; choose another --port or end what uses it"
        ) from None


def _greeting(front: Front, listener: socket.socket, seconds: float) -> str:
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    url = f"http://{host}:{port}"
    if front.generator.tokenizer.chat_template is None:
        path, body = "/generate", {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 32}}
    else:
        question = {"role": "user", "content": "What is the capital of France?"}
        path, body = "/v1/chat/completions", {"model": front.model_name, "messages": [question], "max_tokens": 64}
    headers = ["Content-Type: application/json"]
    if front.server_config.api_key is not None:
        headers.append("Authorization: Bearer YOUR_KEY")
    command = ["curl", url + path, *(word for header in headers for word in ("-H", header)), "-d", json.dumps(body)]
    return f"{front.model_name} is ready at {url} after {seconds:.1f} s; try:\n\n{shlex.join(command)}\n"
