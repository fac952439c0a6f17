"""Attention by the Triton kernels: which of them takes a step."""

from typing import Any

from jaxtyping import Array, Float

from jsg.kernels_pallas import cascade, chunks, paged_decode, ragged_paged_attention
from jsg.kernels_pallas.inputs import AttentionInputs, LayerCache


def paged_attention(
    queries: Float[Array, "T N H"],
    cache: LayerCache,
    inputs: AttentionInputs,
    *,
    value_dim: int | None = None,
    **how: Any,
) -> Float[Array, "T N value"]:
    """Chooses the kernel: a step with query tiles is one launch; one of singles splits contexts and shares prefixes.

    Latent rows are read for so many heads at a time that the members of a group would not fit beside each other.

    Raises:
        NotImplementedError: Keys and values are in one array, or the kernel cannot do this case.
    """
    if len(cache) != (2 if value_dim is None else 1):
        raise NotImplementedError("the Triton kernels want keys and values in arrays of their own")
    if inputs.chunks is not None and value_dim is None:
        own = chunks.taken_by(chunks.chosen(len(queries)), queries, how)
        if own is not None:
            how = {"own": own, "scale": how["scale"], "sinks": how["sinks"], "interpret": how["interpret"]}
            return chunks.paged_attention(queries, cache[0], cache[1], inputs, **how).out
    is_plain = inputs.groups is None or value_dim is not None
    without_tiles = paged_decode.paged_decode if is_plain else cascade.cascade
    attend = ragged_paged_attention.ragged_paged_attention if inputs.tile_rows.shape[0] else without_tiles
    how |= {} if value_dim is None else {"value_dim": value_dim}
    return attend(queries, cache[0], cache[-1], inputs, **how).out
