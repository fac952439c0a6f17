"""The vocabulary of a model: the bytes of each token, and which tokens are not text."""

import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jsg.constrained.files import FileForm
from jsg.constrained.run.slices import Slices, make_slices, mask_of
from jsg.constrained.run.trie import MAX_TOKEN_BYTES, SortedTokens, Trie, make_trie, sort_tokens
from jsg.constrained.special_tokens import may_be_text, special_bytes
from jsg.errors import GrammarError

FORM = FileForm(
    b"jsg.vocabulary",
    1,
    "a vocabulary",
    (
        ("size", "int64", 1),
        ("eos_ids", "int32", 1),
        ("ids", "int32", 1),
        ("text_start", "int32", 1),
        ("texts", "uint8", 1),
    ),
)
"""`ids` are the tokens that grammars read, in the order of their bytes, which begin in `texts` at `text_start`."""


class Vocabulary:
    """The tokens of a model by id, arranged for masks. It never changes, and threads and grammars share it.

    The bytes that a token adds to a text decide whether it is allowed. So tokens with equal bytes are allowed together,
    and a token may end inside a character. No grammar allows a token without bytes, a row of the model that has no
    token, or a special token that the grammar does not name. EOS ids are allowed exactly where a text is complete;
    their own text is never matched.

    Attributes:
        tokens: The bytes of each id below `len(tokens)`; b"" for a token that adds no text.
        special_ids: Ids that control the model and are no text.
        eos_ids: Ids that end a text, ascending.
        size: The number of rows of the model's vocabulary; at least `len(tokens)`.
        num_words: The number of words of a mask, W. Token t is bit t & 31 of word t >> 5. Bits from `size` on are 0.
        eos_mask: uint32[W], the EOS ids.
        all_mask: uint32[W], every id below `size`.
        max_token_len: Bytes of the longest token that is text; 0 if there is none.
        first_bytes: The bytes that tokens begin with.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Iterable[int],
        eos_ids: Iterable[int],
        *,
        size: int | None = None,
        special_names: Mapping[int, str] | None = None,
    ):
        """Sorts nothing yet: the first use of the trie or the slices takes about 0.3 s for 131 072 tokens.

        Args:
            tokens: The bytes that each token adds to a text, by id; b"" for a token that adds no text.
            special_ids: Tokens that control the model and are no text.
            eos_ids: Tokens that end a text; they may be special too.
            size: The number of rows of the model's vocabulary; None if there are as many as tokens.
            special_names: The texts that stand for special tokens, such as "<tool_call>". A grammar may name these.

        Raises:
            GrammarError: A token is not bytes or is too long, an id is outside the vocabulary, or `size` is too small.
        """
        self.tokens = tuple(tokens)
        self.size = len(self.tokens) if size is None else size
        if not 0 < len(self.tokens) <= self.size < 2**31:
            raise GrammarError(
                f"a vocabulary must have a token and no more tokens than rows (below 2^31), but it has "
                f"{len(self.tokens)} tokens and {self.size} rows; give the rows of the model's embedding as size"
            )
        if set(map(type, self.tokens)) != {bytes}:
            raise GrammarError(
                "each token of a vocabulary must be bytes, but one is not; encode it, or give b'' for a token without "
                "text"
            )
        self.special_ids = frozenset(self._checked(special_ids, "special_ids"))
        self.eos_ids = tuple(sorted(set(self._checked(eos_ids, "eos_ids"))))
        self._texts = self._texts_of(special_names or {})
        self.num_words = (self.size + 31) // 32
        self.eos_mask = mask_of(np.array(self.eos_ids, np.int32), self.num_words)
        self.all_mask = mask_of(np.arange(self.size, dtype=np.int32), self.num_words)
        self.max_token_len = max(map(len, self._texts))
        self.first_bytes = frozenset(text[0] for text in self._texts if text)
        if self.max_token_len > MAX_TOKEN_BYTES:
            raise GrammarError(
                f"a vocabulary with grammars may have tokens of at most {MAX_TOKEN_BYTES} bytes, but one has "
                f"{self.max_token_len}; leave it out"
            )

    @functools.cached_property
    def trie(self) -> Trie:
        """All tokens that are text."""
        return self._arranged[0]

    @functools.cached_property
    def slices(self) -> Slices:
        """Parts of these tokens that are often allowed together."""
        return self._arranged[1]

    @functools.cached_property
    def _arranged(self) -> tuple[Trie, Slices]:
        in_order = self._in_order()  # a front, which only writes `to_bytes`, needs no more
        return make_trie(in_order), make_slices(in_order, self.num_words)

    def _in_order(self) -> SortedTokens:
        ids = [i for i, text in enumerate(self._texts) if text]
        return sort_tokens(ids, [self._texts[i] for i in ids])

    def to_bytes(self) -> bytes:
        """What masks depend on, as bytes for a file or a browser: an array of `FORM` each."""
        size, eos_ids, read = np.array([self.size]), np.array(self.eos_ids, np.int32), self._in_order()
        return FORM.pack(
            {"size": size, "eos_ids": eos_ids, "ids": read.ids, "text_start": read.start, "texts": read.data}
        )

    def text_of(self, token_id: int) -> bytes:
        """The bytes that a grammar reads for a token: its text, or `special_bytes` where a special token has a name."""
        return self._texts[token_id] if 0 <= token_id < len(self._texts) else b""

    def longest_token(self, text: bytes) -> int | None:
        """The longest token that a text begins with, as grammars read tokens; None if there is none."""
        trie, node, found = self.trie, 0, None
        for byte in text:
            child = node + 1
            while child < trie.skip[node] and trie.byte[child] != byte:
                child = int(trie.skip[child])
            if child >= trie.skip[node]:
                break
            node = child
            if trie.token_start[node] < trie.token_start[node + 1]:
                found = int(trie.tokens[trie.token_start[node]])
        return found

    @property
    def num_bytes(self) -> int:
        """Memory of the tries and masks, without the tokens themselves."""
        return self.trie.num_bytes + self.eos_mask.nbytes + self.all_mask.nbytes + self.slices.num_bytes

    def _texts_of(self, special_names: Mapping[int, str]) -> list[bytes]:
        """The bytes that a grammar reads for each token."""
        # Tokens with bytes that never occur in UTF-8 are not text either. So no text can spell a special token.
        texts = [token if may_be_text(token) else b"" for token in self.tokens]
        for i in self.special_ids.union(self.eos_ids).intersection(range(len(texts))):
            texts[i] = b""
        for i in self.special_ids.intersection(self._checked(special_names, "special_names")):
            if i not in self.eos_ids and i < len(texts):
                texts[i] = special_bytes(special_names[i])
        return texts

    def _checked(self, ids: Iterable[int], what: str) -> list[int]:
        checked = [int(i) for i in ids]
        for i in checked:
            if not 0 <= i < self.size:
                raise GrammarError(
                    f"{what} must be in [0, {self.size}), the rows of the vocabulary, but one is {i}; leave it out"
                )
        return checked
