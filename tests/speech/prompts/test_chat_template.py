import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jsg.errors import ModelError, RequestError
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model
from jsg.speech.prompts import template_sandbox
from jsg.speech.prompts.chat_template import ChatTemplate

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {% for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' if not loop.last }}
    {% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {% if message.role == 'assistant' %}
        {% generation %}
            {%- set end = '<|im_end|>' %}
            {{- message.content ~ end }}
        {% endgeneration %}
    {% else %}
        {{- message.content + '<|im_end|>' }}
    {% endif %}
    {{- '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{% endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- set ns = namespace(seen=0, first=none) %}
{%- macro header(role) -%}
<|header|>{{ role | trim }}<|/header|>

{% endmacro %}
{%- for message in messages if message.role != 'skip' %}
    {%- if loop.first %}{% set ns.first = message.role %}{% endif %}
    {%- if message.content is string %}
        {%- set text = message.content | trim %}
    {%- elif message.content is iterable %}
        {%- set text %}{% for part in message.content %}{{ part.text }}{% if loop.index == 2 %}{% break %}{% endif %}\
{% endfor %}{% endset %}
    {%- else %}
        {%- continue %}
    {%- endif %}
    {{- header(message['role']) + text + '<|eot|>' }}
    {%- set ns.seen = ns.seen + 1 %}
{%- endfor %}
{{- '[' ~ ns.seen ~ '/' ~ messages | length ~ ' ' ~ ns.first ~ ']' }}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}
"""
ALTERNATING = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate user/assistant/user/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are known, not ' + message['role']) }}{% endif %}\
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "alternating": ALTERNATING}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": " Hi <b>&amp; 'you' 😀 "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, *TALK]
PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": letter} for letter in "abc"]},
    {"role": "skip", "content": "never"},
    {"role": "user", "content": None},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a<b": [1, None, True]}}}]


def _template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("name", "messages", "extra"),
    [
        ("chatml", TALK, {}),
        ("chatml", SYSTEM, {}),
        ("chatml", TALK, {"tools": TOOLS, "enable_thinking": False}),
        ("headers", SYSTEM, {}),
        ("headers", PARTS, {}),
        ("alternating", TALK, {}),
    ],
)
def test_renders_as_transformers_does(
    name: str, messages: list[dict[str, Any]], extra: dict[str, Any], add_generation_prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    ours = _template(source).render(messages, add_generation_prompt=add_generation_prompt, **extra)
    theirs, _ = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
        **extra,
    )
    assert ours == theirs[0] and ours


def test_a_known_rendering() -> None:
    assert _template(ALTERNATING).render(TALK[:2]) == "<s>[INST]  Hi <b>&amp; 'you' 😀  [/INST]Hello.</s>"


def test_messages_that_do_not_fit_are_request_errors() -> None:
    cases = {
        "roles must alternate": (ALTERNATING, SYSTEM),
        "has no attribute 'content'": (ALTERNATING, [{"role": "user"}, {"role": "assistant"}]),
        "can only concatenate str": (ALTERNATING, PARTS),
        "of type object": (CHATML, [{"role": "user", "content": object()}]),
        "no reason given": ("{{ raise_exception('') }}", TALK),
    }
    for reason, (source, messages) in cases.items():
        with pytest.raises(RequestError, match=reason) as raised:
            _template(source).render(messages)
        assert raised.value.param == "messages"
    long_message = "{{ raise_exception(messages[0].content * 10000) }}"
    with pytest.raises(RequestError) as raised:
        _template(long_message).render(TALK)
    assert len(str(raised.value)) < 600


def test_messages_stay_as_they_were() -> None:
    before = copy.deepcopy(TALK)
    for attack in ("messages.append(1)", "messages[0].update(role='x')", "messages[0].pop('role')", "messages.clear()"):
        with pytest.raises(RequestError, match=r"not safely callable|is unsafe"):
            _template(f"{{% set _ = {attack} %}}").render(TALK)
    assert before == TALK


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% include 'secrets' %}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_internals_are_out_of_reach(attack: str) -> None:
    # jinja2 makes some of what it forbids undefined, which prints nothing.
    try:
        rendered = _template(attack + "x").render(TALK)
    except RequestError:
        rendered = "x"
    assert rendered == "x"


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("{% for a in range(9999999999) %}x{% endfor %}", "Range too big"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "loop iterations and calls"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ 'x' * 99999999999 }}", "at most 67108864 characters"),
        ("{{ 99999999999 * 'x' }}", "at most 67108864 characters"),
        ("{{ [1] * 99999999 }}", "at most 250000 items"),
        ("{{ 9 ** 99999999 }}", "at most 4096 bits"),
        ("{% set n = namespace(x=9) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", "4096 bits"),
        ("{% set n = namespace(x='xy') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "one would"),
        ("{% set n = namespace(x='xy') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "one would"),
        (
            "{% set n = namespace(x='xy') %}{% for a in range(99) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
            "{% set n.x = y %}{% endfor %}",
            "must print at most",
        ),
        ("{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}", "must print at most"),
        ("{% for m in messages %}{% for a in range(99999) %}{{ m.content }}{% endfor %}{% endfor %}", "must print"),
    ],
)
def test_runaway_templates_end(attack: str, reason: str) -> None:
    messages = [{"role": "user", "content": "y" * 10_000}]
    with pytest.raises(RequestError, match=reason):
        _template(attack).render(messages)


def test_a_macro_that_doubles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 1000)
    doubling = "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}"
    with pytest.raises(RequestError, match="at most 1000 loop iterations and calls"):
        _template(doubling).render(TALK)


def test_a_template_cannot_refill_its_budget() -> None:
    for name in ("metered", "joined", "budget"):
        with pytest.raises(ModelError, match="No filter named"):
            _template(f"{{{{ messages | {name}(-1) }}}}")


def test_deeply_nested_messages_are_refused() -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(RequestError, match="nested too deeply"):
        _template("{{ messages }}").render([{"role": "user", "content": nested}])


def test_every_rendering_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 1000)
    template = _template("{% for a in range(900) %}{{ 'x' }}{% endfor %}")
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: template.render(TALK), range(40))) == {"x" * 900}
    with pytest.raises(RequestError, match="at most 1000 loop"):
        _template("{% for a in range(1001) %}{% endfor %}").render(TALK)


def test_long_conversations_fit_the_budget() -> None:
    talk = [{"role": role, "content": "word " * 40} for _ in range(5000) for role in ("user", "assistant")]
    assert len(_template(CHATML).render(talk)) > 2_000_000


def test_broken_templates_are_model_errors() -> None:
    with pytest.raises(ModelError, match="line 2"):
        _template("ok\n{% if %}")
    with pytest.raises(ModelError, match="recursive loops"):
        _template("{% for m in messages recursive %}{{ loop(m) }}{% endfor %}")


def test_a_model_without_template_says_what_to_do() -> None:
    with pytest.raises(RequestError, match="chat_template"):
        _template(None).render(TALK)


def test_strftime_now_gives_the_date() -> None:
    rendered = _template("{{ strftime_now('%Y') }}").render(TALK)
    assert rendered.isdecimal() and int(rendered) >= 2024


def test_the_tiny_model_chats() -> None:
    tokenizer = load_tokenizer(resolve_model("tiny"))
    template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    text = template.render([{"role": "user", "content": "Hello there"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == tokenizer.token_id("<|user|>")
    assert ids[-2:] == [tokenizer.eos_token_id, tokenizer.token_id("<|assistant|>")]
    assert tokenizer.decode(ids) == "Hello there" and tokenizer.decode(ids, skip_special_tokens=False) == text


class TestWhatItReads:
    def test_variables_are_what_comes_from_outside(self):
        source = (
            "{% set first = messages[0] %}{% macro show(text) %}{{ text }}{{ style }}{% endmacro %}{{ bos_token }}"
            "{% for i in range(2) %}{{ show(first) }}{{ raise_exception }}{% endfor %}"
            "{% if enable_thinking %}{% endif %}"
        )
        assert ChatTemplate(source, bos_token=None, eos_token=None).variables == {
            *("messages", "style", "bos_token", "enable_thinking")
        }

    def test_words_are_attributes_and_strings(self):
        source = "{% if m.tool_calls or m['role'] == 'tool' or 'name' in m %}text{{ other }}{% endif %}"
        assert ChatTemplate(source, bos_token=None, eos_token=None).words == {"tool_calls", "role", "tool", "name"}

    def test_no_template_reads_nothing(self):
        template = ChatTemplate(None, bos_token=None, eos_token=None)
        assert template.variables == template.words == frozenset()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ f.arguments | tojson }}", "{cut"),
        ("{{ f.arguments }}", "{cut"),
        ("{{ '<' + f.arguments }}", "<{cut"),
        ("{{ f.arguments if f.arguments is string else f.arguments | tojson }}", "{cut"),
        ("{{ f | tojson }}", '{"name": "f", "arguments": {cut}'),
        ("{% for k, v in f.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}", "<arguments>{cut"),
        ("{% for k, v in f.arguments | items %}<{{ k }}>{{ v | tojson }}{% endfor %}", "<arguments>{cut"),
        ("{% for k, v in f.arguments | dictsort %}<{{ k }}>{{ v }}{% endfor %}", "<arguments>{cut"),
        ("{% for k in f.arguments %}<{{ k }}>{{ f.arguments[k] }}{% endfor %}", "<arguments>{cut"),
        ("{% if f.arguments is mapping %}{{ f.arguments | tojson }}{% endif %}", '{"arguments": {cut}'),
        ("none", "none"),
    ],
)
def test_arguments_that_are_a_text_are_written_as_they_are(written, expected):
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set f = c.function %}W {% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source.replace("W", written), bos_token=None, eos_token=None)
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ("{cut", {"a": 1})]
    rendered = template.render([{"role": "assistant", "content": "", "tool_calls": calls[:1]}])
    assert rendered == f"{expected} "
    if "'<' +" not in written:
        whole = template.render([{"role": "assistant", "content": "", "tool_calls": calls}])
        assert whole == rendered + template.render([{"role": "assistant", "content": "", "tool_calls": calls[1:]}])
