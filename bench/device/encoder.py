"""The vision encoder alone: every program that encodes tiles of images or frames of videos.

Before a program is timed, its results are compared with those of the same tower in float32, one tile at a time.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.device.correctness import MAX_ERROR, Correctness
from bench.device.events import Part
from bench.device.queued import floor_facts, options, temporary_mib, time_queued
from bench.roofline import Cost
from bench.shapes import write_model
from jsg.engine.device import step
from jsg.engine.shapes import ENCODE_SIZES, OTHER_ENCODE_SIZES
from jsg.models.config import read_spec
from jsg.models.loading import load_model
from jsg.models.model import Model
from jsg.models.vision_config import VisionConfig
from jsg.sched.vision_store import NUM_FIXED_ROWS


def measure(part: Part) -> None:
    """Measures the milliseconds of each program, beside its floor."""
    encoder, correctness = Encoder(part.plan.images, part.plan.dtype, part.folder / "seeing"), Correctness(part)
    sizes = ENCODE_SIZES.get(jax.default_backend(), OTHER_ENCODE_SIZES)
    for is_video in (False, True):
        for count in sizes:
            name = f"encode {count} {'frames' if is_video else 'tiles'}"
            part.attempt(name, functools.partial(_measure, part, correctness, encoder, name, count, is_video=is_video))
    correctness.end()


class Encoder:
    """A tower with random weights, and the pool of rows that it writes to. The text model has only one layer."""

    def __init__(self, shape: dict[str, Any], dtype: str, directory: Path):
        """Makes the weights.

        Args:
            shape: The model's config.json.
            dtype: Type of weights and activations.
            directory: The directory that the shape is written to.
        """
        config = read_spec(write_model(directory, shape))
        assert config.vision is not None
        self.vision, self.width = config.vision, config.hidden_size
        graph, leaves = nnx.split(load_model(None, config, load_format="dummy", dtype=dtype))
        flat, structure = jax.tree.flatten(leaves)
        self.leaves = tuple(flat)
        self._merge: step.Merge = lambda leaves: cast(Model, nnx.merge(graph, jax.tree.unflatten(structure, leaves)))

    def num_rows(self, *, is_video: bool) -> int:
        """The number of rows that a tile or frame becomes."""
        return self.vision.patches_per_frame if is_video else self.vision.patches_per_tile

    def pool(self, count: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """A pool with room for this number of tiles."""
        return jnp.zeros((NUM_FIXED_ROWS + count * self.vision.patches_per_tile, self.width), dtype)

    def rows(self, count: int, *, is_video: bool) -> jax.Array:
        """The rows of the pool for this number of tiles or frames."""
        each = self.num_rows(is_video=is_video)
        return NUM_FIXED_ROWS + jnp.arange(count * each, dtype=jnp.int32).reshape(count, each)

    def compile(self, leaves: Sequence[jax.Array], count: int, *, is_video: bool) -> jax.stages.Compiled:
        """The engine's program, with parameters of this type."""
        encode = functools.partial(step.encode, self._merge, is_video=is_video)
        size, dtype = self.vision.image_size, leaves[0].dtype
        pixels = jax.ShapeDtypeStruct((count, 3, size, size), jnp.float32)
        arguments = leaves, self.pool(count, dtype), pixels, self.rows(count, is_video=is_video)
        return jax.jit(encode, donate_argnums=1).lower(*arguments).compile(compiler_options=options())

    def error(self, found: jax.Array, pixels: jax.Array, *, is_video: bool) -> float:
        """The relative error of the rows of tiles that are encoded together.

        The reference is each tile alone in float32, with the same rounded parameters. The error is the root mean square
        of the difference, divided by that of the reference.
        """
        leaves = tuple(leaf.astype(jnp.float32) for leaf in self.leaves)
        run, rows = self.compile(leaves, 1, is_video=is_video), self.rows(1, is_video=is_video)
        made = [run(leaves, self.pool(1, jnp.float32), tile[None], rows)[rows] for tile in pixels]
        exact = np.concatenate([np.asarray(each, np.float64) for each in made])
        return float(np.sqrt(np.mean((np.asarray(found, np.float64) - exact) ** 2) / np.mean(exact**2)))


def _measure(part: Part, correctness: Correctness, encoder: Encoder, name: str, count: int, *, is_video: bool) -> None:
    size = encoder.vision.image_size
    pixels = jax.random.normal(jax.random.key(0), (count, 3, size, size))
    rows, dtype = encoder.rows(count, is_video=is_video), part.plan.dtype
    compiled = encoder.compile(encoder.leaves, count, is_video=is_video)
    pool = compiled(encoder.leaves, encoder.pool(count, dtype), pixels, rows)
    error = encoder.error(pool[rows], pixels, is_video=is_video)
    correctness.add(f"{name}: error, of what the rows are", error, MAX_ERROR[dtype])

    def call() -> jax.Array:
        nonlocal pool
        pool = compiled(encoder.leaves, pool, pixels, rows)
        return pool

    samples = time_queued(part, call)
    cost = encode_cost(encoder.vision, encoder.width, part.plan.itemsize, count, is_video=is_video)
    facts = {"count": count, "is_video": is_video, "per_s": count / min(samples) * 1e3, **temporary_mib(compiled)}
    part.add(name, "ms", samples, kind="encode", **facts, **floor_facts(part, cost, min(samples)))


def encode_cost(vision: VisionConfig, text_width: int, itemsize: int, count: int, *, is_video: bool) -> Cost:
    """The bytes and operations that tiles or frames need in any implementation: every kernel is read once."""
    width, num_layers = vision.hidden_size, max(vision.feature_layers)
    patches = 3 * vision.patch_size**2 * width
    layer = 4 * width**2 + 2 * width * vision.intermediate_size
    projector = len(vision.feature_layers) * width * text_width + text_width**2
    num_places, num_patches = vision.patches_per_side**2 + 1, vision.patches_per_side**2
    shown = vision.patches_per_frame if is_video else vision.patches_per_tile
    products = num_patches * patches + num_places * num_layers * layer + shown * projector
    return Cost(
        weight_bytes=itemsize * (patches + num_layers * layer + projector),
        kv_bytes=0,
        matmul_flops=2 * count * products,
        attention_flops=4 * count * num_layers * num_places**2 * width,
    )
