"""The servers of `tests/server`."""

from tests.server.conftest import make_server, tokenizer_dir

__all__ = ["make_server", "tokenizer_dir"]
