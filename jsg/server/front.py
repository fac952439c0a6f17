"""What the endpoints share: the engine's client and, once the engine is ready, what generates with it."""

from pathlib import Path
from typing import Annotated, final

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from jsg.config import EngineConfig, ServerConfig
from jsg.engine.client import EngineClient
from jsg.errors import NotFoundError
from jsg.server.chat_prompt import ChatPrompt
from jsg.server.generation import Generator


@final
class Front:
    """A ready server.

    Attributes:
        model_name: The one model that is served here, as clients call it.
    """

    def __init__(
        self, client: EngineClient, generator: Generator, chat: ChatPrompt, engine: EngineConfig, server: ServerConfig
    ) -> None:
        self.client = client
        self.generator = generator
        self.chat = chat
        self.engine_config = engine
        self.server_config = server
        self.model_name = server.served_model_name or public_name(engine.model_path)

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError when a client asks for another model."""
        if name is not None and name != self.model_name:
            raise NotFoundError(f"model must be {self.model_name!r}, which is served here, but got {name[:100]!r}")


@final
class FrontDoor:
    """Holds the `Front` from the moment it is ready; the app answers before that."""

    def __init__(self) -> None:
        self.front: Front | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests can be answered: the engine is warm and alive."""
        return self.front is not None and self.front.client.is_alive

    @property
    def status(self) -> str:
        """The same in a word."""
        if self.front is None:
            return "loading"
        return "ok" if self.front.client.is_alive else "dead"


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
