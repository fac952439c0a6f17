"""Programs in a folder: a start with them compiles nothing, and one for which they were not made is refused by name."""

import contextlib
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.constrained.run import kernel_cache
from jsg.engine import startup
from jsg.engine.core import EngineCore
from jsg.engine.device import program_store
from jsg.engine.device.executables import Executables, no_compilation_cache
from jsg.engine.device.memory import MemoryPlan
from jsg.engine.precompile import precompile
from jsg.errors import ConfigError, MemoryPlanError
from jsg.types import Request, SamplingParams
from tests.engine import small

PLAN = MemoryPlan(
    limit_bytes=9, weights_bytes=1, temporary_bytes=1, table_bytes=1, reserve_bytes=1, pool_tokens=1, bytes_per_token=1
)
MADE_FOR = {"jsg": "1", "--tp-size": "1"}
NUMBERS = jax.ShapeDtypeStruct((3,), jnp.float32)


def double(x: jax.Array) -> dict[str, jax.Array]:
    return {"twice": x * 2}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with one program."""
    programs = Executables(forbid_compile=False)
    programs.declare("double", double, NUMBERS)
    with no_compilation_cache():
        programs.compile(["double"])
    program_store.save(tmp_path / "out", {"double": programs.compiled("double")}, MADE_FOR, PLAN)
    return tmp_path / "out"


def test_a_program_is_called_that_was_neither_traced_nor_compiled(folder: pathlib.Path):
    store = program_store.open_store(folder)
    assert store.plan == PLAN
    store.check(MADE_FOR)
    store.load_kernels()
    traces = []
    programs = Executables(forbid_compile=True, store=store)
    programs.declare("double", traces.append, NUMBERS)
    programs.lower_all()
    assert programs.output_shape("double")["twice"].shape == (3,)
    programs.compile(["double"])
    assert programs("double", np.ones(3, np.float32))["twice"].tolist() == [2, 2, 2]
    assert (traces, programs.num_lowered, programs.num_compiled) == ([], 0, 0)
    assert (programs.num_loaded, programs.num_pending) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--tp-size": "2"}, "compiled for --tp-size 1, but this start has 2"),
        ({"--new": "2"}, "--new missing, but this start has 2"),
    ],
)
def test_a_start_that_differs_is_refused_by_the_name_of_the_difference(folder: pathlib.Path, changes, said: str):
    with pytest.raises(ConfigError, match=said):
        program_store.open_store(folder).check(MADE_FOR | changes)


def test_what_was_changed_or_is_missing_is_not_run(folder: pathlib.Path):
    store = program_store.open_store(folder)
    with pytest.raises(ConfigError, match=r"must hold 'other' .* lacks it"):
        store.load("other", jax.devices())
    file = folder / store.files["'double'"][0]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match="checksum of 0000 is another"):
        store.load("double", jax.devices())
    file.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        store.load("double", jax.devices())


@pytest.mark.parametrize("name", ["", program_store.MANIFEST])
def test_what_others_can_write_to_is_refused(folder: pathlib.Path, name: str):
    (folder / name).chmod(0o722)
    with pytest.raises(ConfigError, match="nobody else may write to it"):
        program_store.open_store(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "is damaged") for text in ("", "{", "[]", "{}", "[" * 100_000, '{"format": 2, "plan": {}}')),
        ('{"format": 1}', "another version"),
        (None, r"cannot be read \(No such file or directory\)"),
    ],
)
def test_any_other_folder_is_refused(tmp_path: pathlib.Path, text: str | None, said: str):
    if text is not None:
        (tmp_path / program_store.MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match=rf"{said}.*run jsg compile again"):
        program_store.open_store(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        program_store.open_store(tmp_path / program_store.MANIFEST / "x")


def test_a_damaged_manifest_is_refused_in_plain_words(folder: pathlib.Path):
    """Wherever one of its values is missing or of another type, or a byte that is no text."""
    file = folder / program_store.MANIFEST
    whole = json.loads(file.read_text())

    def places(value, path=()):
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, each in items:
            yield from places(each, (*path, key))

    for path in list(places(whole))[1:]:
        for change in ("missing", None, [], {}, "x", -1.5):
            damaged = json.loads(file.read_text())
            *way, last = path
            holder = functools.reduce(lambda each, key: each[key], way, damaged)
            if change != "missing":
                is_same_type = type(holder[last]) is type(change)
                holder[last] = change
                if is_same_type:
                    continue  # a wrong value of the right type is for `check` and the checksums
            elif len(path) == 2 and path[0] in ("conditions", "programs"):
                continue  # one fewer
            else:
                del holder[last]
            file.write_text(json.dumps(damaged))
            with pytest.raises(ConfigError, match=r"is damaged; run jsg compile again"):
                program_store.open_store(folder)
            file.write_text(json.dumps(whole))
    file.write_bytes(file.read_bytes() + b"\xff")
    with pytest.raises(ConfigError, match="is damaged"):
        program_store.open_store(folder)


def test_a_folder_that_exists_is_left_alone(folder: pathlib.Path):
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match="must not exist yet"):
        program_store.check_new(folder)
    with pytest.raises(ConfigError, match="cannot be written"):
        program_store.save(folder, {}, MADE_FOR, PLAN)
    assert sorted(folder.iterdir()) == before
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_an_engine_starts_from_its_programs_alone(
    small_model: pathlib.Path,
    tmp_path: pathlib.Path,
    compile_cache_dir: str,
    monkeypatch: pytest.MonkeyPatch,
):
    sizes = {"max_running_requests": 1, "chunked_prefill_size": 8, "forbid_compile": False}
    config, out = small.make_config(small_model, compile_cache_dir, **sizes), str(tmp_path / "out")

    def start(**knobs: object) -> EngineCore:
        return EngineCore(small.make_config(small_model, compile_cache_dir, **sizes | knobs))

    request = Request(rid="r", input_ids=(2, 3, 4), sampling=SamplingParams(max_new_tokens=5))
    answers, stats = [], {}
    with small.few_variants():
        precompile(config, tmp_path / "out", lambda progress: None)
        assert kernel_cache.is_filled(pathlib.Path(compile_cache_dir) / "numba"), "grammars of a start wait for nothing"
        for programs in (None, out):
            with contextlib.closing(start(programs=programs)) as core:
                answers.append(small.run(core, [(0, request)]))
                stats = core.stats()
    assert answers[0] == answers[1]
    assert (stats["num_lowered"], stats["num_compiled"]) == (0, 0) and stats["num_loaded"] > 5
    with pytest.raises(ConfigError, match="compiled for --max-running-requests 1, but this start has 3"):
        start(programs=out, max_running_requests=3)
    with pytest.raises(ConfigError, match="but this start has 5000"):
        start(programs=out, max_total_tokens=5000)
    monkeypatch.setattr(startup, "usable_bytes", lambda *_: 1)
    with pytest.raises(MemoryPlanError, match="need more memory than there is"):
        start(programs=out)
