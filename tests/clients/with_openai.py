"""OpenAI's package: chat, completions, Responses, tools, forms, errors; blocking, async and streamed."""

import asyncio
import json
import os
from collections.abc import Iterator

import openai
import pydantic
import pytest

ASK = [{"role": "user", "content": "What is the capital of France?"}]
EMBEDDED, SCRIPTED = "tiny", "scripted"


class Sum(pydantic.BaseModel):
    """A sum."""

    a: int
    b: int


class Colour(pydantic.BaseModel):
    """A colour."""

    name: str
    shades: list[str]


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
RESPONSES_TOOL = {"type": "function", **TOOL["function"]}
CALL = 'SCRIPT call add {"a": 2, "b": 3} || say The sum is 5.'


def says(script: str) -> list[dict]:
    return [{"role": "user", "content": f"SCRIPT {script}"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Of the embedded model."""
    with openai.OpenAI(base_url=f"{os.environ['EMBEDDED']}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def scripted() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{os.environ['SCRIPTED']}/v1", api_key="none", max_retries=0) as made:
        yield made


def with_async(work):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{os.environ['SCRIPTED']}/v1", api_key="none", max_retries=0) as made:
            return await work(made)

    return asyncio.run(run())


# Chat.


def test_chat(client):
    done = client.chat.completions.create(model=EMBEDDED, messages=ASK, temperature=0)
    assert "Paris" in done.choices[0].message.content
    assert done.choices[0].finish_reason == "stop"
    assert done.object == "chat.completion"


def test_chat_usage(client):
    usage = client.chat.completions.create(model=EMBEDDED, messages=ASK, temperature=0, max_tokens=2).usage
    assert usage.completion_tokens == 2
    assert usage.total_tokens == usage.prompt_tokens + 2


def test_chat_length(client):
    done = client.chat.completions.create(model=EMBEDDED, messages=ASK, max_completion_tokens=1)
    assert done.choices[0].finish_reason == "length"


def test_chat_system_and_history(client):
    history = [{"role": "system", "content": "Be brief."}, *ASK, {"role": "assistant", "content": "Paris."}]
    done = client.chat.completions.create(
        model=EMBEDDED, messages=[*history, {"role": "user", "content": "What is the capital of Italy?"}], temperature=0
    )
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content


def test_chat_developer_role(client):
    messages = [{"role": "developer", "content": "Be brief."}, *ASK]
    assert client.chat.completions.create(model=EMBEDDED, messages=messages, temperature=0).choices


def test_chat_text_parts(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    done = client.chat.completions.create(model=EMBEDDED, messages=parts, temperature=0)
    assert "Paris" in done.choices[0].message.content


def test_chat_n(client):
    done = client.chat.completions.create(model=EMBEDDED, messages=ASK, n=3, max_tokens=4)
    assert [choice.index for choice in done.choices] == [0, 1, 2]


def test_chat_stop_text(scripted):
    done = scripted.chat.completions.create(model=SCRIPTED, messages=says("say one, two, three"), stop=", three")
    assert done.choices[0].message.content == "one, two"
    assert done.choices[0].finish_reason == "stop"


def test_chat_stop_list(scripted):
    done = scripted.chat.completions.create(model=SCRIPTED, messages=says("say a b c d"), stop=["z", " c"])
    assert done.choices[0].message.content == "a b"


def test_chat_seed(client):
    answers = [
        client.chat.completions.create(model=EMBEDDED, messages=ASK, temperature=1.5, seed=7, max_tokens=12)
        for _ in range(2)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_chat_penalties_and_top_p(client):
    options = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "top_p": 0.9, "temperature": 0.5}
    assert client.chat.completions.create(model=EMBEDDED, messages=ASK, max_tokens=4, **options).choices


def test_chat_logit_bias(client):
    free = client.chat.completions.create(
        model=EMBEDDED, messages=ASK, temperature=0, max_tokens=1, logprobs=True, top_logprobs=2
    )
    text = {"prompt": free.choices[0].message.content, "add_special_tokens": False}
    tokens = client.post("/tokenize", body=text, cast_to=object)["tokens"]
    other = client.chat.completions.create(
        model=EMBEDDED, messages=ASK, temperature=0, max_tokens=1, logit_bias={str(tokens[0]): -100}
    )
    assert other.choices[0].message.content != free.choices[0].message.content


def test_chat_logprobs(client):
    done = client.chat.completions.create(
        model=EMBEDDED, messages=ASK, temperature=0, max_tokens=3, logprobs=True, top_logprobs=5
    )
    scored = done.choices[0].logprobs.content
    assert len(scored) == 3
    assert all(len(each.top_logprobs) == 5 and each.top_logprobs[0].token == each.token for each in scored)
    assert all(each.logprob <= 0 for each in scored)


def test_chat_logprobs_without_alternatives(client):
    done = client.chat.completions.create(model=EMBEDDED, messages=ASK, max_tokens=2, logprobs=True)
    assert [each.top_logprobs for each in done.choices[0].logprobs.content] == [[], []]


def test_chat_user_and_metadata(client):
    done = client.chat.completions.create(
        model=EMBEDDED, messages=ASK, max_tokens=1, user="u", metadata={"team": "a"}, store=False
    )
    assert done.choices


def test_chat_harmless_options(client):
    done = client.chat.completions.with_raw_response.create(
        model=EMBEDDED, messages=ASK, max_tokens=1, reasoning_effort="low", service_tier="auto", store=True
    )
    assert "reasoning_effort" in done.headers["x-jsg-warnings"]
    assert done.parse().choices


def test_chat_extra_body(client):
    done = client.chat.completions.create(
        model=EMBEDDED, messages=ASK, max_tokens=3, extra_body={"regex": "[0-9]{3}", "top_k": 5}
    )
    assert done.choices[0].message.content.isdigit()


def test_chat_raw_response_headers(client):
    raw = client.chat.completions.with_raw_response.create(model=EMBEDDED, messages=ASK, max_tokens=1)
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse()._request_id


# Streams of chats.


def test_stream(client):
    chunks = list(client.chat.completions.create(model=EMBEDDED, messages=ASK, temperature=0, stream=True))
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_usage(client):
    chunks = list(
        client.chat.completions.create(
            model=EMBEDDED, messages=ASK, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_n(client):
    chunks = client.chat.completions.create(model=EMBEDDED, messages=ASK, n=2, max_tokens=4, stream=True)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_stream_logprobs(client):
    chunks = client.chat.completions.create(
        model=EMBEDDED, messages=ASK, max_tokens=3, logprobs=True, top_logprobs=1, stream=True
    )
    scored = [
        each for chunk in chunks for choice in chunk.choices if choice.logprobs for each in choice.logprobs.content
    ]
    assert len(scored) == 3


def test_stream_left_early(client):
    with client.chat.completions.create(model=EMBEDDED, messages=ASK, max_tokens=500, stream=True) as chunks:
        next(iter(chunks))
    assert client.chat.completions.create(model=EMBEDDED, messages=ASK, max_tokens=1).choices


def test_stream_tool_call(scripted):
    chunks = scripted.chat.completions.create(
        model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[TOOL], stream=True
    )
    parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert parts[0].function.name == "add"
    assert parts[0].id
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == {"a": 2, "b": 3}


# Tools.


def test_tool_call(scripted):
    done = scripted.chat.completions.create(model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[TOOL])
    call = done.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    assert done.choices[0].finish_reason == "tool_calls"


def test_tool_round(scripted):
    messages = [{"role": "user", "content": CALL}]
    message = scripted.chat.completions.create(model=SCRIPTED, messages=messages, tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
    done = scripted.chat.completions.create(model=SCRIPTED, messages=[*messages, message, result], tools=[TOOL])
    assert done.choices[0].message.content == "The sum is 5."


def test_tool_choice_required(scripted):
    done = scripted.chat.completions.create(
        model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[TOOL], tool_choice="required"
    )
    assert done.choices[0].message.tool_calls


def test_tool_choice_named(scripted):
    choice = {"type": "function", "function": {"name": "add"}}
    done = scripted.chat.completions.create(
        model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[TOOL], tool_choice=choice
    )
    assert done.choices[0].message.tool_calls[0].function.name == "add"


def test_tool_choice_none(scripted):
    done = scripted.chat.completions.create(
        model=SCRIPTED, messages=says("say no call"), tools=[TOOL], tool_choice="none"
    )
    assert done.choices[0].message.tool_calls is None
    assert done.choices[0].message.content == "no call"


def test_tool_calls_parallel(scripted):
    script = 'call add {"a": 1, "b": 2} && call add {"a": 3, "b": 4}'
    done = scripted.chat.completions.create(model=SCRIPTED, messages=says(script), tools=[TOOL])
    calls = done.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["a"] for call in calls] == [1, 3]
    assert len({call.id for call in calls}) == 2


def test_tool_calls_not_parallel(scripted):
    done = scripted.chat.completions.create(
        model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[TOOL], parallel_tool_calls=False
    )
    assert len(done.choices[0].message.tool_calls) == 1


def test_tool_and_text(scripted):
    script = 'say Let me add. && call add {"a": 1, "b": 2}'
    message = scripted.chat.completions.create(model=SCRIPTED, messages=says(script), tools=[TOOL]).choices[0].message
    assert message.content.strip() == "Let me add."
    assert message.tool_calls


def test_tool_from_pydantic(scripted):
    tool = openai.pydantic_function_tool(Sum, name="add")
    done = scripted.chat.completions.parse(model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[tool])
    assert done.choices[0].message.tool_calls[0].function.parsed_arguments == Sum(a=2, b=3)


def test_tools_for_a_model_without_them(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=EMBEDDED, messages=ASK, tools=[TOOL])
    assert error.value.param == "tools"


# Forms.


def test_parse(client):
    done = client.chat.completions.parse(
        model=EMBEDDED, messages=ASK, response_format=Sum, temperature=0, max_tokens=200
    )
    assert isinstance(done.choices[0].message.parsed, Sum)


def test_parse_scripted(scripted):
    done = scripted.chat.completions.parse(
        model=SCRIPTED, messages=says('say {"name": "red", "shades": ["dark"]}'), response_format=Colour
    )
    assert done.choices[0].message.parsed == Colour(name="red", shades=["dark"])


def test_parse_with_tools_text(scripted):
    done = scripted.chat.completions.parse(
        model=SCRIPTED,
        messages=says('say {"name": "red", "shades": []}'),
        response_format=Colour,
        tools=[openai.pydantic_function_tool(Sum, name="add")],
    )
    assert done.choices[0].message.parsed.name == "red"


def test_parse_with_tools_call(scripted):
    done = scripted.chat.completions.parse(
        model=SCRIPTED,
        messages=[{"role": "user", "content": CALL}],
        response_format=Colour,
        tools=[openai.pydantic_function_tool(Sum, name="add")],
    )
    assert done.choices[0].message.parsed is None
    assert done.choices[0].message.tool_calls[0].function.parsed_arguments == Sum(a=2, b=3)


def test_parse_stream(scripted):
    with scripted.chat.completions.stream(
        model=SCRIPTED, messages=says('say {"a": 1, "b": 2}'), response_format=Sum
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == Sum(a=1, b=2)


def test_parse_stream_of_tools(scripted):
    with scripted.chat.completions.stream(
        model=SCRIPTED,
        messages=[{"role": "user", "content": CALL}],
        tools=[openai.pydantic_function_tool(Sum, name="add")],
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Sum(a=2, b=3)


def test_parse_cut_short(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=EMBEDDED, messages=ASK, response_format=Colour, max_tokens=2)


def test_json_object(client):
    done = client.chat.completions.create(
        model=EMBEDDED,
        messages=[{"role": "user", "content": 'Write {"name": "Ada"} as JSON.'}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=300,
    )
    if done.choices[0].finish_reason == "stop":  # what the model writes is its own choice, and so is its length
        assert isinstance(json.loads(done.choices[0].message.content), dict)
    assert done.choices[0].message.content.lstrip().startswith("{")


def test_json_schema(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    done = client.chat.completions.create(
        model=EMBEDDED,
        messages=ASK,
        response_format={"type": "json_schema", "json_schema": {"name": "ok", "schema": schema, "strict": True}},
        temperature=0,
    )
    assert isinstance(json.loads(done.choices[0].message.content)["ok"], bool)


# Completions and models.


def test_completion(client):
    done = client.completions.create(model=EMBEDDED, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert "Paris" in done.choices[0].text


def test_completion_of_a_list(client):
    done = client.completions.create(model=EMBEDDED, prompt=["The capital", "In France"], n=2, max_tokens=2)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]


def test_completion_of_token_ids(client):
    assert client.completions.create(model=EMBEDDED, prompt=[40, 41, 42], max_tokens=2).usage.prompt_tokens == 3


def test_completion_echo_logprobs(client):
    done = client.completions.create(model=EMBEDDED, prompt="The capital", echo=True, logprobs=1, max_tokens=0)
    assert done.choices[0].text == "The capital"
    assert done.choices[0].logprobs.token_logprobs[0] is None


def test_completion_stream(client):
    chunks = list(client.completions.create(model=EMBEDDED, prompt="The capital", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_models(client):
    assert [model.id for model in client.models.list()] == [EMBEDDED]
    assert client.models.retrieve(EMBEDDED).object == "model"


# Responses.


def test_response(client):
    done = client.responses.create(model=EMBEDDED, input=ASK[0]["content"], temperature=0)
    assert "Paris" in done.output_text
    assert done.status == "completed"
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_response_instructions_and_items(client):
    done = client.responses.create(model=EMBEDDED, input=ASK, instructions="Be brief.", temperature=0)
    assert done.instructions == "Be brief."
    assert done.output_text


def test_response_cut_short(client):
    done = client.responses.create(model=EMBEDDED, input="Count from 1 to 9.", max_output_tokens=1)
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_response_stream(client):
    events = list(client.responses.create(model=EMBEDDED, input=ASK[0]["content"], temperature=0, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text


def test_response_parse(scripted):
    done = scripted.responses.parse(model=SCRIPTED, input='SCRIPT say {"a": 1, "b": 2}', text_format=Sum)
    assert done.output_parsed == Sum(a=1, b=2)


def test_response_stream_parse(scripted):
    with scripted.responses.stream(model=SCRIPTED, input='SCRIPT say {"a": 1, "b": 2}', text_format=Sum) as events:
        for _ in events:
            pass
        assert events.get_final_response().output_parsed == Sum(a=1, b=2)


def test_response_tool_round(scripted):
    first = scripted.responses.create(model=SCRIPTED, input=CALL, tools=[RESPONSES_TOOL])
    call = first.output[0]
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"a": 2, "b": 3})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    done = scripted.responses.create(
        model=SCRIPTED, input=[result], previous_response_id=first.id, tools=[RESPONSES_TOOL]
    )
    assert done.output_text == "The sum is 5."


def test_response_history_by_hand(scripted):
    first = scripted.responses.create(model=SCRIPTED, input=CALL, tools=[RESPONSES_TOOL], store=False)
    items = [{"role": "user", "content": CALL}, *first.output]
    items.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "5"})
    done = scripted.responses.create(model=SCRIPTED, input=items, tools=[RESPONSES_TOOL], store=False)
    assert done.output_text == "The sum is 5."


def test_response_retrieve_and_delete(scripted):
    made = scripted.responses.create(model=SCRIPTED, input="SCRIPT say kept")
    assert scripted.responses.retrieve(made.id).output_text == "kept"
    scripted.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(made.id)


def test_response_input_items(scripted):
    made = scripted.responses.create(model=SCRIPTED, input="SCRIPT say kept")
    items = list(scripted.responses.input_items.list(made.id))
    assert items[0].content[0].text == "SCRIPT say kept"


def test_response_truncation_auto(scripted):
    assert scripted.responses.create(model=SCRIPTED, input="SCRIPT say ok", truncation="auto").output_text == "ok"


# Errors.


def test_error_of_a_field(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=EMBEDDED, messages=ASK, temperature=-1)
    assert error.value.param == "temperature"
    assert error.value.type == "invalid_request_error"


def test_error_of_the_model_name(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="other", messages=ASK)
    assert error.value.code == "model_not_found"


def test_error_of_the_context(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=EMBEDDED, messages=ASK, max_tokens=100_000)
    assert error.value.code == "context_length_exceeded"


def test_error_of_embeddings(client):
    with pytest.raises(openai.BadRequestError, match="a model that embeds"):
        client.embeddings.create(model=EMBEDDED, input="a")


def test_error_of_what_is_not_served(client):
    with pytest.raises(openai.NotFoundError):
        client.batches.list()


def test_error_of_a_timeout(scripted):
    with pytest.raises(openai.APITimeoutError):
        scripted.chat.completions.create(model=SCRIPTED, messages=says("say " + "long " * 400), timeout=0.3)


def test_error_of_a_connection():
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0).models.list()


# Async.


def test_async_chat():
    async def work(client):
        return await asyncio.gather(
            *(client.chat.completions.create(model=SCRIPTED, messages=says(f"say {i}")) for i in range(8))
        )

    assert [done.choices[0].message.content for done in with_async(work)] == [str(i) for i in range(8)]


def test_async_stream():
    async def work(client):
        chunks = await client.chat.completions.create(model=SCRIPTED, messages=says("say streamed"), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert with_async(work) == "streamed"


def test_async_response_stream():
    async def work(client):
        async with client.responses.stream(model=SCRIPTED, input="SCRIPT say streamed") as events:
            return (await events.get_final_response()).output_text

    assert with_async(work) == "streamed"


def test_async_cancelled():
    async def work(client):
        answer = client.chat.completions.create(model=SCRIPTED, messages=says("say " + "long " * 400))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(answer, 0.3)
        return await client.chat.completions.create(model=SCRIPTED, messages=says("say after"))

    assert with_async(work).choices[0].message.content == "after"
