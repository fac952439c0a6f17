"""What grammars need: the model's tokenizer, the bytes of its tokens, and loaded kernels."""

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import final

from jsg.constrained.run.vocab import Vocabulary
from jsg.engine.grammars.begun import Begun
from jsg.engine.grammars.kernel_folder import KernelFolder
from jsg.errors import EngineDeadError, JsgError, ModelError, RequestError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Lexicon:
    """The tokens of a model as text and as bytes.

    Attributes:
        encode: Gives the tokens of a text, in which no special token is read.
        puts_space: Whether encoding puts a space before a text.
        vocabulary: The bytes of all tokens.
    """

    encode: Callable[[str], list[int]]
    puts_space: bool
    vocabulary: Vocabulary


@final
class LexiconLoader:
    """Loads a lexicon in a thread as soon as an engine has started, so that the first grammar waits for little.

    A model without a tokenizer has no lexicon, which is an error only for a request that needs it.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: frozenset[int], kernels: KernelFolder) -> None:
        """Loads nothing yet.

        Args:
            directory: The directory of the tokenizer.
            vocab_size: Rows of the model's vocabulary.
            eos_token_ids: Tokens that end an answer; those outside the vocabulary do not count.
            kernels: The folder of compiled kernels. It is closed with this.
        """
        self._kernels = kernels
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_ids = eos_token_ids
        self._loading = Begun("lexicon", self._run)
        self._is_closing = threading.Event()

    def begin(self) -> None:
        """Starts to load in a thread, if nobody has."""
        self._loading.begin()

    @property
    def is_loaded(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._loading.is_done

    def wait(self) -> None:
        """Returns when loading has ended, with or without success. Any thread may wait."""
        self._loading.result()

    def close(self, *, waits: bool = True) -> None:
        """Ends loading, and waits for the thread if `waits` is set."""
        self._is_closing.set()
        self._kernels.close()
        if waits:
            self._loading.join()

    def get(self) -> Lexicon:
        """The lexicon. Waits until it is loaded.

        Raises:
            RequestError: The model has no tokenizer.
            JsgError: It could not be loaded.
        """
        loaded = self._loading.result()
        if isinstance(loaded, ModelError):
            raise RequestError(f"a grammar needs the model's tokenizer, but {loaded}", param="grammar")
        if isinstance(loaded, Exception):
            raise JsgError("grammars cannot be used, because the engine could not load what they need; see its log")
        return loaded

    def _run(self) -> Lexicon | Exception:
        try:
            return self._load()
        except (ModelError, EngineDeadError) as error:  # clients learn of the first, nobody of the second
            return error
        except Exception as error:
            logger.exception("what grammars need could not be loaded")
            return error

    def _check_open(self) -> None:
        if self._is_closing.is_set():
            raise EngineDeadError("the engine was closed")

    def _load(self) -> Lexicon:
        self._check_open()
        # An engine can run without the packages for text, as it does under bench.device.
        from jsg.engine.model_tokens import ModelTokens
        from jsg.processing.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self._directory)
        vocabulary = ModelTokens(tokenizer, self._vocab_size, self._eos_ids).vocabulary()
        with self._kernels.used():
            self._check_open()
            _load_kernels(vocabulary)
        encode = functools.partial(tokenizer.encode, add_special_tokens=False, parse_special=False)
        return Lexicon(encode, tokenizer.strips_leading_space, vocabulary)


def _load_kernels(vocabulary: Vocabulary) -> None:
    """Uses each kernel once, because loading them from their cache takes longer than a step may."""
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
