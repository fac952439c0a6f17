"""Responses; blocking, async and streamed."""

import json

import openai
import pytest
from with_openai.shared import ASK, CALL, EMBEDDED, RESPONSES_TOOL, SCRIPTED, Sum, with_async


def test_response(client):
    done = client.responses.create(model=EMBEDDED, input=ASK[0]["content"], temperature=0)
    assert "Paris" in done.output_text
    assert done.status == "completed"
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_response_instructions_and_items(client):
    done = client.responses.create(model=EMBEDDED, input=ASK, instructions="Be brief.", temperature=0)
    assert done.instructions == "Be brief."
    assert done.output_text


def test_response_cut_short(client):
    done = client.responses.create(model=EMBEDDED, input="Count from 1 to 9.", max_output_tokens=1)
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_response_stream(client):
    events = list(client.responses.create(model=EMBEDDED, input=ASK[0]["content"], temperature=0, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text


def test_response_parse(scripted):
    done = scripted.responses.parse(model=SCRIPTED, input='SCRIPT say {"a": 1, "b": 2}', text_format=Sum)
    assert done.output_parsed == Sum(a=1, b=2)


def test_response_stream_parse(scripted):
    with scripted.responses.stream(model=SCRIPTED, input='SCRIPT say {"a": 1, "b": 2}', text_format=Sum) as events:
        for _ in events:
            pass
        assert events.get_final_response().output_parsed == Sum(a=1, b=2)


def test_response_tool_round(scripted):
    first = scripted.responses.create(model=SCRIPTED, input=CALL, tools=[RESPONSES_TOOL])
    call = first.output[0]
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"a": 2, "b": 3})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    done = scripted.responses.create(
        model=SCRIPTED, input=[result], previous_response_id=first.id, tools=[RESPONSES_TOOL]
    )
    assert done.output_text == "The sum is 5."


def test_response_history_by_hand(scripted):
    first = scripted.responses.create(model=SCRIPTED, input=CALL, tools=[RESPONSES_TOOL], store=False)
    items = [{"role": "user", "content": CALL}, *first.output]
    items.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "5"})
    done = scripted.responses.create(model=SCRIPTED, input=items, tools=[RESPONSES_TOOL], store=False)
    assert done.output_text == "The sum is 5."


def test_response_retrieve_and_delete(scripted):
    made = scripted.responses.create(model=SCRIPTED, input="SCRIPT say kept")
    assert scripted.responses.retrieve(made.id).output_text == "kept"
    scripted.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(made.id)


def test_response_input_items(scripted):
    made = scripted.responses.create(model=SCRIPTED, input="SCRIPT say kept")
    items = list(scripted.responses.input_items.list(made.id))
    assert items[0].content[0].text == "SCRIPT say kept"


def test_response_truncation_auto(scripted):
    assert scripted.responses.create(model=SCRIPTED, input="SCRIPT say ok", truncation="auto").output_text == "ok"


def test_async_response_stream():
    async def work(client):
        async with client.responses.stream(model=SCRIPTED, input="SCRIPT say streamed") as events:
            return (await events.get_final_response()).output_text

    assert with_async(work) == "streamed"
