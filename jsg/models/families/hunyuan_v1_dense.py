"""HunYuan V1, dense (0.5B to 7B): Llama with norms of queries and keys after rope, whose base `alpha` stretches."""

import dataclasses

from jsg.models.block_spec import AttentionSpec, RopeSpec
from jsg.models.family import PLAIN
from jsg.models.parts import read_heads
from jsg.models.rope_fields import read_rope, rope_section
from jsg.sources import Fields

NORMS = {"query": "self_attn.query_layernorm", "key": "self_attn.key_layernorm", "is_late": True}


def attention(config: Fields) -> AttentionSpec:
    """Attention with rope of its own."""
    heads = read_heads(config, bias="attention_bias", qk_norm=NORMS)
    return dataclasses.replace(heads, rope=_rope(config, heads.head_dim))


def _rope(config: Fields, head_dim: int) -> RopeSpec:
    """Files say `dynamic`, but with `alpha` nothing depends on the length, and no other field counts."""
    section = rope_section(config)
    if section.get("rope_type", section.get("type")) != "dynamic" or not section.get("alpha"):
        return read_rope(config, head_dim=head_dim)
    theta = section.over({"rope_theta": config.get("rope_theta")}).number("rope_theta", low=1.0)
    theta *= section.number("alpha", high=1e6) ** (head_dim / max(head_dim - 2, 1))
    plain = {name: section.get(name) for name in section.names() - {"alpha", "type"}}
    plain |= {"rope_type": "default", "rope_theta": theta}
    return read_rope(config.under({"rope_scaling": None, "rope_parameters": plain}), head_dim=head_dim)


FAMILY = PLAIN.variant(
    model_type="hunyuan_v1_dense",
    defaults={"vocab_size": 290943, "rms_norm_eps": 1e-5},
    # Of other programs and of other models of the same code. `use_cla`, keys of other layers, is refused.
    ignored="attention_head_dim cla_share_factor class_num dense_list enable_lm_head_fp32 im_end_id im_newline_id "
    "im_start_id mask_init_id norm_type org_vocab_size pad_id pool_type text_end_id text_start_id "
    "use_rotary_pos_emb",
    attention=attention,
)
