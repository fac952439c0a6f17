"""Special tokens that a structural tag names: those that the model has, and no others."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.scripted import ScriptedServer
from tests.server.test_grammars import HI
from tests.server.test_grammars import TAG as OLD_TAG


@pytest.fixture(scope="module")
def scripted(tokenizer_dir: Path) -> ScriptedServer:
    return ScriptedServer(tokenizer_dir)


def token(name: str) -> dict[str, str]:
    return {"type": "token", "token": name}


class TestNamedTokens:
    """A special token that the model does not have is named before anything runs; it could never be written."""

    ANY: ClassVar = {"type": "any_text"}
    FORMATS: ClassVar[list[dict[str, Any]]] = [
        token("<no>"),
        {"type": "tag", "begin": token("<no>"), "content": ANY, "end": "a"},
        {"type": "tag", "begin": "a", "content": ANY, "end": ["b", token("<no>")]},
        {"type": "sequence", "elements": [ANY, {"type": "optional", "content": token("<no>")}]},
        {
            "type": "triggered_tags",
            "triggers": ["a", token("<no>")],
            "tags": [{"type": "tag", "begin": "a", "content": ANY, "end": "b"}],
        },
        {"type": "token_triggered_tags", "trigger_tokens": ["<no>"], "tags": []},
        {"type": "dispatch", "rules": [["a", token("<no>")]]},
        token("<tool_call>"),  # of another model
        token("<|im_end|>"),  # it has this one, but it ends the answer
    ]

    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("stream", [False, True])
    def test_of_openai(self, scripted, form, stream):
        num_before = len(scripted.engine.requests)
        tag = {"type": "structural_tag", "format": form}
        name = next(name for name in ("<no>", "<tool_call>", "<|im_end|>") if name in json.dumps(form))
        bodies = {"response_format": {"response_format": tag}, "structural_tag": {"structural_tag": tag}}
        for field, body in bodies.items():
            response = scripted.http.post("/v1/chat/completions", json={"messages": HI, "stream": stream, **body})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field)
            assert error["message"].startswith(f"{field} is not valid: the token {name!r} must be a special token")
        assert len(scripted.engine.requests) == num_before

    def test_of_generate(self, scripted):
        text = json.dumps({"type": "structural_tag", "format": token("<no>")}).replace("token", "\\u0074oken")
        response = scripted.http.post("/generate", json={"text": "hi", "sampling_params": {"structural_tag": text}})
        assert response.status_code == 400 and "the token '<no>'" in response.json()["error"]["message"]

    def test_what_only_looks_like_a_name(self, scripted):
        schema = {"const": token("<no>")}
        tag = {
            "type": "structural_tag",
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "json_schema", "json_schema": schema},
                    {"type": "const_string", "value": json.dumps(token("<no>"))},
                ],
            },
        }
        old = OLD_TAG | {"structures": [{"begin": "<f>", "schema": schema, "end": "token"}]}
        for given in (tag, old):
            response = scripted.http.post("/v1/completions", json={"prompt": "a", "structural_tag": given})
            assert response.status_code == 200, response.text

    def test_looking_for_names_has_a_bound(self, scripted):
        tag = {"type": "structural_tag", "format": {"type": "or", "elements": [[]] * 40_000}, "token": 1}
        response = scripted.http.post("/v1/completions", json={"prompt": "a", "structural_tag": json.dumps(tag)})
        assert response.status_code == 400
        assert "at most 32768 lists and objects" in response.json()["error"]["message"]

    def test_one_that_the_model_has(self, tmp_path):
        write_byte_tokenizer(tmp_path, None, ["<|im_start|>", "<|im_end|>", "<s>", "<tool_call>"])
        tag = {"type": "structural_tag", "format": token("<tool_call>")}
        made = ScriptedServer(tmp_path)
        assert made.http.post("/v1/completions", json={"prompt": "a", "structural_tag": tag}).status_code == 200
        tag = {"type": "structural_tag", "format": token("[TOOL_CALLS]")}
        said = made.http.post("/v1/completions", json={"prompt": "a", "structural_tag": tag}).json()["error"]["message"]
        assert said.endswith("but there are <tool_call>; name one of them, or write it as text")
