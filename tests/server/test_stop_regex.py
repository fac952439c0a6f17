"""Stop patterns in every API that takes them."""

import asyncio
import json
import threading

import pytest

from jsg.config import ServerConfig
from jsg.constrained.text_patterns import PatternSet, PatternTables
from jsg.engine.front.grammar_compiler import GrammarCompiler
from jsg.server.caller import Caller
from tests.server.scripted import ScriptedServer
from tests.server.threads import ServerMaker

TEXT = "one 22 three"


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    server = scripted_server
    server.engine.answer = TEXT
    return server


def events(response) -> list:
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in data]


def test_generate_ends_before_the_first_match(server):
    sampling = {"stop_regex": [r"\d+", "never"], "max_new_tokens": 20}
    answer = server.http.post("/generate", json={"text": "a", "sampling_params": sampling}).json()
    assert answer["text"] == "one "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"\d+"}


def test_a_stream_holds_back_what_may_begin_a_match(server):
    server.engine.step_len = 1
    body = {"text": "a", "stream": True, "sampling_params": {"stop_regex": r"e \d\d t", "max_new_tokens": 20}}
    texts = [event["text"] for event in events(server.http.post("/generate", json=body))]
    assert texts[-1] == "on"
    assert all("on".startswith(text) for text in texts)


def test_patterns_are_compiled_by_the_grammar_processes_once_for_a_request_that_is_let_in(server, monkeypatch):
    admission = server.http.app.state.door.front.generator.admission
    monkeypatch.setattr(admission, "config", ServerConfig(max_requests_per_key=3))
    body = {"prompt": ["a", "b"], "max_tokens": 20, "stop_regex": r"\d+"}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    assert server.engine.grammars.given == [(PatternSet("stop_regex", (r"\d+",)), Caller().tenant)]
    body = {"text": "a", "sampling_params": {"stop_regex": r"\w+", "n": 4}}
    assert server.http.post("/generate", json=body).status_code == 400
    assert len(server.engine.grammars.given) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": {"stop_regex": "x+"}}),
        ("/v1/completions", {"prompt": "a", "stop_regex": "x+", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stop_regex": "x+"}),
    ],
)
def test_compiling_ends_when_the_client_leaves(make_server: ServerMaker, monkeypatch, path: str, body: dict):
    begun, ended = threading.Event(), threading.Event()

    async def wait(compiler: GrammarCompiler, patterns: PatternSet, owner: str) -> PatternTables:
        begun.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    monkeypatch.setattr(GrammarCompiler, "patterns", wait)
    with make_server() as server:
        connection = server.send(path, body)
        assert begun.wait(60)
        connection.close()
        assert ended.wait(10)


def test_completions_and_chat_take_it_as_an_extension(server):
    body = {"prompt": "a", "max_tokens": 20, "stop_regex": r"\d+"}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("one ", "stop", r"\d+")
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "max_tokens": 20, "stop_regex": [r"\d+"], "no_stop_trim": True}
    choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one 2", "stop")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_pattern_that_is_refused_is_named(server, path):
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    response = server.http.post(path, json=prompt | {"stop_regex": ["fine", "(a"]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "stop_regex" and "the stop pattern '(a' is refused" in error["message"]
    assert server.engine.requests == []
