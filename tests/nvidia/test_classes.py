"""Every kernel, and steps of an 8B Llama, compiled for an NVIDIA card of each class. Other cards are long.

`test_kernels.py` and `test_step.py` have more cases for one card. Nothing here ran on a device.
"""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import pytest

from bench.nvidia import programs
from bench.nvidia.compiler import IN_PLACE, Program, array, compile_for
from bench.shapes import LLAMA_8B
from jsg.engine.device.cards import CLASSES, NAMES, Card, card, mesh_of
from jsg.engine.device.devices import E4M3_CAPABILITY, FP8_KERNEL_CAPABILITY
from jsg.engine.device.programs import GREEDY, SAMPLED
from jsg.engine.device.targets import traced_for
from jsg.kernels_pallas import (
    attention_block,
    cascade,
    few_bits_matmul,
    grouped_matmul,
    ops,
    paged_decode,
    ragged_paged_attention,
    tuning,
)
from jsg.kernels_pallas.attention_block import padded_rows
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.kernels_pallas.expert_routes import expert_routes
from jsg.kernels_pallas.few_bits import zeros
from jsg.kernels_pallas.form import Form
from jsg.kernels_pallas.inputs import GroupKernels, SharedKernels
from jsg.kernels_pallas.rotate_and_write import rotate_and_write
from jsg.kernels_pallas.tile import QUERY_TILE
from jsg.kernels_pallas.token_threshold import kept_threshold, top_logits
from jsg.models.quantise import FORMS
from jsg.sched.buckets import BucketKey, Phase
from tests.nvidia.test_kernels import EXPERTS, GROUPS, POOL_TOKENS, ROWS, VOCAB, attention_inputs, having
from tests.nvidia.test_step import check_forward, max_temporary_bytes

CARDS = [pytest.param(name, marks=() if name in CLASSES.values() else pytest.mark.long) for name in NAMES]
OTHER_CARDS = [each for each in CARDS if each.values != ("h200",)]
"""Those for which the other files of this folder compile nothing."""
PRODUCTS = "HMMA|HGMMA|UTC.*MMA"
HEADS, KV_HEADS = 32, 8


def is_quick(name: str, pool: str, head_dim: int) -> bool:
    """Of pools in other types than bfloat16, of which an H200 has its own tests, heads of 256 need the most registers.

    And the shape of most models has heads of 128.
    """
    return (pool == "bfloat16" and name != "h200") or (pool, head_dim) in {
        ("8-bit", 128),
        ("8-bit", 256),
        ("float32", 256),
    }


ATTENTION = [
    pytest.param(
        name,
        pool,
        head_dim,
        marks=() if name in of_each and is_quick(name, pool, head_dim) else pytest.mark.long,
        id=f"{name}-{pool}-{head_dim}",
    )
    for name in NAMES
    for pool in ("bfloat16", "float32", "8-bit")
    for head_dim, of_each in ((64, CLASSES.values()), (128, CLASSES.values()), (256, CLASSES.values()), (512, ["l4"]))
    if head_dim < 512 or pool == "bfloat16"
]
"""For an H200, `test_kernels.py` has those in bfloat16. With a pool in 8 bits, heads of 512 spill a few registers of
prompts' steps on an H200; in float32 they do not fit an L4, and the reference takes them."""
PAST_A_TILE = 2048
"""Packed tokens of a step with query tiles."""


def stored_type(of: Card, pool: str) -> str:
    """The type of a pool; for 8 bits one that the card has."""
    return {"8-bit": "float8_e4m3fn" if of.capability >= E4M3_CAPABILITY else "float8_e5m2"}.get(pool, pool)


def spills(counts: dict[str, int]) -> set[str]:
    return having(counts, "LDL|STL")


def check_products(of: Card, counts: dict[str, int], rows: int, *, is_exact: bool = False) -> None:
    """Operands come in 16-byte asynchronous copies, and tensor cores multiply: from 64 rows on by warp groups.

    Tensor cores are not for products that are exact to the last bit.
    """
    copies = having(counts, "LDGSTS")
    assert copies and all(copy.endswith(".128") for copy in copies)
    if is_exact:
        return
    assert having(counts, PRODUCTS), "tensor cores multiply"
    assert bool(having(counts, "HGMMA|UTC.*MMA")) == (tuning.class_of(of.capability).has_warp_groups and rows >= 64)


@functools.cache
def attention(name: str, kernel: str, pool: str, head_dim: int) -> tuple[Program, dict[str, tuple[int, int]]]:
    """The program, and for each of its kernels the rows of its matmul and the bytes of shared memory as calculated."""
    stored = stored_type(card(name), pool)
    num_tokens = PAST_A_TILE if kernel == "ragged" else ROWS
    keys = array(POOL_TOKENS, 1, KV_HEADS, head_dim, dtype=stored)
    queries = array(num_tokens, HEADS, head_dim, dtype="float32" if pool == "float32" else "bfloat16")
    calculated = {}

    def note(kernel: str, rows: int, sizes, queries: jax.Array, keys: jax.Array) -> None:
        rows = padded_rows(rows)
        calculated[kernel] = (
            rows,
            attention_block.shared_bytes(rows, sizes.block_k, sizes.num_stages, queries, keys),
        )

    def attend(queries, keys, values, inputs):
        if kernel == "ragged":
            sizes = ragged_paged_attention.default_sizes(queries, keys)
            note("ragged_paged_attention", sizes.block_m, sizes, queries, keys)
            entry = ragged_paged_attention.ragged_paged_attention
        else:
            sizes = cascade.default_sizes(GROUPS, queries, keys)
            note("_prefix_kernel", cascade.rows_of(queries, keys), sizes, queries, keys)
            note("_decode_kernel", HEADS // KV_HEADS, sizes.rest, queries, keys)
            entry = cascade.cascade
        return entry(queries, keys, values, inputs, scale=head_dim**-0.5).out

    tiles, groups = (num_tokens // QUERY_TILE + ROWS, 0) if kernel == "ragged" else (0, GROUPS)
    inputs = attention_inputs(num_tokens, 1, tiles=tiles, groups=groups)
    return compile_for(name, attend, queries, keys, keys, inputs), calculated


@pytest.mark.parametrize("kernel", ["cascade", "ragged"])
@pytest.mark.parametrize(("name", "pool", "head_dim"), ATTENTION)
def test_attention(kernel: str, name: str, pool: str, head_dim: int, nvdisasm):
    """The calculated bytes of shared memory are those that the compiler finds, or more, and the card has them.

    A step with shared prefixes decodes the rest by the kernel that decodes without prefixes.
    """
    program, calculated = attention(name, kernel, pool, head_dim)
    assert program.fits
    assert program.makers_of(POOL_TOKENS * KV_HEADS * head_dim) <= IN_PLACE
    for launched, (rows, shared_bytes) in calculated.items():
        assert program.kernel(launched).shared_bytes <= shared_bytes <= program.card.shared_bytes
        counts = program.instructions(launched, nvdisasm)
        assert spills(counts) == set()
        check_products(program.card, counts, rows, is_exact=pool == "float32")


@pytest.mark.parametrize("name", OTHER_CARDS)
def test_decode_in_splits(name: str, nvdisasm):
    pool = array(POOL_TOKENS, 1, KV_HEADS, 128)
    inputs = attention_inputs(32, 1, tiles=0, groups=0)
    program = compile_for(
        name, lambda *args: paged_decode.paged_decode(*args, scale=1.0).out, array(32, HEADS, 128), pool, pool, inputs
    )
    for launched in ("_decode_kernel", "_combine_kernel"):
        assert spills(program.instructions(launched, nvdisasm)) == set()


LATENT_ROW, LATENT_VALUE = 576, 512
LATENT = [
    pytest.param(
        name,
        pool,
        heads,
        marks=() if name in CLASSES.values() and pool == "bfloat16" and heads == 16 else pytest.mark.long,
        id=f"{name}-{pool}-{heads}",
    )
    for name in NAMES
    for pool in ("bfloat16", "float32", "8-bit")
    for heads in (16, 128)
]
"""All heads of DeepSeek V3, and those of one of eight devices."""


@pytest.mark.parametrize("kernel", ["paged_decode", "ragged_paged_attention"])
@pytest.mark.parametrize(("name", "pool", "heads"), LATENT)
def test_latent_attention(kernel: str, name: str, pool: str, heads: int, nvdisasm):
    """Rows come in 16-byte copies, but in 8 bits 64 numbers of a block are too few for that of all threads."""
    module = {"paged_decode": paged_decode, "ragged_paged_attention": ragged_paged_attention}[kernel]
    is_decode = module is paged_decode
    num_tokens = 32 if is_decode else PAST_A_TILE
    rows = array(POOL_TOKENS, 1, 1, LATENT_ROW, dtype=stored_type(card(name), pool))
    queries = array(num_tokens, heads, LATENT_ROW, dtype="float32" if pool == "float32" else "bfloat16")
    inputs = attention_inputs(num_tokens, 1, tiles=0 if is_decode else num_tokens // QUERY_TILE + ROWS, groups=0)
    calculated = []

    def attend(queries, rows, inputs):
        sizes = module.default_sizes(queries, rows, LATENT_VALUE)
        matmul = min(padded_rows(heads), sizes.block_m) if is_decode else sizes.block_m
        cut = matmul, sizes.block_k, sizes.num_stages
        calculated.append((matmul, attention_block.shared_bytes(*cut, queries, rows, LATENT_VALUE)))
        how = {"scale": 1.0, "value_dim": LATENT_VALUE, "implementation": "triton"}
        return ops.latent_attention(queries, (rows,), inputs, **how)

    program = compile_for(name, attend, queries, rows, inputs)
    assert program.makers_of(POOL_TOKENS * LATENT_ROW) <= IN_PLACE
    [(matmul, shared_bytes)] = calculated
    launched = "_decode_kernel" if is_decode else kernel
    assert program.kernel(launched).shared_bytes <= shared_bytes <= program.card.shared_bytes
    counts = program.instructions(launched, nvdisasm)
    assert spills(counts) == set()
    if pool == "8-bit":
        assert {copy.rpartition(".")[2] for copy in having(counts, "LDGSTS")} == {"128", "64"}
        assert having(counts, PRODUCTS)
    else:
        check_products(program.card, counts, matmul, is_exact=pool == "float32")


@pytest.mark.parametrize(("pool", "head_dim"), [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("8-bit", 128)])
@pytest.mark.parametrize("name", OTHER_CARDS)
def test_rotation_with_the_write(name: str, pool: str, head_dim: int, nvdisasm):
    keys = array(POOL_TOKENS, 1, KV_HEADS, head_dim, dtype=stored_type(card(name), pool))
    angles = array(ROWS, head_dim // 2, dtype="float32")
    joint = array(ROWS, KV_HEADS, (HEADS // KV_HEADS + 2) * head_dim)
    slots = array(ROWS, dtype="int32")
    program = compile_for(name, rotate_and_write, joint, angles, angles, slots, (keys, keys), None, donate=(4,))
    assert program.aliased_bytes == 2 * keys.size * keys.dtype.itemsize
    (launch,) = program.launches
    counts = program.instructions(launch.name, nvdisasm)
    assert spills(counts) == set() and having(counts, r"LDG\.E\.128")


def takes_fp8(of: Card) -> bool:
    """Whether the engine takes weights in fp8 on this card."""
    return of.capability >= FP8_KERNEL_CAPABILITY


def stored_types(of: Card) -> list[str]:
    """Types in 8 bits of kernels of experts that the engine takes on this card."""
    return ["int8", "float8_e4m3fn"] if takes_fp8(of) else ["int8"]


@pytest.mark.parametrize("num_rows", [64, 512])
@pytest.mark.parametrize("name", ["h200", *OTHER_CARDS])
def test_gates_of_experts_are_in_the_launch_of_their_products(name: str, num_rows: int, nvdisasm):
    """The most rows are those of few groups: with many, as in Qwen3.5-35B-A3B, each has few."""
    experts, depth, width = (256, 2048, 512) if num_rows == 64 else EXPERTS["8x7b-up"]
    for stored in ("bfloat16", "int8"):
        scale = None if stored == "bfloat16" else array(experts, 1, width, dtype="float32")
        kernels = [GroupKernels(array(experts, depth, width, dtype=stored), scale)] * 2
        program = compile_for(
            name,
            functools.partial(grouped_matmul.grouped_gated, activation="silu"),
            *(array(num_rows // 2, depth), array(num_rows, dtype="int32"), kernels, array(experts, dtype="int32")),
        )
        (launch,) = program.launches
        assert program.temporary_bytes == 0 and launch.shared_bytes <= program.card.shared_bytes
        assert spills(program.instructions(launch.name, nvdisasm)) == set()


@pytest.mark.parametrize("num_tokens", [8, 64])
@pytest.mark.parametrize("name", ["h200", *OTHER_CARDS])
def test_a_shared_block_is_in_the_launches_of_experts(name: str, num_tokens: int, nvdisasm):
    """That of Qwen3.5-35B-A3B. Its kernels are read where they are."""
    experts, depth, width, num_rows = 256, 2048, 512, 8 * num_tokens
    kernels, down = [GroupKernels(array(experts, depth, width))] * 2, GroupKernels(array(experts, width, depth))
    program = compile_for(
        name,
        functools.partial(grouped_matmul.experts_beside, activation="silu", result="bfloat16"),
        *(array(num_tokens, depth), array(num_rows, dtype="int32"), kernels, down, array(experts, dtype="int32")),
        SharedKernels(array(depth, 2, width), array(width, depth)),
    )
    assert len(program.launches) == 2 and program.temporary_bytes <= 2 * (num_rows + num_tokens) * width + 512
    for launch in program.launches:
        assert launch.shared_bytes <= program.card.shared_bytes
        assert spills(program.instructions(launch.name, nvdisasm)) == set()


@pytest.mark.parametrize(
    ("side", "num_rows"), [*(("8x7b-up", rows) for rows in (16, 512, 4096)), ("30b-a3b-down", 2048)]
)
@pytest.mark.parametrize("name", OTHER_CARDS)
def test_experts(name: str, side: str, num_rows: int, nvdisasm):
    experts, depth, width = EXPERTS[side]
    for stored in stored_types(card(name)) if num_rows == 512 else ["bfloat16"]:
        rows, kernels = array(num_rows, depth), array(experts, depth, width, dtype=stored)
        scale = None if stored == "bfloat16" else array(experts, 1, width, dtype="float32")
        program = compile_for(
            name,
            lambda rows, kernels, sizes, scale: grouped_matmul.grouped_matmul(
                rows, kernels, sizes, scale=scale, result="bfloat16"
            ),
            *(rows, kernels, array(experts, dtype="int32"), scale),
        )
        (launch,) = program.launches
        assert program.temporary_bytes == 0
        counts = program.instructions(launch.name, nvdisasm)
        assert spills(counts) == set()
        with traced_for(mesh_of(name)):
            sizes = grouped_matmul.default_sizes(num_rows, experts, rows.dtype, kernels.dtype)
            calculated = grouped_matmul.shared_bytes(sizes, rows.dtype, kernels.dtype)
        assert launch.shared_bytes <= calculated <= program.card.shared_bytes
        check_products(program.card, counts, sizes.block_m)


IN_FEW_BITS = {
    "int4": (FORMS["int4"], (16, 256, 4096)),
    "awq": (Form("int4", 128, "float16", has_zero=True), (64,)),
    "mxfp4": (Form("e2m1", 32, "float8_e8m0fnu"), ()),
    "nvfp4": (Form("e2m1", 16, "float8_e4m3fn", has_factor=True), (1024,)),
    "w8a16": (Form("int8", 128, "bfloat16"), (16,)),
    "q4_k": (Form("uint4", 32, "int8", has_zero=True, has_factor=True, has_step=True, block=256), (16,)),
}
"""Forms, and the rows with which they are compiled for a card of each class. What else there is of both is long."""
OF_EACH, OF_TWO = ("int4", "awq", "mxfp4"), ("l4", "h200")
"""Forms that are compiled for a card of each class, and the cards for which the others are."""
PRODUCTS_IN_FEW_BITS = [
    pytest.param(
        name,
        form,
        num_rows,
        marks=()
        if name in (CLASSES.values() if form in OF_EACH else OF_TWO) and num_rows in quick
        else pytest.mark.long,
        id=f"{name}-{form}-{num_rows}",
    )
    for name in NAMES
    for form, (_, quick) in IN_FEW_BITS.items()
    for num_rows in (16, 32, 64, 256, 1024, 4096)
]
MOST_INSTRUCTIONS = {"int4": 6.5, "awq": 10.5, "mxfp4": 8, "nvfp4": 9, "w8a16": 8, "q4_k": 11}
"""Of the whole kernel for few rows, for each number that a lane restores in a block: about half are in its loop."""


@pytest.mark.parametrize(("name", "form", "num_rows"), PRODUCTS_IN_FEW_BITS)
def test_products_in_few_bits(name: str, form: str, num_rows: int, nvdisasm):
    """Bytes are read in 16-byte copies and restored in registers: nothing is written but sums."""
    how, width = IN_FEW_BITS[form][0], 6144
    kernel = jax.eval_shape(lambda: zeros(how, (4096, width), 0))
    program = compile_for(
        name,
        lambda rows, kernel: ops.matmul(rows, kernel, "bfloat16", implementation="triton"),
        *(array(num_rows, 4096), kernel),
    )
    with traced_for(mesh_of(name)):
        sizes = few_bits_matmul.default_sizes(num_rows, jnp.bfloat16.dtype, how.per_byte)
        calculated = few_bits_matmul.shared_bytes(sizes, jnp.bfloat16.dtype, how.per_byte)
    num_parts = -(-4096 // (few_bits_matmul.num_blocks_of_part(sizes, num_rows, 4096, width) * sizes.block_k))
    assert program.temporary_bytes <= (num_parts * num_rows * width * 4 if num_parts > 1 else 0)
    assert len(program.launches) == 1 + (num_parts > 1)  # whoever reads the sums of parts adds them up
    launch = program.kernel("few_bits_matmul_kernel")
    counts = program.instructions(launch.name, nvdisasm)
    check_few_bits(program, counts, calculated, sizes.block_n)
    if sizes.block_m <= 32:
        of_a_lane = sizes.block_n * sizes.block_k // (32 * sizes.num_warps)
        times = 1.9 if is_peeled(program.card) else 1
        assert sum(counts.values()) <= times * MOST_INSTRUCTIONS[form] * of_a_lane


def is_peeled(of: Card) -> bool:
    """Whether the loop is there three times, and what its first pass reads ahead is copied as its weights are."""
    return of.capability == (10, 0)


@pytest.mark.parametrize(
    ("name", "form", "num_rows"),
    [
        pytest.param(*case, marks=() if case[0] in CLASSES.values() and case[1:] in of_each else pytest.mark.long)
        for of_each in [(("mxfp4", 16), ("awq", 512))]
        for case in itertools.product(NAMES, IN_FEW_BITS, (16, 256, 512, 4096))
    ],
)
def test_experts_in_few_bits(name: str, form: str, num_rows: int, nvdisasm):
    """The same, with gates and what they let through in one launch."""
    how, experts = IN_FEW_BITS[form][0], 8
    kernel = jax.eval_shape(lambda: zeros(how, (experts, 4096, 1024), 1))
    is_gated = num_rows <= grouped_matmul.MOST_AT_ONCE
    kernels = [GroupKernels(kernel)] * (1 + is_gated)

    def multiply(rows: jax.Array, kernels: list[GroupKernels], sizes: jax.Array) -> jax.Array:
        if is_gated:
            return grouped_matmul.grouped_gated(rows, None, kernels, sizes, "silu")
        return grouped_matmul.grouped_matmul(rows, kernels[0].values, sizes, result="bfloat16")

    program = compile_for(name, multiply, array(num_rows, 4096), kernels, array(experts, dtype="int32"))
    (launch,) = program.launches
    assert program.temporary_bytes == 0
    with traced_for(mesh_of(name)):
        sizes = grouped_matmul.default_sizes(num_rows, experts, jnp.bfloat16.dtype, how)
        calculated = grouped_matmul.shared_bytes(sizes, jnp.bfloat16.dtype, how, len(kernels))
    counts = program.instructions(launch.name, nvdisasm)
    if is_gated and is_peeled(program.card):  # before the loop: scales of both kernels, and what is beside them
        assert sum(counts.pop(copy, 0) for copy in ("LDGSTS.E", "LDGSTS.E.64")) <= (4 if how.has_step else 2)
    check_few_bits(program, counts, calculated, sizes.block_n)


def check_few_bits(program: Program, counts: dict[str, int], calculated: int, block_n: int) -> None:
    """Weights are the left side of the product, so it is their columns that warp groups multiply."""
    assert spills(counts) == set()
    assert program.launches[0].shared_bytes <= calculated <= program.card.shared_bytes
    check_products(program.card, counts, block_n)


@pytest.mark.parametrize("name", OTHER_CARDS)
def test_choices_of_tokens_and_of_few_experts(name: str, nvdisasm):
    column = functools.partial(array, ROWS)
    logits = array(ROWS, VOCAB, dtype="float32")
    limits = column(dtype="float32"), column(dtype="float32"), column(dtype="int32"), column(dtype="float32")
    few = functools.partial(expert_routes, choice=ChoiceSpec(per_token=2), first=0, num_own=8)
    for kernel, fn, args in (
        ("expert_routes_kernel", few, (array(8192, 8, dtype="float32"),)),
        ("kept_threshold_kernel", kept_threshold, (logits, *limits)),
        ("top_logits_kernel", lambda logits: top_logits(logits, 20), (logits,)),
    ):
        check_kernel(compile_for(name, fn, *args), kernel, nvdisasm)


def check_kernel(program: Program, kernel: str, nvdisasm: pathlib.Path) -> None:
    assert program.fits
    assert spills(program.instructions(kernel, nvdisasm)) == set()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("l4", "b200") else pytest.mark.long) for name in NAMES if name != "h200"],
)
def test_choices_of_many_experts(name: str, nvdisasm):
    """Other classes are long: it takes as long to compile as all kernels of the test before."""
    many = functools.partial(expert_routes, choice=ChoiceSpec(per_token=8), first=0, num_own=128)
    for kernel, num_tokens in (("choose_kernel", 8192), ("place_kernel", 256)):
        check_kernel(compile_for(name, many, array(num_tokens, 128, dtype="float32")), kernel, nvdisasm)


@functools.cache
def llama(name: str, num_layers: int, options: tuple[tuple[str, str], ...] = ()) -> programs.Model:
    return programs.make_model(LLAMA_8B, card=name, num_hidden_layers=num_layers, **dict(options))


DECODE, EXTEND = BucketKey(Phase.DECODE, 32, 32), BucketKey(Phase.EXTEND, 512, 256)


QUANTISED = {
    ("a100_80gb", "int4"): (21, 4.5),
    ("l4", "int8"): (21, 1.5),
    ("b200", "int4"): (21, 34),
    ("rtx5090", "fp8"): (22, 1),
}
"""Launches with one layer, and megabytes of temporaries. Kernels themselves are compiled for every class."""


@pytest.mark.parametrize(("key", "launches"), [(DECODE, 29), (EXTEND, 32)], ids=["decode", "extend"])
@pytest.mark.parametrize("name", OTHER_CARDS)
def test_step(name: str, key: BucketKey, launches: int):
    """Launches are those of two layers and of what is around them, 9 or 14."""
    program = llama(name, 2).programs.program(("forward", key))
    check_forward(program, llama(name, 2))
    assert program.temporary_bytes <= max_temporary_bytes(key)
    assert len(program.launches) <= launches


@pytest.mark.parametrize("name", OTHER_CARDS)
def test_step_with_a_pool_of_8_bits(name: str):
    of = llama(name, 1, (("kv_dtype", stored_type(card(name), "8-bit")),))
    check_forward(of.programs.program(("forward", DECODE)), of)


@pytest.mark.parametrize(("name", "quantization"), QUANTISED)
def test_step_with_kernels_in_few_bits(name: str, quantization: str):
    """None is written anew in a longer type."""
    of = llama(name, 1, (("quantization", quantization), ("fp8_products", "off")))
    program = of.programs.program(("forward", DECODE))
    check_forward(program, of)
    assert program.writers_of(of.kernels) == []
    launches, megabytes = QUANTISED[name, quantization]
    assert program.temporary_bytes <= megabytes * 10**6
    assert len(program.launches) <= launches


@pytest.mark.parametrize("name", OTHER_CARDS)
def test_sampling(name: str):
    for variant in (GREEDY, SAMPLED):
        program = llama(name, 2).programs.program(("sample", programs.MAX_RUNNING, variant))
        assert program.fits
        assert [launch for launch in program.launches if any("kWhile" in place for place in launch.containers)] == []
        counts = (programs.MAX_RUNNING + 1) * LLAMA_8B["vocab_size"] * jnp.int32.dtype.itemsize
        assert not variant.has_tables or program.aliased_bytes >= counts
