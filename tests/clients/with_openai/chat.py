"""Chat, completions and models; blocking, async and streamed."""

import asyncio
import json

import pytest
from with_openai.shared import ASK, CALL, EMBEDDED, SCRIPTED, TOOL, says, with_async


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


def test_async_cancelled():
    async def work(client):
        answer = client.chat.completions.create(model=SCRIPTED, messages=says("say " + "long " * 400))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(answer, 0.3)
        return await client.chat.completions.create(model=SCRIPTED, messages=says("say after"))

    assert with_async(work).choices[0].message.content == "after"


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
