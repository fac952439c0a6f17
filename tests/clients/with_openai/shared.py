"""What the cases of OpenAI's package share."""

import asyncio
import os

import openai
import pydantic

ASK = [{"role": "user", "content": "What is the capital of France?"}]
EMBEDDED, SCRIPTED = "tiny", "scripted"


class Sum(pydantic.BaseModel):
    """A sum."""

    a: int
    b: int


class Colour(pydantic.BaseModel):
    """A colour."""

    name: str
    shades: list[str]


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
RESPONSES_TOOL = {"type": "function", **TOOL["function"]}
CALL = 'SCRIPT call add {"a": 2, "b": 3} || say The sum is 5.'


def says(script: str) -> list[dict]:
    return [{"role": "user", "content": f"SCRIPT {script}"}]


def with_async(work):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{os.environ['SCRIPTED']}/v1", api_key="none", max_retries=0) as made:
            return await work(made)

    return asyncio.run(run())
