"""Chat templates that write each dialect as its models' own templates do, and random calls, for tests."""

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

from jsg.speech.dialects import DIALECTS
from jsg.speech.prompts.chat_template import ChatTemplate
from tests.speech.answers.styled_calls import forbidden_in_strings

Calls = Sequence[tuple[str, dict[str, Any]]]

_EACH_CALL = "{% for c in m.tool_calls or [] %}"
_CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"

_PYTHON = (
    "{% macro literal(v) %}{% if v is string %}{{ v | tojson }}{% elif v is mapping %}{{ '{' }}"
    "{% for key, x in v | items %}{{ key | tojson }}: {{ literal(x) }}{{ ', ' if not loop.last }}{% endfor %}"
    "{{ '}' }}{% elif v is sequence %}[{% for x in v %}{{ literal(x) }}{{ ', ' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_PYTHON_CALLS = (
    f"{_EACH_CALL}{{{{ c.function.name }}}}({{% for key, v in c.function.arguments | items %}}{{{{ key }}}}="
    "{{ literal(v) }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}"
)


def _gemma(begin: str, end: str, quote: str) -> str:
    return (
        f"{{% macro literal(v) %}}{{% if v is string %}}{quote}{{{{ v }}}}{quote}"
        "{% elif v is mapping %}{{ '{' }}{% for key, x in v | dictsort %}{{ key }}:"
        "{{ literal(x) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
        "{% elif v is sequence %}[{% for x in v %}{{ literal(x) }}{{ ',' if not loop.last }}{% endfor %}]"
        "{% elif v is boolean %}{{ v | tojson }}{% else %}{{ v }}{% endif %}{% endmacro %}"
        "{% if tools %}<start_of_turn>developer\n{{ tools | tojson }}<end_of_turn>\n{% endif %}{% for m in messages %}"
        "<start_of_turn>{{ m.role }}{{ '\n' }}{{ m.content or '' }}"
        f"{_EACH_CALL}{begin}call:{{{{ c.function.name }}}}{{{{ literal(c.function.arguments) }}}}{end}{{% endfor %}}"
        "<end_of_turn>\n{% endfor %}"
    )


TEMPLATES: dict[str, str] = {
    "hermes": (
        "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
        'Write <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        f"{{% endif %}}{_CHATML}{_EACH_CALL}{{{{ '\n' if m.content or not loop.first }}}}"
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}<|im_end|>\n{% endfor %}"
    ),
    "llama3_json": (
        '{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nRespond in the format {"name": function name, '
        '"parameters": dictionary of argument name and its value}.{% for t in tools %}{{ t | tojson(indent=4) }}'
        "{% endfor %}<|eot_id|>{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        f"{{{{ m.content or '' }}}}{_EACH_CALL}{{% if not loop.first %}}; {{% endif %}}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{% endfor %}<|eot_id|>{% endfor %}"
    ),
    "mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% else %}{{ m.content or '' }}"
        "{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}</s>{% endif %}{% endfor %}"
    ),
    "mistral_args": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        f"{{% if m.role == 'user' %}}[INST]{{{{ m.content }}}}[/INST]{{% else %}}{{{{ m.content or '' }}}}{_EACH_CALL}"
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% endif %}{% endfor %}"
    ),
    "kimi_k2": (
        "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content or '' }}{% if m.tool_calls %}"
        f"<|tool_calls_section_begin|>{_EACH_CALL}<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
        "<|im_end|>{% endfor %}"
    ),
    "deepseek_v3": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>"
        "{{ m.content }}{% else %}<｜Assistant｜>{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        f"{_EACH_CALL}{{{{ '\n' if not loop.first }}}}<｜tool▁call▁begin｜>{{{{ c.type }}}}<｜tool▁sep｜>"
        "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    ),
    "deepseek_v31": (
        "{% if tools %}## Tools\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>"
        "tool_call_arguments<｜tool▁call▁end｜>{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜></think>"
        "{{ m.content or '' }}{% if m.tool_calls %}"
        f"<｜tool▁calls▁begin｜>{_EACH_CALL}<｜tool▁call▁begin｜>"
        "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    ),
    "harmony": (
        "{% if tools %}<|start|>developer<|message|># Tools{{ tools | tojson }}<|end|>{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}"
        "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% if m.content %}"
        "<|start|>assistant<|channel|>{{ 'commentary' if m.tool_calls else 'final' }}<|message|>{{ m.content }}<|end|>"
        f"{{% endif %}}{_EACH_CALL}<|start|>assistant to=functions.{{{{ c.function.name }}}}<|channel|>commentary json"
        "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "qwen3_coder": (
        "{% if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools>\nWrite\n<tool_call>\n<function=name>\n"
        "<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call><|im_end|>\n{% endif %}"
        f"{_CHATML}{_EACH_CALL}{{{{ '\n' if m.content or not loop.first }}}}<tool_call>\n"
        "<function={{ c.function.name }}>{{ '\n' }}{% for key, v in c.function.arguments | items %}"
        "<parameter={{ key }}>{{ '\n' }}"
        "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
        "{{ '\n' }}</parameter>{{ '\n' }}{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    ),
    "glm45": (
        "[gMASK]<sop>{% if tools %}<|system|>\n<tools>{{ tools | tojson }}</tools>\n<tool_call>name\n"
        "<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ '\n' }}{{ m.content or '' }}"
        f"{_EACH_CALL}{{{{ '\n' if m.content or not loop.first }}}}<tool_call>{{{{ c.function.name }}}}{{{{ '\n' }}}}"
        "{% for key, v in c.function.arguments | items %}<arg_key>{{ key }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{{ '\n' }}{% endfor %}</tool_call>"
        "{% endfor %}<|end|>{% endfor %}"
    ),
    "lfm2": (
        f"{_PYTHON}{{% if tools %}}<|im_start|>system\nList of tools: <|tool_list_start|>{{{{ tools | tojson }}}}"
        f"<|tool_list_end|><|im_end|>\n{{% endif %}}{_CHATML}{{% if m.tool_calls %}}<|tool_call_start|>["
        f"{_PYTHON_CALLS}]<|tool_call_end|>{{% endif %}}<|im_end|>\n{{% endfor %}}"
    ),
    "nemotron_json": (
        "{% if tools %}<SPECIAL_10>System\n<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>\nWrite "
        '<TOOLCALL>[{"name": "tool_name1", "arguments": {…}}]</TOOLCALL>\n{% endif %}{% for m in messages %}'
        "<SPECIAL_11>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}<TOOLCALL>["
        f'{_EACH_CALL}{{{{ ", " if not loop.first }}}}{{"name": "{{{{ c.function.name }}}}", "arguments": '
        "{{ c.function.arguments | tojson }}}{% endfor %}]</TOOLCALL>{% endif %}<SPECIAL_12>\n{% endfor %}"
    ),
    "pythonic": (
        f"{_PYTHON}"
        "{% if tools %}<|header_start|>system<|header_end|>\n\nIf you decide to invoke any of the functions, put "
        "it in the format of [func_name1(params_name1=params_value1...), func_name2(params)]{{ tools | tojson }}<|eot|>"
        "{% endif %}"
        "{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content or '' }}"
        f"{{% if m.tool_calls %}}[{_PYTHON_CALLS}]{{% endif %}}<|eot|>{{% endfor %}}"
    ),
    "minimax_m2": (
        "]~b]system\n{% if tools %}<tools>{{ tools | tojson }}</tools>\n<minimax:tool_call>\n"
        '<invoke name="tool-name">\n<parameter name="key">value</parameter>\n</invoke>\n</minimax:tool_call>'
        "{% endif %}[e~[\n"
        "{% for m in messages %}]~b]{{ m.role }}{{ '\n' }}{{ m.content or '' }}{% if m.tool_calls %}"
        f"<minimax:tool_call>{{{{ '\n' }}}}{_EACH_CALL}<invoke name=\"{{{{ c.function.name }}}}\">{{{{ '\n' }}}}"
        '{% for key, v in c.function.arguments | items %}<parameter name="{{ key }}">'
        "{{ v if v is string else v | tojson }}</parameter>{{ '\n' }}{% endfor %}</invoke>{{ '\n' }}{% endfor %}"
        "</minimax:tool_call>{% endif %}[e~[\n{% endfor %}"
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}
"""Dialect → a chat template. Each is shorter than the models' own, and writes calls in the same way."""

_AROUND = {
    "hermes": ("<|im_start|>assistant\n", "<|im_end|>\n"),
    "llama3_json": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistral": ("[/INST]", "</s>"),
    "mistral_args": ("[/INST]", "</s>"),
    "kimi_k2": ("<|im_middle|>", "<|im_end|>"),
    "deepseek_v3": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "deepseek_v31": ("</think>", "<｜end▁of▁sentence｜>"),
    "harmony": ("<|start|>assistant", "<|end|>"),
    "qwen3_coder": ("<|im_start|>assistant\n", "<|im_end|>\n"),
    "glm45": ("<|assistant|>\n", "<|end|>"),
    "lfm2": ("<|im_start|>assistant\n", "<|im_end|>\n"),
    "nemotron_json": ("<SPECIAL_11>assistant\n", "<SPECIAL_12>\n"),
    "pythonic": ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
    "minimax_m2": ("]~b]assistant\n", "[e~[\n"),
    "gemma4": ("<start_of_turn>assistant\n", "<end_of_turn>\n"),
    "functiongemma": ("<start_of_turn>assistant\n", "<end_of_turn>\n"),
}
"""What these templates write before and behind an answer."""

_ANY = ["number", "boolean", "null", "array", "object"]
PARAMETERS = {
    "type": "object",
    "properties": {"s0": {"type": "string"}, "s1": {"type": "string"}, "v0": {"type": _ANY}, "v1": {"type": _ANY}},
}
"""A schema of the arguments of random calls."""
NAMES = ("f", "get_all", "mcp.server-1.read_file", "x" * 64)
_MARKERS = sorted({mark for dialect in DIALECTS.values() for mark in dialect.markers})
_STRINGS = (
    "",
    "é😀\u2028",
    '"',
    "\\",
    "{",
    "}}",
    "[",
    "]",
    "```",
    "</",
    "\n\n",
    "a, b: c; d",
    "'",
    "functions.f:0",
    '{"name"',
)


@functools.cache
def _template(dialect: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[dialect], bos_token=None, eos_token=None)


def written(dialect: str, calls: Calls, content: str = "") -> str:
    """An answer with these calls, as the chat template writes it when it is part of a conversation."""
    ids = [f"functions.{name}:{i}" for i, (name, _) in enumerate(calls)]
    tool_calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, (name, arguments) in zip(ids, calls, strict=True)
    ]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content, "tool_calls": tool_calls}]
    text = _template(dialect).render(messages, add_generation_prompt=False)
    before, after = _AROUND[dialect]
    start = text.index(before, text.index("hi")) + len(before)
    return text[start:].removesuffix(after)


def random_calls(dialect: str, seed: int, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Calls with nested arguments, whose strings have quotes, braces and the markers of every dialect.

    An argument whose name begins with `s` is a string, and any other is none, as `PARAMETERS` says.
    """
    random_ = random.Random(seed)
    style = DIALECTS[dialect].call_style
    forbidden = None if style is None else forbidden_in_strings(style)

    def text() -> str:
        parts = [
            random_.choice((random_.choice(_STRINGS), random_.choice(_MARKERS))) for _ in range(random_.randrange(4))
        ]
        return "".join(part for part in parts if forbidden is None or forbidden not in part)

    def key() -> str:
        return random_.choice(("k", "größe", "a-b")) if forbidden else text() or "k"

    def value(depth: int) -> Any:
        match random_.randrange(7 if depth < 3 else 4):
            case 0:
                return random_.choice((True, False, None))
            case 1:
                return random_.choice((0, -7, 10**20, 0.5, -1.5e-7, 3e30))
            case 4:
                return [value(depth + 1) for _ in range(random_.randrange(3))]
            case 5 | 6:
                return {key(): value(depth + 1) for _ in range(random_.randrange(3))}
            case _:
                return text() if depth else [text()]

    def arguments() -> dict[str, Any]:
        return {f"s{i}": text() for i in range(random_.randrange(3))} | {
            f"v{i}": value(0) for i in range(random_.randrange(3))
        }

    return [(random_.choice(NAMES), arguments()) for _ in range(count)]


def same_json(text: str, value: Any) -> bool:
    """Whether a JSON text has this value, in any order of members: Gemma's templates sort them."""
    return json.dumps(json.loads(text), sort_keys=True) == json.dumps(value, sort_keys=True)
