"""`sync` and `settle` raise what happened, and a failure that nobody reads is logged."""

import asyncio
import gc
import inspect
import json
import time
import weakref

import pytest

import jsg as sgl
from jsg.errors import RequestError
from tests.lang.graph_programs import run_here
from tests.lang.test_remote_graph import GraphServer

WAYS = ("run", "stream", "batch", "arun", "here", "server")


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    """Leaves all that exists to the end of the process: the tests look for what is garbage again and again."""
    gc.collect()
    gc.freeze()


def fail(prompt, gen):
    if gen.name == "bad":
        raise RequestError("no bad")
    return "A"


@sgl.function
def program(s):
    s += "p" + sgl.gen("good")
    forks = s.fork(2)
    forks += sgl.gen("bad")
    s += sgl.gen("bad")  # HERE


def ran(way, backend, of=program):
    """The state of a program, when all that it started has ended."""
    match way:
        case "run" | "stream":
            state = of.run(backend=backend, stream=way == "stream")
        case "batch":
            (state,) = of.run_batch([()], backend=backend)
        case "arun":
            state = asyncio.run(of.arun(backend=backend))
        case _:
            state = of.compile().run(backend=backend, where=way)
            state.ended.wait(30)
            return state
    state._run.stream.ended.wait_done(30)
    return state


def logged(caplog) -> list[str]:
    gc.collect()
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("jsg.lang")]
    caplog.clear()
    return messages


def soon_logged(caplog) -> str:
    """The one message that comes when the threads and tasks of the run have gone."""
    for _ in range(3000):
        if messages := logged(caplog):
            (message,) = messages
            return message
        time.sleep(0.01)
    raise TimeoutError("nothing was logged")


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_that_nobody_read_is_logged_once_when_the_state_goes(way, caplog):
    state = ran(way, GraphServer(fail))
    assert state["good"] == "A"
    del state
    message = soon_logged(caplog)
    assert "nobody read its error" in message and "no bad" in message and "test_unread_errors.py:" in message


@pytest.mark.parametrize("way", WAYS)
def test_sync_and_settle_raise_what_happened_and_whoever_reads_knows(way, caplog):
    reads = [lambda state: state.sync(), lambda state: run_here(state.settle()), lambda state: state["bad"]]
    reads += [
        lambda state: state.text(),
        lambda state: list(state.text_iter()),
        lambda state: run_here(state.aget("bad")),
    ]
    for read in reads:
        with pytest.raises(RequestError, match="no bad"):
            read(ran(way, GraphServer(fail)))
    assert isinstance(ran(way, GraphServer(fail)).error(), RequestError)
    assert isinstance(run_here(ran(way, GraphServer(fail)).aerror()), RequestError)
    assert logged(caplog) == []


@pytest.mark.parametrize("way", ["here", "server"])
def test_the_usage_of_a_failed_run_is_no_error_and_no_reading_of_it(way, caplog):
    assert ran(way, GraphServer(fail)).usage()["calls"] == 1
    assert "no bad" in soon_logged(caplog)


def test_an_error_that_the_body_read_and_raised_again_is_unread(caplog):
    @sgl.function
    def reading(s):
        s += sgl.gen("bad")
        s["bad"]

    ran("batch", GraphServer(fail), reading)
    assert "no bad" in soon_logged(caplog)
    with pytest.raises(RequestError):
        reading.run(backend=GraphServer(fail))
    with pytest.raises(RequestError):
        asyncio.run(reading.arun(backend=GraphServer(fail)))
    assert logged(caplog) == []


def test_who_cancels_knows_it(caplog):
    @sgl.function
    def cancelled(s):
        s += sgl.gen("x")
        s.cancel()

    ran("batch", GraphServer(fail), cancelled)
    assert logged(caplog) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_that_the_way_taken_does_not_set_is_no_failure(way, caplog):
    @sgl.function
    def branching(s):
        s += "p" + sgl.gen("a")
        sgl.cond(s, sgl.equals(s["a"], "A"), lambda s: s.set_var("b", "B"), lambda s: s.set_var("c", "C"))

    state = ran(way, GraphServer(fail), branching)
    assert state["b"] == "B"
    history = weakref.ref(state._history())
    del state
    for _ in range(3000):
        if history() is None:
            break
        gc.collect()
        time.sleep(0.01)
    assert history() is None
    assert logged(caplog) == []


def test_what_a_body_raised_is_logged_with_its_line(caplog):
    @sgl.function
    def failing(s):
        json.loads("{")  # HERE

    @sgl.function
    def program(s):
        failing()

    program.run(backend=GraphServer(fail)).usage()
    lines, start = inspect.getsourcelines(failing.func)
    assert f"; in the program: {__file__}:{start + len(lines) - 1}" in soon_logged(caplog)
