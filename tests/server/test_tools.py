"""Tools in chat completions: what the model sees, how its answer is constrained, and how its calls reach the client."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from jsg.constrained import compiler
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.tags.front import structural_tag_grammar
from jsg.engine.child.protocol import Failure
from jsg.errors import GrammarError
from jsg.speech.dialects import DIALECTS
from jsg.speech.rules.call_grammar import Tool, tools_to_structural_tag
from jsg.types import FinishReason, FinishType
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.scripted import END_OF_TEXT, TOOL_TEMPLATE, ScriptedServer

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern \\u00e4"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
ARGUMENTS = '{"city": "Bern \\u00e4"}'


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def make_server(directory: Path, template: str = TOOL_TEMPLATE, **knobs: Any) -> ScriptedServer:
    write_byte_tokenizer(directory, template)
    return ScriptedServer(directory, **knobs)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> ScriptedServer:
    return make_server(tmp_path_factory.mktemp("tools"))


@pytest.fixture(autouse=True)
def _plain(scripted: ScriptedServer) -> None:
    scripted.engine.answer, scripted.engine.failure, scripted.engine.step_len = CALL, None, 3
    scripted.engine.finish = END_OF_TEXT


def ask(scripted: ScriptedServer, **fields: Any) -> dict:
    body = {"messages": HI, "tools": [WEATHER, CLOCK], **fields}
    response = scripted.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json())
    return response.json()["choices"][0]


def refusal(scripted: ScriptedServer, **fields: Any) -> dict:
    response = scripted.http.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def stream(scripted: ScriptedServer, **fields: Any) -> list[dict]:
    """The choices of the events."""
    body = {"messages": HI, "tools": [WEATHER, CLOCK], "stream": True, **fields}
    response = scripted.http.post("/v1/chat/completions", json=body)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return [chunk["choices"][0] for chunk in chunks]


class TestWhatTheModelIsHeldTo:
    """The grammar is that of `tools_to_structural_tag`; which tools and which choice are told here."""

    WEATHER_TOOL = Tool("weather", None, SCHEMA, field="tools[0].function.parameters")
    CLOCK_TOOL = Tool("clock", None, NO_ARGUMENTS, field="tools[1].function.parameters")

    @pytest.mark.parametrize(
        ("fields", "names", "choice", "parallel"),
        [
            ({}, ("weather", "clock"), "auto", True),
            ({"tool_choice": "auto"}, ("weather", "clock"), "auto", True),
            ({"tool_choice": "auto", "parallel_tool_calls": False}, ("weather", "clock"), "auto", False),
            ({"tool_choice": "required"}, ("weather", "clock"), "required", True),
            ({"tool_choice": "required", "parallel_tool_calls": False}, ("weather", "clock"), "required", False),
            ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, ("clock",), "required", False),
            (
                {
                    "tool_choice": {
                        "type": "allowed_tools",
                        "allowed_tools": {
                            "mode": "auto",
                            "tools": [{"type": "function", "function": {"name": "clock"}}],
                        },
                    }
                },
                ("clock",),
                "auto",
                True,
            ),
        ],
    )
    def test_each_choice(self, scripted, fields, names, choice, parallel):
        ask(scripted, **fields)
        tools = [tool for tool in (self.WEATHER_TOOL, self.CLOCK_TOOL) if tool.name in names]
        special = {"<|im_start|>", "<|im_end|>", "<s>"}
        expected = tools_to_structural_tag(tools, choice, DIALECTS["hermes"], parallel=parallel, special_tokens=special)
        assert scripted.sampling.grammar == expected
        assert scripted.prompt.count("<tool>") == 2, "the model is shown every tool"

    def test_none(self, scripted):
        choice = ask(scripted, tool_choice="none")
        assert scripted.sampling.grammar is None and "<tool>" not in scripted.prompt
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "tool_calls" not in choice["message"]

    def test_none_beside_a_form(self, scripted):
        ask(scripted, tool_choice="none", response_format={"type": "json_object"})
        assert scripted.sampling.grammar.kind == "json_schema"

    @pytest.mark.parametrize(
        ("fields", "kind", "text"),
        [
            ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
            ({"response_format": form_of(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
            ({"json_schema": '{"type":"null"}'}, "json_schema", '{"type":"null"}'),
            ({"regex": "a+"}, "regex", "a+"),
            ({"choices": ["a"]}, "choices", '["a"]'),
            ({"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}}, "structural_tag",
             '{"type": "structural_tag", "format": {"type": "any_text"}}'),
        ],
    )  # fmt: skip
    def test_a_form_of_the_text_stands_beside_the_calls(self, scripted, fields, kind, text):
        special = {"<|im_start|>", "<|im_end|>", "<s>"}
        form = {"type": "whole", "kind": kind, "text": text, "field": next(iter(fields))}
        for choice in ("auto", "required"):
            ask(scripted, tool_choice=choice, **fields)
            tools = [self.WEATHER_TOOL, self.CLOCK_TOOL]
            expected = tools_to_structural_tag(tools, choice, DIALECTS["hermes"], special_tokens=special, form=form)
            assert scripted.sampling.grammar == expected

    @pytest.mark.parametrize("strict", [None, True, False])
    @pytest.mark.parametrize("parameters", [SCHEMA, {"type": "string"}, None])
    def test_strict(self, scripted, strict, parameters):
        tool = {"type": "function", "function": WEATHER["function"] | {"strict": strict, "parameters": parameters}}
        if strict is not False and parameters == {"type": "string"}:
            assert "must be a JSON Schema of an object" in refusal(scripted, tools=[tool])["message"]
            return
        ask(scripted, tools=[tool], tool_choice="required")
        content = json.loads(scripted.sampling.grammar.text)["format"]["tags"][0]["content"]["elements"][1]
        missing = NO_ARGUMENTS if strict is not False else {"type": "object"}
        schema = {None: missing, "object": SCHEMA, "string": {"type": "object"}}[parameters and parameters["type"]]
        lenient = {"or_any_object": True} if strict is False else {}
        field = "tools[0].function.parameters"
        assert content == {"type": "json_schema", "json_schema": schema, **lenient, "field": field}
        assert json.dumps(parameters or {}) in scripted.prompt, "the model is shown the schema in any case"

    def test_whitespace(self, scripted):
        ask(scripted, whitespace="compact", property_order="free", additional_properties="open")
        found = scripted.sampling.grammar
        assert (found.whitespace, found.property_order, found.additional_properties) == ("compact", "free", "open")

    def test_no_tools_are_none(self, scripted):
        for fields in ({"tools": []}, {"tools": None}, {"tools": [], "tool_choice": "auto"}):
            choice = ask(scripted, **fields)
            assert scripted.sampling.grammar is None
            assert choice["message"]["content"] == CALL

    def test_special_marks_stay_in_the_text(self, tmp_path):
        """Mistral's mark is a special token in its tokenizers; without it nobody could find the calls."""
        template = "[TOOL_CALLS]{% if tools %}{% endif %}" + TOOL_TEMPLATE.replace("<tool_call>", "")
        mistral = make_server(tmp_path, template.replace("</tool_call>", ""))
        mistral.engine.answer = '[TOOL_CALLS][{"name": "clock", "arguments": {}}]'
        choice = ask(mistral)
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
        call_id = choice["message"]["tool_calls"][0]["id"]
        assert len(call_id) == 9, "Mistral's templates take no other"
        assert call_id.isalnum()
        assert mistral.sampling.skip_special_tokens, "it is no special token here"


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param", "said"),
        [
            ({"tool_choice": "required"}, "tool_choice", "needs tools"),
            ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "f' is none of them"),
            (
                {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "f"}}},
                "tool_choice",
                "none of",
            ),
            ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice", "must have function"),
            (
                {"tools": [CLOCK], "tool_choice": {"type": "custom", "custom": {"name": "a"}}},
                "custom",
                "functions can be",
            ),
            ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice", "'none'"),
            ({"tools": [CLOCK, CLOCK]}, "tools", "two are 'clock'"),
            ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "custom", "describe the tool as a function"),
            ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is required"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
            ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "tools[0].function.name"),
            ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools", "parameters"),
            (
                {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
                "tools[0].function.parameters",
                "'a'",
            ),
            ({"tools": [CLOCK] * 129}, "tools", "at most 128"),
            ({"tools": [CLOCK], "functions": [{"name": "f"}]}, "functions", "tools or tool_choice"),
            ({"function_call": {"name": "f"}}, "function_call", "needs functions"),
            ({"functions": [{"name": "f"}], "parallel_tool_calls": True}, "parallel_tool_calls", "one function_call"),
            ({"function_call": "none"}, "function_call", "needs functions"),
            ({"function_call": "auto", "tools": [CLOCK]}, "function_call", "needs functions"),
            ({"functions": [], "function_call": {"name": "f"}}, "function_call", "needs functions"),
            ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", "none of them"),
        ],
    )
    def test_what_is_wrong_is_named(self, scripted, fields, param, said):
        error = refusal(scripted, **fields)
        assert error["param"] == param, error
        assert said in error["message"]

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not show them"),
            ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "--tool-call-parser"),
        ],
    )
    def test_a_model_that_was_not_made_for_tools(self, tmp_path, template, said):
        plain = make_server(tmp_path, template)
        error = refusal(plain, tools=[CLOCK])
        assert error["param"] == "tools"
        assert said in error["message"]
        assert ask(plain, tool_choice="none")["message"]["content"] == "hello"

    def test_what_the_compiler_refuses(self, scripted):
        scripted.engine.failure = GrammarError("the keyword 'x' is not supported", param="structural_tag")
        assert refusal(scripted, tools=[CLOCK]) == {
            "message": "tools is not valid: the keyword 'x' is not supported",
            "type": "invalid_request_error",
            "param": "tools",
            "code": None,
        }
        assert refusal(scripted, functions=[{"name": "f"}])["param"] == "functions"

    @pytest.mark.parametrize("fields", [{}, {"tool_choice": "required"}, {"response_format": form_of(SCHEMA)}])
    def test_which_tool_the_compiler_refuses(self, scripted, fields):
        """With the compiler's own words, so that they cannot change without this."""
        wrong = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(x)\1"}}}
        tools = [CLOCK, {"type": "function", "function": {"name": "wrong", "parameters": wrong}}, WEATHER]
        ask(scripted, tools=tools, **fields)
        with pytest.raises(GrammarError) as refused:
            structural_tag_grammar(scripted.sampling.grammar.text)
        scripted.engine.failure = Failure.of(refused.value).to_error()
        error = refusal(scripted, tools=tools, **fields)
        assert error["param"] == "tools[1].function.parameters"
        assert error["message"].startswith("tools[1].function.parameters is not valid: pattern at #/properties/a")

    @pytest.mark.parametrize(
        ("form", "field", "said"),
        [
            ({"response_format": form_of({"pattern": r"(x)\1"})}, "response_format", "pattern at #"),
            ({"regex": "("}, "regex", "regular expression: a parenthesis"),
            (
                {"structural_tag": {"type": "structural_tag", "format": {"type": "x"}}},
                "structural_tag",
                "the structural tag.format: a format's type",
            ),
        ],
    )
    def test_which_form_the_compiler_refuses(self, scripted, form, field, said):
        ask(scripted, **form)
        with pytest.raises(GrammarError) as refused:
            structural_tag_grammar(scripted.sampling.grammar.text)
        scripted.engine.failure = refused.value
        error = refusal(scripted, tools=[CLOCK, WEATHER], **form)
        assert error["param"] == field and error["message"].startswith(f"{field} is not valid: {said}")

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"tools": [CLOCK, WEATHER]}, "tools"),
            ({"tools": None, "functions": [{"name": "f"}]}, "functions"),
            ({"tools": [CLOCK, WEATHER], "response_format": form_of({"const": 1})}, "tools"),
            ({"tools": [CLOCK, WEATHER], "response_format": form_of({"enum": ["long " * 200]})}, "response_format"),
            ({"tools": None, "response_format": form_of({"enum": ["long " * 200]})}, "response_format"),
        ],
    )
    @pytest.mark.parametrize("limits", [Limits(positions=20), Limits(text_bytes=10), None])
    def test_who_is_blamed_for_what_the_whole_grammar_costs(self, scripted, monkeypatch, fields, field, limits):
        ask(scripted, **fields)
        if limits is None:  # reading it takes too much memory
            monkeypatch.setattr(compiler, "_read", mock.Mock(side_effect=MemoryError))
        with pytest.raises(GrammarError) as refused:
            compiler.compile_tables(scripted.sampling.grammar, limits or LIMITS)
        scripted.engine.failure = Failure.of(refused.value).to_error()
        error = refusal(scripted, **fields)
        assert error["param"] == field and error["message"].startswith(f"{field} is not valid: a grammar m")


class TestAnswers:
    def test_a_call(self, scripted):
        choice = ask(scripted)
        [call] = choice["message"]["tool_calls"]
        assert call == {"id": call["id"], "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        assert call["id"].startswith("call_")
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")

    def test_words_and_calls(self, scripted):
        scripted.engine.answer = f"Let me see.\n{CALL}\n{OTHER}"
        message = ask(scripted)["message"]
        assert message["content"] == "Let me see."
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "clock"]
        assert len({call["id"] for call in message["tool_calls"]}) == 2

    def test_words_alone(self, scripted):
        scripted.engine.answer = "It rains."
        choice = ask(scripted)
        assert (choice["message"]["content"], choice["finish_reason"]) == ("It rains.", "stop")
        assert "tool_calls" not in choice["message"]

    def test_cut_short(self, scripted):
        choice = ask(scripted, max_tokens=len(CALL) - 30)
        assert choice["finish_reason"] == "length"

    @pytest.mark.parametrize("stop", ["Bern", "\n", '"', "tool", "</tool_call>", "}}"])
    @pytest.mark.parametrize("step_len", [1, 500])
    def test_a_stop_string_is_not_found_in_a_call(self, scripted, stop, step_len):
        scripted.engine.step_len = step_len
        scripted.engine.answer = f"Let me see.\n{CALL}\n{OTHER}"
        choice = ask(scripted, stop=stop)
        assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [ARGUMENTS, "{}"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
        pieces = stream(scripted, stop=stop)
        assert "".join(piece["delta"].get("content") or "" for piece in pieces) == "Let me see."
        changes = [change for piece in pieces for change in piece["delta"].get("tool_calls", ())]
        assert "".join(change["function"]["arguments"] for change in changes) == ARGUMENTS + "{}"
        assert pieces[-1]["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize(
        ("answer", "content", "num_calls", "reason"),
        [
            (f"Let me see it.\n{CALL}", "Let me ", 0, "stop"),
            (f"{CALL} Then see it. {CALL}", " Then", 1, "tool_calls"),
        ],
    )
    def test_a_stop_string_in_the_text_ends_it(self, scripted, answer, content, num_calls, reason):
        scripted.engine.answer = answer
        choice = ask(scripted, stop="see")
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)
        assert len(choice["message"].get("tool_calls", ())) == num_calls and choice["matched_stop"] == "see"
        pieces = stream(scripted, stop="see")
        assert "".join(piece["delta"].get("content") or "" for piece in pieces) == content
        assert pieces[-1]["finish_reason"] == reason

    def test_a_call_that_a_token_ended_is_not_to_be_answered(self, scripted):
        """A stop token of the client's may stand in arguments; what is left of them must not look like a call."""
        scripted.engine.finish = FinishReason(FinishType.STOP, matched=ord("}"))
        scripted.engine.answer = CALL[:-30]
        assert ask(scripted)["finish_reason"] == "stop"
        assert stream(scripted)[-1]["finish_reason"] == "stop"

    def test_each_answer_has_names_of_its_own(self, scripted):
        body = {"messages": HI, "tools": [WEATHER], "n": 3}
        choices = scripted.http.post("/v1/chat/completions", json=body).json()["choices"]
        assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3

    def test_names_are_new_where_that_of_the_request_is_not(self, scripted):
        """A client may send one `rid` again; a conversation with both calls must tell them apart."""
        ids = [ask(scripted, rid="mine")["message"]["tool_calls"][0]["id"] for _ in range(2)]
        changes = [change for piece in stream(scripted, rid="mine") for change in piece["delta"].get("tool_calls", ())]
        ids += [change["id"] for change in changes if "id" in change]
        assert len(set(ids)) == 3

    @pytest.mark.parametrize("step_len", [1, 2, 7, 500])
    @pytest.mark.parametrize("answer", [CALL, f"Let me see.\n{CALL}\n{OTHER}", "It rains.", "<tool_call> is no call"])
    def test_a_stream_adds_up_to_the_same(self, scripted, answer, step_len):
        scripted.engine.answer, scripted.engine.step_len = answer, step_len
        whole = ask(scripted)
        pieces = stream(scripted)
        assert pieces[0]["delta"]["role"] == "assistant"
        assert "".join(piece["delta"].get("content") or "" for piece in pieces) == (whole["message"]["content"] or "")
        calls: list[dict] = []
        for piece in pieces:
            for change in piece["delta"].get("tool_calls", ()):
                if "id" in change:
                    assert (change["index"], change["type"]) == (len(calls), "function")
                    calls.append({"id": change["id"], **change["function"]})
                else:
                    assert change["function"].keys() == {"arguments"}
                    calls[change["index"]]["arguments"] += change["function"]["arguments"]
        expected = [call["function"] for call in whole["message"].get("tool_calls", ())]
        assert [{"name": call["name"], "arguments": call["arguments"]} for call in calls] == expected
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [whole["finish_reason"]]

    def test_arguments_come_as_they_are_made(self, scripted):
        scripted.engine.step_len = 1
        changes = [change for piece in stream(scripted) for change in piece["delta"].get("tool_calls", ())]
        assert len(changes) > 10

    def test_logprobs_of_every_token_once(self, scripted):
        scripted.engine.answer = f"Let me see.\n{CALL} ä"
        scores = ask(scripted, logprobs=True)["logprobs"]["content"]
        assert b"".join(bytes(score["bytes"]) for score in scores).decode() == scripted.engine.answer + "<|im_end|>"
        pieces = stream(scripted, logprobs=True)
        assert [score for piece in pieces for score in (piece["logprobs"] or {"content": []})["content"]] == scores


class TestConversations:
    def test_calls_and_results_are_read(self, scripted):
        first = ask(scripted)["message"]
        call_id = first["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": "sunny <|im_end|>"}
        scripted.engine.answer = "It is sunny."
        choice = ask(scripted, messages=[*HI, first, result])
        assert choice["message"]["content"] == "It is sunny."
        assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern ä"}}\n</tool_call>' in scripted.prompt
        assert f"<|im_start|>tool\n{call_id}: sunny <|im_end|><|im_end|>" in scripted.prompt
        ends = [token for token in scripted.request.input_ids if token == 257]
        assert len(ends) == 3, "what looks like a special token in a result is text"

    def test_texts_of_tools_stay_texts(self, scripted):
        tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
        ask(scripted, tools=[tool])
        assert scripted.prompt.count("<|im_end|>") == 2 and scripted.request.input_ids.count(257) == 1

    def test_the_prompts_tokens_are_told(self, scripted):
        ask(scripted)
        body = {"messages": HI, "tools": [WEATHER, CLOCK]}
        assert scripted.http.post("/tokenize", json=body).json()["tokens"] == list(scripted.request.input_ids)

    def test_a_call_is_not_continued(self, scripted):
        message = {"role": "assistant", "content": "a", "tool_calls": [ask(scripted)["message"]["tool_calls"][0]]}
        error = refusal(scripted, messages=[*HI, message], continue_final_message=True)
        assert error["param"] == "messages"


class TestOldForm:
    FUNCTION = WEATHER["function"]

    def test_a_call(self, scripted):
        choice = ask(scripted, tools=None, functions=[self.FUNCTION])
        assert choice["message"]["function_call"] == {"name": "weather", "arguments": ARGUMENTS}
        assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("function_call", False)
        expected = tools_to_structural_tag(
            [Tool("weather", None, SCHEMA, field="functions[0].parameters")],
            "auto",
            DIALECTS["hermes"],
            parallel=False,
            special_tokens={"<|im_start|>", "<|im_end|>", "<s>"},
        )
        assert scripted.sampling.grammar == expected

    def test_a_stream(self, scripted):
        pieces = stream(scripted, tools=None, functions=[self.FUNCTION], function_call={"name": "weather"})
        changes = [piece["delta"]["function_call"] for piece in pieces if "function_call" in piece["delta"]]
        assert changes[0]["name"] == "weather"
        assert "".join(change["arguments"] for change in changes) == ARGUMENTS
        assert pieces[-1]["finish_reason"] == "function_call"

    def test_none(self, scripted):
        assert ask(scripted, tools=None, functions=[self.FUNCTION], function_call="none")["message"]["content"] == CALL


class weather(BaseModel):
    """Of a city."""

    city: str


class TestPackage:
    """The real `openai` package."""

    def test_a_call_is_parsed(self, scripted):
        made = scripted.openai().chat.completions.parse(
            model="fake", messages=HI, tools=[openai.pydantic_function_tool(weather)], tool_choice="required"
        )
        [call] = made.choices[0].message.tool_calls
        assert call.function.parsed_arguments == weather(city="Bern ä")

    def test_its_stream_helper(self, scripted):
        scripted.engine.answer = f"{CALL}{OTHER}"
        with scripted.openai().chat.completions.stream(model="fake", messages=HI, tools=[WEATHER, CLOCK]) as events:
            done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [(event.name, event.index, json.loads(event.arguments)) for event in done] == [
            ("weather", 0, {"city": "Bern ä"}),
            ("clock", 1, {}),
        ]
        assert events.get_final_completion().choices[0].finish_reason == "tool_calls"
