"""What the endpoints share: the engine's client and, once the engine is ready, what generates with it."""

import functools
import time
from pathlib import Path
from typing import Annotated, final

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from jsg.config import EngineConfig, ServerConfig
from jsg.engine.front.client import EngineClient
from jsg.engine.front.served import ServedEngine
from jsg.errors import ModelNotFoundError
from jsg.processing.turns import ChatTurns
from jsg.server.chat_prompt import ChatPrompt
from jsg.server.generation import Generator
from jsg.server.media_sources import MediaSources
from jsg.server.text_threads import TextThreads
from jsg.server.tool_use import Speech, dialect_of


@final
class Front:
    """A ready server.

    Attributes:
        model_name: The one model that is served here, as clients call it.
        created: When it was ready, in seconds since the epoch.
        speech: How the model reads of tools and calls them.
        media: Reads pictures and videos, or says that the model cannot see.
    """

    def __init__(
        self,
        client: ServedEngine,
        generator: Generator,
        chat: ChatPrompt,
        threads: TextThreads,
        engine: EngineConfig,
        server: ServerConfig,
        media: MediaSources | None = None,
    ) -> None:
        self.client = client
        self.generator = generator
        self.chat = chat
        self.threads = threads
        self.engine_config = engine
        self.server_config = server
        self.media = media or MediaSources(None, threads)
        self.created = int(time.time())
        self.speech = Speech(
            template=chat.template,
            dialect=dialect_of(server.tool_call_parser, generator.tokenizer.chat_template),
            special=generator.markers,
        )
        self.model_name = server.served_model_name or public_name(engine.model_path)

    @functools.cached_property
    def turns(self) -> ChatTurns:
        """The model's chat template, turn by turn. Raises RequestError where it has none."""
        return ChatTurns.of_tokenizer(self.generator.tokenizer, self.media.placeholders)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError when a client asks for another model."""
        if name is not None and name != self.model_name:
            raise ModelNotFoundError(f"model must be {self.model_name!r}, which is served here, but got {name[:100]!r}")


@final
class FrontDoor:
    """Holds the `Front` from the moment it is ready; the app answers before that, and reads bodies."""

    def __init__(self) -> None:
        self.front: Front | None = None
        self.threads = TextThreads()

    @property
    def status(self) -> str:
        """In a word: "loading", "ok", "shutting down", "stalled" (the engine gives no sign) or "dead" (it ended).

        Of several engines "degraded", while some of them work.
        """
        if self.front is None:
            return "loading"
        client = self.front.client
        if not client.is_alive:
            return "dead"
        if client.is_stalled:
            return "stalled"
        if self.front.generator.admission.is_closed:
            return "shutting down"
        return "ok" if all(state_of(engine) == "ok" for engine in client.engines) else "degraded"

    @property
    def media_body_bytes(self) -> int:
        """What a body may have beside `--max-request-bytes`, for the pictures in it."""
        return 0 if self.front is None else self.front.media.max_body_bytes

    @property
    def is_healthy(self) -> bool:
        """Whether the engine, or one of several, is warm and works, for `/health`: who restarts a server asks this."""
        return self.is_open or self.status == "shutting down"

    @property
    def is_open(self) -> bool:
        """Whether it also takes new requests, for `/ready`: who routes requests asks this."""
        return self.status in ("ok", "degraded")


def public_name(model_path: str) -> str:
    """A hub name as it is; of a directory only the last part, for clients need not know where models lie."""
    path = Path(model_path)
    return path.resolve().name if path.is_dir() else model_path


async def _ready_front(request: Request) -> Front:
    door: FrontDoor = request.app.state.door
    if door.front is None:
        raise HTTPException(503, "the engine is still loading; try again when /ready answers 200", {"Retry-After": "1"})
    return door.front


ReadyFront = Annotated[Front, Depends(_ready_front)]


def state_of(engine: EngineClient) -> str:
    """Of one engine process in a word: "ok", "stalled" or "dead"."""
    if not engine.is_alive:
        return "dead"
    return "stalled" if engine.is_stalled else "ok"
