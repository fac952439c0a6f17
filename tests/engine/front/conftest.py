"""An engine process around a scripted core, and a client of it, that many tests use one after the other."""

from collections.abc import AsyncIterator

import pytest

from jsg.config import EngineConfig
from jsg.engine.front.client import EngineClient
from tests.engine.front.background import start_client

FAKE_CORE = "tests.engine.fake_core:FakeCore"


@pytest.fixture(scope="module")
async def running_client() -> AsyncIterator[EngineClient]:
    made = await start_client(EngineConfig(), core=FAKE_CORE)
    yield made
    await made.close()


@pytest.fixture
async def client(running_client: EngineClient) -> AsyncIterator[EngineClient]:
    """That client, whose engine has cached nothing and runs nothing before and after."""
    assert await running_client.flush_cache()
    yield running_client
    running_client.abort_all()
