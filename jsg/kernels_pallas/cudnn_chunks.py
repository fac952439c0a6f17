"""Attention of chunks to their own keys by cuDNN, which takes several beside each other on Hopper and later cards."""

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # jax.nn's function takes no packed tokens
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.attention_block import Attended
from jsg.kernels_pallas.chunks import within
from jsg.kernels_pallas.inputs import Chunks

MAX_HEAD_DIM = 256


def is_here() -> bool:
    """Whether there is a device. Without one XLA compiles a call of cuDNN too, but makes no plan for it."""
    return jax.default_backend() == "gpu"


def attend(
    queries: Float[Array, "T N H"],
    keys: Float[Array, "S K H"],
    values: Float[Array, "S K H"],
    chunks: Chunks,
    *,
    scale: float,
) -> Attended:
    """See `chunks.OwnAttention`. What is found for tokens of no chunk means nothing.

    Raises:
        NotImplementedError: There is no such card, or cuDNN has no such heads.
        RuntimeError: There is no cuDNN.
    """

    def offsets(firsts: Int[Array, " M"], end: int) -> Int[Array, "1 ends"]:
        return jnp.append(jnp.where(chunks.lens > 0, firsts, end), end).astype(jnp.int32)[None]

    lens = chunks.lens.astype(jnp.int32)[None]
    found: Any = cudnn.dot_product_attention(
        *(x[None] for x in (queries, keys, values)),
        q_seqlen=lens,
        kv_seqlen=lens,
        q_offsets=offsets(chunks.starts, len(queries)),
        kv_offsets=offsets(chunks.places, len(keys)),
        scale=scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        return_residual=True,
    )
    out, stats = found  # the results, and the log-sum-exp of each chunk, head and token of the chunk
    is_in, at = within(chunks.starts, chunks.lens, len(queries))
    chunk = jnp.argmax(is_in, axis=1)
    nth = jnp.maximum(jnp.take_along_axis(at, chunk[:, None], axis=1)[:, 0], 0)
    return Attended(out[0], stats[chunk, :, nth])
