"""The shape of a model, read from its directory. No JAX, so the memory plan and the front process can use it.

`config.json` is data from outside: every number is bounded, and a field that would change the model's answers and is
not supported is refused by name. Field names of transformers 4 and of transformers 5 are both read.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal, get_args

from jsg.errors import ConfigError, ModelError
from jsg.fields import Fields, read_json
from jsg.models.forms import refuse_quantised
from jsg.models.vision_config import VISION_KINDS, VisionConfig, read_vision

RopeType = Literal["default", "linear", "llama3", "yarn"]

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_EXPERTS = 1024
MAX_CONTEXT_LEN = 2**27
ROPE_FIELDS = frozenset(
    "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
    "beta_fast beta_slow attention_factor partial_rotary_factor".split()
)

TEXT_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""The architectures of text models, and of the text halves of others. `registry.py` has their builders."""

_LLAMA_1 = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = {
    **_LLAMA_1,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_TEXT_HALVES = {"llama": ("LlamaForCausalLM", _LLAMA_1), "mistral": ("MistralForCausalLM", _MISTRAL)}
"""`model_type` of a vision model's `text_config` → the architecture, and the defaults of the family's fields. Hugging
Face writes only the fields that differ from them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer, and of its vision tower if it has one.

    Attributes:
        architecture: The family's name in `config.json`, or that of a vision model's text half; a key of
            `jsg/models/registry.py`.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward block.
        num_layers: Transformer blocks.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; divides `num_heads`.
        head_dim: Width of one head; `num_heads * head_dim` need not be `hidden_size`.
        max_position_embeddings: Longest sequence in tokens, with rope scaling.
        rms_norm_eps: Added to the mean square before the root.
        rope: How positions turn into angles.
        layer_windows: For each layer, how many last positions a token sees, with its own; None for all.
        tie_word_embeddings: The head uses the embedding's rows.
        attention_bias: The file's field. The family decides which projections it means.
        mlp_bias: The feed-forward projections have biases.
        num_experts: Experts of a layer; 0 for one feed-forward block that takes all tokens.
        experts_per_token: Experts that a token uses.
        eos_token_ids: Tokens that end an answer.
        bos_token_id: Token that begins a text, if there is one.
        vision: The vision half; None for a text model.
        kv_repeats: How many times the model has each key-value head of the checkpoint: see `over_devices`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    vision: VisionConfig | None = None
    kv_repeats: int = 1

    def over_devices(self, count: int, groups: int = 1) -> "ModelConfig":
        """The same model for several devices. Key-value heads are repeated until each device has one.

        Args:
            count: The number of devices.
            groups: The number of groups of devices that have experts of their own; it divides `count`.

        Raises:
            ModelError: The heads, the feed-forward width or the vocabulary cannot be shared out evenly.
            ConfigError: There are several groups, but no experts or experts that cannot be shared out evenly.
        """
        self._check_groups(groups)
        repeats = max(1, count // self.num_kv_heads)
        for what, value, parts in (
            ("num_attention_heads", self.num_heads, count),
            ("num_key_value_heads", self.num_kv_heads * repeats, count),
            ("intermediate_size", self.intermediate_size, count // groups),
            ("vocab_size", self.vocab_size, count),
        ):
            if value % parts:
                divisor = "--tp-size" if parts == count else f"--tp-size / --ep-size = {count} / {groups}"
                raise ModelError(
                    f"{divisor} must divide {what} of the model, which is {value}, but got {parts}; choose another"
                )
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads * repeats, kv_repeats=repeats)

    def _check_groups(self, groups: int) -> None:
        """Raises ConfigError if experts cannot be shared out over so many groups of devices."""
        if groups > 1 and not self.num_experts:
            raise ConfigError(
                f"--ep-size above 1 needs a model with experts, which {self.architecture} has not, but got {groups}; "
                "leave it out, --tp-size shares out such a model"
            )
        if groups > 1 and self.num_experts % groups:
            raise ConfigError(
                f"--ep-size must divide the number of experts of the model, which is {self.num_experts}, but got "
                f"{groups}; choose another"
            )

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one; None when all layers see everything."""
        return next((window for window in self.layer_windows if window is not None), None)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """Reads `config.json`, and the EOS tokens of `generation_config.json` if it exists.

        Raises:
            ModelError: A file or a field is missing, damaged, out of bounds or not supported. The message names it.
        """
        whole = Fields("config.json", read_json(path / "config.json"))
        architecture = _architecture(whole)
        if architecture not in VISION_KINDS:
            refuse_quantised(path, whole)
            return cls._from_fields(whole, architecture, _eos_token_ids(path, whole))
        text_architecture, text = _text_half(whole)
        refuse_quantised(path, whole, text)
        config = cls._from_fields(text, text_architecture, _eos_token_ids(path, text))
        return dataclasses.replace(config, vision=read_vision(whole, architecture, config.vocab_size))

    @classmethod
    def _from_fields(cls, config: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> "ModelConfig":
        _refuse_unsupported(config)
        num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
        hidden_size = config.integer("hidden_size")
        num_heads = config.integer("num_attention_heads", high=MAX_HEADS)
        num_kv_heads = config.integer("num_key_value_heads", default=num_heads, high=MAX_HEADS)
        config.require(num_heads % num_kv_heads == 0, "num_key_value_heads", f"divide {num_heads} heads", num_kv_heads)
        head_dim = config.integer("head_dim", default=max(hidden_size // num_heads, 1), high=MAX_HEAD_DIM)
        config.require(head_dim % 2 == 0, "head_dim", "be even, for rope turns pairs", head_dim)
        context_len = config.integer("max_position_embeddings", default=2048, high=MAX_CONTEXT_LEN)
        rope = _read_rope(config, context_len)
        num_experts, experts_per_token = _read_experts(config, architecture)
        return cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_scaled_context_len(context_len, rope),
            rms_norm_eps=config.number("rms_norm_eps", default=1e-6, low=0.0, high=1.0),
            rope=rope,
            layer_windows=_read_windows(config, num_layers),
            tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
            attention_bias=config.flag("attention_bias", default=False),
            mlp_bias=config.flag("mlp_bias", default=False),
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            eos_token_ids=eos_token_ids,
            bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        )


def _architecture(config: Fields) -> str:
    names = config.get("architectures")
    ok = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and 0 < len(names[0]) <= 100
    config.require(ok, "architectures", "name exactly one model class", names)
    if names[0] not in TEXT_ARCHITECTURES and names[0] not in VISION_KINDS:
        raise ModelError(
            f"the architecture must be one of {', '.join((*TEXT_ARCHITECTURES, *VISION_KINDS))}, but config.json names "
            f"{names[0]!r}; choose another model"
        )
    return names[0]


def _text_half(config: Fields) -> tuple[str, Fields]:
    """Architecture and fields of the text model inside a vision model."""
    text = config.section("text_config") or Fields("config.json: text_config", {})
    model_type = text.text("model_type", default="llama")
    text.require(model_type in _TEXT_HALVES, "model_type", f"be one of {', '.join(_TEXT_HALVES)}", model_type)
    architecture, defaults = _TEXT_HALVES[model_type]
    is_tied = config.flag("tie_word_embeddings", default=False)
    # Hugging Face's order: the whole file decides these tokens, else the text half, else the family.
    names = ("bos_token_id", "eos_token_id")
    tokens = {name: list(config.token_ids(name)) for name in names if config.get(name) is not None}
    return architecture, text.over({**defaults, "tie_word_embeddings": is_tied}).under(tokens)


def _eos_token_ids(path: Path, config: Fields) -> tuple[int, ...]:
    """The EOS tokens of config.json and of generation_config.json, each once."""
    ids = config.token_ids("eos_token_id")
    if (path / "generation_config.json").is_file():
        ids += Fields("generation_config.json", read_json(path / "generation_config.json")).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _refuse_unsupported(config: Fields) -> None:
    """Raises ModelError for a field that changes what the model computes in a way that is not implemented."""
    activation = config.text("hidden_act", "silu")
    config.require(activation in ("silu", "swish"), "hidden_act", "be silu, the only supported activation", activation)


def _read_experts(config: Fields, architecture: str) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token uses; (0, 0) if the family has none."""
    if architecture != "MixtralForCausalLM":
        return 0, 0
    num_experts = config.integer("num_local_experts", default=8, high=MAX_EXPERTS)
    return num_experts, config.integer("num_experts_per_tok", default=2, high=num_experts)


def _read_rope(config: Fields, context_len: int) -> RopeConfig:
    """Rope from `rope_parameters` (transformers 5), else from `rope_theta` and `rope_scaling` (transformers 4)."""
    scaling = config.section("rope_parameters") or config.section("rope_scaling") or Fields("config.json", {})
    for name in scaling.names() - ROPE_FIELDS:
        raise ModelError(f"config.json: rope field {name!r} is not supported; supported are {sorted(ROPE_FIELDS)}")
    for fields in (scaling, config):
        partial = fields.number("partial_rotary_factor", default=1.0)
        fields.require(partial == 1.0, "partial_rotary_factor", "be 1, for rope turns whole heads", partial)
    theta = scaling.number("rope_theta", default=config.number("rope_theta", default=10_000.0, low=1.0), low=1.0)
    rope_type = scaling.text("rope_type", default=scaling.text("type", default="default"))
    supported = get_args(RopeType)
    scaling.require(rope_type in supported, "rope_type", f"be one of {', '.join(supported)}", rope_type)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = scaling.number("factor", high=1e6)
    scaling.require(factor >= 1.0, "factor", "be at least 1", factor)
    rope = RopeConfig(
        type=rope_type,  # pyright: ignore[reportArgumentType] # checked above
        theta=theta,
        factor=factor,
        low_freq_factor=scaling.number("low_freq_factor", default=1.0),
        high_freq_factor=scaling.number("high_freq_factor", default=4.0),
        original_max_position_embeddings=scaling.integer(
            "original_max_position_embeddings", default=context_len, high=MAX_CONTEXT_LEN
        ),
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        attention_factor=None if scaling.get("attention_factor") is None else scaling.number("attention_factor"),
    )
    ok = rope.low_freq_factor < rope.high_freq_factor
    scaling.require(ok, "low_freq_factor", f"be below high_freq_factor = {rope.high_freq_factor}", rope.low_freq_factor)
    return rope


def _scaled_context_len(context_len: int, rope: RopeConfig) -> int:
    """The context after rope scaling, in tokens. The file has it for llama3, may have it for yarn, not for linear."""
    match rope.type:
        case "linear":
            return math.floor(context_len * rope.factor)
        case "yarn":
            return max(context_len, math.floor(rope.original_max_position_embeddings * rope.factor))
        case _:
            return context_len


def _read_windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, or None.

    Mistral has one window for all layers. Qwen has a switch, `use_sliding_window`, and gives the first
    `max_window_layers` layers no window; if there is `layer_types`, it names the kind of each layer instead.
    """
    has_switch = bool({"use_sliding_window", "max_window_layers"} & config.names())
    if config.get("sliding_window") is None or not config.flag("use_sliding_window", default=not has_switch):
        return (None,) * num_layers
    window = config.integer("sliding_window", high=MAX_CONTEXT_LEN)
    kinds = config.get("layer_types")
    if kinds is None:
        num_whole = config.integer("max_window_layers", low=0) if has_switch else 0
        return tuple(window if layer >= num_whole else None for layer in range(num_layers))
    ok = isinstance(kinds, list) and len(kinds) == num_layers
    ok = ok and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    config.require(ok, "layer_types", f"be {num_layers} of full_attention or sliding_attention", kinds)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
