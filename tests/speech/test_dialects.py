"""The dialects of tool calls: their names, and the chat templates that show them."""

import pytest

from jsg.config import TOOL_CALL_PARSERS
from jsg.speech.dialects import DIALECTS, choose_dialect, detect_dialect
from tests.speech.dialects import TEMPLATES


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_a_template_shows_its_dialect(dialect: str) -> None:
    found = detect_dialect(TEMPLATES[dialect])
    assert found is not None and found.name == dialect


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}{{ tools | tojson }}{% endif %}<tool_response>", None),
        ("{{ '<|start_header_id|>' }} {'<|python_tag|>'}", "llama3_json"),
        ('<|header_start|>system {"name": function name, "parameters": ...} {{ \'<|python_start|>\' }}', "llama3_json"),
        ("<|header_start|> {{ '<|python_start|>[' }}", "pythonic"),
        ('<|start_header_id|>[func_name1(params_name1=params_value1), func_name2()] "parameters"', "pythonic"),
        ("{{ '[TOOL_CALLS] [' + call }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}", "mistral_args"),
        ('<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>', "hermes"),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("{{- 'List of tools: <|tool_list_start|>[' -}}", "lfm2"),
        ("{{- '<TOOLCALL>[' -}}", "nemotron_json"),
        ("{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>", "glm45"),
        ("{{ '<｜tool▁calls▁begin｜>' + '\\n' + '```json' + '\\n' }}", "deepseek_v3"),
    ],
)
def test_what_templates_show(template: str | None, name: str | None) -> None:
    found = detect_dialect(template)
    assert (found and found.name) == name


def test_names_of_parsers() -> None:
    names = dict.fromkeys(name for each in DIALECTS.values() for name in (each.name, *each.aliases))
    assert ("auto", *names) == TOOL_CALL_PARSERS
    for name in names:
        dialect = choose_dialect(name, None)
        assert dialect is not None
        assert name in (dialect.name, *dialect.aliases)
    both = [choose_dialect("mistral", text) for text in (None, "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]")]
    assert [each.name for each in both if each] == ["mistral", "mistral", "mistral_args"]
    assert choose_dialect("hermes", TEMPLATES["mistral"]) is DIALECTS["hermes"]
    assert choose_dialect("auto", TEMPLATES["mistral"]) is DIALECTS["mistral"]
