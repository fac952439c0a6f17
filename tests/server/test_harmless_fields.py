"""Fields without an effect: taken with a warning, and refused with `--strict-fields`."""

import logging
from collections.abc import Iterator

import anthropic
import httpx
import pytest

from jsg.server.anthropic.body import CountTokensBody, MessagesBody, OutputConfig
from jsg.server.native.generate import GenerateBody
from jsg.server.openai.chat import ChatBody
from jsg.server.openai.completions import CompletionBody
from jsg.server.openai.responses_body import InputItem, InputTokensBody, ResponsePart, ResponsesBody, TextConfig
from tests.server.running import RunningServer, data_of
from tests.server.threads import ServerMaker

HEADER = "x-jsg-warnings"
HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BODIES = {
    CHAT: {"messages": HI, "max_tokens": 3},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 3},
    RESPONSES: {"input": "hi", "max_output_tokens": 3},
    MESSAGES: {"messages": HI, "max_tokens": 3},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 3}},
}
SHOWN = {CHAT: "choices", COMPLETIONS: "choices", RESPONSES: "output", MESSAGES: "content", "/generate": "output_ids"}
CASES = [
    *((path, name, value) for path in (CHAT, COMPLETIONS) for name, value in {
        "guided_decoding_backend": "xgrammar",
        "reasoning": {"effort": "low"},
        "reasoning_effort": "low",
        "service_tier": "flex",
        "store": True,
        "verbosity": "low",
    }.items()),
    (CHAT, "chat_template_kwargs.enable_thinking", {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, "enable_thinking", True),
    (CHAT, "prompt_cache_options", {"mode": "explicit"}),
    (CHAT, "prompt_cache_retention", "24h"),
    (CHAT, "thinking", {"type": "enabled"}),
    (CHAT, "thinking", {"type": "adaptive", "budget_tokens": 1024}),
    (RESPONSES, "reasoning", {"effort": "low", "summary": "auto"}),
    (RESPONSES, "service_tier", "priority"),
    (RESPONSES, "truncation", "auto"),
    (RESPONSES, "prompt_cache_options", {"ttl": "1h"}),
    (RESPONSES, "verbosity", {"text": {"verbosity": "low"}}),
    (RESPONSES, "phase", {"input": [HI[0] | {"phase": "commentary"}]}),
    (RESPONSES, "encrypted_content", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, *HI]}),
    (RESPONSES, "context", {"reasoning": {"context": "all_turns"}}),
    (RESPONSES, "mode", {"reasoning": {"mode": "pro"}}),
    (RESPONSES, "thinking_budget", 5),
    (MESSAGES, "output_config.effort", {"output_config": {"effort": "low"}}),
    (MESSAGES, "speed", "fast"),
    (MESSAGES, "context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    (MESSAGES, "thinking", {"type": "enabled", "budget_tokens": 2}),
    (MESSAGES, "thinking", {"type": "adaptive"}),
    (MESSAGES, "a block of type redacted_thinking", {"messages": [
        *HI, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        {"role": "user", "content": "so?"},
    ]}),
    (MESSAGES, "thread", {"type": "create"}),
    ("/generate", "routing_key", "a"),
    ("/generate", "custom_labels", {"team": "a"}),
]  # fmt: skip


def body_with(path: str, name: str, value: object) -> dict:
    """The body of a case: its value is that of the field, or the fields, where the field is inside another one."""
    around = {"text", "input", "messages", "output_config", "chat_template_kwargs", "reasoning"}
    is_inside = isinstance(value, dict) and value.keys() & around
    return BODIES[path] | (value if is_inside else {name: value})


@pytest.fixture(scope="module")
def strict(make_server: ServerMaker) -> Iterator[httpx.Client]:
    with make_server(server={"strict_fields": True}) as made:
        yield made.http


@pytest.mark.parametrize(("path", "name", "value"), CASES)
def test_it_is_taken_with_a_warning_and_changes_nothing(http, path, name, value):
    plain, response = http.post(path, json=BODIES[path]), http.post(path, json=body_with(path, name, value))
    assert response.status_code == 200, response.text
    assert response.headers[HEADER].startswith(name) and " has no effect: " in response.headers[HEADER]
    assert HEADER not in plain.headers
    if name.startswith("a block"):
        said = [*HI, {"role": "assistant", "content": ""}, {"role": "user", "content": "so?"}]
        plain = http.post(path, json=BODIES[path] | {"messages": said})
    if path == RESPONSES:
        texts = [answer.json()["output"][0]["content"] for answer in (plain, response)]
        assert texts[0] == texts[1]
    else:
        assert plain.json()[SHOWN[path]] == response.json()[SHOWN[path]]


@pytest.mark.parametrize(("path", "name", "value"), CASES)
def test_strict_fields_refuse_it(strict, path, name, value):
    response = strict.post(path, json=body_with(path, name, value))
    assert response.status_code == 400
    assert name.split(".")[-1] in response.json()["error"]["message"]
    assert strict.post(path, json=BODIES[path]).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_streams_say_it_too(http, path):
    fields = {CHAT: "store", COMPLETIONS: "store", MESSAGES: "speed", RESPONSES: "service_tier"}
    values = {"store": True, "speed": "fast", "service_tier": "flex", "routing_key": "a"}
    name = fields.get(path, "routing_key")
    with http.stream("POST", path, json=BODIES[path] | {"stream": True, name: values[name]}) as response:
        assert response.headers[HEADER].startswith(name)
        events = data_of(response.iter_lines())
    if path == "/generate":
        assert all(event["meta_info"]["warnings"][0].startswith(name) for event in events)


@pytest.mark.parametrize("is_list", [False, True])
def test_generate_lists_them_in_each_answer(http, is_list):
    body = {"text": ["a", "b"] if is_list else "a", "sampling_params": {"max_new_tokens": 1}}
    warned = http.post("/generate", json=body | {"routing_key": "a", "custom_labels": {"x": "y"}}).json()
    plain = http.post("/generate", json=body | {"routing_key": None, "custom_labels": {}}).json()
    for answer in warned if is_list else [warned]:
        assert [text.split()[0] for text in answer["meta_info"]["warnings"]] == ["routing_key", "custom_labels"]
    for answer in plain if is_list else [plain]:
        assert "warnings" not in answer["meta_info"]


def test_the_log_says_it_once_for_each_endpoint(make_server, caplog):
    with make_server() as made, caplog.at_level(logging.WARNING):
        for _ in range(3):
            for path in (CHAT, COMPLETIONS):
                assert made.http.post(path, json=BODIES[path] | {"verbosity": "low"}).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "verbosity" in record.getMessage()]
    assert [line.split(":")[0] for line in lines] == [CHAT, COMPLETIONS]


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_that_are_null_ask_for_nothing(http, strict, path):
    null, other = ({**BODIES[path], "nonsense": value} for value in (None, False))
    response = http.post(path, json=null)
    assert response.status_code == 200
    assert HEADER not in response.headers
    assert "unknown field 'nonsense'" in http.post(path, json=other).json()["error"]["message"]
    assert "unknown field 'nonsense'" in strict.post(path, json=null).json()["error"]["message"]


def test_unknown_fields_of_messages_and_parts_may_be_null_too(http):
    part = {"type": "text", "text": "hi", "nonsense": None}
    assistant = {"role": "assistant", "content": "a", "reasoning": "", "reasoning_content": "", "nonsense": None}
    conversation = [{"role": "user", "content": [part]}, assistant, *HI]
    assert http.post(CHAT, json=BODIES[CHAT] | {"messages": conversation}).status_code == 200
    said = http.post(CHAT, json=BODIES[CHAT] | {"messages": [assistant | {"reasoning": "so"}, *HI]})
    assert said.status_code == 200 and said.headers[HEADER].startswith("reasoning_content has no effect")


class TestThreads:
    """The tool runners of Anthropic's packages ask for a thread, and go on without one where the server has none."""

    def test_one_that_goes_on_is_refused_in_the_way_that_clients_understand(self, server: RunningServer, strict):
        thread = {"type": "continue", "previous_message_id": "msg_1"}
        for client, body in ((server.http, thread), (strict, thread), (strict, {"type": "create"})):
            response = client.post(MESSAGES, json=BODIES[MESSAGES] | {"thread": body, "stream": True})
            assert response.status_code == 400
            assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}

    def test_the_package_goes_on_without_one(self, server: RunningServer):
        with anthropic.Anthropic(base_url=str(server.http.base_url), api_key="none", max_retries=0) as client:
            thread = client.beta.messages.thread(
                model="fake", max_tokens=3, unsupported_request_behavior="continue_unthreaded"
            )
            first, second = (thread.send({"role": "user", "content": text}) for text in ("hi", "and now?"))
            counted = client.messages.count_tokens(model="fake", messages=thread.messages[:3])
        assert first.usage.output_tokens == 3
        assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) == counted.input_tokens

    def test_other_refusals_have_no_details(self, http):
        error = http.post(MESSAGES, json=BODIES[MESSAGES] | {"container": "c"}).json()["error"]
        assert error.keys() == {"type", "message"}


def num_input(response: httpx.Response) -> int:
    usage = response.json()["usage"]
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


def test_thoughts_that_the_template_drops_are_no_fault(http, strict):
    """They change nothing, and a client cannot know."""
    item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "because"}]}
    block = {"type": "thinking", "thinking": "because", "signature": "x"}
    turn = {"role": "assistant", "content": "a"}
    for path, name, plain, dropped in (
        (RESPONSES, "an item of type reasoning", {"input": [*HI, turn, *HI]}, {"input": [*HI, item, turn, *HI]}),
        (MESSAGES, "a block of type thinking", {"messages": [*HI, turn, *HI]}, {"messages": [
            *HI, {"role": "assistant", "content": [block, {"type": "text", "text": "a"}]}, *HI,
        ]}),
    ):  # fmt: skip
        used = num_input(http.post(path, json=BODIES[path] | plain))
        for client in (http, strict):
            response = client.post(path, json=BODIES[path] | dropped)
            assert response.headers[HEADER].startswith(f"{name} has no effect: the chat template drops")
            assert num_input(response) == used


def test_tokenize_counts_what_chat_takes(http, strict):
    body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
    counted = http.post("/tokenize", json=body)
    usage = http.post(CHAT, json=body | {"max_tokens": 1}).json()["usage"]
    assert counted.json()["count"] == usage["prompt_tokens"]
    assert counted.headers[HEADER].startswith("chat_template_kwargs.enable_thinking")
    assert strict.post("/tokenize", json=body).status_code == 400


def test_what_would_change_the_answer_is_refused(http):
    clearing = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    for path, body in ((CHAT, {"thinking": {"type": "loud"}}), (MESSAGES, clearing)):
        assert next(iter(body)) in http.post(path, json=BODIES[path] | body).json()["error"]["message"]
    kwargs = {"chat_template_kwargs": {"style": "slow"}}
    assert "read 'style'" in http.post(CHAT, json=BODIES[CHAT] | kwargs).json()["error"]["message"]


def test_no_field_has_two_fates():
    bodies = (ChatBody, CompletionBody, ResponsesBody, InputTokensBody, ResponsePart, InputItem, TextConfig)
    for body in (*bodies, MessagesBody, CountTokensBody, OutputConfig, GenerateBody):
        fates = (body.HARMLESS.keys(), body.REFUSED.keys(), body.known_fields())
        assert len(set().union(*fates)) == sum(map(len, fates)), body
