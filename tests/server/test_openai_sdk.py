"""The real `openai` package against the front process: what its users may send, read and catch."""

import typing
from collections.abc import Iterator

import openai
import pytest
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel

from jsg.server.http.body import Body
from jsg.server.openai.chat import ChatBody
from jsg.server.openai.completions import CompletionBody
from tests.engine.fake_core import FAILING_TOKEN
from tests.server.running import RunningServer

HI = [{"role": "user", "content": "hi"}]
BEYOND_OPENAI = {  # of chat completions: what the package takes in `extra_body`
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "min_tokens": 1,
    "stop_token_ids": [3],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": True,
    "add_generation_prompt": True,
    "cache_salt": "a",
    "extra_key": "b",
    "priority": 1,
    "rid": "r-1",
    "return_tokens_as_token_ids": True,
    "lora_path": None,
}


OF_SGLANG = {"matched_stop", "reasoning_content", "reasoning_tokens"}
"""Fields of answers that OpenAI lacks, and that SGLang always sends."""


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def extras(value: object) -> set[str]:
    """Fields that the package does not know, anywhere in what it read."""
    if isinstance(value, BaseModel):
        inside = [getattr(value, name) for name in type(value).model_fields]
        return set(value.model_extra or ()).union(*map(extras, inside))
    return set().union(*map(extras, value)) if isinstance(value, list) else set()


def parameters(params: typing.Any) -> set[str]:
    return {name for part in typing.get_args(params) for name in typing.get_type_hints(part)}


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat_create_params.CompletionCreateParams, ChatBody),
        (completion_create_params.CompletionCreateParams, CompletionBody),
    ],
)
def test_every_parameter_of_the_package_is_known(params: typing.Any, body: type[Body]):
    """Each is a field, supported or marked as changing nothing, or refused with a reason; none is merely unknown."""
    names = parameters(params)
    assert {"model", "stream", "stop", "user"} <= names
    assert names <= body.model_fields.keys() | body.REFUSED.keys() | body.HARMLESS.keys()
    assert not body.model_fields.keys() & body.REFUSED.keys()
    assert body.ACCEPTED.keys() <= body.model_fields.keys()


class TestChat:
    def test_an_answer_is_what_the_package_expects(self, client):
        raw = client.chat.completions.with_raw_response.create(model="fake", messages=HI, max_completion_tokens=4)
        answer = ChatCompletion.model_validate_json(raw.text)
        assert extras(answer) == OF_SGLANG | {"reasoning"}
        assert answer == raw.parse() and answer.choices[0].message.content == "use"
        assert answer.choices[0].message.refusal is None and answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.completion_tokens_details is not None
        assert raw.parse()._request_id == raw.headers["x-request-id"]

    @pytest.mark.slow
    def test_a_predicted_answer_saves_steps_and_is_counted(self, real_server):
        """Its first half is right. The salts differ, because the cache would know the answer."""
        letters = {"regex": "[a-z]{40}"}  # whose tokens are those of the text
        asked = {"model": "fake", "messages": HI, "max_completion_tokens": 40, "temperature": 0}
        with openai.OpenAI(base_url=f"{real_server.http.base_url}/v1", api_key="none", max_retries=0) as client:
            text = client.chat.completions.create(**asked, extra_body=letters).choices[0].message.content
            content = [{"type": "text", "text": text[:20]}, {"type": "text", "text": "and so on"}]
            for stream in (False, True):
                more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
                made = client.chat.completions.create(
                    **asked,
                    **more,
                    prediction={"type": "content", "content": content},
                    extra_body=letters | {"cache_salt": f"salt {stream}"},
                )
                chunks = [*made] if stream else []
                said = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
                assert (said if stream else made.choices[0].message.content) == text
                details = (chunks[-1] if stream else made).usage.completion_tokens_details
                assert details.accepted_prediction_tokens >= 10 and details.rejected_prediction_tokens >= 1

    @pytest.mark.parametrize(("content", "status"), [("", 200), ("x y" * 99999, 400), (None, 400)])
    def test_a_prediction_may_be_empty_and_not_endless(self, server, content: str | None, status: int):
        asked = {"messages": HI, "max_tokens": 2, "prediction": {"type": "content", "content": content}}
        answer = server.http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["param"].startswith("prediction")

    def test_every_supported_parameter(self, client):
        answer = client.chat.completions.create(
            model="fake",
            messages=[
                {"role": "system", "content": "a", "name": "s"},
                {"role": "developer", "content": [{"type": "text", "text": "b"}]},
                {"role": "user", "content": [{"type": "text", "text": "c"}], "name": "u"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "d"}]},
                {"role": "assistant", "content": None, "refusal": "e"},
                {"role": "user", "content": "f"},
            ],
            frequency_penalty=0.1,
            logit_bias={"65": 1},
            logprobs=True,
            top_logprobs=20,
            max_completion_tokens=3,
            metadata={"task": "a"},
            modalities=["text"],
            n=2,
            parallel_tool_calls=True,
            presence_penalty=0.1,
            prompt_cache_key="a",
            prompt_cache_retention="in_memory",
            response_format={"type": "text"},
            safety_identifier="u-1",
            seed=1,
            service_tier="auto",
            stop=["\n\n"],
            store=False,
            stream=False,
            temperature=0.5,
            tool_choice="none",
            tools=[],
            top_p=0.9,
            user="u",
            extra_body=BEYOND_OPENAI,
        )
        assert answer.id == "r-1"
        assert [choice.index for choice in answer.choices] == [0, 1]
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [len(token.top_logprobs) for token in logprobs.content] == [20, 20, 20]

    def test_a_stream(self, client):
        options = {"include_usage": True, "include_obfuscation": False}
        with client.chat.completions.with_streaming_response.create(
            model="fake", messages=HI, max_tokens=4, stream=True, stream_options=options
        ) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        chunks = [ChatCompletionChunk.model_validate_json(line) for line in lines]
        assert extras(chunks) == OF_SGLANG
        assert chunks[0].choices[0].delta.model_dump(exclude_unset=True) == {
            "role": "assistant",
            "content": "",
            "refusal": None,
            "reasoning_content": None,
        }
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "use"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4

    def test_the_packages_own_accumulator(self, client):
        with client.chat.completions.stream(model="fake", messages=HI, stop="e", logprobs=True) as events:
            kinds = {event.type for event in events}
            final = events.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content == "us" and final.choices[0].finish_reason == "stop"
        assert final.choices[0].logprobs is not None
        assert [token.token for token in final.choices[0].logprobs.content or ()] == ["<|im_start|>", "u", "s", "e"]


class TestCompletions:
    def test_an_answer_is_what_the_package_expects(self, client):
        raw = client.completions.with_raw_response.create(model="fake", prompt="abc", max_tokens=4, logprobs=2)
        answer = Completion.model_validate_json(raw.text)
        assert extras(answer) == OF_SGLANG - {"reasoning_content"}
        assert answer == raw.parse() and answer.choices[0].text == "abca"
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3]

    def test_every_supported_parameter(self, client):
        answer = client.completions.create(
            model="fake",
            prompt=[[65, 66], [67, 68]],
            best_of=1,
            echo=True,
            frequency_penalty=0.1,
            logit_bias={"65": 1},
            logprobs=5,
            max_tokens=2,
            n=2,
            presence_penalty=0.1,
            seed=1,
            stop="zz",
            stream=False,
            temperature=0,
            top_p=0.9,
            user="u",
            extra_body={name: value for name, value in BEYOND_OPENAI.items() if name != "add_generation_prompt"},
        )
        assert [choice.text for choice in answer.choices] == ["bcbc", "bcbc", "dede", "dede"]
        assert answer.id == "r-1"


class TestModels:
    def test_list_and_retrieve(self, client):
        (listed,) = client.models.list().data
        assert client.models.retrieve("fake") == listed
        of_anthropic = {"type", "created_at", "display_name", "lifecycle", "max_input_tokens", "capabilities"}
        of_openrouter = {"name", "context_length", "architecture", "supported_parameters", "default_parameters"}
        of_vllm = {"root", "parent", "max_model_len"}
        assert extras(listed) == {"modalities", "meta", "pricing", *of_anthropic, *of_openrouter, *of_vllm}


class TestErrors:
    def test_not_found(self, client):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("another")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="another", messages=HI)

    def test_a_failing_row(self, client):
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="fake", prompt=[FAILING_TOKEN])
