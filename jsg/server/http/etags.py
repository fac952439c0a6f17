"""Files that a browser keeps, and asks for again by the ETag of its copy."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response


def respond_with_file(
    request: Request, content: bytes, etag: str, media_type: str, headers: Mapping[str, str]
) -> Response:
    """The file, or 304 if the client has it already. `etag` is in quotes and names this content."""
    headers = {**headers, "ETag": etag}
    # Proxies that compress a file make its ETag a weak one.
    given = [name.strip().removeprefix("W/") for name in request.headers.get("if-none-match", "").split(",")]
    if etag in given or given == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers={**headers, "Content-Type": media_type})
