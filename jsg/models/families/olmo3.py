"""OLMo 3 (7B, 32B): OLMo 2 with windows in three of four layers, and a rope for each kind of layer."""

from jsg.fields import Fields
from jsg.models.families import olmo2
from jsg.models.family import Family
from jsg.models.parts import FULL, SLIDING, of_kinds, read_heads, read_layer_kinds, read_ropes
from jsg.models.spec import ModelSpec

THETA = 500_000.0


def spec(config: Fields) -> ModelSpec:
    """The model of a file, whose context is the one with scaled rope."""
    theta = config.number("rope_theta", low=1.0)
    attention = olmo2.normed(config, read_heads(config))
    ropes = read_ropes(config, {FULL: theta, SLIDING: THETA}, attention.head_dim)
    if theta != THETA == ropes[SLIDING].theta:
        config.notes.append(
            f"rope_theta is the base of full layers only, as in transformers; of others it is {THETA:g}"
        )
    layers = of_kinds(config, read_layer_kinds(config, full_every=4), attention, ropes)
    return olmo2.read_olmo(config, layers, scales_context=False)


FAMILY = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    defaults=olmo2.DEFAULTS | {"rope_theta": THETA, "sliding_window": 4096, "layer_types": None},
    spec=spec,
)
