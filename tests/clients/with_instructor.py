"""Instructor: each mode that OpenAI's and Anthropic's packages allow, lists, partial answers, retries, async."""

import asyncio
import os
from collections.abc import Iterable

import anthropic
import instructor
import openai
import pydantic
import pytest
from instructor import Mode

SAID = 'SCRIPT say {"total": 5, "words": "five"}'
CALL = 'SCRIPT call Answer {"total": 5, "words": "five"}'


class Answer(pydantic.BaseModel):
    """The result of a sum."""

    total: int
    words: str


FIVE = {"total": 5, "words": "five"}


def of_openai(mode, kind="SCRIPTED"):
    client = openai.OpenAI(base_url=f"{os.environ[kind]}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def of_anthropic(mode):
    client = anthropic.Anthropic(base_url=os.environ["SCRIPTED"], api_key="none", max_retries=0)
    return instructor.from_anthropic(client, mode=mode)


def ask(client, script, response_model=Answer, **options):
    messages = [{"role": "user", "content": script}]
    options = {"model": "scripted", "max_retries": 0, **options}
    return client.chat.completions.create(messages=messages, response_model=response_model, **options)


def test_tools():
    assert dict(ask(of_openai(Mode.TOOLS), CALL)) == FIVE


def test_tools_strict():
    assert dict(ask(of_openai(Mode.TOOLS_STRICT), CALL)) == FIVE


def test_json():
    assert dict(ask(of_openai(Mode.JSON), SAID)) == FIVE


def test_markdown_json():
    script = 'SCRIPT say ```json && say {"total": 5, "words": "five"} && say ```'
    assert dict(ask(of_openai(Mode.MD_JSON), script)) == FIVE


def test_json_schema():
    assert dict(ask(of_openai(Mode.JSON_SCHEMA), SAID)) == FIVE


def test_json_schema_of_the_embedded_model():
    forbid = pydantic.ConfigDict(extra="forbid")  # otherwise the toy model may add fields until it has no room left
    flag = pydantic.create_model("Flag", ok=(bool, ...), __config__=forbid)
    client = of_openai(Mode.JSON_SCHEMA, "EMBEDDED")
    assert isinstance(ask(client, "Is it so?", flag, model="tiny", temperature=0).ok, bool)


def test_parallel_tools():
    script = f'{CALL} && call Answer {{"total": 6, "words": "six"}}'
    answers = list(ask(of_openai(Mode.PARALLEL_TOOLS), script, Iterable[Answer]))
    assert [answer.total for answer in answers] == [5, 6]


def test_responses_tools():
    client = of_openai(Mode.RESPONSES_TOOLS)
    done = client.responses.create(model="scripted", input=CALL, response_model=Answer, max_retries=0)
    assert dict(done) == FIVE


def test_anthropic_tools():
    assert dict(ask(of_anthropic(Mode.ANTHROPIC_TOOLS), CALL, max_tokens=500)) == FIVE


def test_anthropic_json():
    assert dict(ask(of_anthropic(Mode.ANTHROPIC_JSON), SAID, max_tokens=500)) == FIVE


def test_list_of_answers():
    script = 'SCRIPT call IterableAnswer {"tasks": [{"total": 1, "words": "one"}, {"total": 2, "words": "two"}]}'
    done = of_openai(Mode.TOOLS).chat.completions.create_iterable(
        model="scripted", messages=[{"role": "user", "content": script}], response_model=Answer, max_retries=0
    )
    assert [answer.total for answer in done] == [1, 2]


def test_partial():
    done = of_openai(Mode.JSON_SCHEMA).chat.completions.create_partial(
        model="scripted", messages=[{"role": "user", "content": SAID}], response_model=Answer, max_retries=0
    )
    parts = list(done)
    assert len(parts) > 1
    assert (parts[-1].total, parts[-1].words) == (5, "five")


def test_retry_after_a_failed_check():
    class Small(pydantic.BaseModel):
        """A small number."""

        number: int

        @pydantic.field_validator("number")
        @classmethod
        def _is_small(cls, number: int) -> int:
            if number > 10:
                raise ValueError("at most 10")
            return number

    script = 'SCRIPT call Small {"number": 99} || call Small {"number": 9}'
    assert ask(of_openai(Mode.TOOLS), script, Small, max_retries=2).number == 9


def test_with_completion():
    answer, completion = of_openai(Mode.TOOLS).chat.completions.create_with_completion(
        model="scripted", messages=[{"role": "user", "content": CALL}], response_model=Answer, max_retries=0
    )
    assert dict(answer) == FIVE
    assert completion.usage.completion_tokens > 0


def test_async():
    async def work():
        client = openai.AsyncOpenAI(base_url=f"{os.environ['SCRIPTED']}/v1", api_key="none", max_retries=0)
        return await asyncio.gather(*(ask(instructor.from_openai(client, mode=Mode.TOOLS), CALL) for _ in range(4)))

    assert list(map(dict, asyncio.run(work()))) == [FIVE] * 4


def test_error():
    with pytest.raises(Exception, match="temperature"):
        ask(of_openai(Mode.TOOLS), CALL, temperature=-1)
