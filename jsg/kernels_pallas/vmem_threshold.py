"""Top-k and top-p over a vocabulary without a sort, as a Pallas kernel for TPUs. Letters: `jsg/models/inputs.py`.

Eight rows of logits lie in vector memory (VMEM) until their thresholds are found, so HBM is read once. There each pass
over them finds one bit, the highest first, as in `reference_threshold`. A TPU adds as many numbers with several pivots
in a pass as with one pivot in several passes, so that is all. Most searches end before the last bit: see `_search`.

It ran in interpret mode and was compiled for TPU v5e and v6e. No TPU has run it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, UInt

from jsg.kernels_pallas.tile import LANES

ROWS = 8
"""Rows of a program, as many as a vector register has."""
CHUNK = 32 * LANES
"""Logits of each row that one turn of a loop takes."""
SUMS = 4
"""Sums that a pass has at once, so that no addition waits for the one before it."""
SPARE_BYTES = 2**21
"""Vector memory of a program besides its rows: two buffers of logits, their order, and their weights."""
SIGN = -(2**31)


def kept_threshold(
    logits: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    *,
    interpret: bool = False,
) -> tuple[UInt[Array, " R"], Float[Array, " R"]]:
    """See `ops.kept_threshold`. The threshold may be smaller than the exact one, if it keeps the same logits."""
    num_rows, vocab = logits.shape
    padded = pl.cdiv(vocab, CHUNK) * CHUNK
    numbers = jnp.stack([temperature, top_k.astype(jnp.float32), top_p], axis=1)
    own = pl.BlockSpec((ROWS, 1), lambda group: (group, 0))
    found, largest = pl.pallas_call(
        kept_threshold_kernel,
        grid=(pl.cdiv(num_rows, ROWS),),
        in_specs=[pl.BlockSpec((ROWS, width), lambda group: (group, 0)) for width in (vocab, numbers.shape[1])],
        out_specs=[own, own],
        out_shape=[jax.ShapeDtypeStruct((num_rows, 1), dtype) for dtype in (jnp.int32, jnp.float32)],
        scratch_shapes=[pltpu.VMEM((ROWS, padded), dtype) for dtype in (jnp.int32, jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=4 * ROWS * padded * 4 + SPARE_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * 3 * 32 * num_rows * vocab, bytes_accessed=logits.nbytes, transcendentals=logits.size
        ),
        interpret=interpret,
    )(logits, numbers)
    return lax.bitcast_convert_type(found[:, 0], jnp.uint32), largest[:, 0]


def kept_threshold_kernel(
    logits: jax.Ref, numbers: jax.Ref, threshold: jax.Ref, largest: jax.Ref, order: jax.Ref, weights: jax.Ref
) -> None:
    """One program: the thresholds of eight rows, and their largest logits.

    Grid: (R / 8,). Blocks: logits [8, V] and three numbers of each row in VMEM, to which the next rows come meanwhile.
    Scratch: the logits as int32 in the same order, and their weights, [8, V] and padding, the smallest, that weighs 0.
    Rows past R hold anything: a search ends after 32 bits.
    """
    vocab, (temperature, top_k, top_p) = logits.shape[1], (numbers[:, i : i + 1] for i in range(3))
    order[:, -CHUNK:] = jnp.full((ROWS, CHUNK), SIGN, jnp.int32)
    weights[:, -CHUNK:] = jnp.zeros((ROWS, CHUNK))

    def rank(at: pl.Slice, largest: Float[Array, "R 1"]) -> Float[Array, "R 1"]:
        bits = lax.bitcast_convert_type(logits[:, at], jnp.int32)
        order[:, at] = bits ^ ((bits >> 31) & ~SIGN)
        part = jnp.where(logits[:, at] < jnp.inf, logits[:, at], jnp.inf)
        return jnp.maximum(largest, jnp.max(part, axis=1, keepdims=True))

    def weigh(at: pl.Slice, _: None) -> None:
        weights[:, at] = weight_of(logits[:, at])

    def weight_of(logits: Float[Array, "R n"]) -> Float[Array, "R n"]:
        weight = jnp.exp((logits - largest[...]) / temperature)
        return jnp.where(weight > 0, weight, 0.0)  # 0 for NaN

    largest[...] = over_chunks(vocab, rank, jnp.full((ROWS, 1), -jnp.inf))
    over_chunks(vocab, weigh, None)
    count = functools.partial(_total, order, lambda _: jnp.ones((ROWS, CHUNK)))
    one = jnp.ones((ROWS, 1))
    least = _search(count, vocab * one, top_k, top_k < vocab, lambda _: one)

    def keep(at: pl.Slice) -> Float[Array, "R lanes"]:
        weights[:, at] = jnp.where(order[:, at] >= least ^ SIGN, weights[:, at], 0.0)
        return weights[:, at]

    mass = _total(order, keep, least)
    above = functools.partial(_total, order, lambda at: weights[:, at])
    nucleus = _search(above, mass, top_p * mass, top_p < 1, lambda low: weight_of(_float_of(low)))
    threshold[...] = jnp.maximum(least ^ SIGN, nucleus ^ SIGN) ^ SIGN


def over_chunks[State](vocab: int, step: Callable[[pl.Slice, State], State], state: State) -> State:
    """The state after the steps of all parts of a row, which are chunks and a shorter one."""
    whole = vocab // CHUNK
    if whole:
        parts = functools.partial(pl.ds, size=CHUNK)
        state = lax.fori_loop(0, whole, lambda i, state: step(parts(pl.multiple_of(i * CHUNK, CHUNK)), state), state)
    return step(pl.ds(whole * CHUNK, vocab % CHUNK), state) if vocab % CHUNK else state


def _search(
    total: Callable[[Array], Array],
    most: Float[Array, "R 1"],
    needed: Float[Array, "R 1"],
    is_wanted: Bool[Array, "R 1"],
    least_weight: Callable[[Array], Array],
) -> Int[Array, "R 1"]:
    """The bits of a threshold whose total is enough; 0 where no search is wanted.

    The total of all logits is `most`, and the smallest logit from a threshold up has at least its `least_weight`. The
    search ends as soon as no row could leave out its smallest logit, because all thresholds left keep the same logits.
    """

    def goes_on(state: tuple[Array, Array, Array]) -> Bool[Array, ""]:
        bit, low, sum_low = state
        can_drop = is_wanted & (sum_low - least_weight(low) >= needed)
        return (bit != 0) & (jnp.max(can_drop.astype(jnp.int32)) > 0)

    def one_bit(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, low, sum_low = state
        middle = low | bit
        sums = total(middle)
        is_enough = sums >= needed
        low, sum_low = jnp.where(is_enough, middle, low), jnp.where(is_enough, sums, sum_low)
        return lax.shift_right_logical(bit, 1), low, sum_low

    start = jnp.int32(SIGN), jnp.zeros((ROWS, 1), jnp.int32), most
    return jnp.where(is_wanted, lax.while_loop(goes_on, one_bit, start)[1], 0)


def _total(order: jax.Ref, value: Callable[[pl.Slice], Array], threshold: Int[Array, "R 1"]) -> Float[Array, "R 1"]:
    """The sum of the values of all logits from a threshold up.

    Each is added in an order that depends on its place only, so a higher threshold never has a larger total.
    """
    pivot = jnp.broadcast_to(threshold ^ SIGN, (ROWS, LANES))

    def one_chunk(chunk: Int[Array, ""], sums: tuple[Array, ...]) -> tuple[Array, ...]:
        at = pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)
        orders, values = order[:, at], value(at)
        for lane in range(0, CHUNK, LANES):
            own = slice(lane, lane + LANES)
            sums = (*sums[1:], sums[0] + jnp.where(orders[:, own] >= pivot, values[:, own], 0.0))
        return sums

    sums = lax.fori_loop(0, order.shape[1] // CHUNK, one_chunk, (jnp.zeros((ROWS, LANES)),) * SUMS)
    return jnp.sum(sum(sums[1:], sums[0]), axis=1, keepdims=True)


def _float_of(order: Int[Array, "R 1"]) -> Float[Array, "R 1"]:
    """The number from which `reference_threshold.sortable` makes these bits."""
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ SIGN, ~order), jnp.float32)
