"""Answers that no client reads while they grow: the engine knows this, and sends them in fewer outputs."""

import json

import pytest

import jsg as sgl
from tests.server.scripted import ScriptedServer

PROMPT = {"text": "hi", "sampling_params": {"max_new_tokens": 4}}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    return scripted_server


@sgl.function
def program(s, q):
    s += q + sgl.gen("a", max_tokens=4)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", PROMPT),
        ("/v1/completions", {"model": "fake", "prompt": "hi", "max_tokens": 4}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": "fake", "input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", CHAT),
        ("/v1/programs", {"graph": json.loads(program.trace().to_json()), "arguments": {"q": "hi"}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_engine_is_told_whether_an_answer_is_streamed(server: ScriptedServer, path: str, body: dict, streams: bool):
    response = server.http.post(path, json=body | {"stream": streams})
    assert response.status_code == 200, response.text
    assert server.engine.streamed == [streams]


@pytest.mark.parametrize("ends", [{"stop": ["x"]}, {"stop_regex": ["[0-9]"]}])
def test_what_may_end_in_its_text_is_streamed_all_the_same(server: ScriptedServer, ends: dict):
    sampling = PROMPT["sampling_params"] | ends
    assert server.http.post("/generate", json=PROMPT | {"sampling_params": sampling}).json()["text"] == "hell"
    assert server.engine.streamed == [True]
