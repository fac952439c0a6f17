"""Models that no H200 holds alone, compiled for four that share them."""

import re
from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest

from jsg.engine.programs import DRAWN, GREEDY, SAMPLED, Variant
from jsg.sched.buckets import BucketKey, Phase
from tests.h200 import model
from tests.h200.compiler import Program

NUM_DEVICES = 4
USABLE_BYTES = int(0.85 * 139 * 2**30)  # of one, as `--mem-fraction-static` has it
POOL_TOKENS = 400_000
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 128_001,
}
MIXTRAL_8X7B: dict[str, Any] = LLAMA_70B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "sliding_window": None,
    "eos_token_id": 2,
}
MODELS = {"Llama-70B": LLAMA_70B, "Mixtral-8x7B": MIXTRAL_8X7B}
KEYS = (
    BucketKey(Phase.DECODE, 32, 32),
    BucketKey(Phase.DECODE, 256, 256),
    BucketKey(Phase.EXTEND, 8192, 256),
)


def collectives(program: Program) -> Counter[str]:
    """How many of each kind there are; an asynchronous one counts once."""
    kinds = r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
    return Counter(re.findall(rf" {kinds}", program.hlo))


@pytest.fixture(scope="module", params=MODELS)
def shared(request: pytest.FixtureRequest) -> model.Model:
    return model.make_model(MODELS[request.param], num_devices=NUM_DEVICES, pool_tokens=POOL_TOKENS)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_step_adds_up_twice_a_layer_and_once_for_the_embedding(shared: model.Model, key: BucketKey):
    assert key in model.BUCKETS.all, "a shape that an engine has"
    program = shared.programs.program(("forward", key))
    assert collectives(program) == {"all-reduce": 2 * shared.config.num_layers + 1}
    memory = program.compiled.memory_analysis()
    assert memory.argument_size_in_bytes + program.temporary_bytes < USABLE_BYTES
    assert program.aliased_bytes >= shared.donated_bytes // NUM_DEVICES, "the pool stays where it is"
    assert program.makers_of(shared.layer_elements // NUM_DEVICES) <= {
        "parameter",
        "bitcast",
        "custom-call",
        "tuple",
    } | {"get-tuple-element"}


@pytest.mark.parametrize("variant", [GREEDY, DRAWN], ids=str)
def test_the_best_token_costs_one_pair_for_each_row(shared: model.Model, variant: Variant):
    """The largest logit, or the token that is drawn from all."""
    program = shared.programs.program(("sample", 256, variant))
    assert collectives(program) == {"all-gather": 1}
    (shape,) = re.findall(r"= \(?(?:\w+\[[\d,]*\]\S*, )?s32\[([\d,]+)\]\S*\)? all-gather", program.hlo)
    assert sorted(map(int, shape.split(",")))[-1] <= 256 * 2 * NUM_DEVICES


def test_sampling_gathers_the_logits_once(shared: model.Model):
    program = shared.programs.program(("sample", 256, SAMPLED))
    assert collectives(program) == {"all-gather": 1}
    largest = 2 * 256 * shared.config.vocab_size * jnp.float32.dtype.itemsize
    assert program.temporary_bytes < 2 * largest
