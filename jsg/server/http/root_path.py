"""A path prefix below which a proxy shows the server."""

import re

from starlette.responses import Response
from starlette.types import Scope

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


def strip_root_path(scope: Scope, prefix: str) -> Response | None:
    """Takes the prefix off the path of a request, so that everything inside knows the server's own paths only.

    Some proxies take the prefix off themselves, so a path without it is taken as it is. The prefix alone is redirected
    to the prefix with a slash: relative links of the page would otherwise lose its last part.
    """
    path: str = scope["path"]
    if path == prefix:
        return Response(status_code=307, headers={"location": prefix.rpartition("/")[2] + "/"})
    if path.startswith(prefix + "/"):
        scope["path"] = path.removeprefix(prefix)
        scope["raw_path"] = scope["raw_path"].removeprefix(prefix.encode())
    return None
