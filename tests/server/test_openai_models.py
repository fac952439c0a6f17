"""`/v1/models`, and what needs another kind of model."""

import dataclasses
import datetime
from typing import Any

import anthropic.types
import pytest

from jsg.server.openai.chat import ChatBody
from jsg.server.openai.models import CHAT_PARAMETERS, TOOL_PARAMETERS
from jsg.server.openai.refused import NEEDED
from jsg.types import Embedder
from tests.server.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer
from tests.server.openai_calls import chat, error_of
from tests.server.scripted import INFO, TOOL_TEMPLATE, ScriptedServer
from tests.server.vision_model import write_vision_model

YES, NO = {"supported": True}, {"supported": False}
SAMPLING = (
    *("max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k"),
    *("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "seed", "logit_bias"),
    *("skip_special_tokens", "no_stop_trim", "jump_forward", "speculative", "return_constraint", "return_drafts"),
)
TEXT_MODEL = {
    "id": "fake",
    "object": "model",
    "owned_by": "jsg",
    "type": "model",
    "display_name": "fake",
    "lifecycle": "active",
    "max_input_tokens": 1023,
    "root": "fake",
    "parent": None,
    "max_model_len": 1024,
    "name": "fake",
    "context_length": 1024,
    "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    "supported_parameters": [
        *SAMPLING,
        *("max_completion_tokens", "logprobs", "top_logprobs", "response_format", "structured_outputs"),
    ],
    "default_parameters": {
        **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    },
    "pricing": {"prompt": "0", "completion": "0"},
    "meta": {"n_ctx": 1024},
    "modalities": ["text"],
    "capabilities": {
        "chat": YES,
        "completions": YES,
        "embeddings": NO | {"dimensions": None},
        "rerank": NO,
        "image_input": NO,
        "video_input": NO,
        "tools": NO | {"dialect": None},
        "structured_outputs": YES | {"kinds": ["regex", "json_schema", "ebnf", "choices", "structural_tag"]},
        "logprobs": YES,
        "thinking": NO | {"types": {"adaptive": NO, "between_tools": NO, "enabled": NO, "disabled": YES}},
        "batch": NO,
        "citations": NO,
        "code_execution": NO,
        "context_management": NO,
        "pdf_input": NO,
        "effort": NO | {"low": NO, "medium": NO, "high": NO, "max": NO},
        "server_tools": NO | {"code_execution": NO, "web_search": NO},
    },
}
"""What is told of the model of most tests, whose chat template knows no tools."""


def card_of(server: ScriptedServer) -> dict[str, Any]:
    return server.http.get("/v1/models/fake").json()


class TestModels:
    def test_the_list(self, http):
        body = http.get("/v1/models").json()
        assert body["object"] == "list"
        card = body["data"][0]
        assert len(body["data"]) == 1
        assert card == http.get("/v1/models/fake").json()
        made = {name: card.pop(name) for name in ("created", "created_at")}
        assert card == TEXT_MODEL
        assert datetime.datetime.fromisoformat(made["created_at"]).timestamp() == made["created"]

    def test_the_sizes_are_what_requests_may_have(self, http):
        most = http.get("/v1/models/fake").json()["max_input_tokens"]
        statuses = [
            http.post("/v1/completions", json={"prompt": [5] * size, "max_tokens": 1}).status_code
            for size in (most, most + 1)
        ]
        assert statuses == [200, 400]

    def test_anthropics_client_finds_every_field_of_its_type(self, scripted_server):
        client = scripted_server.anthropic()
        (listed,) = client.models.list().data
        assert listed == client.models.retrieve("fake")
        anthropic.types.ModelInfo.model_validate_json(listed.model_dump_json(), strict=True)
        assert listed.capabilities is not None and not listed.capabilities.image_input.supported

    def test_the_parameters_are_those_that_a_chat_takes(self):
        without_effect = {*ChatBody.ACCEPTED, *ChatBody.HARMLESS, *ChatBody.REFUSED}
        assert {*CHAT_PARAMETERS, *TOOL_PARAMETERS} <= ChatBody.model_fields.keys() - without_effect

    def test_anthropics_clients_read_it_too(self, http):
        body = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert (body["has_more"], body["first_id"], body["last_id"]) == (False, "fake", "fake")

    def test_when_it_was_made_does_not_change(self, http):
        created = http.get("/v1/models/fake").json()["created"]
        answered_at = chat(http, max_tokens=1).json()["created"]
        assert answered_at - 3600 < created <= answered_at
        assert http.get("/v1/models").json()["data"][0]["created"] == created

    def test_a_name_with_slashes(self, make_server):
        with make_server(server={"served_model_name": "organisation/model"}) as named:
            for path in ("organisation/model", "organisation%2Fmodel"):
                assert named.http.get(f"/v1/models/{path}").json()["id"] == "organisation/model"
            assert chat(named.http, model="organisation/model", max_tokens=1).status_code == 200

    @pytest.mark.parametrize("name", ["other", "a/b", "fake/", "%00"])
    def test_another_is_not_here(self, http, name):
        response = http.get(f"/v1/models/{name}")
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")

    @pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake"])
    def test_it_is_read_only(self, http, path):
        assert http.post(path, json={}).status_code == 405 and http.delete(path).status_code == 405


class TestOtherModels:
    """What differs from `TEXT_MODEL`."""

    def test_one_that_calls_tools(self, tmp_path):
        write_byte_tokenizer(tmp_path, TOOL_TEMPLATE)
        card = card_of(ScriptedServer(tmp_path))
        assert card["capabilities"]["tools"] == YES | {"dialect": "hermes"}
        asked = [*TEXT_MODEL["supported_parameters"], "tools", "tool_choice", "parallel_tool_calls"]
        assert card["supported_parameters"] == asked

    @pytest.mark.parametrize(
        ("written", "stops", "effort"),
        [("", NO, NO), ("{{ enable_thinking }}", YES, NO), ("{{ reasoning_effort }}", NO, YES)],
    )
    def test_one_that_thinks_and_what_its_template_can_turn(self, tmp_path, written, stops, effort):
        write_byte_tokenizer(tmp_path, f"{CHAT_TEMPLATE}{written}{{# <think> </think> #}}")
        told = card_of(ScriptedServer(tmp_path, reasoning_parser="qwen3"))["capabilities"]
        types = {"adaptive": YES, "between_tools": NO, "enabled": YES, "disabled": stops}
        assert told["thinking"] == YES | {"types": types}
        assert told["effort"] == effort | dict.fromkeys(("low", "medium", "high", "max"), effort)

    def test_a_dialect_without_a_template_for_tools_is_not_enough(self, tokenizer_dir):
        card = card_of(ScriptedServer(tokenizer_dir, tool_call_parser="hermes"))
        assert card["capabilities"]["tools"] == TEXT_MODEL["capabilities"]["tools"]

    def test_one_without_a_chat_template(self, plain_tokenizer_dir):
        capabilities = card_of(ScriptedServer(plain_tokenizer_dir))["capabilities"]
        assert capabilities == TEXT_MODEL["capabilities"] | {"chat": NO}

    def test_one_that_embeds_writes_nothing_whatever_its_template_shows(self, tmp_path):
        write_byte_tokenizer(tmp_path, TOOL_TEMPLATE)
        server = ScriptedServer(tmp_path, tool_call_parser="hermes")
        server.engine.info = dataclasses.replace(INFO, embedder=Embedder(width=8))
        card = card_of(server)
        assert card["architecture"] == {"input_modalities": ["text"], "output_modalities": ["embeddings"]}
        assert (card["supported_parameters"], card["default_parameters"]) == ([], {})
        written = dict.fromkeys(("chat", "completions", "logprobs"), NO) | {"structured_outputs": NO | {"kinds": []}}
        embeds = {"embeddings": YES | {"dimensions": 8}}
        assert card["capabilities"] == TEXT_MODEL["capabilities"] | written | embeds

    @pytest.mark.parametrize(("variant", "video"), [("llava", False), ("llava_next_video", True)])
    def test_one_that_sees(self, tmp_path, variant, video):
        model_dir = write_vision_model(tmp_path / "model", variant)
        card = card_of(ScriptedServer(model_dir, model_dir=model_dir))
        seen = ["text", "image", *["video"] * video]
        assert card["architecture"] == {"input_modalities": seen, "output_modalities": ["text"]}
        assert card["modalities"] == seen
        told = {name: card["capabilities"][name]["supported"] for name in ("image_input", "video_input")}
        assert told == {"image_input": True, "video_input": video}


@pytest.mark.parametrize("path", sorted(NEEDED))
def test_what_needs_another_kind_of_model_is_refused_by_name(http, path):
    response = http.post(path, json={"model": "fake", "input": "a"})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "model"
    assert path in error["message"]
    assert "'fake' generates text" in error["message"]
    assert http.get(path).status_code == 405
