"""The words that stand for a picture in the key of the radix tree. Only equal pixels, shown alike, have equal words.

The placeholder tokens of all pictures are the same, so with them in the key one picture would get the KV of another. In
their place the key has words made from the SHA-256 of what the model is shown.

    token of the picture   0         1         2         3         4         ...
    word                   H(0)[0]   H(0)[1]   H(0)[2]   H(0)[3]   H(1)[0]   ...     H(n) = SHA-256(digest, n)

- A word is at least the size of the vocabulary, so it is no token, and below 2^31, so it fits. Negative words stand for
  moved positions (`jsg/sched/positions.py`).
- A word has log2(2^31 - vocabulary) bits, 30.9 even for a vocabulary of 2^24. So the first five words of a picture have
  more than 128 bits together, and nobody can make two pictures in which all five agree. If fewer agree (`MIN_TOKENS`),
  nothing is shared.
- Words differ from token to token, so a picture matches another only if both begin at the same token.
"""

import hashlib
import json
import struct
from collections.abc import Sequence

import numpy as np

from jsg.media import MIN_TOKENS

MAX_VOCAB_SIZE = 2**24

_WORDS_PER_HASH = 4


def image_key(pixels: np.ndarray, *, mode: str, size: tuple[int, int], tiling: Sequence[tuple[int, int]] = ()) -> bytes:
    """The SHA-256 of what the model is shown, 32 bytes.

    Args:
        pixels: What the vision tower reads. The shape and dtype count too.
        mode: Whether the pixels are an "image" or a "video".
        size: Height and width of the original, on which it depends which patches are padding.
        tiling: Rows and columns of each grid of tiles.
    """
    header = json.dumps([mode, size, list(tiling), pixels.dtype.str, pixels.shape]).encode()
    digest = hashlib.sha256(struct.pack("<Q", len(header)) + header)  # the length says where the pixels begin
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def key_words(digest: bytes, num_tokens: int, vocab_size: int) -> np.ndarray:
    """The words of a picture's tokens: int32 [num_tokens], each in [vocab_size, 2^31).

    With fewer tokens the words are the first of those with more tokens.

    Raises:
        ValueError: There are fewer than `MIN_TOKENS` tokens, or the vocabulary is outside [1, `MAX_VOCAB_SIZE`], so
            the words could not have 128 bits.
    """
    if num_tokens < MIN_TOKENS or not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"a picture must take at least {MIN_TOKENS} tokens of a vocabulary of at most {MAX_VOCAB_SIZE}, but takes "
            f"{num_tokens} of {vocab_size}; others could share its key"
        )
    num_hashes = -(-num_tokens // _WORDS_PER_HASH)
    hashes = b"".join(hashlib.sha256(digest + struct.pack("<Q", number)).digest() for number in range(num_hashes))
    # 64 bits choose one of fewer than 2^31 words, so each word is equally likely to within 2^-33.
    words = np.frombuffer(hashes, "<u8")[:num_tokens] % np.uint64(2**31 - vocab_size) + np.uint64(vocab_size)
    return words.astype(np.int32)
