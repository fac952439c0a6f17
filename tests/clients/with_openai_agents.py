"""OpenAI's agents: both models, tools, types of output, handoffs, guardrails, sessions, streams."""

import asyncio
import os

import pydantic
import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    input_guardrail,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
CALL = 'SCRIPT call add {"a": 2, "b": 3} || say The sum is 5.'
SAID = 'SCRIPT say {"total": 5, "words": "five"}'


class Answer(pydantic.BaseModel):
    """The result of a sum."""

    total: int
    words: str


FIVE = Answer(total=5, words="five")


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def chat(kind="SCRIPTED", name="scripted"):
    return OpenAIChatCompletionsModel(name, AsyncOpenAI(base_url=f"{os.environ[kind]}/v1", api_key="none"))


def responses(kind="SCRIPTED", name="scripted"):
    return OpenAIResponsesModel(name, AsyncOpenAI(base_url=f"{os.environ[kind]}/v1", api_key="none"))


def run(agent, script, **options):
    return Runner.run_sync(agent, script, **options).final_output


def streamed(agent, script):
    """The kinds of events, and the result."""

    async def work():
        result = Runner.run_streamed(agent, script)
        kinds = [event.type async for event in result.stream_events()]
        return kinds, result.final_output

    return asyncio.run(work())


def handing_off(model):
    other = Agent(name="Other", instructions="You add.", handoff_description="Adds.", model=model, tools=[add])
    return Agent(name="First", instructions="You hand over.", model=model, handoffs=[other])


HANDOFF = 'SCRIPT call transfer_to_other {} || call add {"a": 2, "b": 3} || say The sum is 5.'


def test_chat():
    settings = ModelSettings(temperature=0)
    agent = Agent(name="Capital", model=chat("EMBEDDED", "tiny"), model_settings=settings)
    assert "Paris" in run(agent, "What is the capital of France?")


def test_responses():
    settings = ModelSettings(temperature=0)
    agent = Agent(name="Capital", model=responses("EMBEDDED", "tiny"), model_settings=settings)
    assert "Paris" in run(agent, "What is the capital of France?")


def test_chat_tools():
    assert run(Agent(name="Adder", instructions="You add.", model=chat(), tools=[add]), CALL) == "The sum is 5."


def test_responses_tools():
    assert run(Agent(name="Adder", instructions="You add.", model=responses(), tools=[add]), CALL) == "The sum is 5."


def test_chat_tools_in_parallel():
    script = 'SCRIPT call add {"a": 1, "b": 2} && call add {"a": 3, "b": 4} || say 3 and 7'
    assert run(Agent(name="Adder", model=chat(), tools=[add]), script) == "3 and 7"


def test_chat_output_type():
    assert run(Agent(name="Adder", model=chat(), output_type=Answer), SAID) == FIVE


def test_responses_output_type():
    assert run(Agent(name="Adder", model=responses(), output_type=Answer), SAID) == FIVE


def test_output_type_and_tools():
    script = 'SCRIPT call add {"a": 2, "b": 3} || say {"total": 5, "words": "five"}'
    assert run(Agent(name="Adder", model=chat(), tools=[add], output_type=Answer), script) == FIVE
    assert run(Agent(name="Adder", model=responses(), tools=[add], output_type=Answer), script) == FIVE


def test_chat_handoff():
    assert run(handing_off(chat()), HANDOFF) == "The sum is 5."


def test_responses_handoff():
    assert run(handing_off(responses()), HANDOFF) == "The sum is 5."


def test_agent_as_a_tool():
    inner = Agent(name="Inner", model=chat())
    outer = Agent(name="Outer", model=chat(), tools=[inner.as_tool("ask", "Asks.")])
    assert run(outer, 'SCRIPT call ask {"input": "hello"} || say It said ok.') == "It said ok."


def test_chat_stream():
    kinds, output = streamed(Agent(name="Adder", model=chat(), tools=[add]), CALL)
    assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
    assert output == "The sum is 5."


def test_responses_stream():
    kinds, output = streamed(Agent(name="Adder", model=responses(), tools=[add]), CALL)
    assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
    assert output == "The sum is 5."


def test_forced_tool():
    settings = ModelSettings(tool_choice="add", parallel_tool_calls=False)
    for model in (chat(), responses()):
        assert run(Agent(name="Adder", model=model, tools=[add], model_settings=settings), CALL) == "The sum is 5."


def test_session():
    session, agent = SQLiteSession("a"), Agent(name="Counter", model=responses())
    assert run(agent, "SCRIPT say one || say two", session=session) == "one"
    assert run(agent, "go on", session=session) == "two"


def test_previous_response():
    agent = Agent(name="Counter", model=responses())
    first = Runner.run_sync(agent, "SCRIPT say one || say two")
    assert run(agent, "go on", previous_response_id=first.last_response_id) == "two"


def test_truncation():
    assert run(Agent(name="A", model=responses(), model_settings=ModelSettings(truncation="auto")), "hi") == "ok"


def test_guardrail():
    @input_guardrail
    async def never(context, agent, given):
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    with pytest.raises(InputGuardrailTripwireTriggered):
        run(Agent(name="A", model=chat(), input_guardrails=[never]), "hi")


def test_most_turns():
    script = 'SCRIPT call add {"a": 2, "b": 3}'
    with pytest.raises(MaxTurnsExceeded):
        run(Agent(name="Adder", model=chat(), tools=[add]), script, max_turns=2)


def test_usage():
    done = Runner.run_sync(Agent(name="Adder", model=chat(), tools=[add]), CALL)
    assert done.context_wrapper.usage.requests == 2
    assert done.context_wrapper.usage.output_tokens > 0
