"""What a process that answers HTTP opens: tokenizer, reader of pictures, the `Front`, and uvicorn."""

import asyncio
import contextlib
import dataclasses
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast, final

import uvicorn
from starlette.types import ASGIApp

from jsg.config import EngineConfig, ServerConfig
from jsg.engine.front.served import ServedEngine
from jsg.engine.media_reader import ModelMediaReader
from jsg.malloc import set_thresholds
from jsg.processing.media_prompt import MediaReader
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.server.front import Front, FrontDoor
from jsg.server.generation import Generator
from jsg.server.http.access import KeyRing
from jsg.server.http.http_protocol import ACCEPTED_AT_ONCE, HttpConnection, HttpLimits, http_protocol
from jsg.server.limits import Admission
from jsg.server.media_sources import MediaSources, media_limits
from jsg.server.telemetry.telemetry import Telemetry
from jsg.server.text_threads import TextThreads
from jsg.speech.prompts.chat_prompt import ChatPrompt

MOST_WAITING = 2048  # connections that the kernel keeps until they are accepted
CLOSE_S = 2  # for the last bytes of responses under way
MMAP_THRESHOLD_BYTES = 128 * 2**10  # glibc's own at the start


@dataclasses.dataclass(frozen=True, slots=True)
class Directories:
    """The directories of the files that a process which answers HTTP reads."""

    tokenizer: Path
    model: Path | None

    def load(self, server: ServerConfig) -> tuple[Tokenizer, MediaReader | None]:
        """The tokenizer, and the reader of pictures for a model that sees."""
        tokenizer = load_tokenizer(self.tokenizer)
        if self.model is None:
            return tokenizer, None
        return tokenizer, ModelMediaReader.of_model(self.model, tokenizer, media_limits(server))


async def open_front(
    client: ServedEngine,
    engine: EngineConfig,
    server: ServerConfig,
    telemetry: Telemetry,
    directories: Directories,
    threads: TextThreads,
    *,
    admission: Admission | None = None,
    seed: int | None = None,
) -> Front:
    """Loads the tokenizer and the reader of pictures while the engine loads the model.

    Args:
        client: The engine, or several.
        engine: The engine's options.
        server: The options of the server.
        telemetry: It observes what is generated.
        directories: The directories of tokenizer and model.
        threads: They read texts.
        admission: It lets requests in; None for one of this process.
        seed: The seed of requests that give none; None for `--random-seed`.

    Raises:
        EngineDeadError: The engine process ended.
        JsgError: The engine's start raised it.
    """
    (tokenizer, reader), _ = await asyncio.gather(asyncio.to_thread(directories.load, server), client.ready())
    has_several_keys = KeyRing.of(server).has_several_users
    if has_several_keys:
        client.take_turns()
    generator = Generator(
        client,
        tokenizer,
        random_seed=engine.random_seed if seed is None else seed,
        threads=threads,
        config=server,
        observers=telemetry.observers,
        has_several_keys=has_several_keys,
        admission=admission,
    )
    info = client.info
    chat = ChatPrompt(tokenizer, info.max_request_tokens, reader, caches_states=info.caches_states)
    return Front(client, generator, chat, threads, engine, server, MediaSources(reader, threads, server))


@final
class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handling, which raises the signal again at the end: the exit status would not be 0.

    It lets more connections wait to be accepted than it accepts at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        door: FrontDoor,
        telemetry: Telemetry,
        connection: Callable[..., HttpConnection] = HttpConnection,
        limits: HttpLimits | None = None,
    ) -> None:
        """A server of an app, whose connections this class, or what stands for it, makes; see `http_protocol`."""
        super().__init__(
            uvicorn.Config(
                app,
                http=http_protocol(
                    limits, is_ending=lambda: door.is_ending, on_refusal=telemetry.on_refusal, connection=connection
                ),
                ws="none",
                backlog=ACCEPTED_AT_ONCE,
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(MOST_WAITING)

    async def connect(self, connection: socket.socket, **given: object) -> None:
        """Serves a connection that was accepted elsewhere. Its protocol is given `given` too."""

        def protocol() -> asyncio.Protocol:
            make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
            return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state, **given)

        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


def give_back_buffers() -> None:
    """Keeps large buffers out of glibc's heap, by fixing its threshold for large blocks at the initial value.

    asyncio receives into buffers of 256 KiB. By default glibc raises the threshold to the size of a freed buffer, so
    that further buffers are in the heap and leave holes there: in 39 000 requests the free heap grew from 3.5 to 9.6 MB
    while 18 MB stayed in use.
    """
    if sys.platform == "linux":
        set_thresholds(MMAP_THRESHOLD_BYTES)
