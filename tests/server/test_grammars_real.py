"""Grammars and tools through a whole server: the real compiler, and a real engine with a small random model."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import httpx
import jsonschema
import openai
import pytest

from tests.server.byte_tokenizer import SPECIAL_TOKENS
from tests.server.real_model import write_real_model
from tests.server.running import RunningServer, serving
from tests.server.scripted import TOOL_TEMPLATE

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["age"],
    "additionalProperties": False,
}
WRONG = {"name": "a", "schema": {"type": "nothing"}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "person", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[RunningServer]:
    directory = write_real_model(tmp_path_factory.mktemp("real") / "model", TOOL_TEMPLATE)
    with serving(directory, compile_cache_dir) as made:
        yield made


@pytest.fixture(scope="module")
def client(real: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.http.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


class TestCompiler:
    """A scripted engine, which heeds no grammar; but the front compiles each before it sends it."""

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"regex": "(?=a)b"}, "regex"),
            ({"regex": "("}, "regex"),
            ({"ebnf": "root ::= root"}, "ebnf"),
            ({"json_schema": "{"}, "json_schema"),
            ({"response_format": {"type": "json_schema", "json_schema": WRONG}}, "response_format"),
            ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
            ({"response_format": {"type": "structural_tag", "format": {"type": "nonsense"}}}, "response_format"),
        ],
    )
    def test_what_is_wrong_is_a_400(self, http: httpx.Client, body: dict, field: str):
        for stream in (False, True):
            response = http.post("/v1/chat/completions", json={"messages": HI, "stream": stream, **body})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field), error
            assert error["message"].startswith(f"{field} is not valid: ")

    def test_what_is_right_is_answered(self, http: httpx.Client):
        for body in ({"regex": "a+"}, {"json_schema": SCHEMA}, {"guided_choice": ["a", "b"]}):
            response = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 3, **body})
            assert response.status_code == 200, response.text


@pytest.mark.slow
class TestSpecialTokens:
    """A model whose marks around calls are special tokens, which text cannot write."""

    MARKS: ClassVar = ["<tool_call>", "</tool_call>"]
    IDS: ClassVar = [259, 260]

    @pytest.fixture(scope="class")
    @classmethod
    def http(cls, tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[httpx.Client]:
        root = tmp_path_factory.mktemp("special")
        directory = write_real_model(root / "model", TOOL_TEMPLATE, [*SPECIAL_TOKENS, *cls.MARKS])
        with serving(directory, compile_cache_dir) as made:
            yield made.http

    def test_required_calls(self, http):
        body = {"messages": HI, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 2}
        for stop in ([], ["<tool_call>", "\n", '"']):
            made = http.post("/v1/chat/completions", json={**body, "stop": stop, "seed": 1}).json()
            for choice in made["choices"]:
                assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls"), choice
                [call] = choice["message"]["tool_calls"]
                assert call["function"]["name"] in ("person", "clock")
                json.loads(call["function"]["arguments"])

    def test_they_may_be_named(self, http):
        tag = {"type": "structural_tag", "format": tagged({"type": "token", "token": name} for name in self.MARKS)}
        body = {"text": "hi", "sampling_params": {"structural_tag": tag, "skip_special_tokens": False}}
        answer = http.post("/generate", json=body).json()
        assert answer["text"] == "<tool_call>ab</tool_call>"
        assert [answer["output_ids"][0], answer["output_ids"][3]] == self.IDS

    def test_one_of_another_model_is_refused(self, http):
        tag = {"type": "structural_tag", "format": {"type": "token", "token": "[TOOL_CALLS]"}}
        for stream in (False, True):
            response = http.post("/v1/completions", json={"prompt": "a", "structural_tag": tag, "stream": stream})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "structural_tag")


def tagged(marks: Iterable[dict[str, str]]) -> dict[str, Any]:
    begin, end = marks
    return {"type": "tag", "begin": begin, "content": {"type": "const_string", "value": "ab"}, "end": end}


@pytest.mark.slow
class TestEngine:
    @pytest.mark.parametrize("jump_forward", ["draft", "retokenize", "off"])
    @pytest.mark.parametrize("temperature", [0, 1])
    def test_json(self, client, jump_forward, temperature):
        form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        extra = {"jump_forward": jump_forward, "return_constraint": True}
        made = client.chat.completions.create(
            model=None, messages=HI, response_format=form, n=4, temperature=temperature, seed=3, extra_body=extra
        )
        for choice in made.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            assert choice.model_extra["constraint"]["is_complete"]
            assert all(0 <= kept <= 1 for kept in choice.model_extra["constraint"]["kept_mass"])

    def test_required_calls(self, client):
        made = client.chat.completions.create(
            model=None, messages=HI, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4, temperature=1
        )
        for choice in made.choices:
            assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
            [call] = choice.message.tool_calls
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, SCHEMA if call.function.name == "person" else {"maxProperties": 0})

    def test_calls_or_the_form(self, client):
        """What agents send in every turn: tools, and the form of the answer that needs no more of them."""
        form: Any = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE, "strict": True}}
        made = client.chat.completions.create(
            model=None, messages=HI, tools=TOOLS, response_format=form, n=24, temperature=1, seed=5
        )
        seen = set[str]()
        for choice in made.choices:
            seen.add(choice.finish_reason)
            for call in choice.message.tool_calls or ():
                arguments = json.loads(call.function.arguments)
                jsonschema.validate(arguments, SCHEMA if call.function.name == "person" else {"maxProperties": 0})
            if choice.message.content is not None:
                jsonschema.validate(json.loads(choice.message.content), AGE)
        assert seen == {"stop", "tool_calls"}

    def test_a_named_call_as_a_stream(self, client):
        choice: Any = {"type": "function", "function": {"name": "person"}}
        with client.chat.completions.stream(model="model", messages=HI, tools=TOOLS, tool_choice=choice) as events:
            list(events)
        [call] = events.get_final_completion().choices[0].message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)

    @pytest.mark.parametrize(
        ("sampling", "fits"),
        [
            ({"regex": "(ab){3}c"}, lambda text: text == "abababc"),
            ({"choices": ["yes", "no", "perhaps"]}, lambda text: text in ("yes", "no", "perhaps")),
            ({"ebnf": 'root ::= "<" [a-c]{2} ">"'}, lambda text: len(text) == 4 and text[0] + text[-1] == "<>"),
        ],
    )
    def test_native(self, real, sampling, fits):
        answer = real.http.post(
            "/generate", json={"text": "hi", "sampling_params": {"temperature": 1, **sampling}}
        ).json()
        assert fits(answer["text"]), answer
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
