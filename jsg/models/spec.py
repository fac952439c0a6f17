"""What a decoder computes, as records. `ModelSpec` is all that decoder, loader and memory plan know of a model. No JAX.

A family turns the fields of `config.json` into these records (`jsg/models/families/`). Each switch has one meaning, and
what differs by layer stands in the record of the layer. Names of tensors are relative to their layer, so that layers
which differ in their parameters only have equal records: such layers are traced once.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

from jsg.errors import ConfigError, ModelError
from jsg.models.vision_config import VisionConfig

RopeType = Literal["default", "linear", "llama3", "yarn"]


class KVShape(NamedTuple):
    """What a layer keeps of a token: a key and a value for each head.

    Attributes:
        heads: Key-value heads.
        head_dim: Width of a key, and of a value.
    """

    heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A root mean square norm with a weight.

    Attributes:
        name: The tensor of the weight, without `.weight`.
        eps: Added to the mean square before the root.
        is_wide: The weight multiplies in float32, before the result is rounded to the type of activations.
    """

    name: str
    eps: float
    is_wide: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions become angles, for `jsg/models/rope.py`.

    Attributes:
        type: Which frequencies are slowed down; `default` slows none.
        theta: Base of the wavelengths.
        factor: How many times longer the context is than the original one, of the first training.
        low_freq_factor: llama3: waves longer than the original context / this are slowed by `factor`.
        high_freq_factor: llama3: waves shorter than the original context / this stay.
        original_max_position_embeddings: llama3, yarn: the original context, in tokens.
        beta_fast: yarn: dimensions that turn more often than this within the original context stay.
        beta_slow: yarn: dimensions that turn less often than this are slowed by `factor`.
        attention_factor: yarn: multiplies cos and sin; None for 0.1 ln(factor) + 1.
        truncate: yarn: the dimensions between the two are counted in whole ones.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryKeyNormSpec:
    """Norms of queries and keys, before they are rotated.

    Attributes:
        query: The tensor of the weight of queries, without `.weight`.
        key: The same of keys.
        eps: Added to the mean square before the root.
        spans_heads: The mean is that of all heads together, and the weight has a number for each of theirs. Such norms
            are wide: see `NormSpec`.
    """

    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"
    eps: float
    spans_heads: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaleSpec:
    """A factor of queries that grows with the position p: 1 + beta * ln(1 + floor(p / length)).

    Attributes:
        beta: How fast it grows.
        length: Tokens in which it does not grow.
    """

    beta: float
    length: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention.

    Attributes:
        heads: Query heads.
        kv_heads: Key-value heads; divides `heads`.
        kv_repeats: How many times the model has each key-value head of the checkpoint: see `over_devices`.
        head_dim: Width of one head; `heads * head_dim` need not be the width of the model.
        scale: Multiplies queries · keys.
        rope: How positions turn queries and keys; None for not at all.
        query_scale: What multiplies rotated queries by their position; None for nothing.
        window: How many last positions a token sees, with its own; None for all.
        qk_norm: Norms of queries and keys; None for none.
        qkv_bias: The projections to queries, keys and values have biases.
        output_bias: The projection after attention has a bias.
        projections: The tensors of the projections to queries, keys and values, without `.weight`.
        output: That of the projection after attention.
    """

    heads: int
    kv_heads: int
    kv_repeats: int = 1
    head_dim: int
    scale: float
    rope: RopeSpec | None
    query_scale: QueryScaleSpec | None = None
    window: int | None = None
    qk_norm: QueryKeyNormSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"

    @property
    def kv_shape(self) -> KVShape:
        """What the layer keeps of a token."""
        return KVShape(self.kv_heads, self.head_dim)

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels, in a model of this width."""
        return 2 * width * (self.heads + self.kv_heads) * self.head_dim

    def over_devices(self, count: int) -> "AttentionSpec":
        """The same for several devices. Key-value heads are repeated until each device has one."""
        repeats = max(1, count // self.kv_heads)
        _require_divisor(count, count, 1, "num_attention_heads", self.heads)
        _require_divisor(count, count, 1, "num_key_value_heads", self.kv_heads * repeats)
        return dataclasses.replace(self, kv_heads=self.kv_heads * repeats, kv_repeats=repeats)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSpec:
    """The gated feed-forward block: down(silu(gate(x)) · up(x)).

    Attributes:
        inner: Width inside the block.
        has_bias: Its projections have biases.
        gate: The tensor of the projection to the gates, without `.weight`.
        up: That of the projection to what the gates let through.
        down: That of the projection back to the width of the model.
    """

    inner: int
    has_bias: bool = False
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels, in a model of this width."""
        return 3 * width * self.inner

    def check_devices(self, count: int, groups: int) -> None:
        """Raises ModelError unless so many devices can share out the columns. They are not shared out by groups."""
        _require_divisor(count, count, groups, "intermediate_size", self.inner)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How the experts of a token are chosen and weighed: by a softmax over all experts, of which the largest count.

    Attributes:
        name: The tensor of the projection to a number for each expert, without `.weight`.
        per_token: Experts that a token uses.
        is_renormed: The weights of these are divided by their sum.
    """

    name: str = "mlp.gate"
    per_token: int
    is_renormed: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSpec:
    """A feed-forward block that every token uses beside its experts.

    Attributes:
        block: The block.
        gate: The tensor of a projection to one number, whose sigmoid multiplies the block, without `.weight`.
    """

    block: FeedForwardSpec
    gate: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Several gated feed-forward blocks, of which each token uses a few.

    Attributes:
        count: Experts.
        inner: Width inside an expert.
        router: How a token's experts are chosen.
        gate: The tensor of an expert's projection, without `.weight`, with `{expert}` for its number: see
            `FeedForwardSpec`.
        up: Likewise.
        down: Likewise.
        shared: What every token uses beside its experts; None for nothing.
    """

    count: int
    inner: int
    router: RouterSpec
    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    shared: SharedExpertSpec | None = None

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels of one expert, in a model of this width."""
        return 3 * width * self.inner

    def check_devices(self, count: int, groups: int) -> None:
        """Raises unless so many groups of devices can share out the experts, and those of a group the columns."""
        if self.count % groups:
            raise ConfigError(
                f"--ep-size must divide the number of experts of the model, which is {self.count}, but got "
                f"{groups}; choose another"
            )
        _require_divisor(count // groups, count, groups, "the width of its experts", self.inner)
        if self.shared is not None:
            _require_divisor(count, count, 1, "the width of its shared expert", self.shared.block.inner)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A transformer block: attention, then a feed-forward block, each added to the residual stream.

    Attributes:
        before_attention: The norm of what attention reads; None for none.
        attention: Attention.
        after_attention: The norm of what attention adds; None for none.
        before_mlp: The norm of what the feed-forward block reads; None for none.
        mlp: The feed-forward block.
        after_mlp: The norm of what the feed-forward block adds; None for none.
        residual_factor: Multiplies what is added to the residual stream.
    """

    before_attention: NormSpec | None = None
    attention: AttentionSpec
    after_attention: NormSpec | None = None
    before_mlp: NormSpec | None = None
    mlp: FeedForwardSpec | ExpertsSpec
    after_mlp: NormSpec | None = None
    residual_factor: float = 1.0

    def over_devices(self, count: int, groups: int) -> "LayerSpec":
        """The same for several devices. See `ModelSpec.over_devices`."""
        attention = self.attention.over_devices(count)
        self.mlp.check_devices(count, groups)
        return dataclasses.replace(self, attention=attention)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, and its vision tower if it has one.

    Attributes:
        architecture: The family's name in `config.json`, or that of a vision model's text half.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        layers: The transformer blocks in order.
        final_norm: The norm behind the last.
        max_position_embeddings: Longest sequence in tokens, with rope scaling.
        embedding_factor: Multiplies the rows of the embedding.
        logit_factor: Multiplies the logits.
        tie_word_embeddings: The head uses the embedding's rows.
        eos_token_ids: Tokens that end an answer.
        bos_token_id: Token that begins a text, if there is one.
        vision: The vision half; None for a text model.
        notes: What the file says and the model does not follow, a sentence each, for the log.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    max_position_embeddings: int
    embedding_factor: float = 1.0
    logit_factor: float = 1.0
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    vision: VisionConfig | None = None
    notes: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def over_devices(self, count: int, groups: int = 1) -> "ModelSpec":
        """The same model for several devices. Key-value heads are repeated until each device has one.

        Args:
            count: The number of devices.
            groups: The number of groups of devices that have experts of their own; it divides `count`.

        Raises:
            ModelError: The heads, the feed-forward width or the vocabulary cannot be shared out evenly.
            ConfigError: There are several groups, but no experts or experts that cannot be shared out evenly.
        """
        if groups > 1 and not self.has_experts:
            raise ConfigError(
                f"--ep-size above 1 needs a model with experts, which {self.architecture} has not, but got {groups}; "
                "leave it out, --tp-size shares out such a model"
            )
        share_out = functools.cache(lambda layer: layer.over_devices(count, groups))
        layers = tuple(share_out(layer) for layer in self.layers)
        _require_divisor(count, count, 1, "vocab_size", self.vocab_size)
        return dataclasses.replace(self, layers=layers)

    @property
    def num_layers(self) -> int:
        """Transformer blocks."""
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether a layer has several experts."""
        return any(isinstance(layer.mlp, ExpertsSpec) for layer in self.layers)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """For each layer, how many last positions a token sees, with its own; None for all."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def has_windows(self) -> bool:
        """Whether a layer has a window."""
        return any(window is not None for window in self.layer_windows)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each layer keeps of a token."""
        return tuple(layer.attention.kv_shape for layer in self.layers)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * dtype_bytes * sum(shape.heads * shape.head_dim for shape in self.kv_shapes)


def _require_divisor(parts: int, count: int, groups: int, what: str, value: int) -> None:
    """Raises ModelError unless `parts` devices can share out a number of the model evenly."""
    if value % parts:
        divisor = "--tp-size" if parts == count else f"--tp-size / --ep-size = {count} / {groups}"
        raise ModelError(
            f"{divisor} must divide {what} of the model, which is {value}, but got {parts}; choose another"
        )
