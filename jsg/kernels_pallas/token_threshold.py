"""Top-k and top-p over a vocabulary without a sort, as Pallas-Triton kernels. Letters: `jsg/models/inputs.py`.

Both need the largest threshold that leaves enough above it: enough logits, or enough probability. A search keeps a
bracket around it, in the order-preserving integers of `reference_threshold.sortable`:

    0 ........ low ................ high ........ 2^32      total(low) >= needed > total(high)
                |  pivot  pivot ...  |

One pass over the row computes the totals above each of `PIVOTS` pivots in the bracket. The next bracket is the part
between the two pivots around the threshold. The first pivots are whole temperatures below the largest logit, and later
ones are evenly spaced, so the bracket is a single integer after at most `MAX_PASSES`. A search ends earlier if it must
not leave out the smallest logit that is kept, because then every threshold in the bracket keeps the same logits.

A row is one program, because each pass needs the result of the pass before it.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int, UInt

from jsg.kernels_pallas.reference_threshold import sortable
from jsg.kernels_pallas.tuning import sizes_for

PIVOTS = 15
MAX_PASSES = 9
"""One pass with the first pivots, and eight that each divide the bracket by 16."""
ABOVE_INFINITY = 0xFF800001
"""The integer after that of infinity."""
VECTOR = 4
"""The number of logits that a thread reads as 16 bytes and adds up by itself."""


class Sizes(NamedTuple):
    """How a row is cut. `tuning` has the sizes by rows.

    Attributes:
        block: Logits that a program reads at a time; less than 2^16.
        num_warps: Warps per program.
    """

    block: int
    num_warps: int


class _Row(NamedTuple):
    """One row of logits in device memory, and the numbers that turn a logit into a weight.

    Attributes:
        logits: The row, [V].
        largest: The largest logit.
        temperature: Weights are exp((logit - largest) / temperature).
        block: Logits that are read at a time.
    """

    logits: jax.Ref
    largest: Float[Array, ""]
    temperature: Float[Array, ""]
    block: int

    def weights(self, logits: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        """The weights of these logits: 1 for the largest, 0 for NaN."""
        weights = jnp.exp((logits - self.largest) / self.temperature)
        return jnp.where(weights > 0, weights, 0.0)


class _Bracket(NamedTuple):
    """The bounds of a threshold. The total of all from `low` up is enough, and that of all from `high` up is not."""

    low: UInt[Array, ""]
    high: UInt[Array, ""]
    total_low: Float[Array, ""]
    total_high: Float[Array, ""]


def kept_threshold(
    logits: Float[Array, "R V"],
    largest: Float[Array, " R"],
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    *,
    interpret: bool = False,
) -> UInt[Array, " R"]:
    """See `ops.kept_threshold`. The threshold may be smaller than the exact one, if it keeps the same logits."""
    num_rows, vocab = logits.shape
    sizes = Sizes(**sizes_for("token_threshold", rows=num_rows))
    scalar = pl.BlockSpec((None,), lambda row: (row,))
    return pl.pallas_call(
        functools.partial(kept_threshold_kernel, sizes.block),
        grid=(num_rows,),
        in_specs=[_row_of(vocab), *(scalar,) * 4],
        out_specs=scalar,
        out_shape=jax.ShapeDtypeStruct((num_rows,), jnp.uint32),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=1),
        interpret=interpret,
    )(logits, largest, temperature, top_k, top_p)


def kept_threshold_kernel(
    block: int,
    logits: jax.Ref,
    largest: jax.Ref,
    temperature: jax.Ref,
    top_k: jax.Ref,
    top_p: jax.Ref,
    threshold: jax.Ref,
) -> None:
    """One program: the threshold of one row.

    Grid: (R,). Blocks: a row of logits [V] stays in device memory and is read once per pass; the rest are scalars.
    Masked: logits past V count as NaN.
    """
    row = _Row(logits, largest[...], temperature[...], block)
    vocab = logits.shape[0]
    needed = top_k[...].astype(jnp.float32)
    least = _search(row, _widest(jnp.float32(vocab)), needed, needed < vocab, is_mass=False).low
    is_cut = top_p[...] < 1
    [mass] = _totals(row, [least], is_cut, is_mass=True)
    nucleus = _widest(mass)._replace(low=least)
    threshold[...] = _search(row, nucleus, top_p[...] * mass, is_cut, is_mass=True).low


def top_logits(
    logits: Float[Array, "R V"], count: int, *, interpret: bool = False
) -> tuple[Float[Array, "R top"], Int[Array, "R top"]]:
    """See `ops.top_logits`. A kernel picks the logits, and a sort of only `count` numbers puts them into order."""
    num_rows, vocab = logits.shape
    sizes = Sizes(**sizes_for("token_threshold", rows=num_rows))
    values, ids = pl.pallas_call(
        functools.partial(top_logits_kernel, sizes.block, count),
        grid=(num_rows,),
        in_specs=[_row_of(vocab), pl.BlockSpec((None,), lambda row: (row,))],
        out_specs=[_row_of(count)] * 2,
        out_shape=[jax.ShapeDtypeStruct((num_rows, count), dtype) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=1),
        interpret=interpret,
    )(logits, jnp.max(logits, axis=-1))
    values, places = lax.top_k(values, count)
    return values, jnp.take_along_axis(ids, places, axis=-1)


def top_logits_kernel(
    block_len: int, count: int, logits: jax.Ref, largest: jax.Ref, values: jax.Ref, ids: jax.Ref
) -> None:
    """One program: the `count` largest logits of one row and their ids.

    Grid: (R,). Blocks: a row of logits [V] stays in device memory, read once per pass; values and ids are [count].
    Order: the logits above the bracket of the threshold, then those in it, each by id. Equal logits are in the same of
    the two, so a stable sort afterwards leaves them ordered by id. Masked: logits past V.
    """
    vocab = logits.shape[0]
    row = _Row(logits, largest[...], jnp.float32(1), block_len)
    widest = _widest(jnp.float32(vocab))
    bracket = _search(row, widest, jnp.float32(count), jnp.bool(count < vocab), is_mass=False)
    num_above = bracket.total_high.astype(jnp.int32)

    def one_block(block: Int[Array, ""], found: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens = block * block_len + jnp.arange(block_len)
        part = plgpu.load(logits.at[tokens], mask=tokens < vocab, other=0)
        order = _ordered(part)
        is_above = (tokens < vocab) & (order >= bracket.high)
        is_inside = (tokens < vocab) & (order >= bracket.low) & ~is_above
        both = is_above.astype(jnp.int32) + (is_inside.astype(jnp.int32) << 16)  # a block is smaller than 2^16
        counts = jnp.sum(both)

        @pl.when(counts > 0)
        def _() -> None:
            counted = jnp.cumsum(both)
            place_inside = num_above + found[1] + (counted >> 16)
            places = jnp.where(is_above, found[0] + (counted & 0xFFFF), place_inside)
            is_picked = (is_above | is_inside) & (places <= count)
            places = jnp.where(
                is_picked, places - 1, count
            )  # in interpret mode a place must not stand there twice, even masked
            plgpu.store(values.at[places], part, mask=is_picked)
            plgpu.store(ids.at[places], tokens, mask=is_picked)

        return found[0] + (counts & 0xFFFF), found[1] + (counts >> 16)

    lax.fori_loop(0, pl.cdiv(vocab, block_len), one_block, (jnp.int32(0), jnp.int32(0)))


def _search(
    row: _Row, widest: _Bracket, needed: Float[Array, ""], is_wanted: Bool[Array, ""], *, is_mass: bool
) -> _Bracket:
    """The bracket within which every threshold keeps the same logits; the widest if no search is wanted.

    A bracket is correct whatever the pivots are, so `largest` is only a hint. `MAX_PASSES` bounds the passes for NaN.
    """

    def goes_on(state: tuple[Array, _Bracket]) -> Bool[Array, ""]:
        passes, bracket = state
        least = row.weights(_float_of(bracket.low)) if is_mass else 1.0
        can_drop = bracket.total_low - least >= needed
        return is_wanted & (passes < MAX_PASSES) & (bracket.high - bracket.low > 1) & can_drop

    def one_pass(state: tuple[Array, _Bracket]) -> tuple[Array, _Bracket]:
        passes, bracket = state
        step = (bracket.high - bracket.low + jnp.uint32(PIVOTS)) // jnp.uint32(PIVOTS + 1)
        evenly = [bracket.low + jnp.uint32(i) * step for i in range(1, PIVOTS + 1)]
        pivots = [
            jnp.clip(jnp.where(passes == 0, pivots[0], pivots[1]), bracket.low, bracket.high)
            for pivots in zip(_first_pivots(row), evenly, strict=True)
        ]
        return passes + 1, _narrowed(bracket, pivots, _totals(row, pivots, is_wanted, is_mass=is_mass), needed)

    return lax.while_loop(goes_on, one_pass, (jnp.int32(0), widest))[1]


def _widest(total: Float[Array, ""]) -> _Bracket:
    """The bracket of all numbers. It has NaN as 0: see `_ordered`."""
    return _Bracket(jnp.uint32(0), jnp.uint32(ABOVE_INFINITY), total, jnp.float32(0))


def _first_pivots(row: _Row) -> list[UInt[Array, ""]]:
    """In ascending order: whole temperatures below the largest logit, the largest logit, and the next integer."""
    below = [sortable(row.largest - steps * row.temperature) for steps in reversed(range(PIVOTS - 1))]
    return [*below, sortable(row.largest) + jnp.uint32(1)]


def _narrowed(
    bracket: _Bracket, pivots: Sequence[Array], totals: Sequence[Array], needed: Float[Array, ""]
) -> _Bracket:
    """The part of the bracket between the last pivot whose total is enough, and the next one."""
    low, high, total_low, total_high = bracket
    for pivot, total in zip(pivots, totals, strict=True):  # ascending
        is_enough = total >= needed
        low, total_low = jnp.where(is_enough, pivot, low), jnp.where(is_enough, total, total_low)
    for pivot, total in zip(reversed(pivots), reversed(totals), strict=True):
        is_enough = total >= needed
        high, total_high = jnp.where(is_enough, high, pivot), jnp.where(is_enough, total_high, total)
    return _Bracket(low, high, total_low, total_high)


def _totals(row: _Row, pivots: Sequence[Array], is_wanted: Bool[Array, ""], *, is_mass: bool) -> list[Float[Array, ""]]:
    """The weights, or else the number, of the logits from each pivot up, in one pass. Zeros if it is not wanted.

    Sums are float32, in an order that depends only on the place in the row, so a higher pivot never has a larger total.
    """
    vocab = row.logits.shape[0]
    threads = jnp.arange(row.block // VECTOR)
    offsets = threads[:, None] * VECTOR + jnp.arange(VECTOR)[None]

    def one_block(block: Int[Array, ""], totals: tuple[Array, ...]) -> tuple[Array, ...]:
        tokens = block * row.block + offsets
        logits = plgpu.load(row.logits.at[tokens], mask=tokens < vocab, other=jnp.nan)
        order = _ordered(logits)
        weights = row.weights(logits) if is_mass else jnp.ones_like(logits)
        return tuple(
            total + jnp.sum(jnp.where(order >= pivot, weights, 0.0), axis=1)
            for pivot, total in zip(pivots, totals, strict=True)
        )

    num_blocks = jnp.where(is_wanted, jnp.int32(pl.cdiv(vocab, row.block)), jnp.int32(0))
    totals = lax.fori_loop(jnp.int32(0), num_blocks, one_block, (jnp.zeros(row.block // VECTOR),) * len(pivots))
    return [jnp.sum(total) for total in totals]


def _ordered(logits: Float[Array, "*dims"]) -> UInt[Array, "*dims"]:
    """`sortable`, but with NaN as the smallest, so that nothing is above a bracket that ends at infinity."""
    return jnp.where(logits == logits, sortable(logits), jnp.uint32(0))


def _float_of(order: UInt[Array, ""]) -> Float[Array, ""]:
    """The number from which `sortable` makes this integer."""
    is_positive = order >> 31 == 1
    return lax.bitcast_convert_type(jnp.where(is_positive, order ^ jnp.uint32(1 << 31), ~order), jnp.float32)


def _row_of(length: int) -> pl.BlockSpec:
    """The program's row of an array [R, length]."""
    return pl.BlockSpec((None, length), lambda row: (row, 0))
