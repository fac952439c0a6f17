"""Numbers and limits at every endpoint: what is out of range is refused by name, and nobody else notices.

The numeric fields are read from the interface itself, so a new one is covered or missed loudly.
"""

import dataclasses
import typing

import pytest

from jsg.types import SamplingParams
from tests.server.battery import (
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


class TestLimits:
    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"n": 129}, "n"),
            ({"n": 10**9}, "n"),
            ({"n": 0}, "n"),
            ({"stop": ["a"] * 33}, "stop"),
            ({"stop": ["a" * 1025]}, "stop"),
            ({"stop": [""]}, "stop"),
            ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
            ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
            ({"logit_bias": {"-1": 1}}, "logit_bias"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
            ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
        ],
        ids=lambda value: str(value)[:30],
    )
    @pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
    def test_sampling(self, battery: Battery, path, fields, name):
        body = {"sampling_params": fields} if path == "/generate" else fields
        assert name in battery.refused(path, VALID[path] | body)["message"]

    @pytest.mark.parametrize(
        ("path", "fields", "name"),
        [
            ("/generate", {"return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num"),
            ("/generate", {"return_logprob": True, "token_ids_logprob": [1] * 3000}, "token_ids_logprob"),
            ("/generate", {"text": ["a"] * 1025}, "1024"),
            ("/generate", {"text": ["a"] * 3000}, "text"),
            ("/generate", {"text": ["a", "b"], "rid": ["x"] * 3000}, "rid"),
            ("/generate", {"rid": "x" * 129}, "rid"),
            ("/generate", {"rid": "a b"}, "rid"),
            ("/generate", {"sampling_params": [{}] * 3000}, "sampling_params"),
            ("/v1/completions", {"prompt": ["a"] * 1025}, "1024"),
            ("/v1/completions", {"prompt": [[1]] * 3000}, "prompt"),
            ("/v1/completions", {"prompt": ["a"] * 100, "n": 100}, "1024"),
            ("/v1/completions", {"logprobs": 129}, "logprobs"),
            ("/v1/completions", {"best_of": 5}, "best_of"),
            ("/v1/completions", {"suffix": "x"}, "suffix"),
            ("/v1/completions", {"user": "x" * 513}, "user"),
            ("/v1/chat/completions", {"messages": MESSAGES * 3000}, "messages"),
            ("/v1/chat/completions", {"messages": []}, "messages"),
            ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 129}, "top_logprobs"),
            ("/v1/messages", {"messages": []}, "messages"),
            ("/v1/messages", {"stop_sequences": ["a"] * 33}, "stop_sequences"),
            ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
            ("/v1/responses", {"input": []}, "input"),
            ("/v1/score", {"items": ["a"] * 3000}, "items"),
            ("/v1/score", {"label_token_ids": [1] * 129}, "label_token_ids"),
            ("/tokenize", {"prompt": ["a"] * 3000}, "prompt"),
            ("/detokenize", {"tokens": [[1]] * 3000}, "tokens"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_other_fields(self, battery: Battery, path, fields, name):
        assert name in battery.refused(path, {**VALID[path], **fields})["message"]

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "strange", "x": 1}]}]}),
            ("/v1/chat/completions", {"response_format": {"type": "strange", "x": "a"}}),
            ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "strange", "x": 1}]}]}),
            ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "strange", "x": 1}]}]}),
            ("/v1/responses", {"input": [{"type": "strange", "x": 1}]}),
        ],
    )
    def test_an_object_of_an_unknown_type_is_refused_for_its_type(self, battery: Battery, path, fields):
        """That another field of it is unknown too says nothing to its sender."""
        battery.refused(path, VALID[path] | fields, "type", "'strange'")

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
    def test_an_unknown_model_is_refused(self, battery: Battery, path):
        error = battery.refused(path, VALID[path] | {"model": "gpt-4"}, "'fake'", "'gpt-4'", status=404)
        assert error["type"] in ("invalid_request_error", "not_found_error")
