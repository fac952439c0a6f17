"""The clients of both servers."""

import os
from collections.abc import Iterator

import openai
import pytest


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Of the embedded model."""
    with openai.OpenAI(base_url=f"{os.environ['EMBEDDED']}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def scripted() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{os.environ['SCRIPTED']}/v1", api_key="none", max_retries=0) as made:
        yield made
