"""The application as a whole: its description, and bodies of every kind."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jsg.config import ServerConfig
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from jsg.server.http import interface
from tests.server.running import RunningServer
from tests.server.threads import ServerMaker


@pytest.fixture(scope="module")
def limited(make_server: ServerMaker) -> Iterator[RunningServer]:
    with make_server(server={"max_request_bytes": 2000}) as server:
        yield server


def test_the_interface_is_described():
    described = create_app(FrontDoor(), ServerConfig()).openapi()["paths"]  # warns of operations with one name
    assert {"/generate", "/health", "/ready", "/v1/chat/completions"} <= set(described)


class TestBodies:
    def test_a_large_body_is_refused(self, limited):
        fits = limited.http.post("/generate", json={"text": "a" * 1000, "sampling_params": {"max_new_tokens": 1}})
        assert fits.status_code == 200
        assert limited.http.post("/generate", json={"text": "a" * 3000}).status_code == 413

    def test_without_a_length_it_is_counted_while_it_is_read(self, limited):
        def chunks():
            yield b'{"text": "'
            for _ in range(100):
                yield b"a" * 100
            yield b'"}'

        response = limited.http.post("/v1/completions", content=chunks(), headers={"Content-Type": "application/json"})
        assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"text":' * 10_000, b"9" * 10_000],
        ids=["empty", "cut", "list", "number", "string", "no UTF-8", "deep list", "deep object", "long number"],
    )
    @pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
    def test_what_is_no_object_is_a_400(self, http, path, content):
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["message"]

    def test_a_million_mistakes_are_one_short_answer(self, http):
        for content in ('{"input_ids": [' + '"a",' * 900_000 + "1]}", json.dumps({f"f{i}": 1 for i in range(200_000)})):
            started = time.process_time()
            response = http.post("/generate", content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 400 and len(response.content) < 3000
            assert time.process_time() - started < 5

    def test_unknown_paths_and_methods(self, http):
        message = "the path must name an endpoint, but none has this path; /openapi.json lists all endpoints"
        assert http.get("/nowhere").json() == {
            "error": {"message": message},
            "object": "error",
            "message": message,
            "code": 404,
        }
        assert http.get("/v1/nowhere").json()["error"]["code"] == "not_found"
        assert http.get("/generate").status_code == 405


def test_the_description_is_made_once_and_beside_the_event_loop(make_server: ServerMaker, monkeypatch):
    threads: list[str] = []
    make = interface.get_openapi

    def made(**arguments: Any) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return make(**arguments)

    monkeypatch.setattr(interface, "get_openapi", made)
    with make_server() as server, ThreadPoolExecutor(4) as clients:
        described = list(clients.map(lambda _: server.http.get("/openapi.json").json(), range(4)))
    assert all(each == described[0] for each in described)
    assert described[0]["paths"].keys() >= {"/generate", "/v1/chat/completions"}
    assert [name.startswith("asyncio_") for name in threads] == [True]
