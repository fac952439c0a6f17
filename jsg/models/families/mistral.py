"""Mistral: Llama without biases, with one window for all layers or none."""

from jsg.models.family import PLAIN, usual
from jsg.models.parts import SLIDING, all_full, num_layers
from jsg.sources import Fields


def kinds(config: Fields) -> list[str]:
    """All layers are alike. Qwen's switch, which some files have, has no effect."""
    if config.get("sliding_window") is None:
        return all_full(config)
    if config.get("use_sliding_window") is not None:
        config.notes.append("config.json has use_sliding_window, but this family has no such switch")
    return [SLIDING] * num_layers(config)


FAMILY = PLAIN.variant(
    model_type="mistral",
    defaults=usual(inner=14336, kv_heads=8, context=131072, window=4096),
    ignored="use_sliding_window",
    kinds=kinds,
)
