"""The modelled time of a model's steps on a card: launches and bytes of compiled programs, at the rates of an H200.

A program with one layer of each kind is compiled, and for each kind one with a layer more. Their difference is such a
layer, so a step takes the time of the first program and as often a difference as there are more layers of that kind.
Cards of a class have the same launches, so each class is compiled once.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bench.device.shapes import LLAMA_70B, MIXTRAL_8X7B, QWEN3_5_9B, QWEN3_5_35B_A3B
from bench.nvidia import programs
from bench.nvidia.rates import STEP_S, attention_seconds, seconds, speed_of
from bench.nvidia.work import Work, works
from bench.roofline import Cost, step_cost
from bench.shapes import LLAMA_8B
from bench.tp.compiled import collectives
from bench.tp.interconnect import Collective
from jsg.engine.device.cards import CLASSES, card
from jsg.engine.device.expert_load import ExpertLoad, expert_load
from jsg.kernels_pallas.tile import QUERY_TILE
from jsg.models.loading import abstract_model
from jsg.models.spec import ModelSpec
from jsg.models.state_specs import DeltaSpec, HeadStates
from jsg.sched.buckets import BucketKey, Phase

MODELS = {
    "8B": LLAMA_8B,
    "70B": LLAMA_70B,
    "8x7B": MIXTRAL_8X7B,
    "Qwen3.5-9B": QWEN3_5_9B,
    "Qwen3.5-35B-A3B": QWEN3_5_35B_A3B,
}
POOL_TOKENS = 100_000
"""The shape that is compiled. How many tokens fit does not change launches or bytes."""
MEMORY_SHARE = 0.85 * 0.98
"""The default of `--mem-fraction-static`, without the reserve of the memory plan."""
STEP_BYTES = 1.5e9
"""The hungriest step and the tables, about as the memory plan of an 8B Llama has them."""
ITEM_BYTES = jnp.bfloat16.dtype.itemsize
LOGIT_BYTES = jnp.float32.dtype.itemsize
"""Of a logit. The choice of tokens reads each once."""


FLOAT32_TIMES = 16
"""How many operations of bfloat16 tensor cores do while one of float32 is done elsewhere: 15 on an H200."""


class Compiled(NamedTuple):
    """What was read off a program."""

    works: tuple[Work, ...]
    num_launches: int
    exchanges: tuple[Collective, ...]


class Traffic(NamedTuple):
    """What a step moves between memory and chip, in bytes.

    Attributes:
        compiled: What its launches read and write, and what is read to choose tokens greedily.
        least: The weights, keys and values once, and the states of requests read and written once.
    """

    compiled: float
    least: float

    @property
    def ratio(self) -> float:
        """How many times the least."""
        return self.compiled / self.least


class Load(NamedTuple):
    """What a step computes: `new` tokens of each of `rows` requests behind `cached` others."""

    rows: int
    cached: int
    new: int = 1


def class_of(name: str) -> str:
    """The card for which programs of this card's class are compiled."""
    major, minor = card(name).capability
    return CLASSES["sm_89" if (major, minor) == (8, 6) else f"sm_{major}{minor}"]


class Estimate:
    """A model on one or several cards of a kind."""

    def __init__(
        self,
        name: str,
        model: str,
        quantization: str = "none",
        num_devices: int = 1,
        *,
        num_layers: int | None = None,
    ):
        """Names the card; nothing is compiled until a time is asked for.

        Args:
            name: The card's, of `jsg.engine.device.cards`.
            model: One of `MODELS`.
            quantization: Of its kernels.
            num_devices: How many cards share the model by tensor parallelism.
            num_layers: So many layers of it; None for all.
        """
        self.card, self.speed = card(name), speed_of(name)
        self.model, self.quantization, self.num_devices = model, quantization, num_devices
        config = _config(model)
        self.config = dataclasses.replace(config, layers=config.layers[:num_layers])

    def pool_tokens(self, kv_itemsize: int, rows: int = 0) -> int:
        """The tokens that the KV pool can hold beside the weights and the states of some requests.

        It is negative where these do not fit.
        """
        fixed = _weight_bytes(self.model, self.quantization) + rows * self.config.state_bytes(ITEM_BYTES)
        left = MEMORY_SHARE * self.card.memory_bytes - fixed / self.num_devices - STEP_BYTES
        return int(left // (self.config.kv_bytes_per_token(kv_itemsize) / self.num_devices))

    def compiled(self, key: BucketKey, layers: tuple[int, ...]) -> Compiled:
        """A step of some of the layers, compiled for the card's class."""
        return _compiled(class_of(self.card.name), self.model, self.quantization, self.num_devices, key, layers)

    def num_launches(self, key: BucketKey) -> int:
        """The launches of a forward pass."""
        return round(self._of_all_layers(key, lambda compiled: compiled.num_launches))

    def traffic(self, key: BucketKey, load: Load) -> Traffic:
        """What a decode step of this shape moves. Padding reads and writes the states of slot 0, which counts once."""

        def moved(compiled: Compiled) -> float:
            read = self._experts(load).num_read
            shares = ((work, read / work.kernel[0] if work.kind.has_experts else 1) for work in compiled.works)
            return sum(work.other_bytes + share * work.kernel_bytes for work, share in shares)

        cost = self._cost(load, ITEM_BYTES)
        padding = 2 * self.config.state_bytes(ITEM_BYTES) if load.rows < key.num_rows else 0
        logits = key.num_rows * self.config.vocab_size * LOGIT_BYTES
        beside = cost.kv_bytes + (padding + logits) / self.num_devices
        return Traffic(self._of_all_layers(key, moved) + beside, cost.weight_bytes + cost.kv_bytes)

    def seconds(self, key: BucketKey, load: Load, kv_itemsize: int = ITEM_BYTES) -> float:
        """The time of a step: a forward pass, and the choice of tokens.

        Launches are those of the shape `key`. A decode step multiplies as many rows as the engine's own shape has.
        """

        def of_launches(compiled: Compiled) -> float:
            ring = self.speed.ring_bytes_per_s
            exchanges = sum(each.seconds(self.num_devices, ring)[1] for each in compiled.exchanges)
            return exchanges + sum(self._seconds(work, key, load) for work in compiled.works)

        cost = self._cost(load, kv_itemsize)
        flops = cost.attention_flops
        if load.new > 1:
            flops += load.rows * load.new * _tile_flops(self.config) // self.num_devices
        attention = attention_seconds(cost.kv_bytes, flops, self.speed)
        return STEP_S + self._of_all_layers(key, of_launches) + attention

    def _cost(self, load: Load, kv_itemsize: int) -> Cost:
        return step_cost(
            self.config,
            ITEM_BYTES,
            **load._asdict(),
            kv_bytes_per_token=self.config.kv_bytes_per_token(kv_itemsize),
            num_devices=self.num_devices,
        )

    def _experts(self, load: Load) -> ExpertLoad:
        experts = next((layer.experts for layer in self.config.layers if layer.experts), None)
        count, chosen = (1, 1) if experts is None else (experts.count, experts.router.choice.per_token)
        return expert_load(count, chosen, load.rows * load.new)

    def _seconds(self, work: Work, key: BucketKey, load: Load) -> float:
        experts = self._experts(load)
        is_head = self.config.vocab_size // self.num_devices in work.kernel
        tokens = key.num_rows if is_head else key.num_tokens
        if key.phase is Phase.DECODE:
            tokens = next(each.num_rows for each in programs.BUCKETS.decode if each.num_rows >= load.rows)
        return seconds(work, tokens, self.speed, experts_read=experts.num_read, copies=experts.num_copies)

    def _of_all_layers(self, key: BucketKey, measure: Callable[[Compiled], float]) -> float:
        """What all layers take of something, from programs with few."""
        counts = collections.Counter(self.config.layers)
        firsts = {kind: self.config.layers.index(kind) for kind in counts}
        each = tuple(sorted(firsts.values()))
        one = measure(self.compiled(key, each))
        more = {
            kind: measure(self.compiled(key, tuple(sorted((*each, first))))) - one
            for kind, first in firsts.items()
            if counts[kind] > 1
        }
        return one + sum((counts[kind] - 1) * of_one for kind, of_one in more.items())


def _tile_flops(config: ModelSpec) -> int:
    """Operations for a token of a prompt in tiles of linear attention, as many of bfloat16 as take their time.

    Numbers of float32 are two of bfloat16: of the products of two such matrices three are computed, and two with one
    that is in bfloat16 anyway. What is found by substitution is in float32, outside the tensor cores. With decays by
    channel the keys of a tile are multiplied once for each of six distances, and decays summed for each.
    """
    total = 0
    for layer in config.layers:
        rule = layer.attention
        if not isinstance(rule, HeadStates):
            continue
        keys, values = rule.key_dim, rule.value_dim
        with_state, of_keys, of_values = 2 * keys * values, 2 * QUERY_TILE * keys, 2 * QUERY_TILE * values
        if not isinstance(rule, DeltaSpec):
            of_head = 2 * 2 * with_state + of_keys + 2 * of_values
        else:
            within = (6 * (2 * 3 + 2) + 3 * 2) * of_keys if rule.gate_rank else 2 * of_keys
            of_head = (3 if rule.gate_rank else 2) * 3 * with_state + within + 2 * 3 * of_values
            of_head += FLOAT32_TIMES * 2 * QUERY_TILE**2
        total += rule.heads * of_head
    return total


@functools.cache
def _config(model: str) -> ModelSpec:
    return programs.make_model(MODELS[model]).config


@functools.cache
def _weight_bytes(model: str, quantization: str) -> int:
    leaves = jax.tree.leaves(nnx.state(abstract_model(_config(model), jnp.bfloat16, quantization)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@functools.cache
def _compiled(
    name: str, model: str, quantization: str, num_devices: int, key: BucketKey, layers: tuple[int, ...]
) -> Compiled:
    built = _built(name, model, quantization, num_devices, layers)
    program = built.programs.program(("forward", key))
    pools = {elements // num_devices for elements in (built.layer_elements, *built.state_elements)}
    found = works(program.hlo, pools)
    return Compiled(tuple(found), len(program.launches), tuple(collectives(program.hlo)))


@functools.cache
def _built(name: str, model: str, quantization: str, num_devices: int, layers: tuple[int, ...]) -> programs.Model:
    return programs.make_model(
        MODELS[model],
        card=name,
        quantization=quantization,
        num_devices=num_devices,
        pool_tokens=POOL_TOKENS,
        layers=layers,
    )
