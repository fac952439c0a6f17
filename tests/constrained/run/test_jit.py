"""Kernels are compiled with what the installed numba has."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jsg.constrained import jit
from jsg.constrained.run import kernel_cache


def double(value: int) -> int:
    return 2 * value


def test_a_numba_without_the_private_options_still_compiles(monkeypatch: pytest.MonkeyPatch):
    given: list[dict[str, Any]] = []

    def njit(_: object, **options: Any) -> Callable[[Any], Any]:
        given.append(options)
        if options.keys() - {"nogil", "cache"}:
            raise KeyError("Unrecognized options")
        return lambda function: function

    fake = SimpleNamespace(njit=njit, config=SimpleNamespace(CACHE_DIR="here"))
    monkeypatch.setattr(jit, "_numba", lambda: fake)
    for decorate in (jit.compiled, jit.inner, jit.inlined):
        assert decorate(double)(4) == 8
        assert given[-1] == {"nogil": True, "cache": True} and "_nrt" in given[-2]
    assert fake.config.CACHE_DIR == "here"
    fake.config.CACHE_DIR = jit.NOWHERE
    jit.compiled(double)
    assert given[-1] == {"nogil": True, "cache": False}


def test_without_numba_a_kernel_is_the_function_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jit, "_numba", lambda: None)
    assert jit.compiled(double) is double and jit.inlined(double) is double


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


def test_numba_keeps_no_source_of_a_loaded_kernel():
    if not jit.has_numba():
        pytest.skip("no numba")
    kernel_cache.load()
    from jsg.constrained.run import kernels

    compiled = [value for value in vars(kernels).values() if hasattr(value, "overloads")]
    libraries = [overload.library for value in compiled for overload in value.overloads.values()]
    assert len(libraries) > 5
    assert [library._shared_module for library in libraries] == [None] * len(libraries)
