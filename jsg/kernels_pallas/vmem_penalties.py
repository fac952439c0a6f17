"""Penalties and biases of logits, as a Pallas kernel for TPUs. Letters: `jsg/models/inputs.py`.

XLA would first copy whole rows of the tables several times. Here each of them comes from HBM once, and those of rows
without penalties do not. It ran in interpret mode and was compiled; no TPU has run it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.reference_penalties import Penalties, changed_by
from jsg.kernels_pallas.vmem_threshold import CHUNK, ROWS, SPARE_BYTES, over_chunks


def penalised(
    logits: Float[Array, "R V"],
    counts: Int[Array, "rows V"],
    bias: Float[Array, "rows V"],
    penalties: Penalties,
    *,
    interpret: bool = False,
) -> Float[Array, "R V"]:
    """See `ops.penalised`."""
    (num_rows, vocab), groups = logits.shape, pl.cdiv(len(logits), ROWS)
    rows = jnp.where(penalties.is_used, penalties.rows, -1)
    rows = jnp.pad(rows, (0, groups * ROWS - num_rows), constant_values=-1)
    numbers = jnp.stack([*penalties[2:], penalties.is_used.astype(jnp.float32)], axis=1)
    own, whole = (pl.BlockSpec((ROWS, width), lambda group, _: (group, 0)) for width in (numbers.shape[1], vocab))
    table = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        penalised_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups,),
            in_specs=[own, whole, table, table],
            out_specs=whole,
            scratch_shapes=[*(pltpu.VMEM((ROWS, vocab), x.dtype) for x in (counts, bias)), pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=6 * 4 * ROWS * (vocab + CHUNK) + SPARE_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=10 * logits.size, bytes_accessed=4 * logits.nbytes, transcendentals=logits.size
        ),
        interpret=interpret,
    )(rows, numbers, logits, counts, bias)


def penalised_kernel(
    rows: jax.Ref,
    numbers: jax.Ref,
    logits: jax.Ref,
    all_counts: jax.Ref,
    all_bias: jax.Ref,
    out: jax.Ref,
    counts: jax.Ref,
    bias: jax.Ref,
    arrived: jax.Ref,
) -> None:
    """One program: eight rows of logits.

    Grid: (R / 8,). In scalar memory: `rows`, -1 for a row without penalties. Blocks: `numbers`, logits and the result
    in VMEM. The tables stay in HBM, from where the rows that are used are copied to VMEM, each to its place.
    """
    tables = (all_counts, counts), (all_bias, bias)
    for does_wait in (False, True):
        for place in range(ROWS):
            _copy(rows[pl.program_id(0) * ROWS + place], place, tables, arrived, does_wait=does_wait)
    *penalties, is_used = (numbers[:, i : i + 1] for i in range(numbers.shape[1]))

    def change(at: pl.Slice, _: None) -> None:
        own = slice(None), at
        out[own] = jnp.where(is_used > 0, changed_by(logits[own], counts[own], bias[own], *penalties), logits[own])

    over_chunks(logits.shape[1], change, None)


def _copy(
    row: Int[Array, ""], place: int, tables: Sequence[tuple[jax.Ref, jax.Ref]], arrived: jax.Ref, *, does_wait: bool
) -> None:
    """Starts to copy a row of each table to its place, or waits until it is there; nothing for row -1."""

    @pl.when(row >= 0)
    def _() -> None:
        for table, own in tables:
            copy = pltpu.make_async_copy(table.at[pl.ds(row, 1)], own.at[pl.ds(place, 1)], arrived)
            copy.wait() if does_wait else copy.start()
