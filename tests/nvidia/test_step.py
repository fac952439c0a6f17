"""Every program of an 8B Llama, and steps of other models, compiled for an H200: their memory and their launches.

Nothing here ran on a device. A step at the memory roofline changes the pool in place, keeps little beside it, and is
one CUDA graph ("command buffer") of few launches; whether it is can be read off the compiled program.
"""

import functools
import math
from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest

from bench.device.shapes import (
    CLIP_L_336,
    GPT_OSS_20B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    MIXTRAL_8X22B,
    QWEN3_5_9B,
    QWEN3_5_35B_A3B,
)
from bench.nvidia import programs
from bench.nvidia.compiler import IN_PLACE, Program
from bench.shapes import LLAMA_8B, llava_next_video
from jsg.engine.device.memory import SAMPLED_BYTES, copied_head_bytes, extend_bound
from jsg.engine.device.programs import GREEDY, VARIANTS, Variant
from jsg.models.latent_spec import LatentSpec
from jsg.models.parts import FULL, LAYER_KINDS
from jsg.models.state_specs import HeadStates
from jsg.sched.buckets import BucketKey, Phase, make_deterministic_buckets
from tests.golden.families import covering
from tests.models.published import PUBLISHED
from tests.models.test_hybrid_shapes import granite, nemotron

MAX_LAUNCHES = 10
"""Of a dense layer: two norms, four matmuls, rotation with the write to the pool, the activation, and attention in two:
either splits and their combination, or a pass over shared prefixes and one over the rest."""
GREEDY_TEMPORARY_BYTES = 128 * 10**6
SAMPLING_TEMPORARY_BYTES = round(SAMPLED_BYTES * programs.MAX_RUNNING * LLAMA_8B["vocab_size"])


@functools.cache
def llama(num_layers: int = LLAMA_8B["num_hidden_layers"]) -> programs.Model:
    return programs.make_model(LLAMA_8B, num_hidden_layers=num_layers)


def check_forward(program: Program, of: programs.Model) -> None:
    """Checks what holds for every step: pools and table in place, one graph, kernels that an H200 can launch."""
    assert program.aliased_bytes >= of.donated_bytes
    mixers = [layer.attention for layer in of.config.layers]
    pools = [of.layer_elements, *([] if of.vision is None else [of.vision.size])]
    if any(isinstance(mixer, HeadStates) for mixer in mixers):
        pools.append(max(of.state_elements))
    # XLA writes latent rows and inputs of convolutions where they lie: a copy would be seen in the temporaries.
    has_latents = any(isinstance(mixer, LatentSpec) for mixer in mixers)
    assert program.makers_of(min(pools)) <= (IN_PLACE | {"scatter", "fusion"} if has_latents else IN_PLACE)
    assert program.is_one_command_buffer
    assert program.fits


def max_temporary_bytes(key: BucketKey) -> int:
    """Decode: next to nothing."""
    if key.phase is Phase.DECODE:
        return GREEDY_TEMPORARY_BYTES
    return extend_bound(llama(2).config, key.num_tokens, jnp.bfloat16.dtype)


SHAPES = programs.BUCKETS
CORNERS = {keys[end] for keys in (SHAPES.decode, SHAPES.extend, SHAPES.grouped) for end in (0, -1)}


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=() if key in CORNERS else pytest.mark.long) for key in SHAPES.all],
    ids=lambda key: f"{key.phase}-{key.num_tokens}-{key.num_groups}",
)
def test_forward_of_every_bucket(key: BucketKey):
    """With few layers, for all are alike. What is neither the smallest nor the largest of its kind is long."""
    deep, shallow = (of.programs.program(("forward", key)) for of in (llama(3), llama(2)))
    check_forward(deep, llama(3))
    assert deep.temporary_bytes <= max_temporary_bytes(key)
    assert len(deep.launches) - len(shallow.launches) <= MAX_LAUNCHES


@pytest.mark.parametrize("key", [SHAPES.decode[-1], SHAPES.extend[-1]], ids=lambda key: f"{key.phase}")
def test_forward_of_the_whole_model(key: BucketKey):
    program = llama().programs.program(("forward", key))
    check_forward(program, llama())
    assert program.temporary_bytes <= max_temporary_bytes(key)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_sampling(variant: Variant):
    program = llama(2).programs.program(("sample", programs.MAX_RUNNING, variant))
    assert program.temporary_bytes <= (GREEDY_TEMPORARY_BYTES if variant == GREEDY else SAMPLING_TEMPORARY_BYTES)
    assert [launch for launch in program.launches if any("kWhile" in name for name in launch.containers)] == []
    counts = (programs.MAX_RUNNING + 1) * LLAMA_8B["vocab_size"] * jnp.int32.dtype.itemsize
    assert not variant.has_tables or program.aliased_bytes >= counts


def test_prompt_logprobs_take_the_head_in_parts():
    program = llama(2).programs.program(("prompt_logprobs", programs.CHUNK))
    assert program.temporary_bytes <= GREEDY_TEMPORARY_BYTES


@pytest.mark.parametrize("name", [("write_rows", 1), ("write_rows", 8), ("write_counts",), ("write_bias",)], ids=str)
def test_tables_change_in_place(name: tuple[object, ...]):
    program = llama(2).programs.program(name)
    table = (programs.MAX_RUNNING + 1) * LLAMA_8B["max_position_embeddings"] * jnp.int32.dtype.itemsize
    assert program.aliased_bytes >= table
    assert program.temporary_bytes < table // 4


QWEN3_4B = LLAMA_8B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
QWEN2_7B = LLAMA_8B | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN3_30B_A3B = QWEN3_4B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_OTHER_FIELDS = {name: value for name, value in LLAMA_8B.items() if name not in ("rope_parameters", "rope_scaling")}
PHI_4_MINI = _OTHER_FIELDS | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 200_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "tie_word_embeddings": True,
}
COMMAND_R7B = {name: value for name, value in _OTHER_FIELDS.items() if name != "rms_norm_eps"} | {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "vocab_size": 256_000,
    "logit_scale": 0.25,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}
GEMMA3_12B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,
    "sliding_window": 1024,
    "sliding_window_pattern": 2,  # so that two layers are one of each kind
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GEMMA2_9B = GEMMA3_12B | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 256_000,
    "hidden_size": 3584,
    "intermediate_size": 14_336,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "sliding_window_pattern": None,
    "rope_scaling": None,
}
KIMI_LINEAR = PUBLISHED["kimi-linear-48b-a3b"].file | {"model_max_length": 16_384}
KIMI_DENSE = KIMI_LINEAR | {"first_k_dense_replace": 27}
LLAVA_NEXT_7B = llava_next_video(MISTRAL_7B | {"sliding_window": None}, CLIP_L_336)
SHORTER = {"max_position_embeddings": 16_384}
"""As the 8B Llama: with a longer context the page table would be larger than what experts make of a step."""
FAMILIES = {
    "page-size-16": (LLAMA_8B, {"page_size": 16}),
    "fp8-pool": (LLAMA_8B, {"kv_dtype": jnp.float8_e4m3fn}),
    "head-norms": (QWEN3_4B, {}),
    "biases": (QWEN2_7B, {}),
    "window": (MISTRAL_7B, {}),
    "two-ropes": (GEMMA3_12B, {}),
    "softcap": (GEMMA2_9B, {}),
    "experts": (MIXTRAL_8X7B, SHORTER),
    "larger-experts": (MIXTRAL_8X22B, SHORTER),
    "sinks": (GPT_OSS_20B, SHORTER),
    "images": (LLAVA_NEXT_7B, {}),
    "shared-expert": (PUBLISHED["qwen2-57b-a14b"].file, SHORTER),
    "latent": (PUBLISHED["deepseek-v3"].file, SHORTER | {"first_k_dense_replace": 1}),
    # With 128 experts and more, of which a token uses 8; the first of GLM's layers has none.
    "many-experts": (QWEN3_30B_A3B, SHORTER),
    "sigmoids": (PUBLISHED["glm-4.5-air"].file, SHORTER),
    "sigmoids-and-norms": (PUBLISHED["minimax-m2"].file, {**SHORTER, "attn_type_list": [1, 1]}),
    "float32-router": (PUBLISHED["ernie-4.5-21b-a3b"].file, SHORTER),
    "experts-in-one-tensor": (PUBLISHED["powermoe-3b"].file, SHORTER),
    "growing-queries": (PUBLISHED["ministral-3-8b"].file, SHORTER),
    "norms-over-heads": (PUBLISHED["olmo-2-13b"].file, {}),
    "no-rope": (PUBLISHED["smollm3-3b-base"].file, SHORTER | {"no_rope_layers": [1, 0]}),
    "factors": (PUBLISHED["granite-3.3-8b"].file, SHORTER),
    "part-of-heads": (PHI_4_MINI, {}),
    "blocks-side-by-side": (COMMAND_R7B, {}),
    "two-shapes": (PUBLISHED["gemma-4-31b-it"].file, SHORTER | {"layer_types": [*LAYER_KINDS[::-1]]}),
    "layer-inputs": (
        PUBLISHED["gemma-4-e2b-it"].file,
        SHORTER | {"layer_types": [FULL, FULL], "num_kv_shared_layers": 1},
    ),
    "experts-beside": (PUBLISHED["gemma-4-26b-a4b-it"].file, SHORTER | {"layer_types": [*LAYER_KINDS[::-1]]}),
    "scan": (granite("h-tiny"), SHORTER | {"layer_types": ["mamba", "attention"]}),
    "padded-heads": (nemotron("nano-9b-v2"), SHORTER | {"hybrid_override_pattern": "M-*"}),
    "mixers-or-blocks": (nemotron("3-nano-30b-a3b"), SHORTER | {"hybrid_override_pattern": "ME*"}),
    "narrow-experts": (nemotron("3-super-120b-a12b"), SHORTER | {"hybrid_override_pattern": "ME*"}),
    "decay-by-channel": (
        KIMI_LINEAR,
        {"linear_attn_config": None, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "short-convolutions": (PUBLISHED["lfm2-1.2b"].file, SHORTER | {"full_attn_idxs": [1]}),
    "aligned-window": (PUBLISHED["llama-4-scout"].file, SHORTER | {"no_rope_layers": [1, 0]}),
}
"""A family that is not here has the records of one that is, up to sizes: Seed-OSS those of "biases", Ministral and
Mistral Small those of "window"."""
LONG = (
    "padded-heads",
    "experts-beside",
    "narrow-experts",
    "larger-experts",
    "sigmoids-and-norms",
    "float32-router",
    "experts-in-one-tensor",
    "part-of-heads",
    "blocks-side-by-side",
)
DECODED = (
    *("aligned-window", "latent", "layer-inputs", "sinks", "mixers-or-blocks", "images", "decay-by-channel"),
    *("short-convolutions", "two-ropes", "factors", "scan", "softcap", "shared-expert", "growing-queries"),
    *("norms-over-heads", "two-shapes"),
)
"""Few that have between them all parts that the others have. All of them run prompts."""
NAMES = [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in FAMILIES]


@functools.cache
def family(name: str) -> programs.Model:
    shape, options = FAMILIES[name]
    return programs.make_model(shape, num_hidden_layers=2, **options)


def test_decode_of_the_other_models_has_no_part_of_its_own():
    """What `DECODED` leaves out."""
    specs = {name: family(name).config for name in FAMILIES if name not in LONG}
    assert set(covering(specs)) <= set(DECODED)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in DECODED else pytest.mark.long) for x in FAMILIES])
def test_decode_of_other_models(name: str):
    check_decode(name, 256)


@pytest.mark.parametrize("name", ["fp8-pool", "larger-experts"])
def test_decode_of_few_tokens_of_other_models(name: str):
    check_decode(name, 32)


def check_decode(name: str, num_tokens: int) -> None:
    program = family(name).programs.program(("forward", BucketKey(Phase.DECODE, num_tokens, num_tokens)))
    check_forward(program, family(name))
    copied = copied_head_bytes(family(name).config, jnp.bfloat16.dtype.itemsize)
    assert program.temporary_bytes <= GREEDY_TEMPORARY_BYTES + copied


@pytest.mark.parametrize("name", NAMES)
def test_extend_of_other_models(name: str):
    program = family(name).programs.program(("forward", BucketKey(Phase.EXTEND, 512, 256)))
    check_forward(program, family(name))
    assert program.temporary_bytes <= extend_bound(family(name).config, 512, jnp.bfloat16.dtype)


@pytest.mark.parametrize(
    ("shape", "channels", "num_more"),
    [(QWEN3_5_9B, 8192, 0), (KIMI_DENSE, 12_288, 4)],
    ids=["by-head", "by-channel"],
)
def test_a_layer_of_linear_attention_costs_hardly_more_launches_than_one_of_attention(
    shape: dict[str, Any], channels: int, num_more: int
):
    """Beside the feed-forward block: a norm, two projections, the rule with its states, and the projection behind it.

    Decays by channel and gates of their own take four projections more. No kernels are joined in the step. It reads and
    writes each state once: 2 MiB of float32 for each row and layer, beside the last inputs.
    """
    of, deep = (programs.make_model(shape, layers=layers) for layers in ((0, 3), (0, 1, 3)))  # one more linear
    key = BucketKey(Phase.DECODE, 32, 32)
    two, three = (each.programs.program(("forward", key)) for each in (of, deep))
    check_forward(three, deep)
    assert len(three.launches) - len(two.launches) <= MAX_LAUNCHES + num_more
    joins = [sum("concatenate" in launch.name for launch in program.launches) for program in (two, three)]
    assert joins[0] == joins[1], "kernels are joined"
    rules = [launch for launch in three.launches if launch.kernel == "delta_kernel"]
    assert len(rules) == 2, "one launch for each layer"
    states = sum(shape.num_bytes(2) for shapes in deep.config.state_shapes for shape in shapes)
    assert states == 2 * (2 * 2**20 + 2 * 4 * channels)


@pytest.mark.parametrize(("num_rows", "launches"), [(8, 12), (32, 13)])
def test_launches_of_linear_attention_with_experts(num_rows: int, launches: int):
    """One row runs in the shape of eight. It was 18 and 19, before launches of experts did the shared block too.

    Two norms, two projections, the rule and the projection behind it; the router, the routes, which are two for many
    rows, two products of experts with those of the shared block, one of its gate, and the sum.
    """
    of, deep = (programs.make_model(QWEN3_5_35B_A3B, layers=layers) for layers in ((0, 3), (0, 1, 3)))
    key = BucketKey(Phase.DECODE, num_rows, num_rows)
    two, three = (each.programs.program(("forward", key)) for each in (of, deep))
    check_forward(three, deep)
    assert len(three.launches) - len(two.launches) == launches


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        pytest.param("linear", 512, id="deterministic"),
        *((name, programs.CHUNK) for name in ("linear", "linear-in-float16", "scan", "decay-by-channel")),
        pytest.param("linear-and-experts", programs.CHUNK, marks=pytest.mark.long),
    ],
)
def test_prompts_of_linear_attention(name: str, num_tokens: int):
    """Two launches for each layer, and in deterministic mode one. The memory plan knows the temporaries."""
    is_deterministic = num_tokens < programs.CHUNK
    buckets = make_deterministic_buckets(256, 512, 512) if is_deterministic else programs.BUCKETS
    dtype = jnp.float16.dtype if name == "linear-in-float16" else jnp.bfloat16.dtype
    files = {"linear": QWEN3_5_9B, "linear-in-float16": QWEN3_5_9B, "linear-and-experts": QWEN3_5_35B_A3B}
    is_whole = name not in files
    options = {"buckets": buckets, "layers": (0, 1, 2, 3), "dtype": dtype, "kv_dtype": dtype}
    of = family(name) if is_whole else programs.make_model(files[name], **options)
    program = of.programs.program(("forward", buckets.extend[-1]))
    if is_whole:  # a chunk has larger arrays than the states, a copy of which the temporaries would show
        assert program.aliased_bytes >= of.donated_bytes
        assert program.is_one_command_buffer
        assert program.fits
    else:
        check_forward(program, of)
    names = Counter(launch.kernel for launch in program.launches if launch.kernel.startswith("delta"))
    count = sum(bool(shapes) for shapes in of.config.state_shapes)
    in_tiles = {"delta_inverse_kernel": count, "delta_tiles_kernel": count}
    assert names == ({"delta_kernel": count} if is_deterministic else in_tiles)
    bound = extend_bound(of.config, num_tokens, dtype)
    assert (0 if is_deterministic else 2 * bound / 3) <= program.temporary_bytes <= bound


def test_a_layer_of_a_short_convolution_has_no_more_launches_than_one_of_attention():
    """Beside the feed-forward block: a norm, two projections, and three for the convolution with its slots."""
    file, options = FAMILIES["short-convolutions"]
    two, three = (programs.make_model(file, num_hidden_layers=count, **options) for count in (2, 3))
    for key in (BucketKey(Phase.DECODE, 32, 32), BucketKey(Phase.EXTEND, 512, 256)):
        shallow, deep = (of.programs.program(("forward", key)) for of in (two, three))
        check_forward(deep, three)
        assert len(deep.launches) - len(shallow.launches) <= MAX_LAUNCHES
        slots = (programs.MAX_RUNNING + 1) * math.prod(three.config.state_shapes[0][0].shape)
        assert "copy" not in deep.makers_of(slots), "slots are written where they lie, after all were read"


@pytest.mark.parametrize("name", ["many-experts", "shared-expert", "latent", "padded-heads"])
def test_a_whole_chunk_keeps_what_the_bound_says(name: str):
    """Copies for experts, the shared expert, or queries are the most in these blocks. Few tokens do not show it."""
    of, tokens = family(name), programs.CHUNK
    program = of.programs.program(("forward", BucketKey(Phase.EXTEND, tokens, 256)))
    bound = extend_bound(of.config, tokens, jnp.bfloat16.dtype)
    assert 2 * bound / 3 <= program.temporary_bytes <= bound


MAX_LAUNCHES_WITH_LATENTS = 28
"""Of a layer with experts and a shared one, of which attention is 15: two norms and two of ranks, five matmuls, two
products of each head, a copy of the part without rope, two that join queries, the write, and attention in two."""


@pytest.mark.parametrize("key", [BucketKey(Phase.DECODE, 256, 256), BucketKey(Phase.EXTEND, 512, 256)], ids=str)
def test_latent_rows_are_read_by_our_kernels_and_no_kernel_is_copied(key: BucketKey):
    """The pool is as large as the temporaries are small; no part of a matrix is written before its product."""
    file, options = FAMILIES["latent"]
    one, two = (
        programs.make_model(
            file, **options | {"num_hidden_layers": count, "first_k_dense_replace": 0}
        ).programs.program(("forward", key))
        for count in (1, 2)
    )
    names = {launch.kernel for launch in two.launches}
    assert names & {"_decode_kernel", "ragged_paged_attention"}
    assert len(two.launches) - len(one.launches) <= MAX_LAUNCHES_WITH_LATENTS
    heads, plain, rank, width = 128, 128, 512, file["hidden_size"]
    joint = file["q_lora_rank"] + rank + file["qk_rope_head_dim"]
    if key.phase is Phase.DECODE:  # among the arrays of an extend step some have as many numbers by chance
        assert two.writers_of([(heads * plain, rank), (width, joint), (width, file["q_lora_rank"])]) == []


MAX_LAUNCHES_WITH_EXPERTS = {Phase.DECODE: MAX_LAUNCHES + 2, Phase.EXTEND: MAX_LAUNCHES + 5}
"""Of a layer with experts. In place of gate and up, silu, and down: the router, the routes, two grouped matmuls, of
which the first reads the copies and has the gates, and the weighted sum. Of many tokens copies, the products of gates
and of what they let through, and silu are launches of their own."""


@pytest.mark.parametrize(
    "key",
    [BucketKey(Phase.DECODE, 64, 64), BucketKey(Phase.EXTEND, programs.CHUNK, 256)],
    ids=lambda key: f"{key.phase}-{key.num_tokens}",
)
@pytest.mark.parametrize("name", ["experts", pytest.param("larger-experts", marks=pytest.mark.long)])
def test_tokens_run_the_experts_that_they_chose(name: str, key: BucketKey):
    """Nothing is computed for each token and each expert, and choosing costs a launch or two."""
    of, (shape, options) = family(name), FAMILIES[name]
    program = of.programs.program(("forward", key))
    check_forward(program, of)
    inner = shape["intermediate_size"]
    assert program.makers_of(key.num_tokens * shape["num_local_experts"] * inner) <= IN_PLACE
    assert program.temporary_bytes <= extend_bound(of.config, key.num_tokens, jnp.bfloat16.dtype)
    shallow = programs.make_model(shape, num_hidden_layers=1, **options).programs.program(("forward", key))
    assert len(program.launches) - len(shallow.launches) <= MAX_LAUNCHES_WITH_EXPERTS[key.phase]


def test_branches_of_joined_prompts_are_copied_in_place():
    of = family("page-size-16")
    program = of.programs.program(("copy_slots",))
    assert program.aliased_bytes >= of.layer_elements * jnp.bfloat16.dtype.itemsize * 2 * of.config.num_layers
    assert program.makers_of(of.layer_elements) <= IN_PLACE | {"scatter", "fusion"}, "it writes rows and copies nothing"
    assert program.temporary_bytes <= GREEDY_TEMPORARY_BYTES
