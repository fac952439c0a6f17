"""Thoughts in `/v1/responses` and in Anthropic's `/v1/messages`, through the real packages."""

import json
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from jsg.processing.tokenizer import load_tokenizer
from jsg.server.http.field_rules import HEADER
from jsg.server.openai.responses import own_tokens
from jsg.speech.answers.answer import Answer
from jsg.speech.answers.thoughts import MARKERS, Thoughts
from jsg.speech.rules.thinking import sealed, unsealed
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.scripted import TOOL_TEMPLATE, ScriptedServer
from tests.server.test_thoughts import CALL, HI, SAID, TEMPLATE

EVENT, CLAUDE_EVENT = TypeAdapter(ResponseStreamEvent), TypeAdapter(RawMessageStreamEvent)
THOUGHTS, TEXT = "why é", "so 1"
CALLED = f"<think>\nwhy é\n</think>\n\n{CALL}"
UNDECIDED = "<think>\nwhy é\n</think>"
ANSWERS = {
    "text": SAID,
    "call": CALLED,
    "both": f"<think>é</think>Well.\n{CALL}",
    "thoughts only": UNDECIDED,
    "no thoughts": "so <think>",
}
CLOCK: Any = {"type": "function", "name": "clock"}
CLAUDE_CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
ON: Any = {"type": "enabled", "budget_tokens": 50}
LOGPROBS: Any = "message.output_text.logprobs"
SEALED: Any = "reasoning.encrypted_content"
RENDERED = "<|im_start|>assistant\n<think>\nwhy é\n</think>\n\n"
CHUNKS = pytest.mark.parametrize("step_len", [1, 2, 3, 1000])


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> ScriptedServer:
    """Of a model whose markers are text; `test_thoughts` has one whose markers are special tokens too."""
    directory = tmp_path_factory.mktemp("forms")
    write_byte_tokenizer(directory, TEMPLATE + "{% if 'tool' in [] %}{% endif %}")
    return ScriptedServer(directory)


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> ScriptedServer:
    """Of a model that thinks, and whose template reads no thoughts."""
    directory = tmp_path_factory.mktemp("forgetful")
    write_byte_tokenizer(directory, TOOL_TEMPLATE + "{# <think> #}")
    return ScriptedServer(directory)


READING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.FIELD %}<think>\n{{ m.FIELD }}\n</think>\n\n"
    "{% if m.content and m.tool_calls %}{{ raise_exception('not both') }}{% endif %}{% endif %}{{ m.content }}"
    "{{ m.tool_calls | length if m.tool_calls else '' }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
"""A template that refuses thoughts beside a content and calls, as gpt-oss's does."""


def histories(content: str, thoughts: str, *, calls: bool) -> dict[str, Any]:
    """A conversation whose second turn has thoughts, in the form of each interface."""
    called = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    chat = {"role": "assistant", "content": content, "reasoning_content": thoughts}
    chat |= {"tool_calls": [called]} if calls else {}
    item = {"type": "reasoning", "id": "rs_a", "summary": [{"type": "summary_text", "text": thoughts}]}
    said = [{"role": "assistant", "content": content}] if content else []
    function = {"type": "function_call", "call_id": "a", "name": "clock", "arguments": "{}"}
    blocks: list[Any] = [{"type": "thinking", "thinking": thoughts, "signature": ""}]
    blocks += [{"type": "text", "text": content}] if content else []
    blocks += [{"type": "tool_use", "id": "a", "name": "clock", "input": {}}] if calls else []
    return {
        "/v1/chat/completions": {"messages": [*HI, chat, *HI]},
        "/v1/responses": {"input": [*HI, item, *said, *([function] if calls else []), *HI]},
        "/v1/messages": {"max_tokens": 9, "messages": [*HI, {"role": "assistant", "content": blocks}, *HI]},
    }


def test_a_contradiction_is_told_under_anthropics_names(scripted):
    body = {"max_tokens": 90, "messages": HI, "thinking": ON, "output_config": {"effort": "none"}}
    answer = scripted.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("output_config.effort must not contradict")


PATHS = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])


@PATHS
@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_go_to_the_template_under_the_name_that_it_reads(tmp_path, path, field):
    write_byte_tokenizer(tmp_path, READING.replace("FIELD", field))
    server = ScriptedServer(tmp_path)
    answer = server.http.post(path, json=histories("so", "why", calls=False)[path])
    assert answer.status_code == 200, answer.text
    assert "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nso<|im_end|>" in server.prompt


@PATHS
@pytest.mark.parametrize("content", ["", "Well."])
def test_a_template_that_refuses_thoughts_beside_a_content_and_calls_gets_none(tmp_path, path, content):
    write_byte_tokenizer(tmp_path, READING.replace("FIELD", "thinking"))
    server = ScriptedServer(tmp_path)
    answer = server.http.post(path, json=histories(content, "why", calls=True)[path])
    assert answer.status_code == 200, answer.text
    thoughts = "" if content else "<think>\nwhy\n</think>\n\n"
    assert f"<|im_start|>assistant\n{thoughts}{content}1<|im_end|>" in server.prompt


@pytest.fixture(autouse=True)
def _plain(scripted: ScriptedServer, forgetful: ScriptedServer) -> None:
    for server in (scripted, forgetful):
        server.reset()
        server.engine.answer = SAID


def events_of(scripted: ScriptedServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = scripted.http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def nameless(value: Any) -> Any:
    """A JSON value without what differs between two answers: names and times."""
    if isinstance(value, list):
        return [nameless(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = {"id", "call_id", "item_id", "created_at", "completed_at", "tool_use_id"}
    return {name: nameless(item) for name, item in value.items() if name not in names}


class TestResponses:
    def ask(self, scripted: ScriptedServer, **fields: Any) -> Any:
        return scripted.openai().responses.create(**{"model": "fake", "input": "hi", **fields})

    def test_thoughts_are_an_item_before_the_message(self, scripted):
        made = self.ask(scripted)
        thoughts, message = made.output
        assert (thoughts.type, thoughts.summary, thoughts.status) == ("reasoning", [], "completed")
        assert [(part.type, part.text) for part in thoughts.content] == [("reasoning_text", THOUGHTS)]
        assert thoughts.id.startswith("rs_") and thoughts.encrypted_content is None
        assert (message.type, made.output_text) == ("message", TEXT)
        assert made.usage.output_tokens_details.reasoning_tokens == len("\nwhy é\n".encode())
        assert made.reasoning is None

    @CHUNKS
    @pytest.mark.parametrize("kind", ANSWERS)
    def test_a_stream_adds_up_to_the_same(self, scripted, kind, step_len):
        scripted.engine.answer, scripted.engine.step_len = ANSWERS[kind], step_len
        body = {"input": "hi", "tools": [CLOCK], "include": [SEALED]}
        events = events_of(scripted, "/v1/responses", body)
        assert [EVENT.validate_python(event).sequence_number for event in events] == list(range(len(events)))
        ended = events[-1]["response"]
        whole = scripted.http.post("/v1/responses", json=body).json()
        Response.model_validate(whole)
        assert nameless(whole) == nameless(ended)
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == ended["output"]
        for item in ended["output"]:
            mine = [event for event in events if event.get("item_id") == item["id"]]
            said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert "".join(event["delta"] for event in mine if event["type"].endswith(".delta")) == said

    def test_the_package_collects_a_stream(self, scripted):
        scripted.engine.answer = ANSWERS["both"]
        with scripted.openai().responses.stream(model="fake", input="hi", tools=[CLOCK]) as stream:
            final = stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert (final.output[0].content[0].text, final.output_text) == ("é", "Well.")

    def test_events_come_in_openais_order(self, scripted):
        scripted.engine.step_len = 1000
        kinds = [event["type"] for event in events_of(scripted, "/v1/responses", {"input": "hi"})]
        assert [kind.removeprefix("response.") for kind in kinds] == [
            *("created", "in_progress"),
            *("output_item.added", "content_part.added", "reasoning_text.delta"),
            *("reasoning_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done"),
            "completed",
        ]

    @CHUNKS
    @pytest.mark.parametrize("tools", [[], [CLOCK]])
    def test_only_the_answer_has_log_probabilities(self, scripted, tools, step_len):
        scripted.engine.step_len = step_len
        asked = {"input": "hi", "include": [LOGPROBS], "tools": tools}
        events = events_of(scripted, "/v1/responses", asked)
        streamed = [entry for event in events if "output_text.delta" in event["type"] for entry in event["logprobs"]]
        assert "".join(entry["token"] for entry in streamed) == f"{TEXT}<|im_end|>"
        assert events[-1]["response"]["output"][1]["content"][0]["logprobs"] == streamed

    def test_items_of_thoughts_behind_one_another_are_of_one_turn_and_at_the_end_of_none(self, scripted):
        items = [
            {"type": "reasoning", "id": f"rs_{text}", "summary": [{"type": "summary_text", "text": text}]}
            for text in "AB"
        ]
        self.ask(scripted, input=[*HI, *items, {"role": "assistant", "content": "m"}, *HI])
        assert "assistant\n<think>\nA\n\nB\n</think>\n\nm<|im_end|>" in scripted.prompt
        assert scripted.prompt.count("<|im_start|>assistant") == 2
        raw = scripted.http.post("/v1/responses", json={"input": [*HI, *items]})
        assert raw.headers[HEADER].startswith("an item of type reasoning has no effect: no answer")
        assert scripted.prompt.count("<|im_start|>assistant") == 1
        refused = scripted.http.post("/v1/responses", json={"input": items})
        assert refused.json()["error"]["param"] == "input"

    def test_an_answer_that_ends_in_its_thoughts(self, scripted):
        cut = self.ask(scripted, max_output_tokens=len("<think>\nwhy"))
        assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]
        assert (cut.status, cut.output_text) == ("incomplete", "")
        self.ask(scripted, previous_response_id=cut.id)
        assert "<|im_start|>assistant\n<think>\nwhy\n</think>\n\n<|im_end|>" in scripted.prompt
        scripted.engine.answer = UNDECIDED
        made = self.ask(scripted)
        assert [(item.type, item.status) for item in made.output] == [
            ("reasoning", "completed"),
            ("message", "completed"),
        ]

    def test_effort_and_budget(self, scripted):
        scripted.engine.answer = TEXT
        asked: Any = {"reasoning": {"effort": "none", "summary": "auto"}}
        made = self.ask(scripted, **asked)
        assert scripted.prompt.endswith("<think>\n\n</think>\n\n")
        assert (made.reasoning.effort, made.reasoning.summary) == ("none", "auto")
        counted = scripted.openai().responses.input_tokens.count(input="hi", **asked)
        assert counted.input_tokens == made.usage.input_tokens
        self.ask(scripted, reasoning={"effort": "high"}, extra_body={"thinking_budget": 5})
        assert scripted.prompt.endswith("assistant\n") and scripted.request.thought_limit.max_tokens == 5
        self.ask(scripted, extra_body={"thinking_budget": -1})
        assert scripted.request.thought_limit is None

    def test_the_next_turn_has_them_where_they_were(self, scripted):
        """Whether the server kept them, the client sends them back, or refers to them."""
        first = self.ask(scripted)
        second: Any = {"role": "user", "content": "and?"}
        sent = [item.model_dump() for item in first.output]
        named = [{"type": "item_reference", "id": item.id} for item in first.output]
        prompts = []
        for asked in (
            {"input": [second], "previous_response_id": first.id},
            {"input": [*HI, *sent, second]},
            {"input": [*HI, *named, second]},
            {"input": [*HI, *[item | {"id": None} for item in sent], second]},
        ):
            made = self.ask(scripted, **asked)
            assert f"{RENDERED}so 1<|im_end|>\n<|im_start|>user\nand?" in scripted.prompt
            prompts.append(scripted.request.input_ids)
            items = list(scripted.openai().responses.input_items.list(made.id, order="asc"))
            assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
            assert items[1].content[0].text == THOUGHTS
        assert prompts[:-1] == prompts[1:]
        page = scripted.http.get(f"/v1/responses/{made.id}/input_items").json()
        assert ResponseItemList.model_validate(page).data[2].type == "reasoning"

    def test_thoughts_before_calls_are_in_the_turn_of_the_calls(self, scripted):
        scripted.engine.answer = CALLED
        first = self.ask(scripted, tools=[CLOCK])
        thoughts, call = first.output
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        for asked in (
            {"input": [result], "previous_response_id": first.id},
            {"input": [*HI, thoughts.model_dump(), call.model_dump(), result]},
        ):
            self.ask(scripted, tools=[CLOCK], **asked)
            assert f"{RENDERED}{CALL}<|im_end|>\n<|im_start|>tool\nnoon" in scripted.prompt

    def test_a_message_with_the_id_of_thoughts_is_a_message(self, scripted):
        thoughts = self.ask(scripted).output[0]
        self.ask(scripted, input=[*HI, {"role": "assistant", "content": THOUGHTS, "id": thoughts.id}, *HI])
        assert f"<|im_start|>assistant\n{THOUGHTS}<|im_end|>" in scripted.prompt

    @pytest.mark.parametrize(
        ("item", "shown"),
        [
            ({"content": [{"type": "reasoning_text", "text": "a"}], "encrypted_content": sealed("b")}, "a"),
            ({"content": None, "encrypted_content": sealed("b"), "summary": []}, "b"),
            ({"encrypted_content": "foreign", "summary": [{"type": "summary_text", "text": "c"}] * 2}, "c\n\nc"),
        ],
    )
    def test_what_an_item_says(self, scripted, item, shown):
        said: Any = {"role": "assistant", "content": "so"}
        self.ask(scripted, input=[*HI, {"type": "reasoning", **item}, said, *HI])
        assert f"<think>\n{shown}\n</think>\n\nso<|im_end|>" in scripted.prompt

    def test_a_client_that_keeps_only_what_is_sealed(self, scripted):
        first = self.ask(scripted, include=[SEALED], store=False)
        sent: Any = [
            item.model_dump(exclude={"content"} if item.type == "reasoning" else None) for item in first.output
        ]
        self.ask(scripted, input=[*HI, *sent, *HI], include=[SEALED], store=False)
        assert f"{RENDERED}so 1" in scripted.prompt

    def test_a_template_that_reads_none(self, forgetful):
        first = self.ask(forgetful)
        body = {"input": [{"role": "user", "content": "and?"}], "previous_response_id": first.id}
        kept = forgetful.http.post("/v1/responses", json=body)
        assert HEADER not in kept.headers, "the client sent none"
        prompt = forgetful.prompt
        sent = [*HI, *[item.model_dump() for item in first.output], {"role": "user", "content": "and?"}]
        response = forgetful.http.post("/v1/responses", json={"input": sent})
        assert response.headers[HEADER].startswith("an item of type reasoning has no effect: the chat template drops")
        assert forgetful.prompt == prompt
        assert THOUGHTS not in prompt and f"assistant\n{TEXT}<|im_end|>" in prompt


def test_the_own_tokens_of_an_answer_are_without_its_thoughts(tmp_path):
    """They are in the next prompt where the template writes the text. A token may not be of both."""
    write_byte_tokenizer(tmp_path, None)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {"ab": 256, "Ċa": 257}
    content["model"]["merges"] = [["a", "b"], ["Ċ", "a"]]
    for token in content["added_tokens"]:
        token["id"] += 2
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    a, b, merged = *tokenizer.encode("a"), *tokenizer.encode("b"), 257
    finish = FinishReason(FinishType.STOP, matched=259)

    def tokens(before: str, *own: int) -> list[int]:
        request = Request(rid="a", input_ids=(1,), sampling=SamplingParams())
        thoughts = Thoughts(MARKERS["qwen3"])
        answer = Answer(request, tokenizer, is_continued=False, thoughts=thoughts)
        answer.push(RequestOutput(rid="a", token_ids=(*tokenizer.encode(before), *own, 259), finish=finish))
        assert answer.text == "ab"
        return list(own_tokens(answer, tokenizer, has_thoughts=True))

    assert tokens("<think>\nab\n</think>\n\n", a, b) == [a, b] and tokens("", a, b) == [a, b]
    assert tokens("<think></think>", a, b) == [a, b] and tokens("<think>\nab\n</think>\n", merged, b) == []


class TestMessages:
    def ask(self, scripted: ScriptedServer, messages: Any = HI, **fields: Any) -> Any:
        fields = {"model": "fake", "max_tokens": 500, **fields}
        return scripted.anthropic().messages.create(messages=messages, **fields)

    def test_thoughts_are_a_block_before_the_text(self, scripted):
        thinking, text = self.ask(scripted, thinking=ON).content
        assert (thinking.type, thinking.thinking, text.type, text.text) == ("thinking", THOUGHTS, "text", TEXT)
        assert thinking.signature
        assert scripted.request.thought_limit.max_tokens == 50
        adaptive = self.ask(scripted, thinking={"type": "adaptive"})
        assert [block.type for block in adaptive.content] == ["thinking", "text"]
        assert scripted.request.thought_limit is None

    @pytest.mark.parametrize(
        ("display", "step_len"),
        [*(("summarized", step_len) for step_len in (1, 2, 3, 1000)), ("omitted", 1), ("omitted", 1000), (None, 2)],
    )
    @pytest.mark.parametrize("kind", ANSWERS)
    def test_the_package_adds_a_stream_up_to_the_same(self, scripted, kind, display, step_len):
        scripted.engine.answer, scripted.engine.step_len = ANSWERS[kind], step_len
        asked: Any = {} if display is None else {"thinking": ON | {"display": display}}
        asked |= {"model": "fake", "max_tokens": 500, "messages": HI, "tools": [CLAUDE_CLOCK]}
        with scripted.anthropic().messages.stream(**asked) as stream:
            streamed = json.loads(stream.get_final_message().model_dump_json(exclude_none=True))
        whole = json.loads(scripted.anthropic().messages.create(**asked).model_dump_json(exclude_none=True))
        assert nameless(streamed["content"]) == nameless(whole["content"])
        assert streamed["stop_reason"] == whole["stop_reason"]
        kinds = [block["type"] for block in whole["content"]]
        assert kinds.count("thinking") == (display is not None and kind != "no thoughts")

    @pytest.mark.parametrize(("display", "shown"), [("summarized", [THOUGHTS]), ("omitted", [])])
    def test_events_come_in_anthropics_order(self, scripted, display, shown):
        scripted.engine.step_len = 1000
        body = {"model": "fake", "max_tokens": 500, "messages": HI, "thinking": ON | {"display": display}}
        events = events_of(scripted, "/v1/messages", body)
        for event in events:
            CLAUDE_EVENT.validate_python(event)
        assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
        kinds = [event.get("delta", {}).get("type", event["type"]) for event in events]
        assert kinds[1:] == [
            "content_block_start",
            *["thinking_delta"] * len(shown),
            *("signature_delta", "content_block_stop"),
            *("content_block_start", "text_delta", "content_block_stop"),
            *("message_delta", "message_stop"),
        ]
        assert [event["delta"]["thinking"] for event in events if "thinking" in event.get("delta", {})] == shown

    @pytest.mark.parametrize(
        ("fields", "is_off"),
        [
            ({}, False),
            ({"thinking": {"type": "disabled"}}, True),
            ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, True),
        ],
    )
    def test_they_are_not_shown_to_those_who_did_not_ask(self, scripted, fields, is_off):
        made = self.ask(scripted, **fields)
        assert scripted.prompt.endswith("<think>\n\n</think>\n\n") is is_off
        if not is_off:
            assert [block.text for block in made.content] == [TEXT]
        counted = scripted.anthropic().messages.count_tokens(model="fake", messages=HI, **fields)
        assert counted.input_tokens == made.usage.input_tokens

    def test_an_answer_that_is_cut_in_its_thoughts(self, scripted):
        made = self.ask(scripted, thinking={"type": "adaptive"}, max_tokens=9)
        assert [block.type for block in made.content] == ["thinking"]
        assert made.stop_reason == "max_tokens"

    def test_the_budget_is_less_than_the_limit(self, scripted):
        body = {"messages": HI, "max_tokens": 50, "thinking": ON}
        response = scripted.http.post("/v1/messages", json=body)
        assert response.status_code == 400
        assert "50 and 50; lower the budget" in response.json()["error"]["message"]
        assert scripted.http.post("/v1/messages", json=body | {"max_tokens": 0}).status_code == 200

    @pytest.mark.parametrize("display", ["summarized", "omitted"])
    def test_the_next_turn_has_them_where_they_were(self, scripted, display):
        """Omitted thoughts travel in their signature."""
        first = self.ask(scripted, thinking=ON | {"display": display})
        assert (first.content[0].thinking == "") is (display == "omitted")
        self.ask(scripted, [*HI, {"role": "assistant", "content": first.content}, *HI], thinking=ON)
        assert f"{RENDERED}so 1<|im_end|>\n<|im_start|>user" in scripted.prompt

    def test_thoughts_before_calls_are_in_the_turn_of_the_calls(self, scripted):
        scripted.engine.answer = CALLED
        first = self.ask(scripted, tools=[CLAUDE_CLOCK], thinking=ON)
        assert [block.type for block in first.content] == ["thinking", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "noon"}
        conversation = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        self.ask(scripted, conversation, tools=[CLAUDE_CLOCK], thinking=ON)
        assert f"{RENDERED}{CALL}<|im_end|>\n<|im_start|>tool\nnoon" in scripted.prompt

    def test_the_thoughts_of_one_turn_are_joined(self, scripted):
        def thought(text: str) -> dict[str, str]:
            return {"type": "thinking", "thinking": text, "signature": "foreign"}

        blocks = [thought("a"), {"type": "text", "text": "s"}, {"type": "redacted_thinking", "data": sealed("b")}]
        turns = [
            {"role": "assistant", "content": blocks},
            {"role": "assistant", "content": [thought("c"), thought("")]},
        ]
        self.ask(scripted, [*HI, *turns, *HI])
        assert "<think>\na\n\nb\n\nc\n</think>\n\ns<|im_end|>" in scripted.prompt

    def test_a_continued_message_has_none(self, scripted):
        made = self.ask(scripted, [*HI, {"role": "assistant", "content": "and"}], thinking={"type": "adaptive"})
        assert [block.type for block in made.content] == ["text"]

    def test_a_template_that_reads_none(self, forgetful):
        thinking = {"type": "thinking", "thinking": "because", "signature": "x"}
        said = {"role": "assistant", "content": [thinking, {"type": "text", "text": "so"}]}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = {"messages": [*HI, said, *HI]} | ({} if "count" in path else {"max_tokens": 5})
            response = forgetful.http.post(path, json=body)
            assert response.headers[HEADER].startswith("a block of type thinking has no effect")
        assert "because" not in forgetful.prompt


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning"),
        ("/v1/responses", {"input": "hi", "reasoning": {"summary": "auto"}}, None),
        ("/v1/messages", {"messages": HI, "output_config": {"effort": "low"}}, "output_config.effort"),
        ("/v1/messages", {"messages": HI, "thinking": {"type": "adaptive"}}, None),
    ],
)
def test_what_only_a_template_can_do_has_no_effect_where_it_does_not(forgetful, path, fields, named):
    response = forgetful.http.post(path, json=fields | ({"max_tokens": 9} if "messages" in fields else {}))
    assert response.status_code == 200
    warning = None if named is None else f"{named} has no effect: the model's chat template does not read it"
    assert (response.headers.get(HEADER) or "").startswith(warning or "")
    assert (HEADER in response.headers) is (named is not None)


@pytest.mark.parametrize("word", ["", "foreign", "jsg1.é", "jsg1.a", "jsg1._w=="])
def test_only_what_this_server_sealed_is_read(word):
    assert unsealed(sealed("why é\n")) == "why é\n" and unsealed(word) is None
