"""An image or a video of a prompt, as the engine takes it. It needs no JAX, and nobody changes it.

The front decodes and cuts the files of a client. The engine gets pixels that are ready for the encoder, and for each
token of the prompt the row of the encoder's result that it takes.
"""

import dataclasses
from typing import Any

from jsg.errors import is_int, require

ndarray = Any
"""NumPy's type: to import NumPy takes longer than everything that a command line needs of this module."""

MIN_TOKENS = 5
"""So many words have more than 128 bits (`jsg/processing/media/key.py`). Fewer words do not tell items apart."""
MIN_DIGEST_BYTES = 16
MAX_DIGEST_BYTES = 64
REMEDY = "this is a bug of who made the request"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MediaInput:
    """One image or video, which stands for `len(rows)` consecutive tokens of a prompt.

    Attributes:
        start: Index of the first of these tokens in `Request.input_ids`. All of them are the model's placeholder.
        words: int32 [n], the words by which the radix tree finds these tokens in place of their ids. No word is a token
            id. Other pixels, and the same pixels cut in another way, have other words.
        rows: int32 [n], the row of the features that each token takes. Row p of tile t is t * (rows of a tile) + p, and
            -1 is the model's newline.
        pixels: float32 [N, 3, S, S], the normalised tiles of an image or frames of a video.
        digest: A name of the pixels and of how they are encoded. Features are stored and found by it.
        is_video: Whether the pixels are frames.
    """

    start: int
    words: ndarray
    rows: ndarray
    pixels: ndarray
    digest: bytes
    is_video: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, rule: str, value: object) -> None:
            require(ok, "media", rule, value, REMEDY)

        check(is_int(self.start) and 0 <= self.start < 2**31, "at an index from 0", self.start)
        for name in ("words", "rows"):
            value = getattr(self, name)
            is_row = _is_array(value, "int32", 1) and len(value) > 0
            check(is_row, f"an item whose {name} are int32 [n]", _shape(value))
        num_rows, pixels = len(self.rows), self.pixels
        check(num_rows >= MIN_TOKENS, f"an item of at least {MIN_TOKENS} tokens", num_rows)
        check(len(self.words) == num_rows, "an item with a word for each row", len(self.words))
        check(bool(self.words.min() >= 0), "an item whose words are not negative", self.words.min())
        check(bool(self.rows.min() >= -1), "an item whose rows are from -1", self.rows.min())
        is_square = _is_array(pixels, "float32", 4) and pixels.shape[1] == 3 and pixels.shape[2] == pixels.shape[3]
        check(is_square and pixels.size > 0, "an item whose pixels are float32 [N, 3, S, S]", _shape(pixels))
        is_digest = isinstance(self.digest, bytes) and MIN_DIGEST_BYTES <= len(self.digest) <= MAX_DIGEST_BYTES
        rule = f"an item whose digest has {MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} bytes"
        check(is_digest, rule, self.digest)
        check(isinstance(self.is_video, bool), "an item that is an image or a video", self.is_video)

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.start + len(self.rows)


def _is_array(value: Any, dtype: str, num_axes: int) -> bool:
    return getattr(value, "dtype", None) == dtype and value.ndim == num_axes


def _shape(value: Any) -> str:
    """An array as a message may name it."""
    return f"{value.dtype} {list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
