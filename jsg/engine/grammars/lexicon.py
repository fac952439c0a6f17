"""What grammars need: the model's tokenizer, the bytes of its tokens, and loaded kernels."""

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import final

from jsg.constrained.run.vocab import Vocabulary
from jsg.engine.grammars.kernel_folder import KernelFolder
from jsg.errors import EngineDeadError, JsgError, ModelError, RequestError

logger = logging.getLogger(__name__)

FIRST_REQUEST_S = 1.0
"""Loading begins so long after the engine is ready, unless a grammar comes earlier. It takes the interpreter lock for
half a second, which the request that the engine was started for should not feel."""


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
    """Loads a lexicon in a thread when the engine is ready, because the first answer may need no grammar.

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
        self._eos_ids = [token for token in eos_token_ids if token < vocab_size]
        self._future: Future[Lexicon | Exception] = Future()
        self._is_needed = threading.Event()
        self._is_closing = threading.Event()
        self._beginning = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts the thread, which waits `FIRST_REQUEST_S` before it loads. The engine is ready."""
        with self._beginning:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lexicon", daemon=True)
                self._thread.start()

    @property
    def is_loaded(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._future.done()

    def wait(self) -> None:
        """Returns when loading has ended, with or without success. Loading begins at once. Any thread may wait."""
        if not self.is_loaded:
            self._is_needed.set()
            self.begin()
            self._future.result()

    def close(self, *, waits: bool = True) -> None:
        """Ends loading, and waits for the thread if `waits` is set."""
        self._is_closing.set()
        self._is_needed.set()
        self._kernels.close()
        if waits and self._thread is not None:
            self._thread.join()

    def get(self) -> Lexicon:
        """The lexicon. Waits until it is loaded.

        Raises:
            RequestError: The model has no tokenizer.
            JsgError: It could not be loaded.
        """
        self.wait()
        loaded = self._future.result()
        if isinstance(loaded, ModelError):
            raise RequestError(f"a grammar needs the model's tokenizer, but {loaded}", param="grammar")
        if isinstance(loaded, Exception):
            raise JsgError("grammars cannot be used, because the engine could not load what they need; see its log")
        return loaded

    def _run(self) -> None:
        self._is_needed.wait(FIRST_REQUEST_S)
        try:
            self._future.set_result(self._load())
        except (ModelError, EngineDeadError) as error:  # the first is told to clients, the second to nobody
            self._future.set_result(error)
        except Exception as error:
            logger.exception("what grammars need could not be loaded")
            self._future.set_result(error)

    def _check_open(self) -> None:
        if self._is_closing.is_set():
            raise EngineDeadError("the engine was closed")

    def _load(self) -> Lexicon:
        self._check_open()
        # An engine can run without the packages for text, as it does under bench.device.
        from jsg.processing.tokenizer import load_tokenizer, vocabulary_bytes

        tokenizer, size = load_tokenizer(self._directory), self._vocab_size
        special = [token for token in tokenizer.special_ids if token < size]
        vocabulary = Vocabulary(
            vocabulary_bytes(tokenizer)[:size],
            special,
            self._eos_ids,
            size=size,
            special_names={i: tokenizer.token_bytes(i).decode(errors="replace") for i in special},
        )
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
