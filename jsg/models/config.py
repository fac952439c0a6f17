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
from jsg.models.families import ALIASES, CAUSAL_RULE, ROPE_DICTS, TEXT_HALVES, Family, family_of, refuse_unknown
from jsg.models.forms import refuse_quantised
from jsg.models.vision_config import TOWER_FIELDS, VISION_KINDS, WHOLE_FIELDS, VisionConfig, read_tower, read_vision

RopeType = Literal["default", "linear", "llama3", "yarn"]

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_EXPERTS = 1024
MAX_CONTEXT_LEN = 2**27
SLIDING = "sliding_attention"
LAYER_KINDS = ("full_attention", SLIDING)
ROPE_FIELDS = frozenset(
    "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast "
    "beta_slow attention_factor attn_factor mscale mscale_all_dim truncate finetuned partial_rotary_factor".split()
)


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
        notes: What the file says and the family does not follow, a sentence each, for the log.
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
    notes: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
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
            family = family_of(ALIASES.get(architecture, architecture))
            refuse_quantised(path, whole)
            return cls._from_fields(whole, family, path)
        family, text = _text_half(whole, architecture)
        tower = read_tower(whole)
        refuse_quantised(path, whole, text)
        config = cls._from_fields(text, family, path)
        vision = read_vision(whole, architecture, config.vocab_size)
        refuse_unknown(whole, WHOLE_FIELDS, architecture)
        refuse_unknown(tower, TOWER_FIELDS, "a tower of CLIP")
        return dataclasses.replace(config, vision=vision)

    @classmethod
    def _from_fields(cls, config: Fields, family: Family, path: Path) -> "ModelConfig":
        config = family.read(config)
        activation = config.get("hidden_act")
        ok = activation in ("silu", "swish")
        config.require(ok, "hidden_act", "be silu, the only supported activation", activation)
        num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
        hidden_size = config.integer("hidden_size")
        num_heads = config.integer("num_attention_heads", high=MAX_HEADS)
        num_kv_heads = config.integer("num_key_value_heads", default=num_heads, high=MAX_HEADS)
        config.require(num_heads % num_kv_heads == 0, "num_key_value_heads", f"divide {num_heads} heads", num_kv_heads)
        derived = None if family.defaults["head_dim"] else max(hidden_size // num_heads, 1)
        head_dim = config.integer("head_dim", default=derived, high=MAX_HEAD_DIM)
        config.require(head_dim % 2 == 0, "head_dim", "be even, for rope turns pairs", head_dim)
        context_len = config.integer("max_position_embeddings", high=MAX_CONTEXT_LEN)
        notes: list[str] = []
        own_code = config.section("auto_map")
        if own_code and any(name.startswith("AutoModel") for name in own_code.names()):
            notes.append(f"{family.architecture} is computed as in transformers; auto_map's Python code is never run")
        rope = _read_rope(config, context_len, notes)
        context_len = _context_of_one_chunk(config, _scaled_context_len(context_len, rope), notes)
        num_experts, experts_per_token = _read_experts(config, family)
        return cls(
            architecture=family.architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=context_len,
            rms_norm_eps=config.number("rms_norm_eps", low=0.0, high=1.0),
            rope=rope,
            layer_windows=_read_windows(config, family, num_layers, notes),
            tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
            attention_bias=config.flag("attention_bias", default=False),
            mlp_bias=config.flag("mlp_bias", default=False),
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            eos_token_ids=_eos_token_ids(path, config),
            bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
            notes=tuple(notes),
        )


def _architecture(config: Fields) -> str:
    names = config.get("architectures")
    ok = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and 0 < len(names[0]) <= 100
    config.require(ok, "architectures", "name exactly one model class, such as LlamaForCausalLM", names)
    return names[0]


def _text_half(whole: Fields, architecture: str) -> tuple[Family, Fields]:
    """The family and the fields of the text model inside a vision model."""
    text = whole.section("text_config") or Fields("config.json: text_config", {})
    model_type = text.text("model_type", default="llama")
    text.require(model_type in TEXT_HALVES, "model_type", f"be one of {', '.join(TEXT_HALVES)}", model_type)
    is_causal = whole.over({"is_causal": True}).get("is_causal")
    whole.require(is_causal is True, "is_causal", CAUSAL_RULE, is_causal)
    is_tied = whole.flag("tie_word_embeddings", default=False) or text.flag("tie_word_embeddings", default=False)
    # Hugging Face's order: the whole file decides these tokens, else the text half, else the family.
    names = ("bos_token_id", "eos_token_id")
    tokens = {name: list(whole.token_ids(name)) for name in names if whole.get(name) is not None}
    return family_of(TEXT_HALVES[model_type]), text.under({"tie_word_embeddings": is_tied, **tokens})


def _eos_token_ids(path: Path, config: Fields) -> tuple[int, ...]:
    """The EOS tokens of config.json and of generation_config.json, each once."""
    ids = config.token_ids("eos_token_id")
    if (path / "generation_config.json").is_file():
        ids += Fields("generation_config.json", read_json(path / "generation_config.json")).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _read_experts(config: Fields, family: Family) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token uses; (0, 0) if the family has none."""
    if "num_local_experts" not in family.defaults:
        return 0, 0
    num_experts = config.integer("num_local_experts", high=MAX_EXPERTS)
    return num_experts, config.integer("num_experts_per_tok", high=num_experts)


def _read_rope(config: Fields, context_len: int, notes: list[str]) -> RopeConfig:
    """Rope from `rope_scaling` (of transformers 4), else from `rope_parameters` (of 5), as transformers 5 reads them.

    A dictionary counts as a whole: `rope_scaling` hides even the base in `rope_parameters`, and is then read with the
    `rope_theta` beside it.
    """
    new, old = (config.section(name) for name in ROPE_DICTS)
    scaling = old if old is not None and config.get("rope_scaling") else new or Fields("config.json", {})
    for name in scaling.names() - ROPE_FIELDS:
        raise ModelError(f"config.json: rope field {name!r} is not supported; supported are {sorted(ROPE_FIELDS)}")
    for fields in (scaling, config):
        partial = fields.number("partial_rotary_factor", default=1.0)
        fields.require(partial == 1.0, "partial_rotary_factor", "be 1, for rope turns whole heads", partial)
    scaling = scaling.over({"rope_theta": config.get("rope_theta"), "rope_type": scaling.get("type", "default")})
    theta, rope_type = scaling.number("rope_theta", low=1.0), scaling.get("rope_type")
    if scaling.file.endswith("rope_scaling") and new is not None and new.get("rope_theta", theta) != theta:
        notes.append(
            f"config.json has rope_scaling and rope_parameters, so rope_scaling counts, as in transformers, and the "
            f"base of the positions is {theta:g} and not {new.get('rope_theta')}; write rope_theta into rope_scaling "
            "if it is the other"
        )
    supported = get_args(RopeType)
    scaling.require(rope_type in supported, "rope_type", f"be one of {', '.join(supported)}", rope_type)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = scaling.number("factor", high=1e6)
    scaling.require(factor >= 1.0, "factor", "be at least 1", factor)
    if rope_type == "linear":
        return RopeConfig(type="linear", theta=theta, factor=factor)
    original = config.get("original_max_position_embeddings")  # one beside the dictionary counts more, as in Phi-3
    scaling = scaling if original is None else scaling.under({"original_max_position_embeddings": original})
    original = scaling.integer("original_max_position_embeddings", default=context_len, high=MAX_CONTEXT_LEN)
    if rope_type == "yarn":
        return RopeConfig(
            type="yarn",
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=scaling.number("beta_fast", default=32.0),
            beta_slow=scaling.number("beta_slow", default=1.0),
            attention_factor=_read_attention_factor(scaling, factor, notes),
            truncate=scaling.flag("truncate", default=True),
        )
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    scaling.require(low < high, "low_freq_factor", f"be below high_freq_factor = {high}", low)
    return RopeConfig(
        type="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _read_attention_factor(scaling: Fields, factor: float, notes: list[str]) -> float | None:
    """The factor of cosine and sine in yarn, from the file or by DeepSeek's two scales; None for the usual one."""
    usual = 0.1 * math.log(factor) + 1.0
    if scaling.get("attention_factor") is not None:
        usual = scaling.number("attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):  # a 0 is none, as in transformers
        above, below = (0.1 * scaling.number(name) * math.log(factor) + 1.0 for name in ("mscale", "mscale_all_dim"))
        usual = above / below
    elif scaling.get("attn_factor") is None:
        return None
    # Files for vLLM and SGLang, which multiply by it, have another one. DeepSeek-R1-0528-Qwen3-8B is such a file.
    if (extra := scaling.number("attn_factor", default=1.0)) != 1.0:
        notes.append(f"config.json scales positions by attn_factor = {extra:g}, which transformers would ignore")
    return usual * extra


def _scaled_context_len(context_len: int, rope: RopeConfig) -> int:
    """The context after rope scaling, in tokens. The file has it for llama3, may have it for yarn, not for linear."""
    match rope.type:
        case "linear":
            return math.floor(context_len * rope.factor)
        case "yarn":
            return max(context_len, math.floor(rope.original_max_position_embeddings * rope.factor))
        case _:
            return context_len


def _context_of_one_chunk(config: Fields, context_len: int, notes: list[str]) -> int:
    """The part of the context in which Qwen's dual chunk attention (arXiv:2402.17463) is plain attention, in tokens."""
    chunks = config.section("dual_chunk_attention_config")
    if chunks is None:
        return context_len
    chunk_len = chunks.integer("chunk_size", high=MAX_CONTEXT_LEN)
    chunk_len -= chunks.integer("local_size", high=chunk_len - 1)
    if chunk_len < context_len:
        notes.append(f"the context is {chunk_len} tokens of {context_len}, without dual_chunk_attention_config")
    return min(context_len, chunk_len)


def _read_windows(config: Fields, family: Family, num_layers: int, notes: list[str]) -> tuple[int | None, ...]:
    """The sliding window of each layer, or None.

    Llama has none. Mistral has one for all layers. Qwen has a switch, `use_sliding_window`, and gives the first
    `max_window_layers` layers no window; if there is `layer_types`, it names the kind of each layer instead.
    """
    window, switch = config.get("sliding_window"), config.get("use_sliding_window")
    if window is None or family.windows == "none":
        is_named = family.windows == "none" and SLIDING in (_read_layer_types(config, num_layers) or ())
        if is_named or (window is not None and switch is not False):
            notes.append(f"config.json names a sliding window, but {family.architecture} has none, so it has no effect")
    elif family.windows == "all":
        if switch is not None:
            notes.append(f"config.json has use_sliding_window, but {family.architecture} has no such switch")
        return (config.integer("sliding_window", high=MAX_CONTEXT_LEN),) * num_layers
    elif config.flag("use_sliding_window", default=False):
        window = config.integer("sliding_window", high=MAX_CONTEXT_LEN)
        kinds = _read_layer_types(config, num_layers)
        if kinds is not None:
            return tuple(window if kind == SLIDING else None for kind in kinds)
        num_whole = config.integer("max_window_layers", low=0)
        return tuple(window if layer >= num_whole else None for layer in range(num_layers))
    if family.windows == "switched":
        kinds = _read_layer_types(config, num_layers) or ()
        config.require(SLIDING not in kinds, "layer_types", "name no sliding_attention without a window", kinds)
    return (None,) * num_layers


def _read_layer_types(config: Fields, num_layers: int) -> list[str] | None:
    """The kind of each layer's attention; None if the file does not say."""
    kinds = config.get("layer_types")
    ok = isinstance(kinds, list) and len(kinds) == num_layers and all(kind in LAYER_KINDS for kind in kinds)
    ok = ok or kinds is None
    config.require(ok, "layer_types", f"be {num_layers} of {' or '.join(LAYER_KINDS)}", kinds)
    return kinds
