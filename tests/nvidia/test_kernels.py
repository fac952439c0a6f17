"""Each kernel alone, compiled for an H200: what it asks of memory, and the instructions it is made of.

No kernel ran on a device. What its machine code shows is whether keys and values come in 16-byte asynchronous copies,
whether the tensor cores multiply, and whether registers spill to memory.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from bench.attention_cases import MODELS
from bench.nvidia.compiler import IN_PLACE, Program, array, compile_for
from jsg.kernels_pallas.cascade import cascade
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.kernels_pallas.expert_routes import expert_routes
from jsg.kernels_pallas.grouped_matmul import grouped_matmul
from jsg.kernels_pallas.inputs import AttentionInputs, HeadNorms, PrefixGroups
from jsg.kernels_pallas.paged_decode import paged_decode
from jsg.kernels_pallas.ragged_paged_attention import ragged_paged_attention
from jsg.kernels_pallas.reference_routes import Routes
from jsg.kernels_pallas.rotate_and_write import rotate_and_write
from jsg.kernels_pallas.tile import GROUP_TILE, QUERY_TILE
from jsg.kernels_pallas.token_threshold import kept_threshold, top_logits

ROWS = 256
CONTEXT_LEN = 8192
POOL_TOKENS = 2**19
VOCAB = 128_256
GROUPS = 32

LLAMA = "llama-3-8b"
KERNELS = {
    # Entry, packed tokens, and the kernels that it launches.
    "decode": (paged_decode, ROWS, {"_decode_kernel"}),
    "decode-in-splits": (paged_decode, 32, {"_decode_kernel", "_combine_kernel"}),
    "cascade": (cascade, ROWS, {"_prefix_kernel", "_decode_kernel"}),
    "ragged": (ragged_paged_attention, 2048, {"ragged_paged_attention"}),
}
POOLS = (
    *((model, "bfloat16", 1) for model in MODELS),
    (LLAMA, "bfloat16", 16),
    (LLAMA, "bfloat16", 64),
    (LLAMA, "float8_e4m3fn", 1),
    (LLAMA, "float8_e5m2", 16),
    (LLAMA, "float32", 1),
)
"""Model, type of the pool, page size."""
ALIKE = {"decode-in-splits", "cascade"}
"""What reads keys as the decode kernel does, and so is not compiled for every pool."""
ATTENTION = [
    (kernel, *pool)
    for kernel in KERNELS
    for pool in POOLS
    if kernel not in ALIKE or pool in ((LLAMA, "bfloat16", 1), ("gemma-2b", "bfloat16", 1), (LLAMA, "float8_e4m3fn", 1))
]


def attention_inputs(num_tokens: int, page_size: int, *, tiles: int, groups: int) -> AttentionInputs:
    index = functools.partial(array, dtype="int32")
    singles = min(num_tokens, ROWS)
    shared = PrefixGroups(index(singles), index(groups), index(groups), index(groups, GROUP_TILE))
    return AttentionInputs(
        page_table=index(ROWS + 1, CONTEXT_LEN // page_size),
        single_rows=index(singles),
        single_kv_lens=index(singles),
        tile_rows=index(tiles),
        tile_starts=index(tiles),
        tile_lens=index(tiles),
        tile_positions=index(tiles),
        num_tiles=index(),
        groups=shared if groups else None,
    )


@functools.cache
def attention(kernel: str, model: str, pool_dtype: str, page_size: int, *, has_sinks: bool = False) -> Program:
    entry, num_tokens, _ = KERNELS[kernel]
    heads, kv_heads, head_dim = MODELS[model]
    pool = array(POOL_TOKENS // page_size, page_size, kv_heads, head_dim, dtype=pool_dtype)
    queries = array(num_tokens, heads, head_dim, dtype="float32" if pool_dtype == "float32" else "bfloat16")
    tiles = num_tokens // QUERY_TILE + ROWS if kernel == "ragged" else 0
    inputs = attention_inputs(num_tokens, page_size, tiles=tiles, groups=GROUPS if kernel == "cascade" else 0)
    sinks = [array(heads, dtype="float32")] if has_sinks else []

    def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, inputs: AttentionInputs, *sinks: jax.Array):
        return entry(queries, keys, values, inputs, scale=head_dim**-0.5, sinks=sinks[0] if sinks else None).out

    return compile_for("h200", attend, queries, pool, pool, inputs, *sinks)


@pytest.mark.parametrize(("kernel", "model", "pool_dtype", "page_size"), ATTENTION)
def test_attention_fits(kernel: str, model: str, pool_dtype: str, page_size: int):
    program = attention(kernel, model, pool_dtype, page_size)
    _, num_tokens, names = KERNELS[kernel]
    heads, kv_heads, head_dim = MODELS[model]
    assert names <= {launch.name for launch in program.launches}
    assert program.fits
    assert program.makers_of(POOL_TOKENS * kv_heads * head_dim) <= IN_PLACE
    partial_bytes = 4 * num_tokens * heads * (head_dim + 1)  # of one split, in float32
    splits = {"decode": 0, "decode-in-splits": 4, "cascade": 8, "ragged": 0}[kernel]
    assert program.temporary_bytes <= splits * partial_bytes + 2**20


@pytest.mark.parametrize(("kernel", "model", "pool_dtype", "page_size"), ATTENTION)
def test_attention_instructions(kernel: str, model: str, pool_dtype: str, page_size: int, nvdisasm):
    program = attention(kernel, model, pool_dtype, page_size)
    for name in KERNELS[kernel][2]:
        counts = program.instructions(name, nvdisasm)
        assert having(counts, "LDL|STL") == set(), "registers spill"
        if name == "_combine_kernel":
            continue
        copies = having(counts, "LDGSTS")
        assert copies and all(copy.endswith(".128") for copy in copies), "keys and values come in 16-byte copies"
        if pool_dtype != "float32":  # its products are exact to the last bit on purpose, which tensor cores are not
            assert having(counts, "HMMA|HGMMA"), "tensor cores multiply"
            assert bool(having(counts, "HGMMA")) == (query_rows(name, model) >= 64), "by warp groups from 64 rows on"


def query_rows(kernel: str, model: str) -> int:
    """Queries that one program multiplies with a block of keys: those of the heads of a group, of several tokens."""
    heads, kv_heads, _ = MODELS[model]
    return heads // kv_heads * {"_decode_kernel": 1, "_prefix_kernel": GROUP_TILE}.get(kernel, QUERY_TILE)


def having(counts: dict[str, int], pattern: str) -> set[str]:
    """Instructions that begin like that."""
    return {name for name in counts if re.match(pattern, name)}


def test_copies_of_decode_overlap_with_its_matmuls():
    """A block of 64 keys and one of 64 values: one is in flight while the other is multiplied."""
    block_bytes = 64 * MODELS[LLAMA][2] * 2
    assert attention("decode", LLAMA, "bfloat16", 1).kernel("_decode_kernel").shared_bytes >= 2 * block_bytes


@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_cost_no_launch_and_no_memory(kernel: str, nvdisasm):
    plain, program = (attention(kernel, LLAMA, "bfloat16", 1, has_sinks=has_sinks) for has_sinks in (False, True))
    assert [launch.name for launch in program.launches] == [launch.name for launch in plain.launches]
    assert program.temporary_bytes <= plain.temporary_bytes + 2**10
    for name in KERNELS[kernel][2]:
        assert having(program.instructions(name, nvdisasm), "LDL|STL") == set(), "registers spill"


def test_page_size_does_not_change_the_inner_loop(nvdisasm):
    one, sixteen = (
        attention("decode", LLAMA, "bfloat16", page_size).instructions("_decode_kernel", nvdisasm)
        for page_size in (1, 16)
    )
    pattern = "LDGSTS|HMMA|MUFU|LDSM"
    assert {name: one[name] for name in having(one, pattern)} == {
        name: sixteen[name] for name in having(sixteen, pattern)
    }


@pytest.mark.parametrize("norms", [None, "bfloat16", "float32"])
@pytest.mark.parametrize(("pool_dtype", "page_size"), [("bfloat16", 1), ("bfloat16", 16), ("float8_e4m3fn", 1)])
def test_rotate_and_write_is_in_place(pool_dtype: str, page_size: int, norms: str | None):
    """`norms` is the type of their weights. Those in float32 come after rotation here."""
    program = rotation(pool_dtype, page_size, norms)
    _, kv_heads, head_dim = MODELS[LLAMA]
    elements = POOL_TOKENS * kv_heads * head_dim
    assert program.aliased_bytes == 2 * elements * jnp.dtype(pool_dtype).itemsize
    assert program.makers_of(elements) <= IN_PLACE
    assert program.temporary_bytes < 2**16
    assert [launch.name for launch in program.launches] == ["rotate_and_write_kernel"]


@functools.cache
def rotation(pool_dtype: str, page_size: int, norms: str | None) -> Program:
    heads, kv_heads, head_dim = MODELS[LLAMA]
    pool = array(POOL_TOKENS // page_size, page_size, kv_heads, head_dim, dtype=pool_dtype)
    angles = array(ROWS, head_dim // 2, dtype="float32")

    def fn(qkv, cos, sin, slots, pools, weights):
        head_norms = HeadNorms(*weights, 1e-6, is_late=norms == "float32") if norms else None
        return rotate_and_write(qkv, cos, sin, slots, pools, head_norms)

    joint = array(ROWS, kv_heads, (heads // kv_heads + 2) * head_dim)
    slots = array(ROWS, dtype="int32")
    weights = (array(head_dim, dtype=norms), array(head_dim, dtype=norms)) if norms else ()
    return compile_for("h200", fn, joint, angles, angles, slots, (pool, pool), weights, donate=(4,))


def test_rotate_and_write_instructions(nvdisasm):
    counts = rotation("bfloat16", 1, "bfloat16").instructions("rotate_and_write_kernel", nvdisasm)
    assert having(counts, "LDL|STL") == set()
    assert having(counts, r"LDG\.E\.128") and having(counts, r"STG\.E\.128"), "heads are moved 16 bytes at a time"


@functools.cache
def threshold() -> Program:
    per_row = functools.partial(array, ROWS)
    args = array(ROWS, VOCAB, dtype="float32"), per_row(dtype="float32"), per_row(dtype="float32")
    return compile_for("h200", kept_threshold, *args, per_row(dtype="int32"), per_row(dtype="float32"))


@functools.cache
def top() -> Program:
    return compile_for("h200", lambda logits: top_logits(logits, 20), array(ROWS, VOCAB, dtype="float32"))


@pytest.mark.parametrize("program", [threshold, top], ids=["threshold", "top"])
def test_sampling_neither_copies_nor_sorts_the_vocabulary(program):
    assert program().temporary_bytes < 2**20
    assert program().fits
    assert "sort" not in program().makers_of(ROWS * VOCAB // 8), "only what is left may be sorted"


@pytest.mark.parametrize(
    ("program", "kernel"), [(threshold, "kept_threshold_kernel"), (top, "top_logits_kernel")], ids=["threshold", "top"]
)
def test_sampling_reads_16_bytes_at_a_time_and_does_not_spill(program, kernel: str, nvdisasm):
    counts = program().instructions(kernel, nvdisasm)
    assert having(counts, "LDL|STL") == set()
    assert having(counts, r"LDG\.E\S*\.128")


def test_one_entry_for_a_gpu():
    """`ops` chooses these kernels where the trace is for a GPU."""
    from jsg.kernels_pallas import ops

    heads, kv_heads, head_dim = MODELS[LLAMA]
    pool = array(POOL_TOKENS, 1, kv_heads, head_dim)
    inputs = attention_inputs(ROWS, 1, tiles=0, groups=0)

    def fn(queries: jax.Array, pools: tuple[jax.Array, jax.Array], inputs: AttentionInputs) -> jax.Array:
        return ops.paged_attention(queries, pools, inputs, scale=1.0)

    program = compile_for("h200", fn, array(ROWS, heads, head_dim), (pool, pool), inputs)
    assert "_decode_kernel" in {launch.name for launch in program.launches}


EXPERTS = {
    "8x7b-up": (8, 4096, 14336),
    "8x7b-down": (8, 14336, 4096),
    "8x22b-up": (8, 6144, 16384),
    "8x22b-down": (8, 16384, 6144),
    "30b-a3b-up": (128, 2048, 768),
    "30b-a3b-down": (128, 768, 2048),
}
"""Experts, and the shape of one of their kernels."""


@functools.cache
def grouped(side: str, num_rows: int, dtype: str) -> Program:
    experts, depth, width = EXPERTS[side]
    arrays = (
        array(num_rows, depth, dtype=dtype),
        array(experts, depth, width, dtype=dtype),
        array(experts, dtype="int32"),
    )
    return compile_for("h200", functools.partial(grouped_matmul, result=dtype), *arrays)


@pytest.mark.parametrize(
    ("side", "num_rows", "dtype"),
    [
        *((side, num_rows, "bfloat16") for num_rows in (16, 512, 4096) for side in ("8x7b-up", "8x22b-down")),
        ("30b-a3b-up", 64, "bfloat16"),
        ("30b-a3b-down", 2048, "bfloat16"),
        ("30b-a3b-up", 65536, "bfloat16"),
        ("8x7b-down", 16, "float32"),
        ("8x22b-up", 4096, "float32"),
    ],
)
def test_a_grouped_matmul_is_one_launch_that_spills_nothing(side: str, num_rows: int, dtype: str, nvdisasm):
    """XLA's own computes every row with every expert, and makes the rows for that."""
    program = grouped(side, num_rows, dtype)
    (launch,) = program.launches
    assert program.fits
    assert program.temporary_bytes == 0
    counts = program.instructions(launch.name, nvdisasm)
    assert having(counts, "LDL|STL") == set(), "registers spill"
    copies = having(counts, "LDGSTS")
    assert copies and all(copy.endswith(".128") for copy in copies), "rows and kernels come in 16-byte copies"
    if dtype == "bfloat16":
        assert having(counts, "HMMA|HGMMA"), "tensor cores multiply"


@pytest.mark.parametrize(
    ("side", "stored"),
    [("8x7b-up", "int8"), ("8x7b-down", "float8_e4m3fn"), ("8x22b-up", "float8_e4m3fn"), ("8x22b-down", "int8")],
)
def test_experts_in_8_bits_are_converted_in_the_launch_that_reads_them(side: str, stored: str, nvdisasm):
    experts, depth, width = EXPERTS[side]
    program = compile_for(
        "h200",
        lambda rows, kernels, sizes, scale: grouped_matmul(rows, kernels, sizes, scale=scale, result="bfloat16"),
        array(512, depth),
        array(experts, depth, width, dtype=stored),
        array(experts, dtype="int32"),
        array(experts, 1, width, dtype="float32"),
    )
    (launch,) = program.launches
    assert program.temporary_bytes == 0
    counts = program.instructions(launch.name, nvdisasm)
    assert having(counts, "LDL|STL") == set(), "registers spill"
    assert all(copy.endswith(".128") for copy in having(counts, "LDGSTS")) and having(counts, "HMMA|HGMMA")


CHOICES = {
    # What is chosen, whether scores are biased, experts, launches for so many tokens.
    "mixtral": (ChoiceSpec(per_token=2), False, 8, {256: 1, 8192: 1}),
    "qwen3-moe": (ChoiceSpec(per_token=8), False, 128, {8: 1, 256: 2, 8192: 2}),
    "glm-4.5": (ChoiceSpec(per_token=8, score="sigmoid", factor=2.5), True, 160, {8: 1, 256: 2}),
    "deepseek-v3": (
        ChoiceSpec(per_token=8, score="sigmoid", groups=8, kept_groups=4, factor=2.5), True, 256, {4: 1, 8192: 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "num_tokens", "launches", "is_whole"),
    [
        (name, *each, is_whole)
        for name, (*_, most) in CHOICES.items()
        for each in most.items()
        for is_whole in (True, False)
        if is_whole or name == "mixtral" or each == (8192, 2)
    ],
)
def test_experts_are_chosen_in_launches_that_spill_nothing(
    name: str, num_tokens: int, launches: int, is_whole: bool, nvdisasm
):
    """XLA's own are sorts and scatters, some ten launches. Also for a device that has a quarter of them."""
    choice, is_biased, num_experts, _ = CHOICES[name]
    num_own = num_experts if is_whole else num_experts // 4
    given = {"logits": array(num_tokens, num_experts, dtype="float32")}
    given |= {"bias": array(num_experts, dtype="float32")} if is_biased else {}
    given |= {} if is_whole else {"first": array(dtype="int32")}

    def choose(*arrays: jax.Array) -> Routes:
        return expert_routes(**{"first": 0, **dict(zip(given, arrays, strict=True))}, choice=choice, num_own=num_own)

    program = compile_for("h200", choose, *given.values())
    assert len(program.launches) == launches
    assert program.temporary_bytes <= 2**20 * (launches - 1), "the experts of each token, and counts of each block"
    for launch in program.launches:
        assert having(program.instructions(launch.name, nvdisasm), "LDL|STL") == set(), "registers spill"
