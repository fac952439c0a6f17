"""The hidden state of a text's last token → the vector that its client gets."""

from collections.abc import Sequence

import numpy as np

from jsg.errors import AbortedError, RequestError
from jsg.types import Embedder


def check_dimensions(embedder: Embedder, dimensions: int | None) -> None:
    """Raises RequestError if the model's vectors cannot be cut to this length."""
    width, lengths = embedder.width, embedder.dimensions
    allowed = range(1, width + 1) if lengths is None else (*lengths, width)
    if dimensions is not None and dimensions not in allowed:
        rule = f"from 1 to {width}" if lengths is None else " or ".join(map(str, allowed))
        raise RequestError(
            f"dimensions must be {rule}, to which the model was trained to be cut, but got {dimensions}; correct it",
            param="dimensions",
        )


def whole(states: Sequence[bytes | None]) -> list[bytes]:
    """The states. Raises AbortedError where one is missing."""
    there = [state for state in states if state is not None]
    if len(there) < len(states):
        raise AbortedError("the request was aborted before it had all vectors; send it again")
    return there


def to_vector(state: bytes, embedder: Embedder, dimensions: int | None = None) -> np.ndarray:
    """The vector, float32: the first numbers of the state, normed if the model's vectors are."""
    vector = np.frombuffer(state, np.float32)[:dimensions].astype(np.float64)
    if embedder.is_normed:
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype(np.float32)
