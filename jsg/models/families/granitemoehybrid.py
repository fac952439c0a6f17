"""Granite 4: Granite with layers of Mamba-2, and a block that all tokens use, alone or beside experts."""

from jsg.models import parts
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.families import granite, granitemoe
from jsg.models.spec import Mixer
from jsg.models.state_specs import MambaSpec
from jsg.sources import Fields

KINDS = {"mamba": parts.LINEAR, "attention": parts.FULL, parts.LINEAR: parts.LINEAR, parts.FULL: parts.FULL}
"""What files call the kinds of layers → what transformers does."""
ROPES = ("rope", "nope")
FIELDS = "mamba_n_groups mamba_n_heads mamba_d_state mamba_d_head mamba_d_conv mamba_conv_bias rms_norm_eps"


def read_mamba(config: Fields, name: str, fields: str) -> MambaSpec:
    """A layer of Mamba-2, of fields with these names, in this order."""
    steps = config.get("time_step_limit")
    ok = isinstance(steps, list | tuple) and len(steps) == 2 and all(type(x) in (int, float) for x in steps)
    ok = ok and 0 <= steps[0] <= steps[1]
    config.require(ok, "time_step_limit", "be the smallest and the largest step, from 0 on", steps)
    of_groups, of_heads, key_dim, value_dim, taps, bias, eps = fields.split()
    groups, heads = (config.integer(each, high=parts.MAX_HEADS) for each in (of_groups, of_heads))
    config.require(heads % groups == 0, of_groups, f"divide {heads} heads", groups)
    return MambaSpec(
        name=name,
        key_heads=groups,
        heads=heads,
        key_dim=config.integer(key_dim, high=parts.MAX_HEAD_DIM),
        value_dim=config.integer(value_dim, high=parts.MAX_HEAD_DIM),
        taps=config.integer(taps, low=2, high=parts.MAX_TAPS),
        has_bias=parts.is_on(config, bias),
        eps=parts.read_eps(config, eps),
        steps=(float(steps[0]), float(steps[1])),
    )


def attention(config: Fields) -> dict[str, Mixer]:
    """The mixer of each kind of layer."""
    width = config.integer("mamba_expand") * config.integer("hidden_size")
    if config.get("mamba_d_head") == "auto":
        config = config.under({"mamba_d_head": width // config.integer("mamba_n_heads", high=parts.MAX_HEADS)})
    mamba = read_mamba(config, "mamba", FIELDS)
    values = mamba.heads * mamba.value_dim
    config.require(values == width, "mamba_d_head", f"give {mamba.heads} heads {width} numbers", mamba.value_dim)
    rope = config.get("position_embedding_type")
    config.require(rope in (None, *ROPES), "position_embedding_type", f"be {' or '.join(ROPES)}", rope)
    read = parts.read_attention if rope == ROPES[0] else parts.read_heads
    return {parts.FULL: read(config, bias="attention_bias", scale="attention_multiplier"), parts.LINEAR: mamba}


def kinds(config: Fields) -> list[str]:
    """The kind of each layer. Without a list all would be of Mamba-2."""
    kinds = [KINDS[kind] for kind in parts.read_list(config, "layer_types", list(KINDS))]
    config.require(parts.FULL in kinds, "layer_types", "be attention in at least one layer", config.get("layer_types"))
    return kinds


def mlp(config: Fields) -> FeedForwardSpec | ExpertsSpec:
    """The block that all tokens use, beside experts if there are any."""
    parts.require_silu(config)
    joint = "shared_mlp.input_linear"
    inner = config.integer("shared_intermediate_size")
    shared = FeedForwardSpec(inner=inner, gate=joint, up=joint, down="shared_mlp.output_linear")
    if not config.integer("num_local_experts", low=0, high=parts.MAX_EXPERTS):
        return shared
    return parts.read_experts(config, **granitemoe.EXPERTS, shared=shared)


FAMILY = granite.FAMILY.variant(
    model_type="granitemoehybrid",
    defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "layer_types": None,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "time_step_limit": [0.0, float("inf")],
    },
    only={"mamba_proj_bias": False, "normalization_function": "rmsnorm"},
    ignored="mamba_chunk_size init_method",
    aliases={"layers_block_type": "layer_types"},
    attention=attention,
    kinds=kinds,
    mlp=mlp,
)
