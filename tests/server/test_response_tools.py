"""Tools in `/v1/responses` and in Anthropic's `/v1/messages`, through the real packages."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from jsg.server.openai.responses_tools import InputReader
from jsg.speech.dialects import DIALECTS
from jsg.speech.rules.call_grammar import Tool, tools_to_structural_tag
from tests.server.scripted import TOOL_TEMPLATE, ScriptedServer
from tests.server.test_tools import ARGUMENTS, CALL, HI, NO_ARGUMENTS, OTHER, SCHEMA, make_server

HERE = Path(__file__).parent
EVENT = TypeAdapter(ResponseStreamEvent)
SPECIAL = {"<|im_start|>", "<|im_end|>", "<s>"}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA}
CLOCK = {"type": "function", "name": "clock"}
CLAUDE_TOOLS: Any = [
    {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA},
    {"name": "clock", "input_schema": NO_ARGUMENTS},
]
PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
SPACE = {"type": "namespace", "name": "geo", "description": "Places.", "tools": [WEATHER, PATCH]}
TOOL_USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}


def both(name: str) -> list[Tool]:
    """The tools whose schemas are in the fields of that name."""
    schemas = {"weather": SCHEMA, "clock": NO_ARGUMENTS}
    return [Tool(tool, None, schema, field=f"tools[{i}].{name}") for i, (tool, schema) in enumerate(schemas.items())]


BOTH, OF_ANTHROPIC = both("parameters"), both("input_schema")


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
        events = sse(response)
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

    @pytest.mark.parametrize("step_len", [1, 7, 500])
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
            ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "type", "runs no tools"),
            ({"tools": [{"type": "function"}]}, "tools", "name is required"),
            ({"tools": [{"type": None, "name": "f"}]}, "type", "must be 'function' or 'custom'"),
            ({"tools": [SPACE | {"tools": [{"type": None, "name": "f"}]}]}, "type", "must be 'function' or 'custom'"),
            ({"tool_choice": "required"}, "tool_choice", "needs tools"),
            ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice", "must have name"),
            ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "none of them"),
            ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input", "must have arguments"),
            ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input", "must have output"),
            ({"input": [{"type": "function_call_output", "output": "a"}]}, "input", "must have call_id"),
            ({"input": [{"role": "user", "content": "a", "call_id": "b"}]}, "input", "must not have call_id"),
            ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "must have schema"),
            ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format", "must not have name"),
            ({"tools": [{"type": "custom", "name": "f", "parameters": {}}]}, "tools", "must not have parameters"),
            ({"tools": [{"type": "namespace", "name": "f"}]}, "tools", "must have tools"),
            (
                {"tools": [SPACE | {"tools": [{"type": "namespace", "name": "f"}]}]},
                "type",
                "must be 'function' or 'custom'",
            ),
            ({"tools": [SPACE, WEATHER | {"name": "geo__weather"}]}, "tools", "two are called as 'geo__weather'"),
            ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "has none"),
            ({"input": [{"type": "local_shell_call", "action": {}}]}, "input", "must have call_id"),
            ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input", "1 item"),
        ],
    )
    def test_what_is_wrong_is_named(self, scripted, body, param, said):
        response = scripted.http.post("/v1/responses", json={"input": "hi", **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert said in error["message"]


def sse(response: Any) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    for event in events:
        EVENT.validate_python(event)
    return events


class TestCodex:
    """What Codex CLI sends, by the bodies of its version 0.149.0, with a call of a tool between them."""

    def post(self, scripted: ScriptedServer, **fields: Any) -> Any:
        response = scripted.http.post("/v1/responses", json={"input": "hi", **fields})
        assert response.status_code == 200, response.text
        return response

    def test_the_recorded_turns(self, scripted):
        call = {"name": "exec_command", "arguments": {"cmd": "echo hello"}}
        recorded = json.loads((HERE / "codex.json").read_text(encoding="utf-8"))
        for (first, second), num_tools in zip(recorded, (13, 9), strict=True):
            scripted.engine.answer = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
            response = self.post(scripted, **first)
            assert scripted.prompt.count("<tool>") == num_tools
            output = sse(response)[-1]["response"]["output"]
            assert [(item["name"], item["arguments"]) for item in output] == [("exec_command", '{"cmd": "echo hello"}')]
            assert "an item of type web_search has no effect" in response.headers["x-jsg-warnings"]
            scripted.engine.answer = "It said hello."
            assert sse(self.post(scripted, **second))[-1]["type"] == "response.completed"
            assert json.dumps(call) in scripted.prompt
            assert "Output:\nhello" in scripted.prompt

    def test_what_only_another_server_can_do_or_read_is_left_out(self, scripted):
        tools = [{"type": "web_search", "filters": {}}, {"type": "image_generation"}, CLOCK, {"type": "tool_search"}]
        items = [
            *HI,
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}},
            {"type": "compaction", "encrypted_content": "x"},
        ]
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, CLOCK]}
        warnings = self.post(scripted, input=items, tools=tools, tool_choice=choice).headers["x-jsg-warnings"]
        for kind in ("web_search", "image_generation", "tool_search", "web_search_call", "compaction"):
            assert f"an item of type {kind} has no effect: " in warnings
        assert scripted.prompt.count("<tool>") == 1
        assert scripted.sampling.grammar == grammar([dataclasses.replace(BOTH[1], field="tools[0].parameters")], "auto")

    @pytest.mark.parametrize("step_len", [1, 2, 500])
    @pytest.mark.parametrize("said", ["", '*** Begin\n+"ä" \\ \u0001😀\n', "{" * 30])
    def test_a_custom_tool_is_a_function_with_one_text(self, scripted, said, step_len):
        call = {"name": "patch", "arguments": {"input": said}}
        escaped = json.dumps(call)  # the emoji as two escapes
        for text in (escaped, json.dumps(call, ensure_ascii=False)):
            scripted.engine.answer, scripted.engine.step_len = f"<tool_call>\n{text}\n</tool_call>", step_len
            events = sse(self.post(scripted, tools=[PATCH], stream=True))
            [item] = events[-1]["response"]["output"]
            assert (item["type"], item["name"], item["input"], item["status"]) == (
                *("custom_tool_call", "patch", said, "completed"),
            )
            kinds = [event["type"] for event in events if "custom_tool" in event["type"]]
            deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
            assert kinds == ["response.custom_tool_call_input.delta"] * len(deltas) + [
                "response.custom_tool_call_input.done"
            ]
            assert "".join(deltas) == said
            assert next(e["input"] for e in events if e["type"].endswith("input.done")) == said
        one_text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        one_text["additionalProperties"] = False
        assert scripted.sampling.grammar == grammar([Tool("patch", None, one_text, field="tools[0].format")], "auto")

    def test_the_round_of_a_custom_tool(self, scripted):
        scripted.engine.answer = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'
        made = self.post(scripted, tools=[PATCH], tool_choice={"type": "custom", "name": "patch"}).json()
        [call] = made["output"]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
        scripted.engine.answer = "fine"
        self.post(scripted, tools=[PATCH], input=[*HI, call, result])
        assert '{"name": "patch", "arguments": {"input": "a\\nb"}}' in scripted.prompt
        assert f"tool\n{call['call_id']}: done" in scripted.prompt
        prompt = scripted.prompt
        last = self.post(scripted, tools=[PATCH], input=[result], previous_response_id=made["id"]).json()
        assert scripted.prompt == prompt, "as stored"
        listed = scripted.http.get(f"/v1/responses/{last['id']}/input_items?order=asc").json()["data"]
        assert [item["type"] for item in listed] == ["message", "custom_tool_call", "custom_tool_call_output"]
        assert (listed[1]["input"], listed[2]["output"]) == ("a\nb", "done")

    @pytest.mark.parametrize(
        ("syntax", "definition", "pattern"),
        [
            ("regex", r"^a.(?P<x>b)$", r"^(?:(?:a[^\n](?:b)))$"),
            ("lark", 'start: "+" /(.*)/ LF\n%import common.LF', r"^(?:\+(?:([^\n]*))(?:\n))$"),
            ("lark", 'start: "(" start ")" |', None),
        ],
    )
    def test_a_grammar_is_enforced_where_it_is_regular(self, scripted, syntax, definition, pattern):
        form = {"type": "grammar", "syntax": syntax, "definition": definition}
        response = self.post(scripted, tools=[PATCH | {"format": form}])
        assert (
            definition.splitlines()[0]
            in json.loads(scripted.prompt.split("<tool>")[1].split("</tool>")[0])["function"]["parameters"][
                "properties"
            ]["input"]["description"]
        )
        compiled = json.loads(scripted.sampling.grammar.text)["format"]
        assert (json.dumps(pattern) in json.dumps(compiled)) == (pattern is not None)
        assert ("calls itself" in response.headers.get("x-jsg-warnings", "")) == (pattern is None)
        assert response.json()["tools"][0]["format"] == form

    def test_tools_of_a_namespace(self, scripted):
        scripted.engine.answer = CALL.replace("weather", "geo__weather")
        tools = [SPACE, CLOCK]
        made = self.post(scripted, tools=tools, tool_choice={"type": "function", "name": "weather"}).json()
        assert [tool["type"] for tool in made["tools"]] == ["namespace", "function"]
        shown = json.loads(scripted.prompt.split("<tool>")[1].split("</tool>")[0])["function"]
        assert (shown["name"], shown["description"]) == ("geo__weather", "Places.\n\nOf a city.")
        [call] = made["output"]
        assert (call["namespace"], call["name"], call["arguments"]) == ("geo", "weather", ARGUMENTS)
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
        self.post(scripted, tools=tools, input=[*HI, call, result])
        assert '{"name": "geo__weather", "arguments": {"city": "Bern ä"}}' in scripted.prompt
        prompt = scripted.prompt
        last = self.post(scripted, tools=tools, input=[result], previous_response_id=made["id"]).json()
        assert scripted.prompt == prompt
        listed = scripted.http.get(f"/v1/responses/{last['id']}/input_items?order=asc").json()["data"]
        assert (listed[1]["namespace"], listed[1]["name"]) == ("geo", "weather")

    def test_calls_of_the_local_shell(self, scripted):
        action = {"type": "exec", "command": ["ls", "-l"], "env": {}}
        items = [
            *HI,
            {"type": "local_shell_call", "id": "lsh_1", "action": action, "status": "completed"},
            {"type": "local_shell_call_output", "id": "lsh_1", "output": "a.py"},
        ]
        made = self.post(scripted, input=items).json()
        assert f'{{"name": "local_shell", "arguments": {json.dumps(action)}}}' in scripted.prompt
        assert "tool\nlsh_1: a.py" in scripted.prompt
        listed = scripted.http.get(f"/v1/responses/{made['id']}/input_items?order=asc").json()["data"]
        assert (listed[1]["action"], listed[2]["output"]) == (action, "a.py")


CUT = '{"city": "Be'


class TestCutCalls:
    """Arguments that are no object stand in the prompt as the text that they are, in every interface."""

    WARNING = "arguments of a call are no JSON object: the model sees the text that they are"

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (
                "/v1/chat/completions",
                {
                    "messages": [
                        *HI,
                        {
                            "role": "assistant",
                            "tool_calls": [{"id": "c", "function": {"name": "weather", "arguments": CUT}}],
                        },
                        {"role": "tool", "tool_call_id": "c", "content": "21"},
                    ]
                },
            ),
            (
                "/v1/responses",
                {"input": [*HI, {"type": "function_call", "call_id": "c", "name": "weather", "arguments": CUT}]},
            ),
            (
                "/v1/messages",
                {
                    "max_tokens": 9,
                    "messages": [
                        *HI,
                        {"role": "assistant", "content": [TOOL_USE | {"name": "weather", "input": CUT}]},
                        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "21"}]},
                    ],
                },
            ),
        ],
    )
    def test_in_history(self, scripted, path, body):
        response = scripted.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["x-jsg-warnings"] == self.WARNING
        assert f'{{"name": "weather", "arguments": {CUT}}}' in scripted.prompt
        whole = json.loads(json.dumps(body).replace(json.dumps(CUT), '{"city": "Bern"}'))
        response = scripted.http.post(path, json=whole)
        assert "x-jsg-warnings" not in response.headers
        assert '{"name": "weather", "arguments": {"city": "Bern"}}' in scripted.prompt, "an object is taken"

    def test_in_a_stored_response(self, scripted):
        body = {"input": "hi", "tools": [WEATHER], "max_output_tokens": len(CALL) - 20}
        made = scripted.http.post("/v1/responses", json=body).json()
        [call] = made["output"]
        assert call["status"] == "incomplete"
        body = {"input": "go on", "tools": [WEATHER], "previous_response_id": made["id"]}
        response = scripted.http.post("/v1/responses", json=body)
        assert (response.status_code, response.headers["x-jsg-warnings"]) == (200, self.WARNING)
        assert f'"arguments": {call["arguments"]}}}' in scripted.prompt


class TestAnthropic:
    def ask(self, scripted: ScriptedServer, **fields: Any) -> Any:
        fields = {"model": "fake", "max_tokens": 500, "messages": HI, "tools": CLAUDE_TOOLS, **fields}
        return scripted.anthropic().messages.create(**fields)

    def test_a_call(self, scripted):
        made = self.ask(scripted)
        [block] = made.content
        assert (block.type, block.name, block.input) == ("tool_use", "weather", {"city": "Bern ä"})
        assert (made.stop_reason, made.stop_sequence) == ("tool_use", None)
        assert scripted.sampling.grammar == grammar(OF_ANTHROPIC, "auto")
        assert scripted.prompt.count("<tool>") == 2

    @pytest.mark.parametrize(
        ("choice", "tools", "mode", "parallel"),
        [
            ({"type": "auto"}, OF_ANTHROPIC, "auto", True),
            ({"type": "auto", "disable_parallel_tool_use": True}, OF_ANTHROPIC, "auto", False),
            ({"type": "any"}, OF_ANTHROPIC, "required", True),
            ({"type": "any", "disable_parallel_tool_use": True}, OF_ANTHROPIC, "required", False),
            ({"type": "tool", "name": "clock"}, OF_ANTHROPIC[1:], "required", False),
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


@pytest.mark.parametrize("step_len", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (' {\n"input" \t: "a b" } ', "a b"),
        ('{"input": "\\ud83d\\ude00\\n"}', "\U0001f600\n"),
        ('{"input": "a\\ud83db\\ud83d\\nc\\ud83d"}', "a\ufffdb\ufffd\nc\ufffd"),
        ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
        ('{"other": "a"}', ""),
        ("{" + " " * 1000 + '"input": "a"' + " " * 1000 + "}", "a"),
    ],
)
def test_the_input_of_a_custom_tool_holds_back_little(arguments: str, said: str, step_len: int):
    reader, found = InputReader(), ""
    for start in range(0, len(arguments), step_len):
        found += reader.push(arguments[start : start + step_len])
        assert len(reader._held) < 15 + step_len
    assert found == said
