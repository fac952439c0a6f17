"""`--profile-dir`: a trace of some steps, which changes no answer and can end none."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import jax
import pytest

from jsg.engine import profile
from jsg.engine.core import EngineCore
from jsg.engine.device.executables import Executables
from jsg.errors import CompileError, ConfigError
from jsg.types import Request, SamplingParams
from tests.engine import small

STEPS = 40
REQUEST = Request(
    rid="r", input_ids=(2, 3, 4), sampling=SamplingParams(max_new_tokens=STEPS, temperature=0, ignore_eos=True)
)


@pytest.fixture
def core(small_model: pathlib.Path, compile_cache_dir: str, tmp_path: pathlib.Path) -> Iterator[EngineCore]:
    core = small.make_core(small_model, compile_cache_dir, **small.DETERMINISTIC, profile_dir=str(tmp_path / "profile"))
    yield core
    core.close()


def traces(tmp_path: pathlib.Path) -> list[str]:
    return sorted(path.suffix for path in (tmp_path / "profile").rglob("*") if path.is_file())


def small_request(num_steps: int) -> Request:
    sampling = SamplingParams(max_new_tokens=num_steps, temperature=0, ignore_eos=True)
    return Request(rid="first", input_ids=(5, 6), sampling=sampling)


def test_twenty_steps_are_traced_once(core: EngineCore, core_of, tmp_path: pathlib.Path, caplog):
    assert oct(os.stat(tmp_path / "profile").st_mode & 0o777) == "0o700"
    expected = small.alone(core_of(**small.DETERMINISTIC), REQUEST).token_ids
    small.run(core, [(0, small_request(profile.FIRST_STEP + profile.NUM_STEPS - 2))])
    assert traces(tmp_path) == []
    assert small.alone(core, REQUEST).token_ids == expected
    assert traces(tmp_path) == [".gz", ".pb"]
    core.close()
    assert traces(tmp_path) == [".gz", ".pb"]
    assert [record.message for record in caplog.records] == [
        f"a profile of some steps from step 10 on was written to {tmp_path / 'profile'}"
    ]


def test_an_engine_that_closes_earlier_writes_what_it_has(core: EngineCore, tmp_path: pathlib.Path):
    small.run(core, [(0, small_request(profile.FIRST_STEP + 5))])
    core.close()
    assert traces(tmp_path) == [".gz", ".pb"]


def test_too_few_steps_are_said(core: EngineCore, tmp_path: pathlib.Path, caplog):
    small.run(core, [(0, small_request(3))])
    core.close()
    assert traces(tmp_path) == []
    assert "no profile was written: it begins after 10 steps" in caplog.text


def test_a_profiler_that_fails_ends_no_request(core: EngineCore, core_of, tmp_path: pathlib.Path, caplog):
    expected = small.alone(core_of(**small.DETERMINISTIC), REQUEST).token_ids
    with jax.profiler.trace(tmp_path / "another"):  # only one can run at a time
        assert small.alone(core, REQUEST).token_ids == expected
    assert "the profile could not be begun" in caplog.text
    assert traces(tmp_path) == []


def test_a_directory_that_others_can_enter_is_refused(tmp_path: pathlib.Path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"--profile-dir must be yours and closed.*chmod 700"):
        profile.StepProfiler(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"--profile-dir must be a directory that can be made, but .*file gave: File exists"
    ):
        profile.StepProfiler(str(tmp_path / "file"))


def test_programs_keep_their_graphs_under_a_profiler():
    """XLA refuses an option that it does not have."""
    options = profile.profiled_compiler_options("gpu")
    assert options
    assert profile.profiled_compiler_options("cpu") == {}
    for compiler_options, is_known in ((options, True), (dict.fromkeys((f"{name}x" for name in options), True), False)):
        programs = Executables(forbid_compile=False, compiler_options=compiler_options)
        programs.lower("a", lambda x: x + 1, jax.ShapeDtypeStruct((), "float32"))
        with contextlib.nullcontext() if is_known else pytest.raises(CompileError, match="No such"):
            programs.compile(["a"])
        assert programs.is_ready("a") == is_known
