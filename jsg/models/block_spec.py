"""What the blocks of a layer compute, as records: attention, norms, rope, feed-forward blocks, experts. No JAX.

See `jsg/models/spec.py`. Names of tensors are relative to the layer.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from jsg.errors import ConfigError, ModelError
from jsg.kernels_pallas.activation import Activation
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.window import Window

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


class KVShape(NamedTuple):
    """What a layer keeps of a token: a key and a value for each head.

    Attributes:
        heads: Key-value heads; none for a layer that reads what another keeps.
        head_dim: Width of a key, and of a value.
        has_values: Values are kept. Else a value is the first numbers of its key.
    """

    heads: int
    head_dim: int
    has_values: bool = True

    @property
    def numbers(self) -> int:
        """The numbers of a token."""
        return self.heads * self.head_dim * (2 if self.has_values else 1)


class StateShape(NamedTuple):
    """An array of what a layer keeps of each request.

    Attributes:
        shape: For one request.
        heads_axis: The axis that devices share out.
        dtype: Its type; None for that of activations.
    """

    shape: tuple[int, ...]
    heads_axis: int
    dtype: str | None = None

    def num_bytes(self, itemsize: int) -> int:
        """Bytes for one request, if a number of activations has so many."""
        return math.prod(self.shape) * (itemsize if self.dtype is None else 4)


class StateMixer:
    """What all records of mixers that keep nothing of a token, but a state of each request, have in common."""

    __slots__ = ()
    window = None
    rope = None
    head_dim = 0
    kv_shape = None
    pair_numbers = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoMixer(StateMixer):
    """What replaces the mixer of a layer that is a feed-forward block alone."""

    state_shapes = ()

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels: none."""
        return 0

    def over_devices(self, count: int) -> "NoMixer":
        """The same for several devices."""
        return self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A root mean square norm, or a layer norm.

    Attributes:
        name: The tensor of the weight, without its suffix; None for no weight.
        suffix: What follows the name in the checkpoint.
        eps: Added to the mean square before the root.
        is_wide: The weight multiplies in float32, before the result is rounded to the type of activations.
        adds_one: What multiplies is 1 + the weight.
        is_centred: The mean is subtracted first, as in a layer norm.
    """

    name: str | None
    suffix: str = ".weight"
    eps: float
    is_wide: bool = False
    adds_one: bool = False
    is_centred: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions become angles, for `jsg/models/rope.py`.

    Attributes:
        type: Which frequencies are slowed down; `default` slows none.
        theta: Base of the wavelengths.
        factor: How many times longer the context is than the original one, of the first training.
        low_freq_factor: llama3: waves longer than the original context / this are slowed by `factor`.
        high_freq_factor: llama3: waves shorter than the original context / this stay.
        original_max_position_embeddings: llama3, yarn, longrope: the original context, in tokens.
        beta_fast: yarn: dimensions that turn more often than this within the original context stay.
        beta_slow: yarn: dimensions that turn less often than this are slowed by `factor`.
        attention_factor: yarn, longrope: multiplies cos and sin; None for 0.1 ln(factor) + 1 in yarn.
        truncate: yarn: the dimensions between the two are counted in whole ones.
        factors: longrope: how many times slower each pair turns.
        short_factors: longrope: the same for texts within the original context: see `for_context`.
        rotated: How many numbers of a head are turned, from the first; None for all. In proportional rope these are
            the first pairs of those of the whole head, with its frequencies.
        is_interleaved: Numbers 2i and 2i + 1 are turned together; else i and i + half of those that are turned.
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
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    rotated: int | None = None
    is_interleaved: bool = False

    def for_context(self, length: int) -> "RopeSpec":
        """The same if no text is longer. See `ModelSpec.for_context`."""
        is_short = self.type == "longrope" and length <= self.original_max_position_embeddings
        return dataclasses.replace(self, factors=self.short_factors) if is_short else self

    def row_order(self, head_dim: int) -> tuple[int, ...] | None:
        """For each number of a query or key in the model, its number in the checkpoint; None if they are the same.

        The model turns i and i + half of the head together, and pairs after those that are turned by an angle of 0.
        Products of queries and keys are the same in any order that both have.
        """
        rotated, half = self.rotated or head_dim, head_dim // 2
        if not self.is_interleaved and (rotated == head_dim or self.type == "proportional"):
            return None
        pairs = range(rotated // 2)
        turned = [(2 * i, 2 * i + 1) if self.is_interleaved else (i, i + rotated // 2) for i in pairs]
        turned += [(i, i + half - rotated // 2) for i in range(rotated, rotated // 2 + half)]
        return tuple(first for first, _ in turned) + tuple(second for _, second in turned)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryKeyNormSpec:
    """Norms of queries and keys.

    Attributes:
        query: The tensor of the weight of queries, without `.weight`; None for no weight.
        key: The same of keys.
        eps: Added to the mean square before the root.
        spans_heads: The mean is that of all heads together, and the weight has a number for each of theirs. Such norms
            are wide: see `NormSpec`. They have none of the switches below.
        is_wide: See `NormSpec`.
        adds_one: Likewise.
        is_late: Queries and keys are normed after they are rotated, and not before.
        norms_values: Values are normed too, without a weight.
    """

    query: str | None = "self_attn.q_norm"
    key: str | None = "self_attn.k_norm"
    eps: float
    spans_heads: bool = False
    is_wide: bool = False
    adds_one: bool = False
    is_late: bool = False
    norms_values: bool = False

    @property
    def per_head(self) -> tuple[NormSpec, NormSpec]:
        """That of a query and that of a key, if no mean is of several heads."""
        query, key = (
            NormSpec(name=name, eps=self.eps, is_wide=self.is_wide, adds_one=self.adds_one)
            for name in (self.query, self.key)
        )
        return query, key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaleSpec:
    """A factor of queries that grows with the position p: 1 + beta * ln(1 + floor((p + offset) / length)).

    Attributes:
        beta: How fast it grows.
        length: Tokens in which it does not grow.
        offset: What is added to positions.
    """

    beta: float
    length: int
    offset: int = 0


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
        window: Which tokens a token sees; None for all before it.
        softcap: Scores become softcap * tanh(score / softcap); None for none.
        qk_norm: Norms of queries and keys; None for none.
        qkv_bias: The projections to queries, keys and values have biases.
        output_bias: The projection after attention has a bias.
        sinks: The tensor of a score for each head that takes part of the weight of a token's keys; None for none.
        projections: The tensors of the projections to queries, keys and values, without `.weight`. Equal names are one
            tensor, in which their rows follow one another. Without one to values, a value is its key before norm
            and rope; without one to keys, what another layer keeps is read. With a fourth, the tensor of queries has
            after the rows of each head as many of gates, by whose sigmoid the result of attention is multiplied.
        output: That of the projection after attention.
    """

    heads: int
    kv_heads: int
    kv_repeats: int = 1
    head_dim: int
    scale: float
    rope: RopeSpec | None
    query_scale: QueryScaleSpec | None = None
    window: Window | None = None
    softcap: float | None = None
    qk_norm: QueryKeyNormSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: str | None = None
    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    state_shapes = ()

    @property
    def has_gate(self) -> bool:
        """Whether the result of attention is multiplied by gates."""
        return len(self.projections) > 3

    @property
    def kv_shape(self) -> KVShape:
        """What the layer reads of a token. It keeps that, unless another layer does."""
        return KVShape(self.kv_heads, self.head_dim)

    @property
    def pair_numbers(self) -> int:
        """The products of a new token and a key, in all heads; with those of values there are twice as many."""
        return self.heads * self.head_dim

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels, in a model of this width."""
        queries = (3 if self.has_gate else 2) * self.heads
        return width * (queries + (len(self.projections[:3]) - 1) * self.kv_heads) * self.head_dim

    def over_devices(self, count: int) -> "AttentionSpec":
        """The same for several devices. Key-value heads are repeated until each device has one."""
        repeats = max(1, count // self.kv_heads)
        require_divisor(count, count, 1, "num_attention_heads", self.heads)
        require_divisor(count, count, 1, "num_key_value_heads", self.kv_heads * repeats)
        return dataclasses.replace(self, kv_heads=self.kv_heads * repeats, kv_repeats=repeats)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSpec:
    """The gated feed-forward block: down(activation(gate(x)) · up(x)). Without gates: down(activation(up(x))).

    Attributes:
        inner: Width inside the block.
        activation: The function of the gates.
        has_bias: Its projections have biases.
        gate: The tensor of the projection to the gates, without `.weight`; None for no gates.
        up: That of the projection to what the gates let through. If it is the same, the rows of the gates are first.
        down: That of the projection back to the width of the model.
    """

    inner: int
    activation: Activation = "silu"
    has_bias: bool = False
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels, in a model of this width."""
        return (2 if self.gate is None else 3) * width * self.inner

    def check_devices(self, count: int, groups: int) -> None:
        """Raises ModelError unless so many devices can share out the columns. They are not shared out by groups."""
        require_divisor(count, count, groups, "intermediate_size", self.inner)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The projection of a token to a logit for each expert, and what is made of the logits.

    Attributes:
        name: The tensor of the projection, without `.weight`.
        choice: How the token's experts are chosen and weighed.
        has_bias: The projection has a bias.
        choice_bias: The tensor of what is added to the scores of experts before they are compared; None for none. It is
            float32, and so are scores and weights.
        choice_bias_axes: The axes of this tensor, of which the last is that of experts.
        is_float32: The kernel of the projection stays float32, whatever the type of the model.
        norm: The norm of what it projects; None for none.
        input_factor: Multiplies what it projects.
        expert_scale: The tensor of a factor of the weight of each expert; None for none.
        rounds_weights: Weights are rounded to the type of activations before they multiply.
        weighs_input: They multiply what experts read, and not what they make.
    """

    name: str = "mlp.gate"
    choice: ChoiceSpec
    has_bias: bool = False
    choice_bias: str | None = None
    choice_bias_axes: int = 1
    is_float32: bool = False
    norm: NormSpec | None = None
    input_factor: float = 1.0
    expert_scale: str | None = None
    rounds_weights: bool = True
    weighs_input: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackSpec:
    """How one tensor has the kernels of all experts.

    Attributes:
        is_transposed: It is [experts, in, out], and not [experts, out, in].
        is_interleaved: If it has gates and what they let through, their rows take turns; else the gates are first.
        suffix: What follows the names of kernels in the checkpoint.
        bias_suffix: What follows the names of kernels in those of their biases.
    """

    is_transposed: bool = False
    is_interleaved: bool = False
    suffix: str = ".weight"
    bias_suffix: str = ".bias"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentExpertsSpec:
    """Projections around experts that are narrower than the residual stream (LatentMoE of Nemotron 3).

    Attributes:
        width: What experts read and make.
        into: The tensor of the projection to it, without `.weight`.
        out: That of the projection back.
        has_bias: Both have biases.
    """

    width: int
    into: str
    out: str
    has_bias: bool = False


def stacked(name: str, *, suffix: str = "", **form: Any) -> dict[str, Any]:
    """The names of an `ExpertsSpec` of which one tensor has all gates and what they let through, in this form."""
    joint = f"{name}.gate_up_proj"
    return {"gate": joint, "up": joint, "down": f"{name}.down_proj", "stack": StackSpec(suffix=suffix, **form)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Several gated feed-forward blocks, of which each token uses a few.

    Attributes:
        count: Experts.
        inner: Width inside an expert.
        activation: The function of the gates.
        router: How a token's experts are chosen.
        gate: The tensor of an expert's projection, without `.weight`, with `{expert}` for its number: see
            `FeedForwardSpec`. With a `stack` it has no number.
        up: Likewise.
        down: Likewise.
        stack: How one tensor has the kernels of all experts; None if each expert has its own.
        has_bias: The projections of experts have biases.
        shared: The block that every token uses beside its experts; None for none.
        shared_gate: The tensor of a projection to one number, whose sigmoid multiplies that block, without `.weight`;
            None for a block that nothing multiplies, which may have biases.
        latent: The projections to what experts read, and from the sum of what they make; None if experts read and
            make the residual stream.
    """

    count: int
    inner: int
    activation: Activation = "silu"
    router: RouterSpec
    gate: str | None = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    stack: StackSpec | None = None
    has_bias: bool = False
    shared: FeedForwardSpec | None = None
    shared_gate: str | None = None
    latent: LatentExpertsSpec | None = None

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels of one expert, in a model of this width."""
        return (2 if self.gate is None else 3) * (self.latent.width if self.latent else width) * self.inner

    def num_weights_of_all(self, width: int) -> int:
        """The numbers of the kernels that every token uses, but for the shared block."""
        return width * (self.count + (2 * self.latent.width if self.latent else 0))

    def check_devices(self, count: int, groups: int) -> None:
        """Raises unless so many groups of devices can share out the experts, and those of a group the columns."""
        if self.count % groups:
            raise ConfigError(
                f"--ep-size must divide the number of experts of the model, which is {self.count}, but got "
                f"{groups}; choose another"
            )
        require_divisor(count // groups, count, groups, "the width of its experts", self.inner)
        if self.shared is not None:
            require_divisor(count, count, 1, "the width of its shared expert", self.shared.inner)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BesideSpec:
    """Experts beside the feed-forward block of a layer. Their router reads the residual stream as it is.

    Attributes:
        experts: The experts.
        before: The norm of what they read of the residual stream.
        after: The norm of what they add.
        after_block: The norm of what the feed-forward block adds.
    """

    experts: ExpertsSpec
    before: NormSpec
    after: NormSpec
    after_block: NormSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputSpec:
    """What a layer adds to the residual stream, of an input that each token has for each layer.

    It is norm(projection(activation(gate(x)) · input)). The input is (norm of a projection of the embedding + a row of
    a table) / √2, where both are as wide as those of all layers.

    Attributes:
        count: The layers that have an input.
        width: Width of the input of one.
        vocab_size: Rows of the table.
        activation: The function of the gates.
        norm: The norm of what a layer adds.
        table_norm: The norm of the projection of the embedding.
    """

    count: int
    width: int
    vocab_size: int
    activation: Activation = "silu"
    norm: NormSpec
    table_norm: NormSpec

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels of a layer and of its part of the projection, in a model of this width."""
        return 3 * width * self.width


def require_divisor(parts: int, count: int, groups: int, what: str, value: int) -> None:
    """Raises ModelError unless `parts` devices can share out a number of the model evenly."""
    if value % parts:
        divisor = "--tp-size" if parts == count else f"--tp-size / --ep-size = {count} / {groups}"
        raise ModelError(
            f"{divisor} must divide {what} of the model, which is {value}, but got {parts}; choose another"
        )
