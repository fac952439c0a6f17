"""The entries to everything that has a kernel; each picks an implementation. Letters: `jsg/models/inputs.py`.

"triton" is Pallas with the Triton lowering, for NVIDIA; "tpu" is JAX's own kernel; "reference" is plain `jnp` and
always works. Where a kernel cannot do a case, it raises `NotImplementedError` and the choice falls on the reference.
"""

import contextlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import reference, reference_norm, reference_write
from jsg.kernels_pallas.inputs import AttentionInputs, HeadNorms, LayerCache

BEST = {"gpu": "triton", "cuda": "triton", "tpu": "tpu"}


def target_platform() -> str:
    """The platform that this trace is for: that of the abstract mesh it runs under, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def best_implementation() -> str:
    """What `implementation=None` tries first."""
    return BEST.get(target_platform(), "reference")


def is_pool_interleaved(platform: str) -> bool:
    """Whether the implementation for a platform wants keys and values in one array: see `LayerCache`."""
    return BEST.get(platform) == "tpu"


def add_and_norm(
    x: Float[Array, "T D"],
    update: Float[Array, "T D"],
    weight: Float[Array, " D"],
    eps: float,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """x + update, and the RMS norm of that, scaled: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    Args:
        x: The residual stream.
        update: What a block adds to it.
        weight: Scales each column.
        eps: Added to the mean square.
        implementation: "triton", "reference", or None for the best that works here.

    Returns:
        Both in the dtype of `x`. The mean is taken in float32, and the scale applied after rounding, as checkpoints
        were trained.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import add_and_norm as kernel

        with _falling_back(implementation):
            return kernel.add_and_norm(x, update, weight, eps, interpret=_interprets())
    total = x + update
    return total, reference_norm.rms_norm(total, weight, eps)


def rotate_and_write(
    qkv: Float[Array, "T K joint"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    slots: Int[Array, " T"],
    cache: LayerCache,
    *,
    norms: HeadNorms | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N H"], LayerCache]:
    """From the joint projection to rotated queries, with keys and values in the pool; in place when it is donated.

    The pool of values stays finite, because attention multiplies masked values by zero and 0 * NaN is NaN. A value that
    is not finite becomes zero and its key NaN: every token that sees it has NaN, and no other. Slot 0, the dump, which
    masked positions are read from, always takes zeros.

    Args:
        qkv: Per key-value head its G query heads, its key and its value: joint = (G + 2)·H.
        cos: Cosine of every token's angles, float32. Dimension pairs (i, i + H/2) are turned.
        sin: Sine, likewise.
        slots: Where each token is written: page * page_size + offset; 0 for tokens that must not be.
        cache: The layer's part of the pool.
        norms: RMS norms of queries and keys, taken before they are turned.
        implementation: "triton", "reference", or None for the best that works here.

    Returns:
        Queries in the dtype of `qkv`; query head n belongs to key-value head n // G. And the pool.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import rotate_and_write as kernel  # imports Pallas, which a CPU never needs

        with _falling_back(implementation):
            return kernel.rotate_and_write(qkv, cos, sin, slots, cache, norms, interpret=_interprets())
    return reference_write.rotate_and_write(qkv, cos, sin, slots, cache, norms)


def paged_attention(
    queries: Float[Array, "T N H"],
    cache: LayerCache,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of packed new tokens over the pages of their own requests.

    Args:
        queries: Rotated queries; query head n reads key-value head n // (N // K).
        cache: The layer's part of the pool; the new tokens' own keys and values are already written.
        inputs: Who sees what.
        scale: Multiplies queries · keys.
        window: A token sees the last `window` positions, its own included; None for all.
        softcap: Scores become softcap * tanh(score / softcap); None for none.
        implementation: "triton", "tpu", "reference", or None for the best that works here.

    Returns:
        Attention of each packed token in the queries' dtype; zero for padding tokens.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    match implementation or best_implementation():
        case "triton":
            with _falling_back(implementation):
                return _triton_attention(queries, cache, inputs, scale=scale, window=window, softcap=softcap)
        case "tpu":
            from jsg.kernels_pallas import tpu

            with _falling_back(implementation):
                return tpu.paged_attention(queries, cache, inputs, scale=scale, window=window, softcap=softcap)
        case "reference":
            pass
        case unknown:
            raise NotImplementedError(
                f"paged_attention has no implementation {unknown!r}; there are 'triton', 'tpu' and 'reference'"
            )
    keys, values = reference_write.keys_and_values(cache)
    out = reference.paged_attention(queries, keys, values, inputs, scale=scale, window=window, softcap=softcap)
    return jnp.asarray(out, queries.dtype)


def _triton_attention(
    queries: Float[Array, "T N H"],
    cache: LayerCache,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Float[Array, "T N H"]:
    """A step with query tiles is one launch; one of single tokens splits long contexts and may share prefixes."""
    from jsg.kernels_pallas.cascade import cascade
    from jsg.kernels_pallas.paged_decode import paged_decode
    from jsg.kernels_pallas.ragged_paged_attention import ragged_paged_attention

    if len(cache) != 2:
        raise NotImplementedError("the Triton kernels want keys and values in arrays of their own")
    without_tiles = paged_decode if inputs.groups is None else cascade
    attend = ragged_paged_attention if inputs.tile_rows.shape[0] else without_tiles
    return attend(queries, *cache, inputs, scale=scale, window=window, softcap=softcap, interpret=_interprets()).out


def _interprets() -> bool:
    """Whether kernels run in Pallas' interpret mode, because there is no GPU to lower them for."""
    return target_platform() == "cpu"


def _falling_back(named: str | None) -> contextlib.AbstractContextManager[None]:
    """Lets a case that a kernel cannot do go on to the reference, unless that very kernel was asked for."""
    return contextlib.nullcontext() if named else contextlib.suppress(NotImplementedError)
