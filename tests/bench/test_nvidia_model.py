"""What `bench.nvidia.model` reads off a compiled program, and its arithmetic. Nothing is compiled here."""

import json

import pytest

from bench.nvidia import model
from bench.nvidia.estimate import Compiled, Estimate, Load, _tile_flops, class_of
from bench.nvidia.rates import GAP_S, PEAK_TFLOPS, SHARES, START_S, seconds, speed_of
from bench.nvidia.work import Kind, Work, works
from jsg.engine.device.cards import NAMES
from jsg.sched.buckets import BucketKey

POOL_ELEMENTS = 1001 * 8 * 128
HLO = """
%fused_gather (param_0: bf16[32000,64]) -> bf16[8,64] {
  ROOT %gather.1 = bf16[8,64]{1,0} gather(%param_0, %param_1)
}

%gemm_computation (parameter_0: s8[64,96]) -> f32[4,8,96] {
  %dot.1 = f32[4,96,8]{1,2,0} dot(%convert.1, %multiply.1), lhs_batch_dims={0}
}

ENTRY %main (leaves_0: bf16[32000,64], leaves_1: s8[64,96]) -> bf16[8,96] {
  %table = bf16[32000,64]{1,0} parameter(0), metadata={op_name="leaves[0]"}
  %kernel = s8[64,96]{1,0} parameter(1), metadata={op_name="leaves[1]"}
  %other = bf16[96,64]{1,0} parameter(2), metadata={op_name="leaves[2]"}
  %keys = bf16[1001,1,8,128]{3,2,1,0} parameter(3), metadata={op_name="pool.layers[0][0]"}
  %view = s8[4,16,96]{2,1,0} bitcast(%kernel), metadata={op_name="leaves[1]"}
  %rows = bf16[8,64]{1,0} fusion(%table), kind=kLoop, calls=%fused_gather, metadata={op_name="gather"}
  %gemm = f32[4,8,96]{2,1,0} fusion(%view, %rows), kind=kCustom, calls=%gemm_computation, metadata={op_name="dot"}
  %call = (bf16[8,64]{1,0}, s8[33554432]{0}) custom-call(%gemm, %other), custom_call_target="__cublas$lt$matmul"
  %first = bf16[8,64]{1,0} get-tuple-element(%call), index=0
  %sum = bf16[8,64]{1,0} all-reduce(%first), replica_groups={{0,1}}
  %at = bf16[8,64]{1,0} custom-call(%sum, %keys), backend_config={num_stages = 2 : i32, name = "_decode_kernel"}
}
"""


def test_launches_count_what_they_read_and_write():
    gather, product, cublas, attention = works(HLO, {POOL_ELEMENTS})
    assert gather == Work(Kind.OTHER, (), 0, 2 * 8 * 64 * 2), "the rows that it wants, and not the whole table"
    assert product == Work(Kind.PRODUCT, (4, 16, 96), 64 * 96, 8 * 64 * 2 + 4 * 8 * 96 * 4)
    assert product.is_in_8_bits and not cublas.is_in_8_bits
    assert cublas == Work(Kind.PRODUCT, (96, 64), 96 * 64 * 2, 4 * 8 * 96 * 4 + 8 * 64 * 2), "and no workspace"
    assert attention == Work(Kind.ATTENTION, (), 0, 2 * 8 * 64 * 2), "and nothing of the pool"


def test_kernels_of_gates_and_of_what_they_let_through_are_both_read():
    hlo = """
ENTRY %main (leaves_0: bf16[8,64,96], leaves_1: bf16[8,64,96]) -> bf16[16,96] {
  %gate = bf16[8,64,96]{2,1,0} parameter(0), metadata={op_name="leaves[0]"}
  %up = bf16[8,64,96]{2,1,0} parameter(1), metadata={op_name="leaves[1]"}
  %sizes = s32[8]{0} fusion(), kind=kLoop, calls=%count
  %rows = bf16[8,64]{1,0} fusion(), kind=kLoop, calls=%norm
  %made = bf16[16,96]{1,0} custom-call(%sizes, %rows, %gate, %up), backend_config={name = "grouped_matmul_kernel"}
}
"""
    *_, found = works(hlo, {POOL_ELEMENTS})
    assert found == Work(Kind.EXPERTS, (8, 64, 192), 2 * 8 * 64 * 192, 8 * 4 + 8 * 64 * 2 + 16 * 96 * 2)


def test_a_product_of_few_bits_reads_its_scales_with_its_numbers():
    hlo = """
ENTRY %main (leaves_0: u8[32,96], leaves_1: bf16[2,96]) -> bf16[8,96] {
  %values = u8[32,96]{1,0} parameter(0), metadata={op_name="leaves[0]"}
  %scale = bf16[2,96]{1,0} parameter(1), metadata={op_name="leaves[1]"}
  %rows = bf16[2,8,32]{2,1,0} fusion(%values), kind=kLoop, calls=%fused, metadata={op_name="norm"}
  %made = bf16[8,96]{1,0} custom-call(%rows, %values, %scale), backend_config={name = "few_bits_matmul_kernel"}
}
"""
    product = works(hlo, ())[-1]
    assert product == Work(Kind.PRODUCT_OF_FEW_BITS, (64, 96), 32 * 96 + 2 * 96 * 2, 8 * (64 + 96) * 2)
    byte = works(hlo.replace("u8[32,96]", "s8[64,96]").replace("bf16[2,96]", "f32[1,96]"), ())[-1]
    assert byte == Work(product.kind, (64, 96), 64 * 96, product.other_bytes + 4 * 96) and byte.is_in_8_bits
    half = Work(Kind.PRODUCT, (64, 96), 64 * 96, product.other_bytes)
    assert half.is_in_8_bits and seconds(product, 8, speed_of("h200")) < seconds(half, 8, speed_of("h200"))


def test_a_product_takes_the_longer_of_its_bytes_and_its_operations():
    speed, work = speed_of("h200"), Work(Kind.PRODUCT, (4096, 4096), 2 * 4096**2, 0)
    share, start = SHARES[Kind.PRODUCT, False][0], START_S[Kind.PRODUCT] + GAP_S
    assert seconds(work, 8, speed) == pytest.approx(start + 2 * 4096**2 / share.bandwidth / 4.814304e12)
    assert seconds(work, 256, speed) == pytest.approx(start + 2 * 256 * 4096**2 / share.peak / 989e12)


def test_of_experts_only_those_that_tokens_chose_are_read():
    speed, work = speed_of("h100"), Work(Kind.EXPERTS, (8, 4096, 14336), 2 * 8 * 4096 * 14336, 0)
    two, eight = (seconds(work, 8, speed, experts_read=read, copies=16) for read in (2, 8))
    start = START_S[Kind.EXPERTS] + GAP_S
    assert eight - start == pytest.approx(4 * (two - start))


def test_further_layers_are_like_the_second(monkeypatch: pytest.MonkeyPatch):
    layer, rest = Work(Kind.PRODUCT, (4096, 4096), 2 * 4096**2, 0), Work(Kind.OTHER, (), 0, 1000)

    def compiled(_: Estimate, __: BucketKey, layers: tuple[int, ...]) -> Compiled:
        return Compiled((rest, *[layer] * len(layers)), 1 + len(layers), ())

    monkeypatch.setattr(Estimate, "compiled", compiled)
    estimate, key = Estimate("h200", "8B"), model.decode_key(8)
    assert estimate.num_launches(key) == 33
    short, long = (estimate.seconds(key, Load(8, context)) for context in (1024, 2048))
    in_8_bits = estimate.seconds(key, Load(8, 2049), 1) - estimate.seconds(key, Load(8, 1024), 1)
    assert long - short == pytest.approx(2 * in_8_bits, rel=2e-3), "half of the bytes"
    of_layers = 32 * seconds(layer, 8, speed_of("h200"))
    assert short > of_layers > 0.5 * short


def test_layers_of_each_kind_are_counted(monkeypatch: pytest.MonkeyPatch):
    """Qwen3.5 9B has 24 layers of linear attention and 8 of attention."""
    linear, full = (Work(Kind.OTHER, (), 0, num_bytes) for num_bytes in (1000, 10))
    estimate = Estimate("h200", "Qwen3.5-9B")
    states = estimate.config.state_bytes(2)
    assert states == 24 * (2**21 + 2 * 4 * 8192)

    def compiled(each: Estimate, _: BucketKey, layers: tuple[int, ...]) -> Compiled:
        kinds = [linear if each.config.layers[index].attention.state_shapes else full for index in layers]
        return Compiled(tuple(kinds), len(kinds), ())

    monkeypatch.setattr(Estimate, "compiled", compiled)
    assert estimate.num_launches(model.decode_key(32)) == 32
    (alone, rows), load = (model.decode_key(count) for count in (1, 32)), Load(32, 1024)
    moved = estimate.traffic(rows, load)
    keys = 32 * 1025 * 32 * 1024
    logits = 32 * estimate.config.vocab_size * 4
    assert moved.compiled == pytest.approx(24 * 1000 + 8 * 10 + keys + 32 * 2 * states + logits)
    one, least = estimate.traffic(alone, Load(1, 1024)), keys // 32 + 2 * states
    assert one.compiled == pytest.approx(24 * 1000 + 8 * 10 + least + 2 * states + logits / 4), "slot 0 too"
    assert moved.least - one.least == pytest.approx(31 * least)


def test_tiles_of_prompts_are_products_and_a_substitution():
    """For each token and head of Qwen3.5 9B. With a state three products, each of two parts, and so on."""
    of_head = 12 * 128 * 128 + 4 * 64 * 128 + 12 * 64 * 128 + 16 * 2 * 64 * 64
    assert _tile_flops(Estimate("h200", "Qwen3.5-9B").config) == 24 * 32 * of_head
    assert _tile_flops(Estimate("h200", "8B").config) == 0


def test_every_card_has_figures_and_a_class():
    assert set(PEAK_TFLOPS) == set(NAMES)
    assert {class_of(name) for name in NAMES} == {"a100_80gb", "l4", "h200", "b200", "rtx5090"}


def test_a_card_holds_what_its_memory_allows():
    assert Estimate("l4", "70B", "int8").pool_tokens(1) < 0 < Estimate("h200", "70B", "int8").pool_tokens(1)
    assert model.fewest_devices("l4", "70B", "int8") is None
    assert (model.fewest_devices("h100", "70B", "none"), model.fewest_devices("h100", "70B", "int8")) == (4, 2)


def test_published_figures_name_their_source():
    sources = json.loads(model.PUBLISHED.read_text(encoding="utf-8"))
    assert all(each["url"].startswith("https://") and each["date"] and each["how"] for each in sources.values())
    figures = [figure for each in sources.values() for figure in each["figures"]]
    assert {figure["card"] for figure in figures} <= set(NAMES)
    assert {figure["model"] for figure in figures} <= {*model.MODELS, *model.UNSUPPORTED}
