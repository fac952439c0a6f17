"""An image or a video of a prompt, as the engine takes it. Host side: no JAX, nothing mutable.

The front decodes and cuts what a client has sent; the engine gets pixels that are ready for the encoder, and which
token of the prompt takes which of the encoder's results.
"""

import dataclasses
from typing import Any

from jsg.checks import is_int, require

ndarray = Any
"""NumPy's: importing it takes longer than all that a command line needs of this module."""

MIN_TOKENS = 5
"""Words that carry more than 128 bits together (`jsg/processing/media/key.py`); fewer do not tell items apart."""
MIN_DIGEST_BYTES = 16
MAX_DIGEST_BYTES = 64
REMEDY = "this is a bug of who made the request"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MediaInput:
    """One image or video, which stands for `len(rows)` tokens of a prompt one after another.

    Attributes:
        start: Index of the first of these tokens in `Request.input_ids`. All of them hold the model's placeholder.
        words: int32 [n], what the radix tree finds these tokens by in place of their ids: none is a token id, and
            those of other pixels, or of these cut otherwise, are others.
        rows: int32 [n], which row of the features each token takes: row p of tile t is t * (rows of a tile) + p. -1 is
            the model's newline.
        pixels: float32 [N, 3, S, S], the tiles of an image or the frames of a video, normalised.
        digest: Names the pixels and what they are encoded as: features are kept, and found again, by it.
        is_video: The pixels are frames.
    """

    start: int
    words: ndarray
    rows: ndarray
    pixels: ndarray
    digest: bytes
    is_video: bool = False

    def __post_init__(self) -> None:
        require(is_int(self.start) and 0 <= self.start < 2**31, "media", "at an index from 0", self.start, REMEDY)
        for name in ("words", "rows"):
            value = getattr(self, name)
            is_row = _is_array(value, "int32", 1) and len(value) > 0
            require(is_row, "media", f"an item whose {name} are int32 [n]", _shape(value), REMEDY)
        require(
            len(self.rows) >= MIN_TOKENS, "media", f"an item of at least {MIN_TOKENS} tokens", len(self.rows), REMEDY
        )
        require(len(self.words) == len(self.rows), "media", "an item with a word for each row", len(self.words), REMEDY)
        require(bool(self.words.min() >= 0), "media", "an item whose words are not negative", self.words.min(), REMEDY)
        require(bool(self.rows.min() >= -1), "media", "an item whose rows are from -1", self.rows.min(), REMEDY)
        pixels = self.pixels
        require(
            _is_array(pixels, "float32", 4)
            and pixels.size > 0
            and pixels.shape[1] == 3
            and pixels.shape[2] == pixels.shape[3],
            "media",
            "an item whose pixels are float32 [N, 3, S, S]",
            _shape(pixels),
            REMEDY,
        )
        require(
            isinstance(self.digest, bytes) and MIN_DIGEST_BYTES <= len(self.digest) <= MAX_DIGEST_BYTES,
            "media",
            f"an item whose digest has {MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} bytes",
            self.digest,
            REMEDY,
        )
        require(isinstance(self.is_video, bool), "media", "an item that is an image or a video", self.is_video, REMEDY)

    @property
    def end(self) -> int:
        """Index behind its last token."""
        return self.start + len(self.rows)


def _is_array(value: Any, dtype: str, num_axes: int) -> bool:
    return getattr(value, "dtype", None) == dtype and value.ndim == num_axes


def _shape(value: Any) -> str:
    """An array as a message may name it."""
    return f"{value.dtype} {list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
