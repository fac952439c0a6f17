"""Numbers and limits at every endpoint: what is out of range is refused by name, and nobody else notices.

The numeric fields are read from the interface itself, so a new one is covered or missed loudly.
"""

import dataclasses
import typing

import pytest

from jsg.server.native.generate import GenerateBody
from jsg.server.openai.chat import ChatBody
from jsg.server.openai.completions import CompletionBody
from jsg.types import SamplingParams
from tests.server.battery import (
    GENERATING,
    MESSAGES,
    RAW,
    VALID,
    Battery,
    Place,
    body_schemas,
    encode,
    interface,
    typed_places,
    with_value,
)

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
THINKING = {"thinking": {"type": "enabled"}}
SHOWING = {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,"}}]}]}
CALLING = {"messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]}

ANY_INTEGER = {"seed", "sampling_seed", "index"}  # no number of 63 bits is wrong
SIGNED = ANY_INTEGER | {"priority", "logit_bias.5"}  # as large in the negative as in the positive
BAD_NUMBERS = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "1e999": "1e999",
    "huge": "1" + "0" * 5000,
    "10^18": str(10**18),
    "negative": "-3",
    "text": '"1"',
    "bool": "true",
    "list": "[1]",
    "object": '{"a": 1}',
    "float": "1.5",
}


def numeric_places(path: str) -> list[tuple[Place, str]]:
    """Where a body of this endpoint has numbers, and of which type."""
    known = interface()["components"]["schemas"]
    found = list(typed_places(body_schemas()[path], known, "integer", "number"))
    if path == "/generate":  # whose parameters are described in words
        for field in dataclasses.fields(SamplingParams):
            hint = typing.get_type_hints(SamplingParams)[field.name]
            kinds = {int: "integer", float: "number", int | None: "integer"}
            if hint in kinds:
                found.append((("sampling_params", field.name), kinds[hint]))
        found.append((("sampling_params", "stop_token_ids", 0), "integer"))
        found.append((("sampling_params", "logit_bias", "5"), "number"))
    return list(dict.fromkeys(found))


class TestNumbers:
    @pytest.mark.parametrize("path", sorted(VALID))
    def test_every_numeric_field_is_checked(self, battery: Battery, path):
        for place, kind in numeric_places(path):
            name = ".".join(part for part in place if isinstance(part, str))
            leaf = str(next(part for part in reversed(place) if isinstance(part, str) and part != "5"))
            base = (
                CALLING
                if "tool_calls" in place
                else SHOWING
                if "video_url" in place
                else THINKING
                if "thinking" in place
                else {}
            )
            for bad, raw in BAD_NUMBERS.items():
                if is_legal(bad, name, leaf, kind, place):
                    continue
                error = battery.refused(path, encode(with_value(VALID[path] | base, place, RAW), raw))
                assert leaf in error["message"], f"{place}, {bad}: {error}"
                if path.startswith("/v1/") and not path.startswith("/v1/messages"):
                    assert error["param"] in (leaf, place[0]), f"{place}, {bad}: {error}"

    @pytest.mark.parametrize("value", [-3, 10**18])
    def test_a_seed_may_be_any(self, battery: Battery, value):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            assert battery.post(path, VALID[path] | {"seed": value}).status_code == 200
        assert battery.post("/generate", {"text": "a", "sampling_params": {"sampling_seed": value}}).status_code == 200

    @pytest.mark.parametrize("value", ["-1", "x", "20001", "1.5", "NaN", "1e999", "true", "", "1" * 5000])
    @pytest.mark.parametrize("name", ["limit", "engine"])
    def test_a_query_is_checked(self, battery: Battery, name, value):
        response = battery.server.http.get("/debug/radix", params={name: value})
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]
        battery.bodies.append(response.text)


def is_legal(bad: str, name: str, leaf: str, kind: str, place: Place) -> bool:
    """What is a bad number elsewhere and is right in this field; that it is taken is for other tests."""
    if bad == "negative":
        return leaf in SIGNED or name.endswith("logit_bias.5")
    if bad == "10^18":
        return leaf in ANY_INTEGER
    if bad == "float":  # and in range wherever a number is
        return kind == "number" and leaf not in ("top_p", "min_p")
    if bad == "list":  # one of several prompts, or one value for each of them
        return place[-1] == 0 or place in (("logprob_start_len",), ("top_logprobs_num",))
    return bad == "text" and place[-1] == 0 and leaf in ("prompt", "items", "input", "text")


LIMIT = {"/generate": "max_new_tokens", "/v1/responses": "max_output_tokens"}
ANY = "x" * 2000
IMAGE = {"type": "image_url"}
SAMPLED: list[tuple[dict[str, typing.Any], str]] = [
    ({"temperature": 200}, "temperature must be in [0, 100]"),
    ({"top_p": 0}, "top_p must be in ["),
    ({"top_k": -5}, "top_k must be -1 or"),
    ({"max": 5000}, "lower max"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"seed": 2**64}, "seed"),
]
"""What is wrong with the sampling parameters of every interface; "max" stands for the limit of new tokens."""
SAMPLED_MORE: list[tuple[dict[str, typing.Any], str]] = [
    ({"n": 129}, "n"), ({"n": 10**9}, "n"), ({"n": 0}, "n"),
    ({"stop": ["a" * 1025]}, "stop"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias must be token ids in [0, 2^31), each once, with a number in [-100, 100]"),
    ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
    ({"max": 5, "min": 6}, "must be at most max"),
    ({"stop_regex": "a*"}, "the stop pattern 'a*' is refused: it matches the empty"),
    ({"stop_regex": ["a"] * 9}, "stop_regex must be at most 8 patterns"),
]  # fmt: skip
"""And with those of the interfaces that have them all."""

Row = tuple[dict[str, typing.Any], str | None, str]

OWN: dict[str, list[Row]] = {
    "/generate": [
        ({"text": None}, "text", "exactly one of text, input_ids and prompt"),
        ({"input_ids": [1]}, "text", "exactly one of text, input_ids and prompt"),
        ({"text": []}, "text", "text must have at least one prompt"),
        ({"text": None, "input_ids": []}, "input_ids", "input_ids must have at least one prompt"),
        ({"text": ""}, "text", "text must be at least one token"),
        ({"text": ["a", ""]}, "text", "text must be at least one token"),
        ({"text": None, "input_ids": [[1], []]}, "input_ids", "input_ids must be at least one token"),
        ({"text": 5}, "text", "text is not valid"),
        ({"text": ["a", 5]}, "text", "text is not valid"),
        ({"text": ["a"] * 1025}, "text", "at most 1024, but has 1025"),
        ({"text": ["a"] * 3000}, "text", "at most 2048"),
        ({"text": ["a"] * 100, "sampling_params": {"n": 100}}, None, "at most 1024 answers, but got 10000"),
        ({"text": ANY, "sampling_params": {"max_new_tokens": 1}}, "max_new_tokens", "shorten the prompt"),
        ({"text": None, "input_ids": [1] * 10**6, "sampling_params": {"n": 128}}, "max_new_tokens",
         "at most 1024, but got 1000000 + 1;"),
        ({"text": None, "input_ids": [4000]}, "input_ids", "input_ids must be below 512"),
        ({"text": None, "input_ids": [[1] * 500] * 128, "return_logprob": True, "logprob_start_len": 0,
          "top_logprobs_num": 20, "sampling_params": {"max_new_tokens": 0}}, "return_logprob",
         "return_logprob may report at most 524288 log-probabilities"),
        ({"sampling_params": {"grammar": "a"}}, "grammar", "use the field for its kind: regex"),
        ({"sampling_params": {"temprature": 1}}, "temprature", "'temprature'"),
        ({"sampling_params": [{}, {}]}, "sampling_params", "sampling_params must have one item for each"),
        ({"sampling_params": [{}] * 3000}, "sampling_params", "at most 2048"),
        ({"return_cache_info": 1}, "return_cache_info", "true or false"),
        ({"log_metrics": False}, "log_metrics", "log_metrics must be True"),
        ({"stream_options": {"continuous_usage_stats": False}}, "stream_options", "always has the numbers"),
        ({"text": ["a", "b"], "top_logprobs_num": [1]}, "top_logprobs_num", "must have one item for each"),
        ({"return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num", "at most 128"),
        ({"return_logprob": True, "token_ids_logprob": [1] * 3000}, "token_ids_logprob", "at most 128"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid", "rid must have one item for each"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "unique"),
        ({"text": ["a", "b"], "rid": ["x"] * 3000}, "rid", "at most 2048"),
        ({"rid": "x" * 129}, "rid", "at most 128"),
        ({"rid": "spaces are no name"}, "rid", "rid is not valid"),
        ({"stream": "yes"}, "stream", "stream is not valid"),
    ],
    "/v1/completions": [
        ({"prompt": None}, "prompt", "must be"),
        ({"prompt": []}, "prompt", "at least one"),
        ({"prompt": ""}, "prompt", "prompt must be at least one token"),
        ({"prompt": ["a", ""]}, "prompt", "prompt must be at least one token"),
        ({"prompt": [[1], []]}, "prompt", "prompt must be at least one token"),
        ({"prompt": 5}, "prompt", "not valid"),
        ({"prompt": ["a", 5]}, "prompt", "not valid"),
        ({"prompt": ["a"] * 1025}, None, "1024"),
        ({"prompt": ["a"] * 100, "n": 100}, None, "prompts times n"),
        ({"prompt": [[1]] * 3000}, "prompt", "at most 2048"),
        ({"prompt": ANY, "max_tokens": None}, "prompt", "shorten the prompt"),
        ({"prompt": [4000]}, "prompt", "prompt must be below 512"),
        ({"suffix": "b"}, "suffix", "has no marks"),
        ({"best_of": 3, "n": 2}, "best_of", "must be 1"),
        ({"length_penalty": 1.5}, "length_penalty", "no beam search"),
        ({"logprobs": 129}, "logprobs", "at most 128"),
        ({"add_special_tokens": False}, "add_special_tokens", "send token ids"),
        ({"user": "x" * 513}, "user", "at most 512"),
        ({"model": "gpt-4"}, "model", "'fake'"),
    ],
    "/v1/chat/completions": [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "not valid"),
        ({"messages": MESSAGES * 3000}, "messages", "at most 2048"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages", "not valid"),
        ({"messages": [{"role": "user"}]}, "messages", "must have content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "must have image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "strange", "x": 1}]}]}, "messages", "'strange'"),
        ({"messages": [{"role": "user", "content": ANY}], "max_tokens": None}, "messages", "shorten the prompt"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "template does not show them"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"functions": [{"name": "f"}]}, "functions", "template does not show them"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "strange", "x": "a"}}, "response_format", "'strange'"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "use whitespace"),
        ({"store": "yes"}, "store", "must be False"),
        ({"store": 0}, "store", "must be False"),
        ({"service_tier": "best"}, "service_tier", "there is one tier"),
        ({"modalities": ["text", "audio"]}, "modalities", "text only"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "send echo with logprobs"),
        ({"reasoning_effort": "very"}, "reasoning_effort", "not valid"),
        ({"chat_template_kwargs": {"style": "slow"}}, "chat_template_kwargs", "read 'style'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "not set messages"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", "leave one out"),
        ({"continue_final_message": True}, "messages", "must end with a text of the assistant"),
        ({"rid": "a", "request_id": "b"}, "request_id", "only one"),
        ({"cache_salt": "a" * 513}, "cache_salt", "not valid"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation", "never padded"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", "include_usage"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "send only one"),
        ({"max_tokens": None, "max_completion_tokens": 5000}, "max_completion_tokens", "lower max_completion_tokens"),
        ({"n": 128, "max_tokens": 900, "logprobs": True, "top_logprobs": 20}, "logprobs", "logprobs may report"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 129}, "top_logprobs", "at most 128"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"model": "gpt-4"}, "model", "'fake'"),
    ],
    "/v1/messages": [
        ({"max_tokens": None}, None, "max_tokens"),
        ({"messages": []}, None, "messages"),
        ({"messages": None}, None, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, None, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, None, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, None, "source"),
        ({"messages": [{"role": "user", "content": [{"type": "strange", "x": 1}]}]}, None, "'strange'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, None,
         "no place for"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, None, "thinking"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, None, "must have thinking"),
        ({"messages": [{"role": "user", "content": ANY}]}, None, "shorten the prompt"),
        ({"system": [{"type": "text", "text": "a", "thinking": "b"}]}, None, "belong in a message of the assistant"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, None, "less than max_tokens"),
        ({"thinking": {"type": "loud"}}, None, "thinking"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, None, "tools"),
        ({"tool_choice": {"type": "any"}}, None, "tool_choice"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, None, "context_management"),
        ({"mcp_servers": [{}]}, None, "mcp_servers"),
        ({"container": "c"}, None, "container"),
        ({"service_tier": "priority"}, None, "service_tier"),
        ({"speed": "slow"}, None, "speed"),
        ({"metadata": {"user_id": 5}}, None, "metadata"),
        ({"max_output_tokens": 5}, None, "unknown field"),
        ({"model": "gpt-4"}, None, "'fake'"),
    ],
    "/v1/responses": [
        ({"input": ""}, "input", "at least 1"),
        ({"input": []}, "input", "at least 1"),
        ({"input": None}, "input", "must be"),
        ({"input": 5}, "input", "must be"),
        ({"input": ANY, "max_output_tokens": None}, "input", "shorten the prompt"),
        ({"input": [{"type": "strange", "x": 1}]}, "input", "'strange'"),
        ({"input": [{"role": "user", "content": [{"type": "strange", "x": 1}]}]}, "input", "'strange'"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input", "one of"),
        ({"input": [{"role": "user"}]}, "input", "must have content"),
        ({"input": [{"type": "item_reference"}]}, "input", "must have id"),
        ({"input": [{"type": "item_reference", "id": "a", "content": "x"}]}, "input", "must not have content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "cannot see"),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "input", "input_text"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input", "input must fit"),
        ({"input": [{"type": "reasoning", "summary": [{}]}]}, "input", "type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "besides thoughts"),
        ({"input": [{"type": "reasoning", "content": [{"type": "output_text", "text": "x"}]}]}, "input", "a part of"),
        ({"input": [{"role": "user", "content": [{"type": "summary_text", "text": "x"}]}]}, "input", "a part of"),
        ({"reasoning": {"mode": "loud"}}, "mode", "standard"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "tools"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"background": True}, "background", "must wait"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"text": {"format": {"type": "xml"}}}, "text", "json_object"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "must have name"),
        ({"truncation": "middle"}, "truncation", "never shortens"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "stores no prompts"),
        ({"service_tier": "best"}, "service_tier", "one tier"),
        ({"prompt_cache_retention": "1y"}, "prompt_cache_retention", "room"),
        ({"include": ["nonsense"]}, "include", "one of"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"top_logprobs": 1000, "include": ["message.output_text.logprobs"]}, "top_logprobs", "at most"),
        ({"stream_options": {}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation", "padded"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "64"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "512"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_tokens": 5}, "max_tokens", "unknown field"),
        ({"messages": []}, "messages", "unknown field"),
        ({"model": "gpt-4"}, "model", "'fake'"),
    ],
    "/v1/score": [
        ({"items": ["a"] * 3000}, "items", "at most"),
        ({"query": "", "items": [""], "label_token_ids": [1]}, "items", "at least one token"),
        ({"label_token_ids": [1] * 129}, "label_token_ids", "at most 128"),
    ],
    "/tokenize": [
        ({"prompt": None}, "prompt", "exactly one of prompt and messages"),
        ({"prompt": []}, "prompt", "prompt"),
        ({"prompt": ["a"] * 3000}, "prompt", "at most 2048"),
    ],
    "/detokenize": [({"tokens": [[1]] * 3000}, "tokens", "at most 2048")],
}  # fmt: skip
"""What is wrong in the fields of an interface: the fields, the one that is named, and what is said."""


class TestFields:
    @pytest.mark.parametrize("path", GENERATING)
    def test_sampling(self, battery: Battery, path):
        limit = LIMIT.get(path, "max_tokens")
        names = {"max": limit, "min": limit.replace("max", "min")}
        if path == "/v1/messages":
            names |= {"stop": "stop_sequences"}
        if path == "/generate":
            names |= {"seed": "sampling_seed"}
        has_all = path in ("/generate", "/v1/chat/completions", "/v1/completions")
        for given, said in [*SAMPLED, *SAMPLED_MORE * has_all]:
            fields = {names.get(name, name): value for name, value in given.items()}
            body = {"sampling_params": fields} if path == "/generate" else fields
            error = battery.refused(path, VALID[path] | body, said.replace(" max", f" {limit}"))
            assert error.get("param", [*fields][-1]) == [*fields][-1], error

    @pytest.mark.parametrize("path", OWN)
    def test_what_is_wrong_is_named(self, battery: Battery, path):
        for fields, param, said in OWN[path]:
            error = battery.refused(path, VALID[path] | fields, said, status=404 if "model" in fields else 400)
            assert error.get("param") == param, (fields, error)

    @pytest.mark.parametrize(
        ("path", "refused"),
        [
            ("/generate", GenerateBody.REFUSED),
            ("/v1/completions", CompletionBody.REFUSED),
            ("/v1/chat/completions", ChatBody.REFUSED),
        ],
    )
    def test_what_is_not_supported_is_named_with_what_to_do_instead(self, battery: Battery, path, refused):
        for name, why in refused.items():
            for value in ("x", 0) if path == "/v1/completions" else ("x",):  # zero may ask for something
                error = battery.refused(path, VALID[path] | {name: value}, f"{name} is not supported: {why}")
                assert error["param"] == name
        for nothing in (None, False, "", []):
            assert battery.post(path, VALID[path] | dict.fromkeys(refused, nothing)).status_code == 200
