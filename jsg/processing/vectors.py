"""The hidden state of a text's last token → the vector that its client gets."""

import numpy as np

from jsg.errors import RequestError
from jsg.types import Embedder


def check_dimensions(embedder: Embedder, dimensions: int | None) -> None:
    """Raises RequestError if the model's vectors cannot be cut to this length."""
    if dimensions is None or dimensions == embedder.width:
        return
    allowed = embedder.dimensions
    if allowed is None and 1 <= dimensions < embedder.width:
        return
    if not allowed or dimensions not in allowed:
        lengths = f"from 1 to {embedder.width}" if allowed is None else f"{', '.join(map(str, allowed or ()))}"
        rule = (
            f"must be {lengths}" if lengths else f"must be {embedder.width}, for this model was not trained to be cut"
        )
        raise RequestError(f"dimensions {rule}, but got {dimensions}; leave it out or correct it", "dimensions")


def to_vector(state: bytes, embedder: Embedder, dimensions: int | None = None) -> np.ndarray:
    """The vector, float32: the first numbers of the state, normed if the model's vectors are."""
    vector = np.frombuffer(state, np.float32)[:dimensions].astype(np.float64)
    if embedder.is_normed:
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype(np.float32)
