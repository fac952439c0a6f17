"""Dialects of tool calls over HTTP: calls, ids and texts, with markers that are special tokens of the model."""

import json
from typing import Any

import pytest

from jsg.constrained.special_tokens import special_bytes
from jsg.constrained.tags.front import structural_tag_grammar
from jsg.errors import GrammarError
from jsg.speech.dialects import DIALECTS
from tests.constrained.texts import accepts, machine_of
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.scripted import ScriptedServer
from tests.speech.dialects import TEMPLATES, written

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = ("weather", {"city": 'Bern { "</x>'})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ScriptedServer]:
    """Dialect → a server of a model that writes it with special tokens."""
    found = {}
    for name, dialect in DIALECTS.items():
        directory = tmp_path_factory.mktemp(name)
        write_byte_tokenizer(directory, TEMPLATES[name], ["<|im_start|>", "<|im_end|>", "<s>", *dialect.markers])
        found[name] = ScriptedServer(directory)
    return found


def spelled(text: str, dialect: str = "harmony") -> bytes:
    """A text with its markers as special tokens."""
    data = text.encode()
    for mark in DIALECTS[dialect].markers:
        data = data.replace(mark.encode(), special_bytes(mark))
    return data


def ask(server: ScriptedServer, answer: str, **fields: Any) -> dict[str, Any]:
    server.engine.answer = answer
    response = server.http.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def stream(server: ScriptedServer, answer: str, **fields: Any) -> list[dict[str, Any]]:
    server.engine.answer = answer
    response = server.http.post("/v1/chat/completions", json={"messages": HI, "stream": True, **fields})
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0]["delta"] for line in lines]


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_calls_whole_and_in_a_stream(servers: dict[str, ScriptedServer], dialect: str) -> None:
    answer = written(dialect, [CALL, CALL], "Let me see.")
    message = ask(servers[dialect], answer, tools=[WEATHER])["message"]
    assert message["content"] == "Let me see."
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [CALL[1], CALL[1]]
    servers[dialect].engine.step_len = 1
    deltas = stream(servers[dialect], answer, tools=[WEATHER])
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(pieces) == "".join(call["function"]["arguments"] for call in message["tool_calls"])
    assert len(pieces) > 20, "arguments come as they are written"


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_an_earlier_call_is_written_as_the_model_wrote_it(servers: dict[str, ScriptedServer], dialect: str) -> None:
    """Whether the template takes the arguments as an object or, as DeepSeek's do, as a text only."""
    answer = written(dialect, [CALL, CALL])
    message = ask(servers[dialect], answer, tools=[WEATHER])["message"]
    ask(servers[dialect], "So.", messages=[*HI, message, *HI], tools=[WEATHER])
    assert answer in servers[dialect].prompt


def test_calls_of_kimi_have_the_ids_that_the_model_writes(servers: dict[str, ScriptedServer]) -> None:
    answer = written("kimi_k2", [CALL, CALL]).replace(":1<", ":7<")
    message = ask(servers["kimi_k2"], answer, tools=[WEATHER])["message"]
    assert [call["id"] for call in message["tool_calls"]] == ["functions.weather:0", "functions.weather:7"]
    message = ask(servers["kimi_k2"], answer.replace(":7<", ":0<"), tools=[WEATHER])["message"]
    assert message["tool_calls"][0]["id"] != message["tool_calls"][1]["id"]


def test_calls_of_mistral_have_the_ids_that_some_models_write(servers: dict[str, ScriptedServer]) -> None:
    answer = written("mistral_args", [CALL, CALL]).replace("[ARGS]", "[CALL_ID]aB3456789[ARGS]", 1)
    message = ask(servers["mistral_args"], answer, tools=[WEATHER])["message"]
    assert message["tool_calls"][0]["id"] == "aB3456789" and len(message["tool_calls"][1]["id"]) == 9
    machine = machine_of(structural_tag_grammar(servers["mistral_args"].sampling.grammar.text))
    assert accepts(machine, spelled(answer, "mistral_args"))
    assert not accepts(machine, spelled(answer.replace("aB3456789", "aB345678"), "mistral_args"))


class TestHeaders:
    """Answers of gpt-oss are rows of messages with headers, with tools and without."""

    FINAL = "<|channel|>final<|message|>Hello"

    @pytest.mark.parametrize("before", ["", "<|channel|>commentary<|message|>Well. <|end|><|start|>assistant"])
    @pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}])
    def test_they_are_no_text(self, servers: dict[str, ScriptedServer], before: str, tools: dict[str, Any]) -> None:
        said = "Well. Hello" if before else "Hello"
        server = servers["harmony"]
        assert ask(server, before + self.FINAL, **tools)["message"]["content"] == said
        assert not server.sampling.skip_special_tokens
        deltas = stream(server, before + self.FINAL, **tools)
        assert "".join(delta.get("content") or "" for delta in deltas) == said
        assert ask(server, before + "<|channel|>fin", **tools)["message"]["content"] == said.removesuffix("Hello")

    THOUGHTS = "<|channel|>analysis<|message|>Hm: <x>.<|end|><|start|>assistant"

    @pytest.mark.parametrize("choice", ["auto", "required"])
    def test_thoughts_before_calls(self, servers: dict[str, ScriptedServer], choice: str) -> None:
        server = servers["harmony"]
        server.engine.step_len = 1
        call = written("harmony", [CALL])
        message = ask(server, self.THOUGHTS + call, tools=[WEATHER], tool_choice=choice)["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm: <x>.", None)
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == CALL[1]
        machine = machine_of(structural_tag_grammar(server.sampling.grammar.text))
        assert accepts(machine, spelled(self.THOUGHTS + call))
        assert accepts(machine, spelled(call)), "without thoughts too"
        assert not accepts(machine, spelled((self.THOUGHTS + call).replace("weather", "whether")))
        deltas = stream(server, self.THOUGHTS + call, tools=[WEATHER], tool_choice=choice)
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm: <x>."
        assert not any(delta.get("content") for delta in deltas)

    def test_thoughts_before_a_form(self, servers: dict[str, ScriptedServer]) -> None:
        server = servers["harmony"]
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
        answer = self.THOUGHTS + '<|channel|>final<|message|>{"city": "Bern"}'
        message = ask(server, answer, response_format=form)["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm: <x>.", '{"city": "Bern"}')
        machine = machine_of(structural_tag_grammar(server.sampling.grammar.text))
        assert accepts(machine, spelled(answer))
        assert not accepts(machine, spelled(answer.replace("Bern", "Bern\n")))

    def test_stop_strings_are_not_found_in_them(self, servers: dict[str, ScriptedServer]) -> None:
        answer = "<|channel|>commentary<|message|>me<|end|><|start|>assistant<|channel|>final<|message|>ss message s"
        assert ask(servers["harmony"], answer, stop=["message", "mess"])["message"]["content"] == "mess "

    def test_other_interfaces(self, servers: dict[str, ScriptedServer]) -> None:
        server = servers["harmony"]
        server.engine.answer = self.FINAL
        response = server.http.post("/v1/responses", json={"input": "hi"}).json()
        assert response["output"][0]["content"][0]["text"] == "Hello"
        response = server.http.post("/v1/messages", json={"messages": HI, "model": "default", "max_tokens": 99}).json()
        assert response["content"] == [{"type": "text", "text": "Hello"}]

    def test_a_form_stands_behind_one(self, servers: dict[str, ScriptedServer]) -> None:
        server = servers["harmony"]
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
        for tools in ({}, {"tools": [WEATHER]}):
            ask(server, self.FINAL, response_format=form, **tools)
            machine = machine_of(structural_tag_grammar(server.sampling.grammar.text))
            text = b'{"city": "Bern"}'
            head = special_bytes("<|channel|>") + b"final" + special_bytes("<|message|>")
            assert accepts(machine, head + text) and not accepts(machine, text)
        wrong = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"pattern": r"(x)\1"}}}
        ask(server, self.FINAL, response_format=wrong)
        with pytest.raises(GrammarError) as refused:
            structural_tag_grammar(server.sampling.grammar.text)
        server.engine.failure = refused.value
        response = server.http.post("/v1/chat/completions", json={"messages": HI, "response_format": wrong})
        server.engine.failure = None
        assert response.json()["error"]["message"].startswith("response_format is not valid: pattern at #")
