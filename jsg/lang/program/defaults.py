"""The default backend, and calls on a backend that run no program."""

from typing import Any, cast

from jsg.errors import ConfigError
from jsg.lang.streams.loop import shared_loop, wait_for
from jsg.lang.words.backend import Backend, BackendSource

_default: Backend | BackendSource | None = None


def set_default_backend(backend: Backend | BackendSource | None) -> None:
    """Sets the backend of programs that name none: a backend, a `jsg.Engine` or a `jsg.Runtime`; None sets no backend.

    Raises:
        ConfigError: It is none of these.
    """
    global _default
    if backend is not None:
        as_backend(backend)
    _default = backend


def default_backend() -> Backend | BackendSource:
    """Gives what `set_default_backend` was given. Raises ConfigError where there is none."""
    if _default is None:
        raise ConfigError(
            "a program needs a backend: call jsg.set_default_backend(jsg.Engine(...)) first, or give backend= to run"
        )
    return _default


def as_backend(backend: Backend | BackendSource | None) -> Backend:
    """Gives `backend` itself, the backend that it has, or the default one. Raises ConfigError where there is none."""
    if backend is None:
        return as_backend(default_backend())
    if hasattr(backend, "as_backend"):
        return cast(BackendSource, backend).as_backend()
    if not hasattr(backend, "open"):
        raise ConfigError(
            "a backend is a jsg.Engine, Runtime, RuntimeEndpoint, OpenAI, Anthropic, or what implements "
            f"jsg.lang.words.backend.Backend, but got {type(backend).__name__}"
        )
    return cast(Backend, backend)


def flush_cache(backend: Backend | BackendSource | None = None) -> bool:
    """Forgets cached prefixes; gives False, and forgets nothing, while requests run.

    Args:
        backend: The backend; the default one where None.

    Raises:
        JsgError: The backend has no access to a cache, or failed.
    """
    asked = as_backend(backend)

    async def flush() -> bool:
        return await asked.flush_cache()

    return wait_for(shared_loop().submit(flush()))


def get_server_info(backend: Backend | BackendSource | None = None) -> dict[str, Any]:
    """Gives what is known of the model and the server.

    Args:
        backend: The backend; the default one where None.

    Raises:
        JsgError: The backend failed.
    """
    return wait_for(shared_loop().submit(as_backend(backend).server_info()))
