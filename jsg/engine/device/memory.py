"""How the device's memory is divided: weights, temporaries, tables, and the rest for the KV pool."""

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jsg.config import EngineConfig
from jsg.engine.device.devices import Device
from jsg.engine.device.host_memory import available_bytes
from jsg.engine.device.mask_pool import NUM_MASKS, num_words
from jsg.engine.device.pool_sizes import WindowPool, pool_sizes
from jsg.errors import ConfigError, MemoryPlanError
from jsg.kernels_pallas.tile import MAX_POOL_ELEMENTS, QUERY_TILE
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.latent_spec import LatentSpec
from jsg.models.spec import LayerSpec, ModelSpec
from jsg.models.state_specs import DeltaSpec, MambaSpec
from jsg.sched.buckets import Buckets
from jsg.sched.vision_store import NUM_FIXED_ROWS, VisionShape
from jsg.window import Window

CPU_POOL_BYTES = 2**30
"""The KV pool on a CPU unless `--max-total-tokens` is given: host memory has other users."""
STATES_FRACTION = 0.25
"""The part of the memory beside the weights, or on a CPU of a KV pool's, that states of prefixes take at most."""
LEAST_STATES = 8
"""States of prefixes that are kept at least unless `--max-states` is given."""
IMAGES_KEPT = 8
"""Encoded images of the largest size that the vision pool holds at least, unless `--vision-cache-size` is given."""
DEVICE_VISION_BYTES = 2**30
"""The least vision pool on other devices by default: about 200 images of one tile for a model 4096 wide."""
PENALTY_BYTES = 4 + 1 + 4
"""Bytes for each request row and vocabulary entry: count, presence, bias."""
PART_SAVED = 0.4
"""The part of an 8B Llama in bfloat16 that 8 bits save, rounded down."""
WORKSPACE_BYTES = 64 * 10**6
"""Of a pass over chunks beside its activations: cuBLAS asks for 32 MiB."""
HEAD_MULTIPLE = 8
SAMPLED_BYTES = 9.1
"""The most temporaries of sampling for each row and vocabulary entry, in programs for NVIDIA cards."""
RESERVE_FRACTION = 0.02
"""The part of the usable memory that is not planned. A full allocator fails where free memory lies in pieces, and the
results of a forward pass are still there while its step samples. Not measured on a device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device, and the size of the KV pool that they leave.

    Attributes:
        limit_bytes: Bytes that may be used: see `usable_bytes`.
        weights_bytes: Parameters.
        temporary_bytes: Intermediate results and outputs of the largest step.
        code_bytes: The code of all programs, where it lies in the memory that JAX uses: on a TPU.
        table_bytes: Page table, penalty tables and token masks.
        vision_bytes: Encoded images.
        bytes_per_state: Of a request or of a prefix, in all layers that keep no keys.
        max_running: Requests that have a state at the same time.
        num_states: States of prefixes.
        reserve_bytes: Memory that is not planned.
        pool_tokens: KV slots, without the dump page.
        bytes_per_token: Keys and values of one token in all layers.
        windows: The pools of layers with a window, which hold fewer tokens.
        advice: What would leave much more for the KV pool, as a clause for people; empty if nothing would.
    """

    limit_bytes: int
    weights_bytes: int
    temporary_bytes: int
    table_bytes: int
    reserve_bytes: int
    pool_tokens: int
    bytes_per_token: int
    vision_bytes: int = 0
    bytes_per_state: int = 0
    max_running: int = 0
    num_states: int = 0
    windows: tuple[WindowPool, ...] = ()
    advice: str = ""
    code_bytes: int = 0

    @property
    def num_slots(self) -> int:
        """Slots of states: those of requests and of prefixes, and that of padding."""
        return 1 + self.max_running + self.num_states

    @property
    def needed_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part, by its name for people."""
        return {
            "weights": self.weights_bytes,
            "largest step": self.temporary_bytes,
            **({"programs": self.code_bytes} if self.code_bytes else {}),
            "tables": self.table_bytes,
            **({"encoded images": self.vision_bytes} if self.vision_bytes else {}),
            **({"states": self.num_slots * self.bytes_per_state} if self.bytes_per_state else {}),
            "reserve": self.reserve_bytes,
            "KV pool": self.pool_bytes,
        }

    @property
    def pool_bytes(self) -> int:
        """The bytes of the KV pool, without dump pages."""
        spared = sum((self.pool_tokens - pool.tokens) * pool.bytes_per_token for pool in self.windows)
        return self.pool_tokens * self.bytes_per_token - spared

    def num_pages(self, page_size: int) -> dict[Window | None, int]:
        """By window the pages of the pool of its layers, with the dump page, and for None those of all tokens."""
        tokens: dict[Window | None, int] = {None: self.pool_tokens}
        tokens |= {pool.window: pool.tokens for pool in self.windows}
        return {window: count // page_size + 1 for window, count in tokens.items()}

    def __str__(self) -> str:
        shown = " + ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in self.parts.items())
        pool = f"{self.pool_tokens} tokens of {self.bytes_per_token} bytes"
        for window in self.windows:
            pool += f", {window.bytes_per_token} of them in layers with a window of {window.window} for {window.tokens}"
        if self.bytes_per_state:
            tokens = self.bytes_per_state // self.bytes_per_token
            pool += f"; {self.num_states} states of prefixes, each as large as {tokens} tokens"
        return (
            f"memory plan: {shown} ({pool}) of {self.limit_bytes / 2**20:.0f} MiB{self.advice and f'; {self.advice}'}"
        )


def usable_bytes(mem_fraction: float, device: Device) -> int:
    """Bytes that an engine may use of the memory of its device, or of each of them.

    On a GPU it is `--mem-fraction-static` of the whole memory, but no more than JAX has reserved. That is less where
    other processes hold memory, where `XLA_CLIENT_MEM_FRACTION` says so, or where JAX was started before. On other
    devices it is that fraction of what JAX may use, and on a CPU of the memory that the host or the container has left.

    Raises:
        MemoryPlanError: JAX does not say how much it may use.
    """
    if device.platform == "cpu":
        return int(available_bytes() * mem_fraction) // device.count
    if device.described_bytes is not None:
        return int(device.described_bytes * mem_fraction)
    limits = [(each.memory_stats() or {}).get("bytes_limit", 0) for each in jax.local_devices()[: device.count]]
    reserved = min(limits)
    if not reserved:
        raise MemoryPlanError(
            "JAX must say how much of the device's memory it may use, but does not; unset XLA_PYTHON_CLIENT_ALLOCATOR"
        )
    if device.platform != "gpu":
        return int(reserved * mem_fraction)
    return reserved if device.gpu is None else min(reserved, int(device.gpu.total_bytes * mem_fraction))


def largest_step_bytes(programs: Sequence[jax.stages.Compiled], buckets: Buckets, model: ModelSpec) -> int:
    """The most bytes that a step needs on one device, beside the arguments of its programs.

    The programs run one after another. Each needs its intermediate results and its outputs, except outputs that reuse
    donated inputs. The outputs of the forward pass are still there while the others run. A pass with drafts has logits
    of more rows than the largest pass.

    Args:
        programs: The largest program of each kind, with the forward pass first.
        buckets: The shapes of all steps.
        model: The shape of the model.
    """
    analyses = [program.memory_analysis() for program in programs]
    outputs = [a.output_size_in_bytes - a.alias_size_in_bytes if a else 0 for a in analyses]
    needs = [out + (a.temp_size_in_bytes if a else 0) for out, a in zip(outputs, analyses, strict=True)]
    more_rows = max(key.num_rows for key in buckets.all) - buckets.extend[-1].num_rows
    return max(needs[0], outputs[0] + more_rows * model.vocab_size * 4 + max(needs[1:]))


def total_code_bytes(programs: Mapping[Hashable, jax.stages.Compiled], names: Iterable[Hashable]) -> int:
    """Bytes of the code of all programs on one device, some of which are compiled.

    A program that is not counts as much as those of its kind on average. From one shape of a phase to the next the code
    grows about evenly, so the smallest and the largest tell what those between need: compiled for a v5e, forward passes
    of an 8B Llama with one layer have 1.8, 2.6 and 5.0 MB (8, 64 and 256 rows), and 3.6, 6.9 and 8.1 MB (64, 1024 and
    8192 tokens).

    Args:
        programs: The compiled programs by name.
        names: Those of all programs.
    """
    analyses = {name: program.memory_analysis() for name, program in programs.items()}
    sizes = {name: analysis.generated_code_size_in_bytes if analysis else 0 for name, analysis in analyses.items()}
    by_kind: defaultdict[Hashable, list[int]] = defaultdict(list)
    for name, size in sizes.items():
        for kind in {_kind(name), _kind(name)[:1]}:
            by_kind[kind].append(size)
    total = sum(sizes.values())
    for name in set(names) - sizes.keys():
        alike = by_kind[_kind(name)] or by_kind[_kind(name)[:1]] or [0]
        total += sum(alike) // len(alike)
    return total


def _kind(name: Any) -> tuple[Hashable, ...]:
    """What a program does, and its phase or variant: its name without sizes."""
    return tuple(getattr(part, "phase", part) for part in name if not isinstance(part, int))


def extend_bound(
    model: ModelSpec, num_tokens: int, dtype: jnp.dtype, *, restored_bytes: int | None = None, num_devices: int = 1
) -> int:
    """The most temporaries of a pass over chunks, as programs for NVIDIA cards have them: tests/nvidia compares.

    These are gate and up of each token that a feed-forward block takes, and their product, and the inputs that layers
    have of their own. XLA's own matmuls, which quantised kernels take, keep a fourth of a block's. Experts and latent
    attention: see `_kept_numbers`.

    Args:
        model: The shape of the model.
        num_tokens: New tokens of the step.
        dtype: Type of an activation.
        restored_bytes: Bytes of the largest kernel that a step restores; None if kernels are not quantised.
        num_devices: Devices that share the model.
    """
    products = 3 if restored_bytes is None else 4
    mixed = 3 if dtype == jnp.float16 else 2
    kept = max(_kept_numbers(each, model.hidden_size, products, mixed, num_devices) for each in set(model.layers))
    blocks_bytes = num_tokens * kept * dtype.itemsize
    copied_bytes = copied_head_bytes(model, dtype.itemsize) // num_devices
    own = model.layer_inputs
    inputs_bytes = 0 if own is None else num_tokens * own.count * own.width * dtype.itemsize
    return blocks_bytes + inputs_bytes + WORKSPACE_BYTES + copied_bytes + (restored_bytes or 0)


def _kept_numbers(layer: LayerSpec, width: int, products: int, mixed: int, num_devices: int) -> int:
    """The numbers of each token that a layer keeps on a device beside the residual stream, at most.

    Experts read copies of the token, which every device has whole; the product in a shared expert may be there
    beside them. Latent attention keeps the queries as they are made, the part of them that is moved into the space
    of rows, and that beside the other part. Linear attention keeps projections before and after their convolution
    (`mixed` arrays: one of float16 is two of bfloat16 after it), and a row for each head. The gated delta rule has
    a second one, and outputs before and after their norm, beside the stream and what is normed of it; with decays
    by channel outputs once, and before them three operands that decayed, in two parts. A selective scan has outputs
    in float32 before and after their gates.
    """
    attention, kept = layer.attention, 0
    if isinstance(attention, DeltaSpec):
        keys, values = attention.key_dim, attention.value_dim
        of_head = 2 * 2 * QUERY_TILE + (3 * 2 * keys + values if attention.gate_rank else 3 * values)
        kept = (mixed * attention.mixed + attention.heads * of_head) // num_devices + 4 * width
    if isinstance(attention, MambaSpec):
        of_heads = attention.heads * (5 * attention.value_dim + 2 * QUERY_TILE)
        kept = (mixed * attention.mixed + of_heads) // num_devices
    if isinstance(attention, LatentSpec):
        of_head = 2 * attention.rank + 2 * attention.rope_dim + attention.plain_dim
        kept = attention.heads * of_head // num_devices
    return max([kept, *(_kept_by_block(block, width, products, num_devices) for block in layer.blocks)])


def _kept_by_block(mlp: FeedForwardSpec | ExpertsSpec, width: int, products: int, num_devices: int) -> int:
    inner = mlp.inner // num_devices
    if not isinstance(mlp, ExpertsSpec):
        return products * inner
    shared = 0 if mlp.shared is None else mlp.shared.inner // num_devices
    routed = mlp.router.choice.per_token * ((products - 1) * inner + max(inner, width))
    return max(products * shared, routed + shared)


def copied_head_bytes(model: ModelSpec, itemsize: int) -> int:
    """Bytes of the head, if XLA pads it to a multiple of 8 tokens in each step, as Granite's of 49 159; 0 if not."""
    return model.vocab_size * model.hidden_size * itemsize if model.vocab_size % HEAD_MULTIPLE else 0


def largest_step_bound(
    model: ModelSpec, buckets: Buckets, dtype: jnp.dtype, *, restored_bytes: int | None = None, num_devices: int = 1
) -> int:
    """The most that `largest_step_bytes` finds for an NVIDIA card, without compiling. See `extend_bound`."""
    tokens, rows = buckets.extend[-1].num_tokens, max(key.num_rows for key in buckets.all)
    extend = extend_bound(model, tokens, dtype, restored_bytes=restored_bytes, num_devices=num_devices)
    return 4 * rows * model.vocab_size + max(extend, round(SAMPLED_BYTES * rows * model.vocab_size))


def plan_memory(
    config: EngineConfig,
    model: ModelSpec,
    *,
    platform: str,
    limit_bytes: int,
    page_size: int,
    kv_itemsize: int,
    weights_bytes: int,
    temporary_bytes: int,
    max_running: int,
    context_length: int,
    chunk: int,
    code_bytes: int = 0,
    vision_bytes: int = 0,
    bytes_per_state: int = 0,
    draft_row_bytes: int = 0,
    num_devices: int = 1,
) -> MemoryPlan:
    """Sizes the KV pool: `--max-total-tokens`, or all memory that is left, up to what running requests could ever use.

    All bytes are those of one device, but `bytes_per_state`, those of all layers' states of a request. Several devices
    share the key-value heads and the states. `chunk` are the new tokens of a step at most, and `draft_row_bytes` what a
    request row has for drafts of the model itself.

    Raises:
        MemoryPlanError: What is left does not hold one request of the context length, or not the tokens asked for.
    """
    columns = -(-context_length // page_size)
    sizes = pool_sizes(
        model,
        kv_itemsize,
        num_devices=num_devices,
        page_size=page_size,
        chunk=chunk,
        max_running=max_running,
        context_length=context_length,
    )
    num_groups = len(sizes.bytes_per_token)
    tables = (max_running + 1) * (4 * columns * num_groups + PENALTY_BYTES * model.vocab_size)
    tables += (max_running + 1) * draft_row_bytes + NUM_MASKS * 4 * num_words(model.vocab_size)
    per_token = model.kv_bytes_per_token(kv_itemsize) // num_devices
    reserve = 0 if platform == "cpu" else int(limit_bytes * RESERVE_FRACTION)
    bytes_per_state //= num_devices
    left = (CPU_POOL_BYTES // num_devices) if platform == "cpu" else limit_bytes - weights_bytes - reserve
    num_states = _num_states(config, max_running, bytes_per_state, left)
    states_bytes = (1 + max_running + num_states) * bytes_per_state
    left = limit_bytes - weights_bytes - temporary_bytes - code_bytes - tables - vision_bytes - states_bytes - reserve
    fits = sizes.tokens_in(max(left, 0) - page_size * per_token) // page_size * page_size
    if platform == "gpu" and kv_itemsize == 1:
        largest = max(shape.heads // num_devices * shape.head_dim for shape in model.kv_shapes)
        fits = min(fits, MAX_POOL_ELEMENTS // (largest * page_size) * page_size - page_size)
    wanted, room = config.max_total_tokens, 0
    if wanted is None:
        room = min(left, CPU_POOL_BYTES // num_devices) if platform == "cpu" else left
        roof = sizes.tokens_in(CPU_POOL_BYTES // num_devices) if platform == "cpu" else fits
        wanted = max(min(fits, roof, max_running * columns * page_size), context_length)
    pool_tokens = -(-wanted // page_size) * page_size
    is_cut = config.max_total_tokens is None and platform != "cpu" and fits < max_running * columns * page_size
    plan = MemoryPlan(
        limit_bytes=limit_bytes,
        weights_bytes=weights_bytes,
        temporary_bytes=temporary_bytes,
        code_bytes=code_bytes,
        table_bytes=tables,
        reserve_bytes=reserve,
        pool_tokens=pool_tokens,
        bytes_per_token=per_token,
        vision_bytes=vision_bytes,
        bytes_per_state=bytes_per_state,
        max_running=max_running,
        num_states=num_states,
        windows=sizes.window_pools(pool_tokens, room - page_size * per_token),
        advice=_advice(config, weights_bytes, sizes.num_bytes(max(fits, 0))) if is_cut else "",
    )
    if pool_tokens > fits:
        fewer = ", --max-running-requests or --max-states" if states_bytes else ""
        raise MemoryPlanError(
            f"the KV pool must hold {pool_tokens} tokens, but memory is left for {max(fits, 0)}; lower "
            f"--context-length or --max-total-tokens{fewer}, raise --mem-fraction-static, or choose a smaller model "
            f"({plan})",
            max(fits, 0),
        )
    return plan


def _num_states(config: EngineConfig, max_running: int, bytes_per_state: int, left_bytes: int) -> int:
    """How many states of prefixes are kept: `--max-states`, or two for each of the requests that may run.

    By default they take no more than a part of what weights leave, since each takes the memory of many tokens.

    Raises:
        ConfigError: The model has no states.
    """
    if config.max_states and not bytes_per_state:
        raise ConfigError("--max-states needs a model with linear attention or convolutions; leave it out")
    if not bytes_per_state or config.disable_radix_cache:
        return 0
    if config.max_states is not None:
        return config.max_states
    most = max(int(left_bytes * STATES_FRACTION) // bytes_per_state, LEAST_STATES)
    return min(2 * max_running, most)


def _advice(config: EngineConfig, weights_bytes: int, pool_bytes: int) -> str:
    """Recommends weights in 8 bits where the memory that they leave free would at least double the pool."""
    if config.quantization != "none" or pool_bytes > PART_SAVED * weights_bytes:
        return ""
    return "--quantization int8 would leave the KV pool twice as much or more"


def vision_shape(config: EngineConfig, model: ModelSpec, *, platform: str, row_bytes: int) -> VisionShape | None:
    """Sizes the vision pool, whose rows have `row_bytes`; None where the model takes text only.

    Raises:
        ConfigError: `--vision-cache-size` is too small for a tile, or the model takes text only.
    """
    vision, asked = model.vision, config.vision_cache_size
    if vision is None:
        if asked is not None:
            raise ConfigError(
                "--vision-cache-size needs a model that takes images, but this one does not; leave it out"
            )
        return None
    side = vision.image_size
    most_tiles = 1 + max(((height // side) * (width // side) for height, width in vision.grid_pinpoints), default=0)
    if asked is None:
        least = 0 if platform == "cpu" else DEVICE_VISION_BYTES // row_bytes
        num_rows = max(IMAGES_KEPT * most_tiles * vision.patches_per_tile, least) + NUM_FIXED_ROWS
    else:
        num_rows = asked * 2**20 // row_bytes
    if num_rows < vision.patches_per_tile + NUM_FIXED_ROWS:
        raise ConfigError(f"--vision-cache-size must hold a tile, {vision.patches_per_tile} rows, but holds {num_rows}")
    return VisionShape(
        num_rows=num_rows,
        tile_rows=vision.patches_per_tile,
        frame_rows=vision.patches_per_frame,
        image_size=side,
        has_newline=vision.has_newline,
    )
