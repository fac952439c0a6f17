"""A client that sends long texts delays only itself, and no client with short texts."""

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from jsg.server import text_threads
from jsg.server.front import FrontDoor
from jsg.server.http.json_body import new_router
from jsg.server.text_threads import LARGE_BYTES, LONG_BYTES, TextThreads

DEADLINE_S = 20
MANY = 100  # more than there are threads


@pytest.mark.parametrize("is_media", [False, True], ids=["texts", "pictures"])
async def test_short_work_does_not_wait_for_long_work(is_media):
    may_end = threading.Event()
    threads = TextThreads()

    def long() -> str:
        assert may_end.wait(DEADLINE_S)
        return "long"

    begun = [threads.decode(long) if is_media else threads.run(long, LONG_BYTES + 1) for _ in range(MANY)]
    long_ones = [asyncio.create_task(each) for each in begun]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert await threads.run(lambda: "short", LONG_BYTES) == "short"
    finally:
        may_end.set()
    assert await asyncio.gather(*long_ones) == ["long"] * MANY
    threads.close()


async def test_what_large_texts_needed_is_given_back(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(text_threads, "trim", lambda: done.append("trim"))
    threads = TextThreads()

    def fail() -> None:
        done.append("fail")
        raise ValueError("bad text")

    await threads.run(lambda: done.append("long"), LARGE_BYTES)
    await threads.run(lambda: done.append("large"), LARGE_BYTES + 1)
    with pytest.raises(ValueError, match="bad text"):
        await threads.run(fail, LARGE_BYTES + 1)
    threads.close()
    assert done == ["long", "large", "trim", "fail", "trim"]


async def test_what_is_not_wanted_any_more_is_not_begun():
    may_end = threading.Event()
    begun: list[int] = []
    threads = TextThreads()

    async def run(number: int) -> None:
        await threads.run(lambda: (begun.append(number), may_end.wait(DEADLINE_S)), LONG_BYTES + 1)

    tasks = [asyncio.create_task(run(number)) for number in range(MANY)]
    await asyncio.sleep(0)
    tasks[-1].cancel()
    await asyncio.wait({tasks[-1]})
    may_end.set()
    await asyncio.gather(*tasks[:-1])
    threads.close()
    assert sorted(begun) == list(range(MANY - 1))


@pytest.mark.parametrize(
    ("num_bytes", "sees"),
    [(10, False), (10, True), (LONG_BYTES, False)],
    ids=["short", "short to one that sees", "long"],
)
async def test_a_long_body_is_not_worked_on_for_a_client_that_has_left(num_bytes, sees, monkeypatch):
    """A short one is: its work is done before anybody could have left. But it may name a picture that takes long."""

    class Text(BaseModel):
        text: str

    router = new_router()
    is_cancelled: list[bool] = []

    @router.post("/wait")
    async def wait(body: Text) -> Response:
        try:
            await asyncio.sleep(DEADLINE_S if sees or num_bytes == LONG_BYTES else 0.1)
        except asyncio.CancelledError:
            is_cancelled.append(True)
            raise
        is_cancelled.append(False)
        return Response(body.text[:1])

    app = FastAPI()
    app.state.max_request_bytes = 2**20
    app.state.strict_fields = False
    app.state.door = FrontDoor()
    monkeypatch.setattr(FrontDoor, "media_body_bytes", 2**20 if sees else 0)
    app.include_router(router)
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": b'{"text": "' + b"a" * num_bytes + b'"}', "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if len(messages) > 1 else messages[0]

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/wait", "query_string": b"", "http_version": "1.1"}
    with contextlib.suppress(ClientDisconnect):  # the real application answers it
        await app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
    app.state.door.threads.close()
    assert is_cancelled == [sees or num_bytes == LONG_BYTES]
