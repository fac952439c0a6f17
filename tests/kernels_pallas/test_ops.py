"""Which implementation an op runs. That depends on the kernels of the device and, for attention, on the step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import attention_cases as cases
from jsg.kernels_pallas import cascade, falling_back, machine_code, ops, paged_decode, ragged_paged_attention, reference
from jsg.kernels_pallas.attention_block import Attended
from jsg.kernels_pallas.inputs import Scoring
from jsg.kernels_pallas.native import amx, attention, library
from jsg.window import Window
from tests.kernels_pallas.definition import named

KERNELS = {"paged_decode": paged_decode, "cascade": cascade, "ragged_paged_attention": ragged_paged_attention}


def has_run(case: cases.Case, monkeypatch: pytest.MonkeyPatch, implementation: str | None, **refused: Any) -> list[str]:
    """Which of the kernels and the reference were traced, in their order; the options that they were given are right.

    Args:
        case: A batch; one in which all rows have one token makes a step without tiles.
        monkeypatch: Of the test.
        implementation: See `ops.paged_attention`.
        refused: What a kernel of this name raises.
    """
    arrays, traced = cases.make(case), []
    if all(new == 1 for _, new in case.rows):
        tiles = {name: value[:0] for name, value in arrays.inputs._asdict().items() if name.startswith("tile_")}
        arrays = dataclasses.replace(arrays, inputs=arrays.inputs._replace(**tiles))
    expected = {"scale": 0.5, "window": Window(7), "softcap": 3.0, "sinks": jnp.ones(case.heads)}

    def spy(name: str):
        def run(queries: jax.Array, *_: Any, **options: Any) -> Any:
            traced.append(name)
            assert all(options[option] is value for option, value in expected.items())
            if name in refused:
                raise refused[name]
            out = jnp.zeros_like(queries)
            return out if name == "reference" else Attended(out, out[..., 0])

        return run

    def native(queries: jax.Array, keys: Any, values: Any, inputs: Any, scoring: Scoring, sinks: Any) -> jax.Array:
        return spy("native")(queries, **scoring._asdict(), sinks=sinks).out

    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, spy(name))
    monkeypatch.setattr(reference, "paged_attention", spy("reference"))
    monkeypatch.setattr(attention, "paged_attention", native)
    cache = jnp.asarray(arrays.keys), jnp.asarray(arrays.values)
    out = jax.eval_shape(
        lambda queries, cache, inputs: ops.paged_attention(
            queries, cache, inputs, **expected, implementation=implementation
        ),
        arrays.queries,
        cache,
        arrays.inputs,
    )
    assert out.shape == arrays.queries.shape and out.dtype == arrays.queries.dtype
    return traced


@pytest.mark.parametrize(
    ("name", "kernel"), [("decode", "paged_decode"), ("shared", "cascade"), ("mixed", "ragged_paged_attention")]
)
def test_a_step_has_the_kernel_that_it_needs(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch):
    assert has_run(named(name), monkeypatch, "triton") == [kernel]
    monkeypatch.setitem(ops.BEST, "cpu", "triton")
    assert has_run(named(name), monkeypatch, None) == [kernel]


def test_a_cpu_runs_machine_code(monkeypatch: pytest.MonkeyPatch):
    assert has_run(named("mixed"), monkeypatch, None) == ["native"]


def test_without_a_kernel_for_the_device_the_reference_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(ops.BEST, "cpu")
    assert has_run(named("mixed"), monkeypatch, None) == ["reference"]


def test_what_a_kernel_refuses_goes_to_the_reference_unless_the_kernel_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    no = NotImplementedError("no")
    with pytest.raises(NotImplementedError, match="no"):
        has_run(named("decode"), monkeypatch, "triton", paged_decode=no)
    monkeypatch.setitem(ops.BEST, "cpu", "triton")
    monkeypatch.setattr(falling_back, "refusals", {})
    for _ in range(2):
        assert has_run(named("decode"), monkeypatch, None, paged_decode=no) == ["paged_decode", "reference"]
    assert falling_back.refusals == {"paged_attention": "no"}
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["paged_attention by 'reference', because 'triton' cannot do it: no"], "said once"


def test_an_implementation_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NotImplementedError, match=r"no implementation 'cuda'; there are 'triton', 'tpu', 'native' and"):
        has_run(named("mixed"), monkeypatch, "cuda")


@pytest.mark.parametrize(
    ("platform", "has_unit", "has_pairs", "expected"),
    [("cpu", True, False, True), ("cpu", False, True, True), ("cpu", False, False, False), ("gpu", True, True, False)],
)
def test_only_a_cpu_is_asked_how_it_multiplies_bfloat16(
    platform: str, has_unit: bool, has_pairs: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ops, "target_platform", lambda: platform)
    monkeypatch.setattr(amx, "is_available", lambda: has_unit)
    monkeypatch.setattr(library, "multiplies_pairs", lambda: has_pairs)
    assert machine_code.is_faster_in_bfloat16() is expected
