"""The web page of the server: `GET /` and the files that it loads.

The page is in the package and loads nothing from elsewhere, so it works without a network. It needs no key: its files
are the same for everybody, and it asks for the key when the server answers 401. All its links are relative, so it also
works below a path prefix.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jsg.parameters import Integer, Number, named
from jsg.server.http.etags import respond_with_file

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Where the browser knows these two, it refuses every assignment of text to HTML, such as innerHTML.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser asks each time whether its copy is still the current one, so a new version of jsg is seen at once.
    "Cache-Control": "no-cache",
}


@final
@dataclasses.dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page.

    Attributes:
        content: Its bytes.
        media_type: Its type.
        etag: Names this content.
    """

    content: bytes
    media_type: str
    etag: str

    async def respond(self, request: Request) -> Response:
        """The file, or 304 if the browser has it already."""
        return respond_with_file(request, self.content, self.etag, self.media_type, HEADERS)


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """Every file of the page by its path: the page itself is `/`, and the others lie below `/page/`."""
    files = {}
    static = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in sorted(STATIC.rglob("*.*"))}
    for name, content in (static | {"parameters.js": _parameters().encode()}).items():
        if media_type := MEDIA_TYPES.get(Path(name).suffix):
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            files["/" if name == "index.html" else f"/page/{name}"] = PageFile(content, media_type, etag)
    return files


def _parameters() -> str:
    """The sampling parameters as a module: the numbers of a step (name, label, bounds), and names in gens."""
    numbers = [
        (name, name.replace("_", " ").capitalize(), _bounds(parameter.kind))
        for name, parameter in named("openai").items()
        if parameter.is_in_steps and isinstance(parameter.kind, Integer | Number)
    ]
    constants = {"NUMBERS_IN_STEPS": numbers, "GEN_NAMES": [*named("gen")]}
    return "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in constants.items())


def _bounds(kind: Integer | Number) -> dict[str, float]:
    if isinstance(kind, Number):
        return {"min": math.floor(kind.low), "max": kind.high, "step": 0.01}
    return {"min": kind.low if kind.also is None else kind.also, "max": kind.high, "step": 1}


def page_routes() -> list[Route]:
    """A route for each file. Only files that are in the package have one, so no path of a client is ever opened."""
    return [Route(path, file.respond, methods=["GET"], include_in_schema=False) for path, file in page_files().items()]
