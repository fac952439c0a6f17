"""Fixtures: tokenizers of every kind."""

from tests.processing.conftest import all_tokenizers, directories, kind, tokenizer  # noqa: F401
