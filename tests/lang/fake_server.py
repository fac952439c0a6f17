"""An HTTP server over real sockets whose answers a test writes down beforehand."""

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

TEMPLATE = {
    "chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}",
    "bos_token": None,
    "eos_token": None,
}


class Reply:
    """One answer.

    Attributes:
        events: Sent as a stream in place of `body`; text goes out as it is.
        waits: Set: after the events the connection stays open until the client leaves.
        breaks: The connection ends in the middle of the stream, or without an answer where there are no events.
        is_done: The stream says that it is whole.
    """

    def __init__(
        self,
        body: Any = None,
        status: int = 200,
        *,
        events: list[Any] | None = None,
        headers: dict[str, str] | None = None,
        waits: bool = False,
        breaks: bool = False,
        is_done: bool = True,
    ) -> None:
        self.body, self.status, self.events, self.headers = body, status, events, headers or {}
        self.waits, self.breaks, self.is_done = waits, breaks, is_done
        self.is_left = threading.Event()


def failure(status: int, message: str, **others: Any) -> Reply:
    headers = others.pop("headers", None)
    return Reply({"error": {"message": message, **others}}, status, headers=headers)


def answer(text: str, index: int | None = None, *, finish: str | None = "length", **meta: Any) -> dict[str, Any]:
    """An object of `/generate`."""
    meta_info = {"finish_reason": None if finish is None else {"type": finish}, "cached_tokens": 0, **meta}
    return {"text": text, "output_ids": [], "meta_info": meta_info} | ({} if index is None else {"index": index})


LAST = {"part_ids": [[1, 2]], "kept_ids": [3], "tail": ""}


class FakeServer(http.server.ThreadingHTTPServer):
    """Answers the calls of a path in order; the last answer again and again.

    Attributes:
        replies: By path.
        calls: (path, body, headers) of each call, in order.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: dict[str, list[Reply]] = {"/get_chat_template": [Reply(TEMPLATE)]}
        self.calls: list[tuple[str, Any, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body, _ in self.calls if called == path]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is no error."""


@contextlib.contextmanager
def fake_server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.server.calls.append((self.path, body, dict(self.headers)))
        replies = self.server.replies.get(self.path) or [failure(404, "the path must name an endpoint")]
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if reply.events is None and reply.breaks:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.events is None:
            content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in reply.events:
            self._chunk(event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n")
        if reply.waits:
            self.connection.recv(1)  # nothing comes but the end
            reply.is_left.set()
            self.close_connection = True
        elif reply.breaks:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            if reply.is_done:
                self._chunk("data: [DONE]\n\n")
            self._chunk("")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()
