"""What grammars need of a model: its tokenizer, the bytes of its tokens, and kernels that are loaded."""

import dataclasses
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, final, runtime_checkable

from jsg.constrained.jit import use_kernel_cache
from jsg.constrained.run import kernel_cache
from jsg.constrained.run.vocab import Vocabulary
from jsg.engine.child.kernel_process import fill_elsewhere
from jsg.engine.private_directory import private_directory
from jsg.errors import JsgError, ModelError, RequestError
from jsg.processing.tool_calls import nameable_tokens

logger = logging.getLogger(__name__)

KERNEL_DIRECTORY = "numba"


@runtime_checkable
class TextTokenizer(Protocol):
    """What the engine needs of `jsg.processing.tokenizer.Tokenizer`, which is imported where one is loaded.

    Attributes:
        strips_leading_space: Encoding puts a space before a text.
        special_ids: Tokens that are no text.
    """

    strips_leading_space: bool
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The tokens of a text."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its written form, or None."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Lexicon:
    """The tokens of a model as text and as bytes."""

    tokenizer: TextTokenizer
    vocabulary: Vocabulary


@final
class LexiconLoader:
    """Loads a lexicon in a thread, while the engine loads its model.

    A model without a tokenizer has none; that is no error until a request needs it.
    """

    def __init__(
        self, directory: Path, vocab_size: int, eos_token_ids: frozenset[int], cache_directory: Path | None
    ) -> None:
        """Begins to load.

        Args:
            directory: Of the tokenizer.
            vocab_size: Rows of the model's vocabulary.
            eos_token_ids: Tokens that end an answer; those outside the vocabulary do not count.
            cache_directory: The owner-only directory of compiled programs; compiled kernels go into one inside it.
        """
        kernels = None
        if cache_directory is not None:
            kernels = private_directory(
                cache_directory / KERNEL_DIRECTORY, "--compilation-cache-dir", "what lies there is run as code"
            )
        eos_ids = [token for token in eos_token_ids if token < vocab_size]
        pool = ThreadPoolExecutor(1, thread_name_prefix="lexicon")
        self._future: Future[Lexicon | Exception] = pool.submit(_load_or_fail, directory, vocab_size, eos_ids, kernels)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Returns when nothing is under way any more."""
        self._future.result()

    def get(self) -> Lexicon:
        """The lexicon, once it is there.

        Raises:
            RequestError: There is none, and why.
            JsgError: It could not be loaded.
        """
        loaded = self._future.result()
        if isinstance(loaded, ModelError):
            raise RequestError(f"a grammar needs the model's tokenizer, but {loaded}", param="grammar")
        if isinstance(loaded, Exception):
            raise JsgError("grammars cannot be used, because the engine could not load what they need; see its log")
        return loaded


def _load_or_fail(directory: Path, vocab_size: int, eos_ids: list[int], kernels: Path | None) -> Lexicon | Exception:
    try:
        return _load(directory, vocab_size, eos_ids, kernels)
    except ModelError as error:
        return error
    except Exception as error:
        logger.exception("what grammars need could not be loaded")
        return error


def _load(directory: Path, vocab_size: int, eos_ids: list[int], kernels: Path | None) -> Lexicon:
    # An engine runs on few packages (bench.device), and those for text are not among them.
    from jsg.processing.tokenizer import load_tokenizer, vocabulary_bytes

    tokenizer = load_tokenizer(directory)
    vocabulary = Vocabulary(
        vocabulary_bytes(tokenizer)[:vocab_size],
        [token for token in tokenizer.special_ids if token < vocab_size],
        eos_ids,
        size=vocab_size,
        special_names=nameable_tokens(tokenizer, vocab_size, eos_ids),
    )
    if kernels is not None:
        if not kernel_cache.is_filled(kernels):
            fill_elsewhere(kernels)
        use_kernel_cache(kernels)
    _load_kernels(vocabulary)
    return Lexicon(tokenizer, vocabulary)


def _load_kernels(vocabulary: Vocabulary) -> None:
    """Uses each kernel once: loading them from their cache takes longer than a step may."""
    from jsg.constrained import ir
    from jsg.constrained.build.builder import build
    from jsg.constrained.grammar import CompiledGrammar

    letters = ir.ByteSet(((97, 122),))
    expression = ir.seq(ir.literal("["), ir.Repeat(letters, 1, 1000), ir.literal("]"))
    masker = CompiledGrammar(build(ir.Grammar("text", {"text": expression})), vocabulary).new_masker()
    for token in (vocabulary.tokens.index(text) for text in (b"[", b"a", b"]") if text in vocabulary.tokens):
        masker.mask_key()
        masker.forced_bytes()
        masker.accept(token)
