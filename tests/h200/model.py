"""Every program that an engine on an H200 would compile for a model; only shapes, nothing is allocated."""

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jsg.cache.pool import make_pool
from jsg.engine.executables import COMPILER_OPTIONS, QUANTISED_OPTIONS, Executables
from jsg.engine.programs import RunnerConfig, make_state
from jsg.engine.runner import ModelRunner
from jsg.engine.startup import ROW_MULTIPLE
from jsg.models.config import ModelConfig
from jsg.models.loading import abstract_model
from jsg.sched.buckets import Buckets, make_buckets
from tests.h200.compiler import Program, compile_for_h200, placed

MAX_RUNNING = 256
CHUNK = 8192
"""What `jsg/engine/startup.py` chooses on a GPU where nothing else is said."""
BUCKETS = make_buckets(MAX_RUNNING, CHUNK, row_multiple=ROW_MULTIPLE["gpu"], shares_prefixes=True)
POOL_TOKENS = 700_000
"""About what an H200 has room for beside an 8B model in bfloat16."""


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """A program as it was handed to `Executables.lower`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]


class H200Executables(Executables):
    """Keeps what a `ModelRunner` declares, and compiles for an H200 what a test asks for."""

    def __init__(self, hidden_size: int, quantization: str):
        options = COMPILER_OPTIONS if quantization == "none" else QUANTISED_OPTIONS
        super().__init__(forbid_compile=False, compiler_options=options["gpu"])
        self._hidden_size = hidden_size
        self._declared: dict[Hashable, Declared] = {}

    def lower(self, name: Hashable, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> None:
        self._declared[name] = Declared(fn, args, donate)

    def output_shape(self, name: Hashable) -> tuple[None, jax.ShapeDtypeStruct]:
        """The hidden states that a forward pass returns second: all that is asked for, and not worth a trace."""
        _, key = name
        return None, jax.ShapeDtypeStruct((key.num_tokens, self._hidden_size), jnp.bfloat16)

    def program(self, name: Hashable) -> Program:
        declared = self._declared[name]
        return compile_for_h200(
            declared.fn, *placed(declared.args), donate=declared.donate, options=self._compiler_options
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model on an H200.

    Attributes:
        layer_elements: Numbers in the keys of one layer of the pool, and as many in its values.
        donated_bytes: Of pool and page table, which a forward pass changes in place.
    """

    config: ModelConfig
    layer_elements: int
    donated_bytes: int
    programs: H200Executables


def make_model(
    shape: dict[str, Any],
    *,
    buckets: Buckets = BUCKETS,
    page_size: int = 1,
    kv_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    quantization: str = "none",
    **changes: Any,
) -> Model:
    """The programs of a model given by its `config.json`, with `changes` to that."""
    config = _config(shape | changes)
    settings = RunnerConfig(
        vocab_size=config.vocab_size,
        num_rows=MAX_RUNNING + 1,
        columns=-(-config.max_position_embeddings // page_size),
        page_size=page_size,
        eos_token_ids=frozenset(),
    )
    num_pages = POOL_TOKENS // page_size + 1
    shapes = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
    state = jax.eval_shape(lambda: make_state(settings, make_pool(*shapes, kv_dtype)))
    programs = H200Executables(config.hidden_size, quantization)
    runner = ModelRunner(abstract_model(config, jnp.bfloat16, quantization), settings, state, buckets, programs)
    runner.programs.lower()
    donated = jax.tree.leaves((state.pool, state.page_table))
    return Model(
        config=config,
        layer_elements=state.pool.layers[0][0].size,
        donated_bytes=sum(array.size * array.dtype.itemsize for array in donated),
        programs=programs,
    )


def _config(shape: dict[str, Any]) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        return ModelConfig.from_directory(pathlib.Path(folder))
