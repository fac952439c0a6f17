"""Reads what a model computes from its directory. No JAX, so the memory plan and the front process can use it.

`config.json` is data from outside: every number is bounded, and a field that would change the model's answers and is
not supported is refused by name. Field names of transformers 4 and of transformers 5 are both read.
"""

import dataclasses
from pathlib import Path

from jsg.models.published.record import Published
from jsg.models.published.sections import notes_of, read_published
from jsg.models.registry import FAMILIES, TEXT_HALVES, WRAPPERS, served_name, shortened
from jsg.models.spec import ModelSpec
from jsg.models.vision_config import TOWER_FIELDS, VISION_KINDS, read_tower, read_vision
from jsg.models.without_effect import refuse_unknown
from jsg.models.wrapper import Wrapper
from jsg.sources import Fields, read_json


def read_spec(path: Path, *, drafts: bool = False) -> ModelSpec:
    """The model of a directory, from `config.json`, and the EOS tokens of `generation_config.json` if it exists.

    With `drafts` it has the layer that drafts tokens, if there is one. Without drafts no other layer needs it.

    Raises:
        ModelError: A file or a field is missing, damaged, out of bounds or not supported. The message names it. The
            architecture is judged first.
    """
    model = _read(path)
    return model if drafts else dataclasses.replace(model, draft=None)


def _read(path: Path) -> ModelSpec:
    whole = Fields("config.json", read_json(path / "config.json"))
    architecture = _architecture(whole)
    wrapper = WRAPPERS.get(architecture)
    if wrapper is not None:
        return _read_wrapped(path, whole, architecture, wrapper)
    architecture = served_name(architecture)
    published = read_published(path, whole)
    model = _with_eos_tokens(path, FAMILIES[architecture].read(architecture, whole))
    return _stored_as(published, model)


def _architecture(config: Fields) -> str:
    names = config.get("architectures")
    ok = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and 0 < len(names[0]) <= 100
    config.require(ok, "architectures", "name exactly one model class, such as LlamaForCausalLM", names)
    return names[0]


def _read_wrapped(path: Path, whole: Fields, architecture: str, wrapper: Wrapper) -> ModelSpec:
    """The model of a file that has its text half in a section of its own."""
    text = wrapper.text_half_of(whole)
    model_type = text.get("model_type")
    text.require(model_type in TEXT_HALVES, "model_type", f"be one of {shortened(TEXT_HALVES)}", model_type)
    tower = read_tower(whole) if architecture in VISION_KINDS else None
    published = read_published(path, whole, text)
    half = TEXT_HALVES[model_type]
    model = _with_eos_tokens(path, FAMILIES[half].read(half, text))
    vision = None if tower is None else read_vision(whole, architecture, model.vocab_size)
    refuse_unknown(whole, wrapper.known_fields, architecture)
    if tower is not None:
        refuse_unknown(tower, TOWER_FIELDS, "a tower of CLIP")
    return _stored_as(published, wrapper.around(model, vision))


def _stored_as(published: Published | None, model: ModelSpec) -> ModelSpec:
    """The model with its kernels stored so."""
    names = dataclasses.replace(model.names, published=published)
    return dataclasses.replace(model, names=names, notes=model.notes + notes_of(published))


def _with_eos_tokens(path: Path, model: ModelSpec) -> ModelSpec:
    """The model with the EOS tokens of its config.json and of generation_config.json, each once."""
    ids = model.eos_token_ids
    if (path / "generation_config.json").is_file():
        ids += Fields("generation_config.json", read_json(path / "generation_config.json")).token_ids("eos_token_id")
    return dataclasses.replace(model, eos_token_ids=tuple(dict.fromkeys(ids)))
