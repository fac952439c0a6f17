"""The files beside a tokenizer, which name the tokens that begin and end a text and give the chat template."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jsg.errors import ModelError
from jsg.processing.added_tokens import FLAGS

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
        legacy: Whether that space comes again after a special token, as for Llama 1. Later models say false.
        special_tokens: Written forms of every token that a field ending in `_token` names, that a list of special
            tokens has, or that is marked special.
        added_tokens: Id → written form of the tokens that were added after training.
        token_flags: Written form of a token → those of `added_tokens.FLAGS` that are on, where some are.
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
    token_flags: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
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
        token_flags=_token_flags(fields, added.values()),
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
        tokens += _values(listed) if isinstance(listed, list | dict) else ()
    return frozenset(token for value in tokens if (token := _written_form(value)))


def _token_flags(fields: Mapping[str, Any], added: Iterable[str]) -> dict[str, frozenset[str]]:
    """The flags of tokens that are on. What `added_tokens_decoder` says counts more than where a token is named.

    A token that is not special and says nothing of `normalized` is normalized, as an entry of an older file.
    """
    lists = (fields.get(name) for name in ("additional_special_tokens", "extra_special_tokens"))
    named = [value for name, value in fields.items() if name.endswith("_token")]
    named += [token for each in lists if isinstance(each, list | dict) for token in _values(each)]
    decoder = fields.get("added_tokens_decoder")
    special = {token for value in named if (token := _written_form(value))}
    flags = {token: frozenset({"normalized"}) for token in added if token not in special}
    for value in [*named, *(decoder.values() if isinstance(decoder, dict) else ())]:
        if isinstance(value, dict) and (token := _written_form(value)):
            is_special = value.get("special") is True or token in special
            defaults = {"normalized": not is_special}
            flags[token] = frozenset(name for name in FLAGS if value.get(name, defaults.get(name)) is True)
    return flags


def _values(listed: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return listed.values() if isinstance(listed, dict) else listed


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
