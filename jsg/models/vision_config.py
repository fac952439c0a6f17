"""The vision half of a LLaVA model, read from its `config.json`. No JAX: the front process counts image tokens with it.

LLaVA-1.5 (arXiv:2310.03744) shows the text model one square tile of an image. LLaVA-NeXT adds tiles of the image at a
resolution near its own, in which a newline ends each row of patches. LLaVA-NeXT-Video shows frames with pooled patches.
`jsg/models/image_layout.py` has the patch of each token.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jsg.processing.tiles import read_pinpoints
from jsg.sources import Fields

VisionKind = Literal["llava", "llava_next", "llava_next_video"]

VISION_KINDS: Mapping[str, VisionKind] = {
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "LlavaNextVideoForConditionalGeneration": "llava_next_video",
}
"""Architecture, as config.json names it → how an image is shown to the text model."""

TOWER_FIELDS = frozenset(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads image_size patch_size num_channels "
    "layer_norm_eps hidden_act projection_dim vocab_size".split()
)
"""The same of its `vision_config`. The projection of CLIP is after what LLaVA takes."""

ACTIVATIONS = ("quick_gelu", "gelu")
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_IMAGE_SIZE = 4096
MAX_PATCHES_PER_SIDE = 64
MAX_FEATURE_LAYERS = 16

_CLIP_VIT_L_336 = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""The tower of a file without a vision_config."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The shape of a CLIP tower (arXiv:2103.00020), and how its patches become tokens.

    Attributes:
        kind: How an image is shown to the text model.
        image_size: Side of a tile, in pixels.
        patch_size: Side of a patch, in pixels.
        hidden_size: Width of the tower.
        intermediate_size: Width inside its feed-forward blocks.
        num_layers: Layers of the checkpoint. Those after the last of `feature_layers` are not run.
        num_heads: Attention heads; divides `hidden_size`.
        layer_norm_eps: Added to the variance before the root.
        hidden_act: Activation of the feed-forward blocks, one of `ACTIVATIONS`.
        feature_layers: The layers after which patches are taken, side by side; 0 is before the first layer.
        drops_class_token: The tower's class token is left out.
        projector_act: Activation between the projector's two matmuls, one of `ACTIVATIONS`.
        projector_bias: The projector has biases.
        image_token_id: The placeholder of an image in a prompt.
        video_token_id: The placeholder of a video; None if the model takes no videos.
        grid_pinpoints: Heights and widths, in pixels, at which an image may be cut into tiles; empty for one tile.
        pool_stride: Patches of a frame that are averaged along each side; None if the model takes no videos.
    """

    kind: VisionKind
    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float = 1e-5
    hidden_act: str = "quick_gelu"
    feature_layers: tuple[int, ...]
    drops_class_token: bool = True
    projector_act: str = "gelu"
    projector_bias: bool = True
    image_token_id: int
    video_token_id: int | None = None
    grid_pinpoints: tuple[tuple[int, int], ...] = ()
    pool_stride: int | None = None

    @property
    def has_newline(self) -> bool:
        """Whether rows of patches end with a learned newline."""
        return self.kind != "llava"

    @property
    def patches_per_side(self) -> int:
        """Patches along a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def patches_per_tile(self) -> int:
        """Rows that one tile of an image is encoded to."""
        return self.patches_per_side**2 + (not self.drops_class_token)

    @property
    def patches_per_frame(self) -> int:
        """Rows that one frame of a video is encoded to; 0 if the model takes no videos."""
        return 0 if self.pool_stride is None else (self.patches_per_side // self.pool_stride) ** 2


def read_tower(config: Fields) -> Fields:
    """The fields of the tower of a vision model. Raises ModelError for one that is not of CLIP."""
    tower = config.section("vision_config") or Fields("config.json: vision_config", _CLIP_VIT_L_336)
    model_type, supported = tower.text("model_type", default="clip_vision_model"), "clip_vision_model"
    tower.require(model_type == supported, "model_type", f"be {supported}, the only supported tower", model_type)
    return tower


def read_vision(config: Fields, architecture: str, text_vocab_size: int) -> VisionConfig:
    """The vision half of a config.

    Args:
        config: The whole `config.json`, with the field names of transformers 4 or 5.
        architecture: Its architecture, a key of `VISION_KINDS`.
        text_vocab_size: Vocabulary of the text half.

    Raises:
        ModelError: A field is missing, out of bounds or not supported. The message names it.
    """
    kind = VISION_KINDS[architecture]
    tower = read_tower(config)
    channels = tower.integer("num_channels", default=3)
    tower.require(channels == 3, "num_channels", "be 3, red, green and blue", channels)
    image_size = tower.integer("image_size", default=224, high=MAX_IMAGE_SIZE)
    patch_size = tower.integer("patch_size", default=32, high=image_size)
    fits = image_size // patch_size <= MAX_PATCHES_PER_SIDE
    tower.require(fits, "patch_size", f"make at most {MAX_PATCHES_PER_SIDE} patches along a side", patch_size)
    hidden_size = tower.integer("hidden_size", default=768)
    num_heads = tower.integer("num_attention_heads", default=12, high=MAX_HEADS)
    tower.require(hidden_size % num_heads == 0, "num_attention_heads", f"divide hidden_size = {hidden_size}", num_heads)
    num_layers = tower.integer("num_hidden_layers", default=12, high=MAX_LAYERS)
    is_video = kind == "llava_next_video"
    image_token = _token_id(config, "image", 32001 if is_video else 32000, text_vocab_size)
    video_token = _token_id(config, "video", 32000, text_vocab_size) if is_video else None
    config.require(image_token != video_token, "video_token_id", "not be image_token_id", video_token)
    return VisionConfig(
        kind=kind,
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=hidden_size,
        intermediate_size=tower.integer("intermediate_size", default=3072),
        num_layers=num_layers,
        num_heads=num_heads,
        layer_norm_eps=tower.number("layer_norm_eps", default=1e-5, high=1.0),
        hidden_act=_activation(tower, "hidden_act", "quick_gelu"),
        feature_layers=_feature_layers(config, num_layers),
        drops_class_token=_drops_class_token(config, kind),
        projector_act=_activation(config, "projector_hidden_act", "gelu"),
        projector_bias=config.flag("multimodal_projector_bias", default=True),
        image_token_id=image_token,
        video_token_id=video_token,
        grid_pinpoints=() if kind == "llava" else read_pinpoints(config, image_size),
        pool_stride=_pool_stride(config, image_size // patch_size) if is_video else None,
    )


def _activation(fields: Fields, name: str, default: str) -> str:
    activation = fields.text(name, default)
    fields.require(activation in ACTIVATIONS, name, f"be one of {', '.join(ACTIVATIONS)}", activation)
    return activation


def _feature_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Indices into the tower's hidden states, the first of which is before any layer. Negative ones count back."""
    value = config.get("vision_feature_layer", -2)
    layers = value if isinstance(value, list) else [value]
    ok = 0 < len(layers) <= MAX_FEATURE_LAYERS
    ok = ok and all(type(layer) is int and -num_layers - 1 <= layer <= num_layers for layer in layers)
    config.require(ok, "vision_feature_layer", f"count layers of {num_layers}", value)
    return tuple(layer % (num_layers + 1) for layer in layers)


def _drops_class_token(config: Fields, kind: VisionKind) -> bool:
    strategy = config.text("vision_feature_select_strategy", "default")
    allowed = (
        ("default", "full") if kind == "llava" else ("default",)
    )  # a grid of patches has no place for the class token
    config.require(strategy in allowed, "vision_feature_select_strategy", f"be {' or '.join(allowed)}", strategy)
    return strategy == "default"


def _token_id(config: Fields, kind: str, default: int, vocab_size: int) -> int:
    """The placeholder's id: `image_token_id` in new files, `image_token_index` in old ones."""
    old, new = f"{kind}_token_index", f"{kind}_token_id"
    name = new if config.get(new) is not None else old
    return config.integer(name, default=default, low=0, high=vocab_size - 1)


def _pool_stride(config: Fields, patches_per_side: int) -> int:
    mode = config.text("spatial_pool_mode", "average")
    config.require(mode == "average", "spatial_pool_mode", "be average, the only supported pooling", mode)
    return config.integer("spatial_pool_stride", default=2, high=patches_per_side)
