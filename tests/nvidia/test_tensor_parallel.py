"""Models that no H200 holds alone, compiled for four that share them."""

import re
from collections import Counter

import jax.numpy as jnp
import pytest

from bench.device.shapes import LLAMA_70B, MIXTRAL_8X7B
from bench.nvidia import programs
from bench.nvidia.compiler import Program, memory_of
from jsg.engine.device.programs import DRAWN, GREEDY, SAMPLED, Variant
from jsg.sched.buckets import BucketKey, Phase

NUM_DEVICES = 4
USABLE_BYTES = int(0.85 * 139 * 2**30)  # of one, as `--mem-fraction-static` has it
MODELS = {
    "Llama-70B": (LLAMA_70B, 1, 400_000),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 1, 400_000),
    "Mixtral-8x7B by experts": (MIXTRAL_8X7B, 4, 1_000_000),
}
"""Shapes, groups of devices that have experts of their own, and tokens of the pool: one layer's is larger than what
whole experts make of a step."""
KEYS = (
    BucketKey(Phase.DECODE, 32, 32),
    BucketKey(Phase.DECODE, 256, 256),
    BucketKey(Phase.EXTEND, 8192, 256),
)


def collectives(program: Program) -> Counter[str]:
    """How many of each kind there are; an asynchronous one counts once."""
    kinds = r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
    return Counter(re.findall(rf" {kinds}", program.hlo))


def make(name: str, **changes: int) -> programs.Model:
    shape, num_groups, pool_tokens = MODELS[name]
    return programs.make_model(
        shape, num_devices=NUM_DEVICES, num_groups=num_groups, pool_tokens=pool_tokens, **changes
    )


@pytest.fixture(scope="module", params=MODELS)
def shared(request: pytest.FixtureRequest) -> programs.Model:
    """With few layers, for all are alike."""
    return make(request.param, num_hidden_layers=3)


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.long if key == KEYS[1] else (), id=str(key)) for key in KEYS]
)
def test_a_step_adds_up_twice_a_layer_and_once_for_the_embedding(shared: programs.Model, key: BucketKey):
    assert key in programs.BUCKETS.all, "a shape that an engine has"
    program = shared.programs.program(("forward", key))
    assert collectives(program) == {"all-reduce": 2 * shared.config.num_layers + 1}
    assert program.aliased_bytes >= shared.donated_bytes // NUM_DEVICES, "the pool stays where it is"
    assert program.makers_of(shared.layer_elements // NUM_DEVICES) <= {
        "parameter",
        "bitcast",
        "custom-call",
        "tuple",
    } | {"get-tuple-element"}


@pytest.mark.parametrize("name", [pytest.param("Llama-70B", marks=pytest.mark.long), "Mixtral-8x7B by experts"])
def test_a_whole_model_fits(name: str):
    program = make(name).programs.program(("forward", KEYS[-1]))
    assert memory_of(program.compiled).argument_size_in_bytes + program.temporary_bytes < USABLE_BYTES


@pytest.mark.parametrize("variant", [GREEDY, DRAWN], ids=str)
def test_the_best_token_costs_one_pair_for_each_row(shared: programs.Model, variant: Variant):
    """The largest logit, or the token that is drawn from all."""
    program = shared.programs.program(("sample", 256, variant))
    assert collectives(program) == {"all-gather": 1}
    (shape,) = re.findall(r"= \(?(?:\w+\[[\d,]*\]\S*, )?s32\[([\d,]+)\]\S*\)? all-gather", program.hlo)
    assert sorted(map(int, shape.split(",")))[-1] <= 256 * 2 * NUM_DEVICES


def test_sampling_gathers_the_logits_once(shared: programs.Model):
    program = shared.programs.program(("sample", 256, SAMPLED))
    assert collectives(program) == {"all-gather": 1}
    largest = 2 * 256 * shared.config.vocab_size * jnp.float32.dtype.itemsize
    assert program.temporary_bytes < 2 * largest
