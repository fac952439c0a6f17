"""What the endpoints share: the `FrontDoor` from the start on and, once the engine is ready, the `Front`."""

import functools
import time
from pathlib import Path
from typing import Annotated, final

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from jsg.config import EngineConfig, ServerConfig
from jsg.engine.front.client import EngineClient
from jsg.engine.front.served import ServedEngine
from jsg.engine.model_tokens import ModelTokens
from jsg.errors import ModelNotFoundError, RequestError
from jsg.server.generation import Generator
from jsg.server.media_sources import MediaSources
from jsg.server.text_threads import TextThreads
from jsg.speech.dialects import choose_dialect
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.speech.prompts.turns import ChatTurns
from jsg.speech.rules.thinking import ThoughtForm
from jsg.speech.rules.tool_use import Speech

ANY_MODEL = ("default", "unknown")  # what SGLang's clients and its gateway write if they leave the choice to the server


@final
class Front:
    """A ready server.

    Attributes:
        model_name: The one model that is served here, as clients call it.
        created: When it was ready, in seconds since the epoch.
        speech: How the model writes.
        media: Reads pictures and videos, or refuses them where the model cannot see.
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
            dialect=choose_dialect(server.tool_call_parser, generator.tokenizer.chat_template),
            special=generator.markers,
            thinking=ThoughtForm.of(server.reasoning_parser, generator.tokenizer, generator.markers),
        )
        self.model_name = server.served_model_name or public_name(engine.model_path)

    @functools.cached_property
    def turns(self) -> ChatTurns:
        """The model's chat template, turn by turn. Raises RequestError where it has none."""
        return ChatTurns.of_tokenizer(self.generator.tokenizer, self.media.placeholders)

    @functools.cached_property
    def vocabulary(self) -> bytes:
        """The vocabulary of the model as a file. The first use takes about 0.2 s for 131 072 tokens."""
        info = self.generator.info
        return ModelTokens(self.generator.tokenizer, info.vocab_size, info.eos_token_ids).vocabulary().to_bytes()

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError when a client asks for another model."""
        if name and name not in (*ANY_MODEL, self.model_name):
            raise ModelNotFoundError(f"model must be {self.model_name!r}, which is served here, but got {name[:100]!r}")

    def lacks(self, path: str, needed: str) -> RequestError:
        """The error for a call of an endpoint that needs another kind of model than the served one."""
        does, endpoints = "generates text", "/v1/chat/completions, /v1/completions or /v1/score"
        if self.generator.info.embedder is not None:
            does, endpoints = "embeds texts", "/v1/embeddings"
        return RequestError(
            f"{path} needs {needed}, but {self.model_name!r} {does}; use {endpoints} here, and another server for this",
            param="model",
        )


@final
class FrontDoor:
    """Holds the `Front` once it is ready. Before that the app can answer and read bodies already.

    Attributes:
        is_ending: Whether the server was told to end. It may take requests for a while yet (`--drain-delay`).
    """

    def __init__(self) -> None:
        self.front: Front | None = None
        self.is_ending = False
        self.threads = TextThreads()

    @property
    def status(self) -> str:
        """One of "loading", "ok", "shutting down", "stalled" (the engine gives no sign of life) and "dead" (it ended).

        With several engines also "degraded", while some of them work.
        """
        if self.front is None:
            return "loading"
        client = self.front.client
        if not client.is_alive:
            return "dead"
        if client.is_stalled:
            return "stalled"
        if self.is_ending:
            return "shutting down"
        return "ok" if all(state_of(engine) == "ok" for engine in client.engines) else "degraded"

    @property
    def media_body_bytes(self) -> int:
        """How many bytes a body may have for pictures and videos, beside `--max-request-bytes`."""
        return 0 if self.front is None else self.front.media.max_body_bytes

    @property
    def is_healthy(self) -> bool:
        """Whether at least one engine is warm and works. `/health` tells it to whoever restarts servers."""
        return self.is_open or self.status == "shutting down"

    @property
    def is_open(self) -> bool:
        """Whether the server also wants new requests. `/ready` tells it to whoever routes requests."""
        return self.status in ("ok", "degraded")


def public_name(model_path: str) -> str:
    """A hub name as it is; of a directory only its last part, because clients need not know where models lie."""
    path = Path(model_path)
    return path.resolve().name if path.is_dir() else model_path


async def _ready_front(request: Request) -> Front:
    door: FrontDoor = request.app.state.door
    if door.front is None:
        raise HTTPException(503, "the engine is still loading; try again when /ready answers 200", {"Retry-After": "1"})
    return door.front


ReadyFront = Annotated[Front, Depends(_ready_front)]


def state_of(engine: EngineClient) -> str:
    """The state of one engine process: "ok", "stalled" or "dead"."""
    if not engine.is_alive:
        return "dead"
    return "stalled" if engine.is_stalled else "ok"
