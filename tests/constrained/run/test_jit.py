"""Kernels are compiled with what the installed numba has."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jsg.constrained import ir, jit
from jsg.constrained.build.builder import build
from jsg.constrained.limits import LIMITS
from jsg.constrained.run import kernel_cache
from jsg.constrained.run.machine import Machine
from jsg.constrained.run.memory import Memory, new_memory
from jsg.constrained.tables import StaticTables
from tests.constrained.run.test_machine import compare
from tests.constrained.run.test_walk import check_walk


def double(value: int) -> int:
    return 2 * value


def test_a_numba_without_the_private_options_still_compiles(monkeypatch: pytest.MonkeyPatch):
    kernel_cache.load()
    given: list[dict[str, Any]] = []

    def njit(*_: object, **options: Any) -> Callable[[Any], Any]:
        given.append(options)
        if options.keys() - {"nogil", "cache", "pipeline_class"}:
            raise KeyError("Unrecognized options")
        dispatcher = SimpleNamespace(overloads={}, compile=lambda _: None, disable_compile=lambda: None)
        return lambda function: SimpleNamespace(**vars(dispatcher), get_overload=lambda _: function)

    fake = SimpleNamespace(njit=njit, config=SimpleNamespace(CACHE_DIR="here"))
    monkeypatch.setattr(jit, "_numba", lambda: fake)
    jit.compiled(double)
    assert given[-1].keys() == {"nogil", "pipeline_class"} and "_nrt" in given[-2]
    jit.Kernels(StaticTables, Memory)
    assert given[-1] == {"nogil": True, "cache": True} and "_nrt" in given[-2]
    assert fake.config.CACHE_DIR == "here"
    fake.config.CACHE_DIR = jit.NOWHERE
    jit.Kernels(StaticTables, Memory)
    assert given[-1] == {"nogil": True, "cache": False}


def test_without_numba_a_kernel_is_the_function_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jit, "_numba", lambda: None)
    assert jit.compiled(double) is double


def test_a_filled_cache_is_known_by_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not kernel_cache.is_filled(tmp_path)
    mark = kernel_cache._mark(tmp_path)
    kernel = mark.parent / "run_1" / "walk.nbi"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    mark.write_bytes(kernel_cache._digest(tmp_path))
    assert kernel_cache.is_filled(tmp_path)
    monkeypatch.setattr(jit, "_version", lambda: "another")
    assert not kernel_cache.is_filled(tmp_path), "kernels that have changed are compiled anew"
    monkeypatch.setattr(jit, "has_numba", lambda: False)
    assert kernel_cache.is_filled(tmp_path), "there is nothing to compile"


def test_numba_keeps_no_source_of_loaded_kernels(monkeypatch: pytest.MonkeyPatch):
    if not jit.has_numba():
        pytest.skip("no numba")
    kernel_cache.load()
    made: list[Any] = []
    njit = jit._njit
    monkeypatch.setattr(jit, "_njit", lambda *given, **options: made.append(njit(*given, **options)) or made[-1])
    jit.Kernels(StaticTables, Memory)
    assert [overload.library._shared_module for overload in made[0].overloads.values()] == [None]


def test_kernels_take_arrays_of_their_types_only():
    """A compiled kernel gets addresses, so it could not see that an array is another one."""
    kernel_cache.load()
    from jsg.constrained.run import kernels

    grammar = build(ir.Grammar("text", {"text": ir.literal("ab")}))
    memory = new_memory(grammar, LIMITS)
    for wrong in (memory.marks.astype(np.int32), memory.marks[::2], memory.marks[None]):
        with pytest.raises(AssertionError, match="an array of int64 with 1 axes is due"):
            kernels.run.record(memory._replace(marks=wrong))


def test_a_machine_gives_kernels_the_arrays_that_they_are_compiled_for(monkeypatch: pytest.MonkeyPatch):
    """Compiled kernels get addresses, so only this test can see that an operand is another array."""
    seen: set[str] = set()
    call = jit.Kernels.__call__

    def checked(self: jit.Kernels, kernel: Any, t: object, m: object, *operands: Any) -> int:
        hints = jit._hints(getattr(kernel, "py_func", kernel))
        kinds = [hint for name, hint in hints.items() if name not in ("t", "m", "return")]
        for operand, hint in zip(operands, kinds, strict=True):
            jit._words(operand, hint)
        seen.add(kernel.__name__)
        return call(self, kernel, t, m, *operands)

    monkeypatch.setattr(jit.Kernels, "__call__", checked)
    assert sum(compare(seed, num_walks=1, longest=6) for seed in range(6)) > 2
    assert sum(check_walk(seed, num_texts=1) for seed in range(6)) > 2
    letters = np.full((1, 256), -1, np.int16)
    letters[0, ord("a") : ord("z")] = 0
    machine = Machine(build(ir.Grammar("text", {"text": ir.Repeat(ir.ByteSet(((32, 126),)), 1, 1000)})))
    assert machine.is_dead(machine.start(), 10)
    machine.accepts_all(machine.start(), letters, 2)
    assert machine.text_room(machine.start(), letters, 2)[0] == 2
    assert not machine.forced_run(machine.start(), 4)
    machine.compact([])
    assert seen == {kernel.__name__ for kernel in jit.entries()}


@pytest.mark.slow
def test_the_log_says_once_that_kernels_are_compiled_and_where_they_are_kept(tmp_path: Path):
    """Somebody who runs their first schema waits for seconds, and Python shows nothing less than a warning."""
    program = (
        "import sys; from pathlib import Path; from jsg.constrained import jit; jit.use_kernel_cache(Path(sys.argv[1]))"
    )
    program += (
        "; from jsg.constrained.run import kernel_cache; kernel_cache.load(); print('scipy.linalg' in sys.modules)"
    )
    ran = [
        subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, second = (each.stderr for each in ran)
    assert re.fullmatch(rf"compiling the code .* takes 5 to 15 seconds .* kept in {tmp_path}/kernels-\w+\n", first)
    assert second == ""
    assert ran[1].stdout == "False\n", "numba loads far more than is needed to read them"
