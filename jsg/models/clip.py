"""The vision tower of CLIP (arXiv:2103.00020) and the projector to the text model's width. `VisionConfig` is its shape.

It is a transformer with full attention over a tile's patches and the class token. Letters are those of
`jsg/models/inputs.py`; here D is the tower's width, N its heads, I tiles or frames, and A the class token and patches.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jsg.models.layers import Linear, exact_precision, parameter, project, whole
from jsg.models.origin import Origin, Source
from jsg.models.vision_config import VisionConfig

_LAYER_PARTS = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj mlp.fc1 mlp.fc2 layer_norm1 layer_norm2"
).split()


def activate(name: str, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """One of `vision_config.ACTIVATIONS`: GELU, or the sigmoid that CLIP was trained with instead."""
    return x * jax.nn.sigmoid(1.702 * x) if name == "quick_gelu" else jax.nn.gelu(x, approximate=False)


class LayerNorm(nnx.Module):
    """Subtracts the mean, divides by the standard deviation, scales and shifts."""

    def __init__(self, name: str, width: int, eps: float, dtype: jax.typing.DTypeLike):
        self.eps = eps
        self.weight, self.bias = (whole(f"{name}.{part}", (width,), dtype) for part in ("weight", "bias"))

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises in float32."""
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        normed = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        return (normed * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Patches(nnx.Module):
    """Makes the class token and the patches of pixels, and adds the position embedding to each."""

    def __init__(self, config: VisionConfig, dtype: jax.typing.DTypeLike):
        prefix, width, side = "vision_tower.embeddings", config.hidden_size, config.patch_size
        num_places = config.patches_per_side**2 + 1
        self.patch_size = side
        convolution = Source(f"{prefix}.patch_embedding.weight", (width, 3, side, side))
        self.kernel = parameter((side * side * 3, width), dtype, Origin((convolution,), transposed=True))
        self.class_token = whole(f"{prefix}.class_embedding", (width,), dtype)
        self.places = whole(f"{prefix}.position_embedding.weight", (num_places, width), dtype)

    def __call__(self, pixels: Float[Array, "I 3 S S"]) -> Float[Array, "I A D"]:
        """Patches do not overlap, so the convolution is one matmul; its kernel is stored [x, y, colour] by patch."""
        count, colours, size, _ = pixels.shape
        dtype, patch = self.kernel[...].dtype, self.patch_size
        side = size // patch
        whole = pixels[:, :, : side * patch, : side * patch].reshape(count, colours, side, patch, side, patch)
        flat = whole.transpose(0, 2, 4, 5, 3, 1).reshape(count * side**2, -1)
        patches = project(flat.astype(dtype), self.kernel[...]).astype(dtype).reshape(count, side**2, -1)
        first = jnp.broadcast_to(self.class_token[...], (count, 1, patches.shape[-1]))
        return jnp.concatenate([first, patches], 1) + self.places[...]


class VisionLayer(nnx.Module):
    """Attention and feed-forward, each computed of the normed residual stream and added to it."""

    def __init__(self, config: VisionConfig, layer: int, dtype: jax.typing.DTypeLike):
        prefix, width, eps = f"vision_tower.encoder.layers.{layer}", config.hidden_size, config.layer_norm_eps
        attention, heads = f"{prefix}.self_attn", config.num_heads
        names = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        self.activation = config.hidden_act
        self.attention_norm = LayerNorm(f"{prefix}.layer_norm1", width, eps, dtype)
        self.qkv = Linear(names, width, (3, heads, width // heads), dtype, bias=True)
        self.output = Linear((f"{attention}.out_proj",), width, (width,), dtype, bias=True)
        self.mlp_norm = LayerNorm(f"{prefix}.layer_norm2", width, eps, dtype)
        self.up = Linear((f"{prefix}.mlp.fc1",), width, (config.intermediate_size,), dtype, bias=True)
        self.down = Linear((f"{prefix}.mlp.fc2",), config.intermediate_size, (width,), dtype, bias=True)

    def __call__(self, x: Float[Array, "I A D"]) -> Float[Array, "I A D"]:
        """The residual stream after this layer."""
        tokens = x.reshape(-1, x.shape[-1])
        tokens = tokens + self.output(self._attend(self.qkv(self.attention_norm(tokens)), len(x)))
        inner = activate(self.activation, self.up(self.mlp_norm(tokens)))
        return (tokens + self.down(inner)).reshape(x.shape)

    def _attend(self, qkv: Float[Array, "T 3 N H"], count: int) -> Float[Array, "T D"]:
        """Attention in which every token of a tile sees all of that tile, with a softmax in float32."""
        queries, keys, values = jnp.moveaxis(qkv.reshape(count, -1, *qkv.shape[1:]), 2, 0)
        exact = {"precision": exact_precision(qkv.dtype), "preferred_element_type": jnp.float32}
        scores = jnp.einsum("iqnh,iknh->inqk", queries, keys, **exact) * queries.shape[-1] ** -0.5
        weights = jax.nn.softmax(scores).astype(qkv.dtype)
        return jnp.einsum("inqk,iknh->iqnh", weights, values, **exact).astype(qkv.dtype).reshape(len(qkv), -1)


class Projector(nnx.Module):
    """Two matmuls that lead from the tower's width to the text model's."""

    def __init__(self, config: VisionConfig, text_width: int, dtype: jax.typing.DTypeLike):
        prefix, bias = "multi_modal_projector", config.projector_bias
        self.activation = config.projector_act
        in_dim = config.hidden_size * len(config.feature_layers)
        self.first = Linear((f"{prefix}.linear_1",), in_dim, (text_width,), dtype, bias=bias)
        self.second = Linear((f"{prefix}.linear_2",), text_width, (text_width,), dtype, bias=bias)

    def __call__(self, features: Float[Array, "I M D"]) -> Float[Array, "I M text_width"]:
        """The projection of each patch."""
        rows = activate(self.activation, self.first(features.reshape(-1, features.shape[-1])))
        return self.second(rows).reshape(*features.shape[:2], -1)


class VisionTower(nnx.Module):
    """Makes rows of pixels that take the place of token embeddings. Methods run inside a trace and change nothing.

    Layers after the last of `feature_layers` are not built.
    """

    def __init__(self, config: VisionConfig, text_width: int, dtype: jax.typing.DTypeLike):
        """Declares the parameters.

        Args:
            config: The shape.
            text_width: Width of the text model's residual stream, which is the D of the methods' results.
            dtype: Type of parameters and results.
        """
        self.config = config
        self.patches = Patches(config, dtype)
        self.first_norm = LayerNorm(  # the checkpoints' spelling
            "vision_tower.pre_layrnorm", config.hidden_size, config.layer_norm_eps, dtype
        )
        self.layers = nnx.List([VisionLayer(config, layer, dtype) for layer in range(max(config.feature_layers))])
        self.projector = Projector(config, text_width, dtype)
        self.newline = whole("image_newline", (text_width,), dtype) if config.has_newline else None

    def encode(self, pixels: Float[Array, "I 3 S S"]) -> Float[Array, "I M D"]:
        """The `patches_per_tile` rows of each tile of processed pixels."""
        return self.projector(self._features(pixels))

    def encode_frames(self, pixels: Float[Array, "I 3 S S"]) -> Float[Array, "I M D"]:
        """The `patches_per_frame` rows of each frame: squares of patches are averaged before they are projected."""
        features, stride = self._features(pixels), self.config.pool_stride
        assert stride is not None, "the model takes no video"
        side = self.config.patches_per_side
        pooled_side = side // stride
        grid = features.reshape(len(pixels), side, side, -1)[:, : pooled_side * stride, : pooled_side * stride]
        blocks = grid.reshape(len(pixels), pooled_side, stride, pooled_side, stride, -1)
        pooled = blocks.mean((2, 4), dtype=jnp.float32).astype(features.dtype)
        return self.projector(pooled.reshape(len(pixels), pooled_side**2, -1))

    def _features(self, pixels: Float[Array, "I 3 S S"]) -> Float[Array, "I M D"]:
        """The hidden states of `feature_layers` side by side. D is the sum of their widths."""
        states = [self.first_norm(self.patches(pixels))]
        for layer in self.layers:
            states.append(layer(states[-1]))
        features = jnp.concatenate([states[layer] for layer in self.config.feature_layers], -1)
        return features[:, 1:] if self.config.drops_class_token else features


def unread_tensors(config: VisionConfig) -> frozenset[str]:
    """Tensors of the tower that a checkpoint holds and `VisionTower` does not need: those after its last layer."""
    layers = range(max(config.feature_layers), config.num_layers)
    parts = [f"encoder.layers.{layer}.{part}" for layer in layers for part in _LAYER_PARTS] + ["post_layernorm"]
    names = [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")] + ["embeddings.position_ids"]
    return frozenset(f"vision_tower.{name}" for name in names)
