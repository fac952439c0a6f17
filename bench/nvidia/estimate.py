"""The modelled time of a model's steps on a card: launches and bytes of compiled programs, at the rates of an H200.

Programs of one and of two layers are compiled. Their difference is a layer, so a step of L layers takes the time of the
first and L - 1 times the difference. Cards of a class have the same launches, so each class is compiled once.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bench.device.shapes import LLAMA_70B, MIXTRAL_8X7B
from bench.nvidia import programs
from bench.nvidia.rates import STEP_S, attention_seconds, seconds, speed_of
from bench.nvidia.work import Work, works
from bench.roofline import step_cost
from bench.shapes import LLAMA_8B
from bench.tp.compiled import collectives
from bench.tp.interconnect import Collective
from jsg.engine.device.cards import CLASSES, card
from jsg.engine.device.expert_load import expert_load
from jsg.models.loading import abstract_model
from jsg.models.spec import ModelSpec
from jsg.sched.buckets import BucketKey, Phase

MODELS = {"8B": LLAMA_8B, "70B": LLAMA_70B, "8x7B": MIXTRAL_8X7B}
POOL_TOKENS = 100_000
"""The shape that is compiled. How many tokens fit does not change launches or bytes."""
MEMORY_SHARE = 0.85 * 0.98
"""The default of `--mem-fraction-static`, without the reserve of the memory plan."""
STEP_BYTES = 1.5e9
"""The hungriest step and the tables, about as the memory plan of an 8B Llama has them."""
ITEM_BYTES = jnp.bfloat16.dtype.itemsize


class Compiled(NamedTuple):
    """What was read off a program."""

    works: tuple[Work, ...]
    num_launches: int
    exchanges: tuple[Collective, ...]


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

    def pool_tokens(self, kv_itemsize: int) -> int:
        """The tokens that the KV pool can hold beside the weights; negative where these do not fit."""
        weights = _weight_bytes(self.model, self.quantization) / self.num_devices
        left = MEMORY_SHARE * self.card.memory_bytes - weights - STEP_BYTES
        return int(left // (self.config.kv_bytes_per_token(kv_itemsize) / self.num_devices))

    def compiled(self, key: BucketKey, num_layers: int) -> Compiled:
        """A step of a few layers, compiled for the card's class."""
        return _compiled(class_of(self.card.name), self.model, self.quantization, self.num_devices, key, num_layers)

    def num_launches(self, key: BucketKey) -> int:
        """The launches of a forward pass."""
        return round(self._of_all_layers(self.compiled(key, count).num_launches for count in (1, 2)))

    def seconds(self, key: BucketKey, load: Load, kv_itemsize: int = ITEM_BYTES) -> float:
        """The time of a step: a forward pass, and the choice of tokens.

        Launches are those of the shape `key`. A decode step multiplies as many rows as the engine's own shape has.
        """
        launches = self._of_all_layers(
            sum(self._seconds(work, key, load) for work in self.compiled(key, count).works) for count in (1, 2)
        )
        exchanges = self._of_all_layers(
            sum(each.seconds(self.num_devices, self.speed.ring_bytes_per_s)[1] for each in found)
            for found in (self.compiled(key, count).exchanges for count in (1, 2))
        )
        cost = step_cost(
            self.config,
            ITEM_BYTES,
            **load._asdict(),
            kv_bytes_per_token=self.config.kv_bytes_per_token(kv_itemsize),
            num_devices=self.num_devices,
        )
        return STEP_S + launches + exchanges + attention_seconds(cost.kv_bytes, cost.attention_flops, self.speed)

    def _seconds(self, work: Work, key: BucketKey, load: Load) -> float:
        config, experts = self.config, self.config.layers[0].experts
        count, chosen = (1, 1) if experts is None else (experts.count, experts.router.choice.per_token)
        experts = expert_load(count, chosen, load.rows * load.new)
        is_head = config.vocab_size // self.num_devices in work.kernel
        tokens = key.num_rows if is_head else key.num_tokens
        if key.phase is Phase.DECODE:
            tokens = next(each.num_rows for each in programs.BUCKETS.decode if each.num_rows >= load.rows)
        return seconds(work, tokens, self.speed, experts_read=experts.num_read, copies=experts.num_copies)

    def _of_all_layers(self, of_one_and_two: Iterable[float]) -> float:
        one, two = of_one_and_two
        return one + (self.config.num_layers - 1) * (two - one)


@functools.cache
def _config(model: str) -> ModelSpec:
    return programs.make_model(MODELS[model]).config


@functools.cache
def _weight_bytes(model: str, quantization: str) -> int:
    leaves = jax.tree.leaves(nnx.state(abstract_model(_config(model), jnp.bfloat16, quantization)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@functools.cache
def _compiled(name: str, model: str, quantization: str, num_devices: int, key: BucketKey, num_layers: int) -> Compiled:
    built = _built(name, model, quantization, num_devices, num_layers)
    program = built.programs.program(("forward", key))
    found = works(program.hlo, built.layer_elements // num_devices)
    return Compiled(tuple(found), len(program.launches), tuple(collectives(program.hlo)))


@functools.cache
def _built(name: str, model: str, quantization: str, num_devices: int, num_layers: int) -> programs.Model:
    return programs.make_model(
        MODELS[model],
        card=name,
        quantization=quantization,
        num_devices=num_devices,
        pool_tokens=POOL_TOKENS,
        num_hidden_layers=num_layers,
    )
