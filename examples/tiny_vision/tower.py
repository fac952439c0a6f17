"""The tiny LLaVA in training form: CLIP tower, projector, and the text model of examples/tiny_model behind them.

I images, A class token and patches, M patches, D width, N heads, V vocabulary.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "tiny_model"))  # the text half is trained by its modules

import model as text_model

Params = dict[str, jax.Array]
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
_TOWER, _PROJECTOR, _TEXT = "vision_tower.vision_model.", "multi_modal_projector.", "language_model."


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """Shape of the tower."""

    image_size: int = 60
    patch_size: int = 10
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    ffn_dim: int = 384
    norm_eps: float = 1e-5

    @property
    def num_patches(self) -> int:
        """Tokens of an image."""
        return (self.image_size // self.patch_size) ** 2

    def to_hf(self) -> dict:
        """The `vision_config` of config.json."""
        return {
            "model_type": "clip_vision_model",
            "hidden_act": "quick_gelu",
            "hidden_size": self.dim,
            "image_size": self.image_size,
            "intermediate_size": self.ffn_dim,
            "layer_norm_eps": self.norm_eps,
            "num_attention_heads": self.num_heads,
            "num_channels": 3,
            "num_hidden_layers": self.num_layers,
            "patch_size": self.patch_size,
            "projection_dim": self.dim,
        }


def init_tower(config: TowerConfig, text_dim: int, seed: int = 0) -> Params:
    """Random parameters of tower and projector under their Hugging Face names, matrices as [out, in]."""
    rng = np.random.default_rng(seed)
    params: Params = {}

    def put(name: str, shape: tuple[int, ...], scale: float) -> None:
        params[name] = jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    def norm(name: str) -> None:
        params[f"{name}.weight"], params[f"{name}.bias"] = jnp.ones(config.dim), jnp.zeros(config.dim)

    def linear(name: str, out_dim: int, in_dim: int, scale: float = 1.0) -> None:
        put(f"{name}.weight", (out_dim, in_dim), scale * in_dim**-0.5)
        params[f"{name}.bias"] = jnp.zeros(out_dim)

    colours = 3 * config.patch_size**2
    put(_TOWER + "embeddings.class_embedding", (config.dim,), 0.02)
    kernel = (config.dim, 3, config.patch_size, config.patch_size)
    put(_TOWER + "embeddings.patch_embedding.weight", kernel, colours**-0.5)
    put(_TOWER + "embeddings.position_embedding.weight", (config.num_patches + 1, config.dim), 0.3)
    norm(_TOWER + "pre_layrnorm")
    norm(_TOWER + "post_layernorm")  # Hugging Face wants one; LLaVA takes the patches in front of it
    residual = (2 * config.num_layers) ** -0.5
    for layer in range(config.num_layers):
        prefix = f"{_TOWER}encoder.layers.{layer}."
        norm(prefix + "layer_norm1")
        norm(prefix + "layer_norm2")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(f"{prefix}self_attn.{name}", config.dim, config.dim, residual if name == "out_proj" else 1.0)
        linear(prefix + "mlp.fc1", config.ffn_dim, config.dim)
        linear(prefix + "mlp.fc2", config.dim, config.ffn_dim, residual)
    linear(_PROJECTOR + "linear_1", text_dim, config.dim)
    linear(_PROJECTOR + "linear_2", text_dim, text_dim, 0.1)  # a token's embedding is small, too
    return params


def _layer_norm(params: Params, name: str, x: jax.Array, eps: float) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + eps) * params[f"{name}.weight"]
        + params[f"{name}.bias"]
    )


def _linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _attention(params: Params, prefix: str, heads: int, x: jax.Array) -> jax.Array:
    """Every token of an image sees all of that image."""
    images, tokens, dim = x.shape
    q, k, v = (
        _linear(params, prefix + name, x).reshape(images, tokens, heads, -1) for name in ("q_proj", "k_proj", "v_proj")
    )
    weights = jax.nn.softmax(jnp.einsum("iqnh,iknh->inqk", q, k) * (dim // heads) ** -0.5)
    return _linear(params, prefix + "out_proj", jnp.einsum("inqk,iknh->iqnh", weights, v).reshape(x.shape))


def encode(params: Params, config: TowerConfig, pixels: jax.Array) -> jax.Array:
    """Processed pixels [I, 3, S, S] to rows [I, M, D] of the text model's width."""
    images, side, patch = len(pixels), config.image_size // config.patch_size, config.patch_size
    cut = pixels.reshape(images, 3, side, patch, side, patch).transpose(0, 2, 4, 1, 3, 5).reshape(images, side**2, -1)
    kernel = params[_TOWER + "embeddings.patch_embedding.weight"].reshape(config.dim, -1)
    first = jnp.broadcast_to(params[_TOWER + "embeddings.class_embedding"], (images, 1, config.dim))
    x = jnp.concatenate([first, cut @ kernel.T], 1) + params[_TOWER + "embeddings.position_embedding.weight"]
    x = _layer_norm(params, _TOWER + "pre_layrnorm", x, config.norm_eps)
    for layer in range(config.num_layers):
        prefix = f"{_TOWER}encoder.layers.{layer}."
        normed = _layer_norm(params, prefix + "layer_norm1", x, config.norm_eps)
        x = x + _attention(params, prefix + "self_attn.", config.num_heads, normed)
        inner = _linear(params, prefix + "mlp.fc1", _layer_norm(params, prefix + "layer_norm2", x, config.norm_eps))
        x = x + _linear(params, prefix + "mlp.fc2", inner * jax.nn.sigmoid(1.702 * inner))
    inner = jax.nn.gelu(_linear(params, _PROJECTOR + "linear_1", x[:, 1:]), approximate=False)
    return _linear(params, _PROJECTOR + "linear_2", inner)


def forward(
    tower: Params, text: Params, configs: tuple, pixels: jax.Array, tokens: jax.Array, visible=None
) -> jax.Array:
    """Hidden states [B, T, D]; ids from V on mean the rows of the images, one image after another.

    `visible` is that of the text model.
    """
    tower_config, text_config = configs
    rows = encode(tower, tower_config, pixels).reshape(-1, text_config.dim)
    table = jnp.concatenate([text["model.embed_tokens.weight"], rows])
    return text_model.forward(text | {"model.embed_tokens.weight": table}, text_config, tokens, visible)


def preprocess(image: Image.Image, config: TowerConfig) -> np.ndarray:
    """Pixels [3, S, S] of an image as CLIP's processor makes them: resized, centre-cropped and normalised."""
    scale = config.image_size / min(image.size)
    size = tuple(max(config.image_size, int(side * scale)) for side in image.size)
    left, top = ((side - config.image_size) // 2 for side in size)
    resized = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    cut = resized.crop((left, top, left + config.image_size, top + config.image_size))
    return ((np.asarray(cut, np.float32) / 255 - MEAN) / STD).transpose(2, 0, 1).astype(np.float32)


def save_model(tower: Params, text: Params, configs: tuple, image_token_id: int, folder: Path) -> None:
    """Write config.json, generation_config.json, the processor's files and all parameters rounded to bfloat16."""
    tower_config, text_config = configs
    text_hf = text_config.to_hf()
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": image_token_id,
        "image_token_id": image_token_id,
        "image_seq_length": tower_config.num_patches,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "text_config": text_hf,
        "vision_config": tower_config.to_hf(),
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": tower_config.patch_size,
        "vision_feature_select_strategy": "default",
    }
    side = tower_config.image_size
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": MEAN,
        "image_std": STD,
    }
    folder.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0, "do_sample": False}
    files = {
        "config": config,
        "generation_config": generation,
        "processor_config": processor,
        "preprocessor_config": pixels,
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    named = tower | {_TEXT + name: value for name, value in text.items()}
    tensors = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in named.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load_model(folder: Path) -> tuple[Params, Params, tuple]:
    """Tower, text model and both configs of a folder that `save_model` wrote, in float32."""
    hf = json.loads((folder / "config.json").read_text())
    seen, text = hf["vision_config"], hf["text_config"]
    tower_config = TowerConfig(
        image_size=seen["image_size"],
        patch_size=seen["patch_size"],
        dim=seen["hidden_size"],
        num_layers=seen["num_hidden_layers"],
        num_heads=seen["num_attention_heads"],
        ffn_dim=seen["intermediate_size"],
        norm_eps=seen["layer_norm_eps"],
    )
    text_config = text_model.TinyConfig(vocab_size=text["vocab_size"])
    tensors = {k: jnp.asarray(v.astype(np.float32)) for k, v in load_file(folder / "model.safetensors").items()}
    text_params = {k.removeprefix(_TEXT): v for k, v in tensors.items() if k.startswith(_TEXT)}
    return {k: v for k, v in tensors.items() if not k.startswith(_TEXT)}, text_params, (tower_config, text_config)
