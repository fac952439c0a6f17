"""`/v1/grammars` and `/v1/vocabulary`: what a browser gets of a server, and who else gets it."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from jsg.config import ServerConfig
from jsg.constrained.compiler import compile_tables
from jsg.engine.model_tokens import ModelTokens
from jsg.server.limits import Admission
from jsg.server.openai import grammars
from jsg.types import GrammarSpec
from tests.server.scripted import INFO, ScriptedServer

ALICE, BOB = ({"Authorization": f"Bearer {name}"} for name in ("alice", "bob"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
}
OURS = GrammarSpec("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def server(tokenizer_dir: Path) -> ScriptedServer:
    return ScriptedServer(tokenizer_dir, api_key=("alice", "bob"))


def send(server: ScriptedServer, body: dict[str, Any], headers: dict[str, str] = ALICE) -> httpx.Response:
    return server.http.post("/v1/grammars", json=body, headers=headers)


def get(server: ScriptedServer, path: str, headers: dict[str, str] = ALICE, **more: str) -> httpx.Response:
    return server.http.get(path, headers=headers | more)


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({"json_schema": SCHEMA}, OURS),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, OURS),
        ({"json_schema": SCHEMA, "whitespace": "compact"}, GrammarSpec("json_schema", OURS.text, whitespace="compact")),
        ({"structured_outputs": {"regex": "[a-c]+"}}, GrammarSpec("regex", "[a-c]+")),
        ({"ebnf": 'root ::= "a"', "model": "fake"}, GrammarSpec("ebnf", 'root ::= "a"')),
        ({"choices": ["a", "b"]}, GrammarSpec("choices", '["a", "b"]')),
        ({"structural_tag": TAG}, GrammarSpec("structural_tag", json.dumps(TAG))),
    ],
)
def test_a_grammar_of_each_kind(server: ScriptedServer, body, spec):
    made, tables = send(server, body), compile_tables(spec).to_bytes()
    digest = tables[24:56].hex()
    assert made.json() == {"object": "grammar", "digest": digest, "bytes": len(tables)}
    assert server.engine.grammars.given[-1][0] == spec and server.engine.grammars.given[-1][1], (
        "it takes its key's turn"
    )
    got = get(server, f"/v1/grammars/{digest}")
    assert got.content == tables and got.headers["etag"] == f'"{digest}"'
    assert got.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert got.headers["vary"] == "Authorization, X-Api-Key, Origin"  # its copy is not for a page of another origin
    again = get(server, f"/v1/grammars/{digest}", **{"If-None-Match": got.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_nobody_gets_or_learns_of_the_grammar_of_another_key(server: ScriptedServer):
    path = f"/v1/grammars/{send(server, {'regex': 'secret'}).json()['digest']}"
    assert get(server, path).status_code == 200 and server.http.get(path).status_code == 401
    others = get(server, path, BOB, **{"If-None-Match": f'"{path[-64:]}"'})
    unknown = get(server, path[:-64] + "0" * 64, BOB)
    assert others.status_code == unknown.status_code == 404
    assert others.text.replace(path[-64:], "0" * 64) == unknown.text and "/v1/grammars again" in others.text


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, None, "must have a grammar"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "only one grammar"),
        ({"guided_regex": "("}, "guided_regex", "parenthesis"),
        ({"regex": "a", "whitespace": "compact"}, "whitespace", "of kind regex"),
        ({"structural_tag": TAG | {"format": {"type": "token", "token": "<x>"}}}, "structural_tag", "'<x>'"),
        ({"regex": "a", "messages": []}, "messages", "unknown field"),
    ],
)
def test_what_is_refused(server: ScriptedServer, body, param, said):
    refused = send(server, body)
    assert refused.status_code == 400 and said in refused.text and refused.json()["error"]["param"] == param


def test_each_key_has_its_share_of_memory_and_loses_its_oldest(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    size = len(compile_tables(GrammarSpec("regex", "a")).to_bytes())
    monkeypatch.setattr(grammars, "KEPT_BYTES", 2 * (2 * size + 8))
    server = ScriptedServer(tokenizer_dir, api_key=("alice", "bob"))
    paths = [f"/v1/grammars/{send(server, {'regex': letter}).json()['digest']}" for letter in "abc"]
    assert send(server, {"regex": "d"}, BOB).status_code == 200
    assert [get(server, path).status_code for path in paths] == [404, 200, 200]
    assert "jsg grammar export" in send(server, {"regex": "(a|bc|d){9}e"}).json()["error"]["message"]


def test_a_key_has_as_many_at_a_time_as_answers_and_none_when_the_server_ends(tokenizer_dir: Path):
    server = ScriptedServer(tokenizer_dir)
    admission = Admission(ServerConfig(max_requests_per_key=1))
    server.http.app.state.door.front.generator.admission = admission
    with admission.grammar(""):
        assert send(server, {"regex": "a"}, {}).status_code == 429
    assert send(server, {"regex": "a"}, {}).status_code == 200
    admission.close()
    assert send(server, {"regex": "a"}, {}).status_code == 503


def test_the_vocabulary_is_that_of_the_engine(server: ScriptedServer):
    got = get(server, "/v1/vocabulary")
    assert got.content == ModelTokens(server.tokenizer, INFO.vocab_size, INFO.eos_token_ids).vocabulary().to_bytes()
    assert got.headers["etag"] == f'"{got.content[24:56].hex()}"' and "no-cache" in got.headers["cache-control"]
    assert get(server, "/v1/vocabulary", BOB, **{"If-None-Match": got.headers["etag"]}).status_code == 304
