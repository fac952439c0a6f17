"""LFM2 (350M to 2.6B): gated short convolutions, and attention in some of the layers."""

import dataclasses

from jsg.models.block_spec import FeedForwardSpec
from jsg.models.family import PLAIN, usual
from jsg.models.parts import FULL, MAX_TAPS, num_layers, read_attention, read_feed_forward, read_list, read_norm
from jsg.models.spec import Mixer, ModelSpec
from jsg.models.state_specs import ConvolutionSpec
from jsg.models.wrapper import Wrapper
from jsg.sources import Fields

CONV = "conv"
NORMS = {"query": "self_attn.q_layernorm", "key": "self_attn.k_layernorm"}
FEED_FORWARD = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}


def attention(config: Fields) -> dict[str, Mixer]:
    """What mixes the tokens in each kind of layer."""
    short = ConvolutionSpec(
        channels=config.integer("hidden_size"),
        taps=config.integer("conv_L_cache", low=2, high=MAX_TAPS),
        has_bias=config.flag("conv_bias", default=False),
    )
    full = read_attention(config, qk_norm=NORMS, eps_field="norm_eps", output="self_attn.out_proj")
    return {FULL: full, CONV: short}


def kinds(config: Fields) -> list[str]:
    """The kind of each layer, one of which has keys. If the file does not say, it may number those with attention."""
    layers = range(num_layers(config))
    full = config.get("full_attn_idxs", [*layers])
    config.require(isinstance(full, list), "full_attn_idxs", "be a list of the layers with attention", full)
    numbered = [FULL if layer in full else CONV for layer in layers]
    return read_list(config, "layer_types", (CONV, FULL), absent=numbered, needed=FULL)


def mlp(config: Fields) -> FeedForwardSpec:
    """A block whose width the file gives as it was before gates took a third of it."""
    inner = config.integer("block_ff_dim", default=config.integer("intermediate_size"))
    if config.flag("block_auto_adjust_ff_dim", default=False):
        step = config.integer("block_multiple_of")
        inner = -(int(config.number("block_ffn_dim_multiplier") * (2 * inner // 3)) // -step) * step
    return read_block(config.under({"intermediate_size": inner}))


def read_block(config: Fields) -> FeedForwardSpec:
    """A block of the width that the file gives."""
    return read_feed_forward(config, **FEED_FORWARD)


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """The last norm has the name of one of embeddings."""
    return dataclasses.replace(
        plain,
        final_norm=read_norm(config, "model.embedding_norm", eps_field="norm_eps"),
        tie_word_embeddings=config.flag("tie_embedding", default=plain.tie_word_embeddings),
    )


FAMILY = PLAIN.variant(
    model_type="lfm2",
    defaults=usual(vocab=65536, width=2560, inner=12288, kv_heads=8, context=128000)
    | usual(theta=1_000_000.0, tied=True)
    | {
        "norm_eps": 1e-5,
        "tie_embedding": None,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": None,
        "full_attn_idxs": None,
        "block_ff_dim": None,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    without="rms_norm_eps",
    ignored="block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
    "conv_dim conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc",
    attention=attention,
    kinds=kinds,
    mlp=mlp,
    norms={"before_attention": "operator_norm", "before_mlp": "ffn_norm"},
    norm={"eps_field": "norm_eps"},
    model=model,
)

WRAPPER = Wrapper(
    text_type="lfm2",
    is_tied=True,
    fields="tie_embedding projector_hidden_size projector_bias projector_use_layernorm downsample_factor "
    "do_image_splitting encoder_patch_size max_image_tokens max_num_patches max_pixels_tolerance max_tiles "
    "min_image_tokens min_tiles tile_size use_image_special_tokens use_thumbnail",
)
