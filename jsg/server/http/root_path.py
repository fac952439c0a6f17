"""A path prefix below which a proxy shows the server."""

import re
from typing import final

from starlette.types import ASGIApp, Receive, Scope, Send

from jsg.errors import ConfigError

PREFIX = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


def checked_root_path(root_path: str) -> str:
    """The prefix of `--root-path`, without a slash at its end. Raises ConfigError for a text that is no path."""
    prefix = root_path.rstrip("/")
    if not PREFIX.fullmatch(prefix):
        raise ConfigError(
            "--root-path must be a path such as /models/chat, of letters, digits and . _ -, but got "
            f"{root_path[:100]!r}; correct it"
        )
    return prefix


@final
class StripRootPath:
    """Takes the prefix off the path of each request, so that everything inside knows the server's own paths only.

    Some proxies take the prefix off themselves, so a path without it is taken as it is. The prefix alone is redirected
    to the prefix with a slash: relative links of the page would otherwise lose its last part.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        if scope["type"] == "http":
            if scope["path"] == self._prefix:
                await _redirect(self._prefix.rpartition("/")[2] + "/", send)
                return
            if scope["path"].startswith(self._prefix + "/"):
                raw = scope["raw_path"].removeprefix(self._prefix.encode())
                scope = {**scope, "path": scope["path"].removeprefix(self._prefix), "raw_path": raw}
        await self._app(scope, receive, send)


async def _redirect(location: str, send: Send) -> None:
    headers = [(b"location", location.encode()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 307, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
