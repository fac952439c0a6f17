"""The real front around a scripted engine, for the load generator to load."""

from tests.server.conftest import make_server, tokenizer_dir

__all__ = ["make_server", "tokenizer_dir"]
