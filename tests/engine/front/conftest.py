"""An engine process around a scripted core, and a client of it, that many tests use one after the other."""

from collections.abc import Awaitable, Callable, Iterator

import pytest

from jsg.config import EngineConfig
from jsg.engine.front.client import EngineClient
from tests.engine.front.background import BackgroundLoop, background_loop, start_client

FAKE_CORE = "tests.engine.fake_core:FakeCore"

Use = Callable[[Callable[[EngineClient], Awaitable[None]]], None]


@pytest.fixture(scope="session")
def loop() -> Iterator[BackgroundLoop]:
    with background_loop() as made:
        yield made


@pytest.fixture(scope="module")
def client(loop: BackgroundLoop) -> Iterator[EngineClient]:
    made = loop.run(start_client(EngineConfig(), core=FAKE_CORE))
    yield made
    loop.run(made.close())


@pytest.fixture
def use(loop: BackgroundLoop, client: EngineClient) -> Use:
    """Runs a test with the shared client, whose engine has cached nothing and runs nothing before and after."""

    async def run(test: Callable[[EngineClient], Awaitable[None]]) -> None:
        assert await client.flush_cache()
        try:
            await test(client)
        finally:
            client.abort_all()

    return lambda test: loop.run(run(test))
