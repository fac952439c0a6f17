"""Tensors of a file that hold several projections, all experts, or rows in another order."""

import concurrent.futures
import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jsg import malloc
from jsg.conversion import convert as convert_module
from jsg.conversion.convert import convert
from jsg.errors import ModelError
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.models import in_place
from jsg.models.block_spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    NormSpec,
    QueryKeyNormSpec,
    RopeSpec,
    RouterSpec,
    StackSpec,
)
from jsg.models.checkpoint import open_checkpoint
from jsg.models.in_place import fill
from jsg.models.layers import parameter
from jsg.models.loading import abstract_model, checkpoint_shapes, load_model
from jsg.models.origin import Origin, Source, of_experts, side_by_side
from jsg.models.part_reader import PartReader
from jsg.models.spec import LayerSpec, ModelSpec
from tests.golden.variants import random_tensor

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS = 64, 6, 2, 16, 96, 3
ROTATED = 12


def model_of(layers: list[LayerSpec]) -> ModelSpec:
    return ModelSpec(
        architecture="of this test",
        vocab_size=40,
        hidden_size=WIDTH,
        layers=tuple(layers),
        final_norm=NormSpec(name="model.norm", eps=1e-6),
        max_position_embeddings=64,
    )


def layer(stack: StackSpec | None = None, *, is_dense: bool = False, is_fused: bool = False, **rope: Any) -> LayerSpec:
    """A layer whose tensors are fused and stacked, or each by itself."""
    qkv = ("self_attn.qkv_proj",) * 3 if is_fused else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    number = "" if stack else ".{expert}"
    gate, up = ("both", "both") if is_fused else ("gate", "up")
    experts = ExpertsSpec(
        count=EXPERTS,
        inner=INNER,
        router=RouterSpec(choice=ChoiceSpec(per_token=2)),
        gate=f"experts{number}.{gate}",
        up=f"experts{number}.{up}",
        down=f"experts{number}.down",
        stack=stack,
    )
    return LayerSpec(
        attention=AttentionSpec(
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=0.25,
            rope=RopeSpec(**rope),
            qk_norm=QueryKeyNormSpec(eps=1e-6, spans_heads=not is_dense),
            qkv_bias=True,
            projections=qkv,
        ),
        mlp=FeedForwardSpec(inner=INNER, gate=gate, up=up, has_bias=True) if is_dense else experts,
    )


STACKS = [StackSpec(), StackSpec(is_transposed=True, is_interleaved=True, suffix=""), StackSpec(is_transposed=True)]
PLAIN = model_of([layer(is_dense=True), *[layer() for _ in STACKS]])
MADE = model_of(
    [
        layer(is_dense=True, is_fused=True, rotated=ROTATED),
        *[layer(stack, is_fused=True, is_interleaved=True) for stack in STACKS],
    ]
)


def plain_tensors() -> dict[str, np.ndarray]:
    """The numbers of all projections."""
    shapes = checkpoint_shapes(abstract_model(PLAIN, np.float32))
    return {name: random_tensor(name, name, shape) for name, shape in shapes.items()}


def made_tensors(plain: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same numbers as another program would store them."""
    left = {name: in_files_order(name, tensor) for name, tensor in plain.items()}

    def take(prefix: str, *names: str) -> list[np.ndarray]:
        return [left.pop(f"{prefix}.{name}") for name in names]

    made = {}
    for i, stack in enumerate([None, *STACKS]):
        prefix = f"model.layers.{i}"
        for kind in ("weight", "bias"):
            qkv = take(f"{prefix}.self_attn", *(f"{name}_proj.{kind}" for name in "qkv"))
            made[f"{prefix}.self_attn.qkv_proj.{kind}"] = np.concatenate(qkv)
            if stack is None:
                made[f"{prefix}.both.{kind}"] = np.concatenate(take(prefix, f"gate.{kind}", f"up.{kind}"))
        if stack is None:
            continue
        both, downs = [], []
        for expert in range(EXPERTS):
            gate, up, down = take(f"{prefix}.experts.{expert}", "gate.weight", "up.weight", "down.weight")
            both.append(np.stack([gate, up], 1 if stack.is_interleaved else 0).reshape(2 * INNER, WIDTH))
            downs.append(down)
        for name, kernels in (("both", both), ("down", downs)):
            stacked = np.stack(kernels)
            turned = np.ascontiguousarray(stacked.swapaxes(1, 2)) if stack.is_transposed else stacked
            made[f"{prefix}.experts.{name}{stack.suffix}"] = turned
    return left | made


def in_files_order(name: str, tensor: np.ndarray) -> np.ndarray:
    """The rows of a head as they stand in a file with another rotation, from those of the model."""
    if not any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return tensor
    half, heads = HEAD_DIM // 2, tensor.reshape(-1, HEAD_DIM, *tensor.shape[1:])
    places = np.empty(HEAD_DIM, int)  # row of the file → row of the model
    if "layers.0" in name:
        turned = ROTATED // 2
        places[:turned], places[turned:ROTATED] = np.arange(turned), half + np.arange(turned)
        places[ROTATED:] = [turned, turned + 1, half + turned, half + turned + 1]
    else:
        places[0::2], places[1::2] = np.arange(half), half + np.arange(half)
    return heads[:, places].reshape(tensor.shape)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("plain", "made")}
    tensors = plain_tensors()
    save_file(tensors, made["plain"] / "model.safetensors")
    save_file(made_tensors(tensors), made["made"] / "model.safetensors")
    for directory in made.values():
        (directory / "config.json").write_text("{}")
    return made


def leaves(model: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


@functools.cache
def expected(directory: Path, quantization: str) -> list[np.ndarray]:
    return leaves(load_model(directory, PLAIN, quantization=quantization))


WAYS = [("pieces", "none"), ("pieces", "int8"), ("whole", "int4"), ("orbax", "none")]
SLOW_WAYS = [
    (way, rounded)
    for way in ("whole", "pieces", "orbax")
    for rounded in ("none", "int8", "int4")
    if (way, rounded) not in WAYS
]


@pytest.mark.parametrize(
    ("way", "quantization"), [*WAYS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_WAYS)]
)
def test_parts_are_loaded_as_tensors_of_their_own(directories, monkeypatch, tmp_path, way: str, quantization: str):
    wanted = expected(directories["plain"], quantization)
    directory = directories["made"]
    if way == "orbax":
        monkeypatch.setattr(convert_module, "read_spec", lambda directory: MADE)
        monkeypatch.setattr("jsg.conversion.orbax_writer.PIECE_BYTES", 1024)
        monkeypatch.setattr("jsg.conversion.orbax_writer.FILE_BYTES", 4096)
        convert(directory, tmp_path / "orbax", tp_size=2)
        directory = tmp_path / "orbax"
    if way == "pieces":
        monkeypatch.setattr(malloc, "PIECE_BYTES", 600)
        monkeypatch.setattr(in_place, "ROUNDED_BYTES", 600)
    found = leaves(load_model(directory, MADE, quantization=quantization))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["qkv", "experts"])
def test_a_device_reads_its_slice_of_a_part(directories, name: str):
    """Of q, k and v of one tensor, or of every second column of each expert, and nothing beside that but gaps."""
    if name == "qkv":
        order = MADE.layers[1].attention.rope.row_order(HEAD_DIM)
        widths = [count * HEAD_DIM for count in (HEADS, KV_HEADS, KV_HEADS)]
        tensors = ["model.layers.1.self_attn.qkv_proj.weight"] * 3
        sources = side_by_side(tensors, widths, (WIDTH,), (1, 1, 1), (order, order, None))
        shape, origin = (WIDTH, KV_HEADS, 5 * HEAD_DIM), Origin(sources, 2, transposed=True, split_axis=1)
        factor = 1
    else:
        tensor, stack = "model.layers.2.experts.both", StackSpec(is_transposed=True, is_interleaved=True, suffix="")
        sources = of_experts(tensor, EXPERTS, (INNER, WIDTH), stack, turn=1, turns=2)
        shape = (EXPERTS, WIDTH, INNER)
        origin = Origin(sources, transposed=True, split_axis=2, expert_axis=0)
        factor = 2
    declared = nnx.eval_shape(lambda: parameter(shape, np.float32, origin)).get_value()
    axis, parts = origin.split_axis, KV_HEADS
    spans = [(i * shape[axis] // parts, (i + 1) * shape[axis] // parts) for i in range(parts)]
    with open_checkpoint(directories["made"]) as made, concurrent.futures.ThreadPoolExecutor(2) as pool:
        ((whole,),) = fill(declared, origin, PartReader(made), pool, [None])
        before = made.num_bytes_read
        filled = fill(declared, origin, PartReader(made), pool, spans)
        num_read = made.num_bytes_read - before
    for span, (array,) in zip(spans, filled, strict=True):
        np.testing.assert_array_equal(array, whole[(slice(None),) * axis + (slice(*span),)])
    assert whole.nbytes <= num_read <= factor * whole.nbytes


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.qkv_proj.weight", "model.layers.2.experts.both"])
def test_a_wrong_tensor_is_refused_by_its_name_and_stored_shape(directories, tmp_path, name: str):
    with open_checkpoint(directories["made"]) as made:
        tensors = {name: tensor.read(()) for name, _, tensor in made.stored()}
    shapes = checkpoint_shapes(abstract_model(MADE, np.float32))
    assert {name: tensor.shape for name, tensor in tensors.items()} == shapes

    def loaded(changed: dict[str, np.ndarray]) -> None:
        save_file(changed, tmp_path / "model.safetensors")
        load_model(tmp_path, MADE)

    others = {other: tensor for other, tensor in tensors.items() if other != name}
    with pytest.raises(ModelError, match=re.escape(f"must hold {name}, but does not")):
        loaded(others)
    with pytest.raises(ModelError) as caught:
        loaded(others | {name: np.ascontiguousarray(tensors[name][:-1])})
    assert f"{name} must have the shape {list(shapes[name])}" in str(caught.value)
    with pytest.raises(ModelError, match="which this architecture does not have"):
        loaded(tensors | {"model.layers.0.self_attn.q_proj.weight": tensors["model.norm.weight"]})


def test_random_parts_have_numbers_of_their_own():
    model = load_model(None, MADE, load_format="dummy", seed=1)
    gate_up = np.asarray(model.layers[0].mlp.gate_up.kernel[...])
    assert not np.allclose(gate_up[:, 0], gate_up[:, 1])
    experts = np.asarray(model.layers[2].mlp.gate[...])
    assert not np.allclose(experts[0], experts[1]) and 0.9 < experts.std() * WIDTH**0.5 < 1.1


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotated", [None, 4, 12])
def test_an_order_of_rows_is_a_rotation(rotated: int | None, is_interleaved: bool):
    """Turning the pairs of the file is turning halves of the rows in the order that `row_order` gives."""
    rope = RopeSpec(rotated=rotated, is_interleaved=is_interleaved)
    order = rope.row_order(HEAD_DIM)
    assert (order is None) == (rotated is None and not is_interleaved)
    order = list(order or range(HEAD_DIM))
    count = rotated or HEAD_DIM
    pairs = [(2 * i, 2 * i + 1) if is_interleaved else (i, i + count // 2) for i in range(count // 2)]
    half = HEAD_DIM // 2
    assert [(order[i], order[i + half]) for i in range(count // 2)] == pairs
    assert sorted(order) == list(range(HEAD_DIM))


def test_a_source_that_is_a_whole_tensor_has_no_part():
    assert side_by_side(["a", "b"], [4, 2], (3,), (1, 1), (None, None)) == (Source("a", (4, 3)), Source("b", (2, 3)))
    assert of_experts("e.{expert}", 2, (4, 3)) == (Source("e.0.weight", (4, 3)), Source("e.1.weight", (4, 3)))
