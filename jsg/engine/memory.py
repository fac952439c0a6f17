"""How the device's memory is divided: weights, temporaries, tables, and what is left for the KV pool."""

import dataclasses
import os

import jax

from jsg.config import EngineConfig
from jsg.errors import MemoryPlanError
from jsg.models.config import ModelConfig

CPU_POOL_BYTES = 2**30
"""KV pool on CPU unless asked otherwise: host memory has other users."""
PENALTY_BYTES = 4 + 1 + 4
"""Per request row and vocabulary entry: count, presence, bias."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device, and the size of the KV pool that they leave.

    Attributes:
        limit_bytes: What may be used: the device's memory times `--mem-fraction-static`.
        weights_bytes: Parameters.
        temporary_bytes: Intermediate results and outputs of the largest step.
        table_bytes: Page table and penalty tables.
        pool_tokens: KV slots, the dump page not counted.
        bytes_per_token: Keys and values of one token in all layers.
    """

    limit_bytes: int
    weights_bytes: int
    temporary_bytes: int
    table_bytes: int
    pool_tokens: int
    bytes_per_token: int

    def __str__(self) -> str:
        parts = {
            "weights": self.weights_bytes,
            "largest step": self.temporary_bytes,
            "tables": self.table_bytes,
            "KV pool": self.pool_tokens * self.bytes_per_token,
        }
        shown = " + ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in parts.items())
        pool = f"{self.pool_tokens} tokens of {self.bytes_per_token} bytes"
        return f"memory plan: {shown} ({pool}) of {self.limit_bytes / 2**20:.0f} MiB"


def device_memory_bytes() -> int:
    """Memory of the first device, or what is available on the host for a CPU."""
    device = jax.devices()[0]
    return _available_host_bytes() if device.platform == "cpu" else int(device.memory_stats()["bytes_limit"])


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    *,
    platform: str,
    kv_itemsize: int,
    weights_bytes: int,
    temporary_bytes: int,
    max_running: int,
    context_length: int,
) -> MemoryPlan:
    """Sizes the KV pool: `--max-total-tokens`, or all that is left up to what every running request could use.

    Raises:
        MemoryPlanError: What is left does not hold one request of the context length, or not the tokens asked for.
    """
    limit = int(device_memory_bytes() * config.mem_fraction_static)
    columns = -(-context_length // config.page_size)
    tables = (max_running + 1) * (4 * columns + PENALTY_BYTES * model.vocab_size)
    per_token = model.kv_bytes_per_token(kv_itemsize)
    left = limit - weights_bytes - temporary_bytes - tables
    fits = max(left, 0) // per_token // config.page_size * config.page_size - config.page_size
    wanted = config.max_total_tokens
    if wanted is None:
        roof = CPU_POOL_BYTES // per_token if platform == "cpu" else fits
        wanted = max(min(fits, roof, max_running * columns * config.page_size), context_length)
    pool_tokens = -(-wanted // config.page_size) * config.page_size
    plan = MemoryPlan(
        limit_bytes=limit,
        weights_bytes=weights_bytes,
        temporary_bytes=temporary_bytes,
        table_bytes=tables,
        pool_tokens=pool_tokens,
        bytes_per_token=per_token,
    )
    if pool_tokens > fits:
        raise MemoryPlanError(
            f"the KV pool must hold {pool_tokens} tokens, but memory is left for {max(fits, 0)}; lower "
            "--context-length or --max-total-tokens, raise --mem-fraction-static, or choose a smaller model "
            f"({plan})"
        )
    return plan


def _available_host_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
