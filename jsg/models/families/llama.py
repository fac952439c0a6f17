"""Llama 1 to 3.x, and models of its shape such as Vicuna and Yi."""

from jsg.models.family import PLAIN
from jsg.models.parts import SLIDING, all_full, read_layer_types
from jsg.sources import Fields


def kinds(config: Fields) -> list[str]:
    """Windows have no effect."""
    is_on = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
    if is_on or SLIDING in (read_layer_types(config) or ()):
        config.notes.append("config.json names a sliding window, but Llama has none, so it has no effect")
    return all_full(config)


FAMILY = PLAIN.variant(
    model_type="llama",
    defaults={},
    ignored="sliding_window use_sliding_window max_window_layers layer_types",
    attention={"bias": "attention_bias"},
    kinds=kinds,
    mlp={"bias": "mlp_bias"},
)
