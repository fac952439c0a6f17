"""What a device can do at best, measured, and the time that follows from it for a step."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jsg.models.config import ModelConfig

REPEATS = 10


class Rates(NamedTuple):
    """Measured on the device in the same run.

    Attributes:
        copy_bytes_per_s: Bytes read and written per second by a copy.
        matmul_flops_per_s: Of a large square matmul in the dtype of the model.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


class Cost(NamedTuple):
    """What a step must move and compute, whatever the implementation."""

    num_bytes: float
    num_flops: float

    def floor_ms(self, rates: Rates) -> float:
        """The time that the slower of memory and arithmetic needs; nothing can be faster."""
        return 1e3 * max(self.num_bytes / rates.copy_bytes_per_s, self.num_flops / rates.matmul_flops_per_s)


def copy_rates(num_bytes: int) -> list[float]:
    """Gigabytes read and written per second, of each of several passes over one large array.

    The array is donated, as the engine's are: fresh memory would be measured by what it costs to get it.
    """
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.ones(num_bytes // 4, jnp.float32)

    def run() -> jax.Array:
        nonlocal array
        array = add_one(array)
        return array

    return [2 * num_bytes / 1e9 / s for s in _seconds(run)]


def matmul_rates(size: int, dtype: jax.typing.DTypeLike) -> list[float]:
    """Teraflops per second, of each of several `size` x `size` matmuls."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    multiply = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    return [2 * size**3 / 1e12 / s for s in _seconds(lambda: multiply(a, b))]


def step_cost(config: ModelConfig, itemsize: int, *, rows: int, cached: int, new: int) -> Cost:
    """A step of `rows` requests with `new` tokens each over `cached` others, one row of logits for each.

    Bytes: every weight but the embedding table once, keys and values of every row's context once. Activations, which
    can stay on the chip, are not counted. Flops: the matmuls, and attention over the keys that each token sees.
    """
    width, heads_dim = config.hidden_size, config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    per_layer = width * (heads_dim + 2 * kv_dim) + heads_dim * width + 3 * width * config.intermediate_size
    layers, head = config.num_layers * per_layer, width * config.vocab_size
    tokens = rows * new
    pairs = rows * (cached * new + new * (new + 1) / 2)
    return Cost(
        num_bytes=itemsize * (layers + head) + config.kv_bytes_per_token(itemsize) * rows * (cached + new),
        num_flops=2 * layers * tokens + 2 * head * rows + 4 * config.num_layers * heads_dim * pairs,
    )


def _seconds(run: Callable[[], jax.Array]) -> list[float]:
    """Of `REPEATS` calls, after two others."""
    found = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        run().block_until_ready()
        found.append(time.perf_counter() - start)
    return found[2:]
