"""Clients of the field, by the shapes of what they send and the way they read the answer.

The shapes were written down from the sources of each client at the version that is named; docs/clients.md lists them.
What is read here is read as the client does, so that an answer it could not read fails the test.
"""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import typing
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer, events_of

MODEL = "fake"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A request as a client sends it."""

    client: str
    path: str
    body: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.client}: {self.path}"


WHOLE = [
    Shape(
        "litellm 1.7 (hosted_vllm)",
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
            ],
            "max_tokens": 8,
            "temperature": 0,
            "top_p": 1,
            "user": "team-a",
            "metadata": {},
            "top_k": 40,
        },
    ),
    Shape(
        "a conversation of vLLM answers, sent back as they came",
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": "Hello.",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                    "reasoning_content": None,
                },
                {"role": "user", "content": "and?"},
            ],
            "max_tokens": 8,
            "chat_template_kwargs": {},
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "add_generation_prompt": True,
            "add_special_tokens": False,
            "include_stop_str_in_output": False,
            "min_tokens": 0,
            "stop_token_ids": [],
            "logit_bias": None,
            "prompt_logprobs": None,
            "priority": 0,
            "tool_choice": "none",
        },
    ),
    Shape(
        "trl/verl rollouts through SGLang's OpenAI interface",
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": [65, 66, 67],
            "max_tokens": 8,
            "n": 4,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "logprobs": 0,
            "ignore_eos": False,
            "no_stop_trim": True,
            "lora_path": None,
            "session_params": None,
            "return_hidden_states": False,
        },
    ),
    Shape(
        "sgl-router, which writes out what its client left out",
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "model": MODEL,
            "max_completion_tokens": 8,
            "logprobs": False,
            "stream": False,
            "no_stop_trim": False,
            "ignore_eos": False,
            "continue_final_message": False,
            "skip_special_tokens": True,
            "separate_reasoning": True,
            "stream_reasoning": True,
            "return_hidden_states": False,
        },
    ),
    Shape(
        "vLLM's fields with their defaults",
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "model": MODEL,
            "max_tokens": 8,
            "bad_words": [],
            "documents": None,
            "echo": False,
            "include_reasoning": True,
            "early_stopping": False,
            "tools": [],
            "stop": [],
            "logit_bias": {},
        },
    ),
]


@pytest.mark.parametrize("shape", WHOLE, ids=lambda shape: shape.name)
def test_it_is_answered(http: httpx.Client, shape: Shape):
    response = http.post(shape.path, json=shape.body)
    assert response.status_code == 200, response.text
    body = response.json()
    assert len(body["choices"]) == shape.body.get("n", 1)
    assert body["usage"]["completion_tokens"] == 8 * len(body["choices"])
    for choice in body["choices"]:
        assert choice["finish_reason"] in ("stop", "length")
        text = choice["message"]["content"] if "chat" in shape.path else choice["text"]
        assert isinstance(text, str)


class TestLmEval:
    """`local-completions` and `local-chat-completions`."""

    @staticmethod
    def scored(http: httpx.Client, prompt: Any, context_lens: list[int]) -> list[tuple[float, bool]]:
        """The log-likelihood of what follows each context, and whether it is what greedy decoding gives."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        results = []
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        for choice, context_len in zip(choices, context_lens, strict=True):
            logprobs = choice["logprobs"]
            own = logprobs["token_logprobs"][context_len:-1]  # the last one is the token that was generated
            best = [max(top.values()) for top in logprobs["top_logprobs"][context_len:-1]]
            results.append((sum(own), own == best))
        return results

    def test_loglikelihood_of_a_batch_of_ids(self, http):
        (first, _), (second, _) = self.scored(http, [[65, 66, 67, 68], [70, 71, 72]], [2, 1])
        assert first == pytest.approx(-(67 + 68) / 1000)
        assert second == pytest.approx(-(71 + 72) / 1000)

    def test_loglikelihood_of_a_text(self, http):
        ids = http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
        ((score, _),) = self.scored(http, "abc", [1])
        assert score == pytest.approx(-(ids[1] + ids[2]) / 1000)

    def test_chat_without_a_key(self, server):
        body = {
            "messages": [{"role": "user", "content": "hi", "type": "text"}],
            "model": MODEL,
            "max_tokens": 256,
            "temperature": 0,
            "stop": ["assistant"],
            "seed": 1234,
        }
        with contextlib.closing(server.send("/v1/chat/completions", body, {"Authorization": "Bearer "})) as sent:
            choices = json.loads(sent.getresponse().read())["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["user\nhi\n"]

    @pytest.mark.slow
    def test_greedy_decoding_is_told_from_anything_else(self, real_server: RunningServer):
        """With the real engine: what it generated greedily is greedy when it is scored, and as likely."""
        context = [65, 66, 67, 68]
        body = {
            "prompt": context,
            "temperature": 0,
            "max_tokens": 6,
            "logprobs": 1,
            "ignore_eos": True,
        }
        body |= {"return_tokens_as_token_ids": True}
        logprobs = real_server.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        generated = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
        other = [*generated[:-1], (generated[-1] + 1) % 256]
        prompts = [[*context, *generated], [*context, *other]]
        (score, is_greedy), (other_score, other_is_greedy) = self.scored(real_server.http, prompts, [4, 4])
        assert score == pytest.approx(sum(logprobs["token_logprobs"]), abs=1e-3)
        assert is_greedy
        assert other_score < score
        assert not other_is_greedy


class TestVllmBench:
    """Its streams; a first chunk that has no token would count as a token."""

    @staticmethod
    def read(http: httpx.Client, path: str, body: dict) -> tuple[list[dict], dict]:
        """The first choices of the chunks, and the usage."""
        headers = {"x-request-id": "benchmark-serving-0", "Authorization": "Bearer none"}
        with http.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200
            events = events_of(response)
        chunks = [event["choices"][0] for event in events if event["choices"]]
        (used,) = [event["usage"] for event in events if not event["choices"]]
        return chunks, used

    def test_completions(self, http):
        body = {
            "model": MODEL,
            "prompt": "abc",
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        }
        chunks, used = self.read(http, "/v1/completions", body)
        assert "".join(chunk["text"] for chunk in chunks) == "abcabcab"
        assert (used["prompt_tokens"], used["completion_tokens"]) == (3, 8)

    def test_chat(self, http):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        chunks, used = self.read(http, "/v1/chat/completions", body)
        assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "user\nhi"
        assert used["completion_tokens"] == 8

    def test_what_benches_look_for_is_not_there(self, http):
        assert http.post("/start_profile").status_code == http.get("/tokenizer_info").status_code == 404


class TestSglangLanguage:
    """`RuntimeEndpoint`, the backend of SGLang's language: it sends every sampling parameter that it knows."""

    PARAMS: typing.ClassVar = {
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "max_new_tokens": 8,
        "min_new_tokens": 0,
        "n": 1,
        "stop": [],
        "stop_token_ids": [],
        "stop_regex": [],
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "ignore_eos": False,
        "regex": None,
        "json_schema": None,
    }

    def test_gen(self, http):
        answer = http.post("/generate", json={"text": "abc", "sampling_params": self.PARAMS})
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == "abcabcab"

    def test_select(self, http):
        begun = http.post("/generate", json={"text": "abc", "sampling_params": {"max_new_tokens": 0}}).json()
        body = {
            "text": ["abcx", "abcyz"],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": max(begun["meta_info"]["prompt_tokens"] - 2, 0),
        }
        scored = [answer["meta_info"]["input_token_logprobs"] for answer in http.post("/generate", json=body).json()]
        assert [[text for _, _, text in entries] for entries in scored] == [["b", "c", "x"], ["b", "c", "y", "z"]]
        ids = [[token_id for _, token_id, _ in entries] for entries in scored]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
        alone = [answer["meta_info"]["input_token_logprobs"] for answer in http.post("/generate", json=body).json()]
        assert [[token_id for _, token_id, _ in entries] for entries in alone] == ids
        assert [entries[0][0] for entries in alone] == [None, None]


class TestSglangBench:
    def test_one_batch(self, http):
        params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, "json_schema": None}
        body = {
            "sampling_params": params | {"stream_interval": 1},
            "return_logprob": False,
            "stream": True,
            "input_ids": [[65, 66, 67], [68, 69, 70]],
        }
        with http.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200
            finished = [event["meta_info"] for event in events_of(response) if event["meta_info"]["finish_reason"]]
        assert [(meta["finish_reason"]["type"], meta["completion_tokens"]) for meta in finished] == [("length", 8)] * 2


@pytest.mark.parametrize(
    ("client", "path", "fields"),
    [
        ("sgl-router", "/health", []),
        ("sgl-router", "/health_generate", []),
        ("sgl-router", "/get_server_info", ["model_path", "version", "internal_states"]),
        ("sgl-router", "/get_model_info", ["model_path", "is_generation"]),
        ("sgl-router", "/v1/models", ["data"]),
        ("vLLM production stack", "/v1/models", ["data"]),
        ("vLLM production stack", "/health", []),
        ("vLLM production stack", "/version", ["version"]),
    ],
)
def test_routers_may_poll(http: httpx.Client, client: str, path: str, fields: list[str]):
    response = http.get(path)
    assert response.status_code == 200, client
    assert set(fields) <= response.json().keys()


@pytest.fixture
def curl(server: RunningServer) -> Callable[..., subprocess.CompletedProcess[str]]:
    program = shutil.which("curl")
    assert program, "the tests need curl"

    def run(path: str, *options: str) -> subprocess.CompletedProcess[str]:
        url = f"{str(server.http.base_url).rstrip('/')}{path}"
        return subprocess.run([program, "-sS", url, *options], capture_output=True, text=True, timeout=20, check=True)

    return run


class TestCurl:
    CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8})

    def test_json(self, curl):
        answer = json.loads(curl("/v1/chat/completions", "--json", self.CHAT).stdout)
        assert answer["choices"][0]["message"]["content"] == "user\nhi"

    def test_a_stream(self, curl):
        body = json.dumps({"prompt": "abc", "max_tokens": 8, "stream": True})
        lines = [line for line in curl("/v1/completions", "-N", "--json", body).stdout.split("\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == "abcabcab"
