"""Grammars of an engine in this process: compiled once, there when their requests come, and not kept for ever."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

import jsg
from jsg.constrained.compiler import compile_tables
from jsg.engine.offline import grammars as offline_grammars
from jsg.engine.offline.grammars import OfflineGrammars
from jsg.errors import GrammarError, RequestError
from jsg.types import GrammarSpec, SamplingParams
from tests.engine.integrity import check_bytes


@pytest.fixture
def engine(tiny_engine: jsg.Engine) -> Iterator[jsg.Engine]:
    """An engine that keeps about two of the grammars below."""

    def forget(**options: int) -> None:
        driver = tiny_engine._driver
        driver.call(lambda core: core.grammars.forget_grammars(list(core.grammars._grammars._grammars)))
        tiny_engine._grammars = OfflineGrammars(driver, **options)

    forget(kept_bytes=2 * len(compile_tables(GrammarSpec("regex", "a000")).to_bytes()) + 100)
    yield tiny_engine
    forget()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled, each slowly, and by which thread."""
    texts: list[str] = []

    def slowly(spec: GrammarSpec):
        texts.append(f"{threading.current_thread().name.partition('_')[0]} {spec.text}")
        time.sleep(0.1)
        return compile_tables(spec)

    monkeypatch.setattr(offline_grammars, "compile_tables", slowly)
    return texts


def samplings(count: int) -> list[dict]:
    return [{"regex": f"a{i:03}", "max_new_tokens": 8, "temperature": 0} for i in range(count)]


def expected(count: int) -> list[str]:
    return [f"a{i:03}" for i in range(count)]


def num_grammars(engine: jsg.Engine) -> int:
    return engine.get_server_info()["num_grammars"]


def test_one_call_may_have_more_grammars_than_are_kept(engine: jsg.Engine):
    results = engine.generate(["x"] * 12, samplings(12))
    assert [result["text"] for result in results] == expected(12)
    assert num_grammars(engine) <= 2


def test_a_stream_that_is_read_later_still_has_its_grammars(engine: jsg.Engine):
    stream = engine.generate(["x"] * 6, samplings(6), stream=True)
    assert engine.generate(["x"] * 12, samplings(12))[11]["text"] == "a011"
    texts = {result["index"]: result["text"] for result in stream}
    assert [texts[i] for i in range(6)] == expected(6)
    assert num_grammars(engine) <= 2


def test_calls_of_many_threads_do_not_take_each_others_grammars(engine: jsg.Engine):
    found: list[list[str]] = []
    calls = [
        threading.Thread(
            target=lambda: found.append([each["text"] for each in engine.generate(["x"] * 6, samplings(6))])
        )
        for _ in range(5)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert found == [expected(6)] * 5


async def test_several_threads_compile_a_grammar_once(engine: jsg.Engine, compiled: list[str]):
    results = await asyncio.gather(*(engine.async_generate("x", samplings(1)[0]) for _ in range(8)))
    assert {result["text"] for result in results} == {"a000"}
    assert len(compiled) == 1 and engine._grammars._compiling == {}


async def test_compiling_does_not_stop_the_event_loop(engine: jsg.Engine, compiled: list[str]):
    streamed = await engine.async_generate("x", samplings(1)[0], stream=True)
    whole = await engine.async_generate(["x"] * 2, samplings(3)[1:])
    assert [[each["text"] async for each in streamed][-1], *(each["text"] for each in whole)] == expected(3)
    assert sorted(compiled) == sorted(f"asyncio a00{i}" for i in range(3)), "another thread compiled them"


def test_a_wrong_grammar_is_refused_before_anything_runs_and_each_time(engine: jsg.Engine):
    for _ in range(2):
        with pytest.raises(GrammarError, match="look"):
            engine.generate(["x", "x"], [{"regex": "a"}, {"regex": "(?=a)b"}], stream=True)
    assert engine.get_server_info()["num_running"] == 0 and engine._grammars._compiling == {}


def test_the_key_of_a_grammar_is_none(engine: jsg.Engine):
    with pytest.raises(RequestError, match="grammar must be a GrammarSpec"):
        engine.generate("x", {"grammar": GrammarSpec("regex", "a").key})


def test_a_special_token_that_the_model_lacks_is_refused(engine: jsg.Engine):
    tag = {"type": "structural_tag", "format": {"type": "token", "token": "[TOOL_CALLS]"}}
    with pytest.raises(GrammarError, match=r"'\[TOOL_CALLS\]' must be a special token that this model has"):
        engine.generate("a", {"structural_tag": tag})


def test_text_is_no_grammar(engine: jsg.Engine):
    with pytest.raises(RequestError, match="must be a GrammarSpec"):
        engine.generate("a", SamplingParams(grammar="[a-z]+"))


def test_a_grammar_that_two_threads_kept_counts_once(engine: jsg.Engine):
    grammars = engine._grammars
    tables = grammars.tables([GrammarSpec("regex", "a000")])
    for _ in range(3):
        with grammars._lock:
            grammars._keep(*next(iter(tables.items())))
    check_bytes(grammars._kept)
    assert num_grammars(engine) == 1
