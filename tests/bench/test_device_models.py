"""The parts of `bench.device` for experts, 8-bit kernels and images: they check a result before they time it.

Some tests make some results wrong, so that they see both sides. One of them, of a kernel without its scale, is fast:
all parts compare with the same code, and what is costly is to compile theirs.
"""

import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from bench import attention_check
from bench.device import encoder, experts, few_bits, kernels, quantised, states
from bench.device.correctness import Correctness
from bench.device.events import Part
from bench.device.plan import PLANS, TRIAL, Plan
from bench.report import ROOT
from bench.shapes import write_model
from jsg.engine.device import step
from jsg.kernels_pallas import ops, tpu, vmem_penalties
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model
from tests.kernels_pallas.definition import QUICKLY


class Noted(Part):
    """A part of the trial plan in this process, and what it has noted."""

    def __init__(self, folder: pathlib.Path):
        task = {"part": "steps", "plan": TRIAL.as_json(), "rates": [1e9, 1e12], "samples": 1, "folder": str(folder)}
        self._noted = io.StringIO()
        super().__init__(task | {"seconds": 600, "started_at": time.time()}, self._noted)

    def figures(self, kind: str) -> list[dict[str, Any]]:
        """The facts of all figures of this kind."""
        noted = [json.loads(line) for line in self._noted.getvalue().splitlines()]
        assert [event for event in noted if "figure" not in event] == []
        return [event["figure"]["facts"] for event in noted if event["figure"]["facts"]["kind"] == kind]


@pytest.fixture
def part(tmp_path: pathlib.Path) -> Noted:
    return Noted(tmp_path)


def check_floors(figures: list[dict[str, Any]]) -> None:
    assert all(figure["floor"] > 0 and figure["of_floor"] > 0 and figure["num_bytes"] > 0 for figure in figures)


def test_attention_is_compared_by_the_kernel_of_a_tpu_itself(monkeypatch: pytest.MonkeyPatch):
    """And not by the reference, in pools by head, with pages that the kernel takes."""
    case = next(case for case in attention_check.BATCHES if case.name == "mixed")
    how = {"heads": 4, "kv_heads": 2, "head_dim": 64, "implementation": "tpu"}
    with pltpu.force_tpu_interpret_mode():
        assert attention_check.largest_error(case, "float32", **how) < 1e-5
        monkeypatch.setattr(tpu, "paged_attention", lambda queries, *_, **options: jnp.zeros_like(queries))
        other = how | {"head_dim": 128}  # else the program is there already
        assert attention_check.largest_error(case, "float32", **other) > 0.05


def test_penalties_are_compared_by_the_kernel_of_a_tpu_itself(part: Noted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "best_implementation", lambda: "tpu")
    with mock.patch.object(vmem_penalties, "penalised", side_effect=vmem_penalties.penalised) as kernel:
        kernels._check_penalties(part, Correctness(part))
    kernel.assert_called_once()
    assert [error["is_right"] for error in part.figures("error")] == [True]


@pytest.mark.slow
def test_experts_are_compared_and_timed(part: Noted):
    experts.measure(part)
    assert [error["is_right"] for error in part.figures("error")] == [True] * 8
    assert [figure["tokens"] for figure in part.figures("expert-routes")] == [24]
    products = part.figures("experts")
    assert [(figure["side"], figure["quantization"]) for figure in products] == [
        (side, quantization) for side in ("up", "down") for quantization in ("none", "int8", "fp8")
    ]
    check_floors(products)
    exact, *small = (figure["num_bytes"] for figure in products[:3])
    assert small == [exact / 4] * 2
    assert exact == 4 * 64 * 96 * 4, "24 tokens choose all of four experts"


@pytest.mark.slow
def test_a_product_of_experts_that_is_wrong_in_one_row_is_told(part: Noted, monkeypatch: pytest.MonkeyPatch):
    right = ops.grouped_matmul

    def wrong(rows, kernels, sizes, **options):
        out = right(rows, kernels, sizes, **options)
        is_down = out.shape[1] == 64
        return out.at[sizes[0]].add(0.1) if is_down else out  # the first row of the second group

    monkeypatch.setattr(ops, "grouped_matmul", wrong)
    monkeypatch.setattr(experts, "STORED", {})
    monkeypatch.setattr(experts, "_measure_routes", lambda *_: None)
    with pytest.raises(ArithmeticError, match="wrong on this device: products of 24 tokens' experts, down, float32"):
        experts.measure(part)
    assert [error["is_right"] for error in part.figures("error")] == [True, False]
    check_floors(part.figures("experts"))


def test_a_choice_that_is_wrong_is_told(part: Noted, monkeypatch: pytest.MonkeyPatch):
    right = ops.expert_routes
    monkeypatch.setattr(experts, "_measure_products", lambda *_: None)
    monkeypatch.setattr(ops, "expert_routes", lambda logits, choice: right(-logits, choice))
    with pytest.raises(ArithmeticError, match="places that are others"):
        experts.measure(part)


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.slow), 300])
def test_the_definition_of_routes_is_that_of_the_reference(num_tokens: int):
    logits = np.random.default_rng(num_tokens).normal(size=(num_tokens, 8)).astype(np.float32)
    expected = ops.expert_routes(jnp.asarray(logits), ChoiceSpec(per_token=2), implementation="reference")
    weights, *whole = experts.routes_in_float64(logits.astype(np.float64), 2)
    np.testing.assert_allclose(weights, expected.weights, rtol=1e-5)
    assert [np.array_equal(*pair) for pair in zip(whole, expected[1:], strict=True)] == [True] * 3


@pytest.mark.slow
def test_kernels_in_8_bits_are_compared_and_timed(part: Noted):
    quantised.measure(part)
    assert [error["is_right"] for error in part.figures("error")] == [True] * 3
    figures = part.figures("quantised")
    assert [(figure["quantization"], figure["rows"]) for figure in figures] == [("none", 4), ("int8", 4), ("fp8", 4)]
    check_floors(figures)
    assert [figure["num_bytes"] for figure in figures] == [4 * 3 * 128 * 256, *[3 * 128 * 256] * 2]


def test_a_kernel_without_its_scale_is_told(part: Noted, monkeypatch: pytest.MonkeyPatch):
    def without(x, kernel):
        return x @ kernel.values.astype(x.dtype).reshape(len(kernel.values), -1)

    right = quantised.project
    monkeypatch.setattr(quantised, "project", lambda x, k: right(x, k) if isinstance(k, jax.Array) else without(x, k))
    with pytest.raises(ArithmeticError, match=r"products of 4 rows, int8: error, .*float8_e4m3fn: error$"):
        quantised.measure(part)
    assert [error["is_right"] for error in part.figures("error")] == [True, False, False]
    check_floors(part.figures("quantised"))


def as_an_accelerator(part: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels for NVIDIA, in interpret mode."""
    monkeypatch.setattr(ops, "best_implementation", lambda: "triton")
    part.plan = dataclasses.replace(TRIAL, dtype="bfloat16", product_rows=(1,), expert_tokens=(2,))


@pytest.mark.slow
def test_kernels_in_few_bits_are_compared_and_timed(part: Noted, monkeypatch: pytest.MonkeyPatch):
    as_an_accelerator(part, monkeypatch)
    few_bits.measure(part)
    names = ["none", *few_bits.MEASURED]
    figures = part.figures("few-bits")
    assert [figure["quantization"] for figure in figures if "rows" in figure] == [*names[:3], "int8 by XLA", *names[3:]]
    assert [figure["quantization"] for figure in figures if "tokens" in figure] == [*names[:2], *names[3:]]
    assert [error["is_right"] for error in part.figures("error")] == [True] * len(figures)
    check_floors(figures)
    exact, int4 = (
        figure["num_bytes"] for figure in figures if figure["quantization"] in ("none", "int4") and "rows" in figure
    )
    assert int4 == exact * 4.5 / 16


def test_a_scale_that_is_too_large_is_told(part: Noted, monkeypatch: pytest.MonkeyPatch):
    as_an_accelerator(part, monkeypatch)
    monkeypatch.setattr(few_bits, "MEASURED", {"AWQ": few_bits.MEASURED["AWQ"]})
    right = ops.matmul
    monkeypatch.setattr(ops, "matmul", lambda x, k, *how: right(x, k._replace(scale=2 * k.scale), *how))
    monkeypatch.setattr(few_bits, "_experts", lambda *_: None)
    with pytest.raises(ArithmeticError, match="wrong on this device: product of 1 rows, AWQ: error"):
        few_bits.measure(part)
    assert [error["is_right"] for error in part.figures("error")] == [True, False]


@pytest.mark.slow
def test_linear_attention_is_compared_and_timed(part: Noted, monkeypatch: pytest.MonkeyPatch):
    """With the kernels for NVIDIA, in interpret mode: rows of each rule, and prompts in both types of a card."""
    monkeypatch.setattr(ops, "best_implementation", lambda: "triton")
    monkeypatch.setattr(states, "options", lambda: QUICKLY)
    part.plan = dataclasses.replace(TRIAL, dtype="bfloat16", attention_calls=1, is_for_accelerators=True)
    states.measure(part)
    assert [error["is_right"] for error in part.figures("error")] == [True] * 12
    figures = part.figures("states")
    assert [(figure["rows"], figure["dtype"]) for figure in figures if figure["rule"] == "delta"] == [
        *((rows, "bfloat16") for rows in TRIAL.batches),
        (1, "bfloat16"),
        (1, "float16"),
    ]
    check_floors(figures)
    one, rows = (next(x["num_bytes"] for x in figures if x["rows"] == count) for count in (1, 4))
    assert rows == 4 * one == 4 * (2 * (4 * 2 * 16 * 16 + 4 * 2 * 64) + 2 * (64 + 32 + 32))


def test_a_state_that_is_not_written_is_told(part: Noted, monkeypatch: pytest.MonkeyPatch):
    right = ops.gated_delta

    def wrong(*given, implementation=None, **options):
        out, cache = right(*given, implementation="reference", **options)
        return out, cache if implementation else cache._replace(states=given[3].states)

    monkeypatch.setattr(ops, "gated_delta", wrong)
    rules = {"delta": TRIAL.states["delta"]}
    part.plan = dataclasses.replace(TRIAL, states=rules, batches=(1,), state_prompts=())
    with pytest.raises(ArithmeticError, match="wrong on this device: states of delta, 1 rows: error"):
        states.measure(part)


@pytest.mark.slow
def test_the_encoder_is_compared_and_timed(part: Noted):
    encoder.measure(part)
    figures = part.figures("encode")
    assert [(figure["is_video"], figure["count"]) for figure in figures] == [
        (is_video, count) for is_video in (False, True) for count in encoder.ENCODE_SIZES["cpu"]
    ]
    assert [error["is_right"] for error in part.figures("error")] == [True] * len(figures)
    check_floors(figures)


@pytest.mark.slow
def test_tiles_that_are_written_to_others_places_are_told(part: Noted, monkeypatch: pytest.MonkeyPatch):
    right = step.encode

    def wrong(merge, leaves, vision, pixels, rows, *, is_video):
        return right(merge, leaves, vision, pixels, rows if is_video else rows[::-1], is_video=is_video)

    monkeypatch.setattr(step, "encode", wrong)
    monkeypatch.setitem(encoder.ENCODE_SIZES, "cpu", (2,))
    with pytest.raises(ArithmeticError, match=r"device: encode 2 tiles: error, of what the rows are$"):
        encoder.measure(part)
    assert [error["is_right"] for error in part.figures("error")] == [False, True]
    check_floors(part.figures("encode"))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_floor_of_an_encoder_counts_each_kernel_once(tmp_path: pathlib.Path, plan: Plan):
    config = read_spec(write_model(tmp_path, plan.images))
    assert config.vision is not None
    tower = abstract_model(config, plan.dtype).vision
    expected = sum(node.size for path, node in nnx.iter_graph(tower) if path[-1:] == ("kernel",))
    cost = encoder.encode_cost(config.vision, config.hidden_size, 1, 4, is_video=False)
    assert cost.weight_bytes == expected
    assert cost.matmul_flops == pytest.approx(4 * 2 * config.vision.patches_per_tile * expected, rel=0.07)


OF_CHIPS = """
import io, json, sys, time
from bench.device import engine
from bench.device.events import Part
from bench.device.plan import TRIAL
task = {"part": "chips", "plan": TRIAL.as_json(), "rates": None, "samples": 1, "folder": sys.argv[1]}
engine.measure_chips(Part(task | {"seconds": 600, "started_at": time.time()}, sys.stdout))
"""


@pytest.mark.slow
def test_the_engine_runs_on_all_devices_of_a_host(tmp_path: pathlib.Path):
    """Here on two simulated ones, in a process of its own, because JAX starts with their number."""
    command = [sys.executable, "-c", OF_CHIPS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["figure"]["facts"] for line in done.stdout.splitlines() if line.startswith('{"figure"')]
    assert [facts["kind"] for facts in found] == ["chips", "chips", "chips-agreement"]
    assert [facts["devices"] for facts in found[:2]] == [2, 2]
    assert [facts["tokens_per_step"] for facts in found[:2]] == list(TRIAL.batches)
