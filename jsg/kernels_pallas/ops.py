"""The entries to everything that has a kernel; each picks an implementation. Letters: `jsg/models/inputs.py`.

"triton" is Pallas with the Triton lowering, for NVIDIA; "tpu" is JAX's own kernel; "reference" is plain `jnp` and
always works. Where a kernel cannot do a case, it raises `NotImplementedError` and the choice falls on the reference.
"""

import contextlib

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num, UInt

from jsg.kernels_pallas import reference, reference_routes, reference_threshold, reference_write
from jsg.kernels_pallas.inputs import AttentionInputs, HeadNorms, LayerCache
from jsg.kernels_pallas.reference_routes import Routes

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


def default_page_size(num_rows: int, context_len: int) -> int:
    """KV slots in one page where nobody says: a token, or what the best implementation has room for."""
    if best_implementation() != "tpu":
        return 1
    from jsg.kernels_pallas import tpu

    return tpu.smallest_page_size(num_rows, context_len)


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


def expert_routes(
    logits: Float[Array, "T E"],
    experts_per_token: int,
    *,
    first: Int[Array, ""] | int = 0,
    num_own: int | None = None,
    implementation: str | None = None,
) -> Routes:
    """The `experts_per_token` most likely experts of each token, and its copies sorted by expert.

    The choice is the same on every device, whichever experts it has.

    Args:
        logits: Of the router. A token with NaN has some experts or other, and NaN for their weights.
        experts_per_token: At most E.
        first: Of the experts that this device has, which are successive ones; their copies are sorted to the front.
        num_own: How many it has, first + num_own at most E; None for all.
        implementation: "triton", "reference", or None for the best that works here.
    """
    num_own = logits.shape[1] if num_own is None else num_own
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import expert_routes as kernel

        return kernel.expert_routes(logits, experts_per_token, first=first, num_own=num_own, interpret=_interprets())
    return reference_routes.expert_routes(logits, experts_per_token, first=first, num_own=num_own)


def grouped_matmul(
    rows: Float[Array, "R D"],
    kernels: Num[Array, "E D F"],
    sizes: Int[Array, " E"],
    *,
    scale: Float[Array, "E 1 F"] | None = None,
    result: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> Float[Array, "R F"]:
    """rows · kernels[e] for the rows of each group e, summed in float32.

    Rows behind the last group are of experts that other devices have. Nothing is promised of their results, not even
    that they are numbers, and they change no other result, whatever they hold.

    Args:
        rows: Those of group 0 first, then those of group 1, and so on.
        kernels: One for each group; with `scale` of any type whose numbers are exact in that of the rows.
        sizes: Rows of each group; they add up to R at most.
        scale: What the sums of each column are multiplied by, in float32.
        result: Type of the result.
        implementation: "triton", "reference", or None for the best that works here. The reference is XLA's own, which
            on a TPU is a kernel, and elsewhere computes every row with every kernel.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import grouped_matmul as kernel

        with _falling_back(implementation):
            return kernel.grouped_matmul(rows, kernels, sizes, scale=scale, result=result, interpret=_interprets())
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None  # as `models.layers.project`
    if scale is None:
        return lax.ragged_dot(rows, kernels, sizes, precision=precision, preferred_element_type=result)
    sums = lax.ragged_dot(
        rows, kernels.astype(rows.dtype), sizes, precision=precision, preferred_element_type=jnp.float32
    )
    group = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
    return (sums * scale[group, 0]).astype(result)


def kept_threshold(
    logits: Float[Array, "R V"],
    largest: Float[Array, " R"],
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    *,
    implementation: str | None = None,
) -> UInt[Array, " R"]:
    """Per row the threshold that top-k, then top-p of what top-k leaves, put to its logits. Without a sort.

    A logit is kept where `reference_threshold.sortable` of it is at least the threshold. Logits that are equal to the
    last one kept stay. Top-k is exact. Top-p adds up float32 probabilities, in another order in each implementation:
    they agree but where a sum is within rounding of `top_p`.

    Args:
        logits: Before the temperature. A row with NaN has some threshold or other.
        largest: The largest logit of each row.
        temperature: Probabilities are proportional to exp(logit / temperature); more than 0.
        top_k: Most likely logits to keep; from V on all.
        top_p: Mass to keep; from 1 on all.
        implementation: "triton", "reference", or None for the best that works here.
    """
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import token_threshold as kernel

        return kernel.kept_threshold(logits, largest, temperature, top_k, top_p, interpret=_interprets())
    return reference_threshold.kept_threshold(logits, largest, temperature, top_k, top_p)


def top_logits(
    logits: Float[Array, "R V"], count: int, *, implementation: str | None = None
) -> tuple[Float[Array, "R top"], Int[Array, "R top"]]:
    """The `count` largest of each row, in descending order, and their ids; of equal ones the lower ids first.

    Args:
        logits: A row with NaN has some `count` of them or other.
        count: At most V.
        implementation: "triton", "reference", or None for the best that works here.
    """
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import token_threshold as kernel

        return kernel.top_logits(logits, count, interpret=_interprets())
    return reference_threshold.top_logits(logits, count)


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
