"""How clients ask for the form of an answer, in every API: what reaches the engine, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import anthropic
import openai
import pytest
from pydantic import BaseModel

from jsg.errors import GrammarError
from jsg.types import FinishReason, FinishType, GrammarSpec
from tests.server.scripted import ScriptedServer

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}, "required": ["ä"], "additionalProperties": False}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
NEW_TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
NAMED = {"name": "answer", "schema": SCHEMA}
OUTPUT_FORMAT = {"type": "json_schema", "schema": SCHEMA}
ANY = GrammarSpec("json_schema", '{"type": "object"}')
OURS = GrammarSpec("json_schema", TEXT)
OPEN = GrammarSpec("json_schema", TEXT, additional_properties="open")


class Weather(BaseModel):
    city: str
    degrees: float


@pytest.fixture(scope="module")
def scripted(tokenizer_dir: Path) -> ScriptedServer:
    return ScriptedServer(tokenizer_dir)


@pytest.fixture(autouse=True)
def _plain(scripted: ScriptedServer) -> Iterator[None]:
    scripted.engine.answer, scripted.engine.failure = "hello", None
    yield
    scripted.engine.failure = None


AMBIGUOUS = "finding what may come next took too many steps; make the grammar less ambiguous"
TOO_MUCH = FinishReason(FinishType.ERROR, message=AMBIGUOUS, blames_grammar=True)
FAILING: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"text": "a", "sampling_params": {"regex": "a+"}}, ""),
    ("/generate", {"text": ["a", "b"], "sampling_params": {"regex": "a+"}}, ""),
    ("/v1/completions", {"prompt": "a", "regex": "a+"}, "regex"),
    ("/v1/chat/completions", {"messages": HI, "regex": "a+", "n": 2}, "regex"),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", **NAMED}}}, "text.format"),
    ("/v1/messages", {"messages": HI, "max_tokens": 90, "output_format": OUTPUT_FORMAT}, "output_format"),
]


@pytest.mark.parametrize(("path", "body", "field"), FAILING)
def test_a_grammar_that_cannot_be_followed_is_the_clients_to_mend(scripted: ScriptedServer, path, body, field):
    """It is told so in an answer, and in the last event of a stream."""
    said = f"{field} is not valid: {AMBIGUOUS}" if field else AMBIGUOUS
    finish, scripted.engine.finish = scripted.engine.finish, TOO_MUCH
    try:
        response = scripted.http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["message"]) == (400, said), response.text
        stream = scripted.http.post(path, json=body | {"stream": True})
    finally:
        scripted.engine.finish = finish
    last = json.loads([line for line in stream.text.splitlines() if line.startswith("data: {")][-1][6:])
    error = last.get("error") or last.get("response", last).get("error") or last
    assert error["message"] == said, stream.text
    assert path == "/v1/responses" or error["type"] in ("GrammarError", "invalid_request_error"), error


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"text": "hi", "sampling_params": {"regex": "(?=a)"}}, ""),
    ("/v1/completions", {"prompt": "hi", "regex": "(?=a)"}, "regex"),
    ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/chat/completions", {"messages": HI, "guided_json": {}}, "guided_json"),
    (
        "/v1/chat/completions",
        {"messages": HI, "structured_outputs": {"json": {"not": {}}}},
        "structured_outputs.json",
    ),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ("/v1/messages", {"messages": HI, "max_tokens": 5, "output_format": OUTPUT_FORMAT}, "output_format"),
    (
        "/v1/messages",
        {"messages": HI, "max_tokens": 5, "output_config": {"format": OUTPUT_FORMAT}},
        "output_config.format",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "field"), REFUSED)
def test_what_the_compiler_refuses_is_named_as_the_client_wrote_it(scripted: ScriptedServer, path, body, field, stream):
    """And the words of the grammar stay: `max_new_tokens` in it is not the client's field `max_tokens`."""
    reason = "at /properties/max_new_tokens the keyword 'x' is not supported"
    scripted.engine.failure = GrammarError(reason, param="regex" if path == "/generate" else "json_schema")
    response = scripted.http.post(path, json=body | {"stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["message"]) == (400, f"{field} is not valid: {reason}" if field else reason)
    assert error.get("param", field) == (field or "regex")


OPENAI_FORMS: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, OURS),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True, "description": "d"}}}, OURS),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": False}}}, OURS),
    ({"response_format": TAG}, GrammarSpec("structural_tag", json.dumps(TAG))),
    ({"response_format": NEW_TAG}, GrammarSpec("structural_tag", json.dumps(NEW_TAG))),
    ({"regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"json_schema": TEXT}, OURS),
    ({"json_schema": SCHEMA}, OURS),
    ({"json_schema": True}, GrammarSpec("json_schema", "true")),
    ({"ebnf": "root ::= [ab]"}, GrammarSpec("ebnf", "root ::= [ab]")),
    ({"structural_tag": json.dumps(TAG)}, GrammarSpec("structural_tag", json.dumps(TAG))),
    ({"guided_json": SCHEMA}, OURS),
    ({"guided_json": TEXT}, OURS),
    ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"choices": ["ja", "nein"]}, GrammarSpec("choices", '["ja", "nein"]')),
    ({"guided_choice": ["ja", "nein"]}, GrammarSpec("choices", '["ja", "nein"]')),
    ({"guided_grammar": "root ::= [ab]"}, GrammarSpec("ebnf", "root ::= [ab]")),
    ({"structured_outputs": {"json": SCHEMA}}, OURS),
    ({"structured_outputs": {"json": TEXT, "disable_any_whitespace": True}}, OURS),
    ({"structured_outputs": {"json": TEXT, "disable_additional_properties": True}}, OURS),
    ({"structured_outputs": {"json": TEXT, "disable_additional_properties": False}}, OPEN),
    ({"json_schema": TEXT, "additional_properties": "open"}, OPEN),
    ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
    ({"structured_outputs": {"regex": "a+", "disable_additional_properties": False}}, GrammarSpec("regex", "a+")),
    ({"structured_outputs": {"choice": ["a"]}}, GrammarSpec("choices", '["a"]')),
    ({"structured_outputs": {"grammar": "root ::= [ab]"}}, GrammarSpec("ebnf", "root ::= [ab]")),
    ({"structured_outputs": {"json_object": True}}, ANY),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, GrammarSpec("structural_tag", json.dumps(TAG))),
    ({"json_schema": TEXT, "whitespace": "compact"}, GrammarSpec("json_schema", TEXT, "compact")),
    (
        {"response_format": {"type": "json_object"}, "whitespace": "flexible", "property_order": "free"},
        GrammarSpec("json_schema", ANY.text, "flexible", "free"),
    ),
]


class TestOpenAI:
    @pytest.mark.parametrize(
        ("path", "prompt"), [("chat/completions", {"messages": HI}), ("completions", {"prompt": "hi"})]
    )
    @pytest.mark.parametrize(("fields", "grammar"), OPENAI_FORMS)
    def test_a_form_reaches_the_engine(self, scripted, path, prompt, fields, grammar):
        response = scripted.http.post(f"/v1/{path}", json={**prompt, **fields})
        assert response.status_code == 200, response.text
        assert scripted.sampling.grammar == grammar
        assert (scripted.sampling.jump_forward, scripted.sampling.return_constraint) == (None, False)
        assert "constraint" not in response.json()["choices"][0]

    @pytest.mark.parametrize(
        ("fields", "param", "said"),
        [
            ({"regex": "a", "ebnf": "root ::= [ab]"}, "ebnf", "regex and ebnf"),
            ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "only one grammar"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "only one grammar"),
            ({"guided_choice": ["a"], "guided_json": "{}"}, "guided_choice", "only one grammar"),
            ({"whitespace": "compact"}, "whitespace", "needs a json_schema"),
            ({"property_order": "free"}, "property_order", "needs a json_schema"),
            ({"regex": "a", "whitespace": "none"}, "whitespace", "'fixed'"),
            ({"guided_whitespace_pattern": "[ ]?"}, "guided_whitespace_pattern", "use whitespace"),
            ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "whitespace_pattern", "use whitespace"),
            (
                {
                    "structured_outputs": {"json": {}, "disable_additional_properties": False},
                    "additional_properties": "closed",
                },
                "additional_properties",
                "must not contradict",
            ),
            ({"guided_choice": []}, "guided_choice", "at least 1"),
            ({"choices": []}, "choices", "at least 1"),
            ({"choices": ["a"], "guided_choice": ["a"]}, "guided_choice", "choices and guided_choice"),
            ({"guided_choice": [1]}, "guided_choice", "string"),
            ({"regex": 5}, "regex", "string"),
            ({"json_schema": 5}, "json_schema", "an object"),
            ({"jump_forward": "always"}, "jump_forward", "'draft'"),
            ({"jump_forward": "off"}, "jump_forward", "needs a grammar"),
            ({"return_constraint": True}, "return_constraint", "needs a grammar"),
            ({"regex": "a", "whitespace": "compact"}, "whitespace", "of kind regex"),
            ({"regex": "a", "whitespace": "fixed"}, "whitespace", "of kind regex"),
            ({"guided_grammar": "root ::= [ab]", "property_order": "free"}, "property_order", "of kind ebnf"),
            ({"guided_choice": ["a"], "whitespace": "compact"}, "whitespace", "of kind choices"),
            ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
            ({"response_format": "json_object"}, "response_format", "object"),
            ({"response_format": {"type": "json_schema"}}, "response_format", "must have json_schema"),
            ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "response_format", "must not have"),
            ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format", "schema"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format", "name"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
                "response_format",
                "name",
            ),
            ({"response_format": {"type": "json_object", "strict": True}}, "strict", "unknown field"),
        ],
    )
    def test_what_is_wrong_is_named(self, scripted, fields, param, said):
        num_before = len(scripted.engine.requests)
        response = scripted.http.post("/v1/chat/completions", json={"messages": HI, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert said in error["message"]
        assert len(scripted.engine.requests) == num_before

    def test_a_large_grammar_is_refused_as_any_large_body(self, tokenizer_dir):
        small = ScriptedServer(tokenizer_dir, max_request_bytes=2000)
        body = {"messages": HI, "json_schema": {"enum": ["x" * 3000]}}
        assert small.http.post("/v1/chat/completions", json=body).status_code == 413

    def test_many_choices(self, scripted):
        choices = [f"c{number}" for number in range(100_000)]
        assert scripted.http.post("/v1/completions", json={"prompt": "a", "guided_choice": choices}).status_code == 200
        assert json.loads(scripted.sampling.grammar.text) == choices

    def test_choices_that_are_too_long(self, scripted):
        choices = [f"choice {number}" for number in range(100_000)]
        response = scripted.http.post("/v1/completions", json={"prompt": "a", "guided_choice": choices})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "guided_choice"), error
        assert "1048576" in error["message"]

    def test_jump_forward(self, scripted):
        for mode in ("draft", "retokenize", "off"):
            scripted.http.post("/v1/completions", json={"prompt": "a", "regex": "a", "jump_forward": mode})
            assert scripted.sampling.jump_forward == mode


class TestOptions:
    """The options beside a grammar, in APIs that have no field for them."""

    OPTIONS: ClassVar = {
        "whitespace": "compact",
        "property_order": "free",
        "additional_properties": "open",
        "jump_forward": "off",
    }
    ENDPOINTS: ClassVar[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
        "/v1/chat/completions": ({"messages": HI}, {"json_schema": SCHEMA}),
        "/v1/completions": ({"prompt": "hi"}, {"json_schema": SCHEMA}),
        "/v1/responses": ({"input": "hi"}, {"text": {"format": {**OUTPUT_FORMAT, "name": "answer"}}}),
        "/v1/messages": ({"messages": HI, "max_tokens": 9}, {"output_config": {"format": OUTPUT_FORMAT}}),
    }

    @pytest.mark.parametrize("path", ENDPOINTS)
    def test_they_reach_the_engine(self, scripted, path):
        prompt, form = self.ENDPOINTS[path]
        response = scripted.http.post(path, json={**prompt, **form, **self.OPTIONS})
        assert response.status_code == 200, response.text
        assert scripted.sampling.grammar == GrammarSpec("json_schema", TEXT, "compact", "free", "open")
        assert (scripted.sampling.jump_forward, scripted.sampling.return_constraint) == ("off", False)

    @pytest.mark.parametrize("path", ENDPOINTS)
    @pytest.mark.parametrize("name", [*OPTIONS, "return_constraint"])
    def test_without_a_grammar_they_are_refused(self, scripted, path, name):
        prompt, _ = self.ENDPOINTS[path]
        response = scripted.http.post(path, json={**prompt, name: {**self.OPTIONS, "return_constraint": True}[name]})
        error = response.json()["error"]
        assert (response.status_code, error.get("param", name)) == (400, name), error
        assert error["message"].startswith(f"{name} needs a ")

    @pytest.mark.parametrize("path", ENDPOINTS)
    def test_off_they_ask_for_nothing(self, scripted, path):
        prompt, _ = self.ENDPOINTS[path]
        body = {**prompt, **dict.fromkeys(self.OPTIONS), "return_constraint": False}
        assert scripted.http.post(path, json=body).status_code == 200


class TestReports:
    """`return_constraint`."""

    BODY: ClassVar = {"regex": "hel+o", "return_constraint": True}
    REPORT: ClassVar = {
        "forced_share": pytest.approx(2 / 6),
        "is_forced": [True, False, False, True, False, False],
        "kept_mass": [0.5] * 6,
        "is_complete": True,
    }

    @pytest.mark.parametrize(
        ("path", "prompt"), [("chat/completions", {"messages": HI}), ("completions", {"prompt": "hi"})]
    )
    def test_of_openai(self, scripted, path, prompt):
        body = {**prompt, **self.BODY}
        assert scripted.http.post(f"/v1/{path}", json=body).json()["choices"][0]["constraint"] == self.REPORT
        streamed = scripted.http.post(f"/v1/{path}", json={**body, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["constraint"] == self.REPORT
        assert not any("constraint" in chunk["choices"][0] for chunk in chunks[:-1])

    FORM: ClassVar = {"type": "json_schema", "schema": SCHEMA}

    def test_of_responses(self, scripted):
        form = self.FORM | {"name": "answer"}
        body = {"input": "hi", "text": {"format": form}, "return_constraint": True}
        made = scripted.http.post("/v1/responses", json=body).json()
        assert made["constraint"] == self.REPORT
        assert scripted.http.get(f"/v1/responses/{made['id']}").json()["constraint"] == self.REPORT
        streamed = scripted.http.post("/v1/responses", json=body | {"stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert [event["response"].get("constraint") for event in events if "response" in event] == [
            *[None] * 2,
            self.REPORT,
        ]

    def test_of_anthropic(self, scripted):
        body = {"messages": HI, "max_tokens": 9, "output_config": {"format": self.FORM}, "return_constraint": True}
        assert scripted.http.post("/v1/messages", json=body).json()["constraint"] == self.REPORT
        streamed = scripted.http.post("/v1/messages", json=body | {"stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert [event["constraint"] for event in events if "constraint" in event] == [self.REPORT]
        assert events[-2]["type"] == "message_delta"
        assert "constraint" in events[-2]

    def test_of_generate(self, scripted):
        answer = scripted.http.post("/generate", json={"text": "hi", "sampling_params": self.BODY}).json()
        assert answer["meta_info"]["constraint"] == self.REPORT
        plain = scripted.http.post("/generate", json={"text": "hi", "sampling_params": {"regex": "a"}}).json()
        assert "constraint" not in plain["meta_info"]


class TestGenerate:
    @pytest.mark.parametrize(
        ("fields", "grammar"),
        [
            ({"regex": "a+"}, GrammarSpec("regex", "a+")),
            ({"json_schema": TEXT}, OURS),
            ({"json_schema": SCHEMA, "whitespace": "compact"}, GrammarSpec("json_schema", TEXT, "compact")),
            ({"json_schema": {}, "property_order": "free"}, GrammarSpec("json_schema", "{}", "fixed", "free")),
            ({"ebnf": "root ::= [ab]"}, GrammarSpec("ebnf", "root ::= [ab]")),
            ({"structural_tag": TAG}, GrammarSpec("structural_tag", json.dumps(TAG))),
            ({"choices": ["a", "b"]}, GrammarSpec("choices", '["a", "b"]')),
            ({"json_schema": None, "regex": None, "ebnf": None, "structural_tag": None}, None),
        ],
    )
    def test_a_form_reaches_the_engine(self, scripted, fields, grammar):
        response = scripted.http.post("/generate", json={"text": "hi", "sampling_params": fields})
        assert response.status_code == 200, response.text
        assert scripted.sampling.grammar == grammar

    def test_those_of_one_request_take_turns(self, scripted):
        for _ in range(2):
            params = [{"regex": text} for text in "abc"]
            assert scripted.http.post("/generate", json={"text": ["x"] * 3, "sampling_params": params}).is_success
        turns = scripted.engine.grammar_turns[-6:]
        assert turns[0] is turns[1] is turns[2] is not turns[3] is turns[4] is turns[5]

    def test_each_prompt_has_its_own(self, scripted):
        sampling = [{"regex": "a"}, {}, {"choices": ["b"]}]
        scripted.http.post("/generate", json={"text": ["x", "y", "z"], "sampling_params": sampling})
        kinds = {request.input_ids: request.sampling.grammar for request in scripted.engine.requests[-3:]}
        assert {grammar.kind if grammar else None for grammar in kinds.values()} == {"regex", None, "choices"}

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"regex": "a", "ebnf": "b"}, "only one grammar"),
            ({"grammar": {"kind": "regex", "text": "a"}}, "use the field for its kind: regex"),
            ({"regex": 5}, "regex must be text"),
            ({"whitespace": "fixed"}, "needs a json_schema"),
            ({"json_schema": {}, "whitespace": "some"}, "whitespace must be"),
            ({"regex": "a", "whitespace": "fixed"}, "whitespace needs a json_schema or a structural_tag"),
            ({"choices": ["a"], "property_order": "free"}, "property_order needs a json_schema or a structural_tag"),
            ({"jump_forward": "off"}, "jump_forward needs a grammar"),
            ({"return_constraint": True}, "return_constraint needs a grammar"),
            ({"jump_forward": "no"}, "jump_forward must be"),
            ({"return_constraint": "yes"}, "return_constraint must be"),
        ],
    )
    def test_what_is_wrong_is_named(self, scripted, fields, said):
        response = scripted.http.post("/generate", json={"text": "hi", "sampling_params": fields})
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]


class TestPackages:
    """What people write with the real packages."""

    ANSWER = '{"city": "Bern", "degrees": 21.5}'

    def check(self, scripted: ScriptedServer) -> None:
        grammar = scripted.sampling.grammar
        assert isinstance(grammar, GrammarSpec)
        assert grammar.kind == "json_schema"
        schema = json.loads(grammar.text)
        assert (schema["required"], schema["additionalProperties"]) == (["city", "degrees"], False)

    def test_chat_parse(self, scripted):
        scripted.engine.answer = self.ANSWER
        made = scripted.openai().chat.completions.parse(model="fake", messages=HI, response_format=Weather)
        assert made.choices[0].message.parsed == Weather(city="Bern", degrees=21.5)
        self.check(scripted)

    def test_chat_stream(self, scripted):
        scripted.engine.answer = self.ANSWER
        with scripted.openai().chat.completions.stream(model="fake", messages=HI, response_format=Weather) as stream:
            seen = [event.type for event in stream]
        assert seen.count("content.done") == 1
        assert stream.get_final_completion().choices[0].message.parsed == Weather(city="Bern", degrees=21.5)

    def test_an_answer_that_was_cut_is_no_answer(self, scripted):
        scripted.engine.answer = self.ANSWER
        with pytest.raises(openai.LengthFinishReasonError):
            scripted.openai().chat.completions.parse(
                model="fake", messages=HI, response_format=Weather, max_completion_tokens=9
            )

    def test_responses_parse(self, scripted):
        scripted.engine.answer = self.ANSWER
        made = scripted.openai().responses.parse(model="fake", input="hi", text_format=Weather)
        assert made.output_parsed == Weather(city="Bern", degrees=21.5)
        assert made.text.format.type == "json_schema"
        assert made.text.format.name == "Weather"
        self.check(scripted)

    def test_responses_json_object(self, scripted):
        scripted.openai().responses.create(model="fake", input="hi", text={"format": {"type": "json_object"}})
        assert scripted.sampling.grammar == ANY

    def test_anthropic_parse(self, scripted):
        scripted.engine.answer = self.ANSWER
        made = scripted.anthropic().messages.parse(model="fake", messages=HI, max_tokens=99, output_format=Weather)
        assert made.parsed_output == Weather(city="Bern", degrees=21.5)
        self.check(scripted)

    def test_anthropic_output_config(self, scripted):
        form = OUTPUT_FORMAT
        scripted.anthropic().messages.create(model="fake", messages=HI, max_tokens=9, output_config={"format": form})
        assert scripted.sampling.grammar == OURS
        scripted.http.post("/v1/messages", json={"messages": HI, "max_tokens": 9, "output_format": form})
        assert scripted.sampling.grammar == OURS
        with pytest.raises(anthropic.BadRequestError, match="only one grammar"):
            scripted.anthropic().messages.create(
                model="fake",
                messages=HI,
                max_tokens=9,
                output_config={"format": form},
                extra_body={"output_format": form},
            )
