"""LLaVA: a CLIP tower (`jsg/models/vision_config.py`) in front of a text model of any family."""

from jsg.models.spec import TensorNames
from jsg.models.wrapper import TEXT_PREFIXES, Wrapper

FIELDS = frozenset(
    "text_config vision_config tie_word_embeddings projector_hidden_act multimodal_projector_bias vision_feature_layer "
    "vision_feature_select_strategy image_token_index image_token_id video_token_index video_token_id "
    "image_grid_pinpoints spatial_pool_mode spatial_pool_stride spatial_pool_out_channels image_seq_length "
    "video_seq_length use_image_newline_parameter ignore_index vocab_size".split()
)
"""Read or without effect. The numbers of tokens follow from the tiles."""

PREFIXES = TEXT_PREFIXES | {
    "vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
}
"""The tower has its names without its outer class in the modules; the first is of transformers 4."""

WRAPPER = Wrapper(text_type="llama", fields=FIELDS, names=TensorNames(prefixes=PREFIXES))
