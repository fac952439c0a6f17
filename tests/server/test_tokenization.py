"""`/tokenize` and `/detokenize`, in SGLang's form and in vLLM's. The tokenizer has one token for each byte."""

import httpx
import pytest

from jsg.errors import RequestError
from jsg.server.openai.common import rendered
from jsg.speech.answers.answer import Prompt
from jsg.types import SamplingParams

CLOCK = {"type": "function", "function": {"name": "clock"}}
MESSAGES = [{"role": "user", "content": "hi"}]


def tokenize(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/tokenize", json=body)


def detokenize(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/detokenize", json=body)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_there_and_back(http: httpx.Client, prefix: str):
    text = "Hé, <b>\n\t日本"
    made = http.post(f"{prefix}/tokenize", json={"model": "fake", "prompt": text}).json()
    assert made["count"] == len(made["tokens"]) == len(text.encode()) and made["max_model_len"] == 1024
    assert made["token_strs"] is None
    back = http.post(f"{prefix}/detokenize", json={"model": "fake", "tokens": made["tokens"]}).json()
    assert back == {"text": text, "prompt": text}


def test_a_list_gives_a_list(http: httpx.Client):
    made = tokenize(http, prompt=["ab", "", "c"], return_token_strs=True).json()
    assert made["count"] == [2, 0, 1]
    assert [len(ids) for ids in made["tokens"]] == [2, 0, 1]
    assert made["token_strs"] == [["a", "b"], [], ["c"]]
    assert detokenize(http, tokens=made["tokens"]).json()["text"] == ["ab", "", "c"]
    assert detokenize(http, tokens=[]).json() == {"text": "", "prompt": ""}


def test_what_each_token_is(http: httpx.Client):
    assert tokenize(http, prompt="aé", return_token_strs=True).json()["token_strs"] == [
        "a",
        "bytes:\\xc3",
        "bytes:\\xa9",
    ]


def test_special_tokens(http: httpx.Client):
    turn = tokenize(http, prompt="a<|im_end|>").json()
    assert turn["count"] == 2
    assert detokenize(http, tokens=turn["tokens"]).json()["text"] == "a"
    assert detokenize(http, tokens=turn["tokens"], skip_special_tokens=False).json()["text"] == "a<|im_end|>"


def test_a_conversation_is_encoded_as_chat_completions_do_it(http: httpx.Client):
    made = tokenize(http, messages=MESSAGES).json()
    shown = detokenize(http, tokens=made["tokens"], skip_special_tokens=False).json()["text"]
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    usage = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()["usage"]
    assert made["count"] == usage["prompt_tokens"]
    ended = tokenize(http, messages=MESSAGES, add_generation_prompt=False, add_special_tokens=False).json()
    assert ended["tokens"] == made["tokens"][: ended["count"]]
    assert made["count"] - ended["count"] == len("\nassistant") + 1
    said = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    continued = tokenize(http, messages=said, continue_final_message=True).json()["tokens"]
    assert continued == made["tokens"] + tokenize(http, prompt="Well").json()["tokens"]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "prompt", "exactly one of prompt and messages"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt", "exactly one of prompt and messages"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": ["a"] * 5000}, "prompt", "at most 2048 items"),
        ({"prompt": 5}, "prompt", "prompt"),
        ({"prompt": [1, 2]}, "prompt", "prompt"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens", "add_special_tokens"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template", "chat_template is not supported"),
        ({"messages": MESSAGES, "tools": [CLOCK]}, "tools", "does not show them"),
        ({"prompt": "a", "tools": [CLOCK]}, "tools", "tools needs messages"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"no": 1}}, "chat_template_kwargs", "does not read 'no'"),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "continue_final_message",
        ),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "add_generation_prompt"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs", "return_token_strs"),
        ({"prompt": "a", "unknown": 1}, "unknown", "unknown"),
    ],
)
def test_what_cannot_be_encoded_is_named(http: httpx.Client, body: dict, param: str, said: str):
    response = http.post("/v1/tokenize", json=body)
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == param
    assert tokenize(http, **body).status_code == 400


@pytest.mark.parametrize(
    "tokens", [[-1], [512], [2**31], [1.5], [True], ["a"], "a", None, [[1], [512]], [[1], 2], [[1]] * 5000]
)
def test_what_is_no_list_of_tokens_is_named(http: httpx.Client, tokens: object):
    response = detokenize(http, tokens=tokens)
    assert response.status_code == 400 and "tokens" in response.json()["error"]["message"]


def test_another_model_is_a_404(http: httpx.Client):
    assert tokenize(http, prompt="a", model="other").status_code == 404
    assert detokenize(http, tokens=[1], model="other").status_code == 404


class TestRendered:
    """What routers ask for: the tokens that a call would have, without the call."""

    def test_each_prompt_of_a_completion(self, http):
        body = {"prompt": ["ab", "cde"], "max_tokens": 4, "n": 2, "stream": True}
        texts = http.post("/tokenize", json={"prompt": body["prompt"]}).json()["tokens"]
        shown = http.post("/v1/completions/render", json=body).json()
        assert shown == [{"token_ids": ids, "features": None} for ids in texts]
        assert http.post("/v1/completions/render", json={"prompt": [5, 6]}).json()[0]["token_ids"] == [5, 6]

    def test_a_conversation(self, http):
        shown = http.post("/v1/chat/completions/render", json={"messages": MESSAGES}).json()
        assert shown == {"token_ids": tokenize(http, messages=MESSAGES).json()["tokens"], "features": None}

    def test_what_the_call_refuses_is_refused(self, http):
        assert http.post("/v1/completions/render", json={"prompt": []}).status_code == 400
        assert http.post("/v1/completions/render", json={"prompt": "a", "model": "other"}).status_code == 404

    def test_pictures_are_refused(self):
        prompt = Prompt(rid="r", input_ids=(1,), sampling=SamplingParams(), media=(object(),))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="pictures"):
            rendered(prompt)
