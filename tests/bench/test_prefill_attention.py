"""The comparison of attention of chunks runs where there is no GPU, and notices a side that is wrong."""

import functools

import jax
import pytest

from bench import prefill_attention

measure = functools.partial(prefill_attention.measure, heads=2, kv_heads=1, count=1)
small = functools.partial(measure, 32, "float32", head_dim=16)


@pytest.mark.parametrize(
    ("cached", "sides"),
    [(16, ("xla", "triton", "mosaic")), (0, ("xla", "triton pages of 16"))],
    ids=["after 16", "first"],
)
def test_every_side_that_a_cpu_can_run_gives_the_same_attention(
    cached: int, sides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prefill_attention, "QUEUED", 1)
    samples = measure(128, "bfloat16", cached=cached, head_dim=64, sides=sides)
    assert list(samples) == list(sides)
    assert all(milliseconds > 0 for side in samples.values() for milliseconds in side)


def test_a_cpu_measures_what_is_compiled_for_it():
    assert list(small()) == ["xla"]


def test_what_a_machine_lacks_is_left_out(capsys: pytest.CaptureFixture[str]):
    assert list(measure(128, "float32", head_dim=16, sides=("xla", *prefill_attention.OPTIONAL))) == ["xla"]
    said = capsys.readouterr().err
    assert all(f"without {name}" in said for name in prefill_attention.OPTIONAL)


def test_scores_that_would_fill_the_memory_are_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill_attention, "MAX_SCORES", 2 * 32**2 - 1)
    assert not small()


def test_a_side_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def without_mask(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(queries, keys, values)

    monkeypatch.setattr(prefill_attention, "_by_xla", without_mask)
    with pytest.raises(ArithmeticError, match="xla"):
        small(sides=("triton", "xla"))
