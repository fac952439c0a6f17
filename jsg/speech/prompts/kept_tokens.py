"""The tokens of long texts that prompts had lately, so that the same tools and turns need not be encoded again."""

import sys
import threading
from collections.abc import Sequence
from typing import final

from jsg.byte_cache import ByteCache
from jsg.errors import check_prompt_len
from jsg.processing.tokenizer import Tokenizer
from jsg.prompt_ids import GrowingIds, PromptIds

LEAST_CHARS = 1024  # encoding fewer takes about as long as finding them
KEPT_BYTES = 16 * 2**20
MOST_BYTES = KEPT_BYTES // 16  # of a text, so that a long document does not drop everybody's tools
_ENTRY_BYTES = 512

type _Key = tuple[str, str]


@final
class KeptTokens:
    """Encodes the markup of prompts. It keeps texts between special tokens, up to `KEPT_BYTES` in all.

    Each namespace of the prefix cache has its own texts, so that no time shows which text another one has sent. Any
    number of threads may use it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept = ByteCache[_Key, tuple[int, PromptIds]](KEPT_BYTES, lambda entry: entry[0])
        self._lock = threading.Lock()

    def encode(self, text: str, namespace: str, *, continues: bool, max_tokens: int | None) -> Sequence[int]:
        """The tokens of a text in which special tokens count.

        Args:
            text: A piece of a prompt.
            namespace: Whose prompt it is.
            continues, max_tokens: As in `Tokenizer.encode`.

        Raises:
            RequestError: The text is not Unicode.
            ContextLengthError: It has more than twice `max_tokens`.
        """
        pattern = self._tokenizer.cuts if len(text) >= LEAST_CHARS else None
        if pattern is None:
            return self._new(text, max_tokens, continues=continues)
        ids = GrowingIds()
        start = end = 0
        for next_start, next_end in [*(found.span() for found in pattern.finditer(text)), (len(text), len(text))]:
            if next_start - end >= LEAST_CHARS:
                ids.add(self._new(text[start:end], max_tokens))
                ids.add(self._long(namespace, text[end:next_start], max_tokens))
                check_prompt_len(len(ids), max_tokens, "messages")
                start = next_start
            end = next_end
        ids.add(self._new(text[start:], max_tokens))
        return ids.whole()

    def _new(self, text: str, max_tokens: int | None, *, continues: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens, continues=continues)

    def _long(self, namespace: str, text: str, max_tokens: int | None) -> PromptIds:
        with self._lock:
            kept = self._kept.get((namespace, text))
        if kept is None:
            ids = PromptIds.of(self._new(text, max_tokens))
            kept = sys.getsizeof(text) + ids.array.nbytes + _ENTRY_BYTES, ids
            if kept[0] <= MOST_BYTES:
                with self._lock:
                    self._kept.put((namespace, text), kept)
        return kept[1]
