"""A kernel for attention in interpret mode, and what its result must equal.

Most of the time of these tests is compilation, about a second for each program. So batches of one model are padded to
arrays of one shape, and share a program.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import attention_cases as cases
from jsg.kernels_pallas.attention_block import Attended

TOLERANCES = {"float32": 3e-6, "bfloat16": 2e-2}
QUICKLY = {"xla_backend_optimization_level": "0"}
"""Options for programs whose speed does not matter: they are compiled in two thirds of the time."""

NUM_TOKENS, NUM_ROWS, NUM_SINGLES, NUM_TILES, NUM_GROUPS = 208, 24, 24, 24, 4
POOL_LEN, ROW_LEN = 704, 384  # tokens


def named(name: str) -> cases.Case:
    return next(case for case in cases.CASES if case.name == name)


def with_room(arrays: cases.Arrays) -> cases.Arrays:
    """The same batch in arrays whose shapes are those of every batch of this model; what is added is padding."""
    page_size, inputs = arrays.keys.shape[1], arrays.inputs
    num_pages = POOL_LEN // page_size
    tiles = {name: _filled(array, NUM_TILES) for name, array in inputs._asdict().items() if name.startswith("tile_")}
    groups = inputs.groups
    if groups is not None:
        groups = groups._replace(
            shared_lens=_filled(groups.shared_lens, NUM_SINGLES),
            rows=_filled(groups.rows, NUM_GROUPS),
            lens=_filled(groups.lens, NUM_GROUPS),
            members=_filled(groups.members, NUM_GROUPS, value=-1),
        )
    inputs = inputs._replace(
        page_table=_filled(inputs.page_table, NUM_ROWS, ROW_LEN // page_size),
        single_rows=_filled(inputs.single_rows, NUM_SINGLES),
        single_kv_lens=_filled(inputs.single_kv_lens, NUM_SINGLES),
        num_short_tiles=jnp.int32(inputs.num_short_tiles),
        groups=groups,
        **tiles,
    )
    keys, values = (np.asarray(_filled(pool, num_pages)) for pool in (arrays.keys, arrays.values))
    queries = np.asarray(_filled(arrays.queries, NUM_TOKENS))
    return dataclasses.replace(arrays, queries=queries, keys=keys.copy(), values=values.copy(), inputs=inputs)


def _filled(array: Any, *lengths: int, value: int = 0) -> jax.Array:
    widths = [(0, length - old) for length, old in zip(lengths, array.shape, strict=False)]
    widths += [(0, 0)] * (array.ndim - len(lengths))
    return jax.device_put(np.pad(np.asarray(array), widths, constant_values=value))


@functools.cache
def _compiled(kernel: Callable[..., Attended], **static: Any) -> Callable[..., Attended]:
    return jax.jit(functools.partial(kernel, **static, interpret=True), compiler_options=QUICKLY)


def attend(kernel: Callable[..., Attended], case: cases.Case, arrays: cases.Arrays, sizes: Any) -> Attended:
    """What the kernel makes of arrays; programs are kept for what has the same shapes."""
    static = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap, "sizes": sizes}
    run = _compiled(kernel, **static)
    sinks = {} if arrays.sinks is None else {"sinks": arrays.sinks}
    return jax.tree.map(np.asarray, run(arrays.queries, arrays.keys, arrays.values, arrays.inputs, **sinks))


def check(
    kernel: Callable[..., Attended],
    case: cases.Case,
    sizes: Any,
    dtype: str = "float32",
    pool_dtype: str | None = None,
    *,
    singles: bool = True,
    has_room: bool = True,
) -> None:
    """Attention by the kernel is that by definition.

    Args:
        kernel: The kernel.
        case: The batch.
        sizes: How the kernel cuts the work.
        dtype: Of the queries.
        pool_dtype: Of keys and values; None for that of the queries.
        singles: See `attention_cases.make`.
        has_room: False for arrays that are as small as the batch allows.
    """
    arrays = cases.make(case, dtype=dtype, pool_dtype=pool_dtype, singles=singles)
    check_arrays(kernel, case, with_room(arrays) if has_room else arrays, sizes, dtype)


def check_arrays(
    kernel: Callable[..., Attended], case: cases.Case, arrays: cases.Arrays, sizes: Any, dtype: str = "float32"
) -> None:
    """Does the same as `check` for a batch that is already made."""
    found = attend(kernel, case, arrays, sizes)
    assert found.out.dtype == jnp.dtype(dtype)
    num_real = len(arrays.expected)
    np.testing.assert_allclose(found.out[:num_real].astype(np.float32), arrays.expected, atol=TOLERANCES[dtype])
    np.testing.assert_allclose(found.lse[:num_real], arrays.expected_lse, atol=TOLERANCES[dtype])
    assert len(found.out) == len(arrays.queries) >= num_real + case.padding
    assert not found.out[num_real:].any(), "padding tokens have zeros"
    assert case.has_sinks or (found.lse[num_real:] == -np.inf).all()


def with_garbage(arrays: cases.Arrays, *, key: float, value: float) -> cases.Arrays:
    """Entries of the page table that are not used name a page, which belongs to no row and holds this."""
    table = np.array(arrays.inputs.page_table)
    stale = min(set(range(1, len(arrays.keys))) - set(table.flat))
    table[1:] = np.where(table[1:] == 0, stale, table[1:])
    keys, values = arrays.keys.copy(), arrays.values.copy()
    keys[stale], values[stale] = key, value
    inputs = arrays.inputs._replace(page_table=jnp.asarray(table))
    return dataclasses.replace(arrays, keys=keys, values=values, inputs=inputs)
