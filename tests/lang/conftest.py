"""What tests of several files of the language share."""

import pytest

from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model
from tests.processing.conftest import all_tokenizers, directories  # noqa: F401


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    """The tokenizer of the embedded model."""
    return load_tokenizer(resolve_model("tiny"))
