"""Tools in `/v1/responses` and in Anthropic's `/v1/messages`, through the real packages."""

import json
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from jsg.constrained.tags.tools import Tool, tools_to_structural_tag
from jsg.dialects import DIALECTS
from tests.server.scripted import TOOL_TEMPLATE, ScriptedServer
from tests.server.test_tools import ARGUMENTS, CALL, HI, NO_ARGUMENTS, OTHER, SCHEMA, make_server

EVENT = TypeAdapter(ResponseStreamEvent)
SPECIAL = {"<|im_start|>", "<|im_end|>", "<s>"}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA}
CLOCK = {"type": "function", "name": "clock"}
CLAUDE_TOOLS: Any = [
    {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA},
    {"name": "clock", "input_schema": NO_ARGUMENTS},
]
TOOL_USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
BOTH = [Tool("weather", SCHEMA), Tool("clock", NO_ARGUMENTS)]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> ScriptedServer:
    return make_server(tmp_path_factory.mktemp("tools"))


@pytest.fixture(autouse=True)
def _plain(scripted: ScriptedServer) -> None:
    scripted.engine.answer, scripted.engine.failure, scripted.engine.step_len = CALL, None, 3


def grammar(tools: list[Tool], choice: Any, *, parallel: bool = True):
    return tools_to_structural_tag(tools, choice, DIALECTS["hermes"], parallel=parallel, special_tokens=SPECIAL)


class TestResponses:
    def ask(self, scripted: ScriptedServer, **fields: Any) -> Any:
        fields = {"model": "fake", "input": "hi", "tools": [WEATHER, CLOCK], **fields}
        return scripted.openai().responses.create(**fields)

    def test_a_call(self, scripted):
        made = self.ask(scripted)
        [call] = made.output
        assert (call.type, call.name, call.arguments, call.status) == (
            "function_call",
            "weather",
            ARGUMENTS,
            "completed",
        )
        assert (made.status, made.output_text, made.tool_choice) == ("completed", "", "auto")
        assert [tool.name for tool in made.tools] == ["weather", "clock"]
        assert scripted.sampling.grammar == grammar(BOTH, "auto")

    @pytest.mark.parametrize(
        ("fields", "tools", "choice", "parallel"),
        [
            ({"tool_choice": "required", "parallel_tool_calls": False}, BOTH, "required", False),
            ({"tool_choice": {"type": "function", "name": "clock"}}, BOTH[1:], "required", False),
            (
                {
                    "tool_choice": {
                        "type": "allowed_tools",
                        "mode": "required",
                        "tools": [{"type": "function", "name": "clock"}],
                    }
                },
                BOTH[1:],
                "required",
                True,
            ),
        ],
    )
    def test_each_choice(self, scripted, fields, tools, choice, parallel):
        made = self.ask(scripted, **fields)
        assert scripted.sampling.grammar == grammar(tools, choice, parallel=parallel)
        assert json.loads(made.model_dump_json(exclude_none=True))["tool_choice"] == fields["tool_choice"]

    def test_none(self, scripted):
        made = self.ask(scripted, tool_choice="none")
        assert (made.output_text, scripted.sampling.grammar) == (CALL, None)

    def test_a_stop_string_is_not_found_in_a_call(self, scripted):
        made = self.ask(scripted, extra_body={"stop": ["Bern", "\n"]})
        assert (made.status, made.output[0].arguments) == ("completed", ARGUMENTS)

    def test_words_and_calls_are_items_of_their_own(self, scripted):
        scripted.engine.answer = f"Let me see.\n{CALL}\n{OTHER}"
        made = self.ask(scripted)
        assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
        assert made.output_text == "Let me see."
        assert len({item.id for item in made.output}) == 3

    def test_cut_short(self, scripted):
        made = self.ask(scripted, max_output_tokens=len(CALL) - 20)
        assert (made.status, made.output[-1].status) == ("incomplete", "incomplete")

    @pytest.mark.parametrize("step_len", [1, 500])
    @pytest.mark.parametrize("answer", [CALL, f"Let me see.\n{CALL}\n{OTHER}", "It rains."])
    def test_the_events_add_up_to_the_same(self, scripted, answer, step_len):
        scripted.engine.answer, scripted.engine.step_len = answer, step_len
        body = {"input": "hi", "tools": [WEATHER, CLOCK], "stream": True}
        response = scripted.http.post("/v1/responses", json=body)
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
        for event in events:
            EVENT.validate_python(event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        output = events[-1]["response"]["output"]
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
        begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
        assert [(item["id"], item["status"]) for item in begun] == [(item["id"], "in_progress") for item in output]
        for item in output:
            mine = [event for event in events if event.get("item_id") == item["id"]]
            deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
            assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
            assert len({event["output_index"] for event in mine}) == 1

    @pytest.mark.parametrize("step_len", [1, 2, 7, 500])
    @pytest.mark.parametrize(
        ("answer", "texts"),
        [
            (CALL, []),
            ("It < rains ä.", ["It < rains ä."]),
            (f"Let me <t see.\n{CALL}\n{OTHER}", ["Let me <t see."]),
            (f"First ä,\n{CALL}\n then {OTHER}", ["First ä,", "\n then"]),
            (f"{CALL} end", [" end"]),
            ("<tool_call> is no call", ["<tool_call> is no call"]),
        ],
    )
    def test_logprobs_are_those_of_the_texts(self, scripted, answer, texts, step_len):
        """However many tokens come at once: a call has no place for any, and a text has those of its own."""
        scripted.engine.answer, scripted.engine.step_len = answer, step_len
        body = {"input": "hi", "tools": [WEATHER, CLOCK], "include": ["message.output_text.logprobs"]}
        made = scripted.http.post("/v1/responses", json=body).json()
        parts = [item["content"][0] for item in made["output"] if item["type"] == "message"]
        assert [part["text"] for part in parts] == texts
        ends = made["output"][-1]["type"] == "message"  # then the token that ended the answer is the text's
        for part in parts:
            scored = b"".join(bytes(score["bytes"]) for score in part["logprobs"]).decode()
            assert scored == part["text"] + "<|im_end|>" * (ends and part is parts[-1])
            assert {score["logprob"] for score in part["logprobs"]} == {-0.5}
        response = scripted.http.post("/v1/responses", json=body | {"stream": True})
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
        whole = [item["content"][0] for item in events[-1]["response"]["output"] if item["type"] == "message"]
        assert whole == parts
        shown = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [score for event in shown for score in event["logprobs"]] == [
            score for part in parts for score in part["logprobs"]
        ]

    def test_the_packages_stream_helper(self, scripted):
        fields: Any = {"model": "fake", "input": "hi", "tools": [WEATHER | {"strict": True}]}
        with scripted.openai().responses.stream(**fields) as events:
            deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == ARGUMENTS

    def test_a_round_with_items_sent_back(self, scripted):
        made = self.ask(scripted)
        [call] = made.output
        items = [
            *HI,
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "21"},
        ]
        scripted.engine.answer = "21 degrees"
        assert self.ask(scripted, input=items).output_text == "21 degrees"
        assert '{"name": "weather", "arguments": {"city": "Bern ä"}}' in scripted.prompt
        assert f"<|im_start|>tool\n{call.call_id}: 21" in scripted.prompt
        by_items = scripted.prompt
        self.ask(scripted, input=[*HI, *made.output, items[-1]])
        assert scripted.prompt == by_items, "the package's own objects"

    def test_the_name_of_what_gave_an_output_is_read(self, tmp_path):
        template = TOOL_TEMPLATE.replace("{{ m.tool_call_id }}: ", "{{ m.name }} gave ")
        named = make_server(tmp_path, template)
        items = [
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "name": "weather", "output": "21"},
            {"type": "function_call_output", "call_id": "b", "output": "22"},
        ]
        made = self.ask(named, input=[*HI, *items])
        assert "<|im_start|>tool\nweather gave 21<|im_end|>\n<|im_start|>tool\n gave 22" in named.prompt
        listed = named.openai().responses.input_items.list(made.id, order="asc").data
        assert [item.type for item in listed] == ["message", "function_call", *["function_call_output"] * 2]
        assert [getattr(item, "name", None) for item in listed[1:]] == ["weather", "weather", None]

    def test_a_round_that_is_stored(self, scripted):
        scripted.engine.answer = f"Let me see.{CALL}"
        made = self.ask(scripted)
        call = made.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
        scripted.engine.answer = "21 degrees"
        last = self.ask(scripted, input=[result], previous_response_id=made.id)
        assert "assistant\nLet me see.<tool_call>" in scripted.prompt
        assert f"{call.call_id}: 21" in scripted.prompt
        listed = scripted.openai().responses.input_items.list(last.id, order="asc").data
        assert [item.type for item in listed] == ["message", "message", "function_call", "function_call_output"]
        self.ask(scripted, input=[*HI, {"type": "item_reference", "id": call.id}, result])
        assert '<tool_call>\n{"name": "weather"' in scripted.prompt

    @pytest.mark.parametrize(
        ("body", "param", "said"),
        [
            ({"tools": [{"type": "web_search"}]}, "type", "runs no tools"),
            ({"tools": [{"type": "function"}]}, "tools", "name is required"),
            ({"tool_choice": "required"}, "tool_choice", "needs tools"),
            ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice", "must have name"),
            ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "none of them"),
            ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input", "must have arguments"),
            ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input", "must have output"),
            ({"input": [{"type": "function_call_output", "output": "a"}]}, "input", "must have call_id"),
            ({"input": [{"role": "user", "content": "a", "call_id": "b"}]}, "input", "must not have call_id"),
            (
                {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}]},
                "input",
                "must be a JSON object",
            ),
            ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "must have schema"),
            ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format", "must not have name"),
        ],
    )
    def test_what_is_wrong_is_named(self, scripted, body, param, said):
        response = scripted.http.post("/v1/responses", json={"input": "hi", **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert said in error["message"]


class TestAnthropic:
    def ask(self, scripted: ScriptedServer, **fields: Any) -> Any:
        fields = {"model": "fake", "max_tokens": 500, "messages": HI, "tools": CLAUDE_TOOLS, **fields}
        return scripted.anthropic().messages.create(**fields)

    def test_a_call(self, scripted):
        made = self.ask(scripted)
        [block] = made.content
        assert (block.type, block.name, block.input) == ("tool_use", "weather", {"city": "Bern ä"})
        assert (made.stop_reason, made.stop_sequence) == ("tool_use", None)
        assert scripted.sampling.grammar == grammar(BOTH, "auto")
        assert scripted.prompt.count("<tool>") == 2

    @pytest.mark.parametrize(
        ("choice", "tools", "mode", "parallel"),
        [
            ({"type": "auto"}, BOTH, "auto", True),
            ({"type": "auto", "disable_parallel_tool_use": True}, BOTH, "auto", False),
            ({"type": "any"}, BOTH, "required", True),
            ({"type": "any", "disable_parallel_tool_use": True}, BOTH, "required", False),
            ({"type": "tool", "name": "clock"}, BOTH[1:], "required", False),
        ],
    )
    def test_each_choice(self, scripted, choice, tools, mode, parallel):
        self.ask(scripted, tool_choice=choice)
        assert scripted.sampling.grammar == grammar(tools, mode, parallel=parallel)

    def test_none(self, scripted):
        made = self.ask(scripted, tool_choice={"type": "none"})
        assert (made.content[0].text, made.stop_reason, scripted.sampling.grammar) == (CALL, "end_turn", None)

    def test_words_and_calls(self, scripted):
        scripted.engine.answer = f"Let me see.\n{CALL}\n{OTHER}"
        made = self.ask(scripted)
        assert [block.type for block in made.content] == ["text", "tool_use", "tool_use"]
        assert len({block.id for block in made.content[1:]}) == 2

    def test_a_stop_sequence_is_not_found_in_a_call(self, scripted):
        scripted.engine.answer = f"Let me see.\n{CALL}"
        made = self.ask(scripted, stop_sequences=["Bern", "\n"])
        assert ([block.type for block in made.content], made.stop_reason) == (["text", "tool_use"], "tool_use")
        made = self.ask(scripted, stop_sequences=["see"])
        assert (made.content[0].text, made.stop_reason, made.stop_sequence) == ("Let me ", "stop_sequence", "see")

    def test_a_call_that_is_cut_short_is_no_text(self, scripted):
        made = self.ask(scripted, max_tokens=len(CALL) - 20)
        assert (made.content, made.stop_reason) == ([], "max_tokens")
        scripted.engine.answer = f"Let me see.\n{CALL}"
        [block] = self.ask(scripted, max_tokens=len(CALL) - 20).content
        assert block.text.strip() == "Let me see."

    @pytest.mark.parametrize("step_len", [1, 500])
    @pytest.mark.parametrize("answer", [CALL, f"Let me see.\n{CALL}\n{OTHER}", "It rains."])
    def test_a_stream_adds_up_to_the_same(self, scripted, answer, step_len):
        scripted.engine.answer, scripted.engine.step_len = answer, step_len
        whole = self.ask(scripted)
        fields: Any = {"model": "fake", "max_tokens": 500, "messages": HI, "tools": CLAUDE_TOOLS}
        with scripted.anthropic().messages.stream(**fields) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        shown = [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content]
        assert shown == [block.model_dump(exclude={"id"}) for block in whole.content]
        assert final.stop_reason == whole.stop_reason
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)

    def test_a_round(self, scripted):
        scripted.engine.answer = f"Let me see.{CALL}{OTHER}"
        made = self.ask(scripted)
        results = [
            {"type": "tool_result", "tool_use_id": made.content[1].id, "content": "21"},
            {"type": "tool_result", "tool_use_id": made.content[2].id, "content": [{"type": "text", "text": "noon"}]},
            {"type": "text", "text": "Well?"},
        ]
        messages = [*HI, {"role": "assistant", "content": made.content}, {"role": "user", "content": results}]
        scripted.engine.answer = "21 degrees at noon"
        assert self.ask(scripted, messages=messages).content[0].text == "21 degrees at noon"
        first, second = (block.id for block in made.content[1:])
        assert "assistant\nLet me see.<tool_call>" in scripted.prompt
        for turn in (f"tool\n{first}: 21", f"tool\n{second}: noon", "user\nWell?"):
            assert f"<|im_start|>{turn}<|im_end|>" in scripted.prompt

    def test_tools_count(self, scripted):
        client = scripted.anthropic().messages
        plain = client.count_tokens(model="fake", messages=HI).input_tokens
        assert client.count_tokens(model="fake", messages=HI, tools=CLAUDE_TOOLS).input_tokens > plain + 100

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs no tools"),
            ({"tools": [{"name": "f"}]}, "input_schema is required"),
            ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool"}}, "must have name"),
            ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "any", "name": "clock"}}, "must not have name"),
            ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "none of them"),
            ({"tool_choice": {"type": "any"}}, "needs tools"),
            ({"tools": CLAUDE_TOOLS[:1] * 129}, "at most 128"),
            ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "id": "b"}]}]}, "not have id"),
            ({"messages": [{"role": "user", "content": [TOOL_USE]}]}, "must not have a block of type tool_use"),
            ({"messages": [{"role": "assistant", "content": [TOOL_USE]}]}, "must end with a text"),
        ],
    )
    def test_what_is_wrong_is_named(self, scripted, body, said):
        response = scripted.http.post("/v1/messages", json={"max_tokens": 5, "messages": HI, **body})
        assert response.status_code == 400, response.text
        assert said in response.json()["error"]["message"]


def test_the_packages_raise_what_they_should(scripted):
    with pytest.raises(openai.BadRequestError):
        scripted.openai().responses.create(model="fake", input="hi", tool_choice="required")
    with pytest.raises(anthropic.BadRequestError):
        scripted.anthropic().messages.create(model="fake", max_tokens=5, messages=HI, tool_choice={"type": "any"})
