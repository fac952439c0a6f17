"""Products with kernels in panels against numpy in float64. A result depends on nothing but its row and its column."""

import concurrent.futures
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.engine.device.panels import lay_out
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import Form
from jsg.kernels_pallas.inputs import PANEL_WIDTH, Panels
from jsg.kernels_pallas.native import amx, amx_matmul, library
from jsg.models.layers import Linear

SHAPES = ((1, 2, 1), (3, 6, 2), (4, 48, 7), (8, 34, 13), (17, 64, 25), (50, 20, 3), (64, 100, 12))
"""(rows, depth, panels): every register tile, whole and in part; items that are whole and in part."""
GROUPED_SHAPES = ((1, 128, 1), (3, 256, 2), (4, 384, 7), (8, 128, 13), (17, 256, 25), (50, 128, 3), (64, 128, 12))
"""Likewise for kernels in few bits, whose inputs are whole groups."""
FORMS = {
    "int8": Form("int8"),
    "fp8": Form("e4m3"),
    "int4": Form("int4", 32, "bfloat16", is_exact=True),
    "W4A16": Form("int4", 128, "bfloat16"),
    "W4A16 of channels": Form("int4", None, "bfloat16"),
    "AWQ": Form("int4", 64, "float16", has_zero=True),
    "GPTQ": Form("int4", 128, "float16", has_zero=True, has_order=True),
    "W8A16": Form("int8", 128, "bfloat16", has_zero=True),
    "Q8_0": Form("int8", 32, "float16"),
    "FP8 in blocks": Form("e4m3", 128),
    "NVFP4": Form("e2m1", 16, "float8_e4m3fn", has_factor=True),
    "MXFP4": Form("e2m1", 32, "float8_e8m0fnu"),
    "Q4_K": Form("uint4", 32, "int8", has_zero=True, has_factor=True, has_step=True, block=64),
    "Q5_K": Form("int8", 32, "int8", has_zero=True, has_factor=True, has_step=True, block=64),
    "Q6_K": Form("int8", 16, "int8", has_factor=True, block=64),
}
"""jsg's own, then published ones."""
BFLOAT16_SHAPES = (
    (1, 128, 1),
    (2, 256, 7),
    (3, 128, 13),
    (16, 384, 5),
    (17, 256, 25),
    (31, 128, 2),
    (40, 128, 6),
    (70, 16384, 3),
)
"""Likewise for rows in bfloat16: row tiles of 16 that are whole, in part, and alone or in pairs; rows that are too long
to be kept all together."""
multiply = jax.jit(ops.matmul)


def kernel(kind: str, depth: int, panels: int) -> tuple[Panels, np.ndarray]:
    """A kernel in panels, and what it means in float64. It is made by NumPy: JAX would compile that for each shape."""
    rng, columns, layer = np.random.default_rng(depth), panels * PANEL_WIDTH, Linear(("it",), 1, (16,), jnp.float32)
    if kind in FORMS:
        stored, meant = quantised(FORMS[kind], rng, depth, columns)
    else:
        stored = rng.standard_normal((depth, columns)).astype(jnp.dtype(kind))
        meant = stored.astype(np.float64)
    layer.kernel.set_value(stored)
    lay_out(layer)
    return layer.kernel.get_value(), meant


E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12]) / 2


def quantised(form: Form, rng: np.random.Generator, depth: int, columns: int) -> tuple[Quantised, np.ndarray]:
    """Any numbers of the form, and what they mean, by its definition."""
    group = form.group or depth
    stored = numbers = rng.integers(-128, 128, (depth, columns)).astype(np.int8)
    if form.numbers == "e4m3":
        numbers = np.concatenate([rng.standard_normal((depth - 4, columns)), rng.standard_normal((4, columns)) / 256])
        stored = numbers = numbers.astype(jnp.float8_e4m3fn)  # some are subnormal
    if form.numbers in ("int4", "uint4", "e2m1"):
        codes = rng.integers(0, 16, (depth, columns))
        signed = np.where(codes < 8, 1, -1) * E2M1[codes % 8]
        numbers = signed if form.numbers == "e2m1" else codes - 8 * (form.numbers == "int4")
        stored = (codes[::2] | codes[1::2] << 4).astype(np.uint8)
    scale = (
        rng.integers(1, 32, (depth // group, columns)) / 64 if form.is_exact else rng.random((depth // group, columns))
    )
    scale = 2.0 ** rng.integers(-9, 3, scale.shape) if "e8m0" in form.scale else scale
    scale = (scale * 63 if form.scale == "int8" else scale).astype(jnp.dtype(form.scale))
    zero = rng.integers(-8, 9, scale.shape).astype(np.int8) if form.has_zero else None
    of_blocks = rng.random((2, depth // (form.block or depth), columns)).astype(np.float32) + 0.5
    factor, step = (
        each if has else None for each, has in zip(of_blocks, (form.has_factor, form.has_step), strict=True)
    )
    order = rng.permutation(depth).astype(np.int32) if form.has_order else None
    wide = [each if each is None else each.astype(np.float64) for each in (zero, scale, factor, step)]
    zeros, scales, factors, steps = (each if each is None else each.repeat(depth // len(each), 0) for each in wide)
    meant = numbers.astype(np.float64) - (0 if zeros is None or steps is not None else zeros)
    meant = meant * scales * (1 if factors is None else factors) - (0 if steps is None else zeros * steps)
    parts = (None if each is None else jax.device_put(each) for each in (zero, factor, order, step))
    made = Quantised(jax.device_put(stored), jax.device_put(scale), form, *parts)
    return made, meant if order is None else meant[np.argsort(order)]


def test_what_is_restored_is_what_the_form_says():
    kernels = {name: quantised(form, np.random.default_rng(0), 256, 3) for name, form in FORMS.items()}
    restore = jax.jit(
        lambda made: {name: [each.restored(dtype) for dtype in ("float32", "bfloat16")] for name, each in made.items()}
    )
    for name, (found, short) in restore({name: made for name, (made, _) in kernels.items()}).items():
        np.testing.assert_allclose(found, kernels[name][1], rtol=3e-7, err_msg=name)
        np.testing.assert_array_equal(short, np.asarray(found).astype(jnp.bfloat16), name)


def rows(count: int, depth: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, depth)).astype(np.float32).astype(jnp.dtype(dtype))


def products(factors: list[tuple[np.ndarray, Panels]], *dtype: jnp.dtype) -> list[np.ndarray]:
    """All of them in one program: to compile one costs as much as to compile one with a single product."""
    run = jax.jit(lambda factors: [ops.matmul(x, kernel, *dtype) for x, kernel in factors])
    return [np.asarray(product) for product in run(factors)]


FAST = ("float32", "bfloat16", "int8", "int4", "AWQ", "NVFP4", "Q4_K")
FAST_IN_OTHERS = ("float32", "bfloat16", "int4", "Q4_K")
"""With a second kind of register tiles, which are the same for what restores a kernel."""


def mark_of(kind: str, *, is_first: bool) -> list[pytest.MarkDecorator]:
    return [] if kind in (FAST if is_first else FAST_IN_OTHERS) else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("is_long", "kind"),
    [
        pytest.param(is_long, kind, id=f"{name}-{kind}", marks=mark_of(kind, is_first=is_long))
        for is_long, name in ((True, "long registers"), (False, "short registers"))
        for kind in ("float32", "bfloat16", *FORMS)
    ],
)
def test_it_is_what_numpy_says(kind: str, is_long: bool, monkeypatch: pytest.MonkeyPatch):
    """With the register tiles of both kinds of processors; a processor computes what it has no registers for slowly."""
    monkeypatch.setattr(library, "has_long_registers", lambda: is_long)
    shapes = GROUPED_SHAPES if kind in FORMS else SHAPES
    kernels = [kernel(kind, depth, panels) for _, depth, panels in shapes]
    inputs = [rows(count, depth) for count, depth, _ in shapes]
    found = products([(x, stored) for x, (stored, _) in zip(inputs, kernels, strict=True)])
    for shape, x, (_, meant), product in zip(shapes, inputs, kernels, found, strict=True):
        assert_near(product, x, meant, shape)


def assert_near(found: np.ndarray, x: np.ndarray, meant: np.ndarray, shape: tuple[int, int, int]) -> None:
    """Every product is rounded once, so an error is at most that of as many roundings of the largest partial sum."""
    exact = x.astype(np.float64)
    bound = 1e-7 * len(meant) * (np.abs(exact) @ np.abs(meant)) + 1e-30
    assert found.dtype == np.float32
    assert (np.abs(found - exact @ meant) <= bound).all(), shape


@pytest.mark.parametrize(
    ("unit", "kind"),
    [
        pytest.param(unit, kind, marks=mark_of(kind, is_first=unit != "pairs"))
        for unit in ("matrix unit", "other registers", "pairs")
        for kind in ("bfloat16", *FORMS)
    ],
)
def test_rows_in_bfloat16_are_multiplied_as_numpy_says(kind: str, unit: str, monkeypatch: pytest.MonkeyPatch):
    """Every processor can compute what the matrix unit computes, and does it for few rows."""
    if unit == "matrix unit" and not amx.is_available():
        pytest.skip("this processor has no matrix unit, or the system does not let us use it")
    if unit == "pairs" and not library.multiplies_pairs():
        pytest.skip("this processor does not multiply pairs of bfloat16")
    monkeypatch.setattr(amx, "is_available", lambda: unit != "pairs")
    monkeypatch.setattr(amx_matmul, "MAX_FEW", 0 if unit == "matrix unit" else 1000)
    kernels = [kernel(kind, depth, panels) for _, depth, panels in BFLOAT16_SHAPES]
    inputs = [rows(count, depth, "bfloat16") for count, depth, _ in BFLOAT16_SHAPES]
    factors = [(x, stored) for x, (stored, _) in zip(inputs, kernels, strict=True)]
    found = products(factors)
    for shape, x, (_, meant), product in zip(BFLOAT16_SHAPES, inputs, kernels, found, strict=True):
        assert_near(product, x, meant, shape)
    if kind == "bfloat16":  # a kernel's type has nothing to do with a result's
        for short, product in zip(products(factors[-2:], jnp.bfloat16), found[-2:], strict=True):
            np.testing.assert_array_equal(short, product.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        *itertools.product(["int8", "int4", "AWQ", "Q4_K"], ["float32", "bfloat16"]),
    ],
)
def test_a_row_has_the_same_bits_in_every_batch(kind: str, dtype: str):
    stored, _ = kernel(kind, 192, 13)
    x = rows(40, 192, dtype)
    parts = [part for count in (1, 2, 3, 5, 8, 11, 16, 33) for part in (slice(count), slice(-count, None))]
    whole, *found = products([(x, stored), *((x[part], stored) for part in parts)])
    for part, product in zip(parts, found, strict=True):
        np.testing.assert_array_equal(product, whole[part], str(part))


@pytest.mark.parametrize(
    "kind", ["AWQ", "Q4_K", *(pytest.param(x, marks=pytest.mark.slow) for x in ("int8", "int4", "MXFP4"))]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_multiply_their_own_rows(kind: str, dtype: str):
    """Whatever rows the others have, none included: each row has the bits that it has with its kernel alone."""
    several, x, counts, width = kernel(kind, 192, 5 * 14)[0], rows(33, 192, dtype), [3, 0, 20, 1, 9], 14
    alone = [jax.tree.map(lambda part, e=e: part[width * e : width * (e + 1)], several) for e in range(5)]
    parts = np.split(x, np.cumsum(counts)[:-1])
    pairs = [(part, own) for part, own in zip(parts, alone, strict=True) if len(part)]
    found = jax.jit(lambda x, kernel, sizes: ops.matmul(x, kernel, sizes=sizes))(
        x, several, jnp.array(counts, jnp.int32)
    )
    np.testing.assert_array_equal(found, np.concatenate(products(pairs)))


@pytest.mark.parametrize("kind", ["int4", "AWQ"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_4_bits_what_is_not_finite_stays_in_its_row(dtype: str, kind: str):
    stored, _ = kernel(kind, 64, 4)
    x = rows(5, 64, dtype)
    clean = np.asarray(multiply(x, stored))
    x[1, 7], x[3, 2] = np.nan, np.inf
    spoilt = np.asarray(multiply(x, stored))
    np.testing.assert_array_equal(spoilt[::2], clean[::2])
    assert not np.isfinite(spoilt[[1, 3]]).any()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_what_is_not_finite_stays_in_its_row_and_in_its_column(kind: str):
    stored, _ = kernel(kind, 32, 4)
    x = rows(9, 32, kind)
    clean = np.asarray(multiply(x, stored))
    x[4, 7] = np.nan
    x[6, 2] = np.inf
    spoilt = np.asarray(multiply(x, stored))
    others = [0, 1, 2, 3, 5, 7, 8]
    np.testing.assert_array_equal(spoilt[others], clean[others])
    assert np.isnan(spoilt[4]).all() and not np.isfinite(spoilt[6]).any()
    values = np.asarray(stored.values).copy()
    values[2, 9, 5] = np.nan
    column = np.asarray(multiply(rows(9, 32, kind), Panels(jnp.asarray(values))))
    assert np.isnan(column[:, 2 * PANEL_WIDTH + 5]).all()
    assert np.isfinite(np.delete(column, 2 * PANEL_WIDTH + 5, axis=1)).all()


def test_threads_that_call_it_together_do_not_disturb_each_other():
    """The largest products take helpers so long that one that was returned before they end is read too soon."""
    stored, _ = kernel("float32", 512, 49)
    inputs = [factor * rows(count, 512) for factor in range(1, 5) for count in (1, 3, 16, 64)]
    expected = [np.asarray(multiply(x, stored)) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for found, right in zip(
                pool.map(functools.partial(multiply, kernel=stored), inputs), expected, strict=True
            ):
                np.testing.assert_array_equal(np.asarray(found), right)
