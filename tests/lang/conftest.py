"""What tests of several files of the language share."""

import gc
from collections.abc import Iterator

import pytest

from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model
from tests.processing.conftest import all_tokenizers, directories  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing_open() -> Iterator[None]:
    """Finds connections that were never closed in the file that left them, and not in one that runs later."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    """The tokenizer of the embedded model."""
    return load_tokenizer(resolve_model("tiny"))
