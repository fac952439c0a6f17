"""LlamaIndex: completions, chats, streams, structured answers, tools, an agent."""

import asyncio
import os

import pydantic
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

ASK = "What is the capital of France?"
CALL = 'SCRIPT call add {"a": 2, "b": 3} || say The sum is 5.'


class Answer(pydantic.BaseModel):
    """The result of a sum."""

    total: int
    words: str


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)


def model(kind="SCRIPTED", **options):
    name = {"SCRIPTED": "scripted", "EMBEDDED": "tiny"}[kind]
    options = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 300, **options}
    return OpenAILike(
        model=name, api_base=f"{os.environ[kind]}/v1", api_key="none", temperature=0, max_retries=0, **options
    )


def test_complete():
    assert "Paris" in model("EMBEDDED").complete(ASK).text


def test_complete_without_a_chat():
    assert "Paris" in model("EMBEDDED", is_chat_model=False, max_tokens=8).complete("The capital of France is").text


def test_chat():
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=ASK)]
    assert model("EMBEDDED").chat(messages).message.content


def test_stream_chat():
    parts = list(model().stream_chat([ChatMessage(role="user", content="SCRIPT say streamed")]))
    assert "".join(part.delta for part in parts) == "streamed"


def test_stream_complete():
    assert list(model().stream_complete("SCRIPT say streamed"))[-1].text == "streamed"


def test_async():
    async def work():
        many = [model().achat([ChatMessage(role="user", content=f"SCRIPT say {i}")]) for i in range(4)]
        return [done.message.content for done in await asyncio.gather(*many)]

    assert asyncio.run(work()) == [str(i) for i in range(4)]


def test_tools():
    done = model().chat_with_tools([ADD], user_msg=CALL)
    calls = model().get_tool_calls_from_response(done)
    assert [(call.tool_name, call.tool_kwargs) for call in calls] == [("add", {"a": 2, "b": 3})]


def test_predict_and_call():
    assert model().predict_and_call([ADD], user_msg=CALL).response == "5"


def test_structured():
    script = 'SCRIPT call Answer {"total": 5, "words": "five"}'
    done = model().as_structured_llm(Answer).complete(script)
    assert done.raw == Answer(total=5, words="five")


def test_structured_by_a_schema():
    llm = model(should_use_structured_outputs=True)
    prompt = PromptTemplate("{script}")
    done = llm.structured_predict(Answer, prompt, script='SCRIPT say {"total": 5, "words": "five"}')
    assert done == Answer(total=5, words="five")


def test_program():
    program = FunctionCallingProgram.from_defaults(output_cls=Answer, prompt_template_str="{script}", llm=model())
    assert program(script='SCRIPT call Answer {"total": 5, "words": "five"}') == Answer(total=5, words="five")


def test_agent():
    async def work():
        return str(await FunctionAgent(tools=[add], llm=model(), system_prompt="You add.").run(CALL))

    assert asyncio.run(work()) == "The sum is 5."
