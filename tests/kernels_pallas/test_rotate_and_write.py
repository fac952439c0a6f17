"""The fused rotation and write, of a GPU (in interpret mode) and of a CPU, against its jnp reference."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jsg.kernels_pallas import ops, reference_write, rotate_and_write, vmem_rotate
from jsg.kernels_pallas.inputs import HeadNorms, LayerCache
from tests.kernels_pallas.definition import QUICKLY

EPS = 0.5
"""Large enough to be seen."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A step's shape. `pool` and `weight`, of norms, are types, None for that of the activations."""

    name: str
    tokens: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 1
    dtype: str = "float32"
    pool: str | None = None
    norms: bool = False
    weight: str | None = None
    is_late: bool = False
    norms_values: bool = False


PLAIN = Case("two-blocks", tokens=35)
EVERYTHING = Case(
    "fp8-pages-norms-head-dim-80-odd-group",
    heads=3,
    kv_heads=1,
    head_dim=80,
    page_size=4,
    dtype="bfloat16",
    pool="float8_e4m3fn",
    norms=True,
)
WIDE_AND_LATE = Case("wide-late", dtype="bfloat16", norms=True, weight="float32", is_late=True)
VALUES = Case("values", dtype="bfloat16", norms=True, weight="float32", norms_values=True)
FAST = (PLAIN, EVERYTHING, WIDE_AND_LATE, VALUES)
SLOW = (
    Case("norms-pages-of-8", norms=True, page_size=8, dtype="bfloat16"),
    Case("head-dim-80-odd-group", tokens=3, heads=3, kv_heads=1, head_dim=80, norms=True),
    Case("fp8-pool", dtype="bfloat16", pool="float8_e4m3fn", page_size=4),
    Case("several-blocks", tokens=70, heads=8, head_dim=64),
    Case("one-token", tokens=1),
    Case("mha", heads=3, kv_heads=3, head_dim=64, dtype="bfloat16"),
    Case("head-dim-96", head_dim=96, dtype="bfloat16"),
    Case("head-dim-128", tokens=9, heads=8, head_dim=128, dtype="bfloat16", page_size=16, norms=True),
    Case("head-dim-256", tokens=3, head_dim=256),
    Case("head-dim-512", tokens=3, head_dim=512, norms=True, norms_values=True),
    Case("group-of-7", heads=14, kv_heads=2, norms=True),
    Case("fp8-e5m2", pool="float8_e5m2"),
    Case("f32-activations-bf16-pool", pool="bfloat16", norms=True),
    Case("pages-of-64", page_size=64),
    dataclasses.replace(WIDE_AND_LATE, name="wide", is_late=False),
    dataclasses.replace(WIDE_AND_LATE, name="late", weight=None, head_dim=64),
    dataclasses.replace(WIDE_AND_LATE, name="late-float32", dtype="float32", head_dim=80),
    dataclasses.replace(VALUES, name="values-late-fp8", is_late=True, head_dim=80, pool="float8_e4m3fn"),
    dataclasses.replace(VALUES, name="values-float32", dtype="float32", head_dim=64),
)
LONG = ("one-token", "mha", "head-dim-96", "head-dim-256", "head-dim-512", "group-of-7", "pages-of-64")


def in_ci_or_long(case: Case) -> Any:
    return pytest.param(case, marks=[pytest.mark.long] if case.name in LONG else [], id=case.name)


def is_native(case: Case) -> bool:
    """Whether a CPU has machine code for the case."""
    return case.head_dim % 32 == 0 and case.pool in (None, "float32", "bfloat16")


class Arrays(NamedTuple):
    """A case made into arguments."""

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    slots: jax.Array
    cache: LayerCache
    weights: tuple[jax.Array, jax.Array] | None


def make(case: Case) -> Arrays:
    """Random tensors; the last token is padding. The pool is full, but for its page 0."""
    rng = np.random.default_rng(len(case.name))

    def normal(*shape: int, scale: float = 1.0, dtype: str = case.dtype, clear: int = 0) -> jax.Array:
        made = (scale * rng.standard_normal(shape, dtype=np.float32)).astype(jnp.dtype(dtype))
        made[:clear] = 0
        return jax.device_put(made)

    num_pages = 2 + case.tokens // case.page_size
    slots = rng.permutation(np.arange(case.page_size, num_pages * case.page_size))[: case.tokens]
    slots = np.where(np.arange(case.tokens) == case.tokens - 1, 0, slots) if case.tokens > 1 else slots
    pool_shape = (num_pages, case.page_size, case.kv_heads, case.head_dim)
    angle = rng.uniform(-9, 9, size=(case.tokens, case.head_dim // 2)).astype(np.float32)
    joint = (case.heads // case.kv_heads + 2) * case.head_dim
    return Arrays(
        qkv=normal(case.tokens, case.kv_heads, joint, scale=3),
        cos=jax.device_put(np.cos(angle)),
        sin=jax.device_put(np.sin(angle)),
        slots=jax.device_put(slots.astype(np.int32)),
        cache=tuple(normal(*pool_shape, dtype=case.pool or case.dtype, clear=1) for _ in range(2)),
        weights=tuple(normal(case.head_dim, dtype=case.weight or case.dtype) for _ in "qk") if case.norms else None,
    )


@functools.cache
def compiled(
    implementation: str, *, is_late: bool = False, norms_values: bool = False, rounds_often: bool = False
) -> Callable[[Arrays], tuple[jax.Array, LayerCache]]:
    def call(a: Arrays) -> tuple[jax.Array, LayerCache]:
        norms = None if a.weights is None else HeadNorms(*a.weights, EPS, is_late, norms_values)
        return ops.rotate_and_write(a.qkv, a.cos, a.sin, a.slots, a.cache, norms=norms, implementation=implementation)

    return jax.jit(call, compiler_options=QUICKLY | ({"xla_allow_excess_precision": False} if rounds_often else {}))


def run(arrays: Arrays, implementation: str, **switches: bool) -> list[np.ndarray]:
    """Queries, keys and values as they come out, in float32."""
    queries, (keys, values) = compiled(implementation, **switches)(arrays)
    return [np.asarray(x).astype(np.float32) for x in (queries, keys, values)]


def check(case: Case, arrays: Arrays, implementation: str = "triton") -> None:
    """The kernel gives what the reference gives, to the rounding of one operation."""
    switches = {"is_late": case.is_late, "norms_values": case.norms_values}
    for name, got, expected, dtype in zip(
        ("queries", "keys", "values"),
        run(arrays, implementation, **switches),
        # XLA leaves out a rounding of norms if it may, as Triton's kernel does, and machine code does not.
        run(arrays, "reference", **switches, rounds_often=implementation == "native"),
        (case.dtype, case.pool or case.dtype, case.pool or case.dtype),
        strict=True,
    ):
        if name == "values" and not case.norms_values:
            np.testing.assert_array_equal(got, expected)
            continue
        eps = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(got, expected, rtol=2 * eps, atol=1e-6, err_msg=name)
        if dtype != "float32":
            assert np.mean(got != expected) < 0.02, f"{name} differ in more than a few last bits"


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_equals_the_reference(case: Case):
    check(case, make(case))


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_what_a_tpu_rotates_equals_the_reference(case: Case):
    given, norms = make(case), None
    if given.weights is not None:
        norms = HeadNorms(*given.weights, EPS, case.is_late, case.norms_values)
    qkv = given.qkv.at[1, 0, -3].set(jnp.inf)  # a value

    def expected(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries, *new = reference_write.rotated(qkv, cos, sin, norms)
        return queries, jnp.stack(reference_write.storable(jnp.ones(len(qkv), jnp.int32), *new), axis=2)

    mine = functools.partial(vmem_rotate.rotated, norms=norms, interpret=True)
    results = (jax.jit(each, compiler_options=QUICKLY)(qkv, *given[1:3]) for each in (mine, expected))
    eps = float(ml_dtypes.finfo(case.dtype).eps)
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(wanted), rtol=2 * eps, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", [in_ci_or_long(case) for case in SLOW])
def test_equals_the_reference_in_every_shape(case: Case):
    """Shapes that differ in one number from another are long."""
    check(case, make(case))


@pytest.mark.parametrize("case", [PLAIN, WIDE_AND_LATE, VALUES, *SLOW[:1]], ids=lambda case: case.name)
def test_machine_code_equals_the_reference(case: Case):
    check(case, make(case), "native")


@pytest.mark.slow
@pytest.mark.parametrize("case", [in_ci_or_long(case) for case in SLOW[1:] if is_native(case)])
def test_machine_code_equals_the_reference_in_every_shape(case: Case):
    """Shapes that differ in one number from another are long."""
    check(case, make(case), "native")


@pytest.mark.parametrize("implementation", ["triton", "native"])
@pytest.mark.parametrize("pool", ["float32", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_what_is_not_finite_becomes_a_key_of_nan_and_a_value_of_zeros(pool: str, implementation: str):
    if implementation == "native" and pool != "float32":
        pytest.skip("8 bits are for the reference")
    case = dataclasses.replace(PLAIN, pool=pool)
    arrays = make(case)
    value = case.heads // case.kv_heads + 1
    bad = np.array(arrays.qkv).reshape(case.tokens, case.kv_heads, -1, case.head_dim)
    bad[1, 0, value, 3] = np.nan
    bad[2, 1, value, 0] = -np.inf
    bad[3, 0, value - 1, 5] = np.nan  # a key: stays what it is
    bad[4, 1, 0, 7] = np.inf  # a query
    bad[-1] = np.nan  # padding, which goes to slot 0
    arrays = arrays._replace(qkv=jnp.asarray(bad.reshape(arrays.qkv.shape)))
    got, expected = run(arrays, implementation), run(arrays, "reference")
    for mine, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-6, atol=1e-6)
    _, keys, values = (x.reshape(-1, *x.shape[-2:]) for x in got)
    slots = np.asarray(arrays.slots)
    assert np.isnan(keys[slots[1], 0]).all()
    assert not values[slots[1], 0].any()
    assert np.isfinite(keys[slots[1], 1]).all(), "another head of the same token"
    assert np.isfinite(values).all()
    assert not keys[0].any()


def test_a_key_of_nan_stays_one_in_an_8_bit_pool_where_minimum_and_maximum_drop_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jnp, "clip", lambda x, least, most: jnp.fmin(jnp.fmax(x, least), most))  # as Triton does
    case = Case("fp8-nan", tokens=2, kv_heads=1, heads=1, pool="float8_e4m3fn")
    arrays = make(case)
    bad = np.array(arrays.qkv).reshape(case.tokens, 1, 3, case.head_dim)
    bad[0, 0, 2, 3] = np.nan  # a value
    _, keys, values = run(arrays._replace(qkv=jnp.asarray(bad.reshape(arrays.qkv.shape))), "triton")
    assert np.isnan(keys[arrays.slots[0], 0, 0]).all()
    assert np.isfinite(values).all()


def test_too_large_numbers_take_the_largest_of_an_8_bit_pool():
    arrays = make(EVERYTHING)
    arrays = arrays._replace(qkv=arrays.qkv * 1e4)
    _, keys, values = run(arrays, "triton")
    assert np.isfinite(keys).all()
    assert np.abs(values).max() == 448


def test_what_the_kernel_cannot_do_is_left_to_the_reference():
    arrays = make(Case("one-pool"))
    interleaved = jnp.concatenate(arrays.cache, axis=2)
    for implementation in ("triton", "native"):
        with pytest.raises(NotImplementedError, match="arrays of their own"):
            run(arrays._replace(cache=(interleaved,)), implementation)
    by_head = jnp.zeros((7, 2, 1, 1, 64))
    queries, _ = jax.eval_shape(ops.rotate_and_write, arrays.qkv, arrays.cos, arrays.sin, arrays.slots, (by_head,))
    assert queries.shape == (5, 4, 32)
    shape = jax.ShapeDtypeStruct
    too_large = (shape((2**25, 1, 2, 48), "float8_e4m3fn"),) * 2
    with pytest.raises(NotImplementedError, match=r"2147483648 numbers of a pool of float8_e4m3fn, but got 3221225472"):
        jax.eval_shape(
            lambda cache: rotate_and_write.rotate_and_write(
                jnp.zeros((1, 2, 4 * 48)), jnp.zeros((1, 24)), jnp.zeros((1, 24)), arrays.slots[:1], cache, None
            ),
            too_large,
        )
