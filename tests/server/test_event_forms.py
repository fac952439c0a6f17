"""Events that are made by an `EventForm` have the bytes that they would have without one."""

import re
from pathlib import Path
from typing import Any

import pytest

from jsg.server.deltas import Deltas
from jsg.server.http.event_stream import EventForm
from jsg.speech.answers.answer import AnswerDelta
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.scripted import TOOL_TEMPLATE, ScriptedServer

HI = [{"role": "user", "content": "hi"}]
SAID = 'It is 100 %, "\u00e9" or \u2028 %b, and then '
CALL = '<tool_call>\n{"name": "clock", "arguments": {"city": "Bern"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CLOCK = {"name": "clock", "parameters": SCHEMA}
CHANCE = re.compile(r'[0-9a-f]{24,32}|(?<=created":)\d+|(?<=_at":)\d+|(?<=latency":)[^,]+|(?<=_token":)[^,]+')

STREAMS = {
    "chat": ("/v1/chat/completions", {"messages": HI, "n": 2, "stream_options": {"include_usage": True}}),
    "chat with tools": ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": CLOCK}]}),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 90}),
    "messages": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 900, "tools": [{"name": "clock", "input_schema": SCHEMA}]},
    ),
    "responses": ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **CLOCK}]}),
    "generate": ("/generate", {"text": "hi", "sampling_params": {"n": 2}}),
    "new tokens": ("/generate", {"text": "hi", "incremental": True}),
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> ScriptedServer:
    directory: Path = tmp_path_factory.mktemp("forms")
    write_byte_tokenizer(directory, TOOL_TEMPLATE)
    return ScriptedServer(directory)


@pytest.mark.parametrize("name", STREAMS)
def test_events_are_those_of_the_general_way(name, scripted, monkeypatch):
    path, body = STREAMS[name]
    scripted.engine.answer = SAID + CALL + " " + SAID
    filled, made = list[bytes](), list[Deltas]()
    fill, begin = EventForm.fill, Deltas.__init__

    def noting(form: EventForm, *values: object) -> bytes:
        filled.append(fill(form, *values))
        return filled[-1]

    def beginning(deltas: Deltas, *arguments: Any) -> None:
        begin(deltas, *arguments)
        made.append(deltas)

    monkeypatch.setattr(EventForm, "fill", noting)
    monkeypatch.setattr(Deltas, "__init__", beginning)
    scripted.engine.goes_on = lambda: not any(deltas._waiting for deltas in made)  # so that no two are joined

    def streamed() -> list[str]:
        filled.clear()
        response = scripted.http.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        return sorted(CHANCE.sub("?", response.text).split("\n\n"))  # of two answers, either may be first

    short, num_filled = streamed(), len(filled)
    monkeypatch.setattr(AnswerDelta, "only_text", "")
    monkeypatch.setattr("jsg.server.openai.responses_events.TEXT", None)
    monkeypatch.setattr("jsg.server.native.generate._form_of", lambda event: None)
    assert short == streamed() and not filled
    assert num_filled > 10
