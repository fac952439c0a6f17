"""Tools and forms."""

import json

import openai
import pytest
from with_openai.shared import ASK, CALL, EMBEDDED, SCRIPTED, TOOL, Colour, Sum, says


def test_tool_call(scripted):
    done = scripted.chat.completions.create(model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[TOOL])
    call = done.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    assert done.choices[0].finish_reason == "tool_calls"


def test_tool_round(scripted):
    messages = [{"role": "user", "content": CALL}]
    message = scripted.chat.completions.create(model=SCRIPTED, messages=messages, tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
    done = scripted.chat.completions.create(model=SCRIPTED, messages=[*messages, message, result], tools=[TOOL])
    assert done.choices[0].message.content == "The sum is 5."


def test_tool_choice_required(scripted):
    done = scripted.chat.completions.create(
        model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[TOOL], tool_choice="required"
    )
    assert done.choices[0].message.tool_calls


def test_tool_choice_named(scripted):
    choice = {"type": "function", "function": {"name": "add"}}
    done = scripted.chat.completions.create(
        model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[TOOL], tool_choice=choice
    )
    assert done.choices[0].message.tool_calls[0].function.name == "add"


def test_tool_choice_none(scripted):
    done = scripted.chat.completions.create(
        model=SCRIPTED, messages=says("say no call"), tools=[TOOL], tool_choice="none"
    )
    assert done.choices[0].message.tool_calls is None
    assert done.choices[0].message.content == "no call"


def test_tool_calls_parallel(scripted):
    script = 'call add {"a": 1, "b": 2} && call add {"a": 3, "b": 4}'
    done = scripted.chat.completions.create(model=SCRIPTED, messages=says(script), tools=[TOOL])
    calls = done.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["a"] for call in calls] == [1, 3]
    assert len({call.id for call in calls}) == 2


def test_tool_calls_not_parallel(scripted):
    done = scripted.chat.completions.create(
        model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[TOOL], parallel_tool_calls=False
    )
    assert len(done.choices[0].message.tool_calls) == 1


def test_tool_and_text(scripted):
    script = 'say Let me add. && call add {"a": 1, "b": 2}'
    message = scripted.chat.completions.create(model=SCRIPTED, messages=says(script), tools=[TOOL]).choices[0].message
    assert message.content.strip() == "Let me add."
    assert message.tool_calls


def test_tool_from_pydantic(scripted):
    tool = openai.pydantic_function_tool(Sum, name="add")
    done = scripted.chat.completions.parse(model=SCRIPTED, messages=[{"role": "user", "content": CALL}], tools=[tool])
    assert done.choices[0].message.tool_calls[0].function.parsed_arguments == Sum(a=2, b=3)


def test_tools_for_a_model_without_them(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=EMBEDDED, messages=ASK, tools=[TOOL])
    assert error.value.param == "tools"


# Forms.


def test_parse(client):
    done = client.chat.completions.parse(
        model=EMBEDDED, messages=ASK, response_format=Sum, temperature=0, max_tokens=200
    )
    assert isinstance(done.choices[0].message.parsed, Sum)


def test_parse_scripted(scripted):
    done = scripted.chat.completions.parse(
        model=SCRIPTED, messages=says('say {"name": "red", "shades": ["dark"]}'), response_format=Colour
    )
    assert done.choices[0].message.parsed == Colour(name="red", shades=["dark"])


def test_parse_with_tools_text(scripted):
    done = scripted.chat.completions.parse(
        model=SCRIPTED,
        messages=says('say {"name": "red", "shades": []}'),
        response_format=Colour,
        tools=[openai.pydantic_function_tool(Sum, name="add")],
    )
    assert done.choices[0].message.parsed.name == "red"


def test_parse_with_tools_call(scripted):
    done = scripted.chat.completions.parse(
        model=SCRIPTED,
        messages=[{"role": "user", "content": CALL}],
        response_format=Colour,
        tools=[openai.pydantic_function_tool(Sum, name="add")],
    )
    assert done.choices[0].message.parsed is None
    assert done.choices[0].message.tool_calls[0].function.parsed_arguments == Sum(a=2, b=3)


def test_parse_stream(scripted):
    with scripted.chat.completions.stream(
        model=SCRIPTED, messages=says('say {"a": 1, "b": 2}'), response_format=Sum
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == Sum(a=1, b=2)


def test_parse_stream_of_tools(scripted):
    with scripted.chat.completions.stream(
        model=SCRIPTED,
        messages=[{"role": "user", "content": CALL}],
        tools=[openai.pydantic_function_tool(Sum, name="add")],
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Sum(a=2, b=3)


def test_parse_cut_short(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=EMBEDDED, messages=ASK, response_format=Colour, max_tokens=2)


def test_json_object(client):
    done = client.chat.completions.create(
        model=EMBEDDED,
        messages=[{"role": "user", "content": 'Write {"name": "Ada"} as JSON.'}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=300,
    )
    if done.choices[0].finish_reason == "stop":  # what the model writes is its own choice, and so is its length
        assert isinstance(json.loads(done.choices[0].message.content), dict)
    assert done.choices[0].message.content.lstrip().startswith("{")


def test_json_schema(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    done = client.chat.completions.create(
        model=EMBEDDED,
        messages=ASK,
        response_format={"type": "json_schema", "json_schema": {"name": "ok", "schema": schema, "strict": True}},
        temperature=0,
    )
    assert isinstance(json.loads(done.choices[0].message.content)["ok"], bool)
