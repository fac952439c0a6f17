"""`bench.tpu`: what is read off programs for TPUs, and how long their schedules take. No libtpu is needed."""

import itertools
import json
from pathlib import Path

import pytest

from bench.tpu import __main__ as program
from bench.tpu import estimate as estimates
from bench.tpu.chips import CHIPS, HOP_S, exchange_seconds
from bench.tpu.compiling import Compiled
from bench.tpu.estimate import Estimate, Load, Tiles
from bench.tpu.program import (
    LEAST_CYCLES,
    MEMORY_SHARE,
    ROW_CYCLES,
    Kernel,
    Loop,
    Operation,
    loops,
    operations,
    seconds,
)

HLO = """
%fused_computation (a: bf16[64,4096]) -> bf16[64,4096] {
  %inside = bf16[64,4096]{1,0} multiply(%a, %a)
}

%again (p: s32[]) -> s32[] {
  %twice = f32[64]{0:S(1)} fusion(), kind=kLoop, backend_config={"estimated_cycles":"30"}
}

%below (p: s32[]) -> pred[] {
  %most = s32[]{:T(128)} constant(4)
}

ENTRY %main.1 (p: bf16[1024,4096], q: bf16[4096,512]) -> bf16[64,512] {
  %table = bf16[1024,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %kernel = bf16[4096,512]{1,0:T(8,128)(2,1)} parameter(1)
  %ids = s32[64]{0:T(128)S(1)} fusion(%table), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"2120"}
  %rows = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} fusion(%table, %ids), kind=kCustom, calls=%g
  %slice-start = ((bf16[4096,512]{1,0}), bf16[4096,512]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%kernel)
  %norm = (f32[64]{0:S(1)}, bf16[64,4096]{1,0:S(1)}) fusion(%rows), kind=kLoop, backend_config={"estimated_cycles":"50"}
  %left = bf16[64,4096]{1,0:S(1)} get-tuple-element(%norm), index=1
  %slice-done = bf16[4096,512]{1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start)
  %made = bf16[64,512]{1,0} fusion(%left, %slice-done), kind=kOutput, backend_config={"estimated_cycles":"700"}
  %psum = bf16[64,512]{1,0:S(1)} all-reduce(%made), channel_id=1
  %pool = bf16[9,2,2,64,128]{4,3,2,1,0} parameter(2)
  %attention_of_1.2 = bf16[64,512]{1,0:S(1)} custom-call(%psum, %pool), custom_call_target="tpu_custom_call"
  %seen = bf16[64,512]{1,0} custom-call(%attention_of_1.2), custom_call_target="ConcatBitcast"
  %scalar = s32[]{:T(128)S(6)} convert(%ids)
  %times = (s32[], bf16[64,512]{1,0}) while(%ids), condition=%below, body=%again
  ROOT %out = bf16[1024,4096]{1,0} fusion(%table, %ids, %left), kind=kCustom, calls=%s
}
"""
BUNDLES = """
= control target key start
LB: loop body
   0x10 LB: > { first }
   0x11   : > { second }
   0x12 LB: >> { third }
   0x14   : >> { fourth }
   0x20 PF: > { behind the inner loop }
   0x2f   : > { x }
   0x30 PF:  { behind both }
"""


def test_operations_cost_what_their_program_says():
    ids, rows, copy, norm, wait, product, exchange, attention, loop, scatter = operations(HLO)
    assert ids == Operation("ids", "elementwise", 2120, 1024 * 4096 * 2)
    assert rows == Operation("rows", "elementwise", LEAST_CYCLES + 64 * ROW_CYCLES, 64 * 4 + 64 * 4096 * 2)
    assert copy == Operation("slice-start", "copy", 0, 4096 * 512 * 2), "and neither its source nor its flag"
    assert norm == Operation("norm", "elementwise", 50, 0), "all of it lies in vector memory"
    assert wait == Operation("slice-done", "wait", of="slice-start")
    assert product == Operation("made", "product", 700, 64 * 512 * 2)
    assert exchange == Operation("psum", "exchange", 0, 64 * 512 * 2, "all-reduce")
    assert attention == Operation("attention_of_1.2", "kernel", of="attention_of_1"), "pool and queries are not counted"
    assert loop == Operation("times", "loop", body=(Operation("twice", "elementwise", 30),) * 4)
    assert scatter == Operation("out", "elementwise", LEAST_CYCLES + 64 * ROW_CYCLES, 64 * 4 + 64 * 4096 * 2)


def test_loops_have_the_bundles_of_those_inside_them():
    assert loops(BUNDLES) == [Loop(0, 0x31), Loop(1, 0x31 - 0x10), Loop(2, 0x20 - 0x12)]


def test_memory_works_beside_the_core_until_it_is_awaited():
    chip = CHIPS["v6e"]
    byte_s, cycle_s = 1 / (MEMORY_SHARE * chip.bytes_per_s), 1 / chip.clock_hz
    copy, wait = Operation("c", "copy", hbm_bytes=10**6), Operation("w", "wait", of="c")
    attention, product = Operation("a", "kernel"), Operation("p", "product", 1000, 0)

    def time(core_s: float, num_bytes: float) -> dict[str, float]:
        found = seconds([copy, attention, wait, product], chip, 1, lambda _: ("attention", core_s, num_bytes))
        return {kind: each for kind, each in found.items() if each}

    assert time(1.0, 0) == pytest.approx({"attention": 1.0, "product": 1000 * cycle_s}), "the copy is hidden"
    hidden = 1e-7
    assert time(hidden, 0)["wait"] == pytest.approx(10**6 * byte_s - hidden)
    assert time(0.0, 10**6)["attention"] == pytest.approx(2 * 10**6 * byte_s), "behind the copy, which began before"


def test_loops_of_kernels_run_as_often_as_the_load_says():
    """Three programs, four tiles in all, of 600, 500, 512 and 513 keys: 6 blocks, of which two have 2 pages and one."""
    kernel = Kernel(3, tuple(Loop(*each) for each in [(0, 900), (1, 800), (2, 300), (3, 200), (4, 30), (4, 10)]))
    tiles = Tiles(1, (600, 500, 512, 513))
    bundles = 3 * (800 - 300) + 4 * (300 - 200) + 6 * (200 - 40) + 3 * 40
    assert tiles.cost("attention_of_1", kernel, 64) == ("attention", bundles, 35 * 64)
    assert tiles.cost("attention_of_64", kernel, 64) == ("attention", 3 * 500, 0), "no tile of this size is real"
    writing = Kernel(1, (Loop(0, 500), Loop(1, 200), Loop(1, 10)))
    assert tiles.cost("write_by_head", writing, 64) == ("kernel", 4 * 200 + 300, 2 * 4 * 16)
    assert Tiles(64, (64,)).cost("write_by_head", writing, 64) == ("kernel", 4 * 200 + 300, 2 * 4 * 16)
    assert tiles.cost("rotated", writing, 64) == ("kernel", (500 - 200) + 4 / 16 * 200, 0)
    assert tiles.cost("other", Kernel(7, (Loop(0, 90), Loop(1, 50))), 64) == ("kernel", 7 * 50, 0)
    with pytest.raises(NotImplementedError, match="nobody has said how often the loops of other run"):
        tiles.cost("other", kernel, 64)


def test_an_exchange_goes_around_the_ring_both_ways():
    chip = CHIPS["v6e"]
    wire = 0.75 * 10**6 / (2 * chip.link_bytes_per_s)
    assert exchange_seconds(chip, "all-gather", 10**6, 4) == pytest.approx(wire + 2 * HOP_S)
    assert exchange_seconds(chip, "all-reduce", 10**6, 4) == pytest.approx(2 * (wire + 2 * HOP_S))
    assert exchange_seconds(chip, "all-reduce", 10**6, 1) == 0


def test_further_layers_are_like_the_second():
    def compiled(layers: int) -> Compiled:
        lines = [
            f'%p{index} = f32[8]{{0:S(1)}} fusion(), kind=kOutput, x="estimated_cycles":"1750"'
            for index in range(layers)
        ]
        text = "\n".join(["ENTRY %main () -> f32[8] {", *(f"  {line}" for line in lines), "}"])
        return Compiled(text, {}, 64, 0)

    estimate, load = Estimate("v6e", "Qwen3-8B", 4, Path()), Load(64, 1024, 1024)
    kinds = [("decode", 64), ("extend", estimates.PROMPT_TOKENS), ("sample", 64)]
    estimate._programs = {(kind, layers): compiled(layers) for kind, layers in itertools.product(kinds, (1, 2))}
    assert estimate.step(load) == pytest.approx({"product": 37e-6}), "36 layers, and the choice of tokens"
    assert estimate.prefill(load) == pytest.approx({"product": 36e-6})
    assert estimate.rate(load) == pytest.approx(64 * 1024 / (1024 * 37e-6 + 64 * 1024 * 36e-6 / 2048))


def test_the_bound_is_that_of_published_rates():
    """Of 8B on 4 v6e: weights without the embedding and 64 times 1536 tokens in a step, and the products of prompts."""
    estimate, load = Estimate("v6e", "Qwen3-8B", 4, Path()), Load(64, 1024, 1024)
    weights, tokens = 8.19e9 - 0.622e9, 64 * 1536 * 147_456
    step, prefill = (2 * weights + tokens) / (4 * 1638e9), 64 * 1024 * 2 * weights / (4 * 918e12)
    assert estimate.bound(load) == pytest.approx(64 * 1024 / (1024 * step + prefill), rel=0.02)
    assert estimate.fits(load) and not Estimate("v5e", "Llama-3-70B", 8, Path()).fits(load)
    assert not Estimate("v5p", "Llama-3-8B", 8, Path()).fits(load), "a host has four chips"


def test_published_figures_name_their_source():
    sources = json.loads(program.PUBLISHED.read_text(encoding="utf-8"))
    assert all(each["url"].startswith("https://") and each["date"] and each["how"] for each in sources.values())
    figures = [figure for each in sources.values() for figure in each["figures"]]
    assert {figure["chip"] for figure in figures} <= set(CHIPS)
    assert {figure["model"] for figure in figures} <= set(estimates.MODELS)
    estimate = Estimate("v6e", "Qwen3-8B", 4, Path())
    assert dict(program.published(estimate, Load(64, 1024, 1024)))["sgl-jax 0.1.0"] == 5297
