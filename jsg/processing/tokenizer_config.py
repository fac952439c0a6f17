"""The files beside a tokenizer, which name the tokens that begin and end a text and give the chat template."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsg.errors import ModelError

_FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """The contents of `tokenizer_config.json` and its companions. None means that they do not say it.

    Attributes:
        bos_token: Written form of the token that begins a text.
        eos_token: Written form of the token that ends a text.
        add_bos_token: Whether encoding puts `bos_token` in front.
        add_eos_token: Whether encoding puts `eos_token` at the end.
        add_prefix_space: Whether a space is put before a text, if `tokenizer.model` does so.
        legacy: Whether that space comes again behind a special token, as for Llama 1. Later models say false.
        special_tokens: Written forms of every token that a field ending in `_token` names, that a list of special
            tokens has, or that is marked special.
        added_tokens: Id → written form of the tokens that were added after training.
        chat_template: Jinja source.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    special_tokens: frozenset[str] = frozenset()
    added_tokens: Mapping[int, str] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Reads the files of a model directory, of which any may be missing.

    Raises:
        ModelError: One of the files is not JSON.
    """
    fields = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
    added, added_special = _added_tokens(directory, fields.get("added_tokens_decoder"))
    named = {name: _written_form(value) for name, value in fields.items() if name.endswith("_token")}
    flags = {name: value for name in _FLAGS if isinstance(value := fields.get(name), bool)}
    return TokenizerConfig(
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        **flags,
        special_tokens=frozenset(token for token in named.values() if token) | added_special | _listed(fields),
        added_tokens=added,
        chat_template=_chat_template(directory, fields.get("chat_template")),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ModelError(f"{path.name} must be a JSON object, but it is not; fetch the model again")
    return fields


def _written_form(value: object) -> str | None:
    """The token of a field, which is a string or an object with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _listed(fields: Mapping[str, Any]) -> frozenset[str]:
    """Special tokens without a use of their own, under the field's name in transformers 4 or 5."""
    tokens: list[object] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = fields.get(name)
        tokens += listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
    return frozenset(token for value in tokens if (token := _written_form(value)))


def _added_tokens(directory: Path, field: object) -> tuple[dict[int, str], frozenset[str]]:
    """The added tokens by id, and which of them are special. An older file has ids only."""
    entries = {str(token_id): token for token, token_id in _read_json(directory / "added_tokens.json").items()}
    if isinstance(field, dict):
        entries |= field
    added = {int(key): token for key, value in entries.items() if key.isdecimal() and (token := _written_form(value))}
    return added, frozenset(
        added[int(key)]
        for key, value in entries.items()
        if isinstance(value, dict) and value.get("special") is True and key.isdecimal() and int(key) in added
    )


def _chat_template(directory: Path, field: object) -> str | None:
    """The template: a file of its own, or else the field, which is a string or a list of named templates."""
    if (file := directory / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    field = _read_json(directory / "chat_template.json").get("chat_template", field)
    if isinstance(field, list):
        named = {entry.get("name"): entry.get("template") for entry in field if isinstance(entry, dict)}
        field = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    return field if isinstance(field, str) else None
