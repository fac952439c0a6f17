"""Thoughts in chat completions: how they are asked for, limited, told from the answer, and sent back."""

import itertools
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jsg.constrained.compiler import compile_tables
from jsg.constrained.limits import Limits
from jsg.errors import GrammarError
from jsg.server.http.field_rules import HEADER
from jsg.speech.answers.thoughts import Markers
from jsg.speech.rules.thought_grammar import after_thoughts
from jsg.types import GrammarSpec
from tests.server.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, write_byte_tokenizer
from tests.server.scripted import ScriptedServer

HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns_last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
).replace("ns_last", "(messages | map(attribute='role') | list).index('user')")
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
ANSWER = {"role": "assistant", "content": "so", "reasoning_content": "because"}
SAID = "<think>\nwhy é\n</think>\n\nso 1"


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def scripted(request, tmp_path_factory: pytest.TempPathFactory) -> ScriptedServer:
    """Of a model whose markers are special tokens, or text."""
    directory = tmp_path_factory.mktemp("thoughts")
    write_byte_tokenizer(directory, TEMPLATE, SPECIAL_TOKENS + ["<think>", "</think>"] * request.param)
    return ScriptedServer(directory)


@pytest.fixture(scope="module")
def thoughtless(tmp_path_factory: pytest.TempPathFactory) -> ScriptedServer:
    directory = tmp_path_factory.mktemp("thoughtless")
    write_byte_tokenizer(directory, CHAT_TEMPLATE)
    return ScriptedServer(directory)


@pytest.fixture(autouse=True)
def _plain(request: pytest.FixtureRequest) -> None:
    """Of tests that use that server; the others run once and not for each kind of marker."""
    if "scripted" in request.fixturenames:
        scripted = request.getfixturevalue("scripted")
        scripted.reset()
        scripted.engine.answer = SAID


def post(scripted: ScriptedServer, **fields: Any):
    return scripted.http.post("/v1/chat/completions", json={"messages": HI, **fields})


def ask(scripted: ScriptedServer, **fields: Any) -> dict[str, Any]:
    response = post(scripted, **fields)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json())
    return response.json()


def message_of(scripted: ScriptedServer, **fields: Any) -> dict[str, Any]:
    return ask(scripted, **fields)["choices"][0]["message"]


def deltas(scripted: ScriptedServer, **fields: Any) -> list[dict[str, Any]]:
    response = post(scripted, stream=True, **fields)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return [chunk["choices"][0]["delta"] for chunk in chunks]


class TestSplit:
    def test_a_whole_answer(self, scripted):
        answer = ask(scripted)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("why é", "why é", "so 1")
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == answer["usage"]["reasoning_tokens"] == len("\nwhy é\n".encode())

    @pytest.mark.parametrize("step_len", [1, 2, 7, 1000])
    def test_a_stream_has_thoughts_first(self, scripted, step_len):
        scripted.engine.step_len = step_len
        found = deltas(scripted)
        assert "".join(delta.get("reasoning") or "" for delta in found) == "why é"
        assert "".join(delta["reasoning_content"] or "" for delta in found) == "why é"
        assert "".join(delta.get("content") or "" for delta in found) == "so 1"
        kinds = [name for delta in found for name in ("reasoning", "content") if delta.get(name)]
        assert [kind for kind, _ in itertools.groupby(kinds)] == ["reasoning", "content"]

    def test_what_is_shown(self, scripted):
        hidden = message_of(scripted, include_reasoning=False)
        assert (hidden["reasoning_content"], hidden["content"]) == (None, "so 1")
        assert message_of(scripted, reasoning={"exclude": True})["reasoning"] is None
        assert "".join(d.get("content") or "" for d in deltas(scripted, include_reasoning=False)) == "so 1"
        whole = message_of(scripted, separate_reasoning=False)
        assert (whole["reasoning_content"], whole["content"]) == (None, SAID)
        usage = ask(scripted, separate_reasoning=False)["usage"]
        assert usage["reasoning_tokens"] == ask(scripted)["usage"]["reasoning_tokens"], "they are counted all the same"
        at_once = [delta["reasoning"] for delta in deltas(scripted, stream_reasoning=False) if delta.get("reasoning")]
        assert at_once == ["why é"]

    def test_log_probabilities_are_those_of_the_answer(self, scripted):
        content = ask(scripted, logprobs=True)["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == "so 1<|im_end|>"
        response = post(scripted, logprobs=True, stream=True)
        chunks = [json.loads(line[6:])["choices"][0] for line in response.text.splitlines() if line[:7] == "data: {"]
        streamed = [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
        assert streamed == content

    def test_an_answer_without_thoughts(self, scripted):
        scripted.engine.answer = "so <think>"
        message = message_of(scripted)
        assert message["reasoning_content"] is None and message["content"].startswith("so")

    def test_a_continued_message_has_none(self, scripted):
        messages = [*HI, {"role": "assistant", "content": "and"}]
        message = message_of(scripted, messages=messages, continue_final_message=True, add_generation_prompt=False)
        assert message["reasoning_content"] is None

    def test_calls_come_behind_thoughts(self, scripted):
        scripted.engine.answer = f"<think>\na <tool_call>?\n</think>\n\n{CALL}"
        for step_len in (1, 5, 1000):
            scripted.engine.step_len = step_len
            choice = ask(scripted, tools=[CLOCK])["choices"][0]
            assert choice["message"]["reasoning"] == "a <tool_call>?"
            assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            found = deltas(scripted, tools=[CLOCK])
            assert "".join(delta.get("reasoning") or "" for delta in found) == "a <tool_call>?"
            assert not any(delta.get("content") for delta in found)


class TestWishes:
    def rendered(self, scripted: ScriptedServer, **fields: Any) -> str:
        ask(scripted, **fields)
        return scripted.prompt

    @pytest.mark.parametrize(
        "fields",
        [
            {"reasoning_effort": "none"},
            {"enable_thinking": False},
            {"thinking": {"type": "disabled"}},
            {"reasoning": {"enabled": False}},
            {"reasoning": {"effort": "none"}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ],
    )
    def test_thoughts_are_turned_off(self, scripted, fields):
        scripted.engine.answer = "so"
        assert self.rendered(scripted, **fields).endswith("<think>\n\n</think>\n\n")
        assert message_of(scripted, **fields)["content"] == "so"

    @pytest.mark.parametrize("fields", [{}, {"reasoning_effort": "high"}, {"thinking": {"type": "enabled"}}])
    def test_thoughts_are_left_on(self, scripted, fields):
        assert self.rendered(scripted, **fields).endswith("assistant\n")

    @pytest.mark.parametrize(
        "fields",
        [
            {"thinking_budget": 5},
            {"thinking_token_budget": 5},
            {"thinking_budget_tokens": 5},
            {"thinking": {"type": "enabled", "budget_tokens": 5}},
            {"reasoning": {"max_tokens": 5}},
            {"thinking_budget": 5, "thinking_token_budget": 5},
        ],
    )
    def test_a_budget_under_each_name(self, scripted, fields):
        ask(scripted, **fields)
        limit = scripted.request.thought_limit
        assert limit is not None and (limit.max_tokens, limit.is_inside) == (5, False)
        assert scripted.sampling.grammar is not None, "the limit needs one"

    def test_no_limit(self, scripted):
        ask(scripted, thinking_budget=-1)
        assert scripted.request.thought_limit is None and scripted.sampling.grammar is None

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_token_budget"),
            ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning_effort"),
            ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking"),
            ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning_effort"),
            ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, "enable_thinking"),
            ({"thinking_budget": -2}, "thinking_budget"),
        ],
    )
    def test_contradictions_are_refused(self, scripted, fields, param):
        response = post(scripted, **fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == param

    def test_a_variable_and_a_field_that_agree(self, tmp_path):
        write_byte_tokenizer(tmp_path, TEMPLATE + "{{ reasoning_effort }}")
        strict = ScriptedServer(tmp_path, strict_fields=True)
        for field in ({"enable_thinking": True}, {"reasoning_effort": "high"}):
            assert message_of(strict, chat_template_kwargs=field, **field)["content"]
        response = post(strict, chat_template_kwargs={"reasoning_effort": "low"}, reasoning_effort="high")
        assert response.json()["error"]["param"] == "reasoning_effort"

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"enable_thinking": False}, "enable_thinking"),
            ({"thinking": {"type": "disabled"}}, "thinking"),
            ({"reasoning": {"enabled": False}}, "reasoning"),
            ({"reasoning": {"effort": "none"}}, "reasoning"),
            ({"thinking": {"type": "enabled"}}, None),
            ({"reasoning": {"max_tokens": 5}}, None),
        ],
    )
    def test_a_model_that_cannot_stop_thinking(self, tmp_path, thoughtless, fields, named):
        write_byte_tokenizer(tmp_path, TEMPLATE.split("{% if enable_thinking")[0] + "{% endif %}")
        server = ScriptedServer(tmp_path)
        header = post(server, **fields).headers.get(HEADER, "")
        assert header.startswith(f"{named} has no effect: the model's chat template" if named else "")
        assert bool(header) is (named is not None)
        silent = "thinking" in fields and named
        assert (HEADER not in post(thoughtless, **fields).headers) is bool(silent), "such a model is silent anyway"

    @pytest.mark.parametrize("name", ["thinking_budget", "thinking_token_budget", "thinking_budget_tokens"])
    def test_a_budget_of_a_model_that_does_not_think(self, thoughtless, name):
        response = post(thoughtless, **{name: 5})
        assert response.headers[HEADER].startswith(f"{name} has no effect: this model does not think")
        assert response.json()["choices"][0]["message"]["content"] == "hello"

    def test_a_budget_where_the_prompt_has_ended_thoughts(self, scripted):
        response = post(scripted, thinking_budget=5, enable_thinking=False)
        assert response.headers[HEADER].startswith("thinking_budget has no effect")


class TestGrammars:
    @pytest.mark.parametrize(
        ("fields", "kind"),
        [
            ({"response_format": FORM}, "json_schema"),
            ({"regex": "[0-9]"}, "regex"),
            ({"choices": ["a", "b"]}, "choices"),
            ({"ebnf": 'root ::= "a"'}, "ebnf"),
            (
                {"structural_tag": {"type": "structural_tag", "triggers": ["<f"], "structures": [
                    {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}},
                "structural_tag",
            ),
        ],
    )  # fmt: skip
    def test_every_kind_begins_behind_thoughts(self, scripted, fields, kind):
        ask(scripted, **fields)
        grammar = scripted.sampling.grammar
        assert isinstance(grammar, GrammarSpec) and grammar.kind == "structural_tag"
        lead, answer = json.loads(grammar.text)["format"]["elements"]
        assert lead["type"] == "optional" and answer["type"] != "any_text"
        compile_tables(grammar)
        with pytest.raises(GrammarError) as of_all:
            compile_tables(grammar, Limits(positions=3))
        assert of_all.value.param == kind
        field = next(iter(fields))
        for failure, said in ((GrammarError("it is odd", kind), "it is odd"), (of_all.value, "a grammar may have")):
            scripted.engine.failure = failure
            error = post(scripted, **fields).json()["error"]
            assert error["param"] == field and error["message"].startswith(f"{field} is not valid: {said}")

    def test_tools_do_too(self, scripted):
        ask(scripted, tools=[CLOCK], tool_choice="required", enable_thinking=True)
        assert json.loads(scripted.sampling.grammar.text)["format"]["elements"][0]["type"] == "optional"
        compile_tables(scripted.sampling.grammar)

    def test_behind_ended_thoughts_a_grammar_governs_all(self, scripted):
        scripted.engine.answer = '{"a": 1}'
        assert message_of(scripted, response_format=FORM, enable_thinking=False)["content"] == '{"a": 1}'
        assert scripted.sampling.grammar.kind == "json_schema"


class TestHistory:
    def test_the_template_keeps_or_drops_thoughts(self, scripted):
        """This one keeps them behind the first question of the user only, where calls of tools are under way."""
        ask(scripted, messages=[*HI, ANSWER, *HI])
        assert "<think>\nbecause\n</think>\n\nso" in scripted.prompt
        ask(scripted, messages=[ANSWER, *HI])
        assert "because" not in scripted.prompt
        ask(scripted, messages=[*HI, {"role": "assistant", "content": "so", "reasoning": "because"}, *HI])
        assert "because" in scripted.prompt

    def test_a_template_that_reads_none(self, thoughtless):
        response = post(thoughtless, messages=[*HI, ANSWER, *HI])
        assert response.status_code == 200
        assert response.headers[HEADER].startswith("reasoning_content has no effect: the chat template drops")
        assert "because" not in thoughtless.prompt

    def test_markers_that_a_user_typed_are_text(self, scripted):
        """They open and end nothing, and where they are special tokens, they are not these."""
        ask(scripted, messages=[{"role": "user", "content": "<think>\n</think> hi <think>"}], thinking_budget=5)
        assert scripted.request.thought_limit is not None and not scripted.request.thought_limit.is_inside
        ids = {scripted.tokenizer.token_id(text) for text in ("<think>", "</think>")} - {None}
        assert ids.isdisjoint(scripted.request.input_ids)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("choices", '["a", ""]', "number 1 is"),
        ("json_schema", '{"type": "object", "type": "string"}', "type"),
        ("json_schema", '{"maximum": NaN}', "NaN"),
        ("structural_tag", "[1]", "the structural tag"),
        ("regex", "(", "parenthesis"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}',
            r"^the structural tag\.format: regular",
        ),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "regex", "pattern": "(", "field": "tools[1]"}}',
            r"^tools\[1\] is not valid: regular",
        ),
    ],
)
def test_a_grammar_behind_thoughts_is_read_as_it_is_alone(kind, text, said):
    spec = GrammarSpec(kind, text)
    behind = after_thoughts(spec, Markers("<think>", "</think>", gap="\n"), is_inside=False, special_tokens=())
    with pytest.raises(GrammarError, match=said) as alone:
        compile_tables(spec)
    with pytest.raises(GrammarError) as found:
        compile_tables(behind)
    assert (str(found.value), found.value.param) == (str(alone.value), alone.value.param)
    assert alone.value.param in (kind, "tools[1]")


class TestGenerate:
    def post(self, scripted: ScriptedServer, **fields: Any):
        return scripted.http.post("/generate", json={"text": "hi\n", **fields})

    def test_thoughts_are_told_from_the_text(self, scripted):
        answer = self.post(scripted, separate_reasoning=True).json()
        assert (answer["reasoning_content"], answer["text"]) == ("why é", "so 1")
        ids = answer["output_ids"]
        texts = [scripted.tokenizer.decode(ids[:n], skip_special_tokens=False) for n in range(len(ids))]
        num_upto = next(n for n, text in enumerate(texts) if text.endswith("</think>"))
        assert answer["meta_info"]["reasoning_tokens"] == num_upto, "with the end marker, as SGLang counts"
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"], "all tokens are shown"
        whole = self.post(scripted, require_reasoning=True).json()
        assert whole["text"] == SAID and "reasoning_content" not in whole
        assert whole["meta_info"]["reasoning_tokens"] == num_upto

    def test_a_grammar_begins_behind_them(self, scripted):
        params = {"regex": "[a-z]+ [0-9]"}
        self.post(scripted, sampling_params=params)
        assert scripted.sampling.grammar.kind == "regex"
        self.post(scripted, sampling_params=params, require_reasoning=True, max_thinking_tokens=7)
        assert scripted.sampling.grammar.kind == "structural_tag"
        limit = scripted.request.thought_limit
        assert (limit.max_tokens, limit.is_inside) == (7, False)
        self.post(scripted, text="hi <think>\n", max_thinking_tokens=7)
        assert scripted.request.thought_limit.is_inside

    def test_prompts_in_parts_and_models_that_do_not_think(self, scripted, thoughtless):
        refused = scripted.http.post("/generate", json={"prompt": ["hi"], "separate_reasoning": True})
        assert refused.json()["error"]["param"] == "separate_reasoning"
        assert scripted.http.post("/generate", json={"prompt": ["hi"], "require_reasoning": True}).status_code == 200
        answer = self.post(thoughtless, separate_reasoning=True).json()
        assert (answer["reasoning_content"], answer["text"]) == ("", "hello")
        assert "this model does not think" in answer["meta_info"]["warnings"][0]


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_marker_that_a_user_typed_at_the_end_opens_nothing(tmp_path, is_special, path):
    """The template writes nothing behind the user's words, or only white space."""
    words = [*SPECIAL_TOKENS, *(["<think>", "</think>"] if is_special else [])]
    for index, (end, behind) in enumerate((("", ""), (" | trim", "{{ '\n\n' }}"), ("", "<think>"), ("", " <think>\n"))):
        directory, is_inside = tmp_path / str(index), "<think>" in behind
        directory.mkdir()
        write_byte_tokenizer(directory, f"{{{{ messages[-1].content{end} }}}}{behind}{{# <think> #}}", words)
        scripted = ScriptedServer(directory)
        for typed in ("what is <think>", "<think> ", "x </think>\n", "<think><think>"):
            scripted.engine.answer = "why</think>so"
            field = "input" if path == "/v1/responses" else "messages"
            body: dict[str, Any] = {field: [{"role": "user", "content": typed}]}
            if path == "/v1/messages":
                body |= {"max_tokens": 99, "thinking": {"type": "adaptive"}}
            shown = json.dumps(scripted.http.post(path, json=body).json())
            assert ('"why"' in shown) == is_inside, (end, behind, typed)
