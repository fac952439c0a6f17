"""Several engines behind one front: real child processes around scripted cores."""

import asyncio
import contextlib
import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from jsg.config import EngineConfig
from jsg.engine.child import heartbeat
from jsg.engine.child.protocol import Progress
from jsg.engine.front.children import EngineChild
from jsg.engine.front.client import EngineClient
from jsg.engine.front.fleet import EngineFleet, open_engines
from jsg.errors import EngineDeadError, JsgError, MemoryPlanError, QueueFullError, RequestError, ShuttingDownError
from jsg.types import FinishType, GrammarSpec, Request, RequestOutput, SamplingParams
from tests.engine.fake_core import CRASHING, CRASHING_TOKEN, ENDLESS_TOKEN, TOO_LARGE
from tests.engine.front.background import note_compilations, num_live, outputs_of, until
from tests.engine.front.conftest import FAKE_CORE

DEADLINE_S = 60  # on a busy machine too
PREFIX = tuple(range(1, 129))


@contextlib.asynccontextmanager
async def fleet_of(size: int = 2, **knobs) -> AsyncIterator[EngineFleet]:
    config = EngineConfig(**knobs)
    async with asyncio.timeout(DEADLINE_S):
        made = open_engines([EngineChild.spawn(config, core=FAKE_CORE) for _ in range(size)], config)
        assert isinstance(made, EngineFleet)
        try:
            await made.ready()
            yield made
        finally:
            await made.close()


@pytest.fixture(scope="module")
async def shared_fleet() -> AsyncIterator[EngineFleet]:
    async with fleet_of() as made:
        yield made


@pytest.fixture
async def fleet(shared_fleet: EngineFleet) -> EngineFleet:
    """Two engines that have cached nothing and run nothing."""
    assert await shared_fleet.flush_cache()
    return shared_fleet


def request(rid: str, ids: tuple[int, ...] = (1, 2, 3), *, hold: bool = False, **sampling) -> Request:
    return Request(
        rid=rid, input_ids=ids, hold=hold, sampling=SamplingParams(**{"max_new_tokens": 0 if hold else 5, **sampling})
    )


def endless(rid: str, token: int = 50) -> Request:
    """Answers until it is aborted, which is no matter of how long a test takes."""
    return request(rid, (ENDLESS_TOKEN, token))


async def collect(fleet: EngineFleet, wanted: Request, owner: str = "") -> list[RequestOutput]:
    return [output async for output in outputs_of(fleet, wanted, owner)]


def is_aborted(ended: list[RequestOutput] | BaseException) -> bool:
    assert isinstance(ended, list)
    finish = ended[-1].finish
    return finish is not None and finish.type is FinishType.ABORT


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def pids(fleet: EngineFleet) -> list[int]:
    return [int((await engine.stats())["pid"]) for engine in fleet.engines]


async def begun(fleet: EngineFleet, wanted: Request) -> tuple[asyncio.Task, int]:
    """A request that has told something, and the engine that has it."""
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run() -> list[RequestOutput]:
        outputs = []
        async for output in outputs_of(fleet, wanted):
            outputs.append(output)
            if not first.done():
                first.set_result(None)
        return outputs

    before = [num_live(engine) for engine in fleet.engines]
    running = asyncio.create_task(run())
    await first
    after = [num_live(engine) for engine in fleet.engines]
    return running, next(i for i in range(len(after)) if after[i] > before[i])


async def test_one_engine_is_no_fleet():
    child = EngineChild.spawn(EngineConfig(), core=FAKE_CORE)
    client = open_engines([child], EngineConfig())
    assert isinstance(client, EngineClient) and client.engines == (client,)
    assert client.routed == {}
    await client.close()


async def num_cached(fleet: EngineFleet) -> list[int | float]:
    return [(await engine.stats())["num_cached_tokens"] for engine in fleet.engines]


class TestRequests:
    async def test_they_are_shared_out_and_answered_under_their_names(self):
        async with fleet_of(3) as fleet:
            wanted = [request(f"r{i}", (10 + i, 40 + i)) for i in range(30)]
            answers = await asyncio.gather(*(collect(fleet, one) for one in wanted))
            for one, outputs in zip(wanted, answers, strict=True):
                assert {output.rid for output in outputs} == {one.rid}
                assert tokens_of(outputs) == [one.input_ids[i % 2] for i in range(5)]
            added = [(await engine.stats())["num_added"] for engine in fleet.engines]
            assert added == [10, 10, 10]
            assert num_live(fleet) == 0
            assert fleet.info.max_total_tokens == 3 * fleet.engines[0].info.max_total_tokens
            assert fleet.info.max_request_tokens == fleet.engines[0].info.max_request_tokens

    async def test_a_prefix_is_found_where_it_is(self):
        async with fleet_of() as fleet:
            await collect(fleet, request("first", PREFIX))
            for i in range(10):
                outputs = await collect(fleet, request(f"r{i}", (*PREFIX, 200 + i)))
                assert outputs[0].cached_tokens == len(PREFIX)
            assert fleet.routed[0, "prefix"] == 10 and await fleet.flush_cache()
            assert (await collect(fleet, request("again", PREFIX)))[0].cached_tokens == 0
            assert fleet.routed[0, "prefix"] == 10, "the router has forgotten it too"

    async def test_a_name_is_one_over_all_engines(self, fleet: EngineFleet):
        running, _ = await begun(fleet, endless("same"))
        with pytest.raises(RequestError, match="unique"):
            await collect(fleet, request("same"))
        assert len(await collect(fleet, request("same"), owner="other")) == 5
        assert fleet.live_rids("") == ["same"] and not fleet.abort("same", "other")
        assert fleet.abort("same")
        await collect(fleet, request("same"))  # free at once
        assert is_aborted(await running)
        assert not fleet.abort("same")

    async def test_aborting_all_of_an_owner_or_of_everybody(self, fleet: EngineFleet):
        lasting = [endless(f"r{i}", i) for i in range(6)]
        tasks = [asyncio.create_task(collect(fleet, one, "ab"[i % 2])) for i, one in enumerate(lasting)]
        await until(lambda: num_live(fleet) == 6)
        assert num_live(fleet, "a") == 3
        assert fleet.abort_all("a") == 3
        assert fleet.abort_all(error=ShuttingDownError("the server is ending")) == 3
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(map(is_aborted, ends[::2]))
        assert [type(error) for error in ends[1::2]] == [ShuttingDownError] * 3
        assert num_live(fleet) == 0

    async def test_each_engine_gets_the_grammars_of_its_requests_from_one_compiler(self, fleet: EngineFleet):
        grammar, compiled = GrammarSpec("regex", "[a-z]+"), note_compilations(fleet.grammars)
        wanted = [request(f"r{i}", (10 + i, 60 + i), grammar=grammar) for i in range(6)]
        await asyncio.gather(*(collect(fleet, one) for one in wanted))
        assert [(await engine.stats())["num_grammars"] for engine in fleet.engines] == [1, 1]
        assert compiled == ["[a-z]+"]

    async def test_only_so_many_may_wait_in_all(self):
        async with fleet_of(max_queued_requests=1, max_running_requests=1) as fleet:
            lasting = [endless(f"r{i}", i) for i in range(4)]
            # The first two run before others come: an engine lets only one wait, also of those that come at once.
            tasks = [(await begun(fleet, one))[0] for one in lasting[:2]]
            tasks += [asyncio.create_task(collect(fleet, one)) for one in lasting[2:]]
            await until(lambda: num_live(fleet) == 4)
            assert all(engine.is_full for engine in fleet.engines)
            with pytest.raises(QueueFullError):
                await collect(fleet, request("late"))
            fleet.abort_all()
            await asyncio.gather(*tasks)

    async def test_caches_are_flushed_together(self, fleet: EngineFleet):
        await asyncio.gather(*(collect(fleet, request(f"r{i}", (i, i + 50))) for i in range(4)))
        assert await num_cached(fleet) == [4, 4]
        running, _ = await begun(fleet, endless("long"))
        assert not await fleet.flush_cache()
        fleet.abort_all()
        await running
        assert await fleet.flush_cache()
        assert await num_cached(fleet) == [0, 0]


class TestDeath:
    def test_what_has_begun_ends_with_an_error_and_what_has_not_goes_over(self, caplog: pytest.LogCaptureFixture):
        async def run() -> None:
            async with fleet_of(max_running_requests=1) as fleet:
                first, at_first = await begun(fleet, endless("a"))
                second, at_second = await begun(fleet, request("b", (3, 4), max_new_tokens=300))
                assert {at_first, at_second} == {0, 1}
                waiting = [asyncio.create_task(collect(fleet, request(f"w{i}", (10 + i, 50 + i)))) for i in range(8)]
                await until(lambda: num_live(fleet) == 10)
                os.kill((await pids(fleet))[at_first], signal.SIGKILL)
                with pytest.raises(EngineDeadError, match="after its answer had begun; send it again"):
                    await first
                for i, outputs in enumerate(await asyncio.gather(*waiting)):
                    assert tokens_of(outputs) == [10 + i, 50 + i, 10 + i, 50 + i, 10 + i], "none is lost or made twice"
                    assert {output.rid for output in outputs} == {f"w{i}"}
                assert len(tokens_of(await second)) == 300
                assert fleet.is_alive
                assert [engine.is_alive for engine in fleet.engines].count(True) == 1
                assert len(await collect(fleet, request("new"))) == 5
                assert await fleet.flush_cache()

        with caplog.at_level(logging.ERROR):
            asyncio.run(run())
        assert "The others go on" in caplog.text

    async def test_what_goes_over_takes_its_grammar_with_it(self):
        async with fleet_of(max_running_requests=1) as fleet:
            lasting = [await begun(fleet, endless(f"l{i}", i)) for i in range(2)]
            wanted, compiled = (
                request("g", grammar=GrammarSpec("regex", "[a-z]+")),
                note_compilations(fleet.grammars),
            )
            waiting = asyncio.create_task(collect(fleet, wanted))
            await until(lambda: num_live(fleet) == 3)
            at = next(i for i, engine in enumerate(fleet.engines) if "g" in engine.live_rids(""))
            await until(lambda: compiled)
            assert (await fleet.engines[1 - at].stats())["num_grammars"] == 0
            os.kill((await pids(fleet))[at], signal.SIGKILL)
            (dead,) = (task for task, engine in lasting if engine == at)
            with pytest.raises(EngineDeadError):
                await dead
            assert fleet.abort(f"l{1 - [engine for _, engine in lasting].index(at)}")
            assert tokens_of(await waiting) == [1, 2, 3, 1, 2]
            assert (await fleet.engines[1 - at].stats())["num_grammars"] == 1

    async def test_a_hold_ends_with_it(self):
        async with fleet_of() as fleet:
            holding, at = await begun(fleet, request("h", PREFIX, hold=True))
            os.kill((await pids(fleet))[at], signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await holding

    async def test_what_ends_engines_is_not_sent_to_all_of_them(self):
        async with fleet_of(4) as fleet:
            with pytest.raises(EngineDeadError, match="before it was done"):
                await collect(fleet, request("poison", (CRASHING_TOKEN,)))
            assert [engine.is_alive for engine in fleet.engines].count(True) == 2

    async def test_an_abort_finds_what_has_gone_over(self):
        async with fleet_of(max_running_requests=1) as fleet:
            lasting = [await begun(fleet, endless(f"l{i}", i)) for i in range(2)]
            waiting = [asyncio.create_task(collect(fleet, request(f"w{i}", (10 + i, 50)))) for i in range(4)]
            await until(lambda: num_live(fleet) == 6)
            engine = fleet.engines[0]
            mine = [rid for rid in fleet.live_rids("") if rid in engine.live_rids("") and rid[0] == "w"]
            assert len(mine) == 2
            os.kill((await pids(fleet))[0], signal.SIGKILL)
            while engine.live_rids(""):
                await asyncio.sleep(0)  # until the loop's turn in which the engine's streams were closed
            assert fleet.abort(mine[0]) and fleet.abort_all(error=ShuttingDownError("ending")) >= 1
            ends = await asyncio.gather(*waiting, *(task for task, _ in lasting), return_exceptions=True)
            by_rid = dict(zip(["w0", "w1", "w2", "w3"], ends, strict=False))
            assert is_aborted(by_rid[mine[0]])
            assert isinstance(by_rid[mine[1]], ShuttingDownError)
            assert not num_live(fleet)

    def test_the_last_death_is_the_end(self, caplog: pytest.LogCaptureFixture):
        async def run() -> None:
            async with fleet_of() as fleet:
                running, at = await begun(fleet, endless("a"))
                numbers = await pids(fleet)
                os.kill(numbers[1 - at], signal.SIGKILL)
                await until(lambda: not fleet.engines[1 - at].is_alive)
                dying = asyncio.create_task(fleet.death())
                await asyncio.sleep(0.05)
                assert not dying.done()
                os.kill(numbers[at], signal.SIGKILL)
                assert str(await dying).count("exit status -9") == 2, "each end is told"
                with pytest.raises(EngineDeadError):
                    await running
                for call in (collect(fleet, request("b")), fleet.flush_cache(), fleet.engines[at].watch_cache(0)):
                    with pytest.raises(EngineDeadError):
                        await call
                assert not fleet.is_alive

        with caplog.at_level(logging.ERROR):
            asyncio.run(run())
        assert caplog.text.count("exit status -9") == 2 and caplog.text.count("No other is left") == 1


class TestStall:
    async def test_the_watchdog_ends_it_and_the_other_goes_on(self):
        async with fleet_of(watchdog_timeout=4) as fleet:
            running, at = await begun(fleet, endless("r"))
            os.kill((await pids(fleet))[at], signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="send it again"):
                await running
            assert [engine.is_alive for engine in fleet.engines].index(False) == at
            assert len(await collect(fleet, request("next"))) == 5

    async def test_it_gets_nothing_new_until_it_goes_on(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(heartbeat, "TIMEOUT_S", 6.0)  # of which a busy machine may take some

        async with fleet_of() as fleet:
            await collect(fleet, request("first", PREFIX))
            running, at = await begun(fleet, request("r", (*PREFIX, 9), max_new_tokens=800))
            assert at == 0
            pid = (await pids(fleet))[at]
            os.kill(pid, signal.SIGSTOP)
            try:
                await until(lambda: fleet.engines[at].is_stalled)
                assert fleet.is_alive and not fleet.is_stalled
                for i in range(4):
                    await collect(fleet, request(f"n{i}", (*PREFIX, 20 + i)))
                assert fleet.routed[1, "load"] + fleet.routed[1, "prefix"] == 4
                assert not await fleet.flush_cache()
                assert not (await fleet.engines[1].stats())["num_cached_tokens"], "who moves has done it"
            finally:
                os.kill(pid, signal.SIGCONT)
            assert len(tokens_of(await running)) == 800
            await until(lambda: not fleet.engines[at].is_stalled)
            routed = Counter(fleet.routed)
            await asyncio.gather(*(collect(fleet, request(f"m{i}", (60 + i, 3))) for i in range(8)))
            assert fleet.routed[0, "load"] > routed[0, "load"]


class TestStart:
    @pytest.mark.parametrize(("model", "error"), [(TOO_LARGE, MemoryPlanError), (CRASHING, EngineDeadError)])
    def test_the_failure_of_one_is_the_failure_of_all(
        self, model: str, error: type[JsgError], caplog: pytest.LogCaptureFixture
    ):
        async def run() -> None:
            configs = [EngineConfig(), EngineConfig(model_path=model)]
            children = [EngineChild.spawn(config, core=FAKE_CORE) for config in configs]
            fleet = EngineFleet(children, configs[0])
            with pytest.raises(error):
                await fleet.ready()
            await fleet.close()
            for child in children:
                assert child.wait() is not None

        with caplog.at_level(logging.ERROR):
            asyncio.run(run())
        assert "go on" not in caplog.text

    async def test_each_child_has_the_environment_of_its_group(self):
        children = [EngineChild.spawn(EngineConfig(), core=FAKE_CORE, environment={"GROUP": str(i)}) for i in (0, 1)]
        fleet = open_engines(children, EngineConfig())
        await fleet.ready()
        for number, child in enumerate(children):
            assert f"GROUP={number}" in Path(f"/proc/{child._process.pid}/environ").read_text().split("\0")
        await fleet.close()

    async def test_progress_is_that_of_all(self):
        seen: list[Progress] = []
        config = EngineConfig()
        children = [EngineChild.spawn(config, core=FAKE_CORE) for _ in range(2)]
        fleet = EngineFleet(children, config, seen.append)
        await fleet.ready()
        await fleet.close()
        assert [(p.stage, p.done, p.total) for p in seen if p.stage == "load"] == [("load", 1, 2), ("load", 2, 2)]
        plans = [p.text for p in seen if p.stage == "plan"]
        assert len(plans) == 1, "equal plans are shown once"
        assert plans[0].endswith("weights 1 MB, KV pool 2 MB")
