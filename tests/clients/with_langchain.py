"""LangChain: chat models of both interfaces, structured output in every method, tools, agents, streams, callbacks."""

import asyncio
import os

import pydantic
import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from langchain_openai.decisions import Choice, Level, OpenAIDecisions, Predicate, Score

ASK = "What is the capital of France?"
CALL = 'SCRIPT call add {"a": 2, "b": 3} || say The sum is 5.'
AN_ANSWER = 'SCRIPT call add {"a": 2, "b": 3} || say {"total": 5, "words": "five"}'
SAID = 'SCRIPT say {"total": 5, "words": "five"}'


class Answer(pydantic.BaseModel):
    """The result of a sum."""

    total: int
    words: str = pydantic.Field(description="The total in words.")


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def embedded(**options):
    url = f"{os.environ['EMBEDDED']}/v1"
    return ChatOpenAI(base_url=url, api_key="none", model="tiny", temperature=0, max_retries=0, **options)


def scripted(**options):
    url = f"{os.environ['SCRIPTED']}/v1"
    return ChatOpenAI(base_url=url, api_key="none", model="scripted", max_retries=0, **options)


def claude(kind="SCRIPTED", model="scripted", **options):
    url = os.environ[kind]
    return ChatAnthropic(base_url=url, api_key="none", model=model, max_tokens=500, max_retries=0, **options)


# ChatOpenAI.


def test_invoke():
    done = embedded().invoke(ASK)
    assert "Paris" in done.content
    assert done.usage_metadata["output_tokens"] > 0
    assert done.response_metadata["finish_reason"] == "stop"


def test_messages():
    messages = [SystemMessage("Be brief."), HumanMessage(ASK), AIMessage("Paris."), HumanMessage("Hello")]
    assert embedded().invoke(messages).content


def test_stream_with_usage():
    whole = None
    for chunk in embedded(stream_usage=True).stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert "Paris" in whole.content
    assert whole.usage_metadata["total_tokens"] > 0


def test_batch():
    done = scripted().batch([f"SCRIPT say {i}" for i in range(5)])
    assert [each.content for each in done] == [str(i) for i in range(5)]


def test_abatch_and_astream():
    async def work():
        many = await scripted().abatch([f"SCRIPT say {i}" for i in range(5)])
        streamed = [chunk.content async for chunk in scripted().astream("SCRIPT say streamed")]
        return [each.content for each in many], "".join(streamed)

    assert asyncio.run(work()) == ([str(i) for i in range(5)], "streamed")


def test_chain():
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "What is the capital of {country}?")])
    assert (prompt | embedded() | StrOutputParser()).invoke({"country": "France"})


def test_stop_and_logprobs():
    done = scripted(logprobs=True, top_logprobs=2).invoke("SCRIPT say one, two", stop=[", two"])
    assert done.content == "one"
    assert done.response_metadata["logprobs"]["content"]


def test_completions_model():
    url = f"{os.environ['EMBEDDED']}/v1"
    model = OpenAI(base_url=url, api_key="none", model="tiny", temperature=0, max_tokens=8)
    assert "Paris" in model.invoke("The capital of France is")


def test_usage_callback():
    callback = UsageMetadataCallbackHandler()
    embedded().invoke(ASK, config={"callbacks": [callback]})
    assert callback.usage_metadata["tiny"]["output_tokens"] > 0


def test_bind_tools():
    done = scripted().bind_tools([add]).invoke(CALL)
    assert [(call["name"], call["args"]) for call in done.tool_calls] == [("add", {"a": 2, "b": 3})]


def test_bind_tools_that_are_forced():
    for choice in ("any", "add", "required"):
        assert scripted().bind_tools([add], tool_choice=choice).invoke(CALL).tool_calls
    assert scripted().bind_tools([add], strict=True, parallel_tool_calls=False).invoke(CALL).tool_calls


def test_tool_round():
    model, messages = scripted().bind_tools([add]), [HumanMessage(CALL)]
    messages.append(model.invoke(messages))
    call = messages[-1].tool_calls[0]
    messages.append(ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]))
    assert model.invoke(messages).content == "The sum is 5."


def test_tool_stream():
    whole = None
    for chunk in scripted().bind_tools([add]).stream(CALL):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == {"a": 2, "b": 3}


def test_structured_json_schema():
    assert scripted().with_structured_output(Answer, method="json_schema").invoke(SAID) == Answer(total=5, words="five")


def test_structured_json_schema_of_the_embedded_model():
    done = embedded(max_tokens=300).with_structured_output(Answer, method="json_schema", include_raw=True).invoke(ASK)
    assert done["raw"].content.lstrip().startswith("{")


def test_structured_function_calling():
    script = 'SCRIPT call Answer {"total": 5, "words": "five"}'
    model = scripted().with_structured_output(Answer, method="function_calling")
    assert model.invoke(script) == Answer(total=5, words="five")


def test_structured_json_mode():
    model = scripted().with_structured_output(Answer, method="json_mode")
    assert model.invoke(f"Answer in JSON. {SAID}") == Answer(total=5, words="five")


def test_structured_by_a_schema():
    schema = {"title": "answer", **Answer.model_json_schema()}
    assert scripted().with_structured_output(schema).invoke(SAID) == {"total": 5, "words": "five"}


def test_responses():
    done = scripted(use_responses_api=True).invoke("SCRIPT say from responses")
    assert done.text == "from responses"


def test_responses_tools_and_history():
    model, messages = scripted(use_responses_api=True).bind_tools([add]), [HumanMessage(CALL)]
    messages.append(model.invoke(messages))
    call = messages[-1].tool_calls[0]
    messages.append(ToolMessage("5", tool_call_id=call["id"]))
    assert model.invoke(messages).text == "The sum is 5."


def test_responses_structured():
    model = scripted(use_responses_api=True).with_structured_output(Answer)
    assert model.invoke(SAID) == Answer(total=5, words="five")


# OpenAIDecisions.


@pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
def test_decisions():
    questions = {
        "paid": Predicate(instructions="The customer paid twice."),
        "team": Choice(instructions="Which team?", choices={"billing": "Payments.", "technical support": None}),
        "typed": Choice(instructions="Is it so?", choices={"yes": None, True: "It is.", False: None}),
        "anger": Score(instructions="How angry?", levels=["calm", Level(label="furious", description="Shouts.")]),
    }
    model = OpenAIDecisions(base_url=f"{os.environ['EMBEDDED']}/v1", api_key="none", model="tiny", max_retries=0)
    states = [
        "My card was charged twice.",
        [HumanMessage("My card was charged twice."), HumanMessage([{"type": "text", "text": "Do something!"}])],
        [SystemMessage("Be brief."), HumanMessage(ASK), AIMessage("Paris.")],
        {"ticket": {"text": "My card was charged twice.", "order": 17}},
    ]
    done = [model.invoke({"input": state, "questions": questions}) for state in states]
    done.append(asyncio.run(model.ainvoke({"input": states[0], "questions": questions})))
    for answer in done:
        assert list(answer.answers) == list(questions)
        assert 0 < answer.predicates["paid"].probability < 1
        assert answer.choices["team"].choice in ("billing", "technical support")
        assert set(answer.choices["typed"].probabilities) == {"yes", True, False}
        assert sum(answer.choices["team"].probabilities.values()) == pytest.approx(1)
        assert 0 <= answer.scores["anger"].score <= 1
        assert answer.scores["anger"].legend == {0: "calm", 1: "furious"}
        assert answer.usage.input_tokens > 0
        assert answer.request_id
    with pytest.raises(Exception, match="questions"):
        model.invoke({"input": "a", "questions": {"x": Choice(instructions="?", choices={"only": None})}})


def test_error():
    with pytest.raises(Exception, match="temperature"):
        scripted(temperature=-1).invoke("hi")


# Agents.


def test_agent():
    done = create_agent(scripted(), [add]).invoke({"messages": [{"role": "user", "content": CALL}]})
    assert [message.type for message in done["messages"]] == ["human", "ai", "tool", "ai"]
    assert done["messages"][-1].content == "The sum is 5."


def test_agent_stream():
    agent = create_agent(scripted(), [add], system_prompt="You add.")
    steps = list(agent.stream({"messages": [{"role": "user", "content": CALL}]}, stream_mode="messages"))
    text = "".join(chunk.text for chunk, _ in steps if chunk.type == "AIMessageChunk")
    assert text.endswith("The sum is 5.")


def test_agent_with_a_tool_for_the_answer():
    script = 'SCRIPT call add {"a": 2, "b": 3} || call Answer {"total": 5, "words": "five"}'
    agent = create_agent(scripted(), [add], response_format=ToolStrategy(Answer))
    done = agent.invoke({"messages": [{"role": "user", "content": script}]})
    assert done["structured_response"] == Answer(total=5, words="five")


def test_agent_with_a_form_of_the_answer():
    agent = create_agent(scripted(), [add], response_format=ProviderStrategy(Answer))
    done = agent.invoke({"messages": [{"role": "user", "content": AN_ANSWER}]})
    assert done["structured_response"] == Answer(total=5, words="five")


# ChatAnthropic.


def test_anthropic_invoke_and_stream():
    assert "Paris" in claude("EMBEDDED", "tiny").invoke(ASK).content
    assert "".join(chunk.text for chunk in claude().stream("SCRIPT say streamed")) == "streamed"


def test_anthropic_tools():
    model, messages = claude().bind_tools([add]), [SystemMessage("You add."), HumanMessage(CALL)]
    messages.append(model.invoke(messages))
    call = messages[-1].tool_calls[0]
    assert call["args"] == {"a": 2, "b": 3}
    messages.append(ToolMessage("5", tool_call_id=call["id"]))
    assert model.invoke(messages).text == "The sum is 5."


def test_anthropic_structured():
    model = claude().with_structured_output(Answer)
    assert model.invoke('SCRIPT call Answer {"total": 5, "words": "five"}') == Answer(total=5, words="five")


def test_anthropic_structured_json_schema():
    assert claude().with_structured_output(Answer, method="json_schema").invoke(SAID) == Answer(total=5, words="five")


def test_anthropic_thinking():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    model = ChatAnthropic(
        base_url=os.environ["SCRIPTED"], api_key="none", model="scripted", max_tokens=2000, thinking=thinking
    )
    assert model.invoke("SCRIPT say ok").text == "ok"


def test_anthropic_agent():
    done = create_agent(claude(), [add]).invoke({"messages": [{"role": "user", "content": CALL}]})
    assert done["messages"][-1].text == "The sum is 5."
