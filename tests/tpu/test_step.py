"""Steps of two published models compiled for TPUs. Nothing here ran on one.

A step at the memory roofline changes the pool in place, keeps little beside it, reads each kernel once and as it lies,
and multiplies on the matrix units. Whether it does can be read off the compiled program.
"""

import functools
from typing import Any
from unittest import mock

import pytest

from bench.compiled import Model, Program, make_model
from bench.shapes import LLAMA_8B
from jsg.engine import shapes
from jsg.engine.device.memory import extend_bound
from jsg.engine.device.programs import GREEDY, MASKED_EVERYTHING, PENALISED, SAMPLED, VARIANTS, Variant
from jsg.kernels_pallas import ops
from jsg.models.quantise import BYTES_PER_NUMBER
from jsg.sched.buckets import BucketKey, Phase

MAX_RUNNING = 256
POOL_TOKENS = 700_000
"""So many that the keys of a layer on one of eight devices are more than a TPU's vector memory holds."""
DECODE_TEMPORARY_BYTES = 64 * 10**6
"""31 MiB were the most that was found: those of 256 rows of Llama 3 8B on one v5e."""
PROMPT = (512, 256)
LLAMA = LLAMA_8B | {"max_position_embeddings": 8192, "num_hidden_layers": 2}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "intermediate_size": 12_288,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
MODELS = {"llama": LLAMA, "qwen3": QWEN3}
FEW_TOKENS = 2048
"""In the vocabulary, where the head shows nothing that others do not."""


@functools.cache
def made(name: str, target: str, vocab_size: int | None = FEW_TOKENS, **options: Any) -> Model:
    shape = MODELS[name] if vocab_size is None else MODELS[name] | {"vocab_size": vocab_size}
    ops.refusals.clear()
    return make_model(shape, target, pool_tokens=POOL_TOKENS, max_running_requests=MAX_RUNNING, **options)


def forward(of: Model, phase: Phase, num_tokens: int) -> Program:
    """A forward pass, after a look at what holds for every one of them."""
    (key,) = [key for key in of.settings.buckets.all if (key.phase, key.num_tokens) == (phase, num_tokens)]
    program = of.program(("forward", key))
    check(program, of, key)
    return program


def check(program: Program, of: Model, key: BucketKey) -> None:
    settings = of.settings
    assert ops.refusals == {}, "no kernel leaves its work to the reference"
    assert program.aliased_bytes >= of.donated_bytes
    assert program.writers(of.layer_bytes) == {"scatter_fusion"}, "it writes rows where they lie"
    if key.phase is Phase.DECODE:
        assert program.temporary_bytes <= DECODE_TEMPORARY_BYTES
    else:
        bound = extend_bound(settings.model, key.num_tokens, settings.dtype, num_devices=settings.config.tp_size)
        assert program.temporary_bytes <= bound
    bits = 8 * BYTES_PER_NUMBER.get(settings.config.quantization, settings.dtype.itemsize)
    assert program.rewritten(of.kernels, bits) == []
    head = (settings.model.hidden_size, settings.model.vocab_size // settings.config.tp_size)
    assert program.multiplied_by_number({*of.kernels, head}) == []


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("llama", "v5e", {}),
        ("qwen3", "v6e", {"tp_size": 4}),
    ],
)
def test_decode(name: str, target: str, options: dict[str, Any]):
    """More rows cost more, so a batch gains by the smallest shape that holds it."""
    of = made(name, target, None, **options)
    cycles = [forward(of, Phase.DECODE, rows).cycles for rows in (8, 32, 256)]
    assert cycles == sorted(cycles)


def test_a_single_row_would_be_multiplied_by_number():
    """So every number of rows is a multiple of eight on a TPU. What is looked for is found here."""
    with mock.patch.dict(shapes.ROW_MULTIPLE, {"tpu": 1}):
        of = make_model(LLAMA | {"vocab_size": FEW_TOKENS}, "v6e", max_running_requests=8)
    program = of.program(("forward", BucketKey(Phase.DECODE, 1, 1)))
    assert len(program.multiplied_by_number(of.kernels)) == 4 * 2
    assert program.cycles > forward(made("llama", "v6e"), Phase.DECODE, 8).cycles
