"""A family: what the fields of its `config.json` mean. No JAX."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.parts import (
    MAX_LAYERS,
    SLIDING,
    all_full,
    read_attention,
    read_experts,
    read_feed_forward,
    read_kinds,
    read_norm,
    read_window,
    require_values,
)
from jsg.models.rope_fields import context_field, read_context
from jsg.models.spec import CAUSAL_PREFIXES, LayerSpec, Mixer, ModelSpec, TensorNames
from jsg.models.without_effect import refuse_unknown
from jsg.sources import Fields

CAUSAL_RULE = "be true, for a token sees only those before it"
STATES_NOTE = (
    "some layers keep a state of each request, so a cached prefix is of use only as far as one was kept; --max-states "
    "says how many are kept"
)

_Block = FeedForwardSpec | ExpertsSpec | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family reads its `config.json`. It is made as a `variant` of another.

    A part that differs by layer is a sequence with one for each.

    Attributes:
        model_type: Its name in `model_type`.
        other_types: Names that some files have in place of it. Only this family has them, and no variant of it.
        defaults: Each field that it reads, with the value of an absent one, which is that of the configuration class in
            transformers: files leave fields out. A null is not an absence: it says "none", which only some fields can
            be.
        only: Fields with their only supported value, which an absent one has too. A null is what is off or empty.
        ignored: Fields that have no effect in this family, with spaces between them.
        aliases: Another name of a field → its name.
        attention: Attention without windows: what `read_attention` is given, or a function. It may differ by layer, or
            by kind in a mapping.
        kinds: The kind of each layer's attention, one of `LAYER_KINDS`, or what `read_kinds` is given.
        mlp: The feed-forward block: what `read_feed_forward` is given, or `read_experts`, or a function. It may differ
            by layer.
        norms: Field of `LayerSpec` → name of the norm.
        norm: What `read_norm` is given.
        scales_context: Whether `max_position_embeddings` is without the factor by which rope is scaled.
        later_layers: The field that says how many layers a checkpoint may have after the last. They predict later
            tokens, and nothing but `ModelSpec.draft` reads them.
        unread: A pattern of the names of other tensors that a checkpoint may have and nothing reads.
        model: The model, made of the one with these layers.
    """

    model_type: str
    other_types: tuple[str, ...] = ()
    defaults: Mapping[str, Any]
    only: Mapping[str, Any]
    ignored: str = ""
    aliases: Mapping[str, str]
    attention: Mapping[str, Any] | Callable[[Fields], Mixer | Mapping[str, Mixer] | Sequence[Mixer]]
    kinds: int | str | Callable[[Fields], Sequence[str]] = all_full
    mlp: Mapping[str, Any] | Callable[[Fields], _Block | Sequence[_Block]]
    norms: Mapping[str, str]
    norm: Mapping[str, Any]
    scales_context: bool = True
    later_layers: str | None = None
    unread: str = "(?!)"
    model: Callable[[Fields, ModelSpec], ModelSpec] = lambda config, model: model

    def variant(self, *, defaults: Mapping[str, Any], without: str = "", **changes: Any) -> "Family":
        """The family that differs from this one in these attributes.

        Args:
            defaults: Those that differ or are new.
            without: The fields of this family that the other does not read, with spaces between them.
            **changes: Other attributes.
        """
        kept = {name: value for name, value in self.defaults.items() if name not in without.split()}
        return dataclasses.replace(self, defaults={**kept, **defaults}, **{"other_types": (), **changes})

    def read(self, architecture: str, config: Fields) -> ModelSpec:
        """The model of a file, for which the registry has this architecture.

        Raises:
            ModelError: The file is one of another family, its attention is not causal, a field is out of bounds or not
                supported, or it has a field that the family does not read and that may change the answers.
        """
        model_type = config.get("model_type", self.model_type)
        is_own = model_type in (self.model_type, *self.other_types)
        config.require(is_own, "model_type", f"be {self.model_type}", model_type)
        is_causal = config.over({"is_causal": True}).get("is_causal")  # transformers takes a null as false
        config.require(is_causal is True, "is_causal", CAUSAL_RULE, is_causal)
        refuse_unknown(config, {*self.defaults, *self.only, *self.aliases, *self.ignored.split()}, architecture)
        renamed = {name: config.get(alias) for alias, name in self.aliases.items() if config.get(alias) is not None}
        nulls = {name: None for alias, name in self.aliases.items() if config.over({alias: 0}).get(alias) is None}
        own_code = config.section("auto_map")
        if own_code and any(name.startswith("AutoModel") for name in own_code.names()):
            config.notes.append(f"{architecture} is computed as in transformers; auto_map's Python code is never run")
        require_values(config, self.only)
        config = config.over({**self.defaults, **nulls}).under(renamed)
        model = self.model(config, self._plain_model(architecture, config))
        if model.state_shapes:
            config.notes.append(STATES_NOTE)
        return dataclasses.replace(model, notes=tuple(dict.fromkeys(config.notes)))

    def _plain_model(self, architecture: str, config: Fields) -> ModelSpec:
        windows: dict[str, Any] = {}
        attention = self.attention(config) if callable(self.attention) else read_attention(config, **self.attention)
        kinds = self.kinds(config) if callable(self.kinds) else read_kinds(config, self.kinds)
        count = len(kinds)
        mlps = _of_each(self.mlp(config) if callable(self.mlp) else _read_mlp(config, **self.mlp), count)
        norms: dict[str, Any] = {place: read_norm(config, name, **self.norm) for place, name in self.norms.items()}
        if SLIDING in kinds:
            windows[SLIDING] = {"window": read_window(config)}
        by_layer = [attention[kind] for kind in kinds] if isinstance(attention, Mapping) else _of_each(attention, count)
        layers = tuple(
            LayerSpec(attention=dataclasses.replace(each, **windows.get(kind, {})), mlp=mlp, **norms)
            for each, mlp, kind in zip(by_layer, mlps, kinds, strict=True)
        )
        ropes = {layer.attention.rope for layer in layers} - {None}
        rope = ropes.pop() if len(ropes) == 1 else None
        unread = self.unread
        if self.later_layers is not None:
            later = config.integer(self.later_layers, default=0, low=0, high=MAX_LAYERS)
            unread = rf"model\.layers\.({'|'.join(map(str, range(count, count + later)))})\..*|{unread}"
        return ModelSpec(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            layers=layers,
            final_norm=read_norm(config, "model.norm", **self.norm),
            max_position_embeddings=read_context(config, rope) if self.scales_context else context_field(config),
            tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
            eos_token_ids=config.token_ids("eos_token_id"),
            bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
            names=TensorNames(prefixes=CAUSAL_PREFIXES, unread=unread),
        )


def _read_mlp(config: Fields, **given: Any) -> FeedForwardSpec | ExpertsSpec:
    return read_experts(config, **given) if "count_field" in given else read_feed_forward(config, **given)


def _of_each[Part](part: Part | Sequence[Part], count: int) -> Sequence[Part]:
    """The part of each layer."""
    return part if isinstance(part, Sequence) else [part] * count


def usual(**given: Any) -> dict[str, Any]:
    """Fields that most families have, by short words."""
    return {_USUAL[name]: value for name, value in given.items()}


_USUAL = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "inner": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "context": "max_position_embeddings",
    "window": "sliding_window",
    "expert_inner": "moe_intermediate_size",
    "per_token": "num_experts_per_tok",
    "eps": "rms_norm_eps",
    "theta": "rope_theta",
    "tied": "tie_word_embeddings",
    "bos": "bos_token_id",
    "eos": "eos_token_id",
}

PLAIN = Family(
    model_type="",
    defaults=usual(
        vocab=32000, width=4096, inner=11008, layers=32, heads=32, kv_heads=None, head_dim=None, context=2048
    )
    | usual(eps=1e-6, theta=10_000.0, tied=False, bos=1, eos=2)
    | {"hidden_act": "silu"},
    only={},
    aliases={},
    attention={},
    mlp={},
    norms={"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
    norm={},
)
"""What most families are a variant of: Llama without biases."""
