"""The operations that have kernels. Each function chooses an implementation. Letters: `jsg/models/inputs.py`.

"triton" is Pallas with the Triton lowering, for NVIDIA; "tpu" with Mosaic's; "native" is machine code for a CPU;
"reference" is plain `jnp`, which always works and is used where a kernel raises `NotImplementedError`: see `refusals`.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num, UInt

from jsg.kernels_pallas import (
    fp8,
    reference,
    reference_convolution,
    reference_delta,
    reference_fp8,
    reference_penalties,
    reference_routes,
    reference_rows,
    reference_threshold,
    reference_write,
)
from jsg.kernels_pallas.activation import Activation
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.kernels_pallas.falling_back import falling_back, refusals  # noqa: F401 # others ask `ops` for refusals
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import Form
from jsg.kernels_pallas.inputs import (
    AttentionInputs,
    Chunks,
    DeltaWeights,
    Fp8Kernel,
    Fp8Rows,
    GatesApart,
    GroupKernels,
    HeadNorms,
    LayerCache,
    Panels,
    Pieces,
    PieceTiles,
    ScanWeights,
    Scoring,
    SharedKernels,
    StateCache,
)
from jsg.kernels_pallas.reference_penalties import Penalties
from jsg.kernels_pallas.reference_routes import Routes
from jsg.window import Window

ATTENTION = "paged_attention"
BEST = {"gpu": "triton", "cuda": "triton", "tpu": "tpu", "cpu": "native"}


def target_platform() -> str:
    """The platform of this trace: that of the abstract mesh that it runs under, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def best_implementation() -> str:
    """The implementation that is tried first if none is named."""
    return BEST.get(target_platform(), "reference")


def is_pool_by_head(platform: str) -> bool:
    """Whether the best implementation for a platform takes the tokens of a page head by head: see `KVPool`."""
    return BEST.get(platform) == "tpu"


def default_page_size() -> int:
    """The default number of KV slots in a page: 1, or what the best implementation needs to be fast."""
    if best_implementation() != "tpu":
        return 1
    from jsg.kernels_pallas import tpu

    return tpu.PAGE_SIZE


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
    """Rotates queries and keys of the joint projection, and writes keys and values to the pool, in place if donated.

    The pool of values stays finite, because attention multiplies masked values by zero and 0 * NaN is NaN. A value that
    is not finite becomes zero and its key NaN, so every token that sees it has NaN, and no other token. Slot 0, the
    dump, from which masked positions are read, always gets zeros.

    Args:
        qkv: For each key-value head its G query heads, its key and its value: joint = (G + 2)·H.
        cos: Cosine of every token's angles, float32. Dimension pairs (i, i + H/2) are rotated.
        sin: Sine, likewise.
        slots: The slot of each token, page * page_size + offset; 0 for tokens that must not be written.
        cache: The layer's part of the pool.
        norms: RMS norms of queries and keys.
        implementation: "triton", "tpu", "native", "reference", or None for the best that works here.

    Returns:
        Queries in the dtype of `qkv`; query head n belongs to key-value head n // G. And the pool.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    match implementation or best_implementation():
        case "triton":
            from jsg.kernels_pallas import rotate_and_write as kernel  # not at the top: a CPU does not need Pallas

            with falling_back("rotate_and_write", "triton", implementation):
                return kernel.rotate_and_write(qkv, cos, sin, slots, cache, norms, interpret=_interprets())
        case "native":
            from jsg.kernels_pallas.native import rotate_and_write as native

            with falling_back("rotate_and_write", "native", implementation):
                return native.rotate_and_write(qkv, cos, sin, slots, cache, norms)
        case "tpu":
            from jsg.kernels_pallas import tpu_write

            with falling_back("rotate_and_write", "tpu", implementation):
                return tpu_write.rotate_and_write(qkv, cos, sin, slots, cache, norms)
        case _:
            pass
    return reference_write.rotate_and_write(qkv, cos, sin, slots, cache, norms)


def paged_attention(
    queries: Float[Array, "T N H"],
    cache: LayerCache,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of packed new tokens over the pages of their own requests.

    Args:
        queries: Rotated queries; query head n reads key-value head n // (N // K).
        cache: The layer's part of the pool, in which the new tokens' own keys and values are written already.
        inputs: Which tokens each token sees.
        scale: Multiplies queries · keys.
        window: Which positions up to its own a token sees; None for all.
        softcap: Scores become softcap * tanh(score / softcap); None for none.
        sinks: For each query head one more score, which is neither scaled nor capped, and whose value is zero. So the
            weights of a token's keys sum to less than one. None for none.
        implementation: "triton", "tpu", "native", "reference", or None for the best that works here.

    Returns:
        Attention of each packed token in the queries' dtype; zero for padding tokens.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    match implementation or best_implementation():
        case "triton":
            from jsg.kernels_pallas import triton_attention

            with falling_back(ATTENTION, "triton", implementation):
                return triton_attention.paged_attention(queries, cache, inputs, **how, interpret=_interprets())
        case "tpu":
            from jsg.kernels_pallas import tpu

            with falling_back(ATTENTION, "tpu", implementation):
                return tpu.paged_attention(queries, cache, inputs, **how)
        case "native":
            from jsg.kernels_pallas.native import attention

            with falling_back(ATTENTION, "native", implementation):
                scoring = Scoring(scale, window, softcap)
                keys, values = reference_write.keys_and_values(cache)
                out = attention.paged_attention(queries, keys, values, inputs, scoring, sinks)
                return out.astype(queries.dtype)
        case "reference":
            pass
        case unknown:
            known = "'triton', 'tpu', 'native' and 'reference'"
            raise NotImplementedError(f"paged_attention has no implementation {unknown!r}; there are {known}")
    keys, values = reference_write.keys_and_values(cache)
    out = reference.paged_attention(queries, keys, values, inputs, **how)
    return jnp.asarray(out, queries.dtype)


def chunks_of(inputs: AttentionInputs, num_tokens: int) -> Chunks | None:
    """The chunks of a step that `paged_attention` takes apart, for `AttentionInputs.chunks`; None if it takes none.

    Results then depend on how a prompt is cut, in their last bits.
    """
    if best_implementation() != "triton":
        return None
    from jsg.kernels_pallas import chunks

    return chunks.list_chunks(inputs, num_tokens) if chunks.chosen(num_tokens) else None


def write_latents(cache: LayerCache, slots: Int[Array, " T"], rows: Float[Array, "T K H"]) -> LayerCache:
    """Writes keys whose first numbers are their values to the pool, in place if donated. See `latent_attention`.

    Values stay finite, as by `rotate_and_write`: of a key that is not, the last number, which is none of its value, is
    NaN, and the others are zero.
    """
    return reference_write.write_latents(cache, slots, rows)


def latent_attention(
    queries: Float[Array, "T N H"],
    cache: LayerCache,
    inputs: AttentionInputs,
    *,
    scale: float,
    value_dim: int,
    implementation: str | None = None,
) -> Float[Array, "T N value"]:
    """`paged_attention` over keys whose first `value_dim` numbers, fewer than all, are their values.

    The cache has one array. All but "triton" weigh all numbers of a key, which costs an eighth more than to weigh those
    of the value, for the published widths of 576 and 512.
    """
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import triton_attention

        with falling_back(ATTENTION, "triton", implementation):
            how: dict[str, Any] = {"value_dim": value_dim, "interpret": _interprets()}
            return triton_attention.paged_attention(queries, cache, inputs, scale=scale, **how)
    (rows,) = cache
    out = paged_attention(queries, (rows, rows), inputs, scale=scale, implementation=implementation)
    return out[..., :value_dim]


def gated_delta(
    joint: Float[Array, "T K joint"],
    raw_gates: Float[Array, "T K gates"],
    weights: DeltaWeights | ScanWeights,
    cache: StateCache,
    pieces: Pieces,
    *,
    apart: GatesApart | None = None,
    has_one_token: bool = False,
    tiles: PieceTiles | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N Dv"], StateCache]:
    """Linear attention by the gated delta rule: convolution, gates, states and the gated norm of its output.

    Without tiles tokens are computed one after another, so a piece has the same results however it is cut, and beside
    others. What is not finite reaches only later tokens of its own request, and those of its tile: the states of other
    slots are not touched, and a piece that begins at position 0 does not read its slot.

    Args:
        joint: For each key head its query and key [Dk each], the values of its G heads [Dv each], and as many gates of
            the output, unless these are apart. Head n belongs to key head n // G.
        raw_gates: For each key head what its heads say of their strengths, then of their decays unless these are apart.
        weights: The parameters. With `ScanWeights` it is a selective scan: queries and keys keep their lengths, gates
            are what heads say of their steps, and the output is float32, neither normed nor gated.
        cache: The layer's states, changed in place if donated.
        pieces: Which tokens belong to which states.
        apart: Decays for each number of a key, and gates of the output; None if both are where the others are.
        has_one_token: Token i is the only one of piece i, or piece i has none, as in a decode step.
        tiles: How pieces are cut for an implementation that computes the tokens of a tile together, "triton". Results
            then depend on how a request is cut, in their last bits. None to compute token after token, as is done in
            float32 anyway.
        implementation: "triton", "native", "reference", or None for the best that works here.

    Returns:
        The output of each head in the dtype of `joint`, zero for tokens in no piece. And the states.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    given, kept = (joint, raw_gates), (cache, pieces)
    match implementation or best_implementation():
        case "triton":
            from jsg.kernels_pallas import delta_recurrent, delta_tiles

            with falling_back("gated_delta", "triton", implementation):
                if tiles is not None and delta_tiles.takes(joint, cache, weights):
                    return delta_tiles.gated_delta(*given, weights, *kept, tiles, apart, interpret=_interprets())
                return delta_recurrent.gated_delta(
                    *given, weights, *kept, apart, has_one_token=has_one_token, interpret=_interprets()
                )
        case "native":
            from jsg.kernels_pallas.native import delta, scan

            with falling_back("gated_delta", "native", implementation):
                if isinstance(weights, ScanWeights):
                    return scan.selective_scan(*given, weights, *kept)
                return delta.gated_delta(*given, weights, *kept, apart)
        case _:
            pass
    out, cache = reference_delta.gated_delta(*given, weights, *kept, apart)
    return out if isinstance(weights, ScanWeights) else out.astype(joint.dtype), cache


def short_convolution(
    x: Float[Array, "T *channels"],
    taps: Float[Array, "taps *channels"],
    inputs: Float[Array, "slots taps *channels"],
    pieces: Pieces,
    *,
    has_one_token: bool = False,
) -> tuple[Float[Array, "T *channels"], Float[Array, "slots taps *channels"]]:
    """A causal convolution of each channel by itself. Tokens and slots are as in `gated_delta`.

    Every platform has the reference: XLA makes few launches of it, and changes slots in place.

    Args:
        x: What is convolved.
        taps: The weights, that of the newest token last.
        inputs: The last inputs of all slots, that of position p in column p modulo the taps.
        pieces: Which tokens belong to which slots.
        has_one_token: Token i is the only one of piece i, or piece i has none, as in a decode step.

    Returns:
        The sums in float32, zero for tokens in no piece, without bias and activation. And the last inputs.
    """
    out = reference_convolution.convolve(x, taps, inputs, pieces, has_one_token=has_one_token)
    is_real = pieces.lens > 0 if has_one_token else jnp.arange(len(x)) < jnp.sum(pieces.lens)
    out = jnp.where(is_real.reshape(-1, *[1] * (x.ndim - 1)), out, 0)
    if target_platform() == "cpu":  # where XLA would read slots after it changed them, and so copy all of them first
        out, inputs = lax.optimization_barrier((out, inputs))
    return out, reference_convolution.last_inputs(x, inputs, pieces)


def matmul(
    x: Float[Array, "T D"] | Fp8Rows,
    kernel: Panels | Quantised | Fp8Kernel,
    result: jax.typing.DTypeLike = jnp.float32,
    sizes: Int[Array, " E"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "T *out"]:
    """x · kernel, summed in float32 and rounded to `result`.

    Args:
        x: The rows; for a kernel of `fp8` they may be rounded already.
        kernel: In panels on a CPU, that of one product or those of several experts. Each result is summed over D in an
            order that does not depend on the other rows. Or in few bits, restored in the type of `x`; or in `fp8`.
        result: Type of the result. Of panels float32 or bfloat16.
        sizes: Rows of each expert, as in `grouped_matmul`; None for one kernel.
        implementation: Of a kernel in few bits: "triton" and "tpu", which restore parts on the chip, "reference", which
            writes all of it first, or None for the best that works here.
    """
    if isinstance(kernel, Fp8Kernel):
        return fp8.matmul(x, kernel, result, implementation, best_implementation())
    assert not isinstance(x, Fp8Rows)
    if isinstance(kernel, Panels):
        from jsg.kernels_pallas.native import matmul as native

        return native.matmul(x, kernel, result, sizes)
    match implementation or best_implementation():
        case "triton":
            from jsg.kernels_pallas.few_bits_matmul import few_bits_matmul

            with falling_back("few_bits_matmul", "triton", implementation):
                return few_bits_matmul(x, kernel, result, interpret=_interprets())
        case "tpu":
            from jsg.kernels_pallas import vmem_matmul

            with falling_back("few_bits_matmul", "tpu", implementation):
                return vmem_matmul.matmul(x, kernel, result, interpret=_interprets())
        case _:
            pass
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # as `models.layers.project`
    dimensions = ((1,), (kernel.axis,)), ((), ())
    return lax.dot_general(x, kernel.restored(x.dtype), dimensions, precision, result)


def has_faster_columns(x: Float[Array, "T D"], kernel: Quantised) -> bool:
    """Whether `matmul` is faster than XLA's product of so many rows with 8 bits, whose columns have scales."""
    if best_implementation() != "triton" or x.dtype.itemsize != 2 or kernel.form.numbers != "int8":
        return False
    from jsg.kernels_pallas.tuning import sizes_for

    return bool(sizes_for("few_bits_columns", rows=len(x))["is_faster"])


def gated(
    gate_up: Float[Array, "T _ F"], activation: Activation = "silu", *, implementation: str | None = None
) -> Float[Array, "T F"]:
    """activation(gate) · up, in their dtype. A CPU rounds once, because rounding takes longer than these operations.

    Args:
        gate_up: For each token the F gates, then what each of them lets through. Without gates, F numbers.
        activation: Which function of the gates.
        implementation: "native", "reference", or None for the best that works here.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    if activation != "relu2" and (implementation or best_implementation()) == "native":
        from jsg.kernels_pallas.native import gated as native

        with falling_back("gated", "native", implementation):
            return native.gated(gate_up, activation)
    return reference_rows.gated(gate_up, activation, jnp.float32 if target_platform() == "cpu" else gate_up.dtype)


def gated_rows(
    gate_up: Float[Array, "T _ F"], activation: Activation, kernel: Fp8Kernel, *, implementation: str | None = None
) -> Fp8Rows:
    """What `gated` gives, rounded for the product with this kernel. "triton" makes it in the launch that rounds."""
    groups = len(kernel.scale)
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import fp8_rounding

        return fp8_rounding.gated(gate_up, activation, groups, interpret=_interprets())
    return reference_fp8.rounded(gated(gate_up, activation, implementation=implementation), groups)


def normed_rows(
    x: Float[Array, "T D"],
    more: Float[Array, "T D"] | None,
    factor: Float[Array, " D"],
    eps: float,
    kernel: Fp8Kernel,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T D"], Fp8Rows]:
    """The residual stream with what is added to it, and its RMS norm, rounded for the product with a kernel.

    "triton" has one launch for it. `factor` is the weight of the norm, `eps` what is added to the mean square.
    """
    groups = len(kernel.scale)
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import fp8_rounding

        return fp8_rounding.normed(x, more, factor, eps, groups, interpret=_interprets())
    total = x if more is None else x + more
    return total, reference_fp8.rounded(reference_rows.rms_norm(total, factor, eps), groups)


def expert_routes(
    logits: Float[Array, "T E"],
    choice: ChoiceSpec,
    *,
    bias: Float[Array, " E"] | None = None,
    first: Int[Array, ""] | int = 0,
    num_own: int | None = None,
    num_real: Int[Array, ""] | int | None = None,
    implementation: str | None = None,
) -> Routes:
    """The experts of each token, and the copies of all tokens sorted by expert.

    The choice is the same on every device, whichever experts it has.

    Args:
        logits: The router's. A token whose logits are all NaN gets any experts, with weights of NaN.
        choice: How experts are chosen and weighed.
        bias: What is added to the scores of experts before they are compared; None for nothing.
        first: The first of this device's experts, which are consecutive. Their copies are sorted to the front.
        num_own: How many experts this device has, first + num_own at most E; None for all.
        num_real: How many tokens are no padding, which stand first; None for all. Padding chooses as the last of them
            does, so that no kernel of an expert is read for nothing.
        implementation: "triton", "reference", or None for the best that works here.
    """
    given = {"bias": bias, "first": first, "num_own": logits.shape[1] if num_own is None else num_own}
    given["num_real"] = num_real
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import expert_routes as kernel

        return kernel.expert_routes(logits, choice, **given, interpret=_interprets())
    return reference_routes.expert_routes(logits, choice, **given)


def grouped_matmul(
    rows: Float[Array, "R D"],
    kernels: Num[Array, "E D F"] | Quantised | Panels | Fp8Kernel,
    sizes: Int[Array, " E"],
    *,
    scale: Float[Array, "E 1 F"] | None = None,
    bias: Float[Array, "E F"] | None = None,
    result: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> Float[Array, "R F"]:
    """rows · kernels[e] + bias[e] for the rows of each group e, summed in float32.

    Rows behind the last group are for experts of other devices. Their results are undefined and may be NaN, and they
    change no other result.

    Args:
        rows: The rows of group 0, then those of group 1, and so on.
        kernels: One for each group. With `scale` they may be of any type whose numbers are exact in that of the rows.
            Those in panels, and those of `fp8`, have their scales. A `Quantised` is restored in the type of the rows,
            by "triton" and "tpu" part by part on the chip, else all of it first.
        sizes: Rows of each group, at most R in all.
        scale: The factor of the sums of each column, in float32.
        bias: What is added to each column; None for nothing.
        result: Type of the result.
        implementation: "triton", "tpu", "reference", or None for the best that works here. The reference is XLA's own,
            which on a TPU is a kernel, and elsewhere computes every row with every kernel.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    group = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
    if isinstance(kernels, Panels):
        is_there = jnp.arange(len(rows))[:, None] < sizes.sum()  # other rows of the result are not written
        sums = jnp.where(is_there, matmul(rows, kernels, result if bias is None else jnp.float32, sizes), 0)
        return (sums if bias is None else sums + bias[group]).astype(result)
    if isinstance(kernels, Fp8Kernel):
        return fp8.grouped_matmul(rows, kernels, sizes, bias, result, implementation, best_implementation())
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import grouped_matmul as kernel

        with falling_back("grouped_matmul", "triton", implementation):
            return kernel.grouped_matmul(
                rows, kernels, sizes, scale=scale, bias=bias, result=result, interpret=_interprets()
            )
    if (implementation or best_implementation()) == "tpu" and (isinstance(kernels, Quantised) or scale is not None):
        from jsg.kernels_pallas import vmem_matmul

        few = kernels if isinstance(kernels, Quantised) else Quantised(kernels, scale, Form("int8"))
        with falling_back("grouped_matmul", "tpu", implementation):
            sums = vmem_matmul.grouped_matmul(
                rows, few, sizes, result if bias is None else jnp.float32, interpret=_interprets()
            )
            return sums if bias is None else (sums + bias[group]).astype(result)
    kernels = kernels.restored(rows.dtype) if isinstance(kernels, Quantised) else kernels
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None  # as `models.layers.project`
    if scale is None and bias is None:
        return lax.ragged_dot(rows, kernels, sizes, precision=precision, preferred_element_type=result)
    sums = lax.ragged_dot(
        rows, kernels.astype(rows.dtype), sizes, precision=precision, preferred_element_type=jnp.float32
    )
    if scale is not None:
        sums *= scale[group, 0]
    return (sums if bias is None else sums + bias[group]).astype(result)


def grouped_gated(
    x: Float[Array, "T D"],
    tokens: Int[Array, " R"] | None,
    kernels: Sequence[GroupKernels],
    sizes: Int[Array, " E"],
    activation: Activation,
    *,
    result: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> Float[Array, "R F"]:
    """What gates let through of the products of these rows with the kernels of their groups. See `grouped_matmul`.

    Args:
        x: The rows.
        tokens: Which of them row r is; None for row r.
        kernels: Those of gates, if there are any, and of what they let through.
        sizes: Rows of each group.
        activation: Which function of the gates.
        result: Type of the products before they are rounded to that of `x`, where they are launches of their own.
        implementation: "triton" for one launch, "reference", or None for the best that works here.

    Raises:
        NotImplementedError: The implementation that was named cannot do this case.
    """
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import grouped_matmul as kernel

        with contextlib.nullcontext() if implementation else contextlib.suppress(NotImplementedError):
            kernel = fp8 if isinstance(kernels[0].values, Fp8Kernel) else kernel
            return kernel.grouped_gated(x, tokens, kernels, sizes, activation, interpret=_interprets())
    copies = x if tokens is None else x[tokens]
    how = {"result": result, "implementation": implementation}
    made = [grouped_matmul(copies, each.values, sizes, scale=each.scale, bias=each.bias, **how) for each in kernels]
    return gated(jnp.stack([each.astype(x.dtype) for each in made], axis=1), activation, implementation=implementation)


def experts_beside(
    x: Float[Array, "T D"],
    routes: Routes,
    kernels: Sequence[GroupKernels],
    down: GroupKernels,
    shared: SharedKernels,
    activation: Activation,
    *,
    result: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "T D"]] | None:
    """Both products of experts, with those of the block that all rows use in the same two launches.

    Args:
        x: The rows.
        routes: Which of them each copy is, and how many copies each expert has.
        kernels: As in `grouped_gated`.
        down: Those of what is let through.
        shared: The kernels of the shared block.
        activation: Which function of the gates.
        result: Type of the results.
        implementation: "triton", or None for that where it is the best one.

    Returns:
        The results of the copies, and those of the rows in the shared block. None where these are launches of their
        own: of many rows, of other sizes or types, and with other implementations.
    """
    if (implementation or best_implementation()) != "triton":
        return None
    from jsg.kernels_pallas import grouped_matmul as kernel

    if not kernel.takes_beside(x, routes.tokens, kernels, down, shared):
        return None
    given = x, routes.tokens, kernels, down, routes.sizes, shared, activation
    return kernel.experts_beside(*given, result=result, interpret=_interprets())


def penalised(
    logits: Float[Array, "R V"],
    counts: Int[Array, "rows V"],
    bias: Float[Array, "rows V"],
    penalties: Penalties,
    *,
    implementation: str | None = None,
) -> Float[Array, "R V"]:
    """The logits after penalties and biases. What is not finite is not afterwards.

    Args:
        logits: Those of the model.
        counts: For each request twice how often a token stands in its output, and 1 more if it stands in the prompt.
        bias: For each request what is added at last.
        penalties: Those of each row, and which row of the tables it has.
        implementation: "tpu", "reference", or None for the best that works here.
    """
    if (implementation or best_implementation()) == "tpu":
        from jsg.kernels_pallas import vmem_penalties

        return vmem_penalties.penalised(logits, counts, bias, penalties, interpret=_interprets())
    return reference_penalties.penalised(logits, counts, bias, penalties)


def kept_threshold(
    logits: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    *,
    implementation: str | None = None,
) -> tuple[UInt[Array, " R"], Float[Array, " R"]]:
    """For each row the threshold of the logits that top-k, and then top-p of those, keep. It needs no sort.

    A logit is kept if its `reference_threshold.sortable` is at least the threshold. Logits that equal the last one kept
    stay. Top-k is exact. Top-p adds up float32 probabilities, in another order in each implementation, so results may
    differ if a sum is within rounding of `top_p`.

    Args:
        logits: Before the temperature. A row with NaN gets any threshold.
        temperature: Probabilities are proportional to exp(logit / temperature); more than 0.
        top_k: How many of the most likely logits to keep; V or more keeps all.
        top_p: Probability mass to keep; 1 or more keeps all.
        implementation: "triton", "tpu", "reference", or None for the best that works here.

    Returns:
        The thresholds, and the largest logit of each row, infinite for one with NaN.
    """
    implementation = implementation or best_implementation()
    if implementation == "tpu":
        from jsg.kernels_pallas import vmem_threshold

        return vmem_threshold.kept_threshold(logits, temperature, top_k, top_p, interpret=_interprets())
    largest = jnp.max(jnp.where(logits < jnp.inf, logits, jnp.inf), axis=-1)
    if implementation == "triton":
        from jsg.kernels_pallas import token_threshold as kernel

        return kernel.kept_threshold(logits, largest, temperature, top_k, top_p, interpret=_interprets()), largest
    return reference_threshold.kept_threshold(logits, largest, temperature, top_k, top_p), largest


def top_logits(
    logits: Float[Array, "R V"], count: int, *, implementation: str | None = None
) -> tuple[Float[Array, "R top"], Int[Array, "R top"]]:
    """The `count` largest logits of each row in descending order, and their ids. Of equal ones lower ids come first.

    Args:
        logits: A row with NaN gets any `count` of its logits.
        count: At most V.
        implementation: "triton", "reference", or None for the best that works here.
    """
    if (implementation or best_implementation()) == "triton":
        from jsg.kernels_pallas import token_threshold as kernel

        return kernel.top_logits(logits, count, interpret=_interprets())
    return reference_threshold.top_logits(logits, count)


def _interprets() -> bool:
    """Whether kernels run in Pallas' interpret mode, because there is no GPU."""
    return target_platform() == "cpu"
