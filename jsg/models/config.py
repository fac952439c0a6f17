"""Reads what a model computes from its directory. No JAX, so the memory plan and the front process can use it.

`config.json` is data from outside: every number is bounded, and a field that would change the model's answers and is
not supported is refused by name. Field names of transformers 4 and of transformers 5 are both read.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path

from jsg.fields import Fields, read_json
from jsg.models.family import CAUSAL_RULE, Family
from jsg.models.forms import refuse_quantised
from jsg.models.registry import TEXT_HALVES, TEXT_ONLY, family_of
from jsg.models.spec import ModelSpec
from jsg.models.vision_config import TOWER_FIELDS, VISION_KINDS, WHOLE_FIELDS, read_tower, read_vision
from jsg.models.without_effect import refuse_unknown


def read_spec(path: Path) -> ModelSpec:
    """The model of a directory, from `config.json`, and the EOS tokens of `generation_config.json` if it exists.

    Raises:
        ModelError: A file or a field is missing, damaged, out of bounds or not supported. The message names it. The
            architecture is judged first.
    """
    whole = Fields("config.json", read_json(path / "config.json"))
    architecture = _architecture(whole)
    if architecture in TEXT_ONLY:
        return _read_text_only(path, whole, architecture)
    if architecture not in VISION_KINDS:
        family = family_of(architecture)
        refuse_quantised(path, whole)
        return _with_eos_tokens(path, family.read(whole))
    family, text = _text_half(whole, "llama", TEXT_HALVES)
    tower = read_tower(whole)
    refuse_quantised(path, whole, text)
    model = _with_eos_tokens(path, family.read(text))
    vision = read_vision(whole, architecture, model.vocab_size)
    refuse_unknown(whole, WHOLE_FIELDS, architecture)
    refuse_unknown(tower, TOWER_FIELDS, "a tower of CLIP")
    return dataclasses.replace(model, vision=vision)


def _read_text_only(path: Path, whole: Fields, architecture: str) -> ModelSpec:
    """The text half of a model whose other half is not served."""
    kind = TEXT_ONLY[architecture]
    family, text = _text_half(whole, kind.model_type, [kind.model_type])
    refuse_quantised(path, whole, text)
    model = _with_eos_tokens(path, family.read(text))
    refuse_unknown(whole, kind.fields | {"text_config", "tie_word_embeddings"}, architecture)
    note = f"of {architecture} the text half is served, without pictures"
    return dataclasses.replace(model, rest=kind.tensors, notes=(*model.notes, note))


def _architecture(config: Fields) -> str:
    names = config.get("architectures")
    ok = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and 0 < len(names[0]) <= 100
    config.require(ok, "architectures", "name exactly one model class, such as LlamaForCausalLM", names)
    return names[0]


def _text_half(whole: Fields, default: str, kinds: Collection[str]) -> tuple[Family, Fields]:
    """The family, of one of these kinds, and the fields of the text model inside a vision model."""
    text = whole.section("text_config") or Fields("config.json: text_config", {})
    model_type = text.text("model_type", default=default)
    text.require(model_type in kinds, "model_type", f"be one of {', '.join(kinds)}", model_type)
    family = family_of(TEXT_HALVES[model_type])
    is_causal = whole.over({"is_causal": True}).get("is_causal")
    whole.require(is_causal is True, "is_causal", CAUSAL_RULE, is_causal)
    usual = family.defaults["tie_word_embeddings"]
    is_tied = whole.flag("tie_word_embeddings", default=usual) or text.flag("tie_word_embeddings", default=usual)
    # Hugging Face's order: the whole file decides these tokens, else the text half, else the family.
    names = ("bos_token_id", "eos_token_id")
    tokens = {name: list(whole.token_ids(name)) for name in names if whole.get(name) is not None}
    return family, text.under({"tie_word_embeddings": is_tied, **tokens})


def _with_eos_tokens(path: Path, model: ModelSpec) -> ModelSpec:
    """The model with the EOS tokens of its config.json and of generation_config.json, each once."""
    ids = model.eos_token_ids
    if (path / "generation_config.json").is_file():
        ids += Fields("generation_config.json", read_json(path / "generation_config.json")).token_ids("eos_token_id")
    return dataclasses.replace(model, eos_token_ids=tuple(dict.fromkeys(ids)))
