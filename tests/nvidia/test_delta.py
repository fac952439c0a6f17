"""Linear attention of published models, compiled for a card of each class: states in place, launches, no spills."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from bench.nvidia.compiler import array, compile_for
from jsg.engine.device.cards import CLASSES, NAMES
from jsg.kernels_pallas import delta_recurrent, delta_tiles
from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, PieceTiles, ScanWeights, StateCache
from jsg.kernels_pallas.tile import QUERY_TILE
from tests.nvidia.test_kernels import having

SLOTS = 257
ALL_LAYERS = {"loop_concatenate_fusion"}
"""Of a program with a single layer: the pieces are one array, once in a step."""


class Model(NamedTuple):
    """Key heads, heads, the widths of a value and of a key, and the form."""

    key_heads: int
    heads: int
    values: int
    keys: int
    is_apart: bool = False
    has_delta: bool = True


MODELS = {
    "Qwen3.5-35B-A3B": Model(16, 32, 128, 128),
    "Kimi-Linear-48B-A3B": Model(32, 32, 128, 128, is_apart=True),
    "Granite-4-tiny": Model(1, 48, 64, 128, has_delta=False),
    "Nemotron-Nano-9B-v2": Model(8, 128, 80, 128, has_delta=False),
    "Nemotron-H-56B": Model(8, 256, 64, 256, has_delta=False),
}
CARDS = [pytest.param(name, marks=() if name in CLASSES.values() else pytest.mark.long) for name in NAMES]
ALIKE = ("Granite-4-tiny", "Nemotron-H-56B")
"""Decode of these is that of Nemotron Nano with other sizes."""
STEPS = [
    *(
        pytest.param(model, 32, 32, id=f"{model}-decode", marks=[pytest.mark.long] if model in ALIKE else [])
        for model in MODELS
    ),
    *(pytest.param(model, 512, 256, id=f"{model}-extend") for model in ("Kimi-Linear-48B-A3B", "Nemotron-Nano-9B-v2")),
]


class Layer(NamedTuple):
    """The arguments of a layer."""

    joint: Any
    raw: Any
    apart: GatesApart | None
    parameters: tuple[Any, ...]

    @property
    def weights(self) -> DeltaWeights | ScanWeights:
        if len(self.parameters) == len(ScanWeights._fields) - 1:
            return ScanWeights(*self.parameters, (0.001, float("inf")))
        return DeltaWeights(*self.parameters, 1e-6)


def layer(of: Model, num_tokens: int, dtype: str = "bfloat16") -> tuple[Layer, StateCache]:
    group, rest = of.heads // of.key_heads, of.heads // of.key_heads * of.values
    mixed, heads = 2 * of.keys + rest, array(of.heads, dtype="float32")

    def of_tokens(width: int) -> Any:
        return array(num_tokens, of.key_heads, width, dtype=dtype)

    taps, biases = (array(*own, of.key_heads, mixed, dtype=dtype) for own in ([4], []))
    cache = StateCache(
        array(SLOTS, 4, of.key_heads, mixed, dtype=dtype), array(SLOTS, of.heads, of.values, of.keys, dtype="float32")
    )
    joint = of_tokens(mixed + (0 if of.is_apart else rest))
    raw = of_tokens(group * (1 if of.is_apart or not of.has_delta else 2))
    if not of.has_delta:
        return Layer(joint, raw, None, (taps, *[heads] * 3, biases)), cache
    bias = array(of.heads, of.keys, dtype="float32") if of.is_apart else heads
    apart = GatesApart(of_tokens(group * of.keys), of_tokens(rest)) if of.is_apart else None
    return Layer(joint, raw, apart, (taps, heads, bias, array(of.values, dtype="float32"))), cache


def pieces_of(rows: int) -> Pieces:
    return Pieces(*[array(rows, dtype="int32")] * len(Pieces._fields))


@pytest.mark.parametrize(("model", "num_tokens", "rows"), STEPS)
@pytest.mark.parametrize("name", CARDS)
def test_states_are_changed_in_place(name: str, model: str, num_tokens: int, rows: int, nvdisasm):
    """Decode is one launch, which reads and writes each state once. With chunks the last inputs are written later."""
    given, cache = layer(MODELS[model], num_tokens)

    def call(given, cache, pieces):
        how = {"has_one_token": num_tokens == rows}
        return delta_recurrent.gated_delta(given.joint, given.raw, given.weights, cache, pieces, given.apart, **how)

    program = compile_for(name, call, given, cache, pieces_of(rows), donate=(1,))
    assert program.aliased_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    inputs_bytes = rows * cache.inputs.size // SLOTS * cache.inputs.dtype.itemsize
    assert program.temporary_bytes <= (0 if num_tokens == rows else inputs_bytes) + 4096, "no state is copied"
    launches = [launch.name for launch in program.launches if launch.name not in ALL_LAYERS]
    assert launches == ["delta_kernel"] if num_tokens == rows else len(launches) <= 7
    assert having(program.instructions("delta_kernel", nvdisasm), "LDL|STL") == set(), "registers spill"


LAUNCHES_IN_TILES = 9
"""Of a layer beside its products: the convolution, gates, the two kernels, the norm, and four that keep inputs."""
WIDTH = 512
FOR_TWO = ("Nemotron-Nano-9B-v2", "Nemotron-H-56B")
"""They differ from Granite's in their sizes. Of the others, float16 differs from bfloat16 in the parts of an input."""


def mark_of(card: str, model: str, dtype: str) -> tuple[pytest.MarkDecorator, ...]:
    """What is not for each class is for an L4 and an H200."""
    is_for_two = model in FOR_TWO or dtype == "float16"
    is_long = card not in CLASSES.values() or (is_for_two and card not in ("l4", "h200"))
    return (pytest.mark.long,) if is_long or (dtype == "float16" and model != "Qwen3.5-35B-A3B") else ()


@pytest.mark.parametrize(
    ("name", "model", "dtype"),
    [
        pytest.param(card, *case, marks=mark_of(card, *case), id="-".join((card, *case)))
        for card in NAMES
        for case in (
            *((model, "bfloat16") for model in MODELS),
            *((model, "float16") for model in ("Qwen3.5-35B-A3B", "Kimi-Linear-48B-A3B", "Granite-4-tiny")),
        )
    ],
)
def test_prompts_in_tiles(name: str, model: str, dtype: str, nvdisasm):
    """States are read and written once for each piece. What passes through memory is as the kernels' docstrings say.

    A layer has products around it, and a second one computes with the results of the first: of two layers side by side
    XLA makes common launches.
    """
    of, num_tokens, rows = MODELS[model], 512, 256
    given, cache = layer(of, num_tokens, dtype)
    num_tiles = num_tokens // QUERY_TILE + rows
    tiles = PieceTiles(*(array(size, dtype="int32") for size in (num_tiles, num_tiles, rows)))
    of_tokens = given.joint, given.raw, given.apart
    is_counted = dtype == "bfloat16" and (model == "Qwen3.5-35B-A3B" or (name == "h200" and model not in FOR_TWO))
    kernels = jax.tree.map(lambda x: array(WIDTH, *x.shape[1:], dtype=dtype), of_tokens) if is_counted else of_tokens
    num_products = 1 + len(jax.tree.leaves(kernels))

    def call(x, kernels, parameters, outputs, caches, pieces, tiles):
        after = []
        for output, cache in zip(outputs, caches, strict=True):
            tokens = kernels
            if is_counted:
                tokens = jax.tree.map(functools.partial(jnp.einsum, "td,dkn->tkn", x), kernels)
            each = Layer(*tokens, parameters)
            made, cache = delta_tiles.gated_delta(each.joint, each.raw, each.weights, cache, pieces, tiles, each.apart)
            x = made.reshape(num_tokens, -1).astype(x.dtype) @ output if is_counted else made
            after.append(cache)
        return x, after

    def compiled(count: int):
        outputs = [array(of.heads * of.values, WIDTH, dtype=dtype)] * count
        given_once = array(num_tokens, WIDTH, dtype=dtype), kernels, given.parameters, outputs
        return compile_for(
            name, call, *given_once, [cache] * count, pieces_of(rows), tiles, donate=(4,), keeps_kernels=True
        )

    one = compiled(1)
    if is_counted:
        assert len(compiled(2).launches) - len(one.launches) <= LAUNCHES_IN_TILES + num_products
    assert one.aliased_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    arrays = 1 if dtype == "bfloat16" else 3  # the parts of a number of float16 are made before they are one array
    mixed = arrays * cache.inputs.size // SLOTS // 4
    of_head = (1 + of.has_delta) * 2 * QUERY_TILE + of.values * (1 if of.has_delta else 2) + 3 * 2 + 16
    of_head += of.keys * (2 + 3 * 2) if of.is_apart else 0  # the decays, and what they make of queries and keys
    numbers = num_tokens * (mixed + of.heads * of_head)
    if is_counted:  # products make what is else given
        numbers += sum(x.size for x in jax.tree.leaves(of_tokens))
    assert one.temporary_bytes <= 2 * numbers, "no state is copied"
    assert one.fits
    for kernel in ("delta_inverse_kernel", "delta_tiles_kernel"):
        counts = one.instructions(kernel, nvdisasm)
        assert having(counts, "LDL|STL") == set(), "registers spill"
        assert having(counts, "HMMA|HGMMA|UTC.*MMA"), "tensor cores multiply"
