"""Compiled programs: in place on donated pools, never a compile after warm-up, a stand-in until the rest is ready."""

import os
import pathlib
import re
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.engine.core import EngineCore
from jsg.engine.device.compile_errors import compile_error
from jsg.engine.device.executables import Executables, use_compilation_cache
from jsg.errors import CompileError, ConfigError, ForbiddenCompileError
from jsg.kernels_pallas import paged_decode, tuning
from jsg.sched.buckets import BucketKey, Phase
from jsg.types import Request, SamplingParams
from tests.engine import small


@pytest.fixture
def core(core_of) -> EngineCore:
    return core_of()


def test_the_forward_pass_writes_its_pools_in_place(core: EngineCore):
    state = core._runner.replica.state
    pool_bytes = sum(x.nbytes for x in jax.tree.leaves(state.pool))
    shape = "f32[" + ",".join(map(str, state.pool.layers[0][0].shape)) + "]"
    buckets = core._runner._buckets
    for key in (buckets.decode[0], buckets.extend[0]):
        compiled = core._executables.compiled(("forward", key))
        analysis = compiled.memory_analysis()
        assert analysis is not None and analysis.alias_size_in_bytes >= pool_bytes + state.page_table.nbytes
        for operation in ("copy", "convert"):
            copies = re.findall(rf"= {re.escape(shape)}\S* {operation}\(", compiled.as_text())
            assert not copies, f"{key} has a {operation} of a whole pool"


def test_a_step_keeps_the_pool_where_it_is(core: EngineCore):
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(core._runner.replica.state.pool)]
    small.run(core, [(0, Request(rid="r", input_ids=(2, 3, 4), sampling=SamplingParams(max_new_tokens=5)))])
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(core._runner.replica.state.pool)] == before


def test_no_two_steps_share_a_packed_array(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    """JAX may still read a numpy array after the call that it was given to has returned."""
    seen: list[np.ndarray] = []
    call = Executables.__call__

    def spy(self: Executables, name: tuple, *args: object) -> object:
        seen.extend(arg for arg in args if isinstance(arg, np.ndarray))
        return call(self, name, *args)

    monkeypatch.setattr(Executables, "__call__", spy)
    requests = [(i, Request(rid=f"r{i}", input_ids=(2, 3, 4 + i), sampling=SamplingParams())) for i in range(3)]
    small.run(core, requests)
    assert len(seen) > 100
    bases = {array.__array_interface__["data"][0] for array in seen if array.size}
    assert len(bases) == sum(array.size > 0 for array in seen)
    assert not any(np.shares_memory(array, core.scheduler.table.pages) for array in seen)


def test_a_program_is_lowered_once_and_called_without_tracing():
    traces = []

    def double(x: jax.Array) -> jax.Array:
        traces.append(x)
        return x * 2

    programs = Executables(forbid_compile=True)
    for _ in range(2):
        programs.lower("double", double, jax.ShapeDtypeStruct((3,), jnp.float32))
    programs.compile(["double"])
    programs.seal()
    assert programs("double", np.ones(3, np.float32)).tolist() == [2, 2, 2]
    assert (len(traces), programs.num_lowered, programs.num_compiled) == (1, 1, 1)
    with pytest.raises(TypeError):
        programs("double", np.ones(4, np.float32))
    with pytest.raises(ForbiddenCompileError, match="triple"):
        programs.lower("triple", double, jax.ShapeDtypeStruct((3,), jnp.float32))


def test_the_rest_is_lowered_and_compiled_in_the_background_and_a_failure_is_logged(caplog: pytest.LogCaptureFixture):
    def broken(x: jax.Array) -> jax.Array:
        raise ArithmeticError("no trace")

    programs = Executables(forbid_compile=False)
    for name, fn in (("a", lambda x: x + 1), ("b", broken), ("c", lambda x: x + 2)):
        programs.declare(name, fn, jax.ShapeDtypeStruct((), jnp.float32))
    assert (programs.num_lowered, programs.num_pending) == (0, 3)
    programs.compile_rest_in_background()
    programs._thread.join()  # pyright: ignore[reportOptionalMemberAccess]
    assert [programs.is_ready(name) for name in "abc"] == [True, False, True]
    assert (programs.num_lowered, programs.num_pending) == (2, 1)
    assert "compiling b in the background failed" in caplog.text


SMEM = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 139264, available: 101376, context: []\nmore"


def refuse_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(SMEM)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)


def test_what_cannot_be_lowered_or_compiled_names_program_kernels_and_device(monkeypatch: pytest.MonkeyPatch):
    def refused(x: jax.Array) -> jax.Array:
        paged_decode.default_sizes(x, jnp.zeros((2, 1, 1, 72)))
        return x

    programs = Executables(forbid_compile=False)
    programs.declare("step", refused, jax.ShapeDtypeStruct((2, 4, 72), jnp.float32))
    toaster = tuning.class_of(None)._replace(shared_bytes=99)
    monkeypatch.setattr(tuning, "class_of", lambda _: toaster)
    rule = (
        r"the program step \(kernels: paged_decode\) must compile for the cpu, but is refused: a program has 99 bytes"
    )
    with pytest.raises(CompileError, match=rule):
        programs.compile(["step"])
    monkeypatch.undo()
    refuse_to_compile(monkeypatch)
    programs.declare("other", lambda x: x + 1, jax.ShapeDtypeStruct((2,), jnp.float32))
    rule = r"the program other must compile for the cpu, .* requested 139264, available: 101376, context: \[\]; try"
    with pytest.raises(CompileError, match=rule) as raised:
        programs.compile(["other"])
    assert "more" not in str(raised.value) and "the memory plan is not the cause" in str(raised.value)


TRITON = '@__gpu$xla.gpu.triton(%0) {mhlo.backend_config = {ir = "ML", name = "ragged_paged_attention"}}'
MOSAIC = '@tpu_custom_call(%0) {backend_config = "{\\22body\\22: ML}", kernel_name = "ragged_paged_attention"}'


@pytest.mark.parametrize("call", [TRITON, MOSAIC])
def test_the_kernels_of_a_program_are_found(call: str):
    class Lowered:
        def as_text(self) -> str:
            return f"mesh @m <name = 1>\n%1 = stablehlo.custom_call {call}\n"

    error = compile_error(("forward", 1), jax.errors.JaxRuntimeError(SMEM), "L4", Lowered())  # pyright: ignore[reportArgumentType]
    assert "the program ('forward', 1) (kernels: ragged_paged_attention) must compile for the L4" in str(error)


def test_a_compiler_that_finds_no_memory_to_try_kernels_in_is_left_more():
    error = compile_error("step", jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying"), "L4")
    assert str(error).endswith("; lower --mem-fraction-static, which leaves memory to try kernels in")
    hbm = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (18.64G) exceeds"
    error = compile_error("step", jax.errors.JaxRuntimeError(hbm), "TPU v5 lite")
    assert str(error).endswith("; lower --mem-fraction-static, which leaves more for a step, or --chunked-prefill-size")


@pytest.mark.slow
def test_a_start_that_cannot_compile_is_refused_with_a_sentence(
    small_model: pathlib.Path, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch
):
    refuse_to_compile(monkeypatch)
    with small.few_variants(), pytest.raises(CompileError, match="the memory plan is not the cause"):
        EngineCore(small.make_config(small_model, compile_cache_dir))


def test_what_cannot_be_compiled_in_the_background_is_logged_without_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    refuse_to_compile(monkeypatch)
    programs = Executables(forbid_compile=False)
    programs.declare("a", lambda x: x + 1, jax.ShapeDtypeStruct((), jnp.float32))
    programs.compile_rest_in_background()
    programs._thread.join()  # pyright: ignore[reportOptionalMemberAccess]
    assert "a larger program stands in: the program a must compile" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_program_is_lowered_once_by_whichever_thread_comes_first():
    traces = []

    def slow(x: jax.Array) -> jax.Array:
        traces.append(x)
        time.sleep(0.05)
        return x * 2

    programs = Executables(forbid_compile=False)
    programs.declare("slow", slow, jax.ShapeDtypeStruct((), jnp.float32))
    with ThreadPoolExecutor(4) as pool:
        lowered = list(pool.map(programs._lower_one, ["slow"] * 4))
    assert len(traces) == programs.num_lowered == 1
    assert all(each is lowered[0] for each in lowered)


def test_what_was_lowered_is_not_kept_alive_once_it_is_compiled():
    programs = Executables(forbid_compile=True)
    programs.lower("a", lambda x: x + 1, jax.ShapeDtypeStruct((3,), jnp.float32))
    watched = weakref.ref(programs._lower_one("a")._lowering)  # pyright: ignore[reportOptionalMemberAccess]
    assert watched() is not None
    programs.compile(["a"])
    assert watched() is None
    programs.seal()
    programs.lower_all()
    programs.compile(["a"])
    assert programs.output_shape("a").shape == (3,)
    assert (programs.num_lowered, programs.num_compiled, programs.num_pending) == (1, 1, 0)


def test_what_was_declared_is_not_kept_alive_once_it_is_lowered():
    programs, array = Executables(forbid_compile=False), jnp.ones(3)
    watched = weakref.ref(array)
    programs.lower("a", lambda x: x + 1, array)
    del array
    assert watched() is None
    assert programs.argument_shapes("a")[0].shape == (3,)


def test_a_shape_that_is_not_compiled_yet_rounds_up_to_one_that_is(core: EngineCore):
    request = Request(rid="r", input_ids=(2, 3, 4), sampling=SamplingParams(max_new_tokens=6, temperature=0))
    expected = small.alone(core, request).token_ids
    declared, name = core._executables._declared, ("forward", BucketKey(Phase.DECODE, 1, 1))
    removed = declared.pop(name)
    assert not core._executables.is_ready(name)
    try:
        assert small.alone(core, request).token_ids == expected
    finally:
        declared[name] = removed


def test_every_essential_program_exists_and_stands_in_for_every_batch(core: EngineCore):
    runner, programs = core._runner, core._executables
    essential = set(runner.programs.essential())
    assert essential <= set(programs.names())
    declared, programs._declared = programs._declared, {n: x for n, x in programs._declared.items() if n in essential}
    try:
        outcomes = small.run(core, small.traffic(3, count=8))
        assert all(outcome.finish for outcome in outcomes.values())
    finally:
        programs._declared = declared


def test_programs_of_some_kinds_are_dropped_and_declared_anew():
    programs = Executables(forbid_compile=False)
    names = [("forward", 8), ("sample", 8), ("copy_slots",)]
    for name in names:
        programs.declare(name, lambda x: x + 1, jax.ShapeDtypeStruct((3,), jnp.float32))
    programs.compile(names)
    programs.clear({"forward"})
    assert programs.names() == names[1:] and programs.num_compiled == programs.num_in_order == 2
    programs.declare(names[0], lambda x: x + 1, jax.ShapeDtypeStruct((2,), jnp.float32))
    programs.compile(names)
    assert programs.num_in_order == 3 and programs(names[0], np.zeros(2, np.float32)).shape == (2,)
    assert len(set(programs._order.values())) == 3


def test_the_compile_cache_must_be_ours_alone(tmp_path: pathlib.Path):
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="700"):
        use_compilation_cache(str(directory))
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    try:
        use_compilation_cache(str(tmp_path / "made"))
        assert os.stat(tmp_path / "made").st_mode & 0o777 == 0o700
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
