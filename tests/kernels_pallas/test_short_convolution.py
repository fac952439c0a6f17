"""The causal convolution over pieces against its definition. `test_gated_delta.py` has it within linear attention."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import Pieces
from tests.kernels_pallas.definition import QUICKLY
from tests.kernels_pallas.delta_cases import CASES, SLOTS, Case, convolution, make

convolve = jax.jit(ops.short_convolution, static_argnames="has_one_token", compiler_options=QUICKLY)
OF_OTHER_PIECES = [case for case in CASES if case.has_delta and not (case.is_apart and case.dtype == "float32")]
"""The others have the same pieces and types, and differ in what comes behind the convolution."""


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("case", OF_OTHER_PIECES, ids=lambda case: case.name)
def test_it_is_its_definition(case: Case, taps: int):
    """Slots that nobody may read hold NaN, and no slot but the targets changes."""
    arrays = make(case)
    joint, weights, inputs = (np.asarray(a) for a in (arrays.joint, arrays.weights.taps, arrays.cache.inputs))
    x, weights, inputs = (a.reshape(*a.shape[:-2], -1) for a in (joint, weights[:taps], inputs[:, :taps]))
    x = x[:, : inputs.shape[-1]]
    meant = convolution(*(np.asarray(a, np.float64) for a in (x, weights, inputs)), arrays.pieces)
    forms = [False, True] if len(x) == len(arrays.pieces.lens) else [False]
    for has_one_token in forms:
        out, left = convolve(x, weights, inputs, arrays.pieces, has_one_token=has_one_token)
        assert (out.dtype, left.dtype) == (jnp.float32, case.dtype)
        np.testing.assert_allclose(out, meant[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(left, np.float32)[1:], meant[1][1:].astype(np.float32))
        untouched = [slot for slot in range(1, SLOTS) if slot not in [run.target for run in case.runs if run.length]]
        np.testing.assert_array_equal(*(np.asarray(a, np.float32)[untouched] for a in (left, inputs)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_has_the_same_bits_however_it_is_cut(dtype: str):
    """In one shape, also if what is convolved is a product, which XLA would not round where it is not kept."""
    rng, length = np.random.default_rng(0), 24
    x, gate, taps, inputs = (
        rng.standard_normal(shape).astype(jnp.dtype(dtype))
        for shape in ((length, 32), (length, 32), (3, 32), (SLOTS, 3, 32))
    )

    @jax.jit
    def step(x: jax.Array, gate: jax.Array, inputs: jax.Array, pieces: Pieces) -> tuple[jax.Array, jax.Array]:
        return ops.short_convolution(x * gate, jnp.asarray(taps), inputs, pieces)

    def run(cuts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        done, left, outs = 0, inputs, []
        for cut in cuts:
            pieces = Pieces(*(np.array([n], np.int32) for n in (0, cut, 1, 1, done, 0)))
            out, left = step(*(np.roll(a, -done, axis=0) for a in (x, gate)), left, pieces)
            outs.append(np.asarray(out)[:cut])
            done += cut
        return np.concatenate(outs), np.asarray(left)[1]

    meant = run((length,))
    for cuts in ((1,) * length, (2, 5, 1, 16)):
        for found, expected in zip(run(cuts), meant, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_a_cpu_copies_no_slots(num_tokens: int):
    """Not even where results go into a product, which XLA would compute after it changed the slots."""
    rows, width = min(num_tokens, 4), 64
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    slots, pieces = array((999, 3, width)), Pieces(*[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 6)

    def layers(x: jax.Array, kernel: jax.Array, taps: jax.Array, all_slots: list[jax.Array], pieces: Pieces) -> Any:
        left = []
        for inputs in all_slots:
            made, last = ops.short_convolution(x @ kernel, taps, inputs, pieces, has_one_token=num_tokens == rows)
            x += made @ kernel
            left.append(last)
        return x, left

    given = (array((num_tokens, width)), array((width, width)), array((3, width)), [slots] * 2, pieces)
    compiled = jax.jit(layers, donate_argnums=3).lower(*given).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < slots.size
