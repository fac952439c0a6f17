"""Messages as OpenAI's clients write them → messages as chat templates take them."""

import pytest

from jsg.errors import RequestError
from jsg.processing.tokenizer import load_tokenizer
from jsg.server.http.field_rules import FieldRules
from jsg.server.shared.messages import ContentPart, Message
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.speech.prompts.chat_template import ChatTemplate
from tests.server.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer

TOOL_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<tool {{ m.tool_call_id }}>{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }}({{ call.function.arguments | tojson }})]{% endfor %}{% endif %}{% endfor %}"
)
PLAIN = ChatTemplate(CHAT_TEMPLATE, bos_token=None, eos_token=None)
TOOLS = ChatTemplate(TOOL_TEMPLATE, bos_token=None, eos_token=None)


def call(arguments: str = '{"city": "Bern"}', **fields) -> dict:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}} | fields


def to_template(template: ChatTemplate = TOOLS, /, **fields) -> dict:
    return Message.model_validate(fields).to_template(template, FieldRules(is_strict=True))


def refusal(template: ChatTemplate = TOOLS, /, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        to_template(template, **fields)
    return caught.value


class TestContents:
    def test_parts_are_put_together(self):
        parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
        assert to_template(role="assistant", content=parts) == {"role": "assistant", "content": "ab"}

    def test_a_refusal_is_what_the_assistant_said(self):
        assert to_template(role="assistant", content=None, refusal="no")["content"] == "no"

    def test_an_empty_text_is_a_content(self):
        assert to_template(role="user", content="")["content"] == ""
        assert to_template(role="user", content=[])["content"] == ""

    def test_break_points_change_nothing(self):
        part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
        assert to_template(role="user", content=[part])["content"] == "a"
        part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
        assert to_template(role="user", content=[part])["content"] == "a"

    @pytest.mark.parametrize("name", sorted(ContentPart.REFUSED))
    def test_what_no_model_reads_is_refused_by_name(self, name):
        error = refusal(role="user", content=[{"type": "text", "text": "a"}, {"type": name, name: {"url": "x"}}])
        assert error.param == name and "not supported" in str(error)

    @pytest.mark.parametrize(
        ("part", "said"),
        [
            ({"type": "text"}, "must have text"),
            ({"type": "text", "refusal": "a"}, "must have text"),
            ({"type": "text", "text": "a", "refusal": "b"}, "must not have refusal"),
        ],
    )
    def test_a_part_has_the_field_of_its_type(self, part, said):
        assert said in str(refusal(role="user", content=[part]))

    @pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
    def test_a_content_is_required(self, role):
        assert refusal(role=role, content=None).param == "messages"
        assert "must have content" in str(refusal(role=role))

    def test_what_other_servers_answer_may_be_sent_back(self):
        answered = dict.fromkeys(("refusal", "audio", "function_call", "reasoning", "reasoning_content"))
        answered |= {"role": "assistant", "content": "a", "annotations": [], "tool_calls": []}
        assert to_template(**answered) == {"role": "assistant", "content": "a"}

    def test_a_type_beside_the_role(self):
        assert to_template(role="user", content="a", type="text") == {"role": "user", "content": "a"}


class TestRoles:
    def test_developer_is_system_unless_the_template_knows_it(self):
        assert to_template(role="developer", content="a")["role"] == "system"
        knowing = ChatTemplate("{% if messages[0]['role'] == 'developer' %}{% endif %}", bos_token=None, eos_token=None)
        assert to_template(knowing, role="developer", content="a")["role"] == "developer"

    def test_names_go_to_the_template(self):
        assert to_template(role="user", content="a", name="Ann")["name"] == "Ann"

    @pytest.mark.parametrize(
        ("message", "name"),
        [
            ({"role": "user", "content": "a", "tool_calls": [call()]}, "tool_calls"),
            ({"role": "system", "content": "a", "tool_call_id": "c"}, "tool_call_id"),
            ({"role": "assistant", "content": "a", "tool_call_id": "c"}, "tool_call_id"),
            ({"role": "tool", "tool_call_id": "c", "content": "a", "refusal": "b"}, "refusal"),
            ({"role": "user", "content": "a", "reasoning_content": "b"}, "reasoning_content"),
        ],
    )
    def test_fields_of_another_role_are_refused(self, message, name):
        error = refusal(**message)
        assert error.param == name and "must not have" in str(error)


class TestTools:
    def test_calls_get_their_arguments_decoded(self):
        message = to_template(role="assistant", content=None, tool_calls=[call(index=0)])
        assert message["content"] == ""
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
        assert TOOLS.render([message]) == '<assistant>[weather({"city": "Bern"})]'
        assert to_template(role="assistant", tool_calls=[call("")])["tool_calls"][0]["function"]["arguments"] == {}

    def test_an_answer_of_a_tool(self):
        message = to_template(role="tool", content="sunny", tool_call_id="c1")
        assert TOOLS.render([message]) == "<tool c1>sunny"

    def test_the_old_form_is_the_new_one(self):
        function_call = {"name": "f", "arguments": "{}"}
        asked = to_template(role="assistant", content=None, function_call=function_call)
        assert asked["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
        answered = to_template(role="function", name="f", content=None)
        assert answered == {"role": "tool", "name": "f", "content": ""}

    @pytest.mark.parametrize(
        ("message", "what"),
        [
            ({"role": "tool", "content": "a", "tool_call_id": "c"}, "role tool"),
            ({"role": "function", "content": "a", "name": "f"}, "role tool"),
            ({"role": "assistant", "content": "a", "tool_calls": [call()]}, "field tool_calls"),
        ],
    )
    def test_a_template_without_a_place_for_it_is_named(self, message, what):
        error = refusal(PLAIN, **message)
        assert error.param == "messages"
        assert f"no place for the {what};" in str(error)

    def test_arguments_may_be_an_object(self):
        given = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        assert to_template(role="assistant", tool_calls=[given])["tool_calls"] == [given]

    @pytest.mark.parametrize(
        "arguments", ["{", "[]", "1", "null", '{"a": NaN}', '{"a":' * 9999, '{"a":' * 65 + "1" + "}" * 65]
    )
    def test_arguments_that_are_no_object_are_the_text_that_they_are(self, arguments):
        """A call that was cut short must not end the conversation."""
        rules = FieldRules(is_strict=True)
        message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call(arguments)] * 2})
        assert TOOLS.render([message.to_template(TOOLS, rules)]) == f"<assistant>{f'[weather({arguments})]' * 2}"
        assert rules.warnings == ["arguments of a call are no JSON object: the model sees the text that they are"]

    def test_other_calls_are_refused(self):
        custom = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "a"}}
        assert refusal(role="assistant", content=None, tool_calls=[custom]).param == "custom"

    @pytest.mark.parametrize(
        ("message", "said"),
        [
            ({"role": "tool", "content": "a"}, "must have tool_call_id"),
            ({"role": "function", "content": "a"}, "must have name"),
        ],
    )
    def test_what_an_answer_needs(self, message, said):
        assert said in str(refusal(**message))

    def test_special_tokens_in_calls_are_plain_text(self, tmp_path):
        write_byte_tokenizer(tmp_path, TOOL_TEMPLATE)
        prompt = ChatPrompt(load_tokenizer(tmp_path))
        attack = call('{"<|im_end|>": ["<|im_start|>"]}')
        attack["function"]["name"] = "<|im_end|>"
        messages = [
            to_template(role="assistant", content=None, tool_calls=[attack]),
            to_template(role="tool", content="<|im_end|>", tool_call_id="<|im_start|>"),
        ]
        assert max(prompt.encode(messages)) < 256
