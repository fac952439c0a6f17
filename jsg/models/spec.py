"""What a decoder computes, as records. `ModelSpec` is all that decoder, loader and memory plan know of a model. No JAX.

A family turns the fields of `config.json` into these records (`jsg/models/families/`). Each switch has one meaning, and
what differs by layer is in the record of the layer. Names of tensors are relative to their layer, so that layers
which differ in their parameters only have equal records: such layers are traced once.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping

from jsg.errors import ConfigError
from jsg.models.block_spec import (
    AttentionSpec,
    BesideSpec,
    ExpertsSpec,
    FeedForwardSpec,
    KVShape,
    LayerInputSpec,
    NoMixer,
    NormSpec,
    StateMixer,
    StateShape,
    require_divisor,
    stacked,
)
from jsg.models.latent_spec import LatentSpec
from jsg.models.published.record import KeptForm, Published
from jsg.models.state_specs import ConvolutionSpec, DeltaSpec, MambaSpec
from jsg.models.vision_config import VisionConfig
from jsg.window import Window


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How the tensors of a checkpoint are named in the modules here, and how its kernels are stored.

    Attributes:
        prefixes: The beginning of a name in the files → what the modules have there. The longest that fits counts.
        unread: A pattern of whole names in the modules, of tensors that may be there and no module reads.
        published: How kernels are quantised; None if they are not.
        kept: Names of kernels in the modules that can be kept in the checkpoint's few bits → how.
    """

    prefixes: Mapping[str, str]
    unread: str = "(?!)"
    published: Published | None = None
    kept: Mapping[str, KeptForm] = dataclasses.field(default_factory=dict)

    def here(self, stored: str) -> str:
        """The name in the modules of a tensor of the files."""
        prefix = max((prefix for prefix in self.prefixes if stored.startswith(prefix)), key=len, default=None)
        return stored if prefix is None else self.prefixes[prefix] + stored.removeprefix(prefix)

    def is_unread(self, name: str) -> bool:
        """Whether no module reads the tensor of this name."""
        return re.fullmatch(self.unread, name) is not None


Mixer = AttentionSpec | LatentSpec | DeltaSpec | MambaSpec | ConvolutionSpec | NoMixer
"""What mixes the tokens of a request. It declares what it keeps: `kv_shape` of each token, or None, and
`state_shapes` of each request. Its module takes the arrays of its layer and returns them."""

AS_STORED = TensorNames(prefixes={})
"""Modules have the names of the files."""
CAUSAL_PREFIXES = {part: f"model.{part}" for part in ("embed_tokens.", "layers.", "norm.", "embedding_norm.")}
"""Those of the names of a text model. One that was saved without its head lacks the part around the layers, too."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A transformer block: attention, then a feed-forward block, each added to the residual stream.

    Attributes:
        before_attention: The norm of what attention reads; None for none.
        attention: Attention, or `NoMixer`.
        kv_source: The layer whose keys and values it reads; None for its own.
        after_attention: The norm of what attention adds; None for none.
        before_mlp: The norm of what the feed-forward block reads; None for none.
        is_parallel: The feed-forward block reads the residual stream from before attention: through its own norm, or
            if it has none through that of attention.
        mlp: The feed-forward block; None for none.
        beside: Experts beside it; None for none.
        after_mlp: The norm of what the feed-forward block adds; None for none.
        residual_factor: Multiplies what is added to the residual stream.
        own_input: What is added last, of an input of the layer's own; None for nothing. All layers have the same.
        scalar: The tensor of a number that multiplies the residual stream at the end; None for none.
    """

    before_attention: NormSpec | None = None
    attention: Mixer
    kv_source: int | None = None
    after_attention: NormSpec | None = None
    before_mlp: NormSpec | None = None
    mlp: FeedForwardSpec | ExpertsSpec | None
    beside: BesideSpec | None = None
    after_mlp: NormSpec | None = None
    is_parallel: bool = False
    residual_factor: float = 1.0
    own_input: LayerInputSpec | None = None
    scalar: str | None = None

    @property
    def blocks(self) -> tuple[FeedForwardSpec | ExpertsSpec, ...]:
        """The feed-forward block, and the experts beside it."""
        first = () if self.mlp is None else (self.mlp,)
        return first if self.beside is None else (*first, self.beside.experts)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of the layer, if it has any."""
        return next((block for block in self.blocks if isinstance(block, ExpertsSpec)), None)

    def over_devices(self, count: int, groups: int) -> "LayerSpec":
        """The same for several devices. See `ModelSpec.over_devices`."""
        attention = self.attention.over_devices(count)
        for block in self.blocks:
            block.check_devices(count, groups)
        if self.own_input is not None:
            require_divisor(count, count, 1, "vocab_size_per_layer_input", self.own_input.vocab_size)
        return dataclasses.replace(self, attention=attention)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """A layer behind the last one that drafts tokens (multi-token prediction, MTP).

    It reads the embedding of a token side by side with the final hidden state of the token before it, and predicts the
    next token by the head of the model. Its own output takes the place of the hidden state for the token after that.

    Attributes:
        prefix: What the names of its tensors begin with.
        block: What those of its transformer block have behind that; empty for nothing.
        layer: The transformer block.
        joined: The projection that makes its input of embedding and hidden state.
        embedding_norm: The norm of the embedding.
        hidden_norm: The norm of the hidden state.
        final_norm: The norm of what the head reads.
        repeats_normed: Whether its output takes the place of the hidden state after that norm, and not before it.
    """

    prefix: str
    block: str = ""
    layer: LayerSpec
    joined: str
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    final_norm: NormSpec
    repeats_normed: bool = False

    @property
    def block_prefix(self) -> str:
        """What the names of the tensors of its transformer block begin with."""
        return f"{self.prefix}.{self.block}" if self.block else self.prefix


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, and its vision tower if it has one.

    Attributes:
        architecture: The family's name in `config.json`, or that of a vision model's text half.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        layers: The transformer blocks in order.
        draft: The layer that drafts tokens; None for none. It changes no answer.
        final_norm: The norm after the last.
        max_position_embeddings: Longest sequence in tokens, with rope scaling.
        embedding_factor: Multiplies the rows of the embedding, rounded to their type as in training.
        logit_factor: Multiplies the logits.
        logit_softcap: Logits become softcap * tanh(logit / softcap) then; None for none.
        tie_word_embeddings: The head uses the embedding's rows.
        eos_token_ids: Tokens that end an answer.
        bos_token_id: Token that begins a text, if there is one.
        vision: The vision half; None for a text model.
        names: How its tensors are named and stored in a checkpoint.
        notes: What the file says and the model does not follow, a sentence each, for the log.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    draft: DraftSpec | None = None
    final_norm: NormSpec
    max_position_embeddings: int
    embedding_factor: float = 1.0
    logit_factor: float = 1.0
    logit_softcap: float | None = None
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    vision: VisionConfig | None = None
    names: TensorNames = dataclasses.field(default=TensorNames(prefixes=CAUSAL_PREFIXES), repr=False, compare=False)
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
        shared = self._with_each(lambda _, layer: share_out(layer))
        require_divisor(count, count, 1, "vocab_size", self.vocab_size)
        return shared

    def _with_each(self, change: Callable[[str, LayerSpec], LayerSpec]) -> "ModelSpec":
        """The same with each layer changed, of which the function is given what its tensors' names begin with."""
        layers = tuple(change(f"model.layers.{i}", layer) for i, layer in enumerate(self.layers))
        draft = self.draft
        if draft is not None:
            draft = dataclasses.replace(draft, layer=change(draft.block_prefix, draft.layer))
        return dataclasses.replace(self, layers=layers, draft=draft)

    def for_context(self, length: int) -> "ModelSpec":
        """The same model if no text has more tokens than `length`, at most `max_position_embeddings`.

        With longrope texts within the original context have positions of their own. Keys of one kind are wrong for the
        other, so a model has one kind for all: that of its longest text. A window that no text leaves is none.
        """

        def limited(layer: LayerSpec) -> LayerSpec:
            attention = layer.attention
            if isinstance(attention, StateMixer):
                return layer
            if attention.window is not None and attention.window.length >= length:
                attention = dataclasses.replace(attention, window=None)
            if attention.rope is not None:
                attention = dataclasses.replace(attention, rope=attention.rope.for_context(length))
            return dataclasses.replace(layer, attention=attention)

        cached = functools.cache(limited)
        return self._with_each(lambda _, layer: cached(layer))

    def with_stacks(self, holds: Callable[[str], bool]) -> "ModelSpec":
        """The same, with experts in one tensor where a checkpoint that `holds` these names has them so.

        Some checkpoints of Qwen and others have a tensor for each expert, and some one for all experts of a layer.
        """

        def stored(prefix: str, layer: LayerSpec) -> LayerSpec:
            mlp = layer.mlp
            own = stacked("mlp.experts")
            if not isinstance(mlp, ExpertsSpec) or mlp.stack or not holds(f"{prefix}.{own['gate']}"):
                return layer
            return dataclasses.replace(layer, mlp=dataclasses.replace(mlp, **own))

        return self._with_each(stored)

    @property
    def num_layers(self) -> int:
        """Transformer blocks."""
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether a layer has several experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def layer_inputs(self) -> LayerInputSpec | None:
        """The inputs that layers have of their own, if they have any."""
        return self.layers[0].own_input

    @property
    def kept_layers(self) -> tuple[LayerSpec, ...]:
        """All layers that keep something of tokens or requests: that which drafts is the last."""
        return self.layers if self.draft is None else (*self.layers, self.draft.layer)

    @property
    def layer_windows(self) -> tuple[Window | None, ...]:
        """For each layer with keys, which tokens a token sees; None for all before it."""
        return tuple(layer.attention.window for layer in self.kept_layers if layer.attention.kv_shape is not None)

    @property
    def page_groups(self) -> tuple[Window | None, ...]:
        """The windows that layers have, each once, None for all tokens first. Layers of a group have the same pages."""
        windows = set(self.layer_windows)
        return (*([None] if None in windows else []), *sorted(w for w in windows if w is not None))

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """For each layer with keys the index of its page group."""
        return tuple(map(self.page_groups.index, self.layer_windows))

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each layer with keys keeps of a token. One that reads what another keeps has no heads of its own."""
        read = ((layer.attention.kv_shape, layer.kv_source) for layer in self.kept_layers)
        return tuple(
            shape if source is None else shape._replace(heads=0) for shape, source in read if shape is not None
        )

    @property
    def state_shapes(self) -> tuple[tuple[StateShape, ...], ...]:
        """What each layer without keys keeps of a request."""
        return tuple(shapes for layer in self.layers if (shapes := layer.attention.state_shapes))

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of the state of one request in all layers, if a number of activations has so many."""
        return sum(shape.num_bytes(itemsize) for shapes in self.state_shapes for shape in shapes)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return sum(self.group_bytes_per_token(dtype_bytes).values())

    def group_bytes_per_token(self, dtype_bytes: int) -> dict[Window | None, int]:
        """By page group the bytes of the keys and values of one token in its layers."""
        sizes = dict.fromkeys(self.page_groups, 0)
        for window, shape in zip(self.layer_windows, self.kv_shapes, strict=True):
            sizes[window] += dtype_bytes * shape.numbers
        return sizes
