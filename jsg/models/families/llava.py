"""LLaVA: a CLIP tower (`jsg/models/vision_config.py`) in front of a text model of any family.

The numbers of tokens of a picture follow from its tiles. The tower has its names without its outer class in the
modules; the first is of transformers 4.
"""

from jsg.models.wrapper import TEXT_PREFIXES, Wrapper

WRAPPER = Wrapper(
    text_type="llama",
    fields="video_token_index image_grid_pinpoints spatial_pool_mode spatial_pool_stride spatial_pool_out_channels "
    "image_seq_length video_seq_length use_image_newline_parameter",
    prefixes=TEXT_PREFIXES
    | {
        "vision_tower.vision_model.": "vision_tower.",
        "model.vision_tower.vision_model.": "vision_tower.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.image_newline": "image_newline",
    },
    unread="(?!)",
    note="",
)
