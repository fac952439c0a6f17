"""Loads parameters from a checkpoint, or draws them from a seed. Each `Origin` has the names and shapes of tensors."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jsg.errors import ModelError
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import Form
from jsg.malloc import freed_at_once
from jsg.models.assemble import assemble
from jsg.models.checkpoint import Checkpoint, FewBits, Listed, Piece, faults, has_checkpoint, open_checkpoint
from jsg.models.clip import unread_tensors
from jsg.models.forms import GGUF_LINK
from jsg.models.llava import Llava, build_model
from jsg.models.origin import Origin, Source
from jsg.models.part_reader import PartReader
from jsg.models.quantise import FORMS, declare
from jsg.models.slices import Reader, Slices
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import TENSOR_AXIS, AnyMesh, sharding_of

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, int], None]
"""Called after each parameter with (parameters loaded, parameters in all, bytes read so far). Random weights read 0."""

SHORT_DRAW, LONG_DRAW = 2**16, 2**24
"""The least random numbers that are drawn, and the number above which no more are drawn than are needed."""
MAX_THREADS = 8
"""The most threads that read pieces at the same time. Each holds a few pieces."""

NO_MESH = AbstractMesh((), ())
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def load_model(
    directory: Path | None,
    config: ModelSpec,
    *,
    load_format: str = "auto",
    dtype: jax.typing.DTypeLike = jnp.float32,
    quantization: str = "none",
    seed: int = 0,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    compares_head: bool = True,
) -> nnx.Module:
    """The model of `config` with its parameters on the default device, or shared out over a mesh.

    Args:
        directory: The model directory; not used for `dummy`.
        config: Its records.
        load_format: `safetensors` and `orbax` read a checkpoint of that kind, `auto` the one that exists, and `dummy`
            draws seeded random parameters.
        dtype: Type of every parameter but kernels that are quantised.
        quantization: `int8`, `fp8` and `int4` round kernels to 8 or 4 bits as they are read, one tensor at a time.
        seed: Seed of dummy parameters.
        mesh: Devices that share the parameters; None for one device.
        progress: Called after each parameter.
        compares_head: False if the config is from `with_own_head`, or the head is not needed.

    Raises:
        ModelError: The architecture is unknown, the checkpoint does not have exactly the tensors that it needs, or a
            number that must be quantised is not finite; groups of inputs in 4 bits cannot be shared out. The message
            names the tensor.
    """
    if compares_head and directory is not None and load_format != "dummy":
        config = with_own_head(directory, config, load_format)
    model = abstract_model(config, dtype, quantization, mesh)
    if load_format == "dummy":
        _fill(model, _Seeded(seed), lambda: 0, progress)
        return model
    if directory is None:
        raise ModelError("a model directory is needed unless --load-format is dummy")
    with open_checkpoint(directory, config.names, load_format) as checkpoint, freed_at_once():
        checkpoint.require(checkpoint_shapes(model), lambda name: is_unread(config, name))
        _log_restored(checkpoint, model, dtype)
        _fill(model, PartReader(checkpoint, keeps=quantization == "none"), lambda: checkpoint.num_bytes_read, progress)
    return model


def with_own_head(directory: Path, config: ModelSpec, load_format: str = "auto") -> ModelSpec:
    """The config of a checkpoint, with the experts as they are there, and with a head of its own if one is there.

    Without the layer that drafts tokens, if that is not there.

    As in transformers, a model is not tied if its checkpoint has a head that differs from the embedding. Some
    checkpoints of tied models hold the table twice, and some files say or mean by default that a model is tied which is
    not.

    Raises:
        ModelError: The checkpoint is damaged.
    """
    is_open = config.tie_word_embeddings or config.has_experts or config.draft or is_in_few_bits(directory, config)
    if not is_open or not has_checkpoint(directory):
        return config
    with open_checkpoint(directory, config.names, load_format) as checkpoint:
        config = _with_forms(config, checkpoint).with_stacks(checkpoint.holds)
        config = with_own_layer(config, checkpoint.listed())
        if not config.tie_word_embeddings or not checkpoint.differ(HEAD, TABLE):
            return config
    logger.warning(
        "config.json ties the head to the embedding, but the checkpoint has a head that differs, which is used; write "
        "tie_word_embeddings: false"
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def with_own_layer(config: ModelSpec, held: Mapping[str, Listed]) -> ModelSpec:
    """The config without the layer that drafts tokens, if a checkpoint has not all of it: answers do without."""
    draft = config.draft
    if draft is None:
        return config
    shapes = checkpoint_shapes(abstract_model(dataclasses.replace(config, layers=config.layers[:1]), jnp.float32))
    own = {name: shape for name, shape in shapes.items() if name.startswith(f"{draft.prefix}.")}
    fault = next(iter(faults(held, own, lambda name: True)), None)
    if fault is None:
        return config
    if any(map(held.__contains__, own)):
        logger.warning(
            "the model drafts no tokens itself, because a part of its layer for them is not there: %s", fault
        )
    return dataclasses.replace(config, draft=None)


def with_kept(directory: Path, config: ModelSpec, load_format: str = "auto") -> ModelSpec:
    """The config of a checkpoint, with the forms of the kernels that it has in few bits and that are kept so.

    Raises:
        ModelError: The checkpoint is damaged.
    """
    if not is_in_few_bits(directory, config) or not has_checkpoint(directory):
        return config
    with open_checkpoint(directory, config.names, load_format) as checkpoint:
        return _with_forms(config, checkpoint)


def is_in_few_bits(directory: Path, config: ModelSpec) -> bool:
    """Whether a checkpoint may have kernels in few bits."""
    return config.names.published is not None or (directory / GGUF_LINK).exists()


def _with_forms(config: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    return dataclasses.replace(config, names=dataclasses.replace(config.names, kept=checkpoint.forms()))


def _log_restored(checkpoint: Checkpoint, model: nnx.Module, dtype: jax.typing.DTypeLike) -> None:
    """Says how many bytes the kernels take that are restored."""
    names = {
        source.name
        for param in parameters(model)
        if not isinstance(param.get_value(), Quantised)
        for source in param.get_metadata("origin").sources
    }
    stored = [tensor for name, _, tensor in checkpoint.stored() if name in names]
    kernels = [tensor for tensor in stored if isinstance(tensor, FewBits) and tensor.num_bytes]
    if kernels:
        num_bytes = jnp.dtype(dtype).itemsize * sum(math.prod(kernel.shape) for kernel in kernels)
        logger.warning(
            "%s in few bits (%.2f GB) are restored to %s as they are read, which makes them %.2f GB",
            "1 kernel" if len(kernels) == 1 else f"{len(kernels)} kernels",
            sum(kernel.num_bytes for kernel in kernels) / 1e9,
            jnp.dtype(dtype).name,
            num_bytes / 1e9,
        )


class _Seeded:
    """Random sources. A part of a tensor is drawn by itself, because a tensor may have many parts."""

    def __init__(self, seed: int):
        self._seed = seed

    def read(self, source: Source, slices: Slices) -> np.ndarray:
        return _dummy_tensor(source, self._seed)[slices]

    def kept(self, source: Source, slices: Slices, form: Form) -> None:
        return None

    def piece(self, source: Source) -> Piece:
        return Piece(0, source.shape[0])  # a whole one is drawn at once


def abstract_model(
    config: ModelSpec, dtype: jax.typing.DTypeLike, quantization: str = "none", mesh: AnyMesh | None = None
) -> nnx.Module:
    """The model with shapes and shardings in place of arrays. Nothing is allocated."""

    def build() -> nnx.Module:
        model = build_model(config, dtype)
        if quantization != "none":  # not the tower's kernels: an image goes through it once, so it would gain little
            text = cast(nnx.Module, model.text) if isinstance(model, Llava) else model
            declare(text, lambda origin: FORMS[quantization])
        elif config.names.kept:
            declare(model, functools.partial(_kept_form, config, 1 if mesh is None else mesh.size))
        return model

    with jax.sharding.use_abstract_mesh(NO_MESH):  # under another, flax would ask kernels in few bits for their type
        model = nnx.eval_shape(build)
    if mesh is not None:
        for param in parameters(model):
            value, origin = param.get_value(), param.get_metadata("origin")
            if quantization == "none" and isinstance(value, Quantised) and not _has_whole_groups(value, origin, mesh):
                value = jax.ShapeDtypeStruct(value.shape, dtype)  # it is restored
            param.set_value(_shared_out(value, origin, mesh))
    return model


def _kept_form(config: ModelSpec, num_devices: int, origin: Origin) -> Form | None:
    """The form in which a kernel stays as the checkpoint has it, if all that it is made of can be kept in one."""
    first, *others = {config.names.kept.get(source.name) for source in origin.sources}
    kept = first
    for each in others:
        kept = None if kept is None or each is None else kept.joined(each)
    if kept is None:
        return None
    if kept.form.has_order and (origin.expert_axis is not None or (origin.split_axis == 0 and num_devices > 1)):
        return None
    is_turned = origin.sources[0].part is not None and origin.sources[0].part.is_transposed
    return kept.form if is_turned == kept.is_turned else None


def _has_whole_groups(declared: Quantised, origin: Origin, mesh: AnyMesh) -> bool:
    """Whether devices can share a kernel out in whole groups of inputs, if they share out its inputs."""
    lengths = [length * _num_parts(origin, mesh) for length in (declared.form.group, declared.form.block) if length]
    is_shared = origin.split_axis == declared.axis
    return not is_shared or all(declared.shape[declared.axis] % length == 0 for length in lengths)


def _num_parts(origin: Origin, mesh: AnyMesh) -> int:
    """How many devices share out a parameter."""
    return mesh.size if origin.expert_axis is None else mesh.shape[TENSOR_AXIS]


def _shared_out(
    declared: jax.ShapeDtypeStruct | Quantised, origin: Origin, mesh: AnyMesh
) -> jax.ShapeDtypeStruct | Quantised:
    """The shape of a parameter with its sharding. An axis of length 1, which scales have, is not shared out."""
    if isinstance(declared, Quantised) and not _has_whole_groups(declared, origin, mesh):
        raise ModelError(
            f"--quantization int4 needs whole groups of {declared.form.group} inputs on each device, but "
            f"{_num_parts(origin, mesh)} devices cannot share out the {declared.shape[declared.axis]} inputs of "
            f"{origin.sources[0].name} so; choose int8 or another --tp-size"
        )

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axis = origin.split_axis
        if axis is not None and (len(x.shape) < len(declared.shape) or x.shape[axis] == 1):
            axis = None
        sharding = sharding_of(mesh, axis, len(x.shape), expert_axis=origin.expert_axis)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, declared)


def resolve_dtype(name: str, platform: str) -> jnp.dtype:
    """The type that `--dtype` means: `auto` is float32 on `platform` "cpu" and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def resolve_kv_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """The type of cached keys and values that `--kv-cache-dtype` means: `auto` is the model's `dtype`."""
    eight_bits = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
    return jnp.dtype(eight_bits.get(name, dtype))


def _fill(model: nnx.Module, reader: Reader, num_bytes_read: Callable[[], int], progress: Progress | None) -> None:
    """Gives every parameter its values, one after another."""
    params = list(parameters(model))
    with concurrent.futures.ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "load") as pool:
        for done, param in enumerate(params, start=1):
            value = assemble(param.get_value(), param.get_metadata("origin"), reader, pool)
            param.set_value(jax.block_until_ready(value))  # else arrays that are still being sent would pile up
            if progress is not None:
                progress(done, len(params), num_bytes_read())


def _dummy_tensor(source: Source, seed: int) -> np.ndarray:
    """Random values that depend only on the seed and the source, scaled so that logits have a std of about 1.

    A program that draws takes longer to compile than to run, and each length needs another program. So all short
    tensors are beginnings of draws of one length, and longer ones of draws whose lengths are powers of two.
    """
    name, shape, part = source.name, source.shape, source.part
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):  # CLIP numbers its norms
        return np.ones(shape, np.float32)
    key = f"{seed} {name}" if part is None else f"{seed} {name} {part.expert} {part.first}"
    digest = hashlib.sha256(key.encode()).digest()
    key = jax.random.key(int.from_bytes(digest[:4], "little"))
    count = math.prod(shape)
    length = max(SHORT_DRAW, 1 << (count - 1).bit_length()) if count <= LONG_DRAW else count
    scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
    return np.float32(scale) * np.asarray(jax.random.normal(key, (length,)))[:count].reshape(shape)


def parameters(model: nnx.Module) -> Iterator[nnx.Param]:
    """The parameters of a model, in an order that depends on its modules only."""
    return (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param))


def is_unread(config: ModelSpec, name: str) -> bool:
    """Whether a checkpoint may hold this tensor, which the model does not read."""
    is_head = config.tie_word_embeddings and name == HEAD
    in_tower = config.vision is not None and name in unread_tensors(config.vision)
    return is_head or in_tower or config.names.is_unread(name)


def origins(model: nnx.Module) -> Iterator[tuple[Origin, tuple[int, ...]]]:
    """The origin and the shape of each parameter."""
    for param in parameters(model):
        yield param.get_metadata("origin"), param.get_value().shape


def checkpoint_shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Names of the tensors that the model's parameters are made of, and their shapes in the file."""
    return {source.name: source.stored_shape for origin, _ in origins(model) for source in origin.sources}
