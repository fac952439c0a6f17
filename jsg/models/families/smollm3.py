"""SmolLM3: Llama without rope in every fourth layer."""

import dataclasses
from functools import partial

from jsg.models.block_spec import AttentionSpec
from jsg.models.families import llama
from jsg.models.family import usual
from jsg.models.parts import MAX_LAYERS, num_layers, read_attention, read_switched_kinds
from jsg.sources import Fields


def attention(config: Fields) -> list[AttentionSpec]:
    """The attention of each layer."""
    plain = read_attention(config, bias="attention_bias")
    without = dataclasses.replace(plain, rope=None)
    return [plain if has_rope else without for has_rope in read_roped_layers(config)]


def read_roped_layers(config: Fields) -> list[bool]:
    """Whether each layer has rope: where `no_rope_layers` has a 1."""
    count, named = num_layers(config), config.get("no_rope_layers")
    interval = config.integer("no_rope_layer_interval", high=MAX_LAYERS)
    if named in (None, []):
        return [(layer + 1) % interval != 0 for layer in range(count)]
    ok = isinstance(named, list) and len(named) >= count and all(value in (0, 1) for value in named)
    config.require(ok, "no_rope_layers", f"be 0 or 1 for each of {count} layers", named)
    return [bool(value) for value in named[:count]]


FAMILY = llama.FAMILY.variant(
    model_type="smollm3",
    defaults=usual(vocab=128256, width=2048, layers=36, heads=16, kv_heads=4, context=32768, window=None)
    | usual(theta=2_000_000.0, tied=True, bos=128000, eos=128001)
    | {
        "use_sliding_window": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
    },
    ignored="max_window_layers",
    attention=attention,
    kinds=partial(read_switched_kinds, slides=lambda config, layer: not read_roped_layers(config)[layer]),
)
