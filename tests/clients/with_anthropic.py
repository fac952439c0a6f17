"""Anthropic's package: messages, streams, tools and its tool runner, forms, token counts, errors, async."""

import asyncio
import os
from collections.abc import Iterator

import anthropic
import pydantic
import pytest

ASK = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
CALL = [{"role": "user", "content": 'SCRIPT call add {"a": 2, "b": 3} || say The sum is 5.'}]
EMBEDDED = {"model": "tiny", "max_tokens": 64}
GREEDY = {"extra_body": {"temperature": 0}}  # the newest version has no parameter for it
SCRIPTED = {"model": "scripted", "max_tokens": 1000}


class Sum(pydantic.BaseModel):
    """A sum."""

    a: int
    b: int


def says(script: str) -> list[dict]:
    return [{"role": "user", "content": f"SCRIPT {script}"}]


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    """Of the embedded model."""
    with anthropic.Anthropic(base_url=os.environ["EMBEDDED"], api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def scripted() -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=os.environ["SCRIPTED"], api_key="none", max_retries=0) as made:
        yield made


def with_async(work):
    async def run():
        async with anthropic.AsyncAnthropic(base_url=os.environ["SCRIPTED"], api_key="none", max_retries=0) as made:
            return await work(made)

    return asyncio.run(run())


def test_message(client):
    done = client.messages.create(**EMBEDDED, messages=ASK, **GREEDY)
    assert "Paris" in done.content[0].text
    assert (done.type, done.role, done.stop_reason) == ("message", "assistant", "end_turn")
    assert done.usage.input_tokens > 0


def test_system_and_history(client):
    history = [*ASK, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Hello"}]
    assert client.messages.create(**EMBEDDED, system="Be brief.", messages=history, **GREEDY).content[0].text


def test_blocks_with_cache_marks(client):
    block = {"type": "text", "text": ASK[0]["content"], "cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": [block]}]
    assert client.messages.create(**EMBEDDED, system=system, messages=messages, **GREEDY).content[0].text


def test_max_tokens(client):
    done = client.messages.create(model="tiny", max_tokens=1, messages=ASK)
    assert (done.stop_reason, done.usage.output_tokens) == ("max_tokens", 1)


def test_stop_sequences(scripted):
    done = scripted.messages.create(**SCRIPTED, messages=says("say one, two, three"), stop_sequences=[", three"])
    assert done.content[0].text == "one, two"
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", ", three")


def test_sampling(client):
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "u"}}
    assert client.messages.create(**EMBEDDED, messages=ASK, extra_body=options).content


def test_continued_answer(client):
    begun = [*ASK, {"role": "assistant", "content": "The capital of France is"}]
    assert client.messages.create(**EMBEDDED, messages=begun, **GREEDY).content[0].text.startswith(" Paris")


def test_count_tokens(client):
    counted = client.messages.count_tokens(model="tiny", messages=ASK).input_tokens
    usage = client.messages.create(**EMBEDDED, messages=ASK).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_count_tokens_of_tools(scripted):
    plain = scripted.messages.count_tokens(model="scripted", messages=CALL).input_tokens
    assert scripted.messages.count_tokens(model="scripted", messages=CALL, tools=[TOOL]).input_tokens > plain


def test_stream(client):
    with client.messages.stream(**EMBEDDED, messages=ASK, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    assert "Paris" in text


def test_stream_of_events(client):
    kinds = [event.type for event in client.messages.create(**EMBEDDED, messages=ASK, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert {"content_block_start", "content_block_delta", "content_block_stop", "message_delta"} <= set(kinds)


def test_tool_call(scripted):
    done = scripted.messages.create(**SCRIPTED, messages=CALL, tools=[TOOL])
    assert (done.stop_reason, done.content[0].name, done.content[0].input) == ("tool_use", "add", {"a": 2, "b": 3})


def test_tool_round(scripted):
    done = scripted.messages.create(**SCRIPTED, messages=CALL, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": done.content[0].id, "content": [{"type": "text", "text": "5"}]}
    messages = [*CALL, {"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}]
    assert scripted.messages.create(**SCRIPTED, messages=messages, tools=[TOOL]).content[0].text == "The sum is 5."


def test_tool_choices(scripted):
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}, {"type": "auto"}):
        done = scripted.messages.create(**SCRIPTED, messages=CALL, tools=[TOOL], tool_choice=choice)
        assert done.content[0].type == "tool_use"


def test_tool_stream(scripted):
    with scripted.messages.stream(**SCRIPTED, messages=CALL, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_message().content[0].input == {"a": 2, "b": 3}
    assert "input_json" in kinds


def test_tool_runner(scripted):
    calls = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        calls.append((a, b))
        return str(a + b)

    runner = scripted.beta.messages.tool_runner(**SCRIPTED, messages=CALL, tools=[add])
    assert runner.until_done().content[0].text == "The sum is 5."
    assert calls == [(2, 3)]


def test_parse(scripted):
    done = scripted.messages.parse(**SCRIPTED, messages=says('say {"a": 1, "b": 2}'), output_format=Sum)
    assert done.parsed_output == Sum(a=1, b=2)


def test_output_config(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    done = client.messages.create(**EMBEDDED, messages=ASK, output_config=config, **GREEDY)
    assert done.content[0].text.lstrip().startswith("{")


def test_thinking_disabled(client):
    assert client.messages.create(**EMBEDDED, messages=ASK, thinking={"type": "disabled"}).content


def test_thinking_asked_of_a_model_without_it(client):
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        raw = client.messages.with_raw_response.create(model="tiny", max_tokens=2000, messages=ASK, thinking=thinking)
        assert "thinking" in raw.headers["x-jsg-warnings"]
        assert [block.type for block in raw.parse().content] == ["text"]


def test_clearing_thoughts_that_are_not_there(client):
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    done = client.beta.messages.create(
        **EMBEDDED, messages=ASK, context_management=edits, betas=["context-management-2025-06-27"]
    )
    assert done.content[0].text


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    model = client.models.retrieve("tiny")
    assert (model.type, model.display_name, model.created_at.year > 2025) == ("model", "tiny", True)


def test_error_of_a_field(client):
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(**EMBEDDED, messages=[])
    assert error.value.body["error"]["type"] == "invalid_request_error"


def test_error_of_the_model_name(client):
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(model="other", max_tokens=1, messages=ASK)
    assert error.value.body["error"]["type"] == "not_found_error"


def test_error_of_a_timeout(scripted):
    with pytest.raises(anthropic.APITimeoutError):
        scripted.messages.create(**SCRIPTED, messages=says("say " + "long " * 150), timeout=0.3)


def test_async():
    async def work(client):
        many = [client.messages.create(**SCRIPTED, messages=says(f"say {i}")) for i in range(8)]
        return [done.content[0].text for done in await asyncio.gather(*many)]

    assert with_async(work) == [str(i) for i in range(8)]


def test_async_stream():
    async def work(client):
        async with client.messages.stream(**SCRIPTED, messages=says("say streamed")) as stream:
            return await stream.get_final_text()

    assert with_async(work) == "streamed"
