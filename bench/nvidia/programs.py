"""Every program that an engine on a card would compile for a model. There are only shapes; nothing is allocated."""

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from bench.compiled import kernels_of
from bench.nvidia import compiler
from bench.nvidia.compiler import Program
from jsg.cache.pool import make_pool, make_states
from jsg.config import EngineConfig
from jsg.engine.device import fp8_kernels
from jsg.engine.device.cards import card as card_of
from jsg.engine.device.cards import mesh_of
from jsg.engine.device.devices import multiplies_e4m3
from jsg.engine.device.executables import COMPILER_OPTIONS, QUANTISED_OPTIONS, Executables
from jsg.engine.device.memory import vision_shape
from jsg.engine.device.programs import DeviceState, Programs, RunnerConfig, make_state, over_devices
from jsg.engine.shapes import OTHER_ENCODE_SIZES, ROW_MULTIPLE
from jsg.models.config import read_spec
from jsg.models.llava import Llava
from jsg.models.loading import abstract_model
from jsg.models.quantise import STORED
from jsg.models.spec import ModelSpec
from jsg.sched.buckets import Buckets, make_buckets

MAX_RUNNING = 256
CHUNK = 8192
"""The chunk size that `jsg/engine/startup.py` chooses on a GPU by default."""
BUCKETS = make_buckets(MAX_RUNNING, CHUNK, row_multiple=ROW_MULTIPLE["gpu"], shares_prefixes=True)
POOL_TOKENS = 700_000
"""About the number of tokens for which an H200 has room beside an 8B model in bfloat16."""


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """The arguments of a call of `Executables.declare`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]


class CardExecutables(Executables):
    """Stores the programs that `Programs` declares, and compiles those that a test asks for."""

    def __init__(self, card: str, hidden_size: int, quantization: str, num_devices: int = 1, num_groups: int = 1):
        options = QUANTISED_OPTIONS if quantization in STORED else COMPILER_OPTIONS
        mesh = mesh_of(card, num_devices, num_groups) if num_devices > 1 else None
        by_kind = {"encode": COMPILER_OPTIONS["gpu"]}
        super().__init__(forbid_compile=False, compiler_options=options["gpu"], options_by_kind=by_kind, mesh=mesh)
        self._card, self._num_devices, self._num_groups = card, num_devices, num_groups
        self._hidden_size = hidden_size
        self._programs: dict[Hashable, Declared] = {}

    def declare(
        self,
        name: Hashable,
        fn: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
        out_specs: Any = PartitionSpec(),  # noqa: B008 # never changes
    ) -> None:
        self._programs[name] = Declared(*self._over_devices(fn, args, out_specs), donate)

    def output_shape(self, name: Hashable) -> tuple[None, jax.ShapeDtypeStruct]:
        """The shape of the hidden states, the second result of a forward pass. No caller needs others or a trace."""
        assert isinstance(name, tuple)
        _, key = name
        return None, jax.ShapeDtypeStruct((key.num_tokens, self._hidden_size), jnp.bfloat16)

    def program(self, name: Hashable) -> Program:
        declared = self._programs[name]
        return compiler.compile_for(
            self._card,
            declared.fn,
            *declared.args,
            donate=declared.donate,
            num_devices=self._num_devices,
            num_groups=self._num_groups,
            options=self.compiler_options(name),
            keeps_kernels=True,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model on a card.

    Attributes:
        layer_elements: The number of elements in the keys of one layer of the pool; its values have as many.
        state_elements: Those of the arrays that hold the states of a layer, for all requests.
        donated_bytes: The bytes of pool and page table, which a forward pass changes in place.
        vision: The pool of encoded images; None if the model takes only text.
        kernels: The text model's kernels, each as (inputs, outputs) of a matrix. Those of experts are side by side.
        tower_kernels: The kernels of the image encoder, in the same form.
    """

    config: ModelSpec
    layer_elements: int
    state_elements: frozenset[int]
    donated_bytes: int
    vision: jax.ShapeDtypeStruct | None
    kernels: frozenset[tuple[int, int]]
    tower_kernels: frozenset[tuple[int, int]]
    programs: CardExecutables


def make_model(
    shape: dict[str, Any],
    *,
    card: str = "h200",
    buckets: Buckets = BUCKETS,
    page_size: int = 1,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    kv_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    quantization: str = "none",
    fp8_products: str = "auto",
    options_of: str | None = None,
    num_devices: int = 1,
    num_groups: int = 1,
    pool_tokens: int = POOL_TOKENS,
    layers: Sequence[int] | None = None,
    **changes: Any,
) -> Model:
    """The programs of a model.

    Args:
        shape: Its `config.json`.
        card: The card that it is compiled for: see `jsg.engine.device.cards`.
        buckets: The shapes of its steps. Tiles are encoded in the numbers that the engine uses on a GPU.
        page_size: KV slots in one page.
        dtype: Type of its weights and activations.
        kv_dtype: Type of the KV pool.
        quantization: Quantization of its kernels.
        fp8_products: See `EngineConfig`.
        options_of: The quantization for which XLA's options are, if it differs.
        num_devices: The number of cards that share the model.
        num_groups: The number of groups of cards that each have their own experts.
        pool_tokens: The number of KV slots.
        layers: Which of its layers it has; None for all.
        changes: Fields of the text model's config to change.
    """
    config = read_shape(shape, changes).over_devices(num_devices, num_groups)
    if layers is not None:
        config = dataclasses.replace(config, layers=tuple(config.layers[index] for index in layers))
    vision = vision_shape(EngineConfig(), config, platform="gpu", row_bytes=2 * config.hidden_size)
    if vision is not None:
        buckets = dataclasses.replace(buckets, encode=OTHER_ENCODE_SIZES)
    settings = RunnerConfig(
        vocab_size=config.vocab_size,
        num_rows=MAX_RUNNING + 1,
        columns=-(-config.max_position_embeddings // page_size),
        page_size=page_size,
        eos_token_ids=frozenset(),
        vision=vision,
        has_states=bool(config.state_shapes),
        has_switches=False,
    )
    num_pages = pool_tokens // page_size + 1
    shapes = (config.kv_shapes, num_pages, page_size)
    rows = None if vision is None else jax.ShapeDtypeStruct((vision.num_rows, config.hidden_size), dtype)

    def begin(rows: Any) -> DeviceState:
        pool = make_pool(*shapes, kv_dtype)
        states = make_states(config.state_shapes, settings.num_rows, dtype)
        return make_state(settings, pool._replace(states=states), rows)

    state = jax.eval_shape(begin, rows)
    device = card_of(card).target.device(num_devices, "it is compiled for")
    rounds_rows = quantization == "fp8" and multiplies_e4m3(device, fp8_products)
    options_of = ("none" if rounds_rows else quantization) if options_of is None else options_of
    programs = CardExecutables(card, config.hidden_size, options_of, num_devices, num_groups)
    axes = [[shape.heads_axis + 1 for shape in shapes] for shapes in config.state_shapes]
    state = over_devices(state, programs.mesh, axes)
    model = abstract_model(config, dtype, quantization, programs.mesh)
    is_seeing = isinstance(model, Llava)
    kernels = kernels_of(cast(nnx.Module, model.text) if is_seeing else model)
    if rounds_rows:
        fp8_kernels.lay_out(model)
    Programs(model, settings, state, buckets, programs).declare()
    donated = jax.tree.leaves((state.pool, state.page_table))
    return Model(
        config=config,
        layer_elements=state.pool.layers[0][0].size,
        state_elements=frozenset(array.size for array in jax.tree.leaves(state.pool.states)),
        donated_bytes=sum(array.size * array.dtype.itemsize for array in donated),
        vision=rows,
        kernels=kernels,
        tower_kernels=kernels_of(model.vision) if is_seeing else frozenset(),
        programs=programs,
    )


def read_shape(shape: dict[str, Any], changes: Mapping[str, Any] = MappingProxyType({})) -> ModelSpec:
    """The spec of a `config.json`, with changed fields of its text model."""
    text = shape.get("text_config")
    shape = shape | (dict(changes) if text is None else {"text_config": text | changes})
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        return read_spec(pathlib.Path(folder))
