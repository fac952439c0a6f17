"""Errors."""

import openai
import pytest
from with_openai.shared import ASK, EMBEDDED, SCRIPTED, says


def test_error_of_a_field(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=EMBEDDED, messages=ASK, temperature=-1)
    assert error.value.param == "temperature"
    assert error.value.type == "invalid_request_error"


def test_error_of_the_model_name(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="other", messages=ASK)
    assert error.value.code == "model_not_found"


def test_error_of_the_context(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=EMBEDDED, messages=ASK, max_tokens=100_000)
    assert error.value.code == "context_length_exceeded"


def test_error_of_embeddings(client):
    with pytest.raises(openai.BadRequestError, match="a model that embeds"):
        client.embeddings.create(model=EMBEDDED, input="a")


def test_error_of_what_is_not_served(client):
    with pytest.raises(openai.NotFoundError):
        client.batches.list()


def test_error_of_a_timeout(scripted):
    with pytest.raises(openai.APITimeoutError):
        scripted.chat.completions.create(model=SCRIPTED, messages=says("say " + "long " * 400), timeout=0.3)


def test_error_of_a_connection():
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0).models.list()
