"""Pydantic AI: its three forms of output, tools, streams, retries; chat, Responses and Anthropic's interface."""

import asyncio
import os

import pydantic
import pytest
from pydantic_ai import Agent, ModelHTTPError, ModelRetry, NativeOutput, PromptedOutput, RunContext, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SAID = 'SCRIPT say {"total": 5, "words": "five"}'
CALL = 'SCRIPT call add {"a": 2, "b": 3} || say The sum is 5.'


class Answer(pydantic.BaseModel):
    """The result of a sum."""

    total: int
    words: str


def provider(kind):
    return OpenAIProvider(base_url=f"{os.environ[kind]}/v1", api_key="none")


def embedded():
    return OpenAIChatModel("tiny", provider=provider("EMBEDDED"), settings={"temperature": 0})


def scripted():
    return OpenAIChatModel("scripted", provider=provider("SCRIPTED"))


def responses():
    return OpenAIResponsesModel("scripted", provider=provider("SCRIPTED"))


def claude():
    return AnthropicModel("scripted", provider=AnthropicProvider(base_url=os.environ["SCRIPTED"], api_key="none"))


def adder(model, **options):
    agent = Agent(model, **options)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    return agent


def test_text():
    done = Agent(embedded(), instructions="Be brief.").run_sync("What is the capital of France?")
    assert done.output
    assert done.usage.output_tokens > 0


def test_history():
    agent = Agent(scripted())
    first = agent.run_sync("SCRIPT say one || say two")
    assert (first.output, agent.run_sync("go on", message_history=first.all_messages()).output) == ("one", "two")


def test_stream():
    async def work():
        async with Agent(scripted()).run_stream("SCRIPT say streamed text") as done:
            return [text async for text in done.stream_text(delta=True)]

    assert "".join(asyncio.run(work())) == "streamed text"


def test_tool():
    done = adder(scripted()).run_sync(CALL)
    assert (done.output, done.usage.tool_calls) == ("The sum is 5.", 1)


def test_tool_with_dependencies_and_a_retry():
    agent = Agent(scripted(), deps_type=int, retries=2)

    @agent.tool
    def look(context: RunContext[int], key: str) -> int:
        """Looks a key up."""
        if key != "a":
            raise ModelRetry("there is only a")
        return context.deps

    script = 'SCRIPT call look {"key": "b"} || call look {"key": "a"} || say It is 7.'
    assert agent.run_sync(script, deps=7).output == "It is 7."


def test_events_of_a_run():
    async def work():
        kinds = []
        async with adder(scripted()).iter(CALL) as run:
            async for node in run:
                kinds.append(type(node).__name__)
        return kinds, run.result.output

    kinds, output = asyncio.run(work())
    assert "CallToolsNode" in kinds
    assert output == "The sum is 5."


def test_native_output():
    assert Agent(scripted(), output_type=NativeOutput(Answer)).run_sync(SAID).output == Answer(total=5, words="five")


def test_native_output_of_the_embedded_model():
    agent = Agent(embedded(), output_type=NativeOutput(pydantic.create_model("Flag", ok=(bool, ...))))
    assert isinstance(agent.run_sync("What is the capital of France?").output.ok, bool)


def test_native_output_and_tools():
    script = 'SCRIPT call add {"a": 2, "b": 3} || say {"total": 5, "words": "five"}'
    agent = adder(scripted(), output_type=NativeOutput(Answer))
    assert agent.run_sync(script).output == Answer(total=5, words="five")


def test_tool_output():
    agent = Agent(scripted(), output_type=ToolOutput(Answer, name="answer"))
    assert agent.run_sync('SCRIPT call answer {"total": 5, "words": "five"}').output == Answer(total=5, words="five")


def test_output_type_alone():
    script = 'SCRIPT call add {"a": 2, "b": 3} || call final_result {"total": 5, "words": "five"}'
    assert adder(scripted(), output_type=Answer).run_sync(script).output == Answer(total=5, words="five")


def test_prompted_output():
    assert Agent(scripted(), output_type=PromptedOutput(Answer)).run_sync(SAID).output == Answer(total=5, words="five")


def test_stream_of_an_output():
    async def work():
        async with Agent(scripted(), output_type=NativeOutput(Answer)).run_stream(SAID) as done:
            return [part async for part in done.stream_output(debounce_by=None)]

    assert asyncio.run(work())[-1] == Answer(total=5, words="five")


def test_responses():
    assert adder(responses()).run_sync(CALL).output == "The sum is 5."


def test_responses_native_output():
    assert Agent(responses(), output_type=NativeOutput(Answer)).run_sync(SAID).output == Answer(total=5, words="five")


def test_responses_stream():
    async def work():
        async with Agent(responses()).run_stream("SCRIPT say streamed") as done:
            return await done.get_output()

    assert asyncio.run(work()) == "streamed"


def test_anthropic():
    assert adder(claude()).run_sync(CALL).output == "The sum is 5."


def test_anthropic_output():
    script = 'SCRIPT call final_result {"total": 5, "words": "five"}'
    assert Agent(claude(), output_type=Answer).run_sync(script).output == Answer(total=5, words="five")


def test_error():
    with pytest.raises(ModelHTTPError):
        Agent(scripted(), model_settings={"temperature": -1}).run_sync("hi")
