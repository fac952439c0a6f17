"""Endpoints that only read take GET and HEAD and change nothing. Endpoints that change something take only POST."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from jsg.config import ServerConfig
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from tests.server.running import RunningServer

ALL = ("GET", "POST", "PUT", "PATCH", "DELETE")
MAKES_A_TOKEN = "/health_generate"  # the one probe that works; its token is in nobody's cache


def routes_of(app: Any) -> Iterator[APIRoute]:
    """Every endpoint, those of included routers too."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            yield route
        elif (router := getattr(route, "original_router", None)) is not None:
            yield from routes_of(router)


def methods_by_path() -> dict[str, set[str]]:
    """Every path, with something filled in for the names in it, and the methods that it has."""
    routes = list(routes_of(create_app(FrontDoor(), ServerConfig())))
    paths = sorted({re.sub(r"\{[^}]*\}", "fake", route.path) for route in routes})
    return {
        path: {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
        for path in paths
    }


METHODS = methods_by_path()
ENDLESS = "/debug/radix/events"  # nobody waits for the end of its body
READABLE = sorted(path for path, methods in METHODS.items() if "GET" in methods and path != ENDLESS)
OTHERS = sorted(path for path, methods in METHODS.items() if "GET" not in methods)


def test_they_are_all_here():
    assert {"/health", "/ready", "/get_server_info", "/debug/radix", "/v1/models", MAKES_A_TOKEN} <= set(READABLE)
    assert {"/generate", "/flush_cache", "/abort_request", "/tokenize", "/v1/score"} <= set(OTHERS)


@pytest.mark.parametrize("path", READABLE)
def test_head_is_get_without_the_body(http: httpx.Client, path: str):
    get, head = http.get(path), http.head(path)
    assert head.status_code == get.status_code and head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    assert get.content
    assert http.get("/health").status_code == 200, "the connection can be used on"


def test_head_of_an_endless_stream_ends(http: httpx.Client):
    head = http.head(ENDLESS)
    assert (head.status_code, head.content) == (200, b"")
    with http.stream("GET", ENDLESS) as get:
        assert get.headers["content-type"] == head.headers["content-type"]
    assert http.get("/health").status_code == 200, "the connection can be used on"


def test_get_and_head_change_nothing(server: RunningServer):
    cached = server.http.post("/generate", json={"text": "cache", "sampling_params": {"max_new_tokens": 1}})
    assert cached.status_code == 200
    before = state(server)
    for path in READABLE + OTHERS:
        if path != MAKES_A_TOKEN:
            server.http.get(path)
            server.http.head(path)
    assert state(server) == before


def state(server: RunningServer) -> dict[str, float]:
    """Everything the engine counts, but its turns and its time."""
    return {name: value for name, value in server.stats().items() if name not in ("num_turns", "idle_s", "busy_s")}


@pytest.mark.parametrize("method", ["HEAD", *ALL])
def test_other_methods_are_a_405_that_says_which_there_are(http: httpx.Client, method: str):
    for path, allowed in METHODS.items():
        if method in allowed or (method == "HEAD" and "GET" in allowed):
            continue
        response = http.request(method, path)
        assert response.status_code == 405, f"{path}: {response.text}"
        assert set(response.headers["allow"].split(", ")) == allowed, path
        if method != "HEAD":
            assert response.json()["error"]["message"], path
