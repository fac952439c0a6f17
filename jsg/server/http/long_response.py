"""Long responses of JSON that are made while they are sent, on the event loop and piece by piece.

A thread would not help, because whoever makes JSON holds the interpreter. Beside one that made 84 MB, a turn of 17 ms
lasted 0.12 s: after each call of the system the loop had to wait until the thread let it go on.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jsg.server.http.event_stream import until_disconnect
from jsg.server.http.json_pieces import next_piece

_JSON = "application/json"


async def respond_in_pieces(pieces: Iterator[bytes], turn: Callable[[], Awaitable[None]]) -> Response:
    """A response of JSON with these pieces, each of at most some hundred kilobytes.

    A short body has its length in the head. A longer one is sent in chunks as its client reads it, and no more of it is
    made for a client that has left. So the pieces must not fail once the first was made.

    Args:
        pieces: What is sent, one behind the other. An empty one ends a turn, for work that makes little JSON.
        turn: Waits until the next of them may be made.
    """
    await turn()
    first, is_whole = next_piece(pieces)
    return Response(first, media_type=_JSON) if is_whole else _InPieces(first, pieces, turn)


async def joined(pieces: Iterator[bytes], turn: Callable[[], Awaitable[None]]) -> bytes:
    """All pieces as one, which are made as those of `respond_in_pieces`."""
    made, is_last = list[bytes](), False
    while not is_last:
        await turn()
        piece, is_last = next_piece(pieces)
        made.append(piece)
    return b"".join(made)


@final
class _InPieces(Response):
    def __init__(self, first: bytes, pieces: Iterator[bytes], turn: Callable[[], Awaitable[None]]) -> None:
        super().__init__(media_type=_JSON)
        del self.headers["content-length"]
        self._first = first
        self._pieces = pieces
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await until_disconnect(Request(scope, receive), self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        piece, is_last = self._first, False
        while not is_last:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._turn()
            piece, is_last = next_piece(self._pieces)
        await send({"type": "http.response.body", "body": piece, "more_body": False})
