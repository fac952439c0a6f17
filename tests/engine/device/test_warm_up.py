"""First runs: programs run once on padding before a request needs them, which changes no answer."""

import dataclasses
import pathlib
import shutil
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.engine import startup
from jsg.engine.core import STEPS_PER_FIRST_RUN, EngineCore
from jsg.engine.device.executables import Executables
from jsg.errors import MemoryPlanError
from jsg.types import Request, SamplingParams
from tests.engine import small
from tests.engine.small import check_core

RUNS = 4


@pytest.fixture(scope="module")
def started(small_model: pathlib.Path, compile_cache_dir: str) -> Iterator[EngineCore]:
    """As on a GPU: the essential programs are warm, some others were compiled in the background."""
    with pytest.MonkeyPatch.context() as patch, small.few_variants():
        patch.setitem(startup.RUNS_BEFORE_READY, "cpu", RUNS)
        core = small.make_core(small_model, compile_cache_dir, forbid_compile=False, **small.DETERMINISTIC)
    thread = core._executables._thread
    assert thread is not None
    thread.join()
    yield core
    core.close()


@pytest.fixture
def core(started: EngineCore) -> EngineCore:
    """The engine as it is after its start: nothing is cached, and what is not essential has not run."""
    assert started.flush_cache()
    executables = started._executables
    essential = started._runner.programs.essential()
    executables._cold.update({name: RUNS for name in executables.names() if name not in essential})
    return started


def test_a_program_is_ready_after_its_runs():
    programs = Executables(forbid_compile=False, runs_before_ready=2)
    programs.lower("a", lambda x: x + 1, jax.ShapeDtypeStruct((), jnp.float32))
    programs.compile(["a"])
    for left in (["a"], ["a"], []):
        assert programs.cold() == left and programs.is_ready("a") == (not left)
        programs("a", np.float32(1))


def test_programs_are_run_in_one_order_whatever_is_compiled_first():
    """On several hosts: what one sums up the others must sum up with it."""
    programs = Executables(forbid_compile=False, runs_before_ready=1)
    for name in "abc":
        programs.lower(name, lambda x: x + 1, jax.ShapeDtypeStruct((), jnp.float32))
    programs._put_in_order("abc")
    for name in "cab":
        programs._compile_one(name)
    assert programs.cold() == ["a", "b", "c"]
    programs.share(lambda: 2)  # the others have not compiled the last one yet
    assert programs.cold() == ["a", "b"]
    for name in "abc":
        programs(name, np.float32(1))
    assert [programs.is_ready(name) for name in "abc"] == [True, True, False]


def test_the_first_runs_touch_the_dump_row_and_the_dump_page_only(core: EngineCore):
    small.run(core, small.traffic(1, count=4))
    core._executables._cold.update(dict.fromkeys(core._executables.names(), RUNS))

    def state() -> list[np.ndarray]:
        rows = core._runner.replica.state
        return [np.array(x) for x in jax.tree.leaves((rows.page_table, rows.last_token, rows.penalties, rows.pool))]

    before = state()
    core._runner.warm_up()
    assert all(core._executables.is_ready(name) for name in core._executables.names())
    for was, now in zip(before, state(), strict=True):
        np.testing.assert_array_equal(was[1:], now[1:])
    assert any(array[1:].any() for array in before)
    check_core(core)


def test_what_is_compiled_in_the_background_runs_once_a_step_while_no_request_does(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
):
    names = core._executables.cold()
    essential = set(core._runner.programs.essential())
    assert len(names) == 2 and not essential & set(names)
    assert not any(core._executables.is_ready(name) for name in names)
    calls: list[object] = []
    call = Executables.__call__

    def spy(self: Executables, name: tuple, *args: object) -> object:
        calls.append(name)
        return call(self, name, *args)

    monkeypatch.setattr(Executables, "__call__", spy)
    num_steps = 0
    while core.has_work:
        assert core.step() == []
        num_steps += 1
        assert len(calls) == num_steps
    assert num_steps == RUNS * len(names)
    assert core.flush_cache()


def test_while_requests_run_first_runs_are_seldom(core: EngineCore):
    for rid in "ab":
        core.add(Request(rid=rid, input_ids=(5, 6, 7), sampling=SamplingParams(max_new_tokens=20, ignore_eos=True)))
    left, num_steps = sum(core._executables._cold.values()), 0
    while not core.scheduler.is_idle:
        core.step()
        num_steps += 1
    num_runs = left - sum(core._executables._cold.values())
    assert num_steps > STEPS_PER_FIRST_RUN
    assert 0 < num_runs <= 1 + num_steps // STEPS_PER_FIRST_RUN


def test_answers_are_the_same_while_programs_make_their_first_runs(
    core: EngineCore, core_of, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jsg.engine.core.STEPS_PER_FIRST_RUN", 1)
    traffic = small.traffic(5, count=8)
    expected = small.run(core_of(**small.DETERMINISTIC), traffic)
    outcomes = small.run(core, traffic)
    for rid, outcome in outcomes.items():
        assert dataclasses.replace(outcome, cached_tokens=0) == dataclasses.replace(expected[rid], cached_tokens=0)
    assert not core._executables.cold(), "there were fewer steps than first runs"


def test_the_cache_can_be_flushed_while_programs_make_their_first_runs(core: EngineCore):
    assert core.has_work and core.flush_cache()


def test_what_cannot_fit_is_refused_before_anything_is_compiled_or_loaded(
    small_model: pathlib.Path, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    """The weights are damaged, so that loading them would fail otherwise."""
    monkeypatch.setattr(Executables, "lower", lambda *args, **kwargs: pytest.fail("a program was lowered"))
    shutil.copy(small_model / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    config = small.make_config(tmp_path, compile_cache_dir, load_format="auto", max_total_tokens=2**31 - 1)
    with pytest.raises(MemoryPlanError, match="memory is left for"):
        EngineCore(config)
