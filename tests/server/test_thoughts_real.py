"""A model that thinks behind a whole server: the real engine, compiler and SDK."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

import jsg as sgl
from tests.engine.thinking_model import THOUGHT, write_model
from tests.server.running import RunningServer, serving

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content and keep_thoughts %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)
HI: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[RunningServer]:
    directory = write_model(tmp_path_factory.mktemp("thinking"), "special", TEMPLATE)
    with serving(directory, compile_cache_dir) as made:
        yield made


@pytest.fixture(scope="module")
def client(real: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.http.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def thoughts_of(message: Any) -> str:
    return message.model_extra["reasoning_content"] or ""


@pytest.mark.slow
class TestThoughts:
    @pytest.mark.parametrize("jump", ["draft", "retokenize", "off"])
    @pytest.mark.parametrize("budget", [-1, 0, 7])
    def test_a_form_begins_behind_thoughts(self, client, budget, jump):
        extra = {"thinking_budget": budget, "jump_forward": jump}
        answer = client.chat.completions.create(
            model="default", messages=HI, response_format=FORM, temperature=0, max_tokens=150, extra_body=extra
        )
        [choice] = answer.choices
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        expected = THOUGHT if budget < 0 else THOUGHT[:budget]
        assert (thoughts_of(choice.message), choice.finish_reason) == (expected, "stop")
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(expected.encode())
        with client.chat.completions.stream(
            model="default", messages=HI, response_format=FORM, temperature=0, max_tokens=150, extra_body=extra
        ) as events:
            deltas = [event.chunk.choices[0].delta for event in events if event.type == "chunk"]
            assert events.get_final_completion().choices[0].message.content == choice.message.content
        assert "".join(thoughts_of(delta) for delta in deltas) == expected

    @pytest.mark.parametrize("keep", [True, False])
    def test_the_next_turn_finds_what_the_template_keeps(self, real, client, keep):
        """Its prefix is cached up to where the template writes something else than the model wrote."""
        real.reset()
        extra = {"chat_template_kwargs": {"keep_thoughts": keep}}
        options: Any = {"model": "default", "temperature": 0, "max_tokens": 60, "stop": ["9"], "extra_body": extra}
        first = client.chat.completions.create(messages=HI, **options)
        message = first.choices[0].message
        said = {"role": "assistant", "content": message.content, "reasoning_content": thoughts_of(message)}
        second = client.chat.completions.create(messages=[*HI, said, *HI], **options)
        cached = second.usage.prompt_tokens_details.cached_tokens
        before = first.usage.prompt_tokens
        if keep:
            assert cached >= before + len(THOUGHT.encode())
        else:
            assert before - len("<think>\n") <= cached < before

    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_a_program_gets_them_apart(self, real, is_compiled):
        """In the language too a grammar governs what follows the thoughts."""

        @sgl.function
        def program(s):
            s += "user: hi\nassistant: <think>\n"
            s += sgl.separate_reasoning(
                sgl.gen("form", json_schema=json.dumps(SCHEMA), max_tokens=150), "qwen3-thinking"
            )
            s += "\nassistant: <think>\n"
            s += sgl.separate_reasoning(sgl.gen("number", dtype=int, max_tokens=70), "qwen3-thinking")

        with sgl.RuntimeEndpoint(str(real.http.base_url)) as backend:
            made = program.compile() if is_compiled else program
            state = made.run(backend=backend, temperature=0.0)
            assert state["form_reasoning_content"] == state["number_reasoning_content"] == THOUGHT
            jsonschema.validate(json.loads(state["form"]), SCHEMA)
            assert re.fullmatch(r"[-+]?\d+\s*", state["number"])

    def test_a_stored_response_goes_on_as_the_conversation_would(self, real, client):
        """The template drops its thoughts, and the next prompt has the tokens of the answer alone."""
        real.reset()
        options: Any = {"model": "default", "temperature": 0, "max_output_tokens": 60}
        first = client.responses.create(input="hi", **options)
        thoughts, message = first.output
        assert (thoughts.content[0].text, message.content[0].text) == (THOUGHT, first.output_text)
        second = client.responses.create(input="and?", previous_response_id=first.id, **options)
        before = first.usage.input_tokens
        assert before - len("<think>\n") <= second.usage.input_tokens_details.cached_tokens < before
        said: list[Any] = [
            *HI,
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "and?"},
        ]
        plain = client.chat.completions.create(model="default", messages=said, max_tokens=1).usage
        assert plain.prompt_tokens == second.usage.input_tokens
        assert plain.prompt_tokens_details.cached_tokens == plain.prompt_tokens - 1
