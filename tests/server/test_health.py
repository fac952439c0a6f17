"""Health probes: with real processes, and how several waiting probes share one generated token."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any, cast

import httpx
import pytest
from starlette.exceptions import HTTPException

from jsg.engine.front.client import EngineClient
from jsg.errors import EngineDeadError, JsgError, QueueFullError, RequestError
from jsg.server.native import health
from jsg.server.native.health import EngineProbe
from jsg.types import FinishReason, FinishType, GrammarSpec, Request, RequestOutput
from tests.server.running import RunningServer
from tests.server.scripted import Generating
from tests.server.threads import ServerMaker

LONG = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 1000}}


class ScriptedClient(Generating):
    """Counts its requests; each waits for the gate and then gives what comes next in the script."""

    def __init__(self, *script: RequestOutput | Exception, takes_grammars: bool = False) -> None:
        self.takes_grammars = takes_grammars
        self.grammars = self
        self.unusable: JsgError | None = None
        self.checked: list[tuple[GrammarSpec, str]] = []
        self.gate = asyncio.Event()
        self.requests: list[tuple[Request, str]] = []
        self.num_live = 0
        self._script = iter(script)

    async def check(self, spec: GrammarSpec, owner: str) -> None:
        self.checked.append((spec, owner))
        if self.unusable is not None:
            raise self.unusable

    async def generate(
        self, request: Request, owner: str = "", *, is_streamed: bool = True
    ) -> AsyncGenerator[RequestOutput]:
        self.requests.append((request, owner))
        self.num_live += 1
        try:
            await self.gate.wait()
            item = next(self._script)
            if isinstance(item, Exception):
                raise item
            yield item
        finally:
            self.num_live -= 1


TOKEN = RequestOutput(rid="r", token_ids=(5,), finish=FinishReason(FinishType.LENGTH))
ABORTED = RequestOutput(rid="r", finish=FinishReason(FinishType.ABORT, message="aborted"))


def as_client(scripted: ScriptedClient) -> EngineClient:
    return cast("Any", scripted)


class TestProbe:
    async def test_waiters_share_one_token(self):
        scripted, probe = ScriptedClient(TOKEN, TOKEN), EngineProbe()
        waiters = [asyncio.create_task(probe.run(as_client(scripted), 5)) for _ in range(10)]
        await asyncio.sleep(0)
        scripted.gate.set()
        await asyncio.gather(*waiters)
        assert len(scripted.requests) == 1
        await probe.run(as_client(scripted), 5)
        assert len(scripted.requests) == 2, "a later probe asks again"

    async def test_one_that_leaves_is_nothing_to_the_others(self):
        scripted, probe = ScriptedClient(TOKEN), EngineProbe()
        first, second = (asyncio.create_task(probe.run(as_client(scripted), 5)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        assert not second.done()
        scripted.gate.set()
        await second
        assert len(scripted.requests) == 1

    async def test_it_is_in_nobodys_way(self):
        scripted = ScriptedClient(TOKEN)
        scripted.gate.set()
        await EngineProbe().run(as_client(scripted), 5)
        ((request, owner),) = scripted.requests
        assert (owner, request.namespace) == (health.OWNER, health.NAMESPACE)
        assert len(request.input_ids) == request.sampling.max_new_tokens == 1

    async def test_no_token_in_time_is_a_503_and_leaves_nothing_behind(self):
        scripted = ScriptedClient()
        with pytest.raises(HTTPException, match=r"no token within 0\.02 s") as refused:
            await EngineProbe().run(as_client(scripted), 0.02)
        assert refused.value.status_code == 503
        assert scripted.num_live == 0

    async def test_an_abort_of_everything_is_no_failure_of_the_engine(self):
        scripted = ScriptedClient(ABORTED, TOKEN)
        scripted.gate.set()
        await EngineProbe().run(as_client(scripted), 5)
        assert len(scripted.requests) == 2

    @pytest.mark.parametrize(
        ("error", "message"),
        [(QueueFullError("full"), "no token within 0.2 s"), (EngineDeadError("the engine ended"), "the engine ended")],
    )
    async def test_an_engine_that_takes_nothing_is_a_503(self, error, message):
        scripted = ScriptedClient(*[error] * 100)
        scripted.gate.set()
        with pytest.raises(HTTPException, match=message) as refused:
            await EngineProbe().run(as_client(scripted), 0.2)
        assert refused.value.status_code == 503

    async def test_a_full_queue_may_have_room_later(self):
        scripted = ScriptedClient(QueueFullError("full"), QueueFullError("full"), TOKEN)
        scripted.gate.set()
        await EngineProbe().run(as_client(scripted), 5)
        assert len(scripted.requests) == 3

    async def test_the_token_is_one_that_a_grammar_allows_once_the_engine_takes_grammars(self):
        scripted = ScriptedClient(TOKEN, takes_grammars=True)
        scripted.gate.set()
        await EngineProbe().run(as_client(scripted), 5)
        assert scripted.checked == [(health.GRAMMAR, health.OWNER)]
        assert [request.sampling.grammar for request, _ in scripted.requests] == [health.GRAMMAR]

    @pytest.mark.parametrize("broken", ["compiling", "loading", "walking"])
    async def test_grammars_that_do_not_work_are_a_503(self, broken):
        error = JsgError("grammars cannot be used")
        failed = RequestOutput(rid="r", finish=FinishReason(FinishType.ERROR, message=str(error)))
        scripted = ScriptedClient(error if broken == "loading" else failed, TOKEN, takes_grammars=True)
        scripted.unusable = error if broken == "compiling" else None
        scripted.gate.set()
        with pytest.raises(HTTPException, match="grammars cannot be used") as refused:
            await EngineProbe().run(as_client(scripted), 5)
        assert refused.value.status_code == 503

    async def test_a_model_that_takes_no_grammars_is_healthy(self):
        scripted = ScriptedClient(RequestError("a grammar needs a tokenizer"), TOKEN, takes_grammars=True)
        scripted.gate.set()
        await EngineProbe().run(as_client(scripted), 5)
        assert [request.sampling.grammar for request, _ in scripted.requests] == [health.GRAMMAR, None]


class TestServer:
    def test_one_token_that_is_in_nobodys_cache(self, server: RunningServer):
        before = server.stats()["num_added"]
        assert server.http.get("/health_generate").json() == {"status": "ok"}
        assert server.stats()["num_added"] == before + 1
        body = {"input_ids": [0, 0], "sampling_params": {"max_new_tokens": 1}}
        assert server.http.post("/generate", json=body).json()["meta_info"]["cached_tokens"] == 0

    def test_it_needs_a_key_and_counts_for_none(self, make_server: ServerMaker):
        with make_server(server={"api_key": "a", "max_requests_per_key": 1}) as server:
            assert server.http.get("/health_generate").status_code == 401
            server.http.headers["Authorization"] = "Bearer a"
            with server.http.stream("POST", "/generate", json=LONG) as response:
                events = response.iter_raw()
                next(events)
                assert server.http.post("/generate", json=LONG).status_code == 429
                assert server.http.get("/health_generate").status_code == 200

    def test_a_frozen_engine_gives_no_token(self, make_server: ServerMaker):
        with make_server(server={"health_timeout": 0.5}) as server:
            with server.engines[0].frozen():
                response = server.http.get("/health_generate")
                assert response.status_code == 503
                assert "no token within 0.5 s" in response.json()["error"]["message"]
            assert server.http.get("/health_generate").status_code == 200

    def test_waiters_share_the_token_of_a_busy_engine(self, make_server: ServerMaker):
        """While the engine stands still many ask, and one of them leaves; then it goes on."""
        with make_server(server={"health_timeout": 20}) as server:
            num_added = server.stats()["num_added"]
            statuses: list[int] = []

            def ask() -> None:
                statuses.append(httpx.get(f"{server.http.base_url}/health_generate", timeout=20).status_code)

            with server.engines[0].frozen():
                askers = [threading.Thread(target=ask) for _ in range(5)]
                for asker in askers:
                    asker.start()
                with pytest.raises(httpx.ReadTimeout):
                    httpx.get(f"{server.http.base_url}/health_generate", timeout=1)
            for asker in askers:
                asker.join(20)
            assert statuses == [200] * 5
            assert server.stats()["num_added"] == num_added + 1

    @pytest.mark.slow
    def test_a_full_queue_is_waited_for_and_a_long_one_is_passed(self, make_server: ServerMaker):
        """Each request takes two seconds: behind all that wait, the probe would take forty."""
        engine = {"max_running_requests": 1, "max_queued_requests": 20}
        with make_server(engine=engine, server={"health_timeout": 10}) as server, streams(server, 21):
            server.wait_for_stats(num_running=1, num_waiting=20)
            assert server.http.get("/health_generate").status_code == 200
            assert server.stats()["num_waiting"] > 10


@contextlib.contextmanager
def streams(server: RunningServer, count: int) -> Iterator[None]:
    """So many long requests under way; they end with the context."""
    is_over = threading.Event()

    def hold() -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(base_url=server.http.base_url, timeout=60) as http,
            http.stream("POST", "/generate", json=LONG),
        ):
            is_over.wait(60)

    threads = [threading.Thread(target=hold) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
