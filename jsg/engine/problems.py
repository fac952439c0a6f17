"""All that is wrong with the files of a model, not only what is wrong first. Weights may be missing."""

import dataclasses
import itertools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jsg.errors import ModelError
from jsg.models.checkpoint import faults, listed_tensors
from jsg.models.config import read_spec
from jsg.models.forms import foreign_form, has_weights, weights_form
from jsg.models.loading import HEAD, abstract_model, checkpoint_shapes, is_unread, with_own_layer
from jsg.models.published.sections import read_published
from jsg.models.spec import ModelSpec
from jsg.sources import FieldError, Fields, read_json

MAX_FIELDS = 100
MAX_TENSORS = 5
"""The most tensors of which a sentence is given. A checkpoint of another model differs in all."""
KINDS = ("architectures", "model_type")
"""Fields that decide how all others are read. Without them nothing is known of the others."""


def find_problems(
    directory: Path, files: Sequence[str], load_format: str, *, drafts: bool = False
) -> tuple[ModelSpec | None, list[str]]:
    """The model of a directory, and why it cannot be served, a sentence each.

    A refused field is taken out and the rest is read again, so the model is the one that is left without such fields.
    None if there is no such model.

    Args:
        directory: A directory with `config.json`, and with whatever else there is of the model.
        files: The names of all its files, also of those that are not here.
        load_format: As `--load-format`.
        drafts: As `read_spec`.
    """
    with tempfile.TemporaryDirectory(prefix="jsg-") as copy:
        for file in directory.glob("*.json"):
            if not file.name.startswith(("tokenizer", "vocab", "model.safetensors")):
                shutil.copy(file, copy)
        spec, problems = _read_without(Path(copy), drafts=drafts)
    if load_format != "dummy" and (has_weights(files) or foreign_form(files)):
        try:
            weights_form(files, load_format)
        except ModelError as error:
            problems.append(str(error))
    if spec is not None and load_format != "dummy":
        spec, more = _against_checkpoint(directory, spec, load_format)
        problems += more
    return spec, problems


def _read_without(directory: Path, *, drafts: bool) -> tuple[ModelSpec | None, list[str]]:
    """The model of a directory without its refused fields, which are taken out of its files, and why they are."""
    problems: list[str] = []
    for _ in range(MAX_FIELDS):
        try:
            return read_spec(directory, drafts=drafts), problems
        except FieldError as error:
            problems.append(str(error))
            if error.name in KINDS or not _take_out(directory, error):
                break
        except ModelError as error:
            problems.append(str(error))
            break
    return None, problems + _quantised(directory)


def _take_out(directory: Path, error: FieldError) -> bool:
    """Whether a file has the refused field, or the object that it belongs to, which it then has no longer."""
    name, *sections = error.file.split(": ")
    whole, place = read_json(directory / name), [*sections, error.name]
    while place:
        *around, last = place
        values: Any = whole
        for section in around:
            values = values.get(section, {}) if isinstance(values, dict) else {}
        if isinstance(values, dict) and values.pop(last, None) is not None:
            (directory / name).write_text(json.dumps(whole), encoding="utf-8")
            return True
        place = around  # the file has the field by another name: its object is taken out
    return False


def _quantised(directory: Path) -> list[str]:
    """How the weights of a model that cannot be read are quantised."""
    problems: list[str] = []
    try:
        whole = Fields("config.json", read_json(directory / "config.json"))
        read_published(directory, whole, whole.section("text_config") or Fields("", {}))
    except ModelError as error:
        problems.append(str(error))
    return problems


def _against_checkpoint(directory: Path, spec: ModelSpec, load_format: str) -> tuple[ModelSpec, list[str]]:
    """The model with the head that its checkpoint says, and how the checkpoint differs from what the model needs."""
    try:
        held = listed_tensors(directory, spec.names, load_format)
    except ModelError as error:
        return spec, [str(error)]
    if not held:
        return spec, []
    if HEAD in held:
        spec = dataclasses.replace(spec, tie_word_embeddings=False)
    spec = with_own_layer(spec.with_stacks(held.__contains__), held)
    found = faults(held, checkpoint_shapes(abstract_model(spec, jnp.float32)), lambda name: is_unread(spec, name))
    shown = list(itertools.islice(found, MAX_TENSORS))
    if num_more := sum(1 for _ in found):
        shown.append(f"{num_more} more tensors of the checkpoint differ from what config.json says")
    return spec, shown
