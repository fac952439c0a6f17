"""Requests to OpenAI's endpoints, and what is answered to a greeting by an engine that repeats the prompt."""

import json

import httpx

from tests.server.running import events_of

HI = [{"role": "user", "content": "hi"}]
HI_TOKENS = 1 + 5 + 2 + 1 + 1 + 1 + 10
ENDED = {"finish_reason": "length", "matched_stop": None}
HI_ANSWER = "user\nhi\nassistant\n"  # what repeating it shows: special tokens are left out


def chat(http: httpx.Client, messages=HI, **body) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": messages, **body})


def complete(http: httpx.Client, prompt, **body) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": prompt, **body})


def post(http: httpx.Client, path: str, body: dict) -> httpx.Response:
    """In ASCII, so that a lone surrogate can be sent."""
    return http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def stream(http: httpx.Client, path: str, **body) -> list[dict]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        return events_of(response)


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def tokens_of(http: httpx.Client, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text}).json()["tokens"]
