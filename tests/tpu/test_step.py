"""Steps of published models compiled for TPUs. Nothing here ran on one.

A step at the memory roofline changes the pool in place, keeps little beside it, reads each kernel once and as it lies,
and multiplies on the matrix units. Whether it does can be read off the compiled program.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Hashable
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest

from bench.compiled import Model, Program, make_model
from bench.device.shapes import MIXTRAL_8X7B
from bench.shapes import LLAMA_8B
from bench.tpu.program import operations
from jsg.engine import shapes
from jsg.engine.device.memory import SAMPLED_BYTES, extend_bound
from jsg.engine.device.programs import EVERYTHING, GREEDY, PENALISED, SAMPLED, Variant
from jsg.engine.startup import Settings
from jsg.kernels_pallas import ops
from jsg.models.quantise import BYTES_PER_NUMBER
from jsg.sched.buckets import BucketKey, Phase

MAX_RUNNING = 256
POOL_TOKENS = 700_000
"""So many that the keys of a layer on one of eight devices are more than a TPU's vector memory holds."""
WRITER = "write_by_head"
STEP_TEMPORARY_BYTES, ROW_TEMPORARY_BYTES = 4 * 2**20, 2**17
"""Of a decode step and of each of its rows. Of Llama 3 8B on one v5e 2.0 MiB were found for 8, 31 for 256."""
LLAMA = LLAMA_8B | {"max_position_embeddings": 8192, "num_hidden_layers": 2}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "intermediate_size": 12_288,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
MIXTRAL = MIXTRAL_8X7B | {"max_position_embeddings": 8192, "num_hidden_layers": 2}
MODELS = {
    **{"llama": LLAMA, "qwen3": QWEN3, "mixtral": MIXTRAL},
    "heads-of-64": LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64},  # as Llama 3.2 1B
    "heads-of-256": LLAMA | {"hidden_size": 3584, "num_attention_heads": 16, "head_dim": 256},  # as Gemma 2 9B
}
Options = dict[str, Any]


@functools.cache
def _made(name: str, target: str, options: tuple[tuple[str, Any], ...]) -> Model:
    options_of = {"max_running_requests": MAX_RUNNING, "pool_tokens": POOL_TOKENS, **dict(options)}
    return make_model(MODELS[name], target, **options_of)


def made(name: str, target: str, **options: Any) -> Model:
    return _made(name, target, tuple(options.items()))


def forward(of: Model, phase: Phase, num_tokens: int) -> Program:
    """A forward pass, after a look at what holds for every one of them."""
    (key,) = [key for key in of.settings.buckets.all if (key.phase, key.num_tokens) == (phase, num_tokens)]
    ops.refusals.clear()
    program = of.program(("forward", key))
    check(program, of, key)
    return program


def check(program: Program, of: Model, key: BucketKey) -> None:
    settings, devices = of.settings, of.settings.config.tp_size
    assert ops.refusals == {}, "no kernel leaves its work to the reference"
    assert program.aliased_bytes >= of.donated_bytes
    writers = program.writers(of.layer_bytes)
    assert writers and all(each.startswith(WRITER) for each in writers), "they write tokens where they lie"
    if key.phase is Phase.DECODE:
        assert program.temporary_bytes <= STEP_TEMPORARY_BYTES + key.num_rows * ROW_TEMPORARY_BYTES
    else:
        bound = extend_bound(settings.model, key.num_tokens, settings.dtype, num_devices=devices)
        exchanged = key.num_tokens * settings.model.hidden_size * settings.dtype.itemsize if devices > 1 else 0
        assert program.temporary_bytes <= bound + exchanged
    num_bytes = BYTES_PER_NUMBER.get(settings.config.quantization, settings.dtype.itemsize)
    kernels = {each for each in of.kernels if key.num_tokens not in each}  # other arrays have the shapes of these
    assert program.rewritten(kernels, 8 * max(1, num_bytes)) == []  # two of 4 bits are a byte
    head = (settings.model.hidden_size, settings.model.vocab_size // devices)
    assert program.multiplied_by_number({*kernels, head}) == []


def grid(fast: list[tuple[Any, ...]], long: list[tuple[Any, ...]]) -> list[Any]:
    ids = ["-".join(map(str, [*case[:-1], *case[-1].values()])) for case in (*fast, *long)]
    marks = [()] * len(fast) + [pytest.mark.long] * len(long)
    return [pytest.param(*case, marks=m, id=id_) for case, m, id_ in zip((*fast, *long), marks, ids, strict=True)]


@pytest.mark.parametrize(
    ("name", "target", "options"),
    grid(
        [("llama", "v5e", {}), ("qwen3", "v6e", {"tp_size": 4})],
        [("qwen3", "v5e", {"tp_size": 8}), ("llama", "v5p", {}), ("qwen3", "tpu7x", {"tp_size": 8})],
    ),
)
def test_decode(name: str, target: str, options: Options):
    """No shape is estimated above the next larger one, so that a batch gains by the smallest that holds it."""
    of = made(name, target, **options)
    cycles = [forward(of, Phase.DECODE, rows).cycles for rows in (8, 32, 256)]
    assert cycles == sorted(cycles)


def test_a_single_row_would_be_multiplied_by_number():
    """So every number of rows is a multiple of eight on a TPU. And what the others look for is found here."""
    with mock.patch.dict(shapes.ROW_MULTIPLE, {"tpu": 1}):
        of = make_model(LLAMA, "v6e", max_running_requests=8)
    program = of.program(("forward", BucketKey(Phase.DECODE, 1, 1)))
    assert len(program.multiplied_by_number(of.kernels)) == 8
    assert program.cycles > forward(made("llama", "v6e"), Phase.DECODE, 8).cycles


@pytest.mark.parametrize(
    ("name", "target", "num_tokens", "options"),
    grid(
        [("llama", "v5e", 512, {}), ("qwen3", "v6e", 8192, {"tp_size": 4})],
        [
            ("llama", "v5e", 8192, {"kv_cache_dtype": "fp8_e4m3"}),
            ("llama", "v5e", 512, {"quantization": "int4"}),
            ("qwen3", "v6e", 512, {"tp_size": 8}),
            ("llama", "v5p", 512, {"quantization": "int8"}),
            ("qwen3", "tpu7x", 8192, {"tp_size": 8, "quantization": "fp8"}),
        ],
    ),
)
def test_prompts(name: str, target: str, num_tokens: int, options: Options):
    forward(made(name, target, **options), Phase.EXTEND, num_tokens)


@pytest.mark.parametrize(
    ("name", "target", "options"),
    grid(
        [
            ("heads-of-64", "v5e", {}),
            ("heads-of-256", "v5e", {}),
            ("llama", "v5e", {"kv_cache_dtype": "fp8_e4m3"}),
            ("llama", "v5e", {"quantization": "int8"}),
            ("llama", "v5e", {"quantization": "fp8"}),
            ("llama", "v5e", {"quantization": "int4"}),
            ("qwen3", "v6e", {"tp_size": 8, "kv_cache_dtype": "fp8_e4m3"}),
            ("qwen3", "v6e", {"tp_size": 4, "quantization": "int8"}),
        ],
        [
            ("qwen3", "v6e", {"tp_size": 4, "quantization": "int4"}),
            ("llama", "v6e", {"quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"}),
            ("llama", "v5p", {"quantization": "int8"}),
            ("llama", "tpu7x", {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}),
        ],
    ),
)
def test_eight_rows(name: str, target: str, options: Options):
    """What other kinds of heads, of pools and of kernels change."""
    forward(made(name, target, **options), Phase.DECODE, 8)


@pytest.mark.parametrize(
    ("target", "variant", "most"), [("v5e", GREEDY, 2.1), ("v6e", SAMPLED, 2.1), ("v5e", EVERYTHING, 26)], ids=str
)
def test_sampling(target: str, variant: Variant, most: float):
    """It accesses at most so many times the bytes of the logits. All branches count, and kernels say theirs."""
    of, name = made("llama", target), ("sample", MAX_RUNNING, variant)
    program, vocab = of.program(name), of.settings.model.vocab_size
    bound = STEP_TEMPORARY_BYTES if variant == GREEDY else SAMPLED_BYTES * MAX_RUNNING * vocab
    assert program.temporary_bytes <= bound
    counts = (MAX_RUNNING + 1) * vocab * jnp.int32.dtype.itemsize
    assert not variant.has_tables or program.aliased_bytes >= counts
    assert times_logits(of, name) <= most


def test_penalties_read_logits_and_two_tables_and_write_logits(monkeypatch: pytest.MonkeyPatch):
    """Beside these four times the logits, counting a token reads and writes a tile of memory, 0.016 times for all."""
    declared = Settings.runner_config
    monkeypatch.setattr(
        Settings, "runner_config", lambda self: dataclasses.replace(declared(self), has_switches=False)
    )  # no branches, which would count all
    of = make_model(LLAMA, "v5e", max_running_requests=MAX_RUNNING)
    with_penalties, without = (times_logits(of, ("sample", MAX_RUNNING, each)) for each in (PENALISED, SAMPLED))
    assert with_penalties - without <= 4.02


def times_logits(of: Model, name: Hashable) -> float:
    """How many times the bytes of the logits of all rows a program of sampling accesses, as XLA and kernels say."""
    of.program(name)
    accessed = of.executables.compiled(name).cost_analysis()["bytes accessed"]
    return accessed / (MAX_RUNNING * of.settings.model.vocab_size * jnp.float32.dtype.itemsize)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_products_of_experts_are_kernels(quantization: str):
    """XLA's own, or of experts in few bits ours: they compute a row with its expert only, and write no kernel anew."""
    of = made("mixtral", "v5e", quantization=quantization, pool_tokens=10_000)
    program = of.program(("forward", of.settings.buckets.decode[-1]))
    found = re.findall(r"%(ragged-dot-none|grouped_matmul)\S* = \S+ custom-call\(", program.hlo)
    assert found == 2 * 3 * ["ragged-dot-none" if quantization == "none" else "grouped_matmul"]
    assert f"[{MAX_RUNNING * 2},{8 * 4096}]" not in program.hlo, "no row stands there for every expert"
    num_bytes = {"none": 2, "int8": 1, "int4": 1}[quantization]  # two of 4 bits are a byte
    assert program.rewritten(of.kernels, 8 * num_bytes) == []


@pytest.mark.long
def test_norms_and_other_small_work_are_a_quarter_of_the_products():
    """Of a layer on one of four v6e, from one product of queries to the next, by XLA's estimate. The first has more."""
    of = make_model(QWEN3 | {"num_hidden_layers": 3}, "v6e", max_running_requests=MAX_RUNNING, tp_size=4)
    (key,) = (key for key in of.settings.buckets.extend if key.num_tokens == 2048)
    done = operations(of.program(("forward", key)).hlo)  # its gates have the shape of a kernel: no `check`
    *_, first, last = (place for place, each in enumerate(done) if each.name.endswith("qkv"))
    cycles = collections.Counter[str]()
    for each in done[first:last]:
        cycles[each.kind] += each.cycles
    assert cycles["elementwise"] <= 0.25 * cycles["product"]


@pytest.mark.parametrize("name", [("write_rows", 8), ("write_counts",), ("copy_slots",)], ids=str)
def test_tables_and_pages_change_in_place(name: tuple[object, ...]):
    of = made("llama", "v5e")
    program = of.program(name)
    changed = of.layer_bytes if name == ("copy_slots",) else 4 * (MAX_RUNNING + 1) * of.settings.runner_config().columns
    assert program.aliased_bytes >= changed
    assert program.temporary_bytes <= 2**20
