"""A hub of models on a real socket, for the real client of the hub. It counts which files were fetched."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves repositories of files.

    Attributes:
        repositories: Name → path in the repository → content.
        fetched: The path of each file whose content was fetched.
    """

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories = repositories
        self.fetched: list[str] = []

    @property
    def endpoint(self) -> str:
        """The URL for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/[^/]+|/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        files = self.server.repositories.get((found[1] or found[3]) if found else "")
        if found is None or files is None or (found[4] and found[4] not in files):
            self._send(404, b"{}", has_body, {"X-Error-Code": "EntryNotFound" if files else "RepoNotFound"})
        elif found[4]:
            if has_body:
                self.server.fetched.append(found[4])
            self._send(200, files[found[4]], has_body, {"X-Repo-Commit": COMMIT})
        elif found[2] == "tree":
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            self._send(200, json.dumps(rows).encode(), has_body, {})
        else:
            info = {"id": found[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self._send(200, json.dumps(info).encode(), has_body, {})

    def _send(self, status: int, body: bytes, has_body: bool, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        etag = f'"{hashlib.sha1(body).hexdigest()}"'
        for name, value in {"Content-Length": str(len(body)), "ETag": etag, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)


@contextlib.contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    """A hub that serves these repositories in a thread."""
    with FakeHub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
